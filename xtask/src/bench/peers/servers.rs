//! Server against server: `llama-server` and our `engined` under the same load, and what candle alone would do with it.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::Daemon;
use microserving_harness::http::{self, Timed};
use serde_json::{Value, json};

use super::Subject;
use super::candle::Candle;
use super::llama::Llama;
use crate::bench::engine::percentile;
use crate::bench::release;
use crate::bench::row::Rows;
use crate::table;

/// Clients that send their next request when the last one's answer is whole.
const CLIENTS: usize = 8;
/// Requests of each client.
const ROUNDS: usize = 2;
/// Tokens that all prompts of a repeat begin with, as a system prompt would.
const SHARED: usize = 500;
/// Tokens of a prompt that no other has.
const OWN: usize = 12;
const OUTPUT: usize = 64;
/// Room of a sequence, in whole pages of both.
const CONTEXT: usize = 768;
/// What throughput over llama-server's should be at least, TTFT and TPOT over it at most.
const TARGETS: (f64, f64) = (2.5, 0.5);

/// What clients saw.
#[derive(Clone, Copy, Debug)]
pub(super) struct Served {
    pub(super) tokens_per_second: f64,
    /// Medians, seconds.
    pub(super) ttft: f64,
    pub(super) tpot: f64,
}

impl Served {
    pub(super) fn of(answers: &[(Duration, Duration)], elapsed: Duration) -> Self {
        let median = |part: &dyn Fn(&(Duration, Duration)) -> Duration| {
            let values: Vec<f64> = answers.iter().map(|answer| part(answer).as_secs_f64()).collect();
            percentile(&values, 50.0)
        };
        Self {
            tokens_per_second: (answers.len() * OUTPUT) as f64 / elapsed.as_secs_f64(),
            ttft: median(&|answer| answer.0),
            tpot: median(&|answer| answer.1),
        }
    }
}

/// A server with what it took to start it.
struct Started {
    daemon: Daemon,
    ready: Duration,
}

/// Runs the load on both servers in turns, then once on candle alone.
pub(super) fn run(subject: &Subject<'_>, repeats: usize, theirs: &Llama, rows: &mut Rows) -> Result<()> {
    let binaries = release(&["microserving-engined"])?;
    let begin = Instant::now();
    let daemon = theirs.serve(subject, CLIENTS, CONTEXT, free_port()?)?;
    let theirs = Started { daemon, ready: begin.elapsed() };
    let args: Vec<String> = [
        "--model".into(),
        subject.path.display().to_string(),
        "--threads".into(),
        subject.threads.to_string(),
        "--num-pages".into(),
        (CLIENTS * CONTEXT / 16).to_string(),
    ]
    .into();
    let begin = Instant::now();
    let mut daemon = Daemon::spawn("engined", &binaries.join("engined"), &args, Duration::from_secs(20))?;
    daemon.wait_ready(Duration::from_secs(120))?;
    let ours = Started { daemon, ready: begin.elapsed() };

    let vocab = vocabulary_bound(subject);
    let mut takes = Vec::new();
    for repeat in 0..repeats {
        println!(
            "{} with {} threads, servers: repeat {} of {repeats}",
            subject.name,
            subject.threads,
            repeat + 1
        );
        let (mut theirs_served, mut ours_served) = (None, None);
        for turn in 0..2 {
            if (repeat + turn) % 2 == 0 {
                theirs_served = Some(load(theirs.daemon.url(), repeat, vocab)?);
            } else {
                ours_served = Some(load(ours.daemon.url(), repeat, vocab)?);
            }
        }
        takes.extend(theirs_served.zip(ours_served));
    }
    let memory = (theirs.daemon.resident_bytes()?.1, ours.daemon.resident_bytes()?.1);
    let ready = (theirs.ready, ours.ready);
    drop((theirs, ours));
    let candle = match Candle::build().and_then(|candle| candle.serve(subject, &prompts(0, vocab), OUTPUT)) {
        Ok(served) => Some(served),
        Err(error) => {
            println!("SKIPPED: candle alone: {error:#}");
            None
        }
    };
    report(subject, &takes, candle, ready, memory);
    rows.push("peers", row(subject, &takes, candle, ready, memory))
}

/// Ids that every model's text tokens reach to; the last ones steer.
fn vocabulary_bound(subject: &Subject<'_>) -> usize {
    if subject.name.starts_with("demo") { 49_000 } else { 128_000 }
}

/// Returns the prompts of a repeat, in the order that they are sent; no repeat shares a prefix with another.
fn prompts(repeat: usize, vocab: usize) -> Vec<Vec<usize>> {
    let token = |seed: usize, at: usize| 1000 + (seed * 7919 + at * 104_729 + at * at * 31) % (vocab - 1000);
    let shared: Vec<usize> = (0..SHARED).map(|at| token(repeat + 1, at)).collect();
    let own = |number: usize| (0..OWN).map(move |at| token(1000 * (repeat + 1) + number, at + SHARED));
    (0..CLIENTS * ROUNDS).map(|number| shared.iter().copied().chain(own(number)).collect()).collect()
}

/// Sends all requests of a repeat.
fn load(url: &str, repeat: usize, vocab: usize) -> Result<Served> {
    let prompts = prompts(repeat, vocab);
    let begin = Instant::now();
    let answers: Result<Vec<Vec<Timed>>> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let mine = prompts.iter().skip(client).step_by(CLIENTS);
                scope.spawn(move || mine.map(|prompt| request(url, prompt)).collect())
            })
            .collect();
        clients.into_iter().map(|client| client.join().expect("a client does not panic")).collect()
    });
    let elapsed = begin.elapsed();
    let answers: Vec<_> = answers?.into_iter().flatten().map(|answer| (answer.ttft, answer.tpot)).collect();
    Ok(Served::of(&answers, elapsed))
}

/// Sends token ids, so that both servers compute the same.
fn request(url: &str, prompt: &[usize]) -> Result<Timed> {
    let body = json!({"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": true});
    let answer = http::timed_stream(&format!("{url}/v1/completions"), &[], &body, |_| ())?;
    let tokens = answer.usage["completion_tokens"].as_u64();
    ensure!(tokens == Some(OUTPUT as u64), "{url} made {tokens:?} tokens, not {OUTPUT}");
    Ok(answer)
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0").context("no port is free")?.local_addr()?.port())
}

/// Ours over theirs, repeat by repeat.
fn ratios(takes: &[(Served, Served)], of: impl Fn(&Served) -> f64) -> [f64; 3] {
    let ratios: Vec<f64> = takes.iter().map(|(theirs, ours)| of(ours) / of(theirs)).collect();
    [0.0, 50.0, 100.0].map(|p| percentile(&ratios, p))
}

/// A figure of the table: its name, its unit's factor, the figure, the target of its ratio, and whether more is better.
type Figure = (&'static str, f64, fn(&Served) -> f64, f64, bool);

const FIGURES: [Figure; 3] = [
    ("output tokens/s", 1.0, |served| served.tokens_per_second, TARGETS.0, true),
    ("TTFT p50 ms", 1e3, |served| served.ttft, TARGETS.1, false),
    ("TPOT p50 ms", 1e3, |served| served.tpot, TARGETS.1, false),
];

fn report(
    subject: &Subject<'_>,
    takes: &[(Served, Served)],
    candle: Option<Served>,
    ready: (Duration, Duration),
    memory: (u64, u64),
) {
    println!(
        "\nservers: {} with {} threads; {CLIENTS} clients, {ROUNDS} requests each, {SHARED} shared and {OWN} own prompt tokens, {OUTPUT} out",
        subject.name, subject.threads
    );
    let median =
        |of: &dyn Fn(&(Served, Served)) -> f64| percentile(&takes.iter().map(of).collect::<Vec<_>>(), 50.0);
    let lines: Vec<Vec<String>> = FIGURES
        .iter()
        .map(|&(name, factor, of, target, more)| {
            let [min, middle, max] = ratios(takes, of);
            let met = if more { middle >= target } else { middle <= target };
            vec![
                name.to_owned(),
                format!("{:.1}", median(&|take| of(&take.0)) * factor),
                format!("{:.1}", median(&|take| of(&take.1)) * factor),
                candle.as_ref().map_or("–".to_owned(), |candle| format!("{:.1}", of(candle) * factor)),
                format!("{min:.2}"),
                format!("{middle:.2}"),
                format!("{max:.2}"),
                format!("{} {target}", if more { "≥" } else { "≤" }),
                if met { String::new() } else { "missed".to_owned() },
            ]
        })
        .collect();
    let header = ["", "llama-server", "engined", "candle alone*", "ratio min", "median", "max", "target", ""];
    table::print(&header, &lines);
    println!(
        "  start to ready: llama-server {:.2} s, engined {:.2} s",
        ready.0.as_secs_f64(),
        ready.1.as_secs_f64()
    );
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    println!(
        "  peak resident memory: llama-server {:.0} MB, engined {:.0} MB",
        megabytes(memory.0),
        megabytes(memory.1)
    );
    println!(
        "  * candle's own model of the architecture, in process: it has no server and takes one sequence, so requests wait for each other (four are computed)"
    );
}

fn row(
    subject: &Subject<'_>,
    takes: &[(Served, Served)],
    candle: Option<Served>,
    ready: (Duration, Duration),
    memory: (u64, u64),
) -> Value {
    let served = |served: &Served| json!({"output_tokens_per_second": served.tokens_per_second, "ttft_p50_seconds": served.ttft, "tpot_p50_seconds": served.tpot});
    let side = |of: &dyn Fn(&(Served, Served)) -> Served, ready: Duration, memory: u64| {
        let repeats: Vec<Value> = takes.iter().map(|take| served(&of(take))).collect();
        json!({"repeats": repeats, "ready_seconds": ready.as_secs_f64(), "peak_rss_bytes": memory})
    };
    let ratio: serde_json::Map<String, Value> = FIGURES
        .iter()
        .map(|&(name, _, of, _, _)| {
            let [min, median, max] = ratios(takes, of);
            (name.to_owned(), json!({"min": min, "median": median, "max": max}))
        })
        .collect();
    json!({
        "what": "servers", "model": subject.name, "threads": subject.threads, "clients": CLIENTS, "rounds": ROUNDS,
        "shared_tokens": SHARED, "own_tokens": OWN, "output_tokens": OUTPUT, "llama_cpp_version": super::llama::VERSION,
        "llama_server": side(&|take| take.0, ready.0, memory.0), "engined": side(&|take| take.1, ready.1, memory.1),
        "candle_alone": candle.as_ref().map(served), "ratio": ratio,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_their_beginning_within_a_repeat_and_nothing_between() {
        let (first, second) = (prompts(0, 49_000), prompts(1, 49_000));
        assert_eq!(first.len(), CLIENTS * ROUNDS);
        for (number, prompt) in first.iter().enumerate() {
            assert_eq!(prompt.len(), SHARED + OWN);
            assert_eq!(prompt[..SHARED], first[0][..SHARED]);
            assert!(first[..number].iter().all(|other| other[SHARED] != prompt[SHARED]));
            assert!(prompt.iter().all(|&token| (1000..49_000).contains(&token)));
        }
        assert_ne!(first[0][0], second[0][0]);
    }

    #[test]
    fn what_clients_saw_is_summed_up() {
        let answer = |millis: u64| (Duration::from_millis(millis), Duration::from_millis(millis / 10));
        let served = Served::of(&[answer(100), answer(300), answer(200)], Duration::from_secs(2));
        assert_eq!((served.tokens_per_second, served.ttft, served.tpot), (96.0, 0.2, 0.02));
    }
}
