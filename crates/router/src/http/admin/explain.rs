//! `/admin/v1/explain`: what would be chosen for a request, and why.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use microserving_protocol::{ApiError, Fields};
use serde_json::{Value, json};

use super::{engines, shown};
use crate::client_headers::ClientHeaders;
use crate::http::generate::{self, Asked};
use crate::http::headers::{self, RequestId};
use crate::http::respond::{Failure, WholeBody};
use crate::placement::Job;
use crate::rules::read_pattern_field;
use crate::{Engine, Request, RouterService};

/// Pairs of engines that are shown.
const MAX_PAIRS: usize = 64;

/// Explains a completion or chat request, with the pattern it names, if it names one. Nothing is sent, and nothing changes.
pub(super) async fn explain(
    State(service): State<Arc<RouterService>>,
    Extension(RequestId(id)): Extension<RequestId>,
    headers: HeaderMap,
    WholeBody(body): WholeBody,
) -> Result<Response, Failure> {
    let mut fields = Fields::parse(&body)?;
    let in_body = read_pattern_field(&mut fields)?;
    let asked = match in_body {
        Some(pattern) => Some(pattern),
        None => headers::pattern(&headers)?,
    };
    let call = generate::call_context(&service, id, &headers);
    let read = generate::read(&service, &call, Asked::from_fields(&mut fields)?.0).await?;
    let request = generate::request(&service, &read)?.with_kept(ClientHeaders::keep(headers)?);
    let (rule, chosen) = match asked {
        Some(pattern) => {
            let chosen = service.patterns.choose(Some(&pattern));
            (None, chosen.map_err(|error| ApiError::bad_request("pattern", error.to_string()))?)
        }
        None => service.patterns.for_request(&request),
    };
    let mut explained = json!({
        "pattern": chosen.pattern.to_json(),
        "rule": rule,
        "model": request.model(),
        "tenant": request.tenant(),
        "num_tokens": request.len(),
    });
    candidates(&service, &request, &mut explained);
    Ok(shown(&service, explained))
}

/// What one engine would see of a request.
struct Candidate {
    engine: Arc<Engine>,
    held: u32,
}

fn candidates(service: &RouterService, request: &Request, explained: &mut Value) {
    let (cluster, placement) = (service.cluster(), &service.shared.placement);
    let look = |engines: Vec<Arc<Engine>>| -> Vec<Candidate> {
        let held = placement.hints(&engines, request);
        engines.into_iter().zip(held).map(|(engine, held)| Candidate { engine, held }).collect()
    };
    let decoders = look(cluster.decoders(request.model()));
    let prefillers = look(cluster.prefillers(request.model()));
    let all = look(cluster.engines().to_vec());
    explained["engines"] = all.iter().map(|candidate| show(candidate, request)).collect();

    let pairs = decoders.iter().flat_map(|d| prefillers.iter().map(move |p| (d, p)));
    let pairs =
        pairs.filter(|(d, p)| d.engine.number() != p.engine.number() && d.engine.exchanges_with(&p.engine));
    explained["pairs"] = pairs.take(MAX_PAIRS).map(|(d, p)| show_pair(d, p, request)).collect();

    let engines_of = |all: &[Candidate]| all.iter().map(|one| one.engine.clone()).collect::<Vec<_>>();
    let decode = placement.peek(Job::Decode, &engines_of(&decoders), request);
    let mut others = engines_of(&prefillers);
    if let Some(decode) = &decode {
        others.retain(|engine| {
            engine.number() != decode.engine.number() && engine.exchanges_with(&decode.engine)
        });
    }
    let prefill = placement.peek(Job::Prefill, &others, request);
    let name =
        |choice: Option<crate::placement::Choice>| choice.map(|choice| choice.engine.name().to_owned());
    explained["chosen"] = json!({"decode": name(decode), "prefill": name(prefill)});
}

fn show(candidate: &Candidate, request: &Request) -> Value {
    let Candidate { engine, held } = candidate;
    let mut shown = engines::show(engine);
    if let Some(object) = shown.as_object_mut() {
        object.retain(|name, _| {
            [
                "id",
                "url",
                "role",
                "health",
                "breaker",
                "takes_requests",
                "effective_weight",
                "in_flight",
                "load",
            ]
            .contains(&name.as_str())
        });
    }
    let prediction = engine.outlook().predict(request.len().saturating_sub(*held).max(1), request.len());
    shown["held_tokens"] = (*held).into();
    shown["predicted"] = json!({
        "ttft_seconds": prediction.ttft.as_secs_f64(),
        "tpot_seconds": prediction.tpot.as_secs_f64(),
    });
    shown
}

/// Shows what `prefill_decode` would take: P computes what it lacks and sends what D lacks, D computes the last token.
fn show_pair(d: &Candidate, p: &Candidate, request: &Request) -> Value {
    let end = request.len().saturating_sub(1);
    let (on_d, on_p) = (d.engine.outlook(), p.engine.outlook());
    let to_send = end.saturating_sub(d.held);
    let mut ttft = on_d.predict(1, request.len()).ttft.as_secs_f64();
    if to_send > 0 {
        let to_compute = end.saturating_sub(p.held).max(1);
        ttft += on_p.predict(to_compute, end).ttft.as_secs_f64() + on_p.transfer_seconds(to_send.into());
    }
    json!({
        "decode": d.engine.name(),
        "prefill": p.engine.name(),
        "sent_tokens": to_send,
        "predicted": {
            "ttft_seconds": ttft,
            "tpot_seconds": on_d.predict(1, request.len()).tpot.as_secs_f64(),
        },
    })
}
