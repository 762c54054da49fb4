//! What the end-to-end tests share: prompts, completions through a pattern, and how to skip aloud.

#![forbid(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "real processes are measured; there is no clock to pause")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use microserving_harness::http::{self, Timed};
use serde_json::{Value, json};

/// Tokens in a page, as the daemons default to.
pub const PAGE_SIZE: u32 = 16;

/// Returns the path in an environment variable, or says aloud that the test is skipped; under `MICROSERVING_FULL` a skip fails.
///
/// # Panics
/// If the variable is not set and skips are failures.
#[must_use]
pub fn path_or_skip(variable: &str, what: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    if path.is_none() {
        skip(&format!("{what} is not there: set {variable}"));
    }
    path
}

/// Says aloud that a test is skipped; under `MICROSERVING_FULL` a skip fails.
///
/// # Panics
/// If skips are failures.
pub fn skip(reason: &str) {
    assert!(std::env::var_os("MICROSERVING_FULL").is_none(), "a skip is a failure in a full run: {reason}");
    eprintln!("SKIPPED: {reason}");
}

/// Looks again and again until something is so.
///
/// # Errors
/// If it is not within a minute, or a look fails.
pub fn until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !is_so()? {
        ensure!(begun.elapsed() < Duration::from_secs(60), "never came: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns a prompt of readable bytes, different for every seed from its first token on.
#[must_use]
pub fn prompt(num_tokens: u32, seed: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) ^ 0x5bd1_e995;
    (0..num_tokens)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            97 + state % 26
        })
        .collect()
}

/// One completion request to compare between setups.
#[derive(Clone, Debug)]
pub struct Case {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Output tokens.
    pub max_tokens: u32,
    /// 0 is greedy.
    pub temperature: f64,
    /// The seed of the draws.
    pub seed: u64,
    /// Keeps this case's contexts apart from those of others.
    pub salt: String,
}

impl Case {
    /// Sends the case and reads the stream to its end; `pattern` is for routers.
    ///
    /// # Errors
    /// If the request fails, or the stream breaks or lacks its usage.
    pub fn send(&self, url: &str, pattern: Option<&str>) -> Result<Timed> {
        let body = json!({
            "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed,
            "cache_salt": self.salt, "return_token_ids": true, "ignore_eos": true,
        });
        let mut headers = vec![("x-microserving-stats", "1")];
        headers.extend(pattern.map(|pattern| ("x-microserving-pattern", pattern)));
        let answer = http::timed_stream(&format!("{url}/v1/completions"), &headers, &body, |_| ())
            .with_context(|| format!("{pattern:?}, {} tokens, salt {}", self.prompt.len(), self.salt))?;
        let completion = number(&answer.usage, "completion_tokens")?;
        if completion != u64::from(self.max_tokens) || answer.token_ids.len() as u64 != completion {
            bail!(
                "{} tokens arrived, usage says {completion}, {} were asked for",
                answer.token_ids.len(),
                self.max_tokens
            );
        }
        Ok(answer)
    }
}

/// Reads a number of a JSON object.
///
/// # Errors
/// If it is not there.
pub fn number(value: &Value, key: &str) -> Result<u64> {
    value.get(key).and_then(Value::as_u64).with_context(|| format!("no number `{key}` in {value}"))
}

/// What the engines must have done for a request, by the router's statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Prompt tokens that D found in its context cache.
    pub matched: u32,
    /// Prompt tokens whose KV went from P to D.
    pub sent: u32,
    /// Prompt tokens that P computed.
    pub computed_on_p: u32,
    /// Prompt tokens that D computed.
    pub computed_on_d: u32,
}

impl Work {
    /// Reads it from an answer.
    ///
    /// # Errors
    /// If a figure is missing.
    pub fn of(answer: &Timed) -> Result<Self> {
        let figure = |key: &str| Ok::<u32, anyhow::Error>(u32::try_from(number(&answer.stats, key)?)?);
        Ok(Self {
            matched: figure("matched_tokens")?,
            sent: figure("sent_tokens")?,
            computed_on_p: figure("prefill_computed_tokens")?,
            computed_on_d: figure("computed_tokens")?,
        })
    }

    /// Returns what a pattern does with a prompt of which nobody holds anything.
    ///
    /// # Panics
    /// If the pattern is not one of the three.
    #[must_use]
    pub fn cold(pattern: &str, num_tokens: u32) -> Self {
        let share = |f: f64| (f64::from(num_tokens) * (1.0 - f)) as u32;
        let end = match pattern {
            "data_parallel" => 0,
            "prefill_decode" => num_tokens - 1,
            balanced => {
                let ratio = balanced.strip_prefix("balanced:").expect("a pattern").parse().expect("a ratio");
                share(ratio).min(num_tokens - 1)
            }
        };
        Self { matched: 0, sent: end, computed_on_p: end, computed_on_d: num_tokens - end }
    }
}

/// Returns a case that draws its tokens.
#[must_use]
pub fn sampled(num_tokens: u32, salt: &str) -> Case {
    Case {
        prompt: prompt(num_tokens, num_tokens + 1),
        max_tokens: 12,
        temperature: 0.8,
        seed: 99,
        salt: salt.to_owned(),
    }
}

/// Checks that what a router's two engines make of prompts is what one of them makes of them, and that bytes really went between them.
///
/// # Errors
/// What differs.
pub fn check_patterns(router: &str, engine: &str) -> Result<()> {
    for pattern in ["data_parallel", "prefill_decode", "balanced:0.25"] {
        for num_tokens in [1, PAGE_SIZE, PAGE_SIZE + 1, 1000] {
            let salt = format!("{pattern}-{num_tokens}");
            let answer = sampled(num_tokens, &salt).send(router, Some(pattern))?;
            let alone = sampled(num_tokens, &format!("alone-{salt}")).send(engine, None)?;
            ensure!(
                answer.token_ids == alone.token_ids,
                "{salt}: {:?} is not {:?}",
                answer.token_ids,
                alone.token_ids
            );
            let (work, wanted) = (Work::of(&answer)?, Work::cold(pattern, num_tokens));
            ensure!(work == wanted, "{salt}: {work:?}, expected {wanted:?}");
        }
    }
    Ok(())
}

/// Returns a script of docs/scripts.md.
///
/// # Panics
/// If there is none of that name.
#[must_use]
pub fn documented(name: &str) -> &'static str {
    let docs = include_str!("../docs/scripts.md");
    let start = docs.split_once(&format!("```rhai script={name}\n")).expect("the docs have the script").1;
    start.split_once("```").expect("it ends").0
}

/// Loads a script of docs/scripts.md under a name of its own.
///
/// # Errors
/// If the router refuses it.
pub fn load_documented(router: &str, name: &str, as_name: &str) -> Result<()> {
    let url = format!("{router}/admin/v1/scripts/{as_name}");
    let answer = http::put_bytes(&url, &[], documented(name).as_bytes())?;
    if answer.status != 200 {
        bail!("the script {name}: {} {}", answer.status, answer.body);
    }
    Ok(())
}

/// Returns every program that a router knows, each with the parameters that tests use, as the body of `PUT /admin/v1/pattern`: the patterns
/// of the crate, and two scripts of the docs that are loaded now, one that moves KV and one that only places.
///
/// # Errors
/// If the router does not answer, or one of the programs is missing.
pub fn programs(router: &str) -> Result<Vec<Value>> {
    load_documented(router, "prefill_decode", "scripted")?;
    load_documented(router, "sticky", "sticky")?;
    let current: Value = http::get(&format!("{router}/admin/v1/pattern"))?.json()?;
    let available = current["available"].as_array().context("no list of patterns")?;
    let known = [
        json!({"name": "data_parallel"}),
        json!({"name": "prefill_decode"}),
        json!({"name": "balanced", "ratio": 0.1}),
        json!({"name": "balanced", "ratio": 0.5}),
        json!({"name": "adaptive"}),
        json!({"name": "adaptive", "roles": "free"}),
        json!({"name": "migrate", "after_tokens": 3}),
        json!({"name": "scripted"}),
        json!({"name": "sticky"}),
    ];
    for own in &known {
        if !available.contains(&own["name"]) {
            bail!("the router has no pattern {}: {available:?}", own["name"]);
        }
    }
    let others = available.iter().filter(|name| known.iter().all(|own| own["name"] != **name));
    let others: Vec<Value> = others.map(|name| json!({"name": name})).collect();
    Ok(known.into_iter().chain(others).collect())
}

/// Returns a pattern as the header `x-microserving-pattern` names it.
#[must_use]
pub fn program_name(pattern: &Value) -> String {
    let name = pattern["name"].as_str().unwrap_or_default();
    match pattern.as_object().into_iter().flatten().find(|(key, _)| *key != "name") {
        Some((_, Value::String(value))) => format!("{name}:{value}"),
        Some((_, value)) => format!("{name}:{value}"),
        None => name.to_owned(),
    }
}
