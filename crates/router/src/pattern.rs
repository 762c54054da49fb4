//! Patterns by name, and the one in use.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use serde_json::{Map, Value};

use crate::client_headers::ClientHeaders;
use crate::programs::{AdaptiveFactory, BalancedFactory, MigrateFactory};
use crate::{DataParallel, Fallback, Parameter, Parameters, PrefillDecode, Program, Request, Rule};

/// A pattern as configuration, headers and `PUT /admin/v1/pattern` name it: `prefill_decode`, `balanced:0.25`,
/// `name:key=value,key=value`.
#[derive(Clone, Debug, PartialEq)]
pub struct Pattern {
    /// The program's name.
    pub name: String,
    /// What it is told.
    pub parameters: Parameters,
}

/// The pattern does not exist, or cannot be as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pattern {reason}")]
pub struct BadPattern {
    reason: String,
    parameter: Option<String>,
}

impl BadPattern {
    /// Makes one from a sentence that goes behind "pattern".
    #[must_use]
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), parameter: None }
    }

    /// Makes one that is about a parameter; `what` goes behind the pattern's name.
    #[must_use]
    pub fn parameter(pattern: &str, parameter: &str, what: impl fmt::Display) -> Self {
        let parameter = (!parameter.is_empty()).then(|| parameter.to_owned());
        Self { reason: format!("{pattern:?} {what}"), parameter }
    }

    /// Returns the field at fault: a parameter, or `name`.
    #[must_use]
    pub fn field(&self) -> &str {
        self.parameter.as_deref().unwrap_or("name")
    }
}

impl Pattern {
    /// Names a pattern with its parameters at their defaults.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), parameters: Parameters::new() }
    }

    /// Sets a parameter.
    #[must_use]
    pub fn with(mut self, parameter: &str, value: impl Into<Value>) -> Self {
        self.parameters = self.parameters.with(parameter, value);
        self
    }

    /// Returns `{"name": …, parameter: value, …}`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert("name".to_owned(), self.name.clone().into());
        self.parameters.write_to(&mut object);
        object.into()
    }
}

impl FromStr for Pattern {
    type Err = BadPattern;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some((name, rest)) = text.split_once(':') else { return Ok(Self::named(text)) };
        let mut pattern = Self::named(name);
        for (at, part) in rest.split(',').enumerate() {
            let (key, value) = match part.split_once('=') {
                Some((key, value)) if !key.trim().is_empty() => (key.trim(), value),
                None if at == 0 => ("", part),
                _ => {
                    let what = format!("has the parameter {part:?}, must be written key=value");
                    return Err(BadPattern::parameter(name, "", what));
                }
            };
            if pattern.parameters.get(key).is_some() {
                return Err(BadPattern::parameter(name, key, format!("has {key} twice")));
            }
            pattern.parameters.set(key, value.trim().into());
        }
        Ok(pattern)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.parameters.is_empty() { Ok(()) } else { write!(f, ":{}", self.parameters) }
    }
}

/// Makes the programs of one name, for any values of its parameters.
pub trait ProgramFactory: Send + Sync + fmt::Debug {
    /// Returns the name that configuration and headers know its programs by.
    fn name(&self) -> &str;

    /// Returns what its programs can be told. By default nothing.
    fn parameters(&self) -> &[Parameter] {
        &[]
    }

    /// Says in one sentence what its programs do.
    fn about(&self) -> &str {
        ""
    }

    /// Makes a program. `parameters` are complete and within their bounds; the program's name must be the factory's.
    ///
    /// # Errors
    /// If the values do not go together.
    fn build(&self, parameters: &Parameters) -> Result<Arc<dyn Program>, BadPattern>;
}

/// A program that takes no parameters, and so is its own pattern.
#[derive(Debug)]
pub(crate) struct Fixed(pub(crate) Arc<dyn Program>);

impl ProgramFactory for Fixed {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn build(&self, _: &Parameters) -> Result<Arc<dyn Program>, BadPattern> {
        Ok(self.0.clone())
    }
}

/// A pattern with the program that runs it. Requests hold on to the one they began with.
#[derive(Debug)]
pub(crate) struct Chosen {
    /// With every parameter.
    pub(crate) pattern: Pattern,
    /// As `x-microserving-pattern` answers it.
    pub(crate) text: String,
    pub(crate) program: Arc<dyn Program>,
}

/// The patterns that requests may name, and the one for those that name none. All of that can change at any time: requests
/// in flight end under the pattern they began with.
#[derive(Debug)]
pub struct Patterns {
    state: RwLock<State>,
}

#[derive(Clone, Debug)]
struct State {
    factories: BTreeMap<String, Arc<dyn ProgramFactory>>,
    current: Arc<Chosen>,
    rules: Arc<[Ruled]>,
}

/// A rule with what it chooses.
#[derive(Debug)]
struct Ruled {
    rule: Rule,
    chosen: Arc<Chosen>,
}

impl Patterns {
    /// Knows the crate's own patterns and `more`, of which one of the same name replaces it, and begins with `current`.
    ///
    /// # Errors
    /// If `current` is not one of them.
    pub fn new(current: &Pattern, more: Vec<Arc<dyn ProgramFactory>>) -> Result<Self, BadPattern> {
        let own: [Arc<dyn ProgramFactory>; 5] = [
            Arc::new(Fixed(Arc::new(DataParallel))),
            Arc::new(Fixed(Arc::new(PrefillDecode))),
            Arc::new(BalancedFactory),
            Arc::new(AdaptiveFactory),
            Arc::new(MigrateFactory),
        ];
        let mut factories = BTreeMap::new();
        for factory in own.into_iter().chain(more) {
            check_factory(&*factory)?;
            factories.insert(factory.name().to_owned(), factory);
        }
        let current = choose(&factories, current)?;
        Ok(Self { state: RwLock::new(State { factories, current, rules: Arc::new([]) }) })
    }

    /// Returns the names that requests may use.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.read(|state| state.factories.keys().cloned().collect())
    }

    /// Returns whoever makes the programs of a name.
    #[must_use]
    pub fn factory(&self, name: &str) -> Option<Arc<dyn ProgramFactory>> {
        self.read(|state| state.factories.get(name).cloned())
    }

    /// Returns the pattern in use, with every parameter.
    #[must_use]
    pub fn current(&self) -> Pattern {
        self.read(|state| state.current.pattern.clone())
    }

    /// Says whether the pattern in use moves KV where it can.
    pub(crate) fn moves_kv(&self) -> bool {
        self.read(|state| state.current.program.moves_kv())
    }

    /// Changes the pattern in use, for requests that come from now on; returns the one before.
    ///
    /// # Errors
    /// If there is no such pattern; nothing changes then.
    pub fn set(&self, pattern: &Pattern) -> Result<Pattern, BadPattern> {
        self.change(|state| {
            let next = choose(&state.factories, pattern)?;
            Ok(std::mem::replace(&mut state.current, next).pattern.clone())
        })
    }

    pub(crate) fn has_rules(&self) -> bool {
        self.read(|state| !state.rules.is_empty())
    }

    /// Returns the rules, in their order, each with every parameter of its pattern.
    #[must_use]
    pub fn rules(&self) -> Vec<Rule> {
        self.read(|state| state.rules.iter().map(|ruled| ruled.rule.clone()).collect())
    }

    /// Changes the pattern in use and the rules before it, for requests that come from now on.
    ///
    /// # Errors
    /// If one of the patterns does not exist, with the number of the rule that names it; nothing changes then.
    pub fn set_all(&self, pattern: &Pattern, rules: &[Rule]) -> Result<(), (Option<usize>, BadPattern)> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let current = choose(&state.factories, pattern).map_err(|error| (None, error))?;
        let rules = make_rules(&state.factories, rules)?;
        (state.current, state.rules) = (current, rules);
        Ok(())
    }

    /// Says whether [`Patterns::set_all`] would do it. Changes nothing.
    ///
    /// # Errors
    /// As there.
    pub fn check_all(&self, pattern: &Pattern, rules: &[Rule]) -> Result<(), (Option<usize>, BadPattern)> {
        self.read(|state| {
            choose(&state.factories, pattern).map_err(|error| (None, error))?;
            make_rules(&state.factories, rules).map(drop)
        })
    }

    /// Checks a pattern; returns it with every parameter. Changes nothing.
    ///
    /// # Errors
    /// If there is no such pattern.
    pub fn check(&self, pattern: &Pattern) -> Result<Pattern, BadPattern> {
        self.choose(Some(pattern)).map(|chosen| chosen.pattern.clone())
    }

    /// Adds whoever makes the programs of a name, in place of the one there was, which is returned. Requests from now on get the new
    /// programs, also where the name is in use.
    ///
    /// # Errors
    /// If the pattern in use or a rule is of that name and cannot be made any more; nothing changes then.
    pub fn register(
        &self,
        factory: Arc<dyn ProgramFactory>,
    ) -> Result<Option<Arc<dyn ProgramFactory>>, BadPattern> {
        check_factory(&*factory)?;
        self.change(|state| {
            let before = state.factories.insert(factory.name().to_owned(), factory);
            state.rebuild()?;
            Ok(before)
        })
    }

    /// Takes away whoever makes the programs of a name.
    ///
    /// # Errors
    /// If there is none, or it or a rule's pattern is in use; nothing changes then.
    pub fn unregister(&self, name: &str) -> Result<Arc<dyn ProgramFactory>, BadPattern> {
        self.change(|state| {
            let Some(factory) = state.factories.remove(name) else {
                return Err(unknown(&state.factories, name));
            };
            if state.current.pattern.name == name {
                return Err(BadPattern::parameter(name, "", "is in use"));
            }
            if let Some(at) = state.rules.iter().position(|ruled| ruled.rule.pattern.name == name) {
                return Err(BadPattern::parameter(name, "", format!("is in use by rule {at}")));
            }
            Ok(factory)
        })
    }

    /// Makes a pattern the fallback of another one.
    ///
    /// # Errors
    /// If there is no such pattern, or it needs a fallback itself.
    pub fn fallback(&self, pattern: &Pattern) -> Result<Fallback, BadPattern> {
        let chosen = self.choose(Some(pattern))?;
        Fallback::new(chosen.text.clone(), chosen.program.clone())
            .ok_or_else(|| BadPattern::parameter(&pattern.name, "", "needs a fallback itself"))
    }

    /// Returns the program for a request that names `pattern`, or none.
    pub(crate) fn choose(&self, pattern: Option<&Pattern>) -> Result<Arc<Chosen>, BadPattern> {
        self.read(|state| match pattern {
            None => Ok(state.current.clone()),
            Some(pattern) => choose(&state.factories, pattern),
        })
    }

    /// Returns the program for a request that names none: that of the first rule it fits, with the rule's number, else the one in use.
    pub(crate) fn for_request(&self, request: &Request) -> (Option<usize>, Arc<Chosen>) {
        let (rules, current) = self.read(|state| (state.rules.clone(), state.current.clone()));
        match rules.iter().position(|ruled| ruled.rule.fits(request)) {
            Some(at) => (Some(at), rules[at].chosen.clone()),
            None => (None, current),
        }
    }

    /// As [`Patterns::for_request`], for a request of which only model and headers are known; nothing if a rule must know more.
    pub(crate) fn for_unread(&self, model: Option<&str>, headers: &ClientHeaders) -> Option<Arc<Chosen>> {
        self.read(|state| match state.rules.iter().find(|ruled| ruled.rule.fits_unread(model, headers)) {
            Some(ruled) if ruled.rule.counts_tokens() => None,
            Some(ruled) => Some(ruled.chosen.clone()),
            None => Some(state.current.clone()),
        })
    }

    fn read<T>(&self, f: impl FnOnce(&State) -> T) -> T {
        f(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes a change in whole or not at all.
    fn change<T>(&self, f: impl FnOnce(&mut State) -> Result<T, BadPattern>) -> Result<T, BadPattern> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let mut next = state.clone();
        let done = f(&mut next)?;
        *state = next;
        Ok(done)
    }
}

impl State {
    /// Makes anew what was made by factories that may have changed.
    fn rebuild(&mut self) -> Result<(), BadPattern> {
        self.current = choose(&self.factories, &self.current.pattern)?;
        let rules: Vec<Rule> = self.rules.iter().map(|ruled| ruled.rule.clone()).collect();
        self.rules = make_rules(&self.factories, &rules).map_err(|(_, error)| error)?;
        Ok(())
    }
}

fn make_rules(
    factories: &BTreeMap<String, Arc<dyn ProgramFactory>>,
    rules: &[Rule],
) -> Result<Arc<[Ruled]>, (Option<usize>, BadPattern)> {
    let make = |(at, rule): (usize, &Rule)| {
        let chosen = choose(factories, &rule.pattern).map_err(|error| (Some(at), error))?;
        Ok(Ruled { rule: Rule { pattern: chosen.pattern.clone(), ..rule.clone() }, chosen })
    };
    rules.iter().enumerate().map(make).collect()
}

/// A name or parameter that text and JSON could not carry would be one that nobody can use.
fn check_factory(factory: &dyn ProgramFactory) -> Result<(), BadPattern> {
    let name = factory.name();
    if !is_word(name) {
        return Err(BadPattern::new(format!("{name:?} is no name: letters, digits, _ and - make one")));
    }
    for (at, parameter) in factory.parameters().iter().enumerate() {
        let taken = ["name", "available", "revision"].contains(&&*parameter.name);
        let twice = factory.parameters()[..at].iter().any(|other| other.name == parameter.name);
        if taken || twice || !is_word(&parameter.name) {
            let what = format!("cannot have a parameter {:?}", parameter.name);
            return Err(BadPattern::parameter(name, &parameter.name, what));
        }
    }
    Ok(())
}

fn is_word(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    !text.is_empty() && text.len() <= 64 && text.bytes().all(fits)
}

fn unknown(factories: &BTreeMap<String, Arc<dyn ProgramFactory>>, name: &str) -> BadPattern {
    let names: Vec<&str> = factories.keys().map(String::as_str).collect();
    BadPattern::parameter(name, "", format!("does not exist, must be one of {}", names.join(", ")))
}

fn choose(
    factories: &BTreeMap<String, Arc<dyn ProgramFactory>>,
    pattern: &Pattern,
) -> Result<Arc<Chosen>, BadPattern> {
    let factory = factories.get(&pattern.name).ok_or_else(|| unknown(factories, &pattern.name))?;
    let parameters = pattern.parameters.complete(&pattern.name, factory.parameters())?;
    let program = factory.build(&parameters)?;
    let pattern = Pattern { name: pattern.name.clone(), parameters };
    Ok(Arc::new(Chosen { text: pattern.to_string(), pattern, program }))
}

#[cfg(test)]
mod tests;
