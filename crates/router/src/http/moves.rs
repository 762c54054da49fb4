//! Moving requests and contexts, as operators ask for it.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use microserving_client::CallContext;
use microserving_protocol::{ApiError, Fields, Prompt};

use super::respond::{Failure, WholeBody};
use crate::{ContextMove, Error, Moved, MovedContext, RouterService, prompt};

/// Moves a running request to another engine.
pub(crate) async fn request(
    State(service): State<Arc<RouterService>>,
    WholeBody(body): WholeBody,
) -> Result<Json<Moved>, Failure> {
    let mut fields = Fields::parse(&body)?;
    let name = match (fields.opt_string("seq_id")?, fields.opt_string("request_id")?) {
        (Some(name), None) | (None, Some(name)) => name,
        (Some(_), Some(_)) => {
            return Err(ApiError::bad_request("request_id", "give seq_id or request_id, not both").into());
        }
        (None, None) => return Err(ApiError::unprocessable("seq_id is missing").with_param("seq_id").into()),
    };
    let to = fields.opt_string("to")?;
    refuse_others(fields, "a move")?;
    Ok(Json(service.migrate(&name, to.as_deref()).await?))
}

/// Copies a context to another engine.
pub(crate) async fn context(
    State(service): State<Arc<RouterService>>,
    WholeBody(body): WholeBody,
) -> Result<Json<MovedContext>, Failure> {
    let mut fields = Fields::parse(&body)?;
    let prompt = fields.prompt()?;
    let model = fields.opt_string("model")?;
    let cache_salt = fields.opt_string("cache_salt")?;
    let from = fields.opt_string("from")?;
    let to = fields.string("to")?;
    refuse_others(fields, "a context")?;
    let model = service.model(model.as_deref())?;
    let tokens = match prompt {
        Prompt::Tokens(tokens) => tokens.into_vec(),
        Prompt::Text(text) => {
            let call = CallContext::within(service.request_timeout);
            let codec = service.codecs.get(service.cluster(), &call, &model.id).await?;
            prompt::encode(codec, &model, text, true).await.map_err(Error::from)?
        }
    };
    let context = ContextMove { tokens, model: Some(model.id), cache_salt, from, to };
    Ok(Json(service.migrate_context(context).await?))
}

fn refuse_others(fields: Fields, of: &str) -> Result<(), ApiError> {
    match fields.rest().keys().next() {
        None => Ok(()),
        Some(unknown) => Err(ApiError::bad_request(unknown, format!("{unknown} is no field of {of}"))),
    }
}
