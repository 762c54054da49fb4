//! A hop through the router: the same requests to stub engines, directly, routed by each pattern, and by others beside it, in turns.

mod beside;
mod books;
mod cores;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use microserving_harness::Daemon;
use serde_json::{Value, json};

use books::Books;
use cores::Cores;

use super::engine::percentile;
use super::load::{Load, MARK, Message, Seen};
use super::row::Rows;
use crate::{shell, table};

const PROMPT_BYTES: [usize; 3] = [200, 2 << 10, 16 << 10];
const CLIENTS: [usize; 2] = [1, 64];
const OUTPUT_TOKENS: usize = 16;
const REPEATS: usize = 3;
/// 108 cells, or 180 with the peers, each of them so often: with starting and stopping about four minutes, or seven.
const WARM_UP: Duration = Duration::from_millis(100);
const MEASURED: Duration = Duration::from_millis(600);

/// Options of `cargo xtask bench router`, to measure a part of it while one works on that.
#[derive(Debug, clap::Args)]
#[group(id = "router_options")]
pub(super) struct Options {
    /// For `router`: measure the routers that a user would pick instead beside it, installed from PyPI into the target folder.
    #[arg(long)]
    peers: bool,
    /// For `router`: only prompts of these sizes in bytes, of 200, 2048 and 16384, separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = one_of(&PROMPT_BYTES))]
    prompt_bytes: Vec<usize>,
    /// For `router`: only these numbers of clients, of 1 and 64, separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = one_of(&CLIENTS))]
    clients: Vec<usize>,
    /// For `router`: only setups with one of these names, as the table shows them, separated by semicolons; direct calls are always
    /// measured.
    #[arg(long, value_delimiter = ';')]
    setups: Vec<String>,
}

/// Takes one of the numbers that can be measured.
fn one_of(numbers: &'static [usize]) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync {
    move |text| {
        let number = text.parse().ok().filter(|number| numbers.contains(number));
        number.ok_or_else(|| format!("must be one of {numbers:?}"))
    }
}

impl Options {
    fn wants(&self, shape: &Shape) -> bool {
        let within = |chosen: &[usize], number| chosen.is_empty() || chosen.contains(&number);
        within(&self.prompt_bytes, shape.prompt_bytes) && within(&self.clients, shape.clients)
    }

    /// Leaves the setups that are wanted. An error if a name is none of theirs.
    fn choose(&self, all: &[(Setup, String)]) -> Result<Vec<Setup>> {
        for name in &self.setups {
            let known = || all.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>().join("; ");
            ensure!(all.iter().any(|(_, known)| known == name), "setup {name:?} is none of: {}", known());
        }
        let wanted = |setup: Setup, name: &String| {
            setup == Setup::Direct || self.setups.is_empty() || self.setups.contains(name)
        };
        Ok(all.iter().filter(|(setup, name)| wanted(*setup, name)).map(|&(setup, _)| setup).collect())
    }
}

/// The way of a request to the engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setup {
    Direct,
    DataParallel,
    /// Data parallel as it is for requests that need more than to be passed on: read, tokenised, and made anew.
    Read,
    PrefillDecode,
    /// The same over gRPC.
    PrefillDecodeGrpc,
    /// Data parallel for a client that sends token ids: nobody has to tokenise.
    DataParallelIds,
    /// Prefill–decode for a client that sends token ids.
    PrefillDecodeIds,
    /// Through another proxy, by its place among those.
    Beside(usize),
}

impl Setup {
    /// The calls that the router makes for one request.
    const fn calls(self) -> &'static [&'static str] {
        match self {
            Self::Direct | Self::Beside(_) => &[],
            Self::DataParallel | Self::DataParallelIds => &["relay"],
            Self::Read => &["start_generate"],
            Self::PrefillDecode | Self::PrefillDecodeGrpc | Self::PrefillDecodeIds => {
                &["prep_recv", "remote_send", "start_generate"]
            }
        }
    }

    const fn sends_ids(self) -> bool {
        matches!(self, Self::DataParallelIds | Self::PrefillDecodeIds)
    }
}

/// What is sent, whatever way it takes.
#[derive(Clone, Copy, Debug)]
struct Shape {
    prompt_bytes: usize,
    clients: usize,
    stream: bool,
}

impl Shape {
    fn all() -> impl Iterator<Item = Self> {
        PROMPT_BYTES.into_iter().flat_map(|prompt_bytes| {
            CLIENTS.into_iter().flat_map(move |clients| {
                [false, true].into_iter().map(move |stream| Self { prompt_bytes, clients, stream })
            })
        })
    }

    /// Prompts differ from their first page on, so that nothing is taken from a cache and the router's index fills as in use.
    fn body(self, as_ids: bool) -> String {
        let words = "the quick brown fox jumps over the lazy dog ".repeat(self.prompt_bytes / 40 + 1);
        let mut body =
            json!({"model": "stub", "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": self.stream});
        if as_ids {
            // A salt makes all pages different.
            body["prompt"] = words.as_bytes()[..self.prompt_bytes].into();
            body["cache_salt"] = MARK.into();
        } else {
            body["prompt"] = format!("{MARK} {}", &words[..self.prompt_bytes - MARK.len() - 1]).into();
        }
        body.to_string()
    }

    /// Says whether an answer is complete; looks at no more than it must, since it runs beside what is measured.
    fn check(self, body: &[u8]) -> Result<()> {
        let shown = || String::from_utf8_lossy(body).into_owned();
        if self.stream {
            ensure!(body.ends_with(b"data: [DONE]\n\n"), "the stream does not end: {}", shown());
            let num_tokens = count(body, br#""text":"k""#);
            ensure!(num_tokens == OUTPUT_TOKENS, "{num_tokens} tokens came: {}", shown());
        } else {
            let answer: Value = serde_json::from_slice(body).with_context(shown)?;
            let num_tokens = answer.pointer("/choices/0/text").and_then(Value::as_str).map(str::len);
            ensure!(num_tokens == Some(OUTPUT_TOKENS), "not all tokens came: {}", shown());
        }
        Ok(())
    }
}

fn count(text: &[u8], part: &[u8]) -> usize {
    text.windows(part.len()).filter(|window| *window == part).count()
}

/// Measures direct and routed calls over stub engines. An error if any request failed, after everything was shown.
pub(super) fn run(rows: &mut Rows, options: &Options) -> Result<()> {
    let stage = Stage::start(options.peers)?;
    let setups = options.choose(&stage.setups())?;
    let mut next_number = 0;
    let mut lines = Vec::new();
    let (mut num_failed, mut failure) = (0, None);
    for shape in Shape::all().filter(|shape| options.wants(shape)) {
        for cell in stage.measure(&setups, shape, &mut next_number)? {
            num_failed += cell.num_failed;
            failure = failure.or_else(|| cell.failure.clone());
            lines.push(cell.line());
            rows.push("router", cell.row())?;
        }
    }
    println!(
        "\nrouter: {OUTPUT_TOKENS} tokens an answer, medians of {REPEATS} repeats in turns; {}\n(a byte a token, so 16 KiB of text \
         are 16384 ids on their way to an engine where a pattern sends ids; with 64 clients, times are queueing)",
        match stage.cores {
            Some(_) => "the router measured has the last core, clients and two stub engines share the others",
            None => "clients, router and two stub engines share one core",
        }
    );
    let header = [
        "setup",
        "prompt",
        "clients",
        "stream",
        "p50 us",
        "p99 us",
        "added p50",
        "added p99",
        "requests/s",
        "of direct",
        "router CPU us",
        "RSS MB",
        "failed",
    ];
    table::print(&header, &lines);
    if num_failed > 0 {
        bail!("router: {num_failed} requests failed, one of them: {}", failure.unwrap_or_default());
    }
    Ok(())
}

/// The processes under test.
struct Stage {
    router: Daemon,
    /// The router that calls by gRPC.
    grpc_router: Daemon,
    stubs: Vec<Daemon>,
    beside: Vec<Daemon>,
    cores: Option<Cores>,
}

impl Stage {
    /// Builds as users do, in one go, and starts everything.
    fn start(peers: bool) -> Result<Self> {
        shell::run(shell::cargo().args(["build", "--release"]).args([
            "--package",
            "microserving-routerd",
            "--package",
            "microserving-examples",
            "--bin",
            "routerd",
            "--features",
            "microserving-examples/grpc",
            "--example",
            "stub_engine",
            "--example",
            "bare_proxy",
        ]))?;
        let cores = Cores::divide()?;
        let binaries = shell::target_dir().join("release");
        let patience = Duration::from_secs(20);
        let mut stubs = Vec::new();
        let mut args = Vec::new();
        for index in 0..2 {
            let stub = Daemon::spawn(
                &format!("stub-{index}"),
                &binaries.join("examples/stub_engine"),
                &[],
                patience,
            )?;
            args.extend(["--engine".to_owned(), stub.url().to_owned()]);
            stubs.push(stub);
        }
        args.extend(["--min-engines".to_owned(), stubs.len().to_string()]);
        let start = |wire: &str| {
            let args = [&args[..], &["--wire".to_owned(), wire.to_owned()]].concat();
            let name = format!("router-{wire}");
            let spawn = || Daemon::spawn(&name, &binaries.join("routerd"), &args, patience);
            let mut router = Cores::on_last(cores.as_ref(), spawn)?;
            router.wait_ready(patience)?;
            anyhow::Ok(router)
        };
        let (router, grpc_router) = (start("rest")?, start("grpc")?);
        let beside = Cores::on_last(cores.as_ref(), || beside::start(&binaries, &stubs, peers))?;
        Ok(Self { router, grpc_router, stubs, beside, cores })
    }

    fn setups(&self) -> Vec<(Setup, String)> {
        let ours = [
            Setup::Direct,
            Setup::DataParallel,
            Setup::Read,
            Setup::PrefillDecode,
            Setup::PrefillDecodeGrpc,
            Setup::DataParallelIds,
            Setup::PrefillDecodeIds,
        ];
        let all = ours.into_iter().chain((0..self.beside.len()).map(Setup::Beside));
        all.map(|setup| (setup, self.name(setup).to_owned())).collect()
    }

    fn name(&self, setup: Setup) -> &str {
        match setup {
            Setup::Direct => "direct",
            Setup::DataParallel => "data_parallel",
            Setup::Read => "data_parallel, read",
            Setup::PrefillDecode => "prefill_decode",
            Setup::PrefillDecodeGrpc => "prefill_decode, gRPC",
            Setup::DataParallelIds => "data_parallel, ids",
            Setup::PrefillDecodeIds => "prefill_decode, ids",
            Setup::Beside(place) => self.beside[place].name(),
        }
    }

    /// The process that a setup goes through.
    fn process(&self, setup: Setup) -> &Daemon {
        match setup {
            Setup::Beside(place) => &self.beside[place],
            Setup::PrefillDecodeGrpc => &self.grpc_router,
            _ => &self.router,
        }
    }

    /// Measures every setup in turns, forwards and backwards, so that none has the quiet moments for itself.
    fn measure(&self, setups: &[Setup], shape: Shape, next_number: &mut u64) -> Result<Vec<Cell>> {
        let mut cells: Vec<Cell> =
            setups.iter().map(|&setup| Cell::new(setup, self.name(setup), shape)).collect();
        for repeat in 0..REPEATS {
            let mut order: Vec<usize> = (0..cells.len()).collect();
            if repeat % 2 == 1 {
                order.reverse();
            }
            let mut takes: Vec<Option<Take>> = vec![None; cells.len()];
            for index in order {
                takes[index] = Some(self.take(&mut cells[index], next_number)?);
            }
            let direct = takes[0].context("direct was measured")?;
            for (cell, take) in cells.iter_mut().zip(takes.into_iter().flatten()) {
                cell.add(take, direct);
            }
        }
        Ok(cells)
    }

    fn take(&self, cell: &mut Cell, next_number: &mut u64) -> Result<Take> {
        let (setup, shape) = (cell.setup, cell.shape);
        let check = |body: &[u8]| shape.check(body);
        let load = Load {
            messages: self.messages(setup, shape)?,
            warm_up: WARM_UP,
            measured: MEASURED,
            check: &check,
        };
        let process = self.process(setup);
        let router = if setup == Setup::PrefillDecodeGrpc { &self.grpc_router } else { &self.router };
        let (before, cpu) = (Books::of(router)?, process.cpu_time()?);
        let seen = load.run(next_number);
        let cpu = process.cpu_time()?.saturating_sub(cpu);
        let books = Books::of(router)?.since(&before);
        cell.note(&seen, &books);
        let (now, peak) = process.resident_bytes()?;
        cell.rss_bytes = now;
        cell.peak_rss_bytes = peak;
        Ok(Take {
            p50: percentile(&seen.whole, 50.0),
            p99: percentile(&seen.whole, 99.0),
            first_p50: percentile(&seen.first, 50.0),
            rate: seen.whole.len() as f64 / MEASURED.as_secs_f64(),
            cpu: cpu.as_secs_f64() / seen.num_sent.max(1) as f64,
        })
    }

    /// Clients of stubs go to each in turn, as the router does.
    fn messages(&self, setup: Setup, shape: Shape) -> Result<Vec<Message>> {
        let body = shape.body(setup.sends_ids());
        let headers: &[(&str, &str)] = match setup {
            Setup::Direct | Setup::Beside(_) => &[],
            Setup::DataParallel | Setup::DataParallelIds => &[("x-microserving-pattern", "data_parallel")],
            // Who wants to know what was computed where gets an answer that was read.
            Setup::Read => &[("x-microserving-pattern", "data_parallel"), ("x-microserving-stats", "1")],
            Setup::PrefillDecode | Setup::PrefillDecodeGrpc | Setup::PrefillDecodeIds => {
                &[("x-microserving-pattern", "prefill_decode")]
            }
        };
        let servers: Vec<&Daemon> = match setup {
            Setup::Direct => self.stubs.iter().collect(),
            _ => vec![self.process(setup)],
        };
        let servers = servers.into_iter().cycle().take(shape.clients);
        servers.map(|server| Message::post(address(server)?, "/v1/completions", headers, &body)).collect()
    }
}

fn address(daemon: &Daemon) -> Result<SocketAddr> {
    let url = daemon.url();
    url.strip_prefix("http://")
        .and_then(|rest| rest.parse().ok())
        .with_context(|| format!("no address: {url}"))
}

/// One run of one setup.
#[derive(Clone, Copy, Debug)]
struct Take {
    p50: f64,
    p99: f64,
    first_p50: f64,
    rate: f64,
    cpu: f64,
}

/// A setup with a shape, over all repeats.
struct Cell {
    setup: Setup,
    name: String,
    shape: Shape,
    takes: Vec<Take>,
    /// The same repeats' direct runs.
    direct: Vec<Take>,
    rss_bytes: u64,
    peak_rss_bytes: u64,
    num_sent: u64,
    num_failed: u64,
    failure: Option<String>,
}

impl Cell {
    fn new(setup: Setup, name: &str, shape: Shape) -> Self {
        Self {
            setup,
            name: name.to_owned(),
            shape,
            takes: Vec::new(),
            direct: Vec::new(),
            rss_bytes: 0,
            peak_rss_bytes: 0,
            num_sent: 0,
            num_failed: 0,
            failure: None,
        }
    }

    fn note(&mut self, seen: &Seen, books: &Books) {
        self.num_sent += seen.num_sent;
        self.num_failed += seen.num_failed;
        let deviation = books.deviation(self.setup, seen.num_sent);
        // Requests that failed explain calls that are missing; without any, the calls are the failure.
        if seen.num_failed == 0 && deviation.is_some() {
            self.num_failed += seen.num_sent;
        }
        let failure = seen.failure.clone().or(deviation);
        self.failure = self.failure.take().or(failure);
    }

    fn add(&mut self, take: Take, direct: Take) {
        self.takes.push(take);
        self.direct.push(direct);
    }

    fn median(&self, figure: impl Fn(Take) -> f64) -> f64 {
        percentile(&self.takes.iter().map(|&take| figure(take)).collect::<Vec<_>>(), 50.0)
    }

    /// Compares each run with the direct one of its own repeat; nothing where one of them has no answers to compare.
    fn against_direct(&self, compare: impl Fn(Take, Take) -> f64) -> Option<Vec<f64>> {
        if self.setup == Setup::Direct {
            return None;
        }
        let pairs = self.takes.iter().zip(&self.direct);
        let pairs = pairs.filter(|(take, direct)| take.rate > 0.0 && direct.rate > 0.0);
        let compared: Vec<f64> = pairs.map(|(&take, &direct)| compare(take, direct)).collect();
        (!compared.is_empty()).then_some(compared)
    }

    fn added_p50(&self) -> Option<Vec<f64>> {
        self.against_direct(|take, direct| take.p50 - direct.p50)
    }

    fn added_p99(&self) -> Option<Vec<f64>> {
        self.against_direct(|take, direct| take.p99 - direct.p99)
    }

    fn ratio(&self) -> Option<Vec<f64>> {
        self.against_direct(|take, direct| take.rate / direct.rate)
    }

    fn routed<T>(&self, value: T) -> Option<T> {
        (self.setup != Setup::Direct).then_some(value)
    }

    fn line(&self) -> Vec<String> {
        let micros = |seconds: f64| format!("{:.0}", seconds * 1e6);
        let middle = |values: Option<Vec<f64>>| values.map(|values| percentile(&values, 50.0));
        let or_nothing = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        vec![
            self.name.clone(),
            bytes(self.shape.prompt_bytes),
            self.shape.clients.to_string(),
            if self.shape.stream { "yes" } else { "no" }.to_owned(),
            micros(self.median(|take| take.p50)),
            micros(self.median(|take| take.p99)),
            or_nothing(middle(self.added_p50()).map(micros)),
            or_nothing(middle(self.added_p99()).map(micros)),
            format!("{:.0}", self.median(|take| take.rate)),
            or_nothing(middle(self.ratio()).map(|ratio| format!("{ratio:.2}"))),
            or_nothing(self.routed(micros(self.median(|take| take.cpu)))),
            or_nothing(self.routed(format!("{:.0}", self.rss_bytes as f64 / 1e6))),
            self.num_failed.to_string(),
        ]
    }

    /// The single repeats go with the medians of what is compared, so that a reader sees how far they can be trusted.
    fn row(&self) -> Value {
        let compared = |values: Option<Vec<f64>>| {
            values.map(|values| json!({"median": percentile(&values, 50.0), "repeats": values}))
        };
        json!({
            "setup": self.name, "prompt_bytes": self.shape.prompt_bytes, "clients": self.shape.clients,
            "stream": self.shape.stream, "output_tokens": OUTPUT_TOKENS,
            "p50_seconds": self.median(|take| take.p50), "p99_seconds": self.median(|take| take.p99),
            "first_byte_p50_seconds": self.median(|take| take.first_p50),
            "requests_per_second": self.median(|take| take.rate),
            "added_p50_seconds": compared(self.added_p50()), "added_p99_seconds": compared(self.added_p99()),
            "ratio_to_direct": compared(self.ratio()),
            "router_cpu_seconds_per_request": self.routed(self.median(|take| take.cpu)),
            "router_rss_bytes": self.routed(self.rss_bytes),
            "router_peak_rss_bytes": self.routed(self.peak_rss_bytes),
            "requests": self.num_sent, "failed": self.num_failed, "failure": self.failure,
        })
    }
}

fn bytes(count: usize) -> String {
    if count.is_multiple_of(1 << 10) { format!("{} KiB", count >> 10) } else { format!("{count} B") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { prompt_bytes: 200, clients: 1, stream: true };

    #[test]
    fn prompts_have_the_bytes_they_say() {
        for shape in Shape::all() {
            let body: Value = serde_json::from_str(&shape.body(false)).expect("JSON");
            assert_eq!(body["prompt"].as_str().map(str::len), Some(shape.prompt_bytes));
            let body: Value = serde_json::from_str(&shape.body(true)).expect("JSON");
            assert_eq!(body["prompt"].as_array().map(Vec::len), Some(shape.prompt_bytes));
        }
    }

    #[test]
    fn incomplete_answers_are_failures() {
        let token = "data: {\"choices\":[{\"text\":\"k\"}]}\n\n";
        let stream = |num_tokens: usize| format!("{}data: [DONE]\n\n", token.repeat(num_tokens));
        assert!(SHAPE.check(stream(16).as_bytes()).is_ok());
        assert!(SHAPE.check(stream(15).as_bytes()).is_err());
        assert!(SHAPE.check(token.repeat(16).as_bytes()).is_err());
        let whole = Shape { stream: false, ..SHAPE };
        let answer = |text: &str| json!({"choices": [{"text": text}]}).to_string();
        assert!(whole.check(answer(&"k".repeat(16)).as_bytes()).is_ok());
        assert!(whole.check(answer("k").as_bytes()).is_err());
        assert!(whole.check(b"{}").is_err());
        assert!(whole.check(stream(16).as_bytes()).is_err());
    }

    #[test]
    fn runs_are_compared_within_their_repeat_and_only_where_both_have_answers() {
        let take = |p50: f64, rate: f64| Take { p50, p99: p50, first_p50: p50, rate, cpu: 0.0 };
        let mut cell = Cell::new(Setup::DataParallel, "data_parallel", SHAPE);
        cell.add(take(0.5, 10.0), take(0.25, 40.0));
        cell.add(take(0.0, 0.0), take(0.25, 40.0));
        cell.add(take(0.5, 10.0), take(0.0, 0.0));
        assert_eq!((cell.added_p50(), cell.ratio()), (Some(vec![0.25]), Some(vec![0.25])));
        cell.takes.remove(0);
        cell.direct.remove(0);
        assert_eq!((cell.added_p50(), cell.added_p99(), cell.ratio()), (None, None, None));
    }
}
