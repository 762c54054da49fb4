//! The words that engines and routers share: ids, units, ranges, memory layout and wire types.

mod ids;
mod layout;
mod memory;
mod range;
mod sampling;

pub use ids::{Attempt, EngineId, Generation, Incarnation, LayerId, PageId, PeId, SeqId, TokenId};
pub use layout::{KvDtype, KvGeometry, KvLayout};
pub use memory::{KvMemory, MemoryKind};
pub use range::KvRange;
pub use sampling::{FinishReason, SamplingParams, TokenLogprob};
