//! A choice ends because its listener has found a stop string in its text.

use crate::request::Ending;
use crate::{CallId, Engine};

impl Engine {
    /// Ends one choice of the generation that `call` listens to: its pages are given back, its context stays cached, and
    /// the last choice to end ends the request. Unknown calls and choices that have ended are left alone.
    pub(crate) fn finish_choice(&mut self, call: CallId, choice: u32) {
        let Some(request) = self.requests.values_mut().find(|request| request.is_heard_by(call)) else {
            return;
        };
        let slot = request.finish_choice(choice, &mut self.effects);
        let done = request.ending == Some(Ending::Done);
        let (seq_id, num_logged) = (request.key.seq_id.clone(), request.num_logged());
        if let Some(slot) = slot {
            self.retire(slot);
            if done {
                self.calls.keep_log(&seq_id, num_logged);
            }
        }
    }
}
