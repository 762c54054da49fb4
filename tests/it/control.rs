//! What an operator changes while real processes serve.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http;
use microserving_harness::{Cluster, ClusterOptions, Daemon, binary_dir};
use microserving_tests::{prompt, until};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Sends a request to the admin API; returns the status and the answer.
fn send(url: &str, method: &str, headers: &[(&str, &str)], body: Option<&Value>) -> Result<(u16, Value)> {
    let answer = http::send(method, url, headers, body)?;
    let json = serde_json::from_str(&answer.body).unwrap_or(Value::Null);
    Ok((answer.status, json))
}

fn engine(name: &str) -> Result<Daemon> {
    let args = ["--model", "toy", "--engine-id", name].map(str::to_owned);
    let mut engine = Daemon::spawn(name, &binary_dir()?.join("engined"), &args, Duration::from_secs(20))?;
    engine.wait_ready(Duration::from_secs(60))?;
    Ok(engine)
}

#[test]
fn an_engine_joins_drains_and_leaves_while_requests_run() -> Result<()> {
    let options = ClusterOptions::toy(1).engine_args(["--toy-step-ms", "10"]);
    let mut cluster = Cluster::start(&options)?;
    let url = cluster.router().url().to_owned();
    let body = json!({"prompt": prompt(40, 1), "max_tokens": 60, "temperature": 0, "ignore_eos": true});
    let expected =
        http::post(&format!("{url}/v1/completions"), &[], &body)?.json::<Value>()?["choices"][0]["text"]
            .clone();

    let second = engine("second")?;
    let engines = format!("{url}/admin/v1/engines");
    let (status, joined) = send(&engines, "POST", &[], Some(&json!({"url": second.url()})))?;
    ensure!(status == 201, "{joined}");
    let id = joined["id"].as_u64().context("no id")?;
    until("it takes requests", || {
        Ok(http::get(&format!("{engines}/{id}"))?.json::<Value>()?["takes_requests"] == true)
    })?;
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (url, body) = (format!("{url}/v1/completions"), body.clone());
            std::thread::spawn(move || -> Result<Vec<Value>> {
                (0..3)
                    .map(|_| Ok(http::post(&url, &[], &body)?.json::<Value>()?["choices"][0]["text"].clone()))
                    .collect()
            })
        })
        .collect();
    until("it has requests", || {
        let shown: Value = http::get(&format!("{engines}/{id}"))?.json()?;
        Ok(shown["in_flight"].as_u64() > Some(0))
    })?;
    let (status, refused) = send(&format!("{engines}/{id}"), "DELETE", &[], None)?;
    ensure!(status == 409, "{status} {refused}");
    let (status, drained) = send(&format!("{engines}/{id}/drain"), "POST", &[], Some(&json!({})))?;
    ensure!(status == 200 && drained["draining"] == true, "{drained}");
    until("it is empty", || Ok(http::get(&format!("{engines}/{id}"))?.json::<Value>()?["in_flight"] == 0))?;
    let (status, removed) = send(&format!("{engines}/{id}"), "DELETE", &[], None)?;
    ensure!(status == 200, "{removed}");
    for client in clients {
        for text in client.join().expect("no panic")? {
            ensure!(text == expected, "{text} is not {expected}");
        }
    }
    cluster.wait_idle(Duration::from_secs(10))
}

#[test]
fn sighup_reads_the_file_again_and_a_bad_one_changes_nothing() -> Result<()> {
    let cluster = Cluster::start(&ClusterOptions::toy(2))?;
    let urls: Vec<&str> = cluster.engines().iter().map(Daemon::url).collect();
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("routerd.toml");
    std::fs::write(&file, format!("engine = [{:?}]\npattern = \"data_parallel\"\n", urls[0]))?;
    let args = ["--config".to_owned(), file.display().to_string()];
    let mut router =
        Daemon::spawn("reloaded", &binary_dir()?.join("routerd"), &args, Duration::from_secs(20))?;
    router.wait_ready(Duration::from_secs(30))?;
    let get =
        |path: &str| -> Result<Value> { http::get(&format!("{}/admin/v1/{path}", router.url()))?.json() };
    ensure!(get("config")?["revision"] == 1);

    let rules = r#"[{"pattern": "prefill_decode", "min_tokens": 32}]"#;
    let text = format!(
        "engine = [{:?}, {:?}]\npattern = \"balanced:0.5\"\nrules = '{rules}'\ndead_seconds = 7.5\nmax_in_flight = 9\n",
        urls[0], urls[1]
    );
    std::fs::write(&file, text)?;
    router.signal(Signal::HUP);
    until("it is read", || Ok(get("config")?["revision"] == 2))?;
    let config = get("config")?;
    ensure!(config["engines"].as_array().map(Vec::len) == Some(2), "{config}");
    ensure!(config["pattern"] == json!({"name": "balanced", "ratio": 0.5}), "{config}");
    ensure!(
        config["rules"][0]["min_tokens"] == 32 && config["thresholds"]["dead_seconds"] == 7.5,
        "{config}"
    );
    ensure!(get("audit")?["audit"][0]["who"] == "SIGHUP");
    until("it says what needs a restart", || Ok(router.log_tail().contains("max_in_flight")))?;

    std::fs::write(&file, "pattern = \"nope\"\n")?;
    router.signal(Signal::HUP);
    until("it is refused", || Ok(get("audit")?["audit"][0]["outcome"] == "refused"))?;
    let after = get("config")?;
    ensure!(after == config, "{after}");
    let answer = http::post(
        &format!("{}/v1/completions", router.url()),
        &[],
        &json!({"prompt": prompt(20, 3), "max_tokens": 4}),
    )?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(())
}

#[test]
fn the_admin_api_has_a_token_and_an_address_of_its_own() -> Result<()> {
    let engine = engine("only")?;
    let dir = tempfile::tempdir()?;
    let token = dir.path().join("token");
    std::fs::write(&token, "open-sesame\n")?;
    let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let args = [
        "--engine",
        engine.url(),
        "--admin-listen",
        &free.to_string(),
        "--admin-token-file",
        &token.display().to_string(),
    ]
    .map(str::to_owned);
    let mut router =
        Daemon::spawn("guarded", &binary_dir()?.join("routerd"), &args, Duration::from_secs(20))?;
    router.wait_ready(Duration::from_secs(30))?;
    let main = format!("{}/admin/v1/config", router.url());
    let own = format!("http://{free}/admin/v1/config");
    ensure!(http::status(&main)? == 404, "the main address has no admin API");
    ensure!(http::status(&own)? == 401, "nobody without the token");
    let (status, config) = send(&own, "GET", &[("authorization", "Bearer open-sesame")], None)?;
    ensure!(status == 200 && config["engines"][0]["url"] == engine.url(), "{status} {config}");
    ensure!(http::status(&format!("http://{free}/v1/models"))? == 404, "clients have theirs");
    Ok(())
}

#[test]
fn an_admin_api_that_strangers_reach_needs_a_token() -> Result<()> {
    let routerd = binary_dir()?.join("routerd");
    let run = |args: &[&str]| -> Result<String> {
        let output = Command::new(&routerd)
            .args(["--engine", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"])
            .args(args)
            .output()?;
        ensure!(output.status.code() == Some(2), "{args:?}: {:?}", output.status);
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let error = run(&["--admin-listen", "0.0.0.0:0"])?;
    ensure!(error.contains("--admin-token"), "{error}");
    let error = run(&["--admin-token", "short"])?;
    ensure!(error.contains("8 or more"), "{error}");
    Ok(())
}
