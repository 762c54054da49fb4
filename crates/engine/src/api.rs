//! What an engine can be asked, and what it answers: the three instructions and their companions, in the engine's own words.
//!
//! Everything here is already validated and normalised: ranges are non-negative, prompts are token ids. JSON, text and
//! status codes live in `server`.

use std::sync::Arc;
use std::time::Duration;

use microserving_executor::{ExecutorInfo, TokenConstraint};
use microserving_protocol::{
    Attempt, EngineId, FinishReason, Generation, Incarnation, KvRange, SamplingParams, SeqId, TokenId,
    TokenLogprob,
};
use microserving_transport::Refusal;

/// Names one try at one request: the key of idempotency.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallKey {
    /// The request.
    pub seq_id: SeqId,
    /// The try.
    pub attempt: Attempt,
}

/// What every call may carry beside its own fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallOptions {
    /// Separates tenants: contexts cached under one salt are never matched under another. Empty is the common cache.
    pub cache_salt: Arc<str>,
    /// Higher runs earlier; 0 is usual.
    pub priority: i32,
    /// When the caller gives up, counted from when the engine takes the call.
    pub timeout: Option<Duration>,
}

/// `prep_recv`: match `prompt[..end]` here and reserve pages for the rest of it.
#[derive(Clone, Debug)]
pub struct PrepRecv {
    /// The key; the engine mints a sequence id if there is none.
    pub key: Option<CallKey>,
    /// The whole prompt.
    pub prompt: Arc<[TokenId]>,
    /// `0 <= end < prompt.len()`, or `<= prompt.len()` with `commit`.
    pub end: u32,
    /// Tokens to make room for past `end`.
    pub reserve_tokens: u32,
    /// The transfer will be committed to the context cache, not generated from.
    pub commit: bool,
    /// Common options.
    pub options: CallOptions,
}

/// The answer to `prep_recv`.
#[derive(Clone, Debug, PartialEq)]
pub struct PrepRecvReply {
    /// The key under which the reservation stands.
    pub key: CallKey,
    /// The encoded address; `None` when all of `[0, end)` was matched and nothing is to be sent.
    pub kv_addr_info: Option<Vec<u8>>,
    /// Tokens of the prompt that this engine holds already; a multiple of the page size, or `end`.
    pub prefix_matched_length: u32,
    /// How long the reservation stands without a sign of life.
    pub lease: Duration,
    /// Who answers.
    pub engine_id: EngineId,
}

/// `remote_send`: compute KV of `prompt[..range.end]` as far as it is not cached here, deliver `range` to the address.
#[derive(Clone, Debug)]
pub struct RemoteSend {
    /// The key; taken from the address if there is none.
    pub key: Option<CallKey>,
    /// The whole prompt.
    pub prompt: Arc<[TokenId]>,
    /// What to deliver.
    pub range: KvRange,
    /// The encoded address, as `prep_recv` answered it.
    pub kv_addr_info: Vec<u8>,
    /// The receiver's PE under PGAS transports.
    pub recv_rank: i64,
    /// Common options.
    pub options: CallOptions,
}

/// The answer to `remote_send`: the receiver can read all of the range.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RemoteSendReply {
    /// Tokens delivered.
    pub sent_tokens: u32,
    /// Tokens of `[0, end)` that were found in this engine's context cache.
    pub cached_tokens: u32,
    /// Tokens of `[0, end)` that were computed for this call.
    pub computed_tokens: u32,
    /// Bytes written.
    pub bytes: u64,
    /// Time spent writing.
    pub transfer: Duration,
    /// The part of it that no computing hid: from the last layer's end to the receiver's being able to read.
    pub exposed_transfer: Duration,
}

/// `start_generate`: prefill `prompt[begin..]` here and decode.
#[derive(Debug)]
pub struct StartGenerate {
    /// The key. Unknown here: plain generation. `None`: adopt the one open minted reservation that fits, else plain.
    pub key: Option<CallKey>,
    /// The whole prompt; with `generated_from`, the prompt followed by what an earlier attempt generated.
    pub prompt: Arc<[TokenId]>,
    /// Must equal the reservation's `end` if there is one; otherwise a hint.
    pub begin: u32,
    /// Where the true prompt ends and replayed output begins; `prompt.len()` if there is none.
    pub generated_from: u32,
    /// Choices to generate; at least 1.
    pub n: u32,
    /// What the sampler calls the first of them, so that one choice of several continues as it was; 0 if there is nothing to continue.
    pub first_choice: u32,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Output tokens at most, replayed ones included; `None` is up to the context.
    pub max_tokens: Option<u32>,
    /// End-of-sequence and stop tokens are masked before this many output tokens.
    pub min_tokens: u32,
    /// Tokens that end the sequence beside the model's own.
    pub stop_tokens: Vec<TokenId>,
    /// Do not end at the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// One grammar per choice, or none.
    pub constraints: Vec<Box<dyn TokenConstraint>>,
    /// Attach to a stream that runs already and replay its tokens from this index.
    pub resume_from: Option<u32>,
    /// Common options.
    pub options: CallOptions,
}

/// What a generation stream yields. Token events of one choice come in order of `index`, without gaps.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerateEvent {
    /// One token of one choice.
    Token {
        /// The choice, below `n`.
        choice: u32,
        /// The token's place in the output, from 0 (from the number of replayed tokens, with `generated_from`).
        index: u32,
        /// The token.
        token: TokenId,
        /// Its log-probability, if asked for.
        logprob: Option<TokenLogprob>,
        /// Set on the choice's last token. With [`FinishReason::Stop`] by an end-of-sequence or stop token, the token itself
        /// is that token.
        finish: Option<FinishReason>,
    },
    /// Every choice has finished; the stream ends.
    Done {
        /// What it took.
        usage: GenerateUsage,
    },
    /// The sequence ended with an error; the stream ends.
    Failed {
        /// Why.
        error: EngineError,
    },
}

/// What a generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GenerateUsage {
    /// Tokens of the prompt, replayed output left out.
    pub prompt_tokens: u32,
    /// Tokens generated over all choices, replayed ones included.
    pub completion_tokens: u32,
    /// Tokens of the prompt whose KV was matched in this engine's context cache.
    pub cached_tokens: u32,
    /// Tokens of the prompt whose KV was received from other engines.
    pub received_tokens: u32,
    /// Tokens of the prompt that were computed here for the first choice.
    pub computed_tokens: u32,
}

/// A sequence as `GET /microserving/sequences` shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceInfo {
    /// Its key.
    pub key: CallKey,
    /// `waiting`, `prefilling`, `decoding`, `receiving`, `sending`, `preempted`, `paused`, `finished`.
    pub state: &'static str,
    /// What is left of its lease, on receivers.
    pub lease: Option<Duration>,
    /// Pages it holds, shared ones included.
    pub num_pages: u32,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Output tokens so far.
    pub output_tokens: u32,
}

/// Pages by state: the first five add up to `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Holding nothing.
    pub free: u32,
    /// Promised to a transfer.
    pub reserved: u32,
    /// Held by a live sequence, alone or shared.
    pub owned: u32,
    /// Held by the context cache alone.
    pub cached: u32,
    /// Given up, but a peer might still write to them.
    pub quarantined: u32,
    /// All of them.
    pub total: u32,
}

/// An engine's load, as `GET /microserving/state` shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineState {
    /// The engine's name.
    pub engine_id: EngineId,
    /// Its boot.
    pub incarnation: Incarnation,
    /// Pages by state.
    pub pages: PageCounts,
    /// Tokens in a page.
    pub page_size: u32,
    /// Sequences that wait for their first step.
    pub waiting: u32,
    /// Sequences being prefilled or decoded.
    pub running: u32,
    /// Reservations whose transfer or generation is awaited.
    pub receiving: u32,
    /// `remote_send` jobs.
    pub sending: u32,
    /// Prefill tokens not yet computed.
    pub queued_prefill_tokens: u64,
    /// Nothing new is taken any more.
    pub draining: bool,
    /// Counters since boot.
    pub counters: EngineCounters,
}

/// Counters since boot, for metrics and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounters {
    /// Steps run.
    pub steps: u64,
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Tokens sampled.
    pub decode_tokens: u64,
    /// Prompt tokens found in the context cache.
    pub matched_tokens: u64,
    /// Prompt tokens looked up in the context cache.
    pub lookup_tokens: u64,
    /// Pages evicted from the context cache.
    pub evicted_pages: u64,
    /// Sequences preempted for want of pages, or of the device that was lost.
    pub preemptions: u64,
    /// Leases that ran out.
    pub leases_expired: u64,
    /// Transfers given up by the other side, or corrupt on arrival.
    pub transfers_lost: u64,
    /// Sequences aborted by a caller or its going away.
    pub aborted: u64,
    /// KV bytes sent.
    pub bytes_sent: u64,
    /// KV bytes received.
    pub bytes_received: u64,
    /// Microseconds spent sending.
    pub transfer_micros: u64,
    /// Microseconds of sending that no computing hid.
    pub exposed_transfer_micros: u64,
    /// Devices that were lost and had to be replaced.
    pub devices_lost: u64,
}

/// Why the engine did not do what it was asked. `server` maps these to status codes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A value is out of bounds.
    #[error("{field}: {reason}")]
    InvalidField {
        /// The field's name on the wire.
        field: &'static str,
        /// The value and the bound.
        reason: String,
    },
    /// Prompt and output can never fit: context or pages.
    #[error("{field}: {needed} tokens are asked for, at most {limit} fit")]
    TooLong {
        /// The field's name on the wire.
        field: &'static str,
        /// Tokens asked for.
        needed: u64,
        /// Tokens that fit.
        limit: u64,
    },
    /// There is no room now.
    #[error("no room: {reason}")]
    NoRoom {
        /// What is full.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// No sequence has this key.
    #[error("no sequence {seq_id}")]
    UnknownSequence {
        /// The key.
        seq_id: SeqId,
    },
    /// A higher attempt was seen.
    #[error("attempt {attempt} of {seq_id} was replaced by a later one")]
    StaleAttempt {
        /// The key.
        seq_id: SeqId,
        /// The attempt that came too late.
        attempt: Attempt,
    },
    /// The same key was used with another body, or the prompt differs from the prepared one.
    #[error("{field} differs from what {seq_id} was prepared with")]
    Conflict {
        /// The key.
        seq_id: SeqId,
        /// The field that differs.
        field: &'static str,
    },
    /// Sender and receiver do not store KV alike.
    #[error("the address has KV layout {theirs:016x}, this engine has {ours:016x}")]
    LayoutMismatch {
        /// Our fingerprint.
        ours: u64,
        /// The address's.
        theirs: u64,
    },
    /// The address cannot be read.
    #[error("kv_addr_info: {reason}")]
    BadAddress {
        /// What is wrong.
        reason: String,
    },
    /// The address cannot be reached from here: it is of another transport, host or world.
    #[error("kv_addr_info: {reason}")]
    Unreachable {
        /// Why, and what to configure instead.
        reason: String,
    },
    /// The receiver, or the address itself, refuses.
    #[error("the receiver refused: {refusal}")]
    Refused {
        /// Why.
        refusal: Refusal,
    },
    /// The lease ran out.
    #[error("the lease of {seq_id} has expired")]
    LeaseExpired {
        /// The key.
        seq_id: SeqId,
    },
    /// The sequence was aborted.
    #[error("{seq_id} was aborted")]
    Aborted {
        /// The key.
        seq_id: SeqId,
    },
    /// The address belongs to an earlier boot of the receiver, or its reservation is over.
    #[error("the address of generation {generation} is no longer valid")]
    AddressExpired {
        /// The reservation.
        generation: Generation,
    },
    /// The KV did not arrive, or arrived damaged, and there is nothing to fall back to.
    #[error("the transfer of {seq_id} was lost")]
    TransferLost {
        /// The key.
        seq_id: SeqId,
    },
    /// The caller's time ran out.
    #[error("the deadline of {seq_id} has passed")]
    DeadlineExceeded {
        /// The key.
        seq_id: SeqId,
    },
    /// The computation failed; the sequence is gone, the engine goes on.
    #[error("the executor failed: {reason}")]
    Executor {
        /// The cause.
        reason: String,
    },
    /// The transport failed here, before anything was sent; the sequence is gone, the engine goes on.
    #[error("the transport failed: {reason}")]
    Transport {
        /// The cause.
        reason: String,
    },
    /// The engine is shutting down and takes nothing new.
    #[error("the engine is draining")]
    Draining,
}

/// `abort`: gives a request up, whatever it is doing here. Idempotent; wins over a `prep_recv` that it overtakes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The request.
    pub seq_id: SeqId,
    /// The last try to be given up; `None` is the one that is known here, or the first.
    pub attempt: Option<Attempt>,
}

/// `commit`: keeps the received KV in the context cache without generating.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The request.
    pub seq_id: SeqId,
    /// The try; `None` is the one that is known here.
    pub attempt: Option<Attempt>,
}

/// The answer to `commit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitReply {
    /// The key that was committed.
    pub key: CallKey,
    /// Tokens of the prompt that the context cache holds now: full pages only.
    pub committed_tokens: u32,
}

/// `pause`: stops decoding and answers the tokens so far; the sequence keeps its pages until it is aborted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// The request.
    pub seq_id: SeqId,
    /// The try; `None` is the one that is known here.
    pub attempt: Option<Attempt>,
}

/// The answer to `pause`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PauseReply {
    /// The key that was paused.
    pub key: CallKey,
    /// The output tokens of each choice so far, those replayed by `generated_from` left out.
    pub tokens: Vec<Vec<TokenId>>,
    /// Prompt tokens that were in the context cache when it began.
    pub cached_tokens: u32,
}

/// What an engine is, fixed once it runs but for its incarnation.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineInfo {
    /// The engine's name.
    pub engine_id: EngineId,
    /// Its boot; another one after its device was lost.
    pub incarnation: Incarnation,
    /// The model it runs.
    pub executor: ExecutorInfo,
    /// Pages of its KV region.
    pub num_pages: u32,
    /// The transport's name.
    pub transport: &'static str,
    /// How long a reservation stands without a sign of life.
    pub lease: Duration,
}
