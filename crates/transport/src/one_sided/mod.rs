//! What transports have in common whose bytes go straight from one region into the other, without the other side's doing.
//!
//! - [`Channels`] is the sender's half of the rules, as [`GrantBook`](crate::GrantBook) is the receiver's.
//! - [`Frame`] is what the two say to each other beside the bytes, read by [`Fields`]; [`Records`] are what they say of checksums.
//! - [`Writer`] (feature `process`) holds a peer's process, so that its exit is certain when it is seen.

mod channels;
mod fields;
mod frame;
#[cfg(feature = "process")]
mod process;
mod records;

pub use channels::{Channels, Copied, Notice, PutError, Slice, Stopping, Target};
pub use fields::Fields;
pub use frame::{Frame, FrameError, MAX_MESSAGE, MAX_RECORDS, MAX_RUNS, VERSION};
#[cfg(feature = "process")]
pub use process::{Writer, available_bytes, own_start_time};
pub use records::{Record, Records};
