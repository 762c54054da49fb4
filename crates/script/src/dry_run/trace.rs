//! What a dry run plays: engines, and requests as they came.

use std::collections::BTreeMap;

use microserving_protocol::ApiError;
use microserving_router::Role;
use serde::Deserialize;
use serde_json::Value;

use super::role;

const MAX_ENGINES: usize = 64;
const MAX_REQUESTS: usize = 256;
/// Of all prompts together.
const MAX_TOKENS: usize = 1 << 20;
const DEFAULT_MODEL: &str = "dry-run";

/// A trace: JSON lines, each an engine (`{"engine": "a", …}`) or a request (`{"len": 800, …}`), or one object with the lists `engines` and
/// `requests` of them.
#[derive(Clone, Debug)]
pub struct Trace {
    pub(crate) engines: Vec<TraceEngine>,
    pub(crate) requests: Vec<TraceRequest>,
}

/// An engine of a trace.
#[derive(Clone, Debug)]
pub(crate) struct TraceEngine {
    pub(crate) name: String,
    pub(crate) role: Role,
    /// Requests of others that run there all the time.
    pub(crate) load: u32,
    pub(crate) queued_tokens: u64,
    /// Refuses to receive, as one without room does.
    pub(crate) full: bool,
}

/// A request of a trace.
#[derive(Clone, Debug)]
pub(crate) struct TraceRequest {
    pub(crate) tokens: Vec<u32>,
    pub(crate) model: Option<String>,
    pub(crate) max_tokens: u32,
    pub(crate) priority: i32,
    pub(crate) headers: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineLine {
    engine: String,
    #[serde(default = "any")]
    role: String,
    #[serde(default)]
    load: u32,
    #[serde(default)]
    queued_tokens: u64,
    #[serde(default)]
    full: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestLine {
    #[serde(default)]
    tokens: Option<Vec<u32>>,
    /// Instead of tokens: so many of them, the same for the same `topic`.
    #[serde(default)]
    len: Option<usize>,
    #[serde(default)]
    topic: u32,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    tenant: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    priority: i32,
    #[serde(default = "one")]
    max_tokens: u32,
}

fn any() -> String {
    "any".to_owned()
}

const fn one() -> u32 {
    1
}

impl Trace {
    /// Returns the trace that is played if none is given: two engines, prompts short and long, one of them twice.
    #[must_use]
    pub fn small() -> Self {
        Self::parse(include_bytes!("small.jsonl")).expect("a trace of our own is one")
    }

    /// Reads a trace.
    ///
    /// # Errors
    /// 400 if it is none, with the line.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(bytes).map_err(|_| bad("the trace is not UTF-8"))?;
        let lines = match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(mut whole)) if whole.contains_key("requests") => {
                let mut lines = Vec::new();
                for list in ["engines", "requests"] {
                    let Some(Value::Array(items)) = whole.remove(list) else {
                        return Err(bad(format!("{list} must be a list")));
                    };
                    let named = items.into_iter().enumerate();
                    lines.extend(named.map(|(at, value)| (format!("{list}[{at}]"), value)));
                }
                if let Some(other) = whole.keys().next() {
                    return Err(bad(format!("{other} is no field of a trace")));
                }
                lines
            }
            _ => {
                let mut lines = Vec::new();
                for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                    let at = format!("line {}", at + 1);
                    let value = serde_json::from_str(line).map_err(|error| bad(format!("{at}: {error}")))?;
                    lines.push((at, value));
                }
                lines
            }
        };
        let mut trace = Self { engines: Vec::new(), requests: Vec::new() };
        for (at, value) in lines {
            trace.add(value).map_err(|reason| bad(format!("{at}: {reason}")))?;
        }
        trace.check()?;
        Ok(trace)
    }

    fn add(&mut self, value: Value) -> Result<(), String> {
        if value.get("engine").is_some() {
            let line: EngineLine = serde_json::from_value(value).map_err(|error| error.to_string())?;
            let EngineLine { engine: name, role: asked, load, queued_tokens, full } = line;
            let role =
                role(&asked).ok_or_else(|| format!("role is {asked:?}, must be any, prefill or decode"))?;
            if self.engines.iter().any(|known| known.name == name) {
                return Err(format!("the engine {name:?} is there twice"));
            }
            self.engines.push(TraceEngine { name, role, load, queued_tokens, full });
            return Ok(());
        }
        let line: RequestLine = serde_json::from_value(value).map_err(|error| error.to_string())?;
        let tokens = match (line.tokens, line.len) {
            (Some(tokens), None) => tokens,
            (None, Some(len)) if len <= MAX_TOKENS => written(line.topic, len),
            (None, Some(_)) => return Err(format!("len must be at most {MAX_TOKENS}")),
            _ => return Err("either tokens or len must be given".to_owned()),
        };
        if tokens.is_empty() {
            return Err("the prompt has no tokens".to_owned());
        }
        let mut headers = line.headers;
        headers.extend(line.tenant.map(|tenant| ("x-microserving-tenant".to_owned(), tenant)));
        let (model, max_tokens, priority) = (line.model, line.max_tokens, line.priority);
        self.requests.push(TraceRequest { tokens, model, max_tokens, priority, headers });
        Ok(())
    }

    fn check(&self) -> Result<(), ApiError> {
        if self.engines.is_empty() || self.engines.len() > MAX_ENGINES {
            return Err(bad(format!("{} engines, must be 1 to {MAX_ENGINES}", self.engines.len())));
        }
        if self.requests.is_empty() || self.requests.len() > MAX_REQUESTS {
            return Err(bad(format!("{} requests, must be 1 to {MAX_REQUESTS}", self.requests.len())));
        }
        let tokens: usize = self.requests.iter().map(|request| request.tokens.len()).sum();
        if tokens > MAX_TOKENS {
            return Err(bad(format!("{tokens} tokens in all prompts, must be at most {MAX_TOKENS}")));
        }
        Ok(())
    }

    /// Returns the models that the requests name, each once; every engine serves all of them.
    pub(crate) fn models(&self) -> Vec<String> {
        let mut models: Vec<String> =
            self.requests.iter().filter_map(|request| request.model.clone()).collect();
        models.sort();
        models.dedup();
        if models.is_empty() {
            models.push(DEFAULT_MODEL.to_owned());
        }
        models
    }
}

/// Makes a prompt that shares its beginning with every other one of its topic and with none of another.
fn written(topic: u32, len: usize) -> Vec<u32> {
    (0_u32..)
        .take(len)
        .map(|at| topic.wrapping_mul(7919).wrapping_add(at.wrapping_mul(31)) % 30_000)
        .collect()
}

fn bad(message: impl Into<String>) -> ApiError {
    ApiError::bad_request("trace", message)
}
