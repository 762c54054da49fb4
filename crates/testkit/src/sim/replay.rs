//! A load on modelled hardware: the real router and engines, with durations from a roofline, in virtual time.
//!
//! Nothing fails here and nothing is checked but that every request is answered: a replay is for its times. Requests arrive at random,
//! independently of each other (a Poisson process), with prompts that share nothing.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http_body_util::BodyExt;
use microserving_cost::{HardwareProfile, Profile};
use microserving_protocol::{CompletionRequest, Prompt, StreamOptions, TokenId};
use microserving_router::{
    EngineSpec, Pattern, PlacementPolicy, Randomness, Role, RouterConfig, RouterService,
};
use microserving_transport::LoopbackHub;
use tokio::time::{Instant, sleep, sleep_until};
use tower::ServiceExt;

use super::node;
use super::oracle::Oracle;
use super::wire::SimEngine;
use super::world::World;
use super::{SimOptions, TransferFaults};
use crate::Dice;

/// A load, and who serves it.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Draws arrivals and prompts.
    pub seed: u64,
    /// Requests a second, in the mean.
    pub rate: f64,
    /// Requests.
    pub num_requests: u32,
    /// Tokens of each prompt.
    pub prompt: u32,
    /// Tokens of each answer.
    pub output: u32,
    /// The pattern that serves them.
    pub pattern: Pattern,
    /// How the pattern's engines are chosen, where it does not choose them itself.
    pub placement: PlacementPolicy,
    /// The engines.
    pub roles: Vec<Role>,
    /// What each of them runs on.
    pub hardware: HardwareProfile,
}

impl ReplayOptions {
    /// Returns the load of prompts of 3000 tokens and answers of 100, on an engine that prefills and one that decodes, each of four H100.
    #[must_use]
    pub fn new(seed: u64, rate: f64, num_requests: u32, pattern: Pattern) -> Self {
        Self {
            seed,
            rate,
            num_requests,
            prompt: 3000,
            output: 100,
            pattern,
            placement: PlacementPolicy::LeastLoaded,
            roles: vec![Role::Prefill, Role::Decode],
            hardware: HardwareProfile::llama3_70b_fp8_h100_tp4(),
        }
    }

    /// Changes to two engines for any role.
    #[must_use]
    pub fn any_role(mut self, placement: PlacementPolicy) -> Self {
        self.roles = vec![Role::Any, Role::Any];
        self.placement = placement;
        self
    }
}

/// The times that clients saw, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplayReport {
    /// Requests that were not answered in whole.
    pub failed: u32,
    /// From arrival to the last token, sorted.
    pub completion: Vec<f64>,
    /// From arrival to the first token, sorted.
    pub first_token: Vec<f64>,
    /// Of each token after the first, the mean of each request, sorted.
    pub per_token: Vec<f64>,
}

impl ReplayReport {
    /// Returns the mean of some times.
    #[must_use]
    pub fn mean(times: &[f64]) -> f64 {
        times.iter().sum::<f64>() / times.len().max(1) as f64
    }

    /// Returns the time that so many of a hundred do not exceed.
    #[must_use]
    pub fn percentile(times: &[f64], percent: usize) -> f64 {
        let rank = (times.len() * percent).div_ceil(100).max(1);
        times.get(rank - 1).copied().unwrap_or(f64::NAN)
    }
}

/// Replays a load. The same options give the same report.
///
/// # Panics
/// If the pattern does not exist.
#[must_use]
pub fn replay(options: &ReplayOptions) -> ReplayReport {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without IO needs nothing from the system");
    runtime.block_on(serve(options))
}

async fn serve(options: &ReplayOptions) -> ReplayReport {
    let dice = Dice::new(options.seed);
    let world = world(options);
    let services =
        [tokio::spawn(Arc::clone(&world).run_network()), tokio::spawn(Arc::clone(&world).run_hub())];
    let lives = Arc::new(AtomicBool::new(true));
    let mut engines = Vec::new();
    for (engine, role) in options.roles.iter().enumerate() {
        node::start(&world, engine);
        engines.push(EngineSpec::new(Arc::new(SimEngine::new(&world, engine, &lives)), *role));
    }
    let config = RouterConfig {
        pattern: options.pattern.clone(),
        placement: options.placement,
        request_timeout: Duration::from_secs(3600),
        randomness: Randomness::seeded(options.seed),
        ..RouterConfig::new(engines)
    };
    let (service, tasks) = RouterService::start(config).expect("the pattern exists");
    while service.cluster().num_ready() < options.roles.len() {
        sleep(Duration::from_millis(10)).await;
    }
    let app = service.http();
    let (mut gaps, mut prompts) = (dice.split(1), dice.split(2));
    let mut arrival = Instant::now();
    let mut clients = Vec::new();
    for _ in 0..options.num_requests {
        // A throw in (0, 1]: the gaps of a Poisson process are distributed exponentially.
        let uniform = (gaps.below(1 << 53) + 1) as f64 / (1_u64 << 53) as f64;
        arrival += Duration::from_secs_f64(-uniform.ln() / options.rate);
        let prompt = (0..options.prompt).map(|_| TokenId(prompts.below(256) as u32)).collect();
        clients.push(tokio::spawn(client(app.clone(), arrival, prompt, options.output)));
    }
    let mut report = ReplayReport::default();
    for client in clients {
        match client.await {
            Ok(Some((first, whole))) => {
                report.first_token.push(first);
                report.completion.push(whole);
                report.per_token.push((whole - first) / f64::from(options.output.max(2) - 1));
            }
            Ok(None) | Err(_) => report.failed += 1,
        }
    }
    for times in [&mut report.completion, &mut report.first_token, &mut report.per_token] {
        times.sort_by(f64::total_cmp);
    }
    tasks.stop().await;
    services.iter().for_each(tokio::task::JoinHandle::abort);
    report
}

/// Sends one request when it is due; returns the seconds to its first and its last token if all of it came.
async fn client(app: Router, arrival: Instant, prompt: Vec<TokenId>, output: u32) -> Option<(f64, f64)> {
    sleep_until(arrival).await;
    let completion = CompletionRequest {
        max_tokens: Some(output.into()),
        ignore_eos: true,
        temperature: Some(0.0),
        stream: true,
        stream_options: Some(StreamOptions { include_usage: true, ..StreamOptions::default() }),
        ..CompletionRequest::new(Prompt::Tokens(prompt.into()))
    };
    let body = serde_json::to_vec(&completion).expect("a request of ours is JSON");
    let request = axum::http::Request::post("/v1/completions")
        .body(Body::from(body))
        .expect("method and path are fine");
    let Ok(response) = app.oneshot(request).await;
    if response.status() != 200 {
        return None;
    }
    let (mut body, mut first, mut text) = (response.into_body(), None, Vec::new());
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.ok()?.into_data() else { continue };
        first.get_or_insert_with(|| arrival.elapsed().as_secs_f64());
        text.extend_from_slice(&data);
    }
    let whole = arrival.elapsed().as_secs_f64();
    // The usage says that no token is missing; [DONE] that nothing went wrong behind it.
    let usage = format!("\"completion_tokens\":{output}");
    let text = String::from_utf8(text).ok()?;
    (text.contains(&usage) && text.trim_end().ends_with("[DONE]")).then_some((first?, whole))
}

fn world(options: &ReplayOptions) -> Arc<World> {
    let calm = SimOptions::calm();
    let sim = SimOptions {
        num_engines: options.roles.len(),
        page_size: 16,
        num_pages: 16_384,
        // A prompt is one step, as the hardware does best.
        max_batch_tokens: 8192,
        max_running: 256,
        lease: Duration::from_secs(600),
        transfers: TransferFaults { max_delay: Duration::ZERO, ..calm.transfers.clone() },
        hardware: Some(options.hardware.clone()),
        ..calm
    };
    let oracle = Oracle::new(node::toy_config(&sim), 1);
    World::new(options.seed, sim, LoopbackHub::new(), oracle)
}

/// Returns the profile that a simulated engine serves.
pub(crate) fn profile_of(hardware: &HardwareProfile) -> serde_json::Value {
    let profile = Profile::roofline(hardware, &[("loopback", 1e-6, 400e9)]);
    serde_json::from_str(&profile.to_json()).expect("a profile is JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 1;

    fn mean(rate: f64, options: fn(ReplayOptions) -> ReplayOptions, pattern: &str) -> f64 {
        let pattern = pattern.parse().expect("a pattern");
        let report = replay(&options(ReplayOptions::new(SEED, rate, 48, pattern)));
        assert_eq!(report.failed, 0, "seed {SEED}, rate {rate}");
        ReplayReport::mean(&report.completion)
    }

    /// Prompts of 3000 tokens on eight H100 in two groups. What must hold at a light and at a heavy load: disaggregation beats turns, and
    /// choosing request by request is no worse than the best fixed choice, which is another one at each.
    #[test]
    fn adaptive_is_as_good_as_the_best_fixed_pattern() {
        for rate in [4.0, 6.4] {
            let turns = |options: ReplayOptions| options.any_role(PlacementPolicy::RoundRobin);
            let parallel = mean(rate, turns, "data_parallel");
            let fixed =
                ["prefill_decode", "balanced:0.1"].map(|pattern| mean(rate, |options| options, pattern));
            let best = fixed.into_iter().fold(parallel, f64::min);
            let adaptive = mean(rate, |options| options, "adaptive");
            println!(
                "seed {SEED}, rate {rate}: turns {parallel:.3}, fixed {fixed:.3?}, adaptive {adaptive:.3} s"
            );
            assert!(adaptive <= best * 1.03, "seed {SEED}, rate {rate}: {adaptive}, best {best}");
            assert!(adaptive < parallel, "seed {SEED}, rate {rate}: {adaptive}, turns {parallel}");
        }
    }

    #[test]
    fn the_same_load_takes_the_same_time() {
        let options = ReplayOptions::new(7, 4.0, 12, Pattern::named("adaptive"));
        assert_eq!(replay(&options), replay(&options));
    }
}
