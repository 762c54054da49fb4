//! What `/health/live`, `/health/ready` and `/health` answer.

use std::sync::{Arc, RwLock};

use axum::Json;
use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::StatusCode;
use http::header::RETRY_AFTER;
use serde_json::json;

/// How the daemon is. Clones speak of the same daemon.
///
/// `live` asks "should this process be restarted", `ready` asks "may it get work now". `/health` answers as `ready` does.
#[derive(Clone, Debug)]
pub struct Health {
    phase: Arc<RwLock<Phase>>,
}

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Starting { detail: String },
    Waiting { detail: String },
    Ready { detail: Option<String> },
    Draining,
    Failed { reason: String },
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

impl Health {
    /// Makes one that is live and not yet ready.
    #[must_use]
    pub fn new() -> Self {
        Self { phase: Arc::new(RwLock::new(Phase::Starting { detail: "starting".into() })) }
    }

    /// Says what the start is at: `loading the model: 40 %`. Ignored once the daemon is past starting.
    pub fn starting(&self, detail: impl Into<String>) {
        let detail = detail.into();
        self.change(|phase| match phase {
            Phase::Starting { .. } => Some(Phase::Starting { detail }),
            _ => None,
        });
    }

    /// Says that what the daemon depends on is not there, before it is ready for the first time or after.
    pub fn waiting(&self, detail: impl Into<String>) {
        let detail = detail.into();
        self.change(|phase| match phase {
            Phase::Starting { .. } => Some(Phase::Starting { detail }),
            Phase::Ready { .. } | Phase::Waiting { .. } => Some(Phase::Waiting { detail }),
            Phase::Draining | Phase::Failed { .. } => None,
        });
    }

    /// Says that work is welcome.
    pub fn ready(&self) {
        self.become_ready(None);
    }

    /// Says that work is welcome, and what was found out on the way.
    pub fn ready_with(&self, detail: impl Into<String>) {
        self.become_ready(Some(detail.into()));
    }

    fn become_ready(&self, detail: Option<String>) {
        self.change(|phase| match phase {
            Phase::Starting { .. } | Phase::Waiting { .. } => Some(Phase::Ready { detail }),
            _ => None,
        });
    }

    /// Says that work in flight ends and no new work is welcome.
    pub fn draining(&self) {
        self.change(|phase| match phase {
            Phase::Failed { .. } => None,
            _ => Some(Phase::Draining),
        });
    }

    /// Says that the daemon cannot go on; it is no longer live.
    pub fn failed(&self, reason: impl Into<String>) {
        let reason = reason.into();
        self.change(|_| Some(Phase::Failed { reason }));
    }

    /// Says whether work is welcome.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self.phase(), Phase::Ready { .. })
    }

    /// Returns the three routes.
    pub fn routes(&self) -> Router {
        let (live, ready, health) = (self.clone(), self.clone(), self.clone());
        Router::new()
            .route("/health/live", get(move || async move { live.answer(false) }))
            .route("/health/ready", get(move || async move { ready.answer(true) }))
            .route("/health", get(move || async move { health.answer(true) }))
    }

    /// Returns the answer to work that comes while there is none to take it.
    pub(crate) fn unavailable(&self) -> Response {
        let message = match self.phase() {
            Phase::Starting { detail } | Phase::Waiting { detail } => format!("not ready: {detail}"),
            Phase::Ready { .. } | Phase::Draining => "draining".to_owned(),
            Phase::Failed { reason } => reason,
        };
        let body = json!({"error": {
            "message": message, "type": "overloaded_error", "param": null, "code": "not_ready",
        }});
        (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")], Json(body)).into_response()
    }

    fn answer(&self, work: bool) -> Response {
        let (status, detail) = match self.phase() {
            Phase::Starting { detail } => ("starting", Some(detail)),
            Phase::Waiting { detail } => ("waiting", Some(detail)),
            Phase::Ready { detail } => ("ready", detail),
            Phase::Draining => ("draining", None),
            Phase::Failed { reason } => ("failed", Some(reason)),
        };
        let good = if work { status == "ready" } else { status != "failed" };
        let code = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        (code, Json(json!({"status": status, "detail": detail}))).into_response()
    }

    fn phase(&self) -> Phase {
        self.phase.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    fn change(&self, next: impl FnOnce(&Phase) -> Option<Phase>) {
        let mut phase = self.phase.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(next) = next(&phase) {
            *phase = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(health: &Health) -> (u16, u16) {
        (health.answer(false).status().as_u16(), health.answer(true).status().as_u16())
    }

    #[test]
    fn each_phase_answers_its_question() {
        let health = Health::new();
        assert_eq!(codes(&health), (200, 503));
        health.starting("loading");
        health.ready();
        assert_eq!(codes(&health), (200, 200));
        health.starting("too late");
        assert!(health.is_ready());
        health.waiting("no engine");
        health.starting("too late");
        assert_eq!(codes(&health), (200, 503));
        health.ready();
        assert!(health.is_ready());
        health.draining();
        health.waiting("too late");
        assert_eq!(codes(&health), (200, 503));
        health.ready();
        assert_eq!(codes(&health), (200, 503));
        health.failed("the step thread ended");
        assert_eq!(codes(&health), (503, 503));
        health.draining();
        assert_eq!(codes(&health), (503, 503));
        assert_eq!(health.unavailable().status().as_u16(), 503);
    }
}
