//! Engines are killed at each point of each program: the one that is called, and each of the others, and the client gets the same tokens.
//!
//! A run without faults tells which points there are: before a call reaches its engine, when it is answered, when the answer is with the
//! router, and after each event of a stream. Then the request is made again for each point, and there the engine that is called or another one is
//! killed. A part of that matrix runs always, all of it with `MICROSERVING_MATRIX`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Daemon, OnPoint, Points, Proxy, binary_dir, http};
use microserving_tests::{load_documented, prompt};
use serde_json::{Value, json};

const ENGINES: usize = 3;
const PROMPT_TOKENS: u32 = 40;
const MAX_TOKENS: usize = 8;
/// The deadline of each request.
const DEADLINE: Duration = Duration::from_secs(20);
/// Runs more that a point gets which was not reached.
const TRIES: usize = 4;
/// Kills of one program that always run.
const SAMPLE: usize = 10;

/// Engines behind proxies, and a router that knows only the proxies.
struct Rig {
    engines: Arc<Mutex<Vec<Daemon>>>,
    proxies: Vec<Proxy>,
    router: Daemon,
    points: Points,
    plan: Arc<Mutex<Plan>>,
}

/// What is to happen in this run, and what has.
#[derive(Default)]
struct Plan {
    /// The point, and how many engines after the one whose point it is the victim comes: 0 is that engine itself.
    kill: Option<(String, usize)>,
    killed: Option<Killed>,
    /// Events of generations that have passed the proxies; each brings a token.
    events: usize,
    /// The call whose point it was went to the victim.
    hit: bool,
    seen: BTreeSet<String>,
}

/// An engine that is gone.
#[derive(Clone, Copy)]
struct Killed {
    victim: usize,
    at: Instant,
    /// Events that had passed by then: so many tokens may still come from what it had said.
    events: usize,
}

/// What the client got.
struct Got {
    tokens: Vec<u64>,
    finished: usize,
    error: Option<Value>,
    /// From the kill to the first token that another engine, or another try, has made.
    recovery: Option<Duration>,
    took: Duration,
}

fn start_engine(index: usize) -> Result<Daemon> {
    let args = [
        "--model",
        "toy",
        "--engine-id",
        &format!("engine-{index}"),
        "--transport",
        "shm",
        "--lease-seconds",
        "1",
        "--toy-step-ms",
        "2",
    ]
    .map(str::to_owned);
    let mut engine = Daemon::spawn(
        &format!("engine-{index}"),
        &binary_dir()?.join("engined"),
        &args,
        Duration::from_secs(20),
    )?;
    engine.wait_ready(Duration::from_secs(60))?;
    Ok(engine)
}

impl Rig {
    fn start(relay: bool) -> Result<Self> {
        let engines: Vec<Daemon> = (0..ENGINES).map(start_engine).collect::<Result<_>>()?;
        let urls: Vec<String> = engines.iter().map(|engine| engine.url().to_owned()).collect();
        let engines = Arc::new(Mutex::new(engines));
        let plan = Arc::new(Mutex::new(Plan::default()));
        let points = Points::default();
        let mut proxies = Vec::new();
        for (index, url) in urls.iter().enumerate() {
            proxies.push(Proxy::start(url, points.clone(), on_point(index, &engines, &plan))?);
        }
        let mut args = vec!["--request-timeout-seconds".to_owned(), DEADLINE.as_secs().to_string()];
        for proxy in &proxies {
            args.extend(["--engine".to_owned(), proxy.url().to_owned()]);
        }
        args.extend(["--min-engines".to_owned(), ENGINES.to_string()]);
        // The proxies read HTTP/1.1.
        args.extend(["--wire", "rest", "--relay", &relay.to_string()].map(str::to_owned));
        let mut router =
            Daemon::spawn("router", &binary_dir()?.join("routerd"), &args, Duration::from_secs(20))?;
        router.wait_ready(Duration::from_secs(30))?;
        Ok(Self { engines, proxies, router, points, plan })
    }

    /// Makes one request; kills where the plan says.
    fn run(&self, pattern: &str, run: usize, kill: Option<(String, usize)>) -> Result<Got> {
        self.points.reset();
        *lock(&self.plan) = Plan { kill, ..Plan::default() };
        let body = json!({
            "prompt": prompt(PROMPT_TOKENS, 11), "max_tokens": MAX_TOKENS, "temperature": 0.8, "seed": 4242,
            "repetition_penalty": 1.1, "ignore_eos": true, "stream": true, "return_token_ids": true,
            "cache_salt": format!("{pattern}-{run}"),
        });
        let begun = Instant::now();
        let headers = [("x-microserving-pattern", pattern)];
        let mut stream =
            http::post_stream(&format!("{}/v1/completions", self.router.url()), &headers, &body)?;
        let mut got = Got { tokens: vec![], finished: 0, error: None, recovery: None, took: Duration::ZERO };
        loop {
            let event = match stream.next_event() {
                Ok(Some(event)) => event,
                Ok(None) => break,
                // An error is the last event, without [DONE].
                Err(_) if got.error.is_some() => break,
                Err(error) => return Err(error),
            };
            if let Some(error) = event.get("error") {
                got.error = Some(error.clone());
                continue;
            }
            let choice = &event["choices"][0];
            let ids = choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64);
            let before = got.tokens.len();
            got.tokens.extend(ids);
            got.finished += usize::from(!choice["finish_reason"].is_null());
            if got.tokens.len() > before && got.recovery.is_none() {
                let plan = lock(&self.plan);
                let killed = plan.killed.filter(|killed| plan.hit && got.tokens.len() > killed.events);
                got.recovery = killed.map(|killed| killed.at.elapsed());
            }
        }
        got.took = begun.elapsed();
        Ok(got)
    }

    /// Starts what was killed again, and waits until the router gives it requests.
    fn revive(&self) -> Result<()> {
        let Some(Killed { victim, .. }) = lock(&self.plan).killed.take() else { return Ok(()) };
        let engine = start_engine(victim)?;
        self.proxies[victim].set_upstream(engine.url())?;
        lock(&self.engines)[victim] = engine;
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let metrics = http::get(&format!("{}/metrics", self.router.url()))?.body;
            let ready = metrics
                .lines()
                .filter(|line| line.starts_with("microserving_router_engine_ready{") && line.ends_with(" 1"));
            if ready.count() == ENGINES {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the router does not see engine {victim} again:\n{metrics}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until no engine holds anything.
    fn wait_idle(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(15);
        let urls: Vec<String> = lock(&self.engines).iter().map(|engine| engine.url().to_owned()).collect();
        for url in urls {
            loop {
                let state: Value = http::get(&format!("{url}/microserving/state"))?.json()?;
                let count =
                    |pointer: &str| state.pointer(pointer).and_then(Value::as_u64).unwrap_or(u64::MAX);
                let busy = ["/waiting", "/running", "/receiving", "/sending"];
                let held = ["/pages/owned", "/pages/reserved", "/pages/quarantined"];
                if busy.iter().chain(&held).all(|pointer| count(pointer) == 0)
                    && count("/pages/free") + count("/pages/cached") == count("/pages/total")
                {
                    break;
                }
                ensure!(Instant::now() < deadline, "{url} holds something: {state}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // Threads of the proxies hold the engines, too, and outlive the test.
        lock(&self.engines).clear();
    }
}

fn on_point(index: usize, engines: &Arc<Mutex<Vec<Daemon>>>, plan: &Arc<Mutex<Plan>>) -> OnPoint {
    let (engines, plan) = (engines.clone(), plan.clone());
    Arc::new(move |point: &str| {
        let mut plan = lock(&plan);
        plan.seen.insert(point.to_owned());
        plan.events += usize::from(point.contains(" event "));
        if let Some((_, distance)) = plan.kill.take_if(|(at, _)| at == point) {
            let victim = (index + distance) % ENGINES;
            lock(&engines)[victim].kill().expect("a child of ours can be killed");
            plan.killed = Some(Killed { victim, at: Instant::now(), events: plan.events });
            plan.hit = distance == 0;
        }
        // What a dead engine had said already does not get through.
        plan.killed.is_none_or(|killed| killed.victim != index)
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills at the points of a program, all of them or a sample in which each victim's turn comes.
fn check(pattern: &str) -> Result<()> {
    check_on(&Rig::start(false)?, pattern)
}

fn check_on(rig: &Rig, pattern: &str) -> Result<()> {
    let calm = rig.run(pattern, 0, None)?;
    ensure!(calm.tokens.len() == MAX_TOKENS && calm.finished == 1, "{:?} {:?}", calm.tokens, calm.error);
    // An abort is nobody's await: it is sent after the request has gone on, or away.
    let mut points: Vec<String> = std::mem::take(&mut lock(&rig.plan).seen).into_iter().collect();
    points.retain(|point| !point.starts_with("abort"));
    let kills: Vec<(String, usize)> =
        points.iter().flat_map(|point| (0..ENGINES).map(move |distance| (point.clone(), distance))).collect();
    let all = std::env::var_os("MICROSERVING_MATRIX").is_some();
    // Not a multiple of the number of engines, so that the victims take turns.
    let step = if all { 1 } else { (kills.len() / SAMPLE).max(1) | 1 };
    let (mut whole, mut prefixes, mut reached, mut recoveries) = (0, Vec::new(), 0, Vec::new());
    let mut runs = 1..;
    for (point, distance) in kills.iter().step_by(step) {
        let what = format!("{pattern}, engine {distance} from the call's killed at {point}");
        let mut run = || {
            let number = runs.next().context("runs do not end")?;
            rig.run(pattern, number, Some((point.clone(), *distance))).with_context(|| what.clone())
        };
        let mut got = run()?;
        // How many events come before a move depends on the moment, so that a run may not come to the point.
        for _ in 0..TRIES {
            if lock(&rig.plan).killed.is_some() {
                break;
            }
            got = run()?;
        }
        ensure!(
            calm.tokens.starts_with(&got.tokens),
            "{what}: {:?} is no beginning of {:?}",
            got.tokens,
            calm.tokens
        );
        ensure!(got.took < DEADLINE + Duration::from_secs(1), "{what}: took {:?}", got.took);
        if got.tokens.len() == calm.tokens.len() && got.error.is_none() {
            ensure!(got.finished == 1, "{what}: finished {} times", got.finished);
            whole += 1;
        } else {
            ensure!(got.error.is_some(), "{what}: neither whole nor an error: {:?}", got.tokens);
            prefixes.push(format!("{what}: {} tokens, then {:?}", got.tokens.len(), got.error));
        }
        reached += usize::from(lock(&rig.plan).killed.is_some());
        recoveries.extend(got.recovery);
        rig.revive().with_context(|| what)?;
    }
    rig.wait_idle()?;
    recoveries.sort();
    let quantile =
        |q: usize| recoveries.get((recoveries.len().max(1) - 1) * q / 100).copied().unwrap_or_default();
    eprintln!(
        "{pattern}: {} points, {} kills, {reached} reached, {whole} whole, {} beginnings; {} recoveries, p50 {:?} p99 {:?}",
        points.len(),
        whole + prefixes.len(),
        prefixes.len(),
        recoveries.len(),
        quantile(50),
        quantile(99),
    );
    // Two engines live whatever is killed, so nothing need be lost.
    ensure!(prefixes.is_empty(), "{}", prefixes.join("\n"));
    ensure!(reached > 0, "nothing was killed");
    Ok(())
}

#[test]
fn data_parallel() -> Result<()> {
    check("data_parallel")
}

#[test]
fn relayed() -> Result<()> {
    let rig = Rig::start(true)?;
    check_on(&rig, "data_parallel")?;
    let metrics = http::get(&format!("{}/metrics", rig.router.url()))?.body;
    let resumed = metrics.lines().find(|line| line.starts_with("microserving_router_resumed_total "));
    ensure!(resumed.is_some_and(|line| !line.ends_with(" 0")), "{resumed:?}");
    Ok(())
}

#[test]
fn prefill_decode() -> Result<()> {
    check("prefill_decode")
}

#[test]
fn balanced() -> Result<()> {
    check("balanced:0.25")
}

#[test]
fn adaptive() -> Result<()> {
    check("adaptive")
}

#[test]
fn adaptive_with_free_roles() -> Result<()> {
    check("adaptive:free")
}

#[test]
fn a_script() -> Result<()> {
    let rig = Rig::start(false)?;
    load_documented(rig.router.url(), "prefill_decode", "scripted")?;
    check_on(&rig, "scripted")
}

#[test]
fn migrate() -> Result<()> {
    check("migrate:3")
}
