//! `GET /microserving/state`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_engine::{EngineCounters, EngineInfo, EngineState, PageCounts};
use microserving_protocol::{ApiError, CountersView, PagesView, StateView};

use crate::app::{App, ServerConfig};
use crate::errors::{Failure, api_error};

/// Shows the engine's load.
pub(crate) async fn state(State(app): State<Arc<App>>) -> Result<Json<StateView>, Failure> {
    Ok(Json(serve(&app).await?))
}

/// Serves the call, whatever wire it came over.
pub(crate) async fn serve(app: &App) -> Result<StateView, ApiError> {
    let state = app.engine.state().await.map_err(|error| api_error(&error))?;
    Ok(view(app.engine.info(), &app.config, state))
}

fn view(info: &EngineInfo, config: &ServerConfig, state: EngineState) -> StateView {
    StateView {
        engine_id: state.engine_id,
        incarnation: format!("{:016x}", state.incarnation.0),
        model: config.served_model_name.clone(),
        max_context: info.executor.max_context,
        page_size: state.page_size,
        layout_fingerprint: format!("{:016x}", info.executor.layout.fingerprint()),
        pages: pages(state.pages),
        waiting: state.waiting,
        running: state.running,
        receiving: state.receiving,
        sending: state.sending,
        queued_prefill_tokens: state.queued_prefill_tokens,
        draining: state.draining,
        counters: counters(state.counters),
        grpc: config.grpc,
        marks: true,
    }
}

fn pages(pages: PageCounts) -> PagesView {
    let PageCounts { free, reserved, owned, cached, quarantined, total } = pages;
    PagesView { free, reserved, owned, cached, quarantined, total }
}

fn counters(counters: EngineCounters) -> CountersView {
    // Every field is named, so that a new counter does not compile until it is shown.
    let EngineCounters {
        steps,
        prefill_tokens,
        decode_tokens,
        matched_tokens,
        lookup_tokens,
        evicted_pages,
        preemptions,
        leases_expired,
        transfers_lost,
        aborted,
        bytes_sent,
        bytes_received,
        transfer_micros,
        exposed_transfer_micros,
        devices_lost,
    } = counters;
    CountersView {
        steps,
        prefill_tokens,
        decode_tokens,
        matched_tokens,
        lookup_tokens,
        evicted_pages,
        preemptions,
        leases_expired,
        transfers_lost,
        aborted,
        bytes_sent,
        bytes_received,
        transfer_micros,
        exposed_transfer_micros,
        devices_lost,
    }
}
