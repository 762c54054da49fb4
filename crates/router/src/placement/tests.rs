//! Several routers over the same engines.

use std::collections::VecDeque;

use microserving_client::HttpEngineClient;
use microserving_protocol::{
    CompletionRequest, CountersView, GenerationParams, PagesView, Prompt, SeqId, StateView, TokenId,
};

use super::*;
use crate::engine::{InFlight, Load};
use crate::{EngineSpec, Health, Role};

/// Time is counted in hundredths of a second.
const TICKS: u64 = 6_000;
const REPORT_EVERY: u64 = 50;
const PREFILLS_FOR: u64 = 10;
const SERVES_FOR: u64 = 500;

fn engine(number: u32) -> Arc<Engine> {
    let calls = HttpEngineClient::new("http://127.0.0.1:1").expect("an address, never called");
    Arc::new(Engine::new(number, EngineSpec::new(Arc::new(calls), Role::Any), Arc::default()))
}

fn request(number: u32, len: u32) -> Request {
    let tokens: Vec<_> = (0..len).map(|at| TokenId(number.wrapping_mul(7919).wrapping_add(at))).collect();
    let completion = CompletionRequest::new(Prompt::Tokens(tokens.clone().into()));
    let params: GenerationParams = completion.generation(0).expect("a plain request");
    Request::new(SeqId::new(format!("r{number}")), &completion, params, tokens)
}

fn state(running: u32, queued: u64) -> StateView {
    StateView {
        engine_id: "e".into(),
        incarnation: "1".into(),
        model: String::new(),
        max_context: 1000,
        page_size: 16,
        layout_fingerprint: String::new(),
        pages: PagesView::default(),
        waiting: 0,
        running,
        receiving: 0,
        sending: 0,
        queued_prefill_tokens: queued,
        draining: false,
        grpc: false,
        marks: false,
        counters: CountersView::default(),
    }
}

/// One router, with its own view of the engines.
struct Router {
    placement: Placement,
    engines: Vec<Arc<Engine>>,
    /// Its requests, with the time of their end.
    served: VecDeque<(u64, InFlight)>,
}

/// Lets routers place requests, each on what the engines told last and on its own count, and returns the largest number of requests placed on
/// one engine between two reports, over the mean one: averaged over all intervals.
fn spread(num_routers: u64, num_engines: u32, best: usize) -> f64 {
    let mut routers: Vec<_> = (0..num_routers)
        .map(|seed| {
            let index = Arc::new(PrefixIndex::new(1 << 20, seed));
            let mut placement = Placement::new(PlacementPolicy::Prefix, index, seed * 977 + 5);
            placement.best = best;
            Router { placement, engines: (0..num_engines).map(engine).collect(), served: VecDeque::new() }
        })
        .collect();
    let draws = Draws::new(11);
    let mut placed = vec![0_u32; num_engines as usize];
    let (mut sum, mut intervals) = (0.0, 0);
    let mut number = 0;
    for now in 0..TICKS {
        for router in &mut routers {
            while router.served.front().is_some_and(|(since, _)| since + SERVES_FOR <= now) {
                router.served.pop_front();
            }
            for (_, request) in
                router.served.iter_mut().rev().filter(|(since, _)| since + PREFILLS_FOR == now)
            {
                request.set_tokens(0);
            }
            if draws.below(12) == 0 {
                number += 1;
                let request = request(number, 100 + 100 * u32::try_from(draws.below(4)).expect("small"));
                let engine = router.placement.place(&router.engines, &request).expect("there are engines");
                let at = engine.number() as usize;
                placed[at] += 1;
                router.served.push_back((now, InFlight::new(engine, request.len())));
            }
        }
        if now % REPORT_EVERY == 0 {
            let total: u32 = placed.iter().sum();
            if now > 0 && total > 0 {
                let mean = f64::from(total) / f64::from(num_engines);
                sum += f64::from(placed.iter().copied().max().unwrap_or(0)) / mean;
                intervals += 1;
            }
            placed.fill(0);
            for at in 0..num_engines as usize {
                let loads: Vec<Load> = routers.iter().map(|router| router.engines[at].own_load()).collect();
                let requests = loads.iter().map(|load| load.requests).sum();
                let queued = loads.iter().map(|load| load.queued_tokens).sum();
                for (router, own) in routers.iter().zip(&loads) {
                    router.engines[at].set_state(state(requests, queued), *own);
                }
            }
        }
    }
    sum / f64::from(intervals)
}

#[test]
fn routers_with_stale_views_do_not_herd() {
    for (num_routers, num_engines) in [(4, 8), (8, 8), (8, 16), (16, 64)] {
        let (without, with) = (spread(num_routers, num_engines, 1), spread(num_routers, num_engines, BEST));
        eprintln!(
            "{num_routers} routers, {num_engines} engines: max/mean {without:.2} by the best alone, {with:.2} by two of the best four"
        );
        assert!(
            with < 0.9 * without,
            "{num_routers} routers, {num_engines} engines: {with} against {without}"
        );
    }
}

#[test]
fn of_many_engines_the_holder_is_found() {
    let index = Arc::new(PrefixIndex::new(1 << 20, 1));
    let placement = Placement::new(PlacementPolicy::Prefix, index.clone(), 1);
    let engines: Vec<_> = (0..500).map(|number| engine(3 * number)).collect();
    let _feeds: Vec<_> = engines.iter().map(|one| index.join(one.number()).expect("is new")).collect();
    let prompt = request(1, 800);
    placement.note(&prompt, &[(engines[321].clone(), 800)]);
    // A holder that may not be chosen is no use.
    index.note(Instant::now(), 1, 50, |depth| prompt.pages(16).get(depth));
    for _ in 0..50 {
        assert_eq!(placement.place(&engines, &prompt).map(|one| one.number()), Some(3 * 321));
    }
    let offered: Vec<_> = engines.iter().filter(|one| one.number() != 3 * 321).cloned().collect();
    assert_ne!(placement.place(&offered, &prompt).map(|one| one.number()), Some(3 * 321));
    assert!(placement.place(&[], &prompt).is_none());
}

/// How a request comes to be placed.
#[derive(Clone, Copy, Debug)]
enum As {
    Tokens,
    Text,
}

const WAYS: [(PlacementPolicy, As); 6] = [
    (PlacementPolicy::RoundRobin, As::Tokens),
    (PlacementPolicy::RoundRobin, As::Text),
    (PlacementPolicy::LeastLoaded, As::Tokens),
    (PlacementPolicy::LeastLoaded, As::Text),
    (PlacementPolicy::Prefix, As::Tokens),
    (PlacementPolicy::Prefix, As::Text),
];

/// Places 400 requests, of which the last 20 run at any time, and returns how many went to each engine.
fn shares((policy, way): (PlacementPolicy, As), engines: &[Arc<Engine>]) -> Vec<u32> {
    let placement = Placement::new(policy, Arc::new(PrefixIndex::new(1 << 20, 1)), 1);
    let mut counts = vec![0; engines.len()];
    let mut running = VecDeque::new();
    for number in 0..400 {
        let request = request(number, 64);
        let chosen = match way {
            As::Tokens => placement.place(engines, &request),
            As::Text => {
                placement.choose_by_text(engines, &|_| true, request.len(), &[]).map(|choice| choice.engine)
            }
        };
        let chosen = chosen.expect("there are engines");
        counts[chosen.number() as usize] += 1;
        running.push_back(InFlight::new(chosen, request.len()));
        if running.len() > 20 {
            running.pop_front();
        }
    }
    counts
}

#[test]
fn weights_are_shares() {
    for way in WAYS {
        let engines: Vec<_> = (0..3).map(engine).collect();
        engines[1].set_weight(2.0);
        let counts = shares(way, &engines);
        assert!((80..120).contains(&counts[0]) && (170..230).contains(&counts[1]), "{way:?}: {counts:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_came_back_gets_its_share_slowly() {
    for way in WAYS {
        let engines: Vec<_> = (0..3).map(engine).collect();
        for one in &engines {
            one.set_health(Health::Ready);
        }
        let counts = shares(way, &engines);
        assert!(counts.iter().all(|count| (120..147).contains(count)), "all are new: {way:?}: {counts:?}");
        engines[1].set_health(Health::Down);
        engines[1].set_health(Health::Ready);
        for (seconds, range) in [(0, 10..40), (5, 65..110), (5, 120..147)] {
            tokio::time::advance(std::time::Duration::from_secs(seconds)).await;
            let counts = shares(way, &engines);
            assert!(range.contains(&counts[1]), "{seconds} s later: {way:?}: {counts:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn only_an_engine_that_joins_others_starts_slowly() {
    let share = |one: &Arc<Engine>| one.effective_weight(Instant::now());
    let founding = engine(0);
    founding.set_health(Health::Ready);
    assert!(share(&founding) > 0.99);
    let late = engine(1);
    let calls = HttpEngineClient::new("http://127.0.0.1:1").expect("an address, never called");
    let joined = Engine::new(2, EngineSpec::new(Arc::new(calls), Role::Any), Arc::default());
    let joined = Arc::new(joined.joining());
    joined.set_health(Health::Ready);
    assert!(share(&joined) < 0.2);
    tokio::time::advance(std::time::Duration::from_secs(11)).await;
    // It loads its model before it is ready.
    late.set_health(Health::NotReady);
    late.set_health(Health::Ready);
    assert!(share(&late) < 0.2 && share(&joined) > 0.99);
}

#[test]
fn a_held_text_is_followed_among_many_engines() {
    let placement = Placement::new(PlacementPolicy::Prefix, Arc::new(PrefixIndex::new(1 << 20, 1)), 1);
    let engines: Vec<_> = (0..200).map(|number| engine(3 * number)).collect();
    // One of them holds more, but is not here.
    let holders = [(1, 800), (3 * 77, 700), (3 * 50, 100)];
    for _ in 0..50 {
        let chosen = placement.choose_by_text(&engines, &|_| true, 800, &holders).expect("there are engines");
        assert_eq!((chosen.engine.number(), chosen.hinted), (3 * 77, Some(700)));
    }
    assert!(placement.choose_by_text(&[], &|_| true, 800, &holders).is_none());
}

#[test]
fn a_peek_tells_the_next_choice_and_moves_nothing() {
    for policy in [PlacementPolicy::RoundRobin, PlacementPolicy::LeastLoaded, PlacementPolicy::Prefix] {
        let placement = Placement::new(policy, Arc::new(PrefixIndex::new(1 << 20, 1)), 1);
        let engines: Vec<_> = (0..40).map(engine).collect();
        let mut chosen = Vec::new();
        let mut running = Vec::new();
        for number in 0..60 {
            let request = request(number, 64);
            let peek = || {
                let choice = placement.peek(Job::Decode, &engines, &request).expect("there are engines");
                choice.engine.number()
            };
            let seen = [peek(), peek()];
            let next = placement.place(&engines, &request).expect("there are engines");
            assert_eq!(seen, [next.number(); 2], "{policy:?}");
            chosen.push(next.number());
            running.push(InFlight::new(next, 64));
        }
        chosen.dedup();
        assert!(chosen.len() > 30, "{policy:?}: {chosen:?}");
    }
}
