//! Engines whose device half is another process: that one dies, and the engine goes on.

use std::cell::Cell;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http::{self, Timed};
use microserving_harness::{Cluster, ClusterOptions, Daemon, World, binary_dir, launcher};
use microserving_tests::{Case, Work, number, path_or_skip, prompt, until};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

fn case(num_tokens: u32, max_tokens: u32, salt: &str) -> Case {
    Case {
        prompt: prompt(num_tokens, num_tokens + 1),
        max_tokens,
        temperature: 0.8,
        seed: 99,
        salt: salt.to_owned(),
    }
}

/// Sends a case and calls `then` once, after so many pieces of text.
fn stream_and(case: &Case, url: &str, pieces: u32, then: impl FnOnce() -> Result<()>) -> Result<Timed> {
    let body = json!({
        "prompt": case.prompt, "max_tokens": case.max_tokens, "temperature": case.temperature, "seed": case.seed,
        "cache_salt": case.salt, "return_token_ids": true, "ignore_eos": true,
    });
    let (seen, then) = (Cell::new(0), Cell::new(Some(then)));
    let happened = Cell::new(Ok(()));
    let answer = http::timed_stream(&format!("{url}/v1/completions"), &[], &body, |_| {
        seen.set(seen.get() + 1);
        if seen.get() == pieces
            && let Some(then) = then.take()
        {
            happened.set(then());
        }
    })?;
    happened.into_inner()?;
    ensure!(then.take().is_none(), "the stream was over before anything happened");
    Ok(answer)
}

/// The process of an engine's worker, as `/health/ready` tells.
fn worker_of(engine: &str) -> Result<Pid> {
    let ready: Value = http::get(&format!("{engine}/health/ready"))?.json()?;
    let detail = ready["detail"].as_str().context("no detail")?;
    let (_, number) = detail.rsplit_once("; worker ").with_context(|| format!("no worker in {detail}"))?;
    Pid::from_raw(number.parse()?).context("no process has this number")
}

fn kill(worker: Pid) -> Result<()> {
    Ok(kill_process(worker, Signal::KILL)?)
}

fn until_ready(engine: &str) -> Result<()> {
    until("readiness", || Ok(http::status(&format!("{engine}/health/ready"))? == 200))
}

/// All pages are free or cached, and so many devices were lost.
fn ensure_balance(engine: &str, devices_lost: u64) -> Result<()> {
    let state: Value = http::get(&format!("{engine}/microserving/state"))?.json()?;
    let pages = &state["pages"];
    let kept = number(pages, "free")? + number(pages, "cached")?;
    ensure!(kept == number(pages, "total")?, "{state}");
    ensure!(number(&state["counters"], "devices_lost")? == devices_lost, "{state}");
    Ok(())
}

fn engine(name: &str, args: &[&str]) -> Result<Daemon> {
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    Daemon::spawn(name, &binary_dir()?.join("engined"), &args, Duration::from_secs(20))
}

fn ready_engine(name: &str, args: &[&str]) -> Result<Daemon> {
    let mut engine = engine(name, args)?;
    engine.wait_ready(PATIENCE)?;
    Ok(engine)
}

fn check_streams(args: &[&str], case: &Case) -> Result<()> {
    let alone = case.send(ready_engine("alone", args)?.url(), None)?;
    let mut apart = ready_engine("apart", &[args, &["--worker", "spawn"]].concat())?;
    let url = apart.url().to_owned();
    ensure!(case.send(&url, None)?.token_ids == alone.token_ids, "a worker computes something else");
    let incarnation = |engine: &str| -> Result<String> {
        let state: Value = http::get(&format!("{engine}/microserving/state"))?.json()?;
        Ok(state["incarnation"].as_str().context("no incarnation")?.to_owned())
    };
    let first = incarnation(&url)?;
    // Other contexts, so that nothing is found in the cache of before.
    for (round, pieces) in (1..).zip([1, 7, case.max_tokens - 3]) {
        let case = Case { salt: format!("{}-{round}", case.salt), ..case.clone() };
        let dead = Cell::new(None);
        let answer = stream_and(&case, &url, pieces, || {
            let worker = worker_of(&url)?;
            kill(worker)?;
            dead.set(Some(worker));
            until("that the engine waits", || Ok(http::status(&format!("{url}/health/ready"))? == 503))?;
            ensure!(http::status(&format!("{url}/health/live"))? == 200, "the engine itself is well");
            Ok(())
        })?;
        ensure!(
            answer.token_ids == alone.token_ids,
            "killed after {pieces}: {:?} is not {:?}",
            answer.token_ids,
            alone.token_ids
        );
        until_ready(&url)?;
        ensure!(Some(worker_of(&url)?) != dead.get(), "the dead one is shown");
        ensure_balance(&url, round)?;
    }
    ensure!(incarnation(&url)? != first, "addresses of before would be good");
    let last = worker_of(&url)?;
    let status = apart.stop(Duration::from_secs(20))?;
    ensure!(status.success(), "{status}: {}", apart.log_tail());
    ensure!(test_kill_process(last).is_err(), "the worker outlives its front");
    Ok(())
}

#[test]
fn streams_outlive_workers_that_are_killed() -> Result<()> {
    check_streams(&["--model", "toy", "--toy-step-ms", "20"], &case(100, 40, "toy"))
}

#[test]
fn streams_of_a_real_model_do_too() -> Result<()> {
    let Some(fixtures) = path_or_skip("MICROSERVING_FIXTURES", "the folder of models") else { return Ok(()) };
    let model = fixtures.join("models/stories260K");
    let model = model.to_str().context("a path that is no text")?;
    check_streams(&["--model", model, "--threads", "1"], &case(60, 60, "stories"))
}

/// A worker that cannot come up is its front's failure, in the worker's words.
#[test]
fn a_worker_that_is_refused_ends_its_front() -> Result<()> {
    let binary = binary_dir()?.join("engined");
    let run = |args: &[&str]| Command::new(&binary).args(args).stdin(Stdio::null()).output();
    let output = run(&["--model", "/no/such/model.gguf", "--worker", "spawn", "--listen", "127.0.0.1:0"])?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("/no/such/model.gguf"), "{said}");
    let output =
        run(&["--model", "toy", "--device", "cuda", "--worker", "spawn", "--listen", "127.0.0.1:0"])?;
    ensure!(output.status.code() == Some(2), "{output:?}");
    let output = run(&["--model", "toy", "--worker", "spawn", "--calibrate"])?;
    ensure!(output.status.code() == Some(2), "{output:?}");
    let output = run(&["worker", "--front", "/no/such/front.sock", "--nonsense"])?;
    ensure!(output.status.code() == Some(2), "{output:?}");
    Ok(())
}

/// Prefill and decode, both with workers: what one process makes of it. The worker of one dies within a transfer: what its peer sees
/// is a dead engine, what the client sees is its tokens.
#[test]
fn transfers_between_workers_are_those_of_engines() -> Result<()> {
    let options = ClusterOptions::toy(2).engine_args([
        "--worker",
        "spawn",
        "--transport",
        "shm",
        "--lease-seconds",
        "2",
        "--toy-step-ms",
        "10",
        "--max-batch-tokens",
        "32",
    ]);
    let mut cluster = Cluster::start(&options)?;
    for num_tokens in [1, 17, 500] {
        let alone = case(num_tokens, 12, "alone").send(cluster.engines()[0].url(), None)?;
        let pattern = "prefill_decode";
        let answer = case(num_tokens, 12, "pd").send(cluster.router().url(), Some(pattern))?;
        ensure!(answer.token_ids == alone.token_ids, "{:?} is not {:?}", answer.token_ids, alone.token_ids);
        let (work, wanted) = (Work::of(&answer)?, Work::cold(pattern, num_tokens));
        ensure!(work == wanted, "{work:?}, expected {wanted:?}");
    }
    let (p, d) = (cluster.engines()[0].url().to_owned(), cluster.engines()[1].url().to_owned());
    for (round, victim) in (1..).zip([&p, &d]) {
        let seq_id = format!("by-hand-{round}");
        let tokens = prompt(400, 5);
        let body = json!({"prompt": tokens, "end": -1, "seq_id": seq_id, "cache_salt": seq_id});
        let prepared: Value = http::post(&format!("{d}/microserving/prep_recv"), &[], &body)?.json()?;
        let send = json!({
            "prompt": tokens, "begin": 0, "end": 399, "kv_addr_info": prepared["kv_append_metadata"],
            "recv_rank": 0, "seq_id": seq_id, "cache_salt": seq_id,
        });
        let start = json!({
            "prompt": tokens, "begin": 399, "seq_id": seq_id, "max_tokens": 12, "temperature": 0,
            "timeout_seconds": 30, "cache_salt": seq_id,
        });
        let alone = json!({"prompt": tokens, "max_tokens": 12, "temperature": 0, "cache_salt": "alone"});
        let alone: Value = http::post(&format!("{p}/v1/completions"), &[], &alone)?.json()?;
        let (sent, started) = std::thread::scope(|scope| -> Result<_> {
            let sending = scope.spawn(|| http::post(&format!("{p}/microserving/remote_send"), &[], &send));
            until("the sender sends", || {
                let state: Value = http::get(&format!("{p}/microserving/state"))?.json()?;
                Ok(number(&state, "sending")? > 0)
            })?;
            let starting =
                scope.spawn(|| http::post(&format!("{d}/microserving/start_generate"), &[], &start));
            // It waits for its data.
            std::thread::sleep(Duration::from_millis(30));
            kill(worker_of(victim)?)?;
            Ok((sending.join().expect("no panic")?, starting.join().expect("no panic")?))
        })?;
        ensure!(sent.status >= 400, "nobody could read it: {sent:?}");
        let started: Value = started.json()?;
        ensure!(started["choices"][0]["text"] == alone["choices"][0]["text"], "{started} is not {alone}");
        until_ready(victim)?;
    }
    cluster.wait_idle(Duration::from_secs(20))?;
    ensure_balance(&p, 1)?;
    ensure_balance(&d, 1)?;
    // The new ones find each other.
    let again = case(300, 12, "again");
    let alone = case(300, 12, "again-alone").send(&p, None)?;
    let answer = again.send(cluster.router().url(), Some("prefill_decode"))?;
    ensure!(answer.token_ids == alone.token_ids, "{:?} is not {:?}", answer.token_ids, alone.token_ids);
    ensure!(Work::of(&answer)?.sent == 299, "{:?}", answer.stats);
    Ok(())
}

/// A worker that others start, at a socket.
fn start_worker(socket: &Path, log: &Path) -> Result<Child> {
    let sink = File::create(log)?;
    Command::new(binary_dir()?.join("engined"))
        .args(["worker", "--front"])
        .arg(socket)
        .stdin(Stdio::null())
        .stdout(sink.try_clone()?)
        .stderr(sink)
        .spawn()
        .context("cannot start a worker")
}

#[test]
fn a_front_waits_for_workers_that_others_start() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (socket, log) = (folder.path().join("front.sock"), folder.path().join("log"));
    let place = socket.to_str().context("a path that is no text")?;
    // A worker may come first.
    let mut worker = start_worker(&socket, &log)?;
    let mut front = engine("front", &["--model", "toy", "--toy-step-ms", "20", "--worker", place])?;
    front.wait_ready(PATIENCE)?;
    let url = front.url().to_owned();
    ensure!(worker_of(&url)?.as_raw_nonzero().get().unsigned_abs() == worker.id());
    let second = engine("second", &["--model", "toy", "--worker", place]);
    ensure!(second.is_err_and(|error| format!("{error:#}").contains("another front waits there")));

    let case = case(60, 30, "others");
    let alone = case.send(&url, None)?;
    let case = Case { salt: "again".into(), ..case };
    let answer = stream_and(&case, &url, 9, || {
        worker.kill()?;
        worker.wait()?;
        until("that the engine waits", || {
            let ready = http::get(&format!("{url}/health/ready"))?;
            Ok(ready.status == 503 && ready.body.contains("waiting for a worker at"))
        })?;
        worker = start_worker(&socket, &log)?;
        Ok(())
    })?;
    ensure!(answer.token_ids == alone.token_ids, "{:?} is not {:?}", answer.token_ids, alone.token_ids);
    ensure_balance(&url, 1)?;
    let status = front.stop(Duration::from_secs(20))?;
    ensure!(status.success(), "{status}: {}", front.log_tail());
    until("the worker's end", || Ok(worker.try_wait()?.is_some()))?;
    let status = worker.wait()?;
    ensure!(status.success(), "{status}: {}", std::fs::read_to_string(&log)?);
    Ok(())
}

/// A launcher whose elements are workers; killed when dropped.
struct Launched {
    child: Child,
    log: std::path::PathBuf,
}

impl Launched {
    fn start(fronts: &[&Path], log: &Path) -> Result<Self> {
        let sink = File::create(log)?;
        let mut command = launcher(256 << 20);
        for (rank, front) in fronts.iter().enumerate() {
            if rank > 0 {
                command.arg(":");
            }
            command
                .args(["-np", "1"])
                .arg(binary_dir()?.join("engined"))
                .args(["worker", "--front"])
                .arg(front);
        }
        let child = command.stdin(Stdio::null()).stdout(sink.try_clone()?).stderr(sink).spawn()?;
        Ok(Self { child, log: log.to_owned() })
    }

    fn wait(&mut self) -> Result<String> {
        until("the launcher's end", || Ok(self.child.try_wait()?.is_some()))?;
        Ok(std::fs::read_to_string(&self.log)?)
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::TERM);
            }
            let _ = self.child.wait();
        }
    }
}

/// A worker dies, and with it the world and the other workers. Their fronts go on in the next world, and their streams with them.
#[test]
fn fronts_outlive_a_world() -> Result<()> {
    if !World::can_start() {
        eprintln!("SKIPPED: oshrun is not installed (openmpi-bin, libopenmpi-dev)");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let sockets = ["p", "d"].map(|name| folder.path().join(name));
    let mut fronts = Vec::new();
    for (name, socket) in ["front-p", "front-d"].into_iter().zip(&sockets) {
        let place = socket.to_str().context("a path that is no text")?;
        let args = ["--model", "toy", "--transport", "openshmem", "--num-pages", "512", "--worker", place];
        let more = ["--engine-id", name, "--toy-step-ms", "25", "--lease-seconds", "2"];
        fronts.push(engine(name, &[&args[..], &more[..]].concat())?);
    }
    let sockets = [sockets[0].as_path(), sockets[1].as_path()];
    let mut first = Launched::start(&sockets, &folder.path().join("log-1"))?;
    for front in &mut fronts {
        front.wait_ready(PATIENCE)?;
    }
    let urls: Vec<String> = fronts.iter().map(|front| front.url().to_owned()).collect();
    let ready: Value = http::get(&format!("{}/health/ready", urls[1]))?.json()?;
    ensure!(ready["detail"].as_str().is_some_and(|text| text.contains("#recv_rank=1")), "{ready}");
    let mut args = vec!["--wire".to_owned(), "rest".to_owned()];
    for (rank, url) in urls.iter().enumerate() {
        args.extend(["--engine".to_owned(), format!("{url}#recv_rank={rank}")]);
    }
    let mut router = Daemon::spawn("router", &binary_dir()?.join("routerd"), &args, Duration::from_secs(20))?;
    router.wait_ready(PATIENCE)?;

    let disaggregated = |salt: &str| case(200, 12, salt).send(router.url(), Some("prefill_decode"));
    let (before, alone) = (disaggregated("before")?, case(200, 12, "alone").send(&urls[0], None)?);
    ensure!(before.token_ids == alone.token_ids, "{:?} is not {:?}", before.token_ids, alone.token_ids);
    ensure!(Work::of(&before)?.sent == 199, "{:?}", before.stats);

    let streams: Vec<Case> = (0..2).map(|number| case(50 + number, 60, "long")).collect();
    let wanted: Vec<Vec<u32>> = streams
        .iter()
        .map(|case| Ok(Case { salt: "wanted".into(), ..case.clone() }.send(&urls[0], None)?.token_ids))
        .collect::<Result<_>>()?;
    let workers = [worker_of(&urls[0])?, worker_of(&urls[1])?];
    let (got, second) = std::thread::scope(|scope| -> Result<_> {
        let running: Vec<_> =
            streams.iter().zip(&urls).map(|(case, url)| scope.spawn(move || case.send(url, None))).collect();
        for url in &urls {
            until("a stream runs", || {
                let state: Value = http::get(&format!("{url}/microserving/state"))?.json()?;
                Ok(number(&state, "running")? > 0)
            })?;
        }
        kill(workers[1])?;
        // All of them end, and only then can another world be formed.
        let said = first.wait()?;
        ensure!(said.contains("start all of its workers anew"), "{said}");
        for url in &urls {
            until("that the engine waits", || Ok(http::status(&format!("{url}/health/ready"))? == 503))?;
            ensure!(http::status(&format!("{url}/health/live"))? == 200, "the front itself is well");
        }
        let second = Launched::start(&sockets, &folder.path().join("log-2"))?;
        let got: Vec<Timed> =
            running.into_iter().map(|stream| stream.join().expect("no panic")).collect::<Result<_>>()?;
        Ok((got, second))
    })?;
    for (got, wanted) in got.iter().zip(&wanted) {
        ensure!(got.token_ids == *wanted, "{:?} is not {wanted:?}", got.token_ids);
    }
    for url in &urls {
        until_ready(url)?;
        ensure_balance(url, 1)?;
    }
    let after = disaggregated("after")?;
    ensure!(after.token_ids == alone.token_ids, "{:?} is not {:?}", after.token_ids, alone.token_ids);
    ensure!(Work::of(&after)?.sent == 199, "{:?}", after.stats);

    // The fronts go, and their workers leave the world together.
    drop(router);
    for front in &fronts {
        front.signal(Signal::TERM);
    }
    for front in &mut fronts {
        let status = front.wait(Duration::from_secs(30))?;
        ensure!(status.success(), "{status}: {}", front.log_tail());
    }
    let mut second = second;
    let said = second.wait()?;
    ensure!(said.matches("the front has left").count() == 2, "{said}");
    Ok(())
}
