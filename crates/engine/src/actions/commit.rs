//! `commit`: keep what was received in the context cache, and generate nothing: the end of a context migration.

use microserving_protocol::Attempt;

use crate::calls::Record;
use crate::sequence::{Pages, Slot, Work};
use crate::{CallId, CallKey, Commit, CommitReply, Engine, EngineError, Reply};

impl Engine {
    /// Takes a `commit` on; it is answered when the data is here, or lost, or the lease has run out.
    pub(crate) fn commit(&mut self, id: CallId, call: &Commit) {
        match self.try_commit(id, call) {
            Ok(None) => {}
            Ok(Some(reply)) => self.reply(id, Ok(Reply::Committed(reply))),
            Err(error) => self.reply(id, Err(error)),
        }
    }

    fn try_commit(&mut self, id: CallId, call: &Commit) -> Result<Option<CommitReply>, EngineError> {
        let key = self.known_key(&call.seq_id, call.attempt)?;
        self.calls.find(&key)?;
        let record = self.record_of(&key)?;
        if let Some(reply) = &record.committed {
            return Ok(Some(reply.clone()));
        }
        let slot = record.receiving.ok_or_else(|| Self::unknown(&call.seq_id))?;
        let now = self.now;
        if let Some(sequence) = self.sequences.get_mut(&slot)
            && let Work::Receive(reception) = &mut sequence.work
        {
            if reception.start.is_some() {
                return Err(EngineError::Conflict { seq_id: key.seq_id, field: "seq_id" });
            }
            reception.commits.push(id);
            reception.lease.renew(now);
        }
        self.want(slot);
        Ok(None)
    }

    /// Moves a reservation's full pages to the cache and answers all who wait for that.
    pub(crate) fn finish_commit(&mut self, slot: Slot, received: bool) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let key = sequence.key.clone();
        let Work::Receive(reception) = &mut sequence.work else { return };
        if !received {
            self.fail_reception(slot, &Self::lost_error(&key.seq_id));
            return;
        }
        let commits = std::mem::take(&mut reception.commits);
        self.share_pages(slot);
        let committed_tokens = match self.sequences.get(&slot).map(|sequence| &sequence.pages) {
            Some(Pages::Table(table)) => table.num_shared_tokens(),
            _ => 0,
        };
        let reply = CommitReply { key: key.clone(), committed_tokens };
        if let Some(record) = self.calls.get_mut(&key.seq_id) {
            record.committed = Some(reply.clone());
        }
        for call in commits {
            self.reply(call, Ok(Reply::Committed(reply.clone())));
        }
        self.retire(slot);
    }

    /// Returns the key that a call without an attempt means.
    pub(super) fn known_key(
        &self,
        seq_id: &microserving_protocol::SeqId,
        attempt: Option<Attempt>,
    ) -> Result<CallKey, EngineError> {
        let record = self.calls.get(seq_id).ok_or_else(|| Self::unknown(seq_id))?;
        Ok(CallKey { seq_id: seq_id.clone(), attempt: attempt.unwrap_or(record.attempt) })
    }

    /// Returns the record of exactly this attempt.
    pub(super) fn record_of(&self, key: &CallKey) -> Result<&Record, EngineError> {
        let record = self.calls.get(&key.seq_id).filter(|record| record.attempt == key.attempt);
        record.ok_or_else(|| Self::unknown(&key.seq_id))
    }
}
