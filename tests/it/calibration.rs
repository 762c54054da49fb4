//! From measuring an engine to choosing by what it takes.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http;
use microserving_harness::{Cluster, ClusterOptions, binary_dir};
use microserving_tests::{Case, prompt};
use serde_json::Value;

fn folder(name: &str) -> Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("microserving-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

#[test]
fn an_engine_is_measured_and_a_router_predicts_by_it() -> Result<()> {
    let folder = folder("calibration")?;
    let file = folder.join("toy.json").display().to_string();
    let engined = binary_dir()?.join("engined");
    let mut command = Command::new(&engined);
    command.args(["--model", "toy", "--toy-step-ms", "2", "--calibrate", "--transport", "loopback"]);
    // Without a name it goes into the user's cache.
    command.env("XDG_CACHE_HOME", &folder);
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout)?;
    let cached =
        printed.lines().find_map(|line| line.strip_prefix("profile: ")).context("no file")?.to_owned();
    ensure!(cached.starts_with(&folder.display().to_string()), "{cached}");
    std::fs::rename(&cached, &file)?;

    let args = ["--toy-step-ms", "2", "--profile", &file];
    let mut cluster =
        Cluster::start(&ClusterOptions::toy(2).engine_args(args).router_args(["--pattern", "adaptive"]))?;
    let served: Value = http::get(&format!("{}/microserving/profile", cluster.engines()[0].url()))?.json()?;
    let written: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    ensure!(served == written, "{served}");
    for (seed, len) in [(1, 3), (2, 200), (3, 700)] {
        let case = Case {
            prompt: prompt(len, seed),
            max_tokens: 12,
            temperature: 0.0,
            seed: 1,
            salt: String::new(),
        };
        let alone = case.send(cluster.engines()[0].url(), None)?;
        let case = Case { salt: "routed".to_owned(), ..case };
        let routed = case.send(cluster.router().url(), None)?;
        ensure!(alone.token_ids == routed.token_ids, "{len} tokens: the pattern changed the answer");
    }
    let metrics = http::get(&format!("{}/metrics", cluster.router().url()))?.body;
    ensure!(metrics.contains("microserving_router_prediction_ratio{engine="), "{metrics}");
    cluster.wait_idle(std::time::Duration::from_secs(10))
}

#[test]
fn a_profile_that_cannot_be_used_is_refused_by_name() -> Result<()> {
    let file = folder("bad-profile")?.join("bad.json");
    std::fs::write(&file, r#"{"version": 9}"#)?;
    let file = file.display().to_string();
    for (daemon, args) in [
        ("engined", vec!["--model", "toy", "--listen", "127.0.0.1:0", "--profile", &file]),
        ("routerd", vec!["--engine", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--profile", &file]),
    ] {
        let output = Command::new(binary_dir()?.join(daemon)).args(args).output()?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success() && error.contains("profile"), "{daemon}: {error}");
        ensure!(error.contains("version is 9, must be 1"), "{daemon}: {error}");
    }
    let server = Cluster::start(&ClusterOptions::toy(1).engine_args(["--profile", "/nowhere/profile.json"]));
    ensure!(server.is_err(), "a named profile that is not there was ignored");
    Ok(())
}
