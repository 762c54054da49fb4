//! What an operator does: start, look, stop.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http;
use microserving_harness::{Cluster, ClusterOptions, binary_dir};
use microserving_tests::{path_or_skip, prompt};
use serde_json::json;

#[test]
fn sigterm_finishes_what_runs_and_takes_nothing_new() -> Result<()> {
    let mut cluster = Cluster::start(&ClusterOptions::toy(1).engine_args(["--toy-step-ms", "20"]))?;
    let url = cluster.engines()[0].url().to_owned();
    let body = json!({"prompt": prompt(20, 1), "max_tokens": 60, "stream": true, "ignore_eos": true});
    let mut stream = http::post_stream(&format!("{url}/v1/completions"), &[], &body)?;
    stream.next_event()?.context("no first event")?;
    let stopping = std::thread::spawn(move || -> Result<_> {
        let status = cluster.engines_mut()[0].stop(Duration::from_secs(20))?;
        Ok((status, cluster))
    });
    let mut text = 0;
    while let Some(event) = stream.next_event()? {
        ensure!(event.get("error").is_none(), "{event}");
        text += 1;
    }
    ensure!(text >= 55, "the stream was cut after {text} events");
    let (status, _cluster) = stopping.join().expect("no panic")?;
    ensure!(status.success(), "the engine ended with {status}");
    Ok(())
}

#[test]
fn print_config_round_trips() -> Result<()> {
    let engined = binary_dir()?.join("engined");
    let print = |args: &[&str]| -> Result<String> {
        let output = Command::new(&engined).args(args).env("MICROSERVING_LEASE_SECONDS", "7").output()?;
        ensure!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    };
    let first = print(&["--model", "toy", "--page-size", "8", "--print-config"])?;
    ensure!(first.contains("page_size = 8") && first.contains("lease_seconds = 7"), "{first}");
    let dir = std::env::temp_dir().join(format!("microserving-config-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let file = dir.join("engined.toml");
    std::fs::write(&file, &first)?;
    let second = print(&["--config", &file.display().to_string(), "--print-config"])?;
    let values = |text: &str| -> Vec<String> {
        let lines = text.lines().map(|line| line.split(" #").next().unwrap_or_default().trim().to_owned());
        lines
            .filter(|line| !line.is_empty() && !line.starts_with('#') && !line.starts_with("config"))
            .collect()
    };
    ensure!(values(&first) == values(&second), "{first}\n---\n{second}");
    std::fs::write(&file, "page_sise = 8\n")?;
    let output =
        Command::new(&engined).args(["--config", &file.display().to_string(), "--print-config"]).output()?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && error.contains("page_sise"), "{error}");
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}

#[test]
fn health_answers_while_the_engine_computes() -> Result<()> {
    let cluster = Cluster::start(&ClusterOptions::toy(1).engine_args(["--toy-step-ms", "300"]))?;
    let url = cluster.engines()[0].url().to_owned();
    let body = json!({"prompt": prompt(20, 1), "max_tokens": 8, "stream": true, "ignore_eos": true});
    let mut stream = http::post_stream(&format!("{url}/v1/completions"), &[], &body)?;
    stream.next_event()?;
    for path in ["health", "health/live", "health/ready", "metrics"] {
        let start = Instant::now();
        let answer = http::get(&format!("{url}/{path}"))?;
        ensure!(answer.status == 200, "{path}: {answer:?}");
        ensure!(
            start.elapsed() < Duration::from_millis(250),
            "{path} waited {:?} for a step",
            start.elapsed()
        );
    }
    while stream.next_event()?.is_some() {}
    Ok(())
}

#[test]
fn a_device_that_is_not_there_is_one_clear_line() -> Result<()> {
    let output =
        Command::new(binary_dir()?.join("engined")).args(["--model", "toy", "--device", "cuda"]).output()?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(2), "status {:?}: {error}", output.status);
    ensure!(error.trim().lines().count() == 1 && error.contains("cuda: not available ("), "{error}");
    Ok(())
}

/// On a machine with a GPU, and in a build that has it, this serves on the GPU instead, and says that.
#[test]
fn auto_serves_on_what_there_is_and_says_so() -> Result<()> {
    let Some(fixtures) = path_or_skip("MICROSERVING_FIXTURES", "the small model") else { return Ok(()) };
    let options = ClusterOptions::model(1, &fixtures.join("models/stories260K").display().to_string())
        .engine_args(["--device", "auto"]);
    let cluster = Cluster::start(&options)?;
    let url = cluster.engines()[0].url().to_owned();
    let body = json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    let answer = http::post(&format!("{url}/v1/completions"), &[], &body)?;
    ensure!(answer.status == 200, "{answer:?}");
    let log = cluster.engines()[0].log_tail();
    ensure!(log.contains("computing on the CPU") || log.contains("computing on a GPU"), "{log}");
    Ok(())
}

#[test]
fn a_router_without_engines_is_not_ready() -> Result<()> {
    let mut cluster = Cluster::start(&ClusterOptions::toy(1))?;
    let ready = format!("{}/health/ready", cluster.router().url());
    ensure!(http::status(&ready)? == 200, "it was waited for");
    cluster.engines_mut()[0].kill()?;
    let until = Instant::now() + Duration::from_secs(10);
    while http::status(&ready)? != 503 {
        ensure!(Instant::now() < until, "still ready without an engine");
        std::thread::sleep(Duration::from_millis(100));
    }
    ensure!(http::status(&ready.replace("ready", "live"))? == 200, "the router itself is well");
    Ok(())
}
