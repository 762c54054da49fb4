//! What of the options can change while serving, and reading it again on SIGHUP.

use std::collections::BTreeMap;
use std::ffi::OsString;

use microserving_daemon::{Loaded, Refused, describe, load, values};
use microserving_router::{Change, Config, EngineEntry, Role, RouterService, Thresholds};
use tracing::{info, warn};

use crate::options::Options;

/// The options that are read again; all others need a restart.
const LIVE: [&str; 12] = [
    "engine",
    "prefill",
    "decode",
    "pattern",
    "rules",
    "max_ttft_seconds",
    "heartbeat_seconds",
    "suspect_seconds",
    "dead_seconds",
    "slow_start_seconds",
    "breaker_failures",
    "breaker_cooldown_seconds",
];

/// The values that the options had when they were read last.
#[derive(Debug)]
pub(crate) struct Reloader {
    seen: BTreeMap<String, Vec<OsString>>,
}

impl Reloader {
    pub(crate) fn new() -> Self {
        Self { seen: values::<Options>(std::env::args_os()).unwrap_or_default() }
    }

    /// Reads the options again and puts into force what can change. What cannot be read changes nothing.
    pub(crate) fn reload(&mut self, service: &RouterService) {
        let change = Change::new("SIGHUP", "read the configuration again");
        match self.read(service, &change) {
            Ok(revision) => info!(revision, "configuration read again"),
            Err(reason) => service.note_refusal(&change, &reason),
        }
    }

    fn read(&mut self, service: &RouterService, change: &Change) -> Result<u64, String> {
        let options = match load::<Options>(std::env::args_os()) {
            Ok(Loaded::Run(options)) => options,
            Ok(Loaded::Print(_)) => return Err("the arguments ask for a print-out".into()),
            Err(error) => return Err(describe(&error)),
        };
        let now = values::<Options>(std::env::args_os()).map_err(|error| describe(&error))?;
        let entries = engines(&options).map_err(|error| error.to_string())?;
        let revision = service
            .configure(change, |config| {
                *config = config_of(&options, entries, config);
                Ok(())
            })
            .map_err(|error| error.message)?;
        for key in self.seen.keys().chain(now.keys()) {
            if self.seen.get(key) != now.get(key) && !LIVE.contains(&key.as_str()) {
                warn!(option = key, "was changed in the configuration and needs a restart");
            }
        }
        self.seen = now;
        Ok(revision)
    }
}

/// Returns the engines that the options name.
pub(crate) fn engines(options: &Options) -> Result<Vec<EngineEntry>, Refused> {
    let roles =
        [(&options.engine, Role::Any), (&options.prefill, Role::Prefill), (&options.decode, Role::Decode)];
    let mut entries: Vec<EngineEntry> = Vec::new();
    for (urls, role) in roles {
        for url in urls {
            let entry = EngineEntry { role, ..EngineEntry::new(url) };
            // As it is written when it runs.
            let address = entry.address().map_err(|error| Refused(error.message))?;
            let entry = EngineEntry { url: address.to_string(), ..entry };
            if entries.iter().any(|known| known.url == entry.url) {
                return Err(Refused(format!("the engine {url} is given twice")));
            }
            entries.push(entry);
        }
    }
    if entries.is_empty() {
        return Err(Refused("no engines: give --engine, or --prefill and --decode".into()));
    }
    if entries.iter().all(|entry| entry.role == Role::Prefill) {
        return Err(Refused("no engine may decode: give --decode or --engine beside --prefill".into()));
    }
    if (options.min_engines as usize) > entries.len() {
        let message = format!("min_engines is {}, only {} are given", options.min_engines, entries.len());
        return Err(Refused(message));
    }
    Ok(entries)
}

pub(crate) fn thresholds(options: &Options) -> Thresholds {
    Thresholds {
        heartbeat: options.heartbeat_seconds,
        suspect: options.suspect_seconds,
        dead: options.dead_seconds,
        slow_start: options.slow_start_seconds,
        breaker_failures: options.breaker_failures,
        breaker_cooldown: options.breaker_cooldown_seconds,
        max_ttft: options.max_ttft_seconds,
    }
}

/// Returns the configuration that the options ask for. Weights and drains are no options, so engines that stay keep theirs.
fn config_of(options: &Options, mut engines: Vec<EngineEntry>, now: &Config) -> Config {
    for entry in &mut engines {
        if let Some(known) = now.engines.iter().find(|known| known.url == entry.url) {
            *entry = EngineEntry { role: entry.role, ..known.clone() };
        }
    }
    Config {
        engines,
        pattern: options.pattern.clone(),
        rules: options.rules.clone().map(|rules| rules.0).unwrap_or_default(),
        thresholds: thresholds(options),
    }
}
