//! `/admin/v1/pattern`, `/admin/v1/patterns` and `/admin/v1/rules`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use microserving_protocol::{ApiError, Fields};
use serde_json::{Value, json};

use super::{Write, answer, shown};
use crate::http::respond::{Failure, WholeBody};
use crate::rules::{read_pattern, read_rules};
use crate::{Parameter, RouterService, Rule};

/// Returns the pattern in use and those there are.
pub(super) async fn pattern(State(service): State<Arc<RouterService>>) -> Response {
    shown(&service, show_pattern(&service))
}

/// Changes the pattern for requests that come from now on.
pub(super) async fn set_pattern(
    State(service): State<Arc<RouterService>>,
    mut write: Write,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    let mut fields = Fields::parse(&body)?;
    write.expect_revision_of(&mut fields)?;
    // What came with the GET may come back.
    fields.take("available");
    fields.take("caution");
    let pattern = read_pattern(fields)?;
    let revision = service.configure(&write.change(format!("set pattern {pattern}")), |config| {
        config.pattern = pattern;
        Ok(())
    })?;
    service.warn_of_caution();
    Ok(answer(StatusCode::OK, revision, show_pattern(&service)))
}

/// Returns the patterns there are, each with what it can be told.
pub(super) async fn patterns(State(service): State<Arc<RouterService>>) -> Response {
    let names = service.patterns.names();
    let factories = names.iter().filter_map(|name| service.patterns.factory(name));
    let shown_ones: Vec<Value> = factories
        .map(|factory| {
            let parameters: Vec<Value> = factory.parameters().iter().map(Parameter::to_json).collect();
            json!({"name": factory.name(), "about": factory.about(), "parameters": parameters})
        })
        .collect();
    shown(&service, json!({"patterns": shown_ones}))
}

/// Returns the rules.
pub(super) async fn rules(State(service): State<Arc<RouterService>>) -> Response {
    shown(&service, show_rules(&service))
}

/// Changes the rules for requests that come from now on.
pub(super) async fn set_rules(
    State(service): State<Arc<RouterService>>,
    mut write: Write,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    let mut fields = Fields::parse(&body)?;
    write.expect_revision_of(&mut fields)?;
    let rules = fields.opt_array("rules")?;
    let rules = rules.ok_or_else(|| ApiError::unprocessable("rules is missing").with_param("rules"))?;
    fields.refuse_rest("a list of rules")?;
    let rules = read_rules(rules)?;
    let revision = service.configure(&write.change(format!("set {} rule(s)", rules.len())), |config| {
        config.rules = rules;
        Ok(())
    })?;
    Ok(answer(StatusCode::OK, revision, show_rules(&service)))
}

fn show_pattern(service: &RouterService) -> Value {
    let mut shown = service.patterns.current().to_json();
    shown["available"] = service.patterns.names().into();
    if let Some(caution) = service.caution() {
        shown["caution"] = caution.into();
    }
    shown
}

fn show_rules(service: &RouterService) -> Value {
    json!({"rules": service.patterns.rules().iter().map(Rule::to_json).collect::<Vec<_>>()})
}
