//! The text of one choice, from its tokens to its end.

use microserving_protocol::TokenId;

use crate::detokenizer::Detokenizer;
use crate::stop::StopStrings;

/// A detokenizer and a stop matcher in a row.
#[derive(Clone, Debug)]
pub struct TextStream {
    detokenizer: Detokenizer,
    stops: StopStrings,
}

/// What one token led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextStep {
    /// The text that may be given out.
    pub text: String,
    /// The number of the stop string that ended the text; no further token is needed.
    pub stopped_by: Option<usize>,
    /// Where the token's first byte belongs, in characters from the start of the text.
    pub offset: usize,
}

impl TextStream {
    /// Joins the two.
    #[must_use]
    pub fn new(detokenizer: Detokenizer, stops: StopStrings) -> Self {
        Self { detokenizer, stops }
    }

    /// Adds a token.
    pub fn push(&mut self, token: TokenId) -> TextStep {
        let piece = self.detokenizer.push(token);
        let step = self.stops.push(&piece.text);
        TextStep { text: step.text, stopped_by: step.matched, offset: piece.offset }
    }

    /// Adds a token whose text stop strings do not look at: one of the first `min_tokens`.
    pub fn push_unstoppable(&mut self, token: TokenId) -> TextStep {
        let piece = self.detokenizer.push(token);
        TextStep {
            text: self.stops.pass(&piece.text),
            stopped_by: self.stops.matched(),
            offset: piece.offset,
        }
    }

    /// Ends the text and returns the rest of it. A stop string may be found even here, if it ends with a
    /// replacement character.
    pub fn finish(&mut self) -> TextStep {
        let offset = self.detokenizer.num_chars();
        let step = self.stops.push(&self.detokenizer.finish());
        let mut text = step.text;
        text.push_str(&self.stops.finish());
        TextStep { text, stopped_by: step.matched, offset }
    }
}
