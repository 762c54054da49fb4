//! Patterns by name, and the one in use.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};

use crate::{Balanced, DataParallel, PrefillDecode, Program};

/// What part of a prompt `balanced` leaves to the decoding engine if nobody says.
const DEFAULT_RATIO: f64 = 0.1;

/// A pattern as configuration, headers and `PUT /admin/v1/pattern` name it: `prefill_decode`, `balanced:0.25`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pattern {
    /// The program's name.
    pub name: String,
    /// What part of the prompt is left to the decoding engine; `balanced` only, 0.1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
}

/// The pattern does not exist, or cannot be as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pattern {0}")]
pub struct BadPattern(String);

impl FromStr for Pattern {
    type Err = BadPattern;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, ratio) = match text.split_once(':') {
            None => (text, None),
            Some((name, ratio)) => {
                let number = ratio.parse();
                (
                    name,
                    Some(number.map_err(|_| {
                        BadPattern(format!("{text:?} has the ratio {ratio:?}, must be a number"))
                    })?),
                )
            }
        };
        Ok(Self { name: name.to_owned(), ratio })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ratio {
            None => f.write_str(&self.name),
            Some(ratio) => write!(f, "{}:{ratio}", self.name),
        }
    }
}

/// A pattern with the program that runs it.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    pub(crate) pattern: Pattern,
    pub(crate) program: Arc<dyn Program>,
}

/// The patterns that requests may name, and the one for those that name none. That one can change at any time: requests
/// in flight end under the pattern they began with.
#[derive(Debug)]
pub struct Patterns {
    programs: BTreeMap<String, Arc<dyn Program>>,
    current: RwLock<Chosen>,
}

impl Patterns {
    /// Knows the crate's own patterns and `more`, and begins with `current`.
    ///
    /// # Errors
    /// If `current` is not one of them.
    pub fn new(current: &Pattern, more: Vec<Arc<dyn Program>>) -> Result<Self, BadPattern> {
        let own: [Arc<dyn Program>; 2] = [Arc::new(DataParallel), Arc::new(PrefillDecode)];
        let programs =
            own.into_iter().chain(more).map(|program| (program.name().to_owned(), program)).collect();
        let current = choose(&programs, current)?;
        Ok(Self { programs, current: RwLock::new(current) })
    }

    /// Returns the names that requests may use.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        names(&self.programs)
    }

    /// Returns the pattern in use.
    #[must_use]
    pub fn current(&self) -> Pattern {
        self.chosen().pattern
    }

    /// Changes the pattern in use, for requests that come from now on; returns the one before.
    ///
    /// # Errors
    /// If there is no such pattern; nothing changes then.
    pub fn set(&self, pattern: &Pattern) -> Result<Pattern, BadPattern> {
        let next = choose(&self.programs, pattern)?;
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::replace(&mut *current, next).pattern)
    }

    /// Returns the program for a request that names `pattern`, or none.
    pub(crate) fn choose(&self, pattern: Option<&Pattern>) -> Result<Chosen, BadPattern> {
        match pattern {
            None => Ok(self.chosen()),
            Some(pattern) => choose(&self.programs, pattern),
        }
    }

    fn chosen(&self) -> Chosen {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn names(programs: &BTreeMap<String, Arc<dyn Program>>) -> Vec<String> {
    let mut names: Vec<_> = programs.keys().cloned().collect();
    if !programs.contains_key("balanced") {
        names.push("balanced".to_owned());
    }
    names.sort();
    names
}

fn choose(programs: &BTreeMap<String, Arc<dyn Program>>, pattern: &Pattern) -> Result<Chosen, BadPattern> {
    if let Some(program) = programs.get(&pattern.name) {
        if let Some(ratio) = pattern.ratio {
            return Err(BadPattern(format!("{:?} has no ratio, {ratio} was given", pattern.name)));
        }
        return Ok(Chosen { pattern: pattern.clone(), program: program.clone() });
    }
    if pattern.name == "balanced" {
        let ratio = pattern.ratio.unwrap_or(DEFAULT_RATIO);
        let program = Balanced::new(ratio)
            .ok_or_else(|| BadPattern(format!("\"balanced\" has the ratio {ratio}, must be in [0, 1]")))?;
        let pattern = Pattern { name: pattern.name.clone(), ratio: Some(ratio) };
        return Ok(Chosen { pattern, program: Arc::new(program) });
    }
    Err(BadPattern(format!(
        "{:?} does not exist, must be one of {}",
        pattern.name,
        names(programs).join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> String {
        let start = Pattern { name: "data_parallel".into(), ratio: None };
        let patterns = Patterns::new(&start, vec![]).expect("exists");
        let chosen = text.parse::<Pattern>().and_then(|pattern| {
            let chosen = patterns.choose(Some(&pattern))?;
            assert_eq!(chosen.program.name(), pattern.name);
            assert_eq!(patterns.set(&pattern)?, start);
            Ok(patterns.current())
        });
        chosen.map_or_else(|error| error.to_string(), |pattern| pattern.to_string())
    }

    #[test]
    fn names_and_ratios() {
        for (text, expected) in [
            ("data_parallel", "data_parallel"),
            ("prefill_decode", "prefill_decode"),
            ("balanced", "balanced:0.1"),
            ("balanced:0.25", "balanced:0.25"),
            ("balanced:1", "balanced:1"),
            ("balanced:x", r#"pattern "balanced:x" has the ratio "x", must be a number"#),
            ("balanced:", r#"pattern "balanced:" has the ratio "", must be a number"#),
            ("balanced:-1", r#"pattern "balanced" has the ratio -1, must be in [0, 1]"#),
            ("balanced:NaN", r#"pattern "balanced" has the ratio NaN, must be in [0, 1]"#),
            ("data_parallel:0.5", r#"pattern "data_parallel" has no ratio, 0.5 was given"#),
            ("", r#"pattern "" does not exist, must be one of balanced, data_parallel, prefill_decode"#),
            ("x", r#"pattern "x" does not exist, must be one of balanced, data_parallel, prefill_decode"#),
        ] {
            assert_eq!(check(text), expected);
        }
    }
}
