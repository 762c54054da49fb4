//! The demo: three processes, one chat, every pattern, one table.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use microserving_harness::http::{self, Timed};
use microserving_harness::{Cluster, ClusterOptions};
use serde_json::{Value, json};

use crate::{model, shell, table};

/// Options of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Exit after the table; status 0 only if every row is equal to the single engine.
    #[arg(long)]
    once: bool,
    /// A GGUF file, a model folder in Hugging Face layout, `hf:owner/name`, or `toy`; the demo model if not given.
    #[arg(long)]
    model: Option<String>,
    /// How the weights are kept: auto, f32, bf16 or q8_0.
    #[arg(long, default_value = "auto")]
    dtype: String,
    /// Compute threads of each engine.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Output tokens of each answer.
    #[arg(long, default_value_t = 48)]
    max_tokens: u32,
}

/// What is asked first, and what is asked about the answer: the second turn finds the first in the context caches.
const FIRST_TURN: &str = "A serving system for language models has two phases. In the first, prefill, it reads the whole \
    prompt and computes keys and values for every token. In the second, decode, it produces one token after the other, and \
    reads those keys and values again for each of them. The first is bound by arithmetic, the second by memory. That is why \
    it can be worth while to run them on different machines, and to move the keys and values from one to the other. \
    Explain in two sentences what a router in front of such machines has to decide.";
const SECOND_TURN: &str = "Now say it in five words.";

/// The patterns, as the router names them.
const PATTERNS: [&str; 3] = ["data_parallel", "prefill_decode", "balanced:0.25"];

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Builds, fetches, starts, asks, compares, serves.
pub(crate) fn run(args: &Args) -> Result<()> {
    ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::SeqCst)).context("cannot catch Ctrl-C")?;
    let binaries = build()?;
    let model = match &args.model {
        Some(model) => absolute(model)?,
        None => model::fetch_demo_model()?.display().to_string(),
    };
    let mut cluster = start(args, &binaries, &model)?;
    check_interrupt()?;

    println!("\ntwo engines and a router, three processes; the same chat through every pattern\n");
    let reference = Conversation::hold(cluster.engines()[0].url(), None, args, "the single engine")?;
    let mut rows = Vec::new();
    let mut all_equal = true;
    for pattern in PATTERNS {
        check_interrupt()?;
        let answers = Conversation::hold(cluster.router().url(), Some(pattern), args, pattern)?;
        for (turn, (answer, wanted)) in answers.turns.iter().zip(&reference.turns).enumerate() {
            let equal = answer.token_ids == wanted.token_ids && !answer.token_ids.is_empty();
            all_equal &= equal;
            rows.push(row(&format!("{pattern}, turn {}", turn + 1), answer, equal));
        }
    }
    println!();
    let header = [
        "pattern",
        "tokens equal",
        "TTFT ms",
        "TPOT ms",
        "JCT ms",
        "computed on P",
        "computed on D",
        "cached on D",
        "KV moved",
    ];
    table::print(&header, &rows);
    println!(
        "\n  P prefills and sends, D receives and decodes; without P, D does everything. \"cached\" was found in D's context cache."
    );

    if args.once {
        if !all_equal {
            bail!("not every answer is equal to the single engine's");
        }
        return Ok(());
    }
    keep_serving(&mut cluster)
}

/// Builds the daemons as users run them.
fn build() -> Result<PathBuf> {
    let packages = ["--package", "microserving-engined", "--package", "microserving-routerd"];
    shell::run(shell::cargo().args(["build", "--release"]).args(packages))?;
    Ok(shell::target_dir().join("release"))
}

/// Turns a path that exists into an absolute one, since the daemons may run elsewhere; names pass unchanged.
fn absolute(model: &str) -> Result<String> {
    let path = Path::new(model);
    if path.exists() {
        return Ok(path
            .canonicalize()
            .with_context(|| format!("cannot resolve {model}"))?
            .display()
            .to_string());
    }
    Ok(model.to_owned())
}

fn start(args: &Args, binaries: &Path, model: &str) -> Result<Cluster> {
    let bar = ProgressBar::new_spinner().with_message("loading the model into two engines");
    bar.set_style(ProgressStyle::with_template("{spinner} {msg} {elapsed}").expect("a valid template"));
    bar.enable_steady_tick(Duration::from_millis(100));
    let threads = args.threads.to_string();
    let mut options = ClusterOptions::model(2, model);
    options = options.engine_args(["--dtype", &args.dtype, "--threads", &threads]);
    options.binaries = Some(binaries.to_path_buf());
    let cluster = Cluster::start(&options);
    bar.finish_and_clear();
    cluster
}

/// Two turns of one chat.
struct Conversation {
    turns: Vec<Timed>,
}

impl Conversation {
    /// Holds the chat and prints the answers as they come.
    ///
    /// Each conversation has its own cache salt, so that none finds what another has computed.
    fn hold(url: &str, pattern: Option<&str>, args: &Args, title: &str) -> Result<Self> {
        let mut messages = vec![json!({"role": "user", "content": FIRST_TURN})];
        let mut turns = Vec::new();
        for turn in 1..=2 {
            println!("── {title}, turn {turn} ──");
            let body = json!({
                "messages": messages, "temperature": 0, "max_tokens": args.max_tokens, "cache_salt": title,
                "return_token_ids": true,
            });
            let mut headers = vec![("x-microserving-stats", "1")];
            headers.extend(pattern.map(|pattern| ("x-microserving-pattern", pattern)));
            let answer =
                http::timed_stream(&format!("{url}/v1/chat/completions"), &headers, &body, |piece| {
                    print!("{piece}");
                    // Nobody reads along if stdout is gone; the table at the end will say so.
                    let _ = std::io::stdout().flush();
                })
                .with_context(|| format!("{title}, turn {turn}"))?;
            println!("\n");
            messages.push(json!({"role": "assistant", "content": answer.text}));
            messages.push(json!({"role": "user", "content": SECOND_TURN}));
            turns.push(answer);
            check_interrupt()?;
        }
        Ok(Self { turns })
    }
}

fn row(name: &str, answer: &Timed, equal: bool) -> Vec<String> {
    let millis = |duration: Duration| format!("{:.1}", duration.as_secs_f64() * 1e3);
    let count = |key: &str| answer.stats.get(key).and_then(Value::as_u64);
    let number = |key: &str| count(key).map_or_else(|| "?".into(), |count| count.to_string());
    let moved =
        count("sent_bytes").map_or_else(|| "?".into(), |bytes| format!("{:.2} MB", bytes as f64 / 1e6));
    vec![
        name.to_owned(),
        if equal { "yes" } else { "NO" }.to_owned(),
        millis(answer.ttft),
        millis(answer.tpot),
        millis(answer.jct),
        number("prefill_computed_tokens"),
        number("computed_tokens"),
        number("matched_tokens"),
        moved,
    ]
}

fn keep_serving(cluster: &mut Cluster) -> Result<()> {
    let url = cluster.router().url().to_owned();
    println!("\nstill serving at {url}; try, in another terminal:\n");
    println!(
        "  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n    -H 'x-microserving-pattern: prefill_decode' \\\n    -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"Hello!\"}}], \"stream\": true}}'\n"
    );
    println!("  curl -X PUT {url}/admin/v1/pattern -d '{{\"name\": \"balanced\", \"ratio\": 0.25}}'\n");
    println!("  python3 -m pip install openai && python3 examples/openai_client.py --base-url {url}/v1\n");
    println!("Ctrl-C stops all three.");
    while !INTERRUPTED.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(100));
        for engine in cluster.engines_mut() {
            if !engine.is_running()? && !INTERRUPTED.load(Ordering::SeqCst) {
                bail!("{} ended:\n{}", engine.name(), engine.log_tail());
            }
        }
    }
    println!("\nstopping");
    cluster.router_mut().stop(Duration::from_secs(10))?;
    for engine in cluster.engines_mut() {
        engine.stop(Duration::from_secs(10))?;
    }
    Ok(())
}

fn check_interrupt() -> Result<()> {
    if INTERRUPTED.load(Ordering::SeqCst) {
        bail!("interrupted");
    }
    Ok(())
}
