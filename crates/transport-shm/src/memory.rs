//! Shared memory: the only `unsafe` of this crate.
//!
//! **Who guarantees what.** The bytes of a [`Mapping`] may be read and written by several threads and processes, so no
//! reference to them is ever made: access is by copy through raw pointers, and counters are atomics. That two accesses to
//! the same bytes do not race is the **page rule**, kept by the page states of the engine's page pool: a page has one writer
//! at a time (its engine, or the one sender whose claim covers it), it is read only after that writer has finished, and it
//! serves something else only after every writer was drained or fenced. The order between a finished write and the reader
//! comes from the arrival counter (release after the data, acquire before it is used) and from the socket. A peer that
//! breaks the rule can spoil bytes of the region, never the memory safety of this process: the bytes are plain data of no
//! type, and nothing in them is used as an address or a length.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use microserving_protocol::{KvMemory, MemoryKind};
use microserving_transport::one_sided::available_bytes;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use xxhash_rust::xxh3::Xxh3;

/// A shared mapping of a whole memfd; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    num_bytes: usize,
}

// SAFETY: the mapping is owned by the value and stays where it is; all access is by raw copies and atomics under the page
// rule (see the module), from whatever thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives out no references into the memory but atomics.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `num_bytes` of a memfd for reading and writing. The memfd must be at least as long and must not shrink (the
    /// callers see to it: they made it, or they checked its seals), else access would end the process with a signal.
    fn new(memfd: &OwnedFd, num_bytes: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice cannot disturb anything that exists.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), num_bytes, protection, MapFlags::SHARED, memfd, 0)
        }?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap answered a null address"))?;
        Ok(Self { base, num_bytes })
    }

    /// Gives advice on the whole mapping. Only advice that keeps its content and its validity.
    fn advise(&self, advice: Advice) -> io::Result<()> {
        debug_assert!(matches!(
            advice,
            Advice::LinuxHugepage
                | Advice::LinuxPopulateWrite
                | Advice::LinuxDontFork
                | Advice::LinuxDontDump
        ));
        // SAFETY: the range is exactly the mapping that we own, and none of these kinds of advice changes its bytes.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.num_bytes, advice) }?;
        Ok(())
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Returns the address of `offset` after checking that the range lies in the mapping.
    ///
    /// # Panics
    /// If it does not.
    fn at(&self, offset: usize, num_bytes: usize) -> NonNull<u8> {
        assert!(
            offset.checked_add(num_bytes).is_some_and(|end| end <= self.num_bytes),
            "{num_bytes} bytes at {offset} do not lie in a region of {} bytes",
            self.num_bytes
        );
        // SAFETY: `offset` lies within the mapping, which is one allocation and shorter than `isize::MAX`.
        unsafe { self.base.add(offset) }
    }

    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: `from` was checked; `into` is a distinct, exclusive buffer of that length; the page rule excludes a writer.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *into).cast(), into.len()) }
    }

    pub(crate) fn write(&self, offset: usize, from: &[u8]) {
        let to = self.at(offset, from.len());
        // SAFETY: `to` was checked; `from` is a distinct buffer of that length; the page rule makes us the only writer.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) }
    }

    /// Copies from this mapping straight into another one.
    pub(crate) fn copy_to(&self, offset: usize, target: &Self, target_offset: usize, num_bytes: usize) {
        let (from, to) = (self.at(offset, num_bytes), target.at(target_offset, num_bytes));
        // SAFETY: both ranges were checked and are of different mappings, hence of different addresses. A transport that sends
        // to itself maps its region twice; there, too, the page rule keeps the two ranges apart: the source's page is owned
        // and unchanged, the target's is reserved and has this one writer.
        unsafe { from.copy_to_nonoverlapping(to, num_bytes) }
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

    /// Returns a counter in the mapping.
    fn counter(&self, offset: usize) -> &AtomicU64 {
        assert_eq!(offset % align_of::<AtomicU64>(), 0, "counters are aligned");
        let at = self.at(offset, size_of::<AtomicU64>());
        // SAFETY: `at` was checked to hold 8 bytes in the mapping and is aligned, because the mapping begins at a page; the
        // bytes live as long as `self`, and they are only ever accessed as atomics, by both processes.
        unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no pointer into it outlives the value that gives them out.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.num_bytes) } {
            tracing::error!(%error, "cannot unmap a region");
        }
    }
}

/// Makes a memfd of a fixed size and maps it; peers may map it, nobody may resize it.
fn sealed_memfd(name: &str, num_bytes: usize) -> io::Result<(OwnedFd, Mapping)> {
    let memfd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memfd, num_bytes as u64)?;
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let mapping = Mapping::new(&memfd, num_bytes)?;
    Ok((memfd, mapping))
}

/// Maps a memfd that a peer sent. It must be sealed against shrinking, or the peer could have us killed by a signal.
fn map_from_peer(memfd: &OwnedFd) -> io::Result<Mapping> {
    let refuse = |reason| Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    if !rustix::fs::fcntl_get_seals(memfd)?.contains(SealFlags::SHRINK) {
        return refuse("the peer's memory is not sealed");
    }
    let num_bytes = usize::try_from(rustix::fs::fstat(memfd)?.st_size).unwrap_or(0);
    if num_bytes == 0 {
        return refuse("the peer's memory is empty");
    }
    let mapping = Mapping::new(memfd, num_bytes)?;
    // A child of this process must not keep a writable mapping: the fence watches this process only.
    mapping.advise(Advice::LinuxDontFork)?;
    Ok(mapping)
}

/// This process's own KV region.
#[derive(Debug)]
pub(crate) struct Region {
    memfd: OwnedFd,
    mapping: Mapping,
}

impl Region {
    /// Allocates zeroed memory, all of it now: a lack of memory is an error here instead of a signal later.
    pub(crate) fn allocate(num_bytes: usize) -> io::Result<Self> {
        // Shared memory has no limit of its own, so that the kernel would answer a size too large by killing processes.
        if let Some(available) = available_bytes()
            && num_bytes as u64 > available
        {
            let reason = format!("{num_bytes} bytes are wanted and {available} are available");
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, reason));
        }
        let (memfd, mapping) = sealed_memfd("microserving-kv", num_bytes)?;
        // Where the kernel gives huge pages to shared memory, reading KV is nearly twice as fast; where not, no matter.
        if let Err(error) = mapping.advise(Advice::LinuxHugepage) {
            tracing::debug!(%error, "no huge pages for the KV region");
        }
        match mapping.advise(Advice::LinuxPopulateWrite) {
            // Kernels before 5.14 do not know it.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                rustix::fs::fallocate(&memfd, rustix::fs::FallocateFlags::empty(), 0, num_bytes as u64)?;
            }
            other => other?,
        }
        Ok(Self { memfd, mapping })
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(crate) fn memfd(&self) -> &impl AsFd {
        &self.memfd
    }
}

impl KvMemory for Region {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn num_bytes(&self) -> usize {
        self.mapping.num_bytes
    }

    fn base_address(&self) -> usize {
        self.mapping.base.as_ptr().expose_provenance()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.mapping.read(offset, into);
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.mapping.write(offset, from);
    }
}

/// Arrival counters of the claims of one connection, each on a cache line of its own. The receiver makes them, the sender
/// counts in them.
#[derive(Debug)]
pub(crate) struct Counters {
    memfd: OwnedFd,
    mapping: Mapping,
}

impl Counters {
    /// Claims that one connection may hold at a time.
    pub(crate) const NUM_SLOTS: u32 = 1024;
    const SLOT_BYTES: usize = 64;

    pub(crate) fn allocate() -> io::Result<Self> {
        let num_bytes = Self::NUM_SLOTS as usize * Self::SLOT_BYTES;
        let (memfd, mapping) = sealed_memfd("microserving-arrivals", num_bytes)?;
        Ok(Self { memfd, mapping })
    }

    pub(crate) fn memfd(&self) -> &impl AsFd {
        &self.memfd
    }

    /// Returns the bytes that the writer says have arrived; they can be read by whoever saw the number.
    pub(crate) fn load(&self, slot: u32) -> u64 {
        self.mapping.counter(slot as usize * Self::SLOT_BYTES).load(Ordering::Acquire)
    }

    pub(crate) fn reset(&self, slot: u32) {
        self.mapping.counter(slot as usize * Self::SLOT_BYTES).store(0, Ordering::Release);
    }
}

/// A peer's region and counters, as its sender maps them.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    region: Mapping,
    counters: Mapping,
}

impl PeerMemory {
    pub(crate) fn map(region: &OwnedFd, counters: &OwnedFd) -> io::Result<Self> {
        Ok(Self { region: map_from_peer(region)?, counters: map_from_peer(counters)? })
    }

    pub(crate) fn region(&self) -> &Mapping {
        &self.region
    }

    /// Says whether the peer has a counter of this number.
    pub(crate) fn has_slot(&self, slot: u32) -> bool {
        slot < Counters::NUM_SLOTS && (slot as usize + 1) * Counters::SLOT_BYTES <= self.counters.num_bytes
    }

    /// Says that `num_bytes` more were written: whoever sees the number can read them.
    pub(crate) fn count_arrived(&self, slot: u32, num_bytes: u64) {
        self.counters.counter(slot as usize * Counters::SLOT_BYTES).fetch_add(num_bytes, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_zero_aligned_and_sealed() {
        let region = Region::allocate(10_000).unwrap();
        assert_eq!(region.base_address() % 64, 0);
        let mut bytes = vec![1; 10_000];
        region.read(0, &mut bytes);
        assert_eq!(bytes, vec![0; 10_000]);
        assert!(rustix::fs::ftruncate(&region.memfd, 0).is_err(), "it cannot be shrunk under a peer");
    }

    #[test]
    fn too_much_memory_is_an_error() {
        assert!(available_bytes().is_some_and(|available| available > 1 << 20), "this host says what it has");
        for num_bytes in [1usize << 60, usize::MAX - 4096] {
            let error = Region::allocate(num_bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        }
    }

    #[test]
    fn writes_through_a_peers_mapping_are_seen() {
        let (region, counters) = (Region::allocate(4096).unwrap(), Counters::allocate().unwrap());
        let peer = PeerMemory::map(&region.memfd, &counters.memfd).unwrap();
        let own = Region::allocate(4096).unwrap();
        own.write(7, b"keys");
        own.mapping.copy_to(7, peer.region(), 100, 4);
        peer.count_arrived(3, 4);
        assert_eq!((counters.load(3), counters.load(2)), (4, 0));
        let mut bytes = [0; 6];
        region.read(99, &mut bytes);
        assert_eq!(&bytes, b"\0keys\0");
        assert_eq!(region.mapping.hash(100, 4), own.mapping.hash(7, 4));
        assert_ne!(region.mapping.hash(100, 4), own.mapping.hash(8, 4));
        assert!(peer.has_slot(Counters::NUM_SLOTS - 1) && !peer.has_slot(Counters::NUM_SLOTS));
    }

    #[test]
    fn long_hashes_are_those_of_the_bytes() {
        let region = Region::allocate(100_000).unwrap();
        let bytes: Vec<u8> = (0..100_000u32).map(|at| (at * 7) as u8).collect();
        region.write(0, &bytes);
        assert_eq!(region.mapping.hash(5, 60_000), xxhash_rust::xxh3::xxh3_64(&bytes[5..60_005]));
    }

    #[test]
    fn unsealed_memory_of_a_peer_is_refused() {
        let memfd = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memfd, 4096).unwrap();
        assert!(map_from_peer(&memfd).is_err());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(map_from_peer(&file.into()).is_err());
    }

    #[test]
    #[should_panic(expected = "do not lie in a region")]
    fn access_outside_panics() {
        Region::allocate(4096).unwrap().write(4090, &[0; 7]);
    }
}
