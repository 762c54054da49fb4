//! Reading JSON as leniently as the Python clients around us expect, and naming the field whenever it does not fit.
//!
//! `serde` derives stop at the first mismatch with a message that names a type and a byte. A client needs the field, so
//! requests are read through [`Fields`], one field at a time. Accepted beyond strict JSON types: whole numbers as `"-1"` or
//! `2.0`, numbers as `"0.5"`, booleans as `0`, `1`, `"true"`, `"false"`. Not a number and infinities are refused in every
//! spelling. `null` means absent, and only optional fields may be absent.

use serde_json::{Map, Value};

use crate::body::{Body, PROMPT};
use crate::openai::Prompt;
use crate::{ApiError, TokenId};

/// Integers with a magnitude below this are exact in an `f64`.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// The fields of one JSON object, taken out one by one.
#[derive(Clone, Debug)]
pub struct Fields {
    map: Map<String, Value>,
    /// The field `prompt`, if it is a list of token ids; it is not in `map` then.
    prompt: Option<Vec<TokenId>>,
    prefix: String,
}

impl Fields {
    /// Parses a request body, which must be one JSON object.
    ///
    /// # Errors
    /// 422 if `body` is not that.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match Body::parse(body) {
            Ok(Body::Object { map, prompt }) => Ok(Self { map, prompt, prefix: String::new() }),
            Ok(Body::Other(other)) => Err(ApiError::unprocessable(format!(
                "the body is {}, must be a JSON object",
                name_of(&other)
            ))),
            Err(error) => Err(ApiError::unprocessable(format!("the body is not JSON: {error}"))),
        }
    }

    /// Wraps an object that was found at `path` of a body; the path goes before the names in errors.
    #[must_use]
    pub fn nested(map: Map<String, Value>, path: &str) -> Self {
        Self { map, prompt: None, prefix: format!("{path}.") }
    }

    /// Returns the full name of a field, as errors call it.
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Says whether the field is there and not null, without taking it.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(|value| !value.is_null()) || self.is_prompt(name)
    }

    /// Says whether the field is there, null or not, without taking it.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.map.contains_key(name) || self.is_prompt(name)
    }

    fn is_prompt(&self, name: &str) -> bool {
        name == PROMPT && self.prompt.is_some()
    }

    /// Takes the field `prompt`, which must be there.
    ///
    /// # Errors
    /// 422 if it is absent or null, and as [`Prompt::from_value`].
    pub fn prompt(&mut self) -> Result<Prompt, ApiError> {
        match self.prompt.take() {
            Some(ids) => Prompt::Tokens(ids.into()).checked(),
            None => Prompt::from_value(self.require(PROMPT)?),
        }
    }

    /// Puts a prompt among the other fields, for those who want no more of it than that.
    fn flatten(&mut self) {
        if let Some(ids) = self.prompt.take() {
            let ids = ids.into_iter().map(|id| id.0.into()).collect();
            self.map.insert(PROMPT.to_owned(), Value::Array(ids));
        }
    }

    /// Refuses whatever has not been taken; `of` says what it would be a field of.
    ///
    /// # Errors
    /// 400 naming the first.
    pub fn refuse_rest(&self, of: &str) -> Result<(), ApiError> {
        match self.map.keys().map(String::as_str).next().or(self.prompt.as_ref().map(|_| PROMPT)) {
            None => Ok(()),
            Some(name) => {
                let path = self.path(name);
                Err(ApiError::bad_request(&path, format!("{path} is no field of {of}")))
            }
        }
    }

    /// Takes a field as it is; `None` if absent or null.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        if name == PROMPT {
            self.flatten();
        }
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a field that must be there.
    ///
    /// # Errors
    /// 422 if it is absent or null.
    pub fn require(&mut self, name: &str) -> Result<Value, ApiError> {
        self.take(name).ok_or_else(|| self.wrong(name, "is missing".into()))
    }

    /// Takes an optional whole number.
    ///
    /// # Errors
    /// 422 if it is something else.
    pub fn opt_int(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        self.opt(name, int)
    }

    /// Takes a whole number that must be there.
    ///
    /// # Errors
    /// 422 if it is absent, null or something else.
    pub fn int(&mut self, name: &str) -> Result<i64, ApiError> {
        let value = self.require(name)?;
        int(&value).map_err(|what| self.wrong(name, what))
    }

    /// Takes an optional whole number that fits `u32`.
    ///
    /// # Errors
    /// 422 if it is not a whole number, 400 if it is negative or too large.
    pub fn opt_u32(&mut self, name: &str) -> Result<Option<u32>, ApiError> {
        let Some(value) = self.opt_int(name)? else { return Ok(None) };
        u32::try_from(value).map(Some).map_err(|_| {
            let path = self.path(name);
            ApiError::bad_request(&path, format!("{path} is {value}, must be in [0, {}]", u32::MAX))
        })
    }

    /// Takes a whole number that has a default and may not be null.
    ///
    /// # Errors
    /// 422 if it is null or something else.
    pub fn int_or(&mut self, name: &str, default: i64) -> Result<i64, ApiError> {
        self.refuse_null(name)?;
        Ok(self.opt_int(name)?.unwrap_or(default))
    }

    /// Takes an optional finite number.
    ///
    /// # Errors
    /// 422 if it is not a number, 400 if it is not finite as `f32`.
    pub fn opt_f32(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.opt(name, float)? else { return Ok(None) };
        let path = self.path(name);
        finite_f32(&path, value).map(Some)
    }

    /// Takes an optional finite number.
    ///
    /// # Errors
    /// 422 if it is not a number, 400 if it is not finite.
    pub fn opt_f64(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.opt(name, float)? else { return Ok(None) };
        if value.is_finite() {
            return Ok(Some(value));
        }
        let path = self.path(name);
        Err(ApiError::bad_request(&path, format!("{path} is {value}, must be finite")))
    }

    /// Takes an optional truth value.
    ///
    /// # Errors
    /// 422 if it is something else.
    pub fn opt_bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.opt(name, boolean)
    }

    /// Takes a truth value that is false by default and may not be null.
    ///
    /// # Errors
    /// 422 if it is null or something else.
    pub fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        self.refuse_null(name)?;
        Ok(self.opt_bool(name)?.unwrap_or(false))
    }

    /// Takes an optional string.
    ///
    /// # Errors
    /// 422 if it is something else.
    pub fn opt_string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, format!("is {}, must be a string", name_of(&other)))),
        }
    }

    /// Takes a string that must be there.
    ///
    /// # Errors
    /// 422 if it is absent, null or something else.
    pub fn string(&mut self, name: &str) -> Result<String, ApiError> {
        self.opt_string(name)?.ok_or_else(|| self.wrong(name, "is missing".into()))
    }

    /// Takes an optional object.
    ///
    /// # Errors
    /// 422 if it is something else.
    pub fn opt_object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self::nested(map, &self.path(name)))),
            Some(other) => Err(self.wrong(name, format!("is {}, must be an object", name_of(&other)))),
        }
    }

    /// Takes an optional list.
    ///
    /// # Errors
    /// 422 if it is something else.
    pub fn opt_array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(self.wrong(name, format!("is {}, must be a list", name_of(&other)))),
        }
    }

    /// Takes what is left, in the order it came.
    #[must_use]
    pub fn rest(mut self) -> Map<String, Value> {
        self.flatten();
        self.map
    }

    /// Refuses each of `names` that is there with a value that asks for something: not null, false or an empty list.
    ///
    /// # Errors
    /// 400 naming the first.
    pub fn refuse(&mut self, names: &[&str]) -> Result<(), ApiError> {
        for name in names {
            let Some(value) = self.take(name) else { continue };
            if value != Value::Bool(false) && value.as_array().is_none_or(|list| !list.is_empty()) {
                return Err(ApiError::not_implemented(self.path(name)));
            }
        }
        Ok(())
    }

    /// Makes the 422 that says what is wrong with a field.
    #[must_use]
    pub fn wrong(&self, name: &str, what: String) -> ApiError {
        let path = self.path(name);
        ApiError::unprocessable(format!("{path} {what}")).with_param(path)
    }

    fn opt<T>(&mut self, name: &str, read: fn(&Value) -> Result<T, String>) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        read(&value).map(Some).map_err(|what| self.wrong(name, what))
    }

    fn refuse_null(&self, name: &str) -> Result<(), ApiError> {
        if self.map.get(name).is_some_and(Value::is_null) {
            return Err(self.wrong(name, "is null, must be given or left out".into()));
        }
        Ok(())
    }
}

/// Reads a whole number: `3`, `3.0`, `"3"` or `"3.0"`.
///
/// # Errors
/// What is wrong, to go behind the field's name.
pub(crate) fn int(value: &Value) -> Result<i64, String> {
    let wrong = || format!("is {}, must be a whole number", shown(value));
    match value {
        Value::Number(number) => match number.as_i64() {
            Some(number) => Ok(number),
            None => number.as_f64().and_then(whole).ok_or_else(wrong),
        },
        Value::String(text) => {
            let text = text.trim();
            text.parse().ok().or_else(|| text.parse().ok().and_then(whole)).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

/// Reads a number, also as a string; it may still be infinite or no number.
///
/// # Errors
/// What is wrong, to go behind the field's name.
pub(crate) fn float(value: &Value) -> Result<f64, String> {
    let wrong = || format!("is {}, must be a number", shown(value));
    match value {
        Value::Number(number) => number.as_f64().ok_or_else(wrong),
        Value::String(text) => text.trim().parse().map_err(|_| wrong()),
        _ => Err(wrong()),
    }
}

/// Reads a truth value: `true`, `1` or `"true"`.
///
/// # Errors
/// What is wrong, to go behind the field's name.
pub(crate) fn boolean(value: &Value) -> Result<bool, String> {
    match value {
        Value::Bool(flag) => Ok(*flag),
        Value::Number(number) if number.as_f64() == Some(0.0) => Ok(false),
        Value::Number(number) if number.as_f64() == Some(1.0) => Ok(true),
        Value::String(text) if text.eq_ignore_ascii_case("true") => Ok(true),
        Value::String(text) if text.eq_ignore_ascii_case("false") => Ok(false),
        other => Err(format!("is {}, must be true or false", shown(other))),
    }
}

/// Narrows to `f32`, refusing what is not finite there.
///
/// # Errors
/// 400 naming `path`.
pub(crate) fn finite_f32(path: &str, value: f64) -> Result<f32, ApiError> {
    #[allow(clippy::cast_possible_truncation, reason = "what does not fit becomes infinite and is refused")]
    let narrow = value as f32;
    if narrow.is_finite() {
        Ok(narrow)
    } else {
        Err(ApiError::bad_request(path, format!("{path} is {value}, must be finite")))
    }
}

/// Names the JSON type of a value, with its article.
#[must_use]
pub(crate) fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn whole(value: f64) -> Option<i64> {
    #[allow(clippy::cast_possible_truncation, reason = "checked to be whole and exact")]
    (value.fract() == 0.0 && value.abs() < EXACT).then_some(value as i64)
}

/// Shows a value in an error: scalars as they came, cut short; others by their type.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) | Value::Null => name_of(value).to_owned(),
        Value::String(text) => {
            let cut: String = text.chars().take(40).collect();
            format!("{cut:?}")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whole_numbers_come_in_four_spellings() {
        for (value, expected) in [
            (json!(3), Some(3)),
            (json!(-1), Some(-1)),
            (json!(2.0), Some(2)),
            (json!("-1"), Some(-1)),
            (json!(" 7 "), Some(7)),
            (json!("2.0"), Some(2)),
            (json!(2.5), None),
            (json!("2.5"), None),
            (json!("x"), None),
            (json!(""), None),
            (json!("NaN"), None),
            (json!("inf"), None),
            (json!(1e300), None),
            (json!(u64::MAX), None),
            (json!(true), None),
            (json!([1]), None),
            (json!({}), None),
        ] {
            assert_eq!(int(&value).ok(), expected, "{value}");
        }
    }

    #[test]
    fn booleans_and_floats() {
        for (value, expected) in [
            (json!(true), Some(true)),
            (json!(0), Some(false)),
            (json!("True"), Some(true)),
            (json!(2), None),
        ] {
            assert_eq!(boolean(&value).ok(), expected, "{value}");
        }
        for (value, expected) in
            [(json!(1), Some(1.0)), (json!("0.5"), Some(0.5)), (json!("x"), None), (json!(false), None)]
        {
            assert_eq!(float(&value).ok(), expected, "{value}");
        }
    }

    fn check(body: &str, read: impl FnOnce(&mut Fields) -> Result<(), ApiError>) -> String {
        let mut fields = Fields::parse(body.as_bytes()).expect("an object");
        read(&mut fields)
            .map_or_else(|e| format!("{e} ({})", e.param.as_deref().unwrap_or_default()), |()| "ok".into())
    }

    #[test]
    fn errors_name_the_field() {
        assert_eq!(
            check(r#"{"temperature":"nan"}"#, |f| f.opt_f32("temperature").map(|_| ())),
            "400: temperature is NaN, must be finite (temperature)"
        );
        assert_eq!(
            check(r#"{"temperature":1e39}"#, |f| f.opt_f32("temperature").map(|_| ())),
            format!("400: temperature is {}, must be finite (temperature)", 1e39)
        );
        assert_eq!(
            check(r#"{"n":null}"#, |f| f.int_or("n", 1).map(|_| ())),
            "422: n is null, must be given or left out (n)"
        );
        assert_eq!(
            check(r#"{"n":-1}"#, |f| f.opt_u32("n").map(|_| ())),
            "400: n is -1, must be in [0, 4294967295] (n)"
        );
        assert_eq!(
            check(r#"{"n":[]}"#, |f| f.int_or("n", 1).map(|_| ())),
            "422: n is a list, must be a whole number (n)"
        );
        assert_eq!(check(r"{}", |f| f.int("end").map(|_| ())), "422: end is missing (end)");
        assert_eq!(check(r#"{"tools":[]}"#, |f| f.refuse(&["tools"])), "ok");
        assert_eq!(
            check(r#"{"tools":[{}]}"#, |f| f.refuse(&["tools"])),
            "400: tools is not implemented (tools)"
        );
        assert_eq!(
            check(r#"{"a":{"b":"x"}}"#, |f| {
                let mut inner = f.opt_object("a")?.expect("there");
                inner.opt_bool("b").map(|_| ())
            }),
            r#"422: a.b is "x", must be true or false (a.b)"#
        );
    }

    #[test]
    fn bodies_that_are_no_object() {
        for body in
            ["", "[1]", "nul", "{", r#"{"a":NaN}"#, r#"{"a":1e999}"#, "{\"a\":\"\\ud800\"}", "\u{feff}{}"]
        {
            assert_eq!(Fields::parse(body.as_bytes()).expect_err(body).status, 422);
        }
        let deep = "[".repeat(100_000);
        assert_eq!(Fields::parse(deep.as_bytes()).expect_err("deep").status, 422);
        assert_eq!(Fields::parse(b"{\"a\":\"\xff\"}").expect_err("not UTF-8").status, 422);
    }
}
