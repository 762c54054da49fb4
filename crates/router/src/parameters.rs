//! What a pattern can be told: named values, declared once by whoever builds its program.

use std::borrow::Cow;
use std::fmt;

use serde_json::{Map, Value, json};

use crate::BadPattern;

/// The declaration of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its name: a key of `PUT /admin/v1/pattern` and of the text form.
    pub name: Cow<'static, str>,
    /// What values it takes, and which one it has if nobody says.
    pub kind: ParameterKind,
    /// What it does, in one sentence.
    pub doc: Cow<'static, str>,
}

/// What values a parameter takes.
#[derive(Clone, Debug, PartialEq)]
pub enum ParameterKind {
    /// A number in `[min, max]`.
    Number {
        /// The value if nobody says.
        default: f64,
        /// The smallest one.
        min: f64,
        /// The largest one.
        max: f64,
    },
    /// A whole number in `[min, max]`.
    Integer {
        /// The value if nobody says.
        default: i64,
        /// The smallest one.
        min: i64,
        /// The largest one.
        max: i64,
    },
    /// True or false.
    Switch {
        /// The value if nobody says.
        default: bool,
    },
    /// A text.
    Text {
        /// The value if nobody says.
        default: String,
        /// The texts there are; empty is any.
        one_of: Vec<String>,
    },
}

impl Parameter {
    /// Declares a number.
    #[must_use]
    pub const fn number(name: &'static str, default: f64, min: f64, max: f64, doc: &'static str) -> Self {
        let kind = ParameterKind::Number { default, min, max };
        Self { name: Cow::Borrowed(name), kind, doc: Cow::Borrowed(doc) }
    }

    /// Declares a whole number.
    #[must_use]
    pub const fn integer(name: &'static str, default: i64, min: i64, max: i64, doc: &'static str) -> Self {
        let kind = ParameterKind::Integer { default, min, max };
        Self { name: Cow::Borrowed(name), kind, doc: Cow::Borrowed(doc) }
    }

    /// Declares a switch.
    #[must_use]
    pub const fn switch(name: &'static str, default: bool, doc: &'static str) -> Self {
        Self { name: Cow::Borrowed(name), kind: ParameterKind::Switch { default }, doc: Cow::Borrowed(doc) }
    }

    /// Returns the value if nobody says.
    #[must_use]
    pub fn default(&self) -> Value {
        match &self.kind {
            ParameterKind::Number { default, .. } => json!(default),
            ParameterKind::Integer { default, .. } => json!(default),
            ParameterKind::Switch { default } => json!(default),
            ParameterKind::Text { default, .. } => json!(default),
        }
    }

    /// Returns the declaration as `GET /admin/v1/patterns` shows it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut shown = json!({"name": self.name, "default": self.default(), "doc": self.doc});
        match &self.kind {
            ParameterKind::Number { min, max, .. } => {
                shown["type"] = "number".into();
                (shown["min"], shown["max"]) = (json!(min), json!(max));
            }
            ParameterKind::Integer { min, max, .. } => {
                shown["type"] = "integer".into();
                (shown["min"], shown["max"]) = (json!(min), json!(max));
            }
            ParameterKind::Switch { .. } => shown["type"] = "boolean".into(),
            ParameterKind::Text { one_of, .. } => {
                shown["type"] = "string".into();
                if !one_of.is_empty() {
                    shown["one_of"] = json!(one_of);
                }
            }
        }
        shown
    }

    /// Reads a value, also one that was written as text; the error goes behind "has the NAME VALUE, ".
    fn read(&self, value: &Value) -> Result<Value, String> {
        let text = value.as_str().map(str::trim);
        match &self.kind {
            ParameterKind::Number { min, max, .. } => {
                let number = text.map_or_else(|| value.as_f64(), |text| text.parse().ok());
                let number = number.ok_or("must be a number")?;
                let fits = (*min..=*max).contains(&number);
                if fits { Ok(json!(number)) } else { Err(format!("must be in [{min}, {max}]")) }
            }
            ParameterKind::Integer { min, max, .. } => {
                let number = text.map_or_else(|| value.as_i64(), |text| text.parse().ok());
                let number = number.ok_or("must be a whole number")?;
                let fits = (*min..=*max).contains(&number);
                if fits { Ok(json!(number)) } else { Err(format!("must be in [{min}, {max}]")) }
            }
            ParameterKind::Switch { .. } => {
                let flag = text.map_or_else(|| value.as_bool(), |text| text.parse().ok());
                flag.map(Value::Bool).ok_or_else(|| "must be true or false".to_owned())
            }
            ParameterKind::Text { one_of, .. } => {
                let text = value.as_str().ok_or("must be a string")?;
                if one_of.is_empty() || one_of.iter().any(|known| known == text) {
                    return Ok(text.into());
                }
                Err(format!("must be one of {}", one_of.join(", ")))
            }
        }
    }
}

/// The values of a pattern's parameters.
///
/// As somebody wrote them, they may lack some, and one may stand without its name: it belongs to the first parameter declared.
/// [`crate::ProgramFactory::build`] gets them checked and complete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameters {
    /// A value without a name has the empty one.
    values: Vec<(String, Value)>,
    /// Checked, complete, and in the order of their declarations: so the first one needs no name in text.
    is_complete: bool,
}

impl Parameters {
    /// Makes a set without values.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value, or replaces the one of that name.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.set(name, value.into());
        self
    }

    pub(crate) fn set(&mut self, name: &str, value: Value) {
        self.is_complete = false;
        match self.values.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = value,
            None => self.values.push((name.to_owned(), value)),
        }
    }

    /// Says whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Returns a value.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.values.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// Returns the values with their names, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Returns a number; one that was not declared is an error, never a default.
    ///
    /// # Errors
    /// If there is no such number.
    pub fn number(&self, name: &str) -> Result<f64, BadPattern> {
        self.get(name).and_then(Value::as_f64).ok_or_else(|| undeclared(name, "number"))
    }

    /// Returns a whole number.
    ///
    /// # Errors
    /// If there is no such whole number.
    pub fn integer(&self, name: &str) -> Result<i64, BadPattern> {
        self.get(name).and_then(Value::as_i64).ok_or_else(|| undeclared(name, "whole number"))
    }

    /// Returns a switch.
    ///
    /// # Errors
    /// If there is no such switch.
    pub fn switch(&self, name: &str) -> Result<bool, BadPattern> {
        self.get(name).and_then(Value::as_bool).ok_or_else(|| undeclared(name, "switch"))
    }

    /// Returns a text.
    ///
    /// # Errors
    /// If there is no such text.
    pub fn text(&self, name: &str) -> Result<&str, BadPattern> {
        self.get(name).and_then(Value::as_str).ok_or_else(|| undeclared(name, "text"))
    }

    /// Checks the values against their declarations and fills in what is missing.
    pub(crate) fn complete(&self, pattern: &str, declared: &[Parameter]) -> Result<Self, BadPattern> {
        let first = declared.first().map(|parameter| &*parameter.name);
        let full_name = |name: &str| match first {
            Some(first) if name.is_empty() => first.to_owned(),
            _ => name.to_owned(),
        };
        for (name, value) in &self.values {
            let full = full_name(name);
            if declared.iter().any(|parameter| parameter.name == full) {
                if name.is_empty() && self.get(&full).is_some() {
                    return Err(BadPattern::parameter(pattern, &full, format!("has {full} twice")));
                }
                continue;
            }
            let what = if name.is_empty() {
                format!("takes no parameter, {} was given", shown(value))
            } else {
                format!("has no {name}, {} was given", shown(value))
            };
            return Err(BadPattern::parameter(pattern, name, what));
        }
        let mut values = Vec::with_capacity(declared.len());
        for (at, parameter) in declared.iter().enumerate() {
            let given = self.get(&parameter.name).or_else(|| self.get("").filter(|_| at == 0));
            let value = match given {
                None => parameter.default(),
                Some(given) => parameter.read(given).map_err(|reason| {
                    let what = format!("has the {} {}, {reason}", parameter.name, shown(given));
                    BadPattern::parameter(pattern, &parameter.name, what)
                })?,
            };
            values.push((parameter.name.clone().into_owned(), value));
        }
        Ok(Self { values, is_complete: true })
    }

    /// Puts the values beside others of an object.
    pub(crate) fn write_to(&self, object: &mut Map<String, Value>) {
        for (name, value) in &self.values {
            object.insert(name.clone(), value.clone());
        }
    }
}

/// `0.25`, `key=value,other=value`; the first of a complete set stands without its name.
impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (name, value)) in self.values.iter().enumerate() {
            if at > 0 {
                f.write_str(",")?;
            }
            let is_first = self.is_complete && at == 0;
            if !(name.is_empty() || is_first) {
                write!(f, "{name}=")?;
            }
            match value {
                Value::String(text) => f.write_str(text)?,
                // As it was written: 1, not 1.0.
                Value::Number(number) if number.is_f64() => {
                    write!(f, "{}", number.as_f64().unwrap_or_default())?;
                }
                other => write!(f, "{other}")?,
            }
        }
        Ok(())
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) if number.is_f64() => number.as_f64().unwrap_or_default().to_string(),
        Value::String(text) => format!("{:?}", text.chars().take(40).collect::<String>()),
        other => other.to_string(),
    }
}

fn undeclared(name: &str, kind: &str) -> BadPattern {
    BadPattern::new(format!("has no {kind} {name:?} among its declared parameters"))
}
