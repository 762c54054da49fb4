//! What an engine shows of itself: `GET /microserving/{state,sequences,kv_events}`.

use serde::{Deserialize, Serialize};

use crate::{Attempt, EngineId, SeqId};

/// A sequence, as `GET /microserving/sequences/{seq_id}` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceView {
    /// Its key.
    pub seq_id: SeqId,
    /// The try.
    pub attempt: Attempt,
    /// `waiting`, `prefilling`, `decoding`, `receiving`, `sending`, `preempted`, `paused` or `finished`.
    pub state: String,
    /// What is left of its lease, on receivers.
    #[serde(default)]
    pub lease_seconds: Option<f64>,
    /// Pages it holds, shared ones included.
    pub num_pages: u32,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Output tokens so far.
    pub output_tokens: u32,
}

/// All sequences, as `GET /microserving/sequences` shows them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SequenceList {
    /// The sequences, in no order.
    pub sequences: Vec<SequenceView>,
}

/// Pages by state; all but `total` add up to `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagesView {
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StateView {
    /// The engine's name.
    pub engine_id: EngineId,
    /// Its boot, as 16 hex digits: JSON numbers do not hold 64 bits.
    pub incarnation: String,
    /// The model it serves.
    #[serde(default)]
    pub model: String,
    /// The longest sequence, in tokens.
    #[serde(default)]
    pub max_context: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// The fingerprint of its KV layout, as 16 hex digits; only engines that share it exchange KV.
    #[serde(default)]
    pub layout_fingerprint: String,
    /// Pages by state.
    pub pages: PagesView,
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
    /// The engine takes nothing new.
    #[serde(default)]
    pub draining: bool,
    /// Counters since boot.
    #[serde(default)]
    pub counters: CountersView,
    /// The engine takes the calls over gRPC too, at the same port.
    #[serde(default)]
    pub grpc: bool,
    /// The engine marks the answers of `start_generate` for a router that passes them on.
    #[serde(default)]
    pub marks: bool,
}

/// Counters since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CountersView {
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
    /// Sequences preempted for want of pages.
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

/// A change of an engine's context cache, as `GET /microserving/kv_events` streams it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEvent {
    /// The engine's boot, as 16 hex digits.
    pub incarnation: String,
    /// Its number, counted from 1 without gaps; whoever sees a gap asks again from 0 and gets a snapshot.
    pub number: u64,
    /// What changed.
    #[serde(flatten)]
    pub kind: KvEventKind,
}

/// What changed in a context cache. Hashes are those of page chains, as 32 hex digits ([`crate::PageHash`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum KvEventKind {
    /// These pages can be matched from now on.
    Stored {
        /// The pages, along their prompt.
        pages: Vec<String>,
    },
    /// These pages were evicted.
    Removed {
        /// The pages.
        pages: Vec<String>,
    },
    /// The cache is empty.
    Cleared,
    /// All pages that can be matched now; what came before does not count.
    Snapshot {
        /// The pages.
        pages: Vec<String>,
    },
}
