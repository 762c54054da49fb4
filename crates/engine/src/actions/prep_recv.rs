//! `prep_recv`: match, reserve, and say where to write.
//!
//! ```text
//! prompt   0 ......... matched ............. end .......... len
//!          | pinned       | promised: granted |   reserve_tokens
//! ```

use microserving_kvcache::{KvError, Reservation, lifecycle};
use microserving_protocol::{KvAddrInfo, KvRange, TokenId, prompt_digest};
use microserving_transport::{Grant, grant_runs};

use super::check_bound;
use crate::calls::{Fate, Found, Prepared, body_hash};
use crate::lease::Lease;
use crate::request::deadline;
use crate::sequence::{Pages, Reception, Sequence, State, Work};
use crate::{CallId, CallKey, Engine, EngineError, PrepRecv, PrepRecvReply, Reply};

impl Engine {
    /// Answers `prep_recv` at once: with an address, without one if everything is here, or with a refusal.
    pub(crate) fn prep_recv(&mut self, id: CallId, call: &PrepRecv) {
        let result = self.try_prep_recv(id, call);
        self.reply(id, result.map(Reply::PrepRecv));
    }

    fn try_prep_recv(&mut self, id: CallId, call: &PrepRecv) -> Result<PrepRecvReply, EngineError> {
        let len = self.check_prompt(&call.prompt)?;
        if call.commit {
            check_bound("end", call.end, call.end <= len, &format!("at most {len}, the prompt's length"))?;
        } else {
            check_bound("end", call.end, call.end < len, &format!("below {len}, the prompt's length"))?;
        }
        let needed = if call.commit { call.end } else { len + 1 };
        let needed = u64::from(needed).max(u64::from(call.end) + u64::from(call.reserve_tokens));
        let limit = u64::from(self.max_len());
        if needed > limit {
            let field = if call.reserve_tokens > 0 { "reserve_tokens" } else { "prompt" };
            return Err(EngineError::TooLong { field, needed, limit });
        }
        let options = &call.options;
        let body =
            body_hash(&(&call.prompt, call.end, call.reserve_tokens, call.commit, &options.cache_salt));
        let (key, minted) = self.key_or_minted(call.key.as_ref());
        match self.calls.find(&key)? {
            Found::Nothing => {}
            Found::Older(_) => self.replace_older(&key),
            Found::Same => {
                if let Some(reply) = self.repeated_prep(id, &key, body)? {
                    return Ok(reply);
                }
            }
        }
        self.refuse_if_draining()?;
        self.refuse_without_device()?;
        self.refuse_if_crowded(1, "being received", |s| s.state == State::Receiving)?;
        let reply = self.prepare(id, call, key.clone(), minted)?;
        let prepared = Some(Prepared { body, reply: reply.clone() });
        self.calls.open(&key).prepared = prepared;
        Ok(reply)
    }

    /// Returns the earlier answer to the same call; its reservation's lease begins anew.
    ///
    /// A key that generates without having been prepared is in use. When it has ended, to prepare it is to begin again.
    fn repeated_prep(
        &mut self,
        id: CallId,
        key: &CallKey,
        body: u64,
    ) -> Result<Option<PrepRecvReply>, EngineError> {
        let Some(record) = self.calls.get(&key.seq_id) else { return Ok(None) };
        let Some(prepared) = &record.prepared else {
            let Some(request_id) = record.generation else { return Ok(None) };
            if self.requests.get(&request_id).is_some_and(|request| request.ending.is_none()) {
                return Err(EngineError::Conflict { seq_id: key.seq_id.clone(), field: "seq_id" });
            }
            self.requests.remove(&request_id);
            self.calls.forget_generation(&key.seq_id);
            return Ok(None);
        };
        if prepared.body != body {
            return Err(EngineError::Conflict { seq_id: key.seq_id.clone(), field: "prompt" });
        }
        let reply = prepared.reply.clone();
        if let Some(slot) = record.receiving
            && let Some(sequence) = self.sequences.get_mut(&slot)
            && let Work::Receive(reception) = &mut sequence.work
        {
            reception.lease.renew(self.now);
            // The first caller may be gone: this one has the address now.
            reception.made_by = id;
        }
        Ok(Some(reply))
    }

    /// Aborts what lives under a lower attempt of the same request.
    pub(crate) fn replace_older(&mut self, key: &CallKey) {
        let error = match self.calls.get(&key.seq_id) {
            Some(record) => EngineError::StaleAttempt { seq_id: key.seq_id.clone(), attempt: record.attempt },
            None => return,
        };
        self.end_record(&key.seq_id, Fate::Aborted, &error);
    }

    fn prepare(
        &mut self,
        id: CallId,
        call: &PrepRecv,
        key: CallKey,
        minted: bool,
    ) -> Result<PrepRecvReply, EngineError> {
        let salt = &call.options.cache_salt;
        let to_match = &call.prompt[..call.end as usize];
        let capacity = call.end + call.reserve_tokens;
        // What it would take from those that run already, they would soon have to be preempted for.
        let missing =
            self.cache.pages_for(capacity) - self.cache.pages_for(self.cache.peek_prefix(salt, to_match));
        if !self.cache.can_allocate(missing.saturating_add(self.headroom())) {
            return Err(self.no_room(format!("{missing} pages are needed beside what runs")));
        }
        let reservation = match self.cache.reserve(salt, to_match, call.reserve_tokens) {
            Ok(reservation) => reservation,
            Err(KvError::OutOfRange { field, value, .. }) => {
                return Err(EngineError::InvalidField { field, reason: format!("it is {value}") });
            }
            Err(error) => return Err(self.no_room(error.to_string())),
        };
        let range = reservation.range();
        let generation = (!range.is_empty()).then_some(reservation.generation());
        let address = match generation {
            // No peer will know of these pages.
            None => None,
            Some(_) => match self.grant(&reservation, range, &key, &call.prompt) {
                Ok(address) => Some(address),
                Err(error) => {
                    // Nobody was told of it.
                    let _ = self.cache.cancel(reservation);
                    return Err(error);
                }
            },
        };
        let matched = range.begin();
        self.calls.open(&key);
        let slot = self.insert(Sequence {
            key: key.clone(),
            salt: salt.clone(),
            priority: call.options.priority,
            arrived: self.now,
            since: self.now,
            deadline: deadline(self.now, call.options.timeout),
            tokens: call.prompt.to_vec(),
            prompt_len: u32::try_from(call.prompt.len()).expect("checked at the door"),
            computed: matched,
            pages: Pages::Promised(reservation),
            state: State::Receiving,
            work: Work::Receive(Reception {
                end: call.end,
                matched,
                generation,
                stage: lifecycle::State::begin(generation.is_some()),
                lease: Lease::begin(self.now, self.config.lease),
                minted,
                made_by: id,
                start: None,
                commits: Vec::new(),
            }),
            preemptions: 0,
        });
        if let Some(generation) = generation {
            self.receiving.insert(generation, slot);
        }
        if let Some(record) = self.calls.get_mut(&key.seq_id) {
            record.receiving = Some(slot);
        }
        Ok(PrepRecvReply {
            key,
            kv_addr_info: address,
            prefix_matched_length: matched,
            lease: self.config.lease,
            engine_id: self.info.engine_id.clone(),
        })
    }

    /// Opens a reservation to senders and returns the signed address.
    fn grant(
        &mut self,
        reservation: &Reservation,
        range: KvRange,
        key: &CallKey,
        prompt: &[TokenId],
    ) -> Result<Vec<u8>, EngineError> {
        let generation = reservation.generation();
        let first_page = range.begin() / self.geometry.layout.page_size;
        let pages = reservation.receiving_pages();
        let failed = |reason: String| EngineError::Transport { reason };
        let runs = grant_runs(&self.geometry, pages, first_page, range).map_err(|e| failed(e.to_string()))?;
        let token_bytes = self.geometry.layout.token_bytes();
        self.transport
            .grant(Grant { generation, range, token_bytes, runs })
            .map_err(|error| failed(error.to_string()))?;
        self.gate.open(generation);
        let peer = self.transport.peer_address();
        let address = KvAddrInfo {
            engine_id: self.info.engine_id.clone(),
            incarnation: self.info.incarnation,
            seq_id: key.seq_id.clone(),
            attempt: key.attempt,
            generation,
            lease: self.config.lease,
            layout_fingerprint: self.geometry.layout.fingerprint(),
            num_pages: self.geometry.num_pages,
            transport: peer.transport,
            peer: peer.bytes,
            range,
            pages: pages.to_vec(),
            prompt_digest: prompt_digest(&prompt[..range.end() as usize]),
        };
        Ok(address.encode(&self.entropy.cluster_key))
    }
}
