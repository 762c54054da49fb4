//! Every pattern returns the tokens of a single engine, and really does what it says.
//!
//! Real processes, KV over shared memory. Each row also asserts which tokens were matched, sent and computed, so that no
//! row passes without its transfer.

use std::path::Path;

use anyhow::{Result, ensure};
use microserving_harness::{Cluster, ClusterOptions};
use microserving_tests::{Case, PAGE_SIZE, Work, path_or_skip, prompt};

const PATTERNS: [&str; 5] =
    ["data_parallel", "prefill_decode", "balanced:0.1", "balanced:0.25", "balanced:0.5"];
const LENGTHS: [u32; 5] = [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 1000];
const SAMPLINGS: [(f64, u64); 2] = [(0.0, 0), (0.8, 4242)];

/// One cell of the matrix: a pattern, a prompt length, a number of clients, a way of sampling.
struct Cell {
    pattern: &'static str,
    num_tokens: u32,
    num_clients: u32,
    sampling: (f64, u64),
    max_tokens: u32,
}

impl Cell {
    /// Runs the cell and compares with one engine, asked directly, one request at a time.
    fn check(&self, cluster: &Cluster) -> Result<()> {
        let cases: Vec<Case> = (0..self.num_clients)
            .map(|client| Case {
                prompt: prompt(self.num_tokens, 1000 * self.num_tokens + client),
                max_tokens: self.max_tokens,
                temperature: self.sampling.0,
                seed: self.sampling.1 + u64::from(client),
                salt: format!(
                    "{}-{}-{}-{:?}-{client}",
                    self.pattern, self.num_tokens, self.num_clients, self.sampling
                ),
            })
            .collect();
        let answers: Vec<_> = std::thread::scope(|scope| {
            let router = cluster.router().url();
            let threads: Vec<_> =
                cases.iter().map(|case| scope.spawn(move || case.send(router, Some(self.pattern)))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a client does not panic")).collect()
        });
        for (case, answer) in cases.into_iter().zip(answers) {
            let answer = answer?;
            let alone = Case { salt: format!("alone-{}", case.salt), ..case };
            let wanted = alone.send(cluster.engines()[0].url(), None)?;
            let cell = format!(
                "{} {} tokens, {} clients, {:?}",
                self.pattern, self.num_tokens, self.num_clients, self.sampling
            );
            ensure!(
                answer.token_ids == wanted.token_ids,
                "{cell}: {:?} is not {:?}",
                answer.token_ids,
                wanted.token_ids
            );
            ensure!(answer.text == wanted.text, "{cell}: {:?} is not {:?}", answer.text, wanted.text);
            let work = Work::of(&answer)?;
            ensure!(work == Work::cold(self.pattern, self.num_tokens), "{cell}: {work:?}");
        }
        Ok(())
    }
}

/// The second turn of a chat: D holds the first turn's prompt and answer, P its prompt.
fn check_second_turn(
    cluster: &Cluster,
    pattern: &'static str,
    max_tokens: u32,
    sampling: (f64, u64),
) -> Result<()> {
    let first_tokens = 5 * PAGE_SIZE + 3;
    let salt = format!("turns-{pattern}-{sampling:?}");
    let case = |prompt: Vec<u32>, salt: &str| Case {
        prompt,
        max_tokens,
        temperature: sampling.0,
        seed: sampling.1,
        salt: salt.to_owned(),
    };
    let router = cluster.router().url();
    let first = case(prompt(first_tokens, 77), &salt).send(router, Some(pattern))?;
    let mut history = prompt(first_tokens, 77);
    history.extend(&first.token_ids);
    // The last sampled token was never fed back, so its KV does not exist.
    let kept = history.len() as u32 - 1;
    history.extend(prompt(2 * PAGE_SIZE + 5, 78));
    let len = history.len() as u32;
    let second = case(history.clone(), &salt).send(router, Some(pattern))?;
    let alone = case(history, &format!("alone-{salt}")).send(cluster.engines()[1].url(), None)?;
    ensure!(
        second.token_ids == alone.token_ids,
        "{pattern}: second turn {:?} is not {:?}",
        second.token_ids,
        alone.token_ids
    );

    let work = Work::of(&second)?;
    let matched = kept / PAGE_SIZE * PAGE_SIZE;
    let on_p = if pattern == "data_parallel" { 0 } else { (first_tokens - 1) / PAGE_SIZE * PAGE_SIZE };
    let wanted = match pattern {
        "data_parallel" => Work { matched, sent: 0, computed_on_p: 0, computed_on_d: len - matched },
        _ => Work { matched, sent: len - 1 - matched, computed_on_p: len - 1 - on_p, computed_on_d: 1 },
    };
    ensure!(work == wanted, "{pattern}: second turn {work:?}, expected {wanted:?}");
    ensure!(matched > 0 && (on_p > 0 || pattern == "data_parallel"), "nothing was matched");
    Ok(())
}

fn check_all(cluster: &Cluster, cells: impl Iterator<Item = Cell>) -> Result<()> {
    let mut failures = Vec::new();
    let mut num_cells = 0;
    for cell in cells {
        num_cells += 1;
        if let Err(error) = cell.check(cluster) {
            failures.push(format!("{error:#}"));
        }
    }
    ensure!(failures.is_empty(), "{} of {num_cells} cells fail:\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

/// The whole matrix.
fn matrix(max_tokens: u32) -> impl Iterator<Item = Cell> {
    PATTERNS.into_iter().flat_map(move |pattern| {
        LENGTHS.into_iter().flat_map(move |num_tokens| {
            [1, 8].into_iter().flat_map(move |num_clients| {
                SAMPLINGS.into_iter().map(move |sampling| Cell {
                    pattern,
                    num_tokens,
                    num_clients,
                    sampling,
                    max_tokens,
                })
            })
        })
    })
}

/// The part of the matrix that every run of the demo model does: each pattern, each length and each sampling occurs.
fn sample(max_tokens: u32) -> impl Iterator<Item = Cell> {
    let cells = [
        ("data_parallel", 1000, 1, 0),
        ("prefill_decode", 1, 1, 0),
        ("prefill_decode", PAGE_SIZE, 8, 1),
        ("prefill_decode", 1000, 1, 0),
        ("balanced:0.1", PAGE_SIZE + 1, 8, 0),
        ("balanced:0.25", PAGE_SIZE - 1, 1, 1),
        ("balanced:0.5", 1000, 1, 1),
    ];
    cells.into_iter().map(move |(pattern, num_tokens, num_clients, sampling)| Cell {
        pattern,
        num_tokens,
        num_clients,
        sampling: SAMPLINGS[sampling],
        max_tokens,
    })
}

#[test]
fn toy_whole_matrix() -> Result<()> {
    let mut cluster =
        Cluster::start(&ClusterOptions::toy(2).engine_args(["--transport", "shm", "--num-pages", "2048"]))?;
    check_all(&cluster, matrix(24))?;
    cluster.wait_idle(std::time::Duration::from_secs(10))
}

/// The rest of these tests take the wire that the router chooses.
#[test]
fn toy_sample_over_each_wire() -> Result<()> {
    for wire in ["rest", "grpc"] {
        let options = ClusterOptions::toy(2).engine_args(["--transport", "shm", "--num-pages", "2048"]);
        let mut cluster = Cluster::start(&options.wire(wire))?;
        check_all(&cluster, sample(24))?;
        for engine in 0..2 {
            let calls = crate::wires::grpc_calls(&cluster, engine)?;
            ensure!(
                (calls > 0) == (wire == "grpc"),
                "{wire}: engine {engine} was called {calls} times over gRPC"
            );
        }
        cluster.wait_idle(std::time::Duration::from_secs(10))?;
    }
    Ok(())
}

#[test]
fn toy_second_turn() -> Result<()> {
    let mut cluster = Cluster::start(&ClusterOptions::toy(2).engine_args([
        "--transport",
        "shm",
        "--checksum",
        "--num-pages",
        "2048",
    ]))?;
    for pattern in ["data_parallel", "prefill_decode"] {
        for sampling in SAMPLINGS {
            check_second_turn(&cluster, pattern, 40, sampling)?;
        }
    }
    cluster.wait_idle(std::time::Duration::from_secs(10))
}

fn demo_cluster(model: &Path) -> Result<Cluster> {
    Cluster::start(&ClusterOptions::model(2, &model.display().to_string()).engine_args([
        "--transport",
        "shm",
        "--threads",
        "1",
    ]))
}

/// `MICROSERVING_MATRIX` runs all of it instead of the sample.
#[test]
fn demo_model_matrix_sample() -> Result<()> {
    let Some(model) = path_or_skip("MICROSERVING_DEMO_MODEL", "the demo model") else { return Ok(()) };
    let mut cluster = demo_cluster(&model)?;
    if std::env::var_os("MICROSERVING_MATRIX").is_some() {
        check_all(&cluster, matrix(16))?;
    } else {
        check_all(&cluster, sample(16))?;
    }
    for pattern in ["data_parallel", "prefill_decode"] {
        check_second_turn(&cluster, pattern, 24, SAMPLINGS[0])?;
    }
    cluster.wait_idle(std::time::Duration::from_secs(10))
}
