//! `remote_send`: compute what is lacking, deliver a range.
//!
//! ```text
//! prompt   0 ............ begin ............... end .... len
//!          | cached here: put at once if in the range    |
//!          |      computed here, in chunks: each layer is put while the next one computes
//! ```

use std::sync::Arc;

use microserving_protocol::{
    AddrError, Generation, Incarnation, KvAddrInfo, KvRange, LayerId, PageId, prompt_digest,
};
use microserving_transport::{Claim, PeerAddress, Refusal, TransportError};

use super::check_bound;
use crate::calls::{Found, SendProgress, Sending, body_hash};
use crate::compute::put_layer;
use crate::request::deadline;
use crate::sequence::{Delivery, Event, Pages, Sequence, Slot, State, Work};
use crate::{CallId, CallKey, Engine, EngineError, RemoteSend, RemoteSendReply, Reply};

/// What a call finds that was made before.
enum Repeated {
    /// Nothing: it is the first.
    No,
    /// The job runs; the call waits for it too.
    Joined,
    /// The answer.
    Answered(RemoteSendReply),
}

impl Engine {
    /// Takes a `remote_send` on; it is answered when the receiver can read the range, or with a refusal.
    pub(crate) fn remote_send(&mut self, id: CallId, call: &RemoteSend) {
        match self.try_remote_send(id, call) {
            Ok(None) => {}
            Ok(Some(reply)) => self.reply(id, Ok(Reply::RemoteSend(reply))),
            Err(error) => self.reply(id, Err(error)),
        }
    }

    fn try_remote_send(
        &mut self,
        id: CallId,
        call: &RemoteSend,
    ) -> Result<Option<RemoteSendReply>, EngineError> {
        let len = self.check_prompt(&call.prompt)?;
        let (begin, end) = (call.range.begin(), call.range.end());
        check_bound("begin", begin, begin < end, &format!("below end, which is {end}"))?;
        check_bound("end", end, end <= len, &format!("at most {len}, the prompt's length"))?;
        let address = self.read_address(&call.kv_addr_info)?;
        let key = sender_key(call.key.as_ref(), &address)?;
        let given = address.range;
        check_bound("begin", begin, given.begin() <= begin, &format!("in the address's {given}"))?;
        check_bound("end", end, end <= given.end(), &format!("in the address's {given}"))?;
        let covered = call.prompt.get(..given.end() as usize);
        if covered.is_none_or(|tokens| prompt_digest(tokens) != address.prompt_digest) {
            return Err(EngineError::Conflict { seq_id: key.seq_id, field: "prompt" });
        }
        let peer = PeerAddress { transport: address.transport.clone(), bytes: address.peer.clone() };
        self.check_rank(&peer, call.recv_rank)?;
        let body = body_hash(&(&call.prompt, &call.kv_addr_info, &call.options.cache_salt));
        let grant = (address.incarnation, address.generation);
        match self.calls.find(&key)? {
            Found::Nothing => {}
            Found::Older(_) => self.replace_older(&key),
            Found::Same => match self.repeated_send(id, &key, call.range, body, grant)? {
                Repeated::No => {}
                Repeated::Joined => return Ok(None),
                Repeated::Answered(reply) => return Ok(Some(reply)),
            },
        }
        self.refuse_if_draining()?;
        self.refuse_without_device()?;
        self.refuse_if_crowded(1, "waiting", |s| s.state == State::Waiting)?;
        self.refuse_if_crowded(1, "being sent", |s| s.state == State::Sending)?;
        let claim = Claim { peer, credential: call.kv_addr_info.clone(), range: call.range };
        let channel = self.transport.open(claim).map_err(|error| match error {
            TransportError::Unreachable { reason, .. } => EngineError::Unreachable { reason },
            error => EngineError::Transport { reason: error.to_string() },
        })?;
        self.calls.open(&key);
        let slot = self.insert(Sequence {
            key: key.clone(),
            salt: call.options.cache_salt.clone(),
            priority: call.options.priority,
            arrived: self.now,
            since: self.now,
            deadline: deadline(self.now, call.options.timeout),
            tokens: call.prompt.to_vec(),
            prompt_len: len,
            computed: 0,
            pages: Pages::Nothing,
            state: State::Waiting,
            work: Work::Send(Delivery {
                range: call.range,
                address: Arc::new(address),
                credential: call.kv_addr_info.clone(),
                channel,
                calls: vec![id],
                renewed: self.now,
                replaced: Vec::new(),
                computed_at: None,
                reply: RemoteSendReply { sent_tokens: call.range.num_tokens(), ..RemoteSendReply::default() },
            }),
            preemptions: 0,
        });
        self.channels.insert(channel, slot);
        if let Some(record) = self.calls.get_mut(&key.seq_id) {
            record.sends.insert(call.range, Sending { body, grant, progress: SendProgress::Running(slot) });
        }
        Ok(None)
    }

    /// Where receivers are numbered, the caller and the address must name the same one.
    fn check_rank(&self, peer: &PeerAddress, recv_rank: i64) -> Result<(), EngineError> {
        match self.transport.rank_of(peer) {
            Some(pe) if recv_rank != i64::from(pe.0) => Err(EngineError::InvalidField {
                field: "recv_rank",
                reason: format!("it is {recv_rank}, and the address is that of element {pe}"),
            }),
            _ => Ok(()),
        }
    }

    /// Reads an address and judges what can be judged here; the receiver judges the rest.
    fn read_address(&self, bytes: &[u8]) -> Result<KvAddrInfo, EngineError> {
        let address = if self.entropy.key_is_shared {
            KvAddrInfo::decode_verified(bytes, &self.entropy.cluster_key)
        } else {
            KvAddrInfo::decode(bytes)
        };
        let layout = &self.geometry.layout;
        address.and_then(|address| address.fits(layout).map(|()| address)).map_err(|error| match error {
            AddrError::Layout { ours, theirs } => EngineError::LayoutMismatch { ours, theirs },
            AddrError::BadSignature => EngineError::Refused { refusal: Refusal::BadCredential },
            error => EngineError::BadAddress { reason: error.to_string() },
        })
    }

    /// Joins a job that runs for the same call, or returns its answer. A later grant of the same receiver is another job.
    fn repeated_send(
        &mut self,
        id: CallId,
        key: &CallKey,
        range: KvRange,
        body: u64,
        grant: (Incarnation, Generation),
    ) -> Result<Repeated, EngineError> {
        let Some(record) = self.calls.get(&key.seq_id) else { return Ok(Repeated::No) };
        let Some(sending) = record.sends.get(&range) else { return Ok(Repeated::No) };
        if sending.body != body {
            // The receiver was prepared again: what it got before is gone with the older grant.
            let is_newer = sending.grant.0 == grant.0 && sending.grant.1 < grant.1;
            return match sending.progress {
                SendProgress::Done(_) if is_newer => Ok(Repeated::No),
                _ => Err(EngineError::Conflict { seq_id: key.seq_id.clone(), field: "prompt" }),
            };
        }
        match sending.progress {
            SendProgress::Done(reply) => Ok(Repeated::Answered(reply)),
            SendProgress::Running(slot) => {
                if let Some(sequence) = self.sequences.get_mut(&slot)
                    && let Work::Send(delivery) = &mut sequence.work
                {
                    delivery.calls.push(id);
                }
                Ok(Repeated::Joined)
            }
        }
    }

    /// Puts what was found in the cache, all layers at once.
    pub(crate) fn send_cached_part(&mut self, slot: Slot) {
        let Some(sequence) = self.sequences.get(&slot) else { return };
        let Work::Send(delivery) = &sequence.work else { return };
        let end = sequence.computed.min(delivery.range.end());
        if let Some(range) = KvRange::new(delivery.range.begin(), end).filter(|range| !range.is_empty()) {
            let pages = pages_of(sequence.pages.list(), self.geometry.layout.page_size, range);
            if let Err(error) = self.executor.export(pages) {
                self.fail_send(slot, &EngineError::Executor { reason: error.to_string() });
                return;
            }
            for layer in (0..self.geometry.layout.num_layers).map(LayerId) {
                let put = put_layer(
                    self.transport.as_mut(),
                    &self.geometry,
                    sequence.pages.list(),
                    delivery.channel,
                    &delivery.address,
                    layer,
                    range,
                );
                if let Err(reason) = put {
                    self.fail_send(slot, &EngineError::Transport { reason });
                    return;
                }
            }
        }
        self.finish_put_if_computed(slot);
        if let Some(sequence) = self.sequences.get_mut(&slot)
            && sequence.state == State::Sending
            && let Work::Send(delivery) = &mut sequence.work
        {
            // There was nothing to compute that could have hidden the transfer.
            delivery.computed_at = Some(self.now);
        }
    }

    /// When everything is computed and put, leaves the rest to the transport.
    pub(crate) fn finish_put_if_computed(&mut self, slot: Slot) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let Work::Send(delivery) = &sequence.work else { return };
        if sequence.computed < delivery.range.end() || sequence.state != State::Prefilling {
            return;
        }
        let channel = delivery.channel;
        sequence.happen(Event::Put);
        self.transport.finish(channel);
    }
}

/// Returns those of a sequence's pages that a range lies in.
pub(crate) fn pages_of(pages: &[PageId], page_size: u32, range: KvRange) -> &[PageId] {
    let (first, end) = (range.begin() / page_size, range.end().div_ceil(page_size));
    pages.get(first as usize..end as usize).unwrap_or(pages)
}

/// Returns the key of the job: the address says which request it belongs to.
fn sender_key(given: Option<&CallKey>, address: &KvAddrInfo) -> Result<CallKey, EngineError> {
    let key = CallKey { seq_id: address.seq_id.clone(), attempt: address.attempt };
    let Some(given) = given else { return Ok(key) };
    if given.seq_id != key.seq_id {
        return Err(EngineError::Conflict { seq_id: given.seq_id.clone(), field: "seq_id" });
    }
    if given.attempt < key.attempt {
        return Err(EngineError::StaleAttempt { seq_id: key.seq_id, attempt: given.attempt });
    }
    if given.attempt > key.attempt {
        return Err(EngineError::Conflict { seq_id: key.seq_id, field: "attempt" });
    }
    Ok(key)
}
