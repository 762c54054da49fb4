//! A cluster in virtual time, under seeded faults, with everything checked after every step.
//!
//! ```text
//!  router, programs ── calls ──▶ World: delays, loss, breaks ──▶ Engine::step ── toy executor
//!                                                                   │
//!                                  LoopbackHub: late, lost and reordered one-sided writes
//! ```
//!
//! The engines, the transport and the pages are the real ones. A run has two phases. While faults are on, anything may
//! fail, but nothing may be wrong: tokens, pages and attempts are checked all along. Then everything heals, and everything
//! must end: each request, and each page, lease and connection that it held.
//!
//! A report names its seed, and `run(seed, &SimOptions::swarm(seed))` shows the same run again, to the last event: programs
//! and router live on one paused clock, and every throw of the dice hangs on the seed alone.
//!
//! [`run`] is one run; [`run_every_point`] puts one death at each place of a run without faults, one after the other, and
//! [`run_pairs_of_points`] two at once.

mod front;
mod history;
mod node;
mod options;
mod oracle;
mod program;
mod replay;
mod report;
mod request;
mod spy;
mod stranger;
mod trouble;
mod wire;
mod world;

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use microserving_protocol::{Attempt, SamplingParams, TokenId};
use microserving_transport::{LoopbackFaults, LoopbackHub};
use tokio::task::JoinHandle;

pub use options::{NetworkFaults, SimOptions, TransferFaults};
pub use replay::{ReplayOptions, ReplayReport, replay};
pub use report::{Invariant, Report, Tally, Violation};

use self::front::Ended;
use self::node::Inspection;
use self::oracle::Oracle;
use self::program::{Failure, Program};
use self::request::{Pattern, Request, draw_prompt};
use self::world::World;
use crate::Dice;

/// One fault at one exact place of a run. Places are counted: every call sent, every answer and event sent back, every step
/// that computed something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPoint {
    /// Which place, from 0.
    pub point: u64,
    /// The engine to kill there; `None` kills the router.
    pub victim: Option<usize>,
}

/// An abort up to this attempt ends whatever lives of a request.
const LAST_ATTEMPT: Attempt = Attempt(1000);

/// How long everything may take to end once faults have stopped.
const SETTLE: Duration = Duration::from_secs(90);

/// Runs one simulation. The same seed and options give the same report.
///
/// # Panics
/// If the options cannot be run at all (no pages, no engines).
#[must_use]
pub fn run(seed: u64, options: &SimOptions) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without IO needs nothing from the system");
    runtime.block_on(simulate(seed, options.clone()))
}

/// Runs a small calm run once for each place in it and each victim, with that victim killed there; returns the reports of
/// runs in which something did not hold, and how many runs there were.
#[must_use]
pub fn run_every_point(seed: u64, options: &SimOptions) -> (Vec<Report>, u64) {
    let calm = run(seed, options);
    let mut bad = Vec::new();
    let mut num_runs = 0;
    let victims: Vec<_> = (0..options.num_engines).map(Some).chain([None]).collect();
    for point in 0..calm.num_points {
        for &victim in &victims {
            let options = SimOptions { faults_at: vec![FaultPoint { point, victim }], ..options.clone() };
            num_runs += 1;
            let report = run(seed, &options);
            if !report.is_ok() {
                bad.push(report);
            }
        }
    }
    if !calm.is_ok() {
        bad.push(calm);
    }
    (bad, num_runs)
}

/// Runs a small calm run so many times, each time with two deaths at places drawn at random; returns the reports of runs in
/// which something did not hold.
#[must_use]
pub fn run_pairs_of_points(seed: u64, options: &SimOptions, num_runs: u32) -> Vec<Report> {
    let num_points = run(seed, options).num_points;
    let mut dice = Dice::new(seed).split(7);
    let victims: Vec<_> = (0..options.num_engines).map(Some).chain([None]).collect();
    let mut draw = || FaultPoint { point: dice.below(num_points), victim: dice.pick(&victims) };
    let runs = (0..num_runs).map(|_| {
        let faults_at = vec![draw(), draw()];
        run(seed, &SimOptions { faults_at, ..options.clone() })
    });
    runs.filter(|report| !report.is_ok()).collect()
}

async fn simulate(seed: u64, options: SimOptions) -> Report {
    simulate_load(seed, options, draw_requests).await
}

/// Runs with the requests that `draw` draws.
async fn simulate_load(
    seed: u64,
    options: SimOptions,
    draw: impl FnOnce(&World, &mut Dice) -> Vec<Request>,
) -> Report {
    let dice = Dice::new(seed);
    let hub = LoopbackHub::with(transfer_faults(seed, &options), options.transfers.checksums);
    let longest = options.max_prompt + options.max_output + 1;
    let oracle = Oracle::new(node::toy_config(&options), longest);
    let world = World::new(seed, options, hub, oracle);
    let services =
        [tokio::spawn(Arc::clone(&world).run_network()), tokio::spawn(Arc::clone(&world).run_hub())];
    for engine in 0..world.options.num_engines {
        node::start(&world, engine);
    }
    world.start_router();
    let mut requests = draw(&world, &mut dice.split(3));
    requests.sort_by_key(|request| request.arrives);
    trouble::start(&world, &dice.split(4));
    if let Some(every) = world.options.stranger_every {
        tokio::spawn(stranger::knock(Arc::clone(&world), every, dice.split(8)));
    }
    let clients: Vec<_> = (0u64..)
        .zip(requests)
        .map(|(number, request)| spawn_client(&world, request, dice.split(1000 + number)))
        .collect();
    tokio::time::sleep_until(world.at(world.options.fault_phase)).await;
    settle(&world, clients, &dice).await;
    for service in services {
        service.abort();
    }
    world.dismiss_router();
    let state = world.state();
    Report {
        seed,
        trace_hash: state.trace_hash(),
        violations: state.violations.clone(),
        tally: state.tally,
        num_points: state.points,
        virtual_time: world.now(),
    }
}

fn transfer_faults(seed: u64, options: &SimOptions) -> LoopbackFaults {
    LoopbackFaults {
        seed,
        min_delay: Duration::ZERO,
        max_delay: options.transfers.max_delay,
        max_fence_delay: options.transfers.max_fence_delay,
        lose_writer: options.transfers.lose_writer,
        corrupt: options.transfers.corrupt,
    }
}

fn draw_requests(world: &World, dice: &mut Dice) -> Vec<Request> {
    (0..world.options.num_requests)
        .map(|number| {
            // By then the router has seen its engines.
            let arrives = dice.time(Duration::from_millis(50), world.options.fault_phase);
            let mut request = draw_request(world, dice, format!("request-{number}"));
            request.arrives = arrives;
            if dice.chance(world.options.cancel) {
                request.leaves_after = Some(dice.millis(0, 400));
            }
            request
        })
        .collect()
}

fn draw_request(world: &World, dice: &mut Dice, name: String) -> Request {
    let options = &world.options;
    let prompt = draw_prompt(dice, options.max_prompt);
    let max_output = dice.range(1, u64::from(options.max_output)) as u32;
    let sampling = if dice.chance(0.5) {
        SamplingParams::greedy()
    } else {
        SamplingParams {
            temperature: 0.8,
            seed: dice.throw(),
            repetition_penalty: 1.1,
            ..SamplingParams::default()
        }
    };
    let share = dice.pick(&[0.1, 0.25, 0.5, 1.0]);
    let by_router = dice.chance(options.by_router);
    let known_to_router =
        [Pattern::DataParallel, Pattern::PrefillDecode, Pattern::Balanced(share), Pattern::Move];
    let known_to_us =
        [Pattern::PrefillDecode, Pattern::Balanced(share), Pattern::TwoSenders, Pattern::Migrate];
    let pattern = if by_router { dice.pick(&known_to_router) } else { dice.pick(&known_to_us) };
    let salt: Arc<str> = if dice.chance(0.1) { "tenant".into() } else { "".into() };
    let mut oracle = world.oracle.lock().unwrap_or_else(PoisonError::into_inner);
    let reference = Arc::new(oracle.run(&prompt, &sampling, max_output, &salt));
    let prompt: Arc<[TokenId]> = prompt.into();
    if salt.is_empty() {
        world.state().prompts.push(Arc::clone(&prompt));
    }
    Request {
        name,
        prompt,
        sampling,
        max_output,
        salt,
        pattern,
        by_router,
        arrives: Duration::ZERO,
        leaves_after: None,
        reference,
    }
}

/// How a client's request ended, as the client sees it.
#[derive(Debug, PartialEq)]
enum Outcome {
    Done,
    Failed(Failure),
    /// By the real router.
    Refused(Ended),
    Left,
    RouterDied,
}

/// A client in a task of its own, which outlives the router's.
fn spawn_client(world: &Arc<World>, request: Request, dice: Dice) -> (String, JoinHandle<Outcome>) {
    let name = request.name.clone();
    let world = Arc::clone(world);
    let client = tokio::spawn(async move {
        tokio::time::sleep_until(world.at(request.arrives)).await;
        let outcome = if request.by_router {
            use_router(&world, request).await
        } else {
            use_program(&world, request, dice).await
        };
        if let Outcome::Refused(ended) = &outcome
            && world.options.must_answer
        {
            world.violate(Invariant::Ends, format!("a request was not answered: {ended:?}"));
        }
        let mut state = world.state();
        match outcome {
            Outcome::Done => state.tally.done += 1,
            Outcome::Failed(_) | Outcome::Refused(_) | Outcome::RouterDied => state.tally.failed += 1,
            Outcome::Left => state.tally.cancelled += 1,
        }
        outcome
    });
    (name, client)
}

async fn use_router(world: &Arc<World>, request: Request) -> Outcome {
    let ended = match request.leaves_after {
        None => Ok(front::ask(world, &request).await),
        Some(after) => tokio::time::timeout(after, front::ask(world, &request)).await,
    };
    match ended {
        Ok(Ended::Done) => Outcome::Done,
        Ok(Ended::RouterDied) => Outcome::RouterDied,
        Ok(ended) => Outcome::Refused(ended),
        Err(_) => Outcome::Left,
    }
}

async fn use_program(world: &Arc<World>, request: Request, dice: Dice) -> Outcome {
    let name = request.name.clone();
    let leaves_by_abort = dice.split(1).chance(0.5);
    let leaves_after = request.leaves_after;
    let program = tokio::spawn(Program::new(Arc::clone(world), request, dice).run());
    let router_task = program.abort_handle();
    world.state().router_tasks.push(router_task.clone());
    let left = async {
        match leaves_after {
            Some(after) => tokio::time::sleep(after).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        ended = program => match ended {
            Ok(Ok(())) => Outcome::Done,
            Ok(Err(failure)) => Outcome::Failed(failure),
            Err(_) => Outcome::RouterDied,
        },
        () = left => {
            if leaves_by_abort {
                // The streams stay open meanwhile: whatever they still yield is held against the engine.
                let all: Vec<_> = (0..world.options.num_engines).collect();
                program::abort(world, &name, &all, LAST_ATTEMPT).await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            router_task.abort();
            Outcome::Left
        }
    }
}

/// Heals everything and requires that everything ends, that new requests succeed, and that nothing is left.
async fn settle(world: &Arc<World>, clients: Vec<(String, JoinHandle<Outcome>)>, dice: &Dice) {
    heal(world);
    let deadline = world.at(world.now() + SETTLE);
    for (name, client) in clients {
        match tokio::time::timeout_at(deadline, client).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => world.violate(Invariant::NoPanic, format!("{name}: {error}")),
            Err(_) => world.violate(Invariant::Ends, format!("{name} did not end in {SETTLE:?}")),
        }
    }
    rest(world).await;
    probe(world, &mut dice.split(5)).await;
    rest(world).await;
    for engine in 0..world.options.num_engines {
        let Some(inspection) = inspect(world, engine).await else {
            world.violate(Invariant::Ends, format!("engine {engine} does not answer at rest"));
            continue;
        };
        for (invariant, complaint) in inspection.complaints() {
            world.violate(invariant, format!("engine {engine} at rest: {complaint}"));
        }
    }
    if let Some(leftovers) = world.router_leftovers() {
        world.violate(Invariant::LoadCounts, format!("the router still counts {leftovers}"));
    }
    // Nobody looks at engines any more, so no connection is open for that.
    world.dismiss_router();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let open = world.num_open_calls();
    if open > 0 {
        world.violate(Invariant::Ends, format!("{open} connections are still open"));
    }
}

fn heal(world: &Arc<World>) {
    world.hub.set_faults(LoopbackFaults::default());
    world.heal();
    for engine in 0..world.options.num_engines {
        node::start(world, engine);
    }
}

/// Waits until nothing is left in any engine, or every lease, transfer and fence must have come to its end.
async fn rest(world: &World) {
    let transfers = &world.options.transfers;
    let longest = world.options.lease * 3 + transfers.max_delay * 4 + transfers.max_fence_delay * 2;
    let limit = world.now() + longest + Duration::from_secs(2);
    // The router looks at its engines this often; it must have seen them healthy.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    while world.now() < limit {
        let mut at_rest = true;
        for engine in 0..world.options.num_engines {
            at_rest &=
                inspect(world, engine).await.is_some_and(|inspection| inspection.complaints().is_empty());
        }
        if at_rest {
            return;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Sends one request of each pattern; without faults and load each must be answered completely.
async fn probe(world: &Arc<World>, dice: &mut Dice) {
    let patterns = [
        (Pattern::DataParallel, true),
        (Pattern::PrefillDecode, true),
        (Pattern::Balanced(0.3), true),
        (Pattern::Move, true),
        (Pattern::DataParallel, false),
        (Pattern::PrefillDecode, false),
        (Pattern::TwoSenders, false),
        (Pattern::Migrate, false),
    ];
    for (number, (pattern, by_router)) in patterns.into_iter().enumerate() {
        if world.is_broken() {
            return;
        }
        let mut request = draw_request(world, dice, format!("probe-{number}"));
        (request.pattern, request.by_router) = (pattern, by_router);
        request.arrives = world.now();
        let (name, client) = spawn_client(world, request, dice.split(number as u64));
        match tokio::time::timeout(SETTLE, client).await {
            Ok(Ok(Outcome::Done)) => {}
            Ok(Ok(outcome)) => {
                world.violate(Invariant::Ends, format!("{name} ({pattern:?}) ended as {outcome:?}"));
            }
            Ok(Err(error)) => world.violate(Invariant::NoPanic, format!("{name}: {error}")),
            Err(_) => world.violate(Invariant::Ends, format!("{name} did not end in {SETTLE:?}")),
        }
    }
}

/// Asks an engine what is left in it; `None` if it does not answer.
async fn inspect(world: &World, engine: usize) -> Option<Inspection> {
    let (wanted, inspected) = tokio::sync::oneshot::channel();
    world.state().nodes[engine].inspection = Some(wanted);
    world.wakes[engine].notify_one();
    tokio::time::timeout(Duration::from_secs(10), inspected).await.ok()?.ok()
}

#[cfg(test)]
mod shift;
#[cfg(test)]
mod tests;
