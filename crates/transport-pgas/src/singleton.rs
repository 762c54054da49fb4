//! A library that lives once in a process: joined, used by one at a time, left once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::pgas::{PgasError, SymmetricMemory};

#[derive(Debug)]
enum Life<L> {
    Unborn,
    /// Nobody uses it.
    Free(L),
    InUse,
    Over,
}

/// The library and the memory that it gave out. `L` is how it is called, `B` a block of its memory.
#[derive(Debug)]
pub(crate) struct Singleton<L, B> {
    name: &'static str,
    life: Mutex<Life<L>>,
    /// While one of them is used, the library must not be finalised.
    blocks: Mutex<Vec<Arc<B>>>,
}

impl<L: Clone, B: SymmetricMemory> Singleton<L, B> {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, life: Mutex::new(Life::Unborn), blocks: Mutex::new(Vec::new()) }
    }

    /// Begins to use the library, initialising it the first time.
    pub(crate) fn enter(&self, initialise: impl FnOnce() -> Result<L, PgasError>) -> Result<L, PgasError> {
        let mut life = lock(&self.life);
        let library = match &*life {
            Life::Unborn => initialise()?,
            Life::Free(library) => library.clone(),
            Life::InUse | Life::Over => {
                return Err(self.failed("this process has joined it already, or has left it"));
            }
        };
        *life = Life::InUse;
        Ok(library)
    }

    /// Says whether the library was initialised and not finalised. Where that cannot be told just now, it is in use.
    pub(crate) fn is_entered(&self) -> bool {
        self.life.try_lock().map_or(true, |life| matches!(*life, Life::Free(_) | Life::InUse))
    }

    /// Ends using it; it can be entered again.
    pub(crate) fn release(&self, library: L) {
        let mut life = lock(&self.life);
        if matches!(*life, Life::InUse) {
            *life = Life::Free(library);
        }
    }

    /// Finalises the library, if nobody uses it or its memory.
    pub(crate) fn leave(&self, finalise: impl FnOnce(&L)) -> Result<(), PgasError> {
        let mut life = lock(&self.life);
        match &*life {
            Life::Unborn | Life::Over => return Ok(()),
            Life::InUse => return Err(self.failed("it is in use")),
            Life::Free(library) => {
                let mut blocks = lock(&self.blocks);
                if blocks.iter().any(|block| Arc::strong_count(block) > 1) {
                    return Err(self.failed("its memory is in use"));
                }
                blocks.clear();
                finalise(library);
            }
        }
        *life = Life::Over;
        Ok(())
    }

    /// Keeps a block until the library is finalised.
    pub(crate) fn keep(&self, block: B) -> Arc<B> {
        let block = Arc::new(block);
        lock(&self.blocks).push(Arc::clone(&block));
        block
    }

    /// Finds the block that a memory is.
    ///
    /// # Panics
    /// If it is none of this library's.
    pub(crate) fn find(&self, memory: &dyn SymmetricMemory) -> Arc<B> {
        let blocks = lock(&self.blocks);
        let block = blocks.iter().find(|block| block.base_address() == memory.base_address());
        Arc::clone(block.expect("the memory was allocated by this address space"))
    }

    fn failed(&self, reason: &str) -> PgasError {
        PgasError::World { name: self.name, reason: reason.to_owned() }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostBlock;

    #[test]
    fn it_is_used_by_one_at_a_time_and_left_when_nobody_holds_its_memory() {
        let library = Singleton::<u8, HostBlock>::new("test");
        assert!(!library.is_entered());
        assert_eq!(library.enter(|| Ok(7)).unwrap(), 7);
        assert!(library.is_entered());
        assert!(library.enter(|| Ok(8)).is_err(), "in use");
        let block = library.keep(HostBlock::zeroed(64).unwrap());
        assert!(library.leave(|_| panic!("in use")).is_err());
        library.release(7);
        assert!(library.leave(|_| panic!("its memory is in use")).is_err());
        assert_eq!(library.enter(|| panic!("initialised once")).unwrap(), 7);
        library.release(7);
        drop(block);
        let mut finalised = 0;
        library.leave(|_| finalised += 1).unwrap();
        library.leave(|_| panic!("finalised once")).unwrap();
        assert_eq!(finalised, 1);
        assert!(!library.is_entered());
        assert!(library.enter(|| Ok(7)).is_err(), "over");
    }
}
