//! `abort`: give a request up, whatever it is doing here.

use crate::calls::{Fate, Record};
use crate::mutants::Mutant;
use crate::{Abort, CallId, CallKey, Engine, EngineError, Reply};

impl Engine {
    /// Aborts and answers whether something was given up. The tombstone stays, so that a call that was overtaken by its
    /// abort is refused when it comes.
    pub(crate) fn abort(&mut self, id: CallId, call: &Abort) {
        let aborted = self.try_abort(call);
        self.reply(id, Ok(Reply::Aborted(aborted)));
    }

    fn try_abort(&mut self, call: &Abort) -> bool {
        if self.rules.break_by(Mutant::MissingAbort) {
            return true;
        }
        let record = self.calls.get(&call.seq_id);
        let lived = record.is_some_and(Record::is_live);
        let attempt = call.attempt.or(record.map(|record| record.attempt)).unwrap_or_default();
        let key = CallKey { seq_id: call.seq_id.clone(), attempt };
        if self.calls.find(&key).is_err() {
            // A later attempt lives on, or this one has ended already.
            return false;
        }
        let error = EngineError::Aborted { seq_id: call.seq_id.clone() };
        // Under its own attempt first: the tombstone may be a later one's.
        self.end_record(&call.seq_id, Fate::Aborted, &error);
        self.calls.open(&key);
        self.end_record(&call.seq_id, Fate::Aborted, &error);
        if lived {
            self.counters.aborted += 1;
        }
        lived
    }
}
