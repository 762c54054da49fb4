//! What is wrong with a script, before and while it runs.

use std::fmt;

use microserving_router::Error;
use rhai::{Dynamic, EvalAltResult, Position};

/// What a run went over. It ends the script; `catch` does not see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Operations(u64),
    Time,
    Calls(u32),
    Seats(usize),
    /// The request is over: nobody waits for the script any more.
    Cancelled,
}

impl Stop {
    /// Returns the error that ends the script.
    pub(crate) fn into_error(self) -> Box<EvalAltResult> {
        Box::new(EvalAltResult::ErrorTerminated(Dynamic::from(self), Position::NONE))
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operations(most) => write!(f, "more than {most} operations"),
            Self::Time => f.write_str("it computed for too long"),
            Self::Calls(most) => write!(f, "more than {most} calls to engines"),
            Self::Seats(most) => write!(f, "more than {most} seats"),
            Self::Cancelled => f.write_str("the request is over"),
        }
    }
}

/// A call to an engine that failed, as a script can catch it.
#[derive(Clone, Debug)]
pub(crate) struct CallError(pub(crate) Error);

/// Why a run ended without an answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An engine failed, and the script let that through: not the script's fault, and worth another attempt with it.
    Call(Error),
    /// The script's fault.
    Fault(Fault),
}

/// What a script did wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// One word, for metrics and headers.
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    position: Position,
}

impl Fault {
    /// Makes a fault that is nowhere in particular.
    pub(crate) fn new(kind: &'static str, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), position: Position::NONE }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(line), Some(column)) = (self.position.line(), self.position.position()) {
            write!(f, "line {line}, column {column}: ")?;
        }
        f.write_str(&self.message)
    }
}

/// Sorts an error of the interpreter.
pub(crate) fn judge(error: EvalAltResult) -> Failure {
    let outer = error.position();
    let fault = |kind, message: String, position: Position| {
        let position = if position.is_none() { outer } else { position };
        Failure::Fault(Fault { kind, message, position })
    };
    match error {
        EvalAltResult::ErrorInFunctionCall(_, _, inner, position) => match judge(*inner) {
            Failure::Fault(mut inner) => {
                if inner.position.is_none() {
                    inner.position = position;
                }
                Failure::Fault(inner)
            }
            call => call,
        },
        EvalAltResult::ErrorTerminated(token, position) => match token.try_cast::<Stop>() {
            Some(stop) => {
                let kind = match stop {
                    Stop::Operations(_) => "operations",
                    Stop::Time => "time",
                    Stop::Calls(_) => "calls",
                    Stop::Seats(_) => "seats",
                    Stop::Cancelled => "cancelled",
                };
                fault(kind, stop.to_string(), position)
            }
            None => fault("runtime", "it was ended".to_owned(), position),
        },
        EvalAltResult::ErrorRuntime(value, position) => match value.try_cast_result::<CallError>() {
            Ok(CallError(error)) => Failure::Call(error),
            Err(value) => fault("runtime", value.to_string(), position),
        },
        EvalAltResult::ErrorDataTooLarge(what, position) => {
            fault("memory", format!("{} is over the bound", what.to_lowercase()), position)
        }
        EvalAltResult::ErrorTooManyVariables(position) => {
            fault("memory", "too many variables".to_owned(), position)
        }
        EvalAltResult::ErrorStackOverflow(position) => {
            fault("depth", "too many functions within functions".to_owned(), position)
        }
        mut other => {
            // Its text would say the position again.
            let position = other.take_position();
            fault("runtime", other.to_string(), position)
        }
    }
}
