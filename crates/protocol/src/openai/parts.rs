//! The objects inside requests.

use serde::Serialize;
use serde_json::{Value, json};

use crate::ApiError;
use crate::lax::{self, Fields};

/// What a stream carries beside text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StreamOptions {
    /// One more chunk at the end, with the usage and no choices.
    pub include_usage: bool,
    /// The usage so far in every chunk.
    #[serde(skip_serializing_if = "super::completion::is_false")]
    pub continuous_usage_stats: bool,
}

impl StreamOptions {
    pub(crate) fn from_fields(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let Some(mut inner) = fields.opt_object("stream_options")? else { return Ok(None) };
        inner.refuse(&["include_obfuscation"])?;
        Ok(Some(Self {
            include_usage: inner.opt_bool("include_usage")?.unwrap_or(false),
            continuous_usage_stats: inner.opt_bool("continuous_usage_stats")?.unwrap_or(false),
        }))
    }
}

/// The form that the output must have.
#[derive(Clone, Debug, PartialEq)]
pub enum ResponseFormat {
    /// Any text.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that fits a schema.
    JsonSchema {
        /// A name for the schema.
        name: String,
        /// The schema, its keys in the order the client gave them.
        schema: Value,
    },
}

impl ResponseFormat {
    /// Reads OpenAI's form and MLC's: there the schema is text, under `schema` or `json_schema`, and may come with `json_object`.
    pub(crate) fn from_fields(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let Some(mut inner) = fields.opt_object("response_format")? else { return Ok(None) };
        let kind = inner.string("type")?;
        let schema = match (inner.take("json_schema"), inner.take("schema")) {
            (Some(_), Some(_)) => {
                let reason =
                    "response_format.json_schema and response_format.schema exclude each other: give one";
                return Err(ApiError::bad_request("response_format", reason.to_owned()));
            }
            (first, second) => first.or(second),
        };
        match (kind.as_str(), schema) {
            ("text", None) => Ok(Some(Self::Text)),
            ("json_object", None) => Ok(Some(Self::JsonObject)),
            ("json_object" | "json_schema", Some(Value::String(text))) => {
                Self::from_schema_text("schema".into(), &text).map(Some)
            }
            ("json_schema", Some(Value::Object(map))) => {
                let mut wrapper = Fields::nested(map, "response_format.json_schema");
                let name = wrapper.opt_string("name")?.unwrap_or_else(|| "schema".into());
                let schema =
                    wrapper.require("schema").map_err(|error| error.with_param("response_format"))?;
                Self::schema(name, schema).map(Some)
            }
            ("json_schema", None) => {
                Err(ApiError::bad_request("response_format", "response_format.json_schema is missing"))
            }
            ("text" | "json_object", Some(_)) => Err(ApiError::bad_request(
                "response_format",
                format!("response_format.json_schema does not go with the type {kind:?}"),
            )),
            ("json_schema", Some(other)) => Err(ApiError::unprocessable(format!(
                "response_format.json_schema is {}, must be an object",
                lax::name_of(&other)
            ))
            .with_param("response_format")),
            _ => Err(Self::unknown(&kind)),
        }
    }

    /// Makes the form of a schema that came as JSON text.
    ///
    /// # Errors
    /// 400 naming `response_format` if it is no JSON or no schema.
    pub fn from_schema_text(name: String, text: &str) -> Result<Self, ApiError> {
        let schema = serde_json::from_str(text).map_err(|error| {
            ApiError::bad_request("response_format", format!("response_format.json_schema: {error}"))
        })?;
        Self::schema(name, schema)
    }

    /// Refuses a type of form that is none of the three.
    #[must_use]
    pub fn unknown(kind: &str) -> ApiError {
        let message = format!("response_format.type is {kind:?}, must be text, json_object or json_schema");
        ApiError::bad_request("response_format", message)
    }

    fn schema(name: String, schema: Value) -> Result<Self, ApiError> {
        if schema.is_object() || schema.is_boolean() {
            Ok(Self::JsonSchema { name, schema })
        } else {
            Err(ApiError::bad_request(
                "response_format",
                format!("the schema in response_format is {}, must be an object", lax::name_of(&schema)),
            ))
        }
    }
}

impl Serialize for ResponseFormat {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text => json!({"type": "text"}),
            Self::JsonObject => json!({"type": "json_object"}),
            Self::JsonSchema { name, schema } => {
                json!({"type": "json_schema", "json_schema": {"name": name, "schema": schema}})
            }
        }
        .serialize(serializer)
    }
}

/// MLC's `debug_config`: absent, null or an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DebugConfig {
    /// Go on past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
}

impl DebugConfig {
    /// `grammar_execution_mode` is a hint about speed, so both of its values are fine.
    pub(crate) fn from_fields(fields: &mut Fields) -> Result<Self, ApiError> {
        let Some(mut inner) = fields.opt_object("debug_config")? else { return Ok(Self::default()) };
        inner.refuse(&["pinned_system_prompt", "special_request", "disagg_config"])?;
        if let Some(mode) = inner.opt_string("grammar_execution_mode")?
            && !matches!(mode.as_str(), "constraint" | "jump_forward")
        {
            return Err(ApiError::bad_request(
                "debug_config.grammar_execution_mode",
                format!(
                    "debug_config.grammar_execution_mode is {mode:?}, must be constraint or jump_forward"
                ),
            ));
        }
        Ok(Self { ignore_eos: inner.opt_bool("ignore_eos")?.unwrap_or(false) })
    }
}
