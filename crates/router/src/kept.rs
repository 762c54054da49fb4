//! What a router keeps of an answer: enough to go on with it elsewhere.

use bytes::Bytes;
use microserving_protocol::{CompletionChoice, TokenId};

use crate::program::PassedOn;
use crate::relay::ending;

/// What has come of one choice. 4 bytes a token.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept {
    pub(crate) output: Vec<TokenId>,
    /// Something of it has gone to the client, be it only the echo.
    pub(crate) begun: bool,
    pub(crate) finished: bool,
    /// Text came without its tokens, so that nobody could go on where it stopped.
    opaque: bool,
    /// The events that were passed on last, which say whether it has finished: that is asked only when something goes wrong.
    unread: Bytes,
}

impl Kept {
    /// Makes one of what the client has had of its beginning.
    pub(crate) fn given(output: Vec<TokenId>, finished: bool) -> Self {
        Self { output, begun: true, finished, ..Self::default() }
    }

    /// Takes what has been passed on.
    pub(crate) fn take_unread(&mut self, passed: &PassedOn) {
        self.output.extend_from_slice(&passed.tokens);
        self.begun = true;
        if !passed.events.is_empty() {
            self.unread = passed.events.clone();
        }
    }

    /// Notes that the answer of which it is a part is complete.
    pub(crate) fn note_complete(&mut self) {
        self.finished |= !std::mem::take(&mut self.unread).is_empty();
    }

    /// Finds out whether it has finished.
    pub(crate) fn settle(&mut self) {
        let unread = std::mem::take(&mut self.unread);
        self.finished |= !unread.is_empty() && ending(&unread).0;
    }

    /// Takes what is new of the choice; false if it had ended before, so that none of it is for the client.
    pub(crate) fn take(&mut self, new: &CompletionChoice, echoes: bool) -> bool {
        if self.finished {
            return false;
        }
        match &new.token_ids {
            Some(tokens) => self.output.extend_from_slice(tokens),
            // The echo has no tokens that were generated.
            None if echoes && !self.begun => {}
            None => self.opaque |= !new.text.is_empty(),
        }
        self.begun = true;
        self.finished = new.finish_reason.is_some();
        true
    }

    /// Says whether another engine can go on where this choice stands.
    pub(crate) const fn can_continue(&self) -> bool {
        !self.opaque
    }

    pub(crate) fn num_tokens(&self) -> u32 {
        u32::try_from(self.output.len()).unwrap_or(u32::MAX)
    }
}

/// Takes out of a choice what the client did not ask for; false if nothing is left.
pub(crate) fn is_worth_sending(choice: &mut CompletionChoice, wants_ids: bool) -> bool {
    if !wants_ids {
        choice.token_ids = None;
    }
    !choice.text.is_empty()
        || choice.finish_reason.is_some()
        || choice.token_ids.is_some()
        || choice.logprobs.is_some()
}

#[cfg(test)]
mod tests {
    use microserving_protocol::FinishReason;

    use super::*;

    fn choice(text: &str, token: Option<u32>) -> CompletionChoice {
        CompletionChoice {
            text: text.into(),
            token_ids: token.map(|token| vec![TokenId(token)]),
            ..CompletionChoice::default()
        }
    }

    #[test]
    fn tokens_are_kept_until_the_choice_ends() {
        let mut kept = Kept::default();
        assert!(kept.take(&choice("prompt", None), true), "the echo");
        assert!(kept.take(&choice("", Some(5)), true));
        let last = CompletionChoice { finish_reason: Some(FinishReason::Stop), ..choice("a", Some(6)) };
        assert!(kept.take(&last, true));
        assert!(!kept.take(&choice("b", Some(7)), true), "nothing follows the end");
        assert_eq!((kept.output.len(), kept.can_continue()), (2, true));
    }

    #[test]
    fn text_without_tokens_cannot_be_continued() {
        let mut kept = Kept::default();
        kept.take(&choice("", None), false);
        assert!(kept.can_continue(), "no text, so nothing is lost");
        kept.take(&choice("a", None), false);
        assert!(!kept.can_continue());
        let mut echoed = Kept::default();
        echoed.take(&choice("prompt", None), true);
        echoed.take(&choice("a", None), true);
        assert!(!echoed.can_continue(), "there is one echo");
    }

    #[test]
    fn what_was_not_asked_for_is_left_out() {
        let mut held_back = choice("", Some(5));
        assert!(is_worth_sending(&mut held_back.clone(), true));
        assert!(!is_worth_sending(&mut held_back, false));
        let mut text = choice("a", Some(5));
        assert!(is_worth_sending(&mut text, false) && text.token_ids.is_none());
    }
}
