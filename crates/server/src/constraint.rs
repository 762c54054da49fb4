//! Grammars of the text crate as the sampler sees them.

use microserving_engine::{ConstraintError, TokenConstraint, TokenMask};
use microserving_protocol::{ApiError, OutputFormat, TokenId};
use microserving_text::{Grammar, GrammarSpec, TextError};

use crate::text::ModelText;

/// A grammar along one sequence.
#[derive(Debug)]
struct GrammarConstraint(Grammar);

impl TokenConstraint for GrammarConstraint {
    fn mask(&mut self) -> Result<TokenMask, ConstraintError> {
        self.0.mask().map(TokenMask::from_words).map_err(constraint_error)
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        self.0.accept(token).map_err(constraint_error)
    }

    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }
}

fn constraint_error(error: TextError) -> ConstraintError {
    ConstraintError { reason: error.to_string() }
}

/// Makes one constraint a choice. May take long.
///
/// # Errors
/// 400 naming `response_format` if the schema cannot be enforced.
pub(crate) fn build(
    text: &ModelText,
    format: &OutputFormat,
    n: u32,
) -> Result<Vec<Box<dyn TokenConstraint>>, ApiError> {
    let spec = match format {
        OutputFormat::Text => return Ok(Vec::new()),
        OutputFormat::JsonObject => GrammarSpec::JsonObject,
        OutputFormat::JsonSchema(schema) => GrammarSpec::JsonSchema(schema.clone()),
    };
    (0..n)
        .map(|_| Ok(Box::new(GrammarConstraint(text.grammar(&spec)?)) as Box<dyn TokenConstraint>))
        .collect()
}
