//! `GET /v1/models`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_protocol::{ModelCard, ModelList};

use crate::app::App;

/// Lists the one model.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Json<ModelList> {
    let max_context = app.engine.info().executor.max_context;
    Json(ModelList::new(vec![ModelCard::new(&app.config.served_model_name, app.created, max_context)]))
}
