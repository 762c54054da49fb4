//! Two routers over the same engines know nothing of each other, and the load does not pile up.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use microserving_harness::{Cluster, ClusterOptions, Daemon, binary_dir};
use microserving_tests::{Case, prompt};

/// Clients at once, of each router.
const CLIENTS: u32 = 16;
const ROUNDS: u32 = 4;

/// Sends rounds of requests, all clients at once, and returns how many each engine decoded.
fn load(router: &str, name: u32, pattern: &str, wanted: &[Vec<u32>]) -> Result<BTreeMap<String, u32>> {
    let mut spread = BTreeMap::new();
    for round in 0..ROUNDS {
        let outcomes: Vec<Result<String>> = std::thread::scope(|scope| {
            let send = |client: u32| {
                let answer = case(client, &format!("{name}-{round}-{client}")).send(router, Some(pattern))?;
                ensure!(
                    answer.token_ids == wanted[client as usize],
                    "client {client}: {:?}",
                    answer.token_ids
                );
                Ok(answer.stats["decode_engine"].as_str().context("no engine")?.to_owned())
            };
            let threads: Vec<_> = (0..CLIENTS).map(|client| scope.spawn(move || send(client))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a client does not panic")).collect()
        });
        for engine in outcomes {
            *spread.entry(engine?).or_default() += 1;
        }
    }
    Ok(spread)
}

fn case(client: u32, salt: &str) -> Case {
    Case {
        prompt: prompt(150 + client, 700 + client),
        max_tokens: 16,
        temperature: 0.0,
        seed: 1,
        salt: salt.to_owned(),
    }
}

#[test]
fn two_routers_serve_the_same_engines_without_piling_up() -> Result<()> {
    let args = ["--transport", "shm", "--num-pages", "4096"];
    let mut cluster = Cluster::start(&ClusterOptions::toy(4).engine_args(args))?;
    let engines = cluster
        .engines()
        .iter()
        .flat_map(|engine| ["--engine".to_owned(), engine.url().to_owned()])
        .collect::<Vec<_>>();
    let mut second =
        Daemon::spawn("router-2", &binary_dir()?.join("routerd"), &engines, Duration::from_secs(20))?;
    second.wait_ready(Duration::from_secs(20))?;
    let alone = cluster.engines()[0].url();
    let wanted: Vec<Vec<u32>> = (0..CLIENTS)
        .map(|client| {
            case(client, &format!("alone-{client}")).send(alone, None).map(|answer| answer.token_ids)
        })
        .collect::<Result<_>>()?;
    for pattern in ["data_parallel", "prefill_decode"] {
        let (first, other) = std::thread::scope(|scope| {
            let (router, second, wanted) = (cluster.router().url(), second.url(), &wanted);
            let other = scope.spawn(move || load(second, 2, pattern, wanted));
            (load(router, 1, pattern, wanted), other.join().expect("does not panic"))
        });
        let mut spread = first?;
        for (engine, count) in other? {
            *spread.entry(engine).or_default() += count;
        }
        let total: u32 = spread.values().sum();
        let (most, least) =
            (spread.values().max().copied().unwrap_or(0), spread.values().min().copied().unwrap_or(0));
        let fair = f64::from(total) / 4.0;
        println!(
            "two routers, {pattern}: {total} requests, most {most}, least {least}, fair {fair}: most is {:.2} of fair",
            f64::from(most) / fair
        );
        ensure!(total == 2 * ROUNDS * CLIENTS, "{total} requests");
        ensure!(spread.len() == 4, "{spread:?}: some engine got nothing");
        ensure!(f64::from(most) < 2.0 * fair, "{spread:?}: they herd");
    }
    second.stop(Duration::from_secs(10))?;
    cluster.wait_idle(Duration::from_secs(10))
}
