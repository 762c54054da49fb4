//! Patterns under the same load, on modelled hardware in virtual time. Prints one JSON row a pattern and rate.
//!
//! `cargo run --release --package microserving-testkit --example patterns -- [REQUESTS] [SEED]`

#![allow(clippy::print_stdout, reason = "the rows are what it is for")]

use microserving_router::PlacementPolicy;
use microserving_testkit::sim::{ReplayOptions, ReplayReport, replay};

const RATES: [f64; 5] = [1.6, 3.2, 4.8, 5.6, 6.4];

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse().expect("a number"));
    let (num_requests, seed) = (numbers.next().unwrap_or(300), numbers.next().unwrap_or(1));
    let any = |options: ReplayOptions, placement| options.any_role(placement);
    for rate in RATES {
        let options = |pattern: &str| {
            ReplayOptions::new(seed.into(), rate, num_requests, pattern.parse().expect("a pattern"))
        };
        let runs = [
            ("data_parallel, round robin", any(options("data_parallel"), PlacementPolicy::RoundRobin)),
            ("data_parallel, least loaded", any(options("data_parallel"), PlacementPolicy::LeastLoaded)),
            ("prefill_decode", options("prefill_decode")),
            ("balanced:0.1", options("balanced:0.1")),
            ("adaptive", options("adaptive")),
            ("adaptive:free", any(options("adaptive:free"), PlacementPolicy::LeastLoaded)),
        ];
        for (name, options) in runs {
            let report = replay(&options);
            let row = serde_json::json!({
                "pattern": name,
                "rate": rate,
                "requests": num_requests,
                "seed": seed,
                "failed": report.failed,
                "mean_seconds": ReplayReport::mean(&report.completion),
                "p99_seconds": ReplayReport::percentile(&report.completion, 99),
                "mean_ttft_seconds": ReplayReport::mean(&report.first_token),
                "p99_ttft_seconds": ReplayReport::percentile(&report.first_token, 99),
                "mean_tpot_seconds": ReplayReport::mean(&report.per_token),
            });
            println!("{row}");
        }
    }
}
