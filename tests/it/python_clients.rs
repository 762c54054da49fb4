//! Clients that others wrote: the `openai` package, and the example client of MicroServing's documentation.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Cluster, ClusterOptions};
use microserving_tests::{number, path_or_skip, prompt};

#[test]
fn openai_package_against_the_router() -> Result<()> {
    let Some(python) = path_or_skip("MICROSERVING_PYTHON", "a Python with the openai package") else {
        return Ok(());
    };
    let cluster = Cluster::start(&ClusterOptions::toy(2))?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/openai_conformance.py");
    for pattern in ["data_parallel", "prefill_decode", "balanced:0.25"] {
        let base_url = format!("{}/v1", cluster.router().url());
        let output = Command::new(&python)
            .arg(&script)
            .args(["--base-url", &base_url, "--pattern", pattern])
            .output()?;
        let printed =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{pattern}:\n{printed}");
    }
    Ok(())
}

/// The published example, as printed: no key, no `debug_config`. D must compute the last token only.
#[test]
fn documented_example_client_uses_the_transfer() -> Result<()> {
    let Some(python) = path_or_skip("MICROSERVING_PYTHON", "a Python with aiohttp") else { return Ok(()) };
    let Some(fixtures) = path_or_skip("MICROSERVING_FIXTURES", "the folder of fixtures") else {
        return Ok(());
    };
    let cluster = Cluster::start(&ClusterOptions::toy(2))?;
    let page = std::fs::read_to_string(fixtures.join("seeds/000_5f62af00a829f0a0.txt"))
        .context("cannot read the page")?;
    let begin = page.find("import aiohttp").context("no example on the page")?;
    let code = page[begin..].split("Related Pages").next().unwrap_or_default();
    let tokens = prompt(100, 3);
    let [p, d] = [0, 1].map(|index| cluster.engines()[index].url().to_owned());
    let program =
        format!("import asyncio\n{code}\nasyncio.run(disaggregated_completion({tokens:?}, {p:?}, {d:?}))\n");
    let output = Command::new(python).args(["-c", &program]).output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let finished =
        printed.contains("'finish_reason': 'length'") || printed.contains("'finish_reason': 'stop'");
    ensure!(printed.lines().count() >= 2 && finished, "{printed}");
    let state = cluster.engine_state(1)?;
    let counters = state.get("counters").context("no counters")?;
    ensure!(number(counters, "prefill_tokens")? == 1, "D computed more than the last token: {state}");
    ensure!(number(counters, "bytes_received")? > 0, "nothing was received: {state}");
    Ok(())
}
