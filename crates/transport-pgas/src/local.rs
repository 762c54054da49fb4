//! A world within one process: the executable reading of [`Pgas`], and the adversary that the transport is tested against.
//!
//! Puts are as weakly ordered as the contract allows: they land in another order than they were made, and only at a fence or a quiet.
//! What forgets one of the two fails here, where a library would have been kind.

use std::ptr::NonNull;
use std::sync::{Arc, Barrier, Mutex, PoisonError};

use microserving_protocol::{KvMemory, PeId};

use crate::host::HostBlock;
use crate::pgas::{Pgas, PgasError, Put, SymmetricMemory, check_run};

/// The address space's name.
pub const LOCAL: &str = "pgas";

/// One element of a world whose elements are threads of one process.
#[derive(Debug)]
pub struct LocalPgas {
    world: Arc<World>,
    pe: PeId,
    /// What was put and has not landed.
    pending: Vec<Pending>,
    /// Decides in which order puts land.
    dice: u64,
}

#[derive(Debug)]
struct World {
    num_pes: u32,
    barrier: Barrier,
    /// The blocks of each element, in the order of their allocation.
    blocks: Mutex<Vec<Vec<Arc<HostBlock>>>>,
}

#[derive(Debug)]
enum Pending {
    Bytes {
        target: Arc<HostBlock>,
        target_offset: usize,
        source: Arc<HostBlock>,
        source_offset: usize,
        num_bytes: usize,
    },
    Word {
        target: Arc<HostBlock>,
        offset: usize,
        value: u64,
    },
}

impl Pending {
    fn land(self) {
        match self {
            Self::Bytes { target, target_offset, source, source_offset, num_bytes } => {
                let (from, to) = (source.at(source_offset, num_bytes), target.at(target_offset, num_bytes));
                // SAFETY: both runs were checked. They may lie in one block, where an element puts into its own memory; that they
                // do not race with other accesses are the rules of `host`.
                unsafe { NonNull::copy_to(from, to, num_bytes) }
            }
            Self::Word { target, offset, value } => target.store_word(offset, value),
        }
    }
}

impl LocalPgas {
    /// Makes the elements of a world. Each must be used by a thread of its own while something is collective.
    #[must_use]
    pub fn world(num_pes: u32, seed: u64) -> Vec<Self> {
        let blocks = Mutex::new((0..num_pes).map(|_| Vec::new()).collect());
        let world = Arc::new(World { num_pes, barrier: Barrier::new(num_pes as usize), blocks });
        (0..num_pes)
            .map(|pe| Self {
                world: Arc::clone(&world),
                pe: PeId(pe),
                pending: Vec::new(),
                dice: seed.wrapping_add(u64::from(pe)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            })
            .collect()
    }

    fn roll(&mut self, below: usize) -> usize {
        // xorshift64
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        (self.dice % below as u64) as usize
    }

    fn land_all(&mut self) {
        while !self.pending.is_empty() {
            let at = self.roll(self.pending.len());
            self.pending.swap_remove(at).land();
        }
    }

    /// Finds an element's part of a symmetric memory.
    fn part(&self, pe: PeId, memory: &dyn SymmetricMemory) -> Arc<HostBlock> {
        let blocks = self.world.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let own = &blocks[self.pe.0 as usize];
        let place = own.iter().position(|block| block.base_address() == memory.base_address());
        let place = place.expect("the memory was allocated by this address space");
        Arc::clone(&blocks[pe.0 as usize][place])
    }
}

impl Pgas for LocalPgas {
    fn name(&self) -> &'static str {
        LOCAL
    }

    fn pe(&self) -> PeId {
        self.pe
    }

    fn num_pes(&self) -> u32 {
        self.world.num_pes
    }

    fn allocate(&mut self, num_bytes: usize) -> Result<Arc<dyn SymmetricMemory>, PgasError> {
        let hint = "the process has no more memory";
        let block = HostBlock::zeroed(num_bytes).ok_or(PgasError::Memory { name: LOCAL, num_bytes, hint })?;
        let block = Arc::new(block);
        let mut blocks = self.world.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks[self.pe.0 as usize].push(Arc::clone(&block));
        drop(blocks);
        self.barrier();
        Ok(block)
    }

    fn barrier(&mut self) {
        self.land_all();
        self.world.barrier.wait();
    }

    fn put(&mut self, put: Put<'_>) {
        check_run(put.source, put.source_offset, put.num_bytes);
        check_run(put.target, put.target_offset, put.num_bytes);
        self.pending.push(Pending::Bytes {
            target: self.part(put.pe, put.target),
            target_offset: put.target_offset,
            source: self.part(self.pe, put.source),
            source_offset: put.source_offset,
            num_bytes: put.num_bytes,
        });
    }

    fn put_word(&mut self, pe: PeId, target: &dyn SymmetricMemory, offset: usize, value: u64) {
        check_run(target, offset, 8);
        self.pending.push(Pending::Word { target: self.part(pe, target), offset, value });
    }

    fn fence(&mut self) {
        self.land_all();
    }

    fn quiet(&mut self) {
        self.land_all();
    }

    fn leave(&mut self) -> Result<(), PgasError> {
        self.barrier();
        Ok(())
    }
}
