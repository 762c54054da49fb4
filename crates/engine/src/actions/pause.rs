//! `pause`: stop decoding and say what there is so far: the end of a live migration.

use crate::request::Ending;
use crate::sequence::{Event, State};
use crate::{CallId, Engine, EngineError, Pause, PauseReply, Reply};

impl Engine {
    /// Pauses all choices of a generation and answers their tokens. They keep their pages, and their stream stays open
    /// without further events, until the request is aborted.
    pub(crate) fn pause(&mut self, id: CallId, call: &Pause) {
        let result = self.try_pause(call);
        self.reply(id, result.map(Reply::Paused));
    }

    fn try_pause(&mut self, call: &Pause) -> Result<PauseReply, EngineError> {
        let key = self.known_key(&call.seq_id, call.attempt)?;
        self.calls.find(&key)?;
        let unknown = || Self::unknown(&call.seq_id);
        let request_id = self.record_of(&key)?.generation.ok_or_else(unknown)?;
        let request = self.requests.get_mut(&request_id).ok_or_else(unknown)?;
        let (tokens, cached_tokens) = (request.tokens(), request.usage.cached_tokens);
        if request.ending != Some(Ending::Done) {
            request.paused = true;
            for slot in request.slots() {
                if let Some(sequence) = self.sequences.get_mut(&slot)
                    && matches!(sequence.state, State::Waiting | State::Prefilling | State::Decoding)
                {
                    sequence.happen(Event::Paused);
                }
            }
        }
        Ok(PauseReply { key, tokens, cached_tokens })
    }
}
