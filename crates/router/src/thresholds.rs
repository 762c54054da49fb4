//! The bounds that decide when an engine is trusted, and when a request is turned away; all of them change while serving.

use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use microserving_protocol::{ApiError, Fields};
use serde_json::{Value, json};

/// When an engine is trusted, and when a request is turned away.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// Between two looks at an engine.
    pub heartbeat: Duration,
    /// An engine that gives no sign of life for so long gets no new requests.
    pub suspect: Duration,
    /// One that gives none for so long is given up: what runs there runs elsewhere.
    pub dead: Duration,
    /// How long the share of an engine that is new or came back rises to its weight; zero is at once.
    pub slow_start: Duration,
    /// Failures in a row that stop new requests to an engine; 0 never does.
    pub breaker_failures: u32,
    /// After how long one request may try such an engine again.
    pub breaker_cooldown: Duration,
    /// Requests for which this time to the first token is predicted to be exceeded are turned away; none turns nobody away.
    pub max_ttft: Option<Duration>,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(250),
            suspect: Duration::from_secs(1),
            dead: Duration::from_secs(3),
            slow_start: Duration::from_secs(10),
            breaker_failures: 5,
            breaker_cooldown: Duration::from_secs(5),
            max_ttft: None,
        }
    }
}

impl Thresholds {
    /// Returns them as the configuration document shows them.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "heartbeat_seconds": self.heartbeat.as_secs_f64(),
            "suspect_seconds": self.suspect.as_secs_f64(),
            "dead_seconds": self.dead.as_secs_f64(),
            "slow_start_seconds": self.slow_start.as_secs_f64(),
            "breaker_failures": self.breaker_failures,
            "breaker_cooldown_seconds": self.breaker_cooldown.as_secs_f64(),
            "max_ttft_seconds": self.max_ttft.map(|most| most.as_secs_f64()),
        })
    }

    /// Reads them from `fields`; what is not there stays as in `self`, but a null `max_ttft_seconds` is none.
    pub(crate) fn read(self, mut fields: Fields) -> Result<Self, ApiError> {
        let mut next = self;
        for (name, value) in [
            ("heartbeat_seconds", &mut next.heartbeat),
            ("suspect_seconds", &mut next.suspect),
            ("dead_seconds", &mut next.dead),
            ("slow_start_seconds", &mut next.slow_start),
            ("breaker_cooldown_seconds", &mut next.breaker_cooldown),
        ] {
            if let Some(seconds) = seconds(&mut fields, name)? {
                *value = seconds;
            }
        }
        if let Some(failures) = fields.opt_u32("breaker_failures")? {
            next.breaker_failures = failures;
        }
        let says_ttft = fields.contains("max_ttft_seconds");
        if says_ttft {
            next.max_ttft = seconds(&mut fields, "max_ttft_seconds")?;
        }
        fields.refuse_rest("a threshold")?;
        next.check()?;
        Ok(next)
    }

    /// Checks that they go together.
    ///
    /// # Errors
    /// 400 naming the first that does not fit.
    pub fn check(&self) -> Result<(), ApiError> {
        let wrong = |name: &str, value: Duration, bound: String| {
            let name = format!("thresholds.{name}");
            let message = format!("{name} is {}, must be {bound}", value.as_secs_f64());
            Err(ApiError::bad_request(name, message))
        };
        if self.heartbeat < Duration::from_millis(10) {
            return wrong("heartbeat_seconds", self.heartbeat, "at least 0.01".into());
        }
        if self.suspect < self.heartbeat {
            return wrong("suspect_seconds", self.suspect, "at least heartbeat_seconds".into());
        }
        if self.dead < self.suspect {
            return wrong("dead_seconds", self.dead, "at least suspect_seconds".into());
        }
        if self.breaker_cooldown.is_zero() {
            return wrong("breaker_cooldown_seconds", self.breaker_cooldown, "above 0".into());
        }
        if let Some(most) = self.max_ttft.filter(Duration::is_zero) {
            return wrong("max_ttft_seconds", most, "above 0, or null for no bound".into());
        }
        Ok(())
    }
}

fn seconds(fields: &mut Fields, name: &str) -> Result<Option<Duration>, ApiError> {
    let Some(value) = fields.opt_f64(name)? else { return Ok(None) };
    if (0.0..=86_400.0).contains(&value) {
        return Ok(Some(Duration::from_secs_f64(value)));
    }
    let path = fields.path(name);
    Err(ApiError::bad_request(&path, format!("{path} is {value}, must be in [0, 86400]")))
}

/// The thresholds in use.
#[derive(Debug, Default)]
pub(crate) struct Limits(RwLock<Thresholds>);

impl Limits {
    pub(crate) fn get(&self) -> Thresholds {
        *self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, thresholds: Thresholds) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = thresholds;
    }
}
