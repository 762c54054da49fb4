//! What goes into the heart and what comes out of it.

use std::time::Duration;

use microserving_protocol::{Incarnation, SeqId};

use crate::{
    Abort, Commit, CommitReply, Device, EngineError, EngineState, GenerateEvent, KvEventBatch, Pause,
    PauseReply, PrepRecv, PrepRecvReply, RemoteSend, RemoteSendReply, SequenceInfo, StartGenerate,
};

/// Names one call at the heart's door; chosen by the caller, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// One thing asked of the heart.
#[derive(Debug)]
pub enum Command {
    /// A call, answered by one [`Effect::Reply`], and for `start_generate` by [`Effect::Event`]s after it.
    Call {
        /// The caller's name for it.
        id: CallId,
        /// What is asked.
        call: Call,
    },
    /// The listener of the generation `id` wants no more tokens of one choice; the others go on.
    FinishChoice {
        /// The `start_generate`.
        id: CallId,
        /// The choice.
        choice: u32,
    },
    /// The caller of `id` has gone away: nobody reads its answer.
    Cancel {
        /// The call that was given up.
        id: CallId,
    },
}

/// The calls an engine answers.
#[derive(Debug)]
pub enum Call {
    /// Match and reserve.
    PrepRecv(PrepRecv),
    /// Compute and deliver.
    RemoteSend(RemoteSend),
    /// Prefill the rest and decode.
    StartGenerate(Box<StartGenerate>),
    /// Give up.
    Abort(Abort),
    /// Keep what was received.
    Commit(Commit),
    /// Stop decoding.
    Pause(Pause),
    /// List the live sequences.
    Sequences,
    /// Show one sequence.
    Sequence(SeqId),
    /// Show the load.
    State,
    /// The context cache's events from a sequence number on.
    KvEvents {
        /// The first event wanted.
        from: u64,
    },
    /// Compute on another device from now on.
    ReplaceDevice(Box<Device>),
    /// Take nothing new; answered when nothing lives any more.
    Drain,
}

/// The answers, one variant a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// To [`Call::PrepRecv`].
    PrepRecv(PrepRecvReply),
    /// To [`Call::RemoteSend`].
    RemoteSend(RemoteSendReply),
    /// To [`Call::StartGenerate`]: it was accepted and events follow.
    Started,
    /// To [`Call::Abort`]: whether something was given up by it.
    Aborted(bool),
    /// To [`Call::Commit`].
    Committed(CommitReply),
    /// To [`Call::Pause`].
    Paused(PauseReply),
    /// To [`Call::Sequences`].
    Sequences(Vec<SequenceInfo>),
    /// To [`Call::Sequence`].
    Sequence(SequenceInfo),
    /// To [`Call::State`].
    State(Box<EngineState>),
    /// To [`Call::KvEvents`].
    KvEvents(KvEventBatch),
    /// To [`Call::ReplaceDevice`].
    DeviceReplaced,
    /// To [`Call::Drain`].
    Drained,
}

/// One thing that the heart wants told.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// The answer to a call; exactly one for each, unless it was cancelled first.
    Reply {
        /// The call.
        call: CallId,
        /// Its answer.
        result: Result<Reply, EngineError>,
    },
    /// An event of a generation stream.
    Event {
        /// The `start_generate` that it belongs to.
        call: CallId,
        /// What happened.
        event: GenerateEvent,
    },
}

/// What one step did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Effects {
    /// Answers and events, in order.
    pub effects: Vec<Effect>,
    /// How long the step takes on the hardware that the executor models; `None` if it computes for real or did nothing.
    pub modelled: Option<Duration>,
    /// Whether anything was computed, so that another step is likely to find work at once.
    pub computed: bool,
    /// The number that the context cache's next event will have; grows when there is something new to fetch.
    pub next_kv_event: u64,
    /// The boot that `next_kv_event` counts in.
    pub incarnation: Incarnation,
}
