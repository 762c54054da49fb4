//! What can change while serving, as one document.

use std::sync::Arc;

use microserving_client::{EngineAddress, EngineKind};
use microserving_protocol::{ApiError, Fields};
use serde_json::{Value, json};

use crate::membership::check_weight;
use crate::rules::{read_pattern_field, read_rules};
use crate::{Cluster, Connect, EngineSpec, Pattern, Patterns, Role, RouterService, Rule, Thresholds};

/// Engines that there may be.
const MAX_ENGINES: usize = 4096;

/// All that can change while serving.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The engines, by their addresses.
    pub engines: Vec<EngineEntry>,
    /// The pattern of requests that name none and fit no rule.
    pub pattern: Pattern,
    /// The rules that choose a pattern before that.
    pub rules: Vec<Rule>,
    /// When engines are trusted, and requests turned away.
    pub thresholds: Thresholds,
}

/// An engine, as the configuration names it.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineEntry {
    /// Its address: where it is reached, and what goes with that.
    pub url: String,
    /// What kind of server it is, if that is said beside the address.
    pub kind: Option<EngineKind>,
    /// What it is used for.
    pub role: Role,
    /// Its share of the requests, beside one of weight 1.
    pub weight: f64,
    /// Whether it gets no new requests.
    pub is_draining: bool,
}

impl EngineEntry {
    /// Describes an engine for any role, of weight 1.
    #[must_use]
    pub fn new(url: &str) -> Self {
        Self { url: url.to_owned(), kind: None, role: Role::Any, weight: 1.0, is_draining: false }
    }

    /// Returns its address, checked.
    ///
    /// # Errors
    /// 400 if it is none, or what the engine is for does not suit its kind.
    pub fn address(&self) -> Result<EngineAddress, ApiError> {
        let bad = |error: microserving_client::BadUrl| ApiError::bad_request("url", error.to_string());
        let address = EngineAddress::with_kind(&self.url, self.kind).map_err(bad)?;
        if self.role == Role::Prefill && !address.kind.moves_kv() {
            let message = format!(
                "the engine {} cannot prefill for others: it is of the kind {}",
                self.url, address.kind
            );
            return Err(ApiError::bad_request("role", message));
        }
        Ok(address)
    }

    /// Returns how to route to it. Connects on the first call.
    ///
    /// # Errors
    /// As [`EngineEntry::address`].
    pub fn spec(&self, connector: &dyn Connect) -> Result<EngineSpec, ApiError> {
        let address = self.address()?;
        let calls = connector.connect(&address);
        let calls = calls.map_err(|error| ApiError::bad_request("url", error.to_string()))?;
        Ok(EngineSpec {
            recv_rank: address.recv_rank,
            address: address.to_string(),
            ..EngineSpec::new(calls, self.role).with_weight(self.weight)
        })
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "url": self.url,
            "kind": self.kind.map(EngineKind::name),
            "role": self.role.name(),
            "weight": self.weight,
            "draining": self.is_draining,
        })
    }

    /// Reads one; what is left out is as usual.
    pub(crate) fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let mut entry = Self::new(&fields.string("url")?);
        if let Some(kind) = fields.opt_string("kind")? {
            let path = fields.path("kind");
            let bad = |error: microserving_client::BadKind| {
                ApiError::bad_request(&path, format!("{path} is {error}"))
            };
            entry.kind = Some(kind.parse().map_err(bad)?);
        }
        entry.change(fields, "an engine")?;
        Ok(entry)
    }

    /// Reads what can change of one.
    pub(crate) fn change(&mut self, mut fields: Fields, of: &str) -> Result<(), ApiError> {
        if let Some(role) = fields.opt_string("role")? {
            let path = fields.path("role");
            self.role =
                role.parse().map_err(|what| ApiError::bad_request(&path, format!("{path} {what}")))?;
        }
        if let Some(weight) = fields.opt_f64("weight")? {
            check_weight(weight)?;
            self.weight = weight;
        }
        if let Some(draining) = fields.opt_bool("draining")? {
            self.is_draining = draining;
        }
        fields.refuse_rest(of)
    }
}

impl Config {
    /// Returns the document.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "engines": self.engines.iter().map(EngineEntry::to_json).collect::<Vec<_>>(),
            "pattern": self.pattern.to_json(),
            "rules": self.rules.iter().map(Rule::to_json).collect::<Vec<_>>(),
            "thresholds": self.thresholds.to_json(),
        })
    }

    /// Reads a whole document; a threshold that is left out stays as in `now`, all else must be there.
    pub(crate) fn read(mut fields: Fields, now: &Self) -> Result<Self, ApiError> {
        let missing = |fields: &Fields, name: &str| fields.wrong(name, "is missing".into());
        let engines = fields.opt_array("engines")?.ok_or_else(|| missing(&fields, "engines"))?;
        let pattern = read_pattern_field(&mut fields)?.ok_or_else(|| missing(&fields, "pattern"))?;
        let rules = fields.opt_array("rules")?.ok_or_else(|| missing(&fields, "rules"))?;
        let thresholds = fields.opt_object("thresholds")?.ok_or_else(|| missing(&fields, "thresholds"))?;
        fields.refuse_rest("a configuration")?;
        let read_engine = |(at, value)| match value {
            Value::Object(map) => EngineEntry::read(Fields::nested(map, &format!("engines[{at}]"))),
            _ => {
                let path = format!("engines[{at}]");
                Err(ApiError::unprocessable(format!("{path} must be an object")).with_param(path))
            }
        };
        Ok(Self {
            engines: engines.into_iter().enumerate().map(read_engine).collect::<Result<_, _>>()?,
            pattern,
            rules: read_rules(rules)?,
            thresholds: now.thresholds.read(thresholds)?,
        })
    }

    /// Returns the parts in which two documents differ: how they were, and how they are.
    pub(crate) fn difference(before: &Self, after: &Self) -> (Value, Value) {
        let (mut old, mut new) = (before.to_json(), after.to_json());
        if let (Some(old), Some(new)) = (old.as_object_mut(), new.as_object_mut()) {
            old.retain(|name, value| {
                let same = new.get(name) == Some(value);
                if same {
                    new.shift_remove(name);
                }
                !same
            });
        }
        (old, new)
    }
}

/// A configuration that was checked, with what it takes to put it into force.
pub(crate) struct Plan {
    next: Config,
    joins: Vec<(EngineEntry, EngineSpec)>,
}

impl RouterService {
    /// Returns what can change, as it is now.
    #[must_use]
    pub fn config(&self) -> Config {
        Config::of(self.cluster(), &self.patterns)
    }
}

impl Config {
    pub(crate) fn of(cluster: &Cluster, patterns: &Patterns) -> Self {
        let entry = |engine: &Arc<crate::Engine>| EngineEntry {
            url: engine.address().to_owned(),
            kind: Some(engine.kind()),
            role: engine.role(),
            weight: engine.weight(),
            is_draining: engine.is_draining(),
        };
        Self {
            engines: cluster.engines().iter().map(entry).collect(),
            pattern: patterns.current(),
            rules: patterns.rules(),
            thresholds: cluster.thresholds(),
        }
    }
}

impl RouterService {
    /// Checks all of a configuration. Changes nothing.
    pub(crate) fn plan(&self, mut next: Config) -> Result<Plan, ApiError> {
        let mut joins = Vec::new();
        if next.engines.len() > MAX_ENGINES {
            let message =
                format!("engines has {} entries, must have at most {MAX_ENGINES}", next.engines.len());
            return Err(ApiError::bad_request("engines", message));
        }
        for (at, entry) in next.engines.iter_mut().enumerate() {
            let bad = |field: &str, what: String| {
                let path = format!("engines[{at}].{field}");
                ApiError::bad_request(&path, format!("{path} {what}"))
            };
            check_weight(entry.weight)?;
            let engines = self.cluster().engines();
            let with_address = |address: &str| engines.iter().find(|engine| engine.address() == address);
            let kind = match with_address(&entry.url) {
                Some(known) => known.kind(),
                None => {
                    let spec = entry.spec(&*self.connector).map_err(|error| {
                        let path = format!("engines[{at}].{}", error.param.as_deref().unwrap_or("url"));
                        ApiError { message: format!("{path}: {}", error.message), ..error }.with_param(path)
                    })?;
                    // One engine has one address, however it is written.
                    spec.address.clone_into(&mut entry.url);
                    let kind = spec.calls.kind();
                    if with_address(&entry.url).is_none() {
                        if let Some(other) = self.cluster().named(spec.calls.name()) {
                            return Err(bad("url", format!("is in the cluster as {}", other.address())));
                        }
                        joins.push((entry.clone(), spec));
                    }
                    kind
                }
            };
            if entry.kind.is_some_and(|asked| asked != kind) {
                return Err(bad("kind", format!("is not {kind}, which the address says")));
            }
            if entry.role == Role::Prefill && !kind.moves_kv() {
                return Err(bad("role", format!("is prefill, which engines of the kind {kind} cannot")));
            }
            entry.kind = Some(kind);
        }
        for (at, entry) in next.engines.iter().enumerate() {
            if next.engines[..at].iter().any(|other| other.url == entry.url) {
                let path = format!("engines[{at}].url");
                return Err(ApiError::conflict(format!("{path} is {} again", entry.url)).with_param(path));
            }
        }
        next.thresholds.check()?;
        self.patterns.check_all(&next.pattern, &next.rules).map_err(bad_pattern)?;
        Ok(Plan { next, joins })
    }

    /// Puts a configuration into force. Engines that it does not name get no new requests; `force` sends those that they have elsewhere.
    pub(crate) fn apply(&self, plan: Plan, force: bool) -> Result<(), ApiError> {
        let Plan { next, joins } = plan;
        // The one thing that can still fail, because programs come and go by another door.
        self.patterns.set_all(&next.pattern, &next.rules).map_err(bad_pattern)?;
        self.cluster().set_thresholds(next.thresholds);
        for engine in self.cluster().engines().iter() {
            match next.engines.iter().find(|entry| entry.url == engine.address()) {
                None => self.let_go(engine, force),
                Some(entry) => {
                    engine.set_role(entry.role);
                    engine.set_weight(entry.weight);
                    if !entry.is_draining {
                        engine.undrain();
                    } else if !engine.is_draining() {
                        engine.drain();
                        self.move_away(engine);
                    }
                }
            }
        }
        for (entry, spec) in joins {
            if let Some(engine) = self.cluster().join(spec) {
                if entry.is_draining {
                    engine.drain();
                }
                self.follow(&engine);
            }
        }
        Ok(())
    }
}

fn bad_pattern((rule, error): (Option<usize>, crate::BadPattern)) -> ApiError {
    let path = match rule {
        None => error.field().to_owned(),
        Some(at) => format!("rules[{at}].pattern.{}", error.field()),
    };
    ApiError::bad_request(path, error.to_string())
}
