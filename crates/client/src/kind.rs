//! What kind of server an engine is.

use std::fmt;
use std::str::FromStr;

/// What kind of server an engine is, and with it what can be asked of it.
///
/// | kind | prompts | KV moves | aborts by |
/// | --- | --- | --- | --- |
/// | `microserving` | token ids or text | yes | `/microserving/abort` |
/// | `mlc` | token ids; text and messages where nothing moves | yes | closing the connection |
/// | `openai` | as the client wrote them | no | closing the connection |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EngineKind {
    /// An engine of this project.
    #[default]
    Microserving,
    /// A server of MLC-LLM with its microserving endpoints.
    Mlc,
    /// Any other server that speaks OpenAI's API.
    OpenAi,
}

/// The kind does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no kind of engine, must be microserving, mlc or openai")]
pub struct BadKind(String);

impl EngineKind {
    /// Returns its name in configuration and administration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Microserving => "microserving",
            Self::Mlc => "mlc",
            Self::OpenAi => "openai",
        }
    }

    /// Says whether it can send and receive KV.
    #[must_use]
    pub const fn moves_kv(self) -> bool {
        matches!(self, Self::Microserving | Self::Mlc)
    }

    /// Says whether it is of this project: it tells its load and its tokenizer, knows attempts, leases and aborts, and sends token ids.
    #[must_use]
    pub const fn is_ours(self) -> bool {
        matches!(self, Self::Microserving)
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EngineKind {
    type Err = BadKind;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Microserving, Self::Mlc, Self::OpenAi]
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| BadKind(text.to_owned()))
    }
}
