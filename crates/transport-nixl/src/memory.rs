//! The KV region in host memory.
//!
//! **Who guarantees what.** The bytes are written by this process and, as it asks for them, by the network; peers read them. No reference
//! to them is ever made: access is by copies through raw pointers. That two accesses to the same bytes do not race is the page rule (see
//! [`KvMemory`]): a page that is being received is read when its claim has finished, and serves something else when no read into it is
//! under way. A peer that breaks the protocol can spoil bytes of pages granted to it, or read what it should not, but never this process:
//! nothing in the bytes is used as an address or a length.

use std::io;
use std::ptr::NonNull;

use microserving_protocol::{KvMemory, MemoryKind};
use microserving_transport::one_sided::available_bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use xxhash_rust::xxh3::Xxh3;

/// This process's own KV region; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    num_bytes: usize,
}

// SAFETY: the mapping is owned by the value and stays where it is; all access is by raw copies under the page rule (see the module).
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` gives out no references into the memory.
unsafe impl Sync for Region {}

impl Region {
    /// Allocates zeroed memory, all of it now: a lack of memory is an error here instead of a signal later.
    pub(crate) fn allocate(num_bytes: usize) -> io::Result<Self> {
        if let Some(available) = available_bytes()
            && num_bytes as u64 > available
        {
            let reason = format!("{num_bytes} bytes are wanted and {available} are available");
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, reason));
        }
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice cannot disturb anything that exists.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), num_bytes, protection, flags) }?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap answered a null address"))?;
        let region = Self { base, num_bytes };
        // A child would copy pages that the network writes to. Huge pages are faster to read and to register, where there are any.
        for (advice, is_needed) in [
            (Advice::LinuxDontFork, true),
            (Advice::LinuxHugepage, false),
            // Kernels before 5.14 do not know it: the pages come when they are touched.
            (Advice::LinuxPopulateWrite, false),
        ] {
            match region.advise(advice) {
                Err(error) if is_needed || error.kind() == io::ErrorKind::OutOfMemory => return Err(error),
                Err(error) => tracing::debug!(%error, ?advice, "advice on the KV region is not taken"),
                Ok(()) => {}
            }
        }
        Ok(region)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is exactly the mapping that we own, and none of the kinds of advice given changes its bytes.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.num_bytes, advice) }?;
        Ok(())
    }

    pub(crate) fn base(&self) -> usize {
        self.base.as_ptr().expose_provenance()
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Returns the address of `offset`.
    ///
    /// # Panics
    /// If the range does not lie in the region.
    pub(crate) fn at(&self, offset: usize, num_bytes: usize) -> usize {
        self.pointer(offset, num_bytes).as_ptr().expose_provenance()
    }

    fn pointer(&self, offset: usize, num_bytes: usize) -> NonNull<u8> {
        assert!(
            offset.checked_add(num_bytes).is_some_and(|end| end <= self.num_bytes),
            "{num_bytes} bytes at {offset} do not lie in a region of {} bytes",
            self.num_bytes
        );
        // SAFETY: `offset` lies within the mapping, which is one allocation and shorter than `isize::MAX`.
        unsafe { self.base.add(offset) }
    }

    /// Returns the checksum of some bytes.
    pub(crate) fn hash(&self, offset: usize, num_bytes: usize) -> u64 {
        let mut hasher = Xxh3::new();
        let mut buffer = [0; 16 << 10];
        let mut done = 0;
        while done < num_bytes {
            let piece = &mut buffer[..(num_bytes - done).min(16 << 10)];
            self.read(offset + done, piece);
            hasher.update(piece);
            done += piece.len();
        }
        hasher.digest()
    }
}

impl KvMemory for Region {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn base_address(&self) -> usize {
        self.base()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.pointer(offset, into.len());
        // SAFETY: `from` was checked; `into` is a distinct, exclusive buffer of that length; the page rule excludes a writer.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *into).cast(), into.len()) }
    }

    fn write(&self, offset: usize, from: &[u8]) {
        let to = self.pointer(offset, from.len());
        // SAFETY: `to` was checked; `from` is a distinct buffer of that length; the page rule makes us the only writer.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no pointer into it outlives the value: agents keep the value as long as they live.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.num_bytes) } {
            tracing::error!(%error, "cannot unmap a region");
        }
    }
}
