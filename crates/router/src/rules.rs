//! Rules that choose a pattern by what a request is.

use microserving_protocol::{ApiError, Fields};
use serde_json::{Map, Value, json};

use crate::client_headers::{ClientHeaders, is_secret};
use crate::{Pattern, Request};

/// Rules that there may be.
const MAX_RULES: usize = 256;

/// Chooses a pattern for the requests that fit all it says; what it does not say fits any.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The pattern for them.
    pub pattern: Pattern,
    /// The model asked for.
    pub model: Option<String>,
    /// The fewest tokens of the prompt.
    pub min_tokens: Option<u32>,
    /// The most tokens of the prompt.
    pub max_tokens: Option<u32>,
    /// A header that the client sent.
    pub header: Option<HeaderRule>,
    /// Whose request it is.
    pub tenant: Option<String>,
}

/// What a header must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderRule {
    /// Its name.
    pub name: String,
    /// Its value, or the beginning of it.
    pub value: String,
    /// Whether `value` is only the beginning.
    pub is_prefix: bool,
}

impl Rule {
    /// Makes a rule that fits every request.
    #[must_use]
    pub const fn always(pattern: Pattern) -> Self {
        Self { pattern, model: None, min_tokens: None, max_tokens: None, header: None, tenant: None }
    }

    /// Says whether a request is one of those it is for.
    #[must_use]
    pub fn fits(&self, request: &Request) -> bool {
        self.min_tokens.is_none_or(|min| request.len() >= min)
            && self.max_tokens.is_none_or(|max| request.len() <= max)
            && self.fits_unread(request.model(), request.headers())
    }

    /// As [`Rule::fits`], but for the length.
    pub(crate) fn fits_unread(&self, model: Option<&str>, headers: &ClientHeaders) -> bool {
        let header = |rule: &HeaderRule| {
            let value = headers.get(&rule.name);
            value.is_some_and(|value| {
                if rule.is_prefix { value.starts_with(&rule.value) } else { value == rule.value }
            })
        };
        self.model.as_deref().is_none_or(|wanted| model == Some(wanted))
            && self.tenant.as_deref().is_none_or(|tenant| headers.tenant() == tenant)
            && self.header.as_ref().is_none_or(header)
    }

    /// Says whether it is about the length of the prompt.
    pub(crate) const fn counts_tokens(&self) -> bool {
        self.min_tokens.is_some() || self.max_tokens.is_some()
    }

    pub(crate) fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert("pattern".into(), self.pattern.to_json());
        for (name, text) in [("model", &self.model), ("tenant", &self.tenant)] {
            if let Some(text) = text {
                object.insert(name.into(), text.clone().into());
            }
        }
        for (name, number) in [("min_tokens", self.min_tokens), ("max_tokens", self.max_tokens)] {
            if let Some(number) = number {
                object.insert(name.into(), number.into());
            }
        }
        if let Some(header) = &self.header {
            let how = if header.is_prefix { "prefix" } else { "is" };
            object.insert("header".into(), json!({"name": header.name, how: header.value}));
        }
        object.into()
    }

    fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let pattern =
            read_pattern_field(&mut fields)?.ok_or_else(|| fields.wrong("pattern", "is missing".into()))?;
        let header = match fields.opt_object("header")? {
            None => None,
            Some(header) => Some(HeaderRule::read(header)?),
        };
        let rule = Self {
            pattern,
            model: fields.opt_string("model")?,
            min_tokens: fields.opt_u32("min_tokens")?,
            max_tokens: fields.opt_u32("max_tokens")?,
            header,
            tenant: fields.opt_string("tenant")?,
        };
        if let (Some(min), Some(max)) = (rule.min_tokens, rule.max_tokens)
            && min > max
        {
            let path = fields.path("max_tokens");
            return Err(ApiError::bad_request(
                &path,
                format!("{path} is {max}, must be at least min_tokens, {min}"),
            ));
        }
        fields.refuse_rest("a rule")?;
        Ok(rule)
    }
}

impl HeaderRule {
    fn read(mut fields: Fields) -> Result<Self, ApiError> {
        let name = fields.string("name")?.to_ascii_lowercase();
        let path = fields.path("name");
        let parsed = axum::http::HeaderName::from_bytes(name.as_bytes());
        let parsed = parsed
            .map_err(|_| ApiError::bad_request(&path, format!("{path} is {name:?}, no header's name")))?;
        if is_secret(&parsed) {
            return Err(ApiError::bad_request(
                &path,
                format!("{path} is {name:?}, which is never looked at"),
            ));
        }
        let (is, prefix) = (fields.opt_string("is")?, fields.opt_string("prefix")?);
        fields.refuse_rest("a header of a rule")?;
        match (is, prefix) {
            (Some(value), None) => Ok(Self { name, value, is_prefix: false }),
            (None, Some(value)) => Ok(Self { name, value, is_prefix: true }),
            _ => Err(fields.wrong("is", "or prefix must be given, and not both".into())),
        }
    }
}

/// Reads the list `rules`.
pub(crate) fn read_rules(values: Vec<Value>) -> Result<Vec<Rule>, ApiError> {
    if values.len() > MAX_RULES {
        let message = format!("rules has {} entries, must have at most {MAX_RULES}", values.len());
        return Err(ApiError::bad_request("rules", message));
    }
    values
        .into_iter()
        .enumerate()
        .map(|(at, value)| match value {
            Value::Object(map) => Rule::read(Fields::nested(map, &format!("rules[{at}]"))),
            _ => Err(ApiError::unprocessable(format!("rules[{at}] must be an object"))
                .with_param(format!("rules[{at}]"))),
        })
        .collect()
}

/// Reads the list of rules of an option: JSON as in `PUT /admin/v1/rules`.
///
/// # Errors
/// 400 or 422 naming the field.
pub fn rules_from_json(text: &str) -> Result<Vec<Rule>, ApiError> {
    match serde_json::from_str(text) {
        Ok(Value::Array(values)) => read_rules(values),
        Ok(_) => Err(ApiError::unprocessable("rules must be a list").with_param("rules")),
        Err(error) => Err(ApiError::unprocessable(format!("rules is not JSON: {error}")).with_param("rules")),
    }
}

/// Takes the field `pattern`: `"balanced:0.25"` or `{"name": "balanced", "ratio": 0.25}`.
pub(crate) fn read_pattern_field(fields: &mut Fields) -> Result<Option<Pattern>, ApiError> {
    match fields.take("pattern") {
        None => Ok(None),
        Some(Value::String(text)) => {
            let path = fields.path("pattern");
            text.parse()
                .map(Some)
                .map_err(|error: crate::BadPattern| ApiError::bad_request(path, error.to_string()))
        }
        Some(Value::Object(map)) => {
            let path = fields.path("pattern");
            read_pattern(Fields::nested(map, &path)).map(Some)
        }
        Some(_) => Err(fields.wrong("pattern", "must be a string or an object".into())),
    }
}

/// Reads `{"name": …, parameter: value, …}`; a null is as good as absent.
pub(crate) fn read_pattern(mut fields: Fields) -> Result<Pattern, ApiError> {
    let mut pattern = Pattern::named(&fields.string("name")?);
    for (name, value) in fields.rest() {
        if !value.is_null() {
            pattern = pattern.with(&name, value);
        }
    }
    Ok(pattern)
}
