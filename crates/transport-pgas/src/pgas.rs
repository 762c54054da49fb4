//! What the transport asks of a partitioned global address space.

use std::fmt;
use std::sync::Arc;

use microserving_protocol::{KvMemory, PeId};

/// Why an address space cannot be had or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PgasError {
    /// The library is not there, or not one that can be spoken to.
    #[error("the library of {name} cannot be used: {reason}")]
    Library {
        /// The address space.
        name: &'static str,
        /// What the loader or the library says, and what to do.
        reason: String,
    },
    /// The processes did not form a world.
    #[error("no world of {name} was formed: {reason}")]
    World {
        /// The address space.
        name: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// There is no room for so much symmetric memory.
    #[error("{name} has no {num_bytes} bytes of symmetric memory: {hint}")]
    Memory {
        /// The address space.
        name: &'static str,
        /// What was asked for.
        num_bytes: usize,
        /// What to configure.
        hint: &'static str,
    },
}

/// Memory of which every processing element has as much, and into which all of them can write.
pub trait SymmetricMemory: KvMemory {
    /// Returns the word at `offset`, a multiple of 8. Whoever sees a word that was put behind bytes and a fence can read those bytes.
    ///
    /// # Panics
    /// If the word does not lie inside the memory, or is not aligned.
    fn load_word(&self, offset: usize) -> u64;
}

/// One copy from this element's symmetric memory into a peer's.
#[derive(Clone, Copy, Debug)]
pub struct Put<'a> {
    /// Whose memory is written.
    pub pe: PeId,
    /// The memory, by this element's own part of it.
    pub target: &'a dyn SymmetricMemory,
    /// First byte in the target.
    pub target_offset: usize,
    /// The memory that is read.
    pub source: &'a dyn SymmetricMemory,
    /// First byte in the source.
    pub source_offset: usize,
    /// Number of bytes.
    pub num_bytes: usize,
}

/// One processing element of a world whose members write into each other's memory.
///
/// This is the part of NVSHMEM and OpenSHMEM that the transport needs. Membership is fixed when the world is formed. Nothing says that
/// a peer has died: puts into its memory go on succeeding, or the library ends the process. Called by one thread at a time.
///
/// Offsets outside a memory, and memory that another address space allocated, are programming errors: methods panic.
pub trait Pgas: Send + fmt::Debug {
    /// Returns the name in addresses and configuration.
    fn name(&self) -> &'static str;

    /// Returns which element of the world this is.
    fn pe(&self) -> PeId;

    /// Returns how many elements there are.
    fn num_pes(&self) -> u32;

    /// Allocates as many zeroed bytes on every element. Collective: blocks until all have called it with the same size. The memory
    /// stays until the world ends.
    ///
    /// # Errors
    /// [`PgasError::Memory`], on all elements alike.
    fn allocate(&mut self, num_bytes: usize) -> Result<Arc<dyn SymmetricMemory>, PgasError>;

    /// Blocks until all elements have come here, and everything that was put before is there.
    fn barrier(&mut self);

    /// Begins a copy. The source must not change before [`Pgas::quiet`].
    fn put(&mut self, put: Put<'_>);

    /// Writes a word, at an offset that is a multiple of 8, as a whole.
    fn put_word(&mut self, pe: PeId, target: &dyn SymmetricMemory, offset: usize, value: u64);

    /// Orders: what was put into an element's memory before is there before what is put into it after.
    fn fence(&mut self);

    /// Blocks until everything that was put is there and sources may change.
    fn quiet(&mut self);

    /// Leaves the world in order. Collective; nothing else may be called after.
    ///
    /// # Errors
    /// [`PgasError::World`] if memory of it is still in use: the world is then not left.
    fn leave(&mut self) -> Result<(), PgasError>;
}

/// Checks that a run lies inside a memory.
///
/// # Panics
/// If it does not.
pub(crate) fn check_run(memory: &dyn SymmetricMemory, offset: usize, num_bytes: usize) {
    let end = offset.checked_add(num_bytes);
    assert!(
        end.is_some_and(|end| end <= memory.num_bytes()),
        "{num_bytes} bytes at {offset} do not lie in a memory of {} bytes",
        memory.num_bytes()
    );
}
