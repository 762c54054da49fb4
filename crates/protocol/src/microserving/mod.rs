//! The three calls and their companions, as JSON.

mod bounds;
mod calls;
mod views;

pub use bounds::{normalise_begin, normalise_prep_end, normalise_send_range};
pub use calls::{
    AbortRequest, AbortResponse, CallOptions, CommitRequest, CommitResponse, PauseRequest, PauseResponse,
    PrepRecvRequest, PrepRecvResponse, RemoteSendRequest, RemoteSendResponse, StartGenerateRequest,
};
pub use views::{CountersView, KvEvent, KvEventKind, PagesView, SequenceList, SequenceView, StateView};
