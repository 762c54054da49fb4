//! An answer that says no, in OpenAI's words.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::lax;

/// A refusal or failure as it crosses the wire: a status and OpenAI's error body.
///
/// ```
/// use microserving_protocol::ApiError;
/// let error = ApiError::bad_request("top_p", "top_p is 2, must be in (0, 1]");
/// assert_eq!(error.status, 400);
/// assert_eq!(ApiError::from_body(400, error.to_json().as_bytes()), error);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: u16,
    /// What happened, for a person; names field, value and bound where there are such.
    pub message: String,
    /// OpenAI's `type`, a coarse class.
    pub kind: String,
    /// The field at fault.
    pub param: Option<String>,
    /// OpenAI's `code`, for programs.
    pub code: Option<String>,
    /// When to try again: the `Retry-After` header, not part of the body.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// Makes an error of any status; the type follows from the status.
    #[must_use]
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        let kind = match status {
            400 | 405 | 408 | 409 | 410 | 413 | 415 | 422 => "invalid_request_error",
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            _ => "server_error",
        };
        Self {
            status,
            message: message.into(),
            kind: kind.to_owned(),
            param: None,
            code: None,
            retry_after: None,
        }
    }

    /// Names the field at fault.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Sets the code.
    #[must_use]
    pub fn with_code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// Says when to try again.
    #[must_use]
    pub const fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// 400: a value is out of bounds, or asks for what is not implemented.
    #[must_use]
    pub fn bad_request(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(400, message).with_param(param)
    }

    /// 400: a parameter that we know and do not implement.
    #[must_use]
    pub fn not_implemented(param: impl Into<String>) -> Self {
        let param = param.into();
        Self::new(400, format!("{param} is not implemented"))
            .with_param(param)
            .with_code("unsupported_parameter")
    }

    /// 403: the address does not carry the receiver's signature.
    #[must_use]
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(403, message)
    }

    /// 404: no such sequence, model or path.
    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(404, message)
    }

    /// 404: the model asked for is not served here.
    #[must_use]
    pub fn model_not_found(model: &str) -> Self {
        Self::new(404, format!("the model {model:?} does not exist"))
            .with_param("model")
            .with_code("model_not_found")
    }

    /// 409: a stale attempt, the same key with another body, or another KV layout.
    #[must_use]
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(409, message)
    }

    /// 410: a lease that ran out, an aborted sequence, an address of an earlier boot.
    #[must_use]
    pub fn gone(message: impl Into<String>) -> Self {
        Self::new(410, message)
    }

    /// 413: the body is larger than allowed.
    #[must_use]
    pub fn too_large(limit_bytes: usize) -> Self {
        Self::new(413, format!("the body is larger than {limit_bytes} bytes"))
    }

    /// 422: the body is not JSON, or a field has the wrong type.
    #[must_use]
    pub fn unprocessable(message: impl Into<String>) -> Self {
        Self::new(422, message)
    }

    /// 429: the router sheds load.
    #[must_use]
    pub fn too_many_requests(message: impl Into<String>, retry_after: Duration) -> Self {
        Self::new(429, message).with_retry_after(retry_after)
    }

    /// 500: our fault.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, message)
    }

    /// 503: no room now, or no engine.
    #[must_use]
    pub fn unavailable(message: impl Into<String>, retry_after: Duration) -> Self {
        Self::new(503, message).with_retry_after(retry_after)
    }

    /// 504: the deadline passed.
    #[must_use]
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(504, message)
    }

    /// Returns the value of the `Retry-After` header: whole seconds, rounded up, at least 1.
    #[must_use]
    pub fn retry_after_seconds(&self) -> Option<u64> {
        let after = self.retry_after?;
        Some((after.as_secs() + u64::from(after.subsec_nanos() > 0)).max(1))
    }

    /// Returns the error body.
    #[must_use]
    pub fn to_json(&self) -> String {
        let body = ErrorBody {
            error: ErrorObject {
                message: self.message.clone(),
                kind: self.kind.clone(),
                param: self.param.clone(),
                code: self.code.clone(),
            },
        };
        serde_json::to_string(&body).expect("strings always serialise")
    }

    /// Returns the event that ends a stream with this error: the error body with the status in it, as the stream has none.
    #[must_use]
    pub fn to_event(&self) -> serde_json::Value {
        serde_json::json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.code, "status": self.status,
        }})
    }

    /// Reads an error body that came with `status`; a body of another shape becomes the message, cut to 500 characters.
    #[must_use]
    pub fn from_body(status: u16, body: &[u8]) -> Self {
        if let Ok(value) = serde_json::from_slice::<serde_json::Value>(body)
            && let Some(error) =
                Self::from_value(status, &value).or_else(|| Self::from_others(status, &value))
        {
            return error;
        }
        let text: String = String::from_utf8_lossy(body).chars().take(500).collect();
        Self::new(status, if text.is_empty() { format!("status {status} without a body") } else { text })
    }

    /// Reads the bodies of servers that write errors in their own way: OpenAI's fields without the object around them, the same once more as
    /// a string (MLC-LLM), and a list of fields at fault under `detail` (FastAPI).
    fn from_others(status: u16, value: &serde_json::Value) -> Option<Self> {
        if let Some(text) = value.as_str() {
            let inner =
                serde_json::from_str::<serde_json::Value>(text).ok().filter(|inner| !inner.is_string())?;
            return Self::from_value(status, &inner).or_else(|| Self::from_others(status, &inner));
        }
        if let Some(detail) = value.get("detail").and_then(|detail| detail.get(0)) {
            let message = detail.get("msg")?.as_str()?;
            let place =
                detail.get("loc").and_then(|place| place.as_array()).map(Vec::as_slice).unwrap_or_default();
            let field = place.iter().skip(1).filter_map(|part| part.as_str()).collect::<Vec<_>>().join(".");
            if field.is_empty() {
                return Some(Self::new(status, message));
            }
            return Some(Self::new(status, format!("{field}: {message}")).with_param(field));
        }
        value.get("message").filter(|message| message.is_string())?;
        Self::from_value(status, &serde_json::json!({"error": value}))
    }

    /// Reads `{"error": {...}}`, as a body or as an event of a stream; `None` if `value` is not that.
    ///
    /// An event of a stream carries its status beside OpenAI's four fields (see [`ApiError::to_event`]); `status` stands in
    /// where it does not.
    #[must_use]
    pub fn from_value(status: u16, value: &serde_json::Value) -> Option<Self> {
        let error = value.get("error")?.as_object()?;
        let own = error.get("status").and_then(|status| lax::int(status).ok());
        let status = own
            .and_then(|own| u16::try_from(own).ok())
            .filter(|own| (400..600).contains(own))
            .unwrap_or(status);
        let text = |name: &str| error.get(name).and_then(|v| v.as_str()).map(str::to_owned);
        let mut out = Self::new(status, text("message").unwrap_or_default());
        if let Some(kind) = text("type") {
            out.kind = kind;
        }
        out.param = text("param");
        out.code = text("code")
            .or_else(|| error.get("code").and_then(|code| lax::int(code).ok()).map(|code| code.to_string()));
        Some(out)
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status, self.message)
    }
}

impl std::error::Error for ApiError {}

#[derive(Serialize, Deserialize)]
struct ErrorBody {
    error: ErrorObject,
}

#[derive(Serialize, Deserialize)]
struct ErrorObject {
    message: String,
    #[serde(rename = "type")]
    kind: String,
    param: Option<String>,
    code: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_is_openais() {
        let error = ApiError::bad_request("n", "n is 0, must be in [1, 64]");
        assert_eq!(
            error.to_json(),
            r#"{"error":{"message":"n is 0, must be in [1, 64]","type":"invalid_request_error","param":"n","code":null}}"#
        );
    }

    #[test]
    fn every_constructor_survives_the_wire() {
        let second = Duration::from_millis(1500);
        for error in [
            ApiError::bad_request("a", "b"),
            ApiError::not_implemented("tools"),
            ApiError::forbidden("x"),
            ApiError::model_not_found("m"),
            ApiError::conflict("x"),
            ApiError::gone("x"),
            ApiError::too_large(7),
            ApiError::unprocessable("x"),
            ApiError::too_many_requests("x", second),
            ApiError::internal("x"),
            ApiError::unavailable("x", second),
            ApiError::timeout("x"),
        ] {
            let mut back = ApiError::from_body(error.status, error.to_json().as_bytes());
            back.retry_after = error.retry_after;
            assert_eq!(back, error);
            let mut back = ApiError::from_value(500, &error.to_event()).expect("an error");
            back.retry_after = error.retry_after;
            assert_eq!(back, error);
        }
        assert_eq!(ApiError::unavailable("x", second).retry_after_seconds(), Some(2));
        assert_eq!(ApiError::unavailable("x", Duration::ZERO).retry_after_seconds(), Some(1));
    }

    #[test]
    fn bodies_of_others_become_the_message() {
        assert_eq!(ApiError::from_body(502, b"<html>").message, "<html>");
        assert_eq!(ApiError::from_body(502, b"").message, "status 502 without a body");
        assert_eq!(ApiError::from_body(500, br#"{"error":"x"}"#).message, r#"{"error":"x"}"#);
        assert_eq!(
            ApiError::from_body(500, br#"{"error":{"message":"m","code":7}}"#).code.as_deref(),
            Some("7")
        );
        for (body, message, param) in [
            (r#"{"object":"error","message":"m","type":"t","param":"p","code":400}"#, "m", Some("p")),
            (r#""{\"object\":\"error\",\"message\":\"m\",\"code\":400}""#, "m", None),
            (
                r#"{"detail":[{"loc":["body","debug_config","x"],"msg":"m","type":"t"}]}"#,
                "debug_config.x: m",
                Some("debug_config.x"),
            ),
            (r#"{"detail":"Not Found"}"#, r#"{"detail":"Not Found"}"#, None),
            (r#""text""#, r#""text""#, None),
        ] {
            let error = ApiError::from_body(400, body.as_bytes());
            assert_eq!(
                (error.status, error.message.as_str(), error.param.as_deref()),
                (400, message, param),
                "{body}"
            );
        }
    }
}
