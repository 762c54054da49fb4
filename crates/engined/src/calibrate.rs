//! `engined --calibrate`: measures what this engine takes.
//!
//! The engine itself is measured, step by step and with its own scheduling, not the executor beneath it: what a router wants to know is
//! what a request takes. Sizes grow until they would outlast the time there is, and what was not measured is put together from what was:
//! attention to a context costs each token the same, and each sequence its own context.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use microserving_cost::{About, Link, Profile, Rise, Table};
use microserving_engine::{
    Call, CallId, CallKey, CallOptions, Command, Effect, Engine, EngineError, GenerateEvent, StartGenerate,
};
use microserving_protocol::{Attempt, SamplingParams, TokenId};
use tokio::time::Instant;

/// Prefills without a context.
const NEW_TOKENS: [u32; 8] = [1, 16, 64, 128, 256, 512, 1024, 2048];
/// Contexts of a prefill, and of a decode.
const CONTEXTS: [u32; 5] = [0, 256, 1024, 4096, 16384];
/// New tokens behind a context, where the context's price is measured.
const BEHIND: u32 = 32;
/// Sequences that decode together.
const SEQUENCES: [u32; 5] = [1, 2, 4, 8, 16];
/// Prefills among decodes.
const RIDING: [u32; 3] = [16, 64, 256];
/// Sequences among which prefills are measured.
const RIDDEN: [u32; 2] = [1, 4];
/// Decode steps of which the median counts.
const STEPS: usize = 9;
/// Measurements of one prefill of which the median counts, while it is short.
const REPEATS: usize = 3;
/// A single measurement is not begun if it would take longer.
const LONGEST: Duration = Duration::from_secs(3);
/// One of the four tables takes so long at most.
const PER_TABLE: Duration = Duration::from_secs(6);
/// Bytes whose transfer shows the rate.
const TRANSFER_BYTES: usize = 32 << 20;

/// Measures an engine that serves nobody. Blocks, about 20 seconds on an engine that is slow and far less on one that is not.
///
/// # Errors
/// If the engine refuses or fails what it is asked to compute.
pub(crate) fn measure(engine: Engine, about: About, link: &str, checksum: bool) -> Result<Profile> {
    let token_bytes = {
        let layout = &engine.info().executor.layout;
        layout.page_bytes() * layout.num_layers as usize / layout.page_size as usize
    };
    let mut bench = Bench::new(engine);
    let prefill = bench.prefill_table()?;
    let decode = bench.decode_table()?;
    let riding = bench.riding_table()?;
    let profile = Profile::new(about, prefill, decode, riding);
    Ok(profile.with_link(link, transfer(link, checksum, token_bytes)?))
}

/// Prints a profile as tables of milliseconds.
pub(crate) fn describe(profile: &Profile) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    let names = [
        ("prefill: new tokens, by context", profile.prefill_table()),
        ("decode: sequences, by context of each", profile.decode_table()),
        ("prefill among decodes: new tokens, by sequences", profile.riding_table()),
    ];
    for (name, table) in names {
        let (rows, columns) = table.axes();
        let _ = writeln!(text, "{name} (ms)");
        let _ = write!(text, "{:>8}", "");
        columns.iter().for_each(|column| {
            let _ = write!(text, "{column:>12}");
        });
        let _ = writeln!(text);
        for (row, seconds) in rows.iter().zip(table.seconds()) {
            let _ = write!(text, "{row:>8}");
            seconds.iter().for_each(|seconds| {
                let _ = write!(text, "{:>12.3}", seconds * 1e3);
            });
            let _ = writeln!(text);
        }
    }
    for (name, link) in profile.links() {
        let _ = writeln!(
            text,
            "{name}: {:.3} ms and {:.3} us a token",
            link.fixed_seconds * 1e3,
            link.seconds_per_token * 1e6
        );
    }
    text
}

/// Carries bytes between two transports of the kind.
fn transfer(name: &str, checksum: bool, token_bytes: usize) -> Result<Link> {
    let few = crate::self_test::carry_bytes(name, checksum, 64 << 10)?;
    let many = crate::self_test::carry_bytes(name, checksum, TRANSFER_BYTES)?;
    let rate = TRANSFER_BYTES as f64 / many.as_secs_f64().max(1e-6);
    Ok(Link { fixed_seconds: few.as_secs_f64(), seconds_per_token: token_bytes as f64 / rate })
}

/// An engine that is driven by hand.
struct Bench {
    engine: Engine,
    origin: Instant,
    next_call: u64,
    /// Prompts differ from the first token on unless they are meant to share.
    next_prompt: u64,
}

/// A table's time.
struct Budget(Instant);

impl Budget {
    fn new() -> Self {
        Self(Instant::now())
    }

    /// Says whether there is time for something that will probably take so long.
    fn allows(&self, seconds: f64) -> bool {
        seconds < LONGEST.as_secs_f64() && self.0.elapsed().as_secs_f64() + seconds < PER_TABLE.as_secs_f64()
    }
}

impl Bench {
    fn new(engine: Engine) -> Self {
        Self { engine, origin: Instant::now(), next_call: 0, next_prompt: 0 }
    }

    fn prefill_table(&mut self) -> Result<Table> {
        let budget = Budget::new();
        // The first computation of a process pays for what later ones find done.
        self.prefill(&[], 16)?;
        let mut alone: Vec<(u32, f64)> = Vec::new();
        for new in self.fitting(&NEW_TOKENS, 0) {
            let expected =
                alone.last().map_or(0.0, |(last, seconds)| seconds * f64::from(new) / f64::from(*last));
            if !budget.allows(expected) {
                break;
            }
            alone.push((new, self.prefill_median(&[], new, &budget, expected)?));
        }
        ensure!(
            !alone.is_empty() && self.fits(BEHIND),
            "the engine has no room for a prompt of {BEHIND} tokens"
        );
        let mut behind: Vec<(u32, f64)> = vec![(0, self.prefill_median(&[], BEHIND, &budget, 0.0)?)];
        for context in self.fitting(&CONTEXTS[1..], BEHIND) {
            let expected = rate(&alone) * f64::from(context);
            if !budget.allows(expected) {
                break;
            }
            let prefix = self.prompt(context);
            self.prefill(&prefix, 1)?;
            behind.push((context, self.prefill_median(&prefix, BEHIND, &budget, 0.0)?));
        }
        // What a context costs BEHIND tokens, it costs others in proportion.
        let more =
            |new: u32, context: f64| (context - behind[0].1).max(0.0) * f64::from(new) / f64::from(BEHIND);
        let seconds = alone
            .iter()
            .map(|(new, alone)| behind.iter().map(|(_, seconds)| alone + more(*new, *seconds)).collect())
            .collect();
        table(axis(&alone), axis(&behind), seconds, Rise::Both)
    }

    fn decode_table(&mut self) -> Result<Table> {
        let budget = Budget::new();
        let mut together: Vec<(u32, f64)> = Vec::new();
        let most = self.engine.config().max_running;
        for sequences in SEQUENCES.into_iter().filter(|sequences| *sequences <= most) {
            let expected = together.last().map_or(0.0, |(_, seconds)| 2.0 * seconds * (STEPS + 2) as f64);
            if !self.fits(sequences * 48) || !budget.allows(expected) {
                break;
            }
            together.push((sequences, self.decode_median(sequences, &[])?));
        }
        ensure!(!together.is_empty(), "the engine has no room for a sequence of 48 tokens");
        let mut contexts: Vec<(u32, f64)> = vec![(16, together[0].1)];
        for context in self.fitting(&CONTEXTS[1..], 48) {
            let prefix = self.prompt(context);
            let began = Instant::now();
            self.prefill(&prefix, 1)?;
            contexts.push((context, self.decode_median(1, &prefix)?));
            // The next one is four times as long.
            if !budget.allows(4.0 * began.elapsed().as_secs_f64()) {
                break;
            }
        }
        let more = |sequences: u32, context: f64| (context - contexts[0].1).max(0.0) * f64::from(sequences);
        let seconds = together
            .iter()
            .map(|(sequences, base)| {
                contexts.iter().map(|(_, seconds)| base + more(*sequences, *seconds)).collect()
            })
            .collect();
        table(axis(&together), axis(&contexts), seconds, Rise::Both)
    }

    fn riding_table(&mut self) -> Result<Table> {
        let budget = Budget::new();
        let mut rows: Vec<(u32, Vec<f64>)> = Vec::new();
        let ridden: Vec<u32> = RIDDEN.into_iter().filter(|n| *n < self.engine.config().max_running).collect();
        ensure!(!ridden.is_empty(), "max_running is 1: nothing can ride along, so nothing can be measured");
        for new in self.fitting(&RIDING, 4 * 80) {
            let expected = rows.last().map_or(0.0, |(_, seconds)| 8.0 * seconds.iter().sum::<f64>());
            if !budget.allows(expected) {
                break;
            }
            let mut seconds = Vec::new();
            for &sequences in &ridden {
                seconds.push(self.riding(new, sequences)?);
            }
            rows.push((new, seconds));
        }
        ensure!(!rows.is_empty(), "the engine has no room for a prefill beside four sequences");
        let axis = rows.iter().map(|(new, _)| f64::from(*new)).collect();
        let columns = ridden.iter().map(|sequences| f64::from(*sequences)).collect();
        table(axis, columns, rows.into_iter().map(|(_, seconds)| seconds).collect(), Rise::Rows)
    }

    /// Returns the sizes that fit with so many tokens beside them.
    fn fitting(&self, sizes: &[u32], beside: u32) -> Vec<u32> {
        sizes.iter().copied().filter(|size| self.fits(size.saturating_add(beside))).collect()
    }

    /// Says whether a sequence of so many tokens fits, with as much room left for what is cached.
    fn fits(&self, tokens: u32) -> bool {
        let info = self.engine.info();
        let pages = info.executor.layout.pages_for(tokens.saturating_add(64));
        tokens + 64 < info.executor.max_context && pages <= info.num_pages / 2
    }

    fn prefill_median(
        &mut self,
        prefix: &[TokenId],
        new: u32,
        budget: &Budget,
        expected: f64,
    ) -> Result<f64> {
        let mut seconds = vec![self.prefill(prefix, new)?];
        while seconds.len() < REPEATS && budget.allows(expected.max(seconds[0]) * 4.0) {
            seconds.push(self.prefill(prefix, new)?);
        }
        Ok(median(&mut seconds))
    }

    /// Prefills `new` tokens behind a prefix that the engine has seen; returns the seconds until the first token.
    fn prefill(&mut self, prefix: &[TokenId], new: u32) -> Result<f64> {
        let prompt = [prefix, &self.prompt(new)].concat();
        let began = Instant::now();
        let call = self.start(prompt, 1);
        self.run_until(vec![call], |bench| bench.engine.is_idle())?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Decodes sequences together; returns the seconds of a step in which all of them are.
    fn decode_median(&mut self, sequences: u32, prefix: &[TokenId]) -> Result<f64> {
        let calls = self.begin_decoding(sequences, prefix)?;
        let mut seconds: Vec<f64> = Vec::new();
        while seconds.len() < STEPS {
            seconds.push(self.step(Vec::new())?);
        }
        self.cancel(calls)?;
        Ok(median(&mut seconds))
    }

    /// Returns what a prefill adds to the steps of sequences that decode.
    fn riding(&mut self, new: u32, sequences: u32) -> Result<f64> {
        let calls = self.begin_decoding(sequences, &[])?;
        let mut alone: Vec<f64> = Vec::new();
        while alone.len() < 5 {
            alone.push(self.step(Vec::new())?);
        }
        let alone = median(&mut alone);
        let prompt = self.prompt(new);
        let rider = self.start(prompt, 1);
        let mut commands = vec![rider];
        let before = self.engine.counters().prefill_tokens;
        let mut added = 0.0;
        while self.engine.counters().prefill_tokens < before + u64::from(new) {
            added += self.step(std::mem::take(&mut commands))? - alone;
        }
        self.cancel(calls)?;
        Ok(added.max(0.0))
    }

    /// Starts sequences and steps until all of them decode; returns their calls.
    fn begin_decoding(&mut self, sequences: u32, prefix: &[TokenId]) -> Result<Vec<CallId>> {
        let mut calls = Vec::new();
        let mut commands = Vec::new();
        let decoded = self.engine.counters().decode_tokens;
        for _ in 0..sequences {
            let prompt = [prefix, &self.prompt(16)].concat();
            calls.push(CallId(self.next_call));
            commands.push(self.start(prompt, 512));
        }
        self.run_until(commands, |bench| {
            bench.engine.counters().decode_tokens >= decoded + 2 * u64::from(sequences)
                && bench.engine.state().waiting == 0
                && bench.engine.state().queued_prefill_tokens == 0
        })?;
        Ok(calls)
    }

    fn cancel(&mut self, calls: Vec<CallId>) -> Result<()> {
        let commands = calls.into_iter().map(|id| Command::Cancel { id }).collect();
        self.run_until(commands, |bench| bench.engine.is_idle())
    }

    fn run_until(&mut self, mut commands: Vec<Command>, done: impl Fn(&Self) -> bool) -> Result<()> {
        let began = Instant::now();
        loop {
            self.step(std::mem::take(&mut commands))?;
            if done(self) {
                return Ok(());
            }
            if began.elapsed() > 20 * LONGEST {
                bail!("the engine does not get on: one measurement takes longer than {:?}", 20 * LONGEST);
            }
        }
    }

    /// Takes one step; returns its seconds. A modelled one lasts as long as its model says, as when it serves.
    fn step(&mut self, commands: Vec<Command>) -> Result<f64> {
        let began = Instant::now();
        let effects = self.engine.step(self.origin.elapsed(), commands.into_iter());
        if let Some(modelled) = effects.modelled {
            std::thread::sleep(modelled.saturating_sub(began.elapsed()));
        }
        let took = began.elapsed();
        if effects.computed {
            self.engine.note_step(took);
        }
        for effect in effects.effects {
            match effect {
                Effect::Reply { result: Err(error), .. }
                | Effect::Event { event: GenerateEvent::Failed { error }, .. }
                    // What is cancelled here says so.
                    if !matches!(error, EngineError::Aborted { .. }) =>
                {
                    return Err(error.into());
                }
                _ => {}
            }
        }
        Ok(took.as_secs_f64())
    }

    fn start(&mut self, prompt: Vec<TokenId>, max_tokens: u32) -> Command {
        let id = CallId(self.next_call);
        self.next_call += 1;
        let generated_from = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let call = StartGenerate {
            key: Some(CallKey { seq_id: format!("calibrate-{}", id.0).into(), attempt: Attempt(0) }),
            prompt: Arc::from(prompt),
            begin: 0,
            generated_from,
            n: 1,
            first_choice: 0,
            sampling: SamplingParams::greedy(),
            max_tokens: Some(max_tokens),
            min_tokens: 0,
            stop_tokens: Vec::new(),
            ignore_eos: true,
            constraints: Vec::new(),
            resume_from: None,
            options: CallOptions::default(),
        };
        Command::Call { id, call: Call::StartGenerate(Box::new(call)) }
    }

    /// Returns tokens that no prompt before began with.
    fn prompt(&mut self, len: u32) -> Vec<TokenId> {
        let vocabulary = u64::from(self.engine.info().executor.vocab_size.max(1));
        self.next_prompt += 1;
        let mut state = self.next_prompt.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                TokenId(u32::try_from((state >> 33) % vocabulary).unwrap_or(0))
            })
            .collect()
    }
}

/// Returns the seconds of a token, by the longest prefill.
fn rate(prefills: &[(u32, f64)]) -> f64 {
    prefills.last().map_or(0.0, |(new, seconds)| seconds / f64::from(*new))
}

fn axis(points: &[(u32, f64)]) -> Vec<f64> {
    points.iter().map(|(point, _)| f64::from(*point)).collect()
}

fn table(rows: Vec<f64>, columns: Vec<f64>, seconds: Vec<Vec<f64>>, rise: Rise) -> Result<Table> {
    Table::new(rows, columns, seconds, rise).map_err(|reason| anyhow::anyhow!("what was measured {reason}"))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use microserving_engine::{EngineConfig, Entropy};
    use microserving_executor::{ToyConfig, ToyExecutor};
    use microserving_protocol::{ClusterKey, Incarnation};
    use microserving_transport::LoopbackHub;

    use super::*;

    fn engine(toy: ToyConfig) -> Engine {
        let entropy = Entropy {
            incarnation: Incarnation(1),
            cluster_key: ClusterKey::from_random([7; 32]),
            key_is_shared: false,
            mint_seed: 1,
        };
        let executor = Box::new(ToyExecutor::new(toy).unwrap());
        let transport = Box::new(LoopbackHub::new().transport("engine-0"));
        Engine::new(EngineConfig::new("engine-0", 256), executor, transport, entropy).unwrap()
    }

    #[test]
    fn it_finds_what_a_toy_says_it_takes() {
        let toy = ToyConfig {
            step_time: Duration::from_millis(2),
            token_time: Duration::from_micros(100),
            max_context: 1024,
            ..ToyConfig::default()
        };
        let profile = measure(engine(toy), About::default(), "loopback", false).unwrap();
        // Machines that test are busy, so anything may be slow; and what rides along may seem quick beside a step that was.
        let within = |seconds: f64, said: f64| {
            assert!((said * 0.5..1.0).contains(&seconds), "{seconds}, not {said}");
        };
        within(profile.prefill_seconds(256.0, 0.0), 2e-3 + 25.6e-3);
        within(profile.decode_seconds(4.0, 64.0), 2.4e-3);
        within(profile.riding_seconds(64.0, 0.0, 4.0), 6.4e-3);
        assert!(profile.transfer_seconds(100.0, Some("loopback")).unwrap() > 0.0);
        assert_eq!(Profile::from_json(profile.to_json().as_bytes()).unwrap(), profile);
    }

    #[test]
    fn an_engine_without_room_says_so() {
        let toy = ToyConfig { max_context: 64, ..ToyConfig::default() };
        let error = measure(engine(toy), About::default(), "loopback", false).unwrap_err();
        assert!(error.to_string().contains("no room"), "{error}");
    }
}
