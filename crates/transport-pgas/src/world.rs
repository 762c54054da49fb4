//! Forming a world: everybody says who it is, the region is made as large as the largest that anybody needs, and a first transfer shows
//! that bytes travel.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{KvMemory, MemoryKind, PeId};
use microserving_transport::one_sided::{self, Writer, own_start_time};
use rustix::process::Pid;
use xxhash_rust::xxh3::xxh3_64;

use crate::clock::now;
use crate::control::{Layout, MAX_PES};
use crate::pgas::{Pgas, PgasError, Put, SymmetricMemory};

/// Bytes of the first transfer, from every element to the next.
const TEST_BYTES: usize = 64 << 10;
const MAGIC: u64 = u64::from_le_bytes(*b"mspgas\0\x01");

/// Who an element is: what it puts into everybody's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Card {
    magic: u64,
    version: u64,
    /// The world's name; element 0's counts.
    world: [u64; 2],
    /// The host and its boot, and the PID namespace: within one, processes can be watched.
    boot: [u64; 2],
    pid_namespace: u64,
    pid: u64,
    start_time: u64,
    region_bytes: u64,
    checksum: u64,
}

impl Card {
    const WORDS: usize = 11;

    fn own(region_bytes: usize, checksum: bool) -> std::io::Result<Self> {
        let mut world = [0; 16];
        getrandom::fill(&mut world).map_err(std::io::Error::other)?;
        let (low, high) = world.split_at(8);
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("half of 16 bytes"));
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().replace('-', "");
        let boot = u128::from_str_radix(&boot, 16).map_err(std::io::Error::other)?;
        let link = fs::read_link("/proc/self/ns/pid")?;
        let namespace =
            link.to_str().and_then(|link| link.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok());
        Ok(Self {
            magic: MAGIC,
            version: u64::from(one_sided::VERSION),
            world: [word(low), word(high)],
            boot: [boot as u64, (boot >> 64) as u64],
            pid_namespace: namespace
                .ok_or_else(|| std::io::Error::other("the PID namespace has no number"))?,
            pid: u64::from(std::process::id()),
            start_time: own_start_time()?,
            region_bytes: region_bytes as u64,
            checksum: u64::from(checksum),
        })
    }

    fn words(&self) -> [u64; Self::WORDS] {
        let [world, world2] = self.world;
        let [boot, boot2] = self.boot;
        [
            self.magic,
            self.version,
            world,
            world2,
            boot,
            boot2,
            self.pid_namespace,
            self.pid,
            self.start_time,
            self.region_bytes,
            self.checksum,
        ]
    }

    fn read(control: &dyn SymmetricMemory, offset: usize) -> Self {
        let word = |at: usize| control.load_word(offset + at * 8);
        Self {
            magic: word(0),
            version: word(1),
            world: [word(2), word(3)],
            boot: [word(4), word(5)],
            pid_namespace: word(6),
            pid: word(7),
            start_time: word(8),
            region_bytes: word(9),
            checksum: word(10),
        }
    }

    /// Takes hold of the element's process, if it can be seen from here.
    fn watch(&self, own: &Self) -> Option<Writer> {
        if self.boot != own.boot || self.pid_namespace != own.pid_namespace {
            return None;
        }
        let pid = Pid::from_raw(i32::try_from(self.pid).ok()?)?;
        Writer::identify(pid, self.start_time).ok()
    }
}

/// What is known of an element.
#[derive(Debug)]
pub(crate) struct Member {
    /// Its process, if it runs on this host: its exit is certain when it is seen.
    pub(crate) process: Option<Writer>,
    /// It wants checksums of what it receives or sends.
    pub(crate) checksum: bool,
}

/// How the first transfer went.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstTransfer {
    /// How many elements took part.
    pub num_pes: u32,
    /// Bytes from each to the next.
    pub num_bytes: usize,
    /// How long this element's were under way.
    pub took: Duration,
}

/// A formed world, not yet at work.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) pgas: Box<dyn Pgas>,
    pub(crate) control: Arc<dyn SymmetricMemory>,
    pub(crate) region: Arc<dyn SymmetricMemory>,
    pub(crate) id: [u8; 16],
    pub(crate) members: Vec<Member>,
    pub(crate) first_transfer: FirstTransfer,
}

impl World {
    /// Forms the world. Collective.
    pub(crate) fn form(
        mut pgas: Box<dyn Pgas>,
        region_bytes: usize,
        checksum: bool,
    ) -> Result<Self, PgasError> {
        let (name, me, num_pes) = (pgas.name(), pgas.pe(), pgas.num_pes());
        let failed = |reason| PgasError::World { name, reason };
        if num_pes > MAX_PES {
            return Err(failed(format!(
                "{num_pes} elements are more than the {MAX_PES} that a world may have"
            )));
        }
        let layout = Layout::new(num_pes);
        let control = pgas.allocate(layout.num_bytes())?;
        let own =
            Card::own(region_bytes, checksum).map_err(|e| failed(format!("who we are is not known: {e}")))?;
        for pe in (0..num_pes).map(PeId) {
            for (at, word) in own.words().into_iter().enumerate() {
                pgas.put_word(pe, &*control, layout.card(me) + at * 8, word);
            }
        }
        pgas.barrier();
        let cards: Vec<_> = (0..num_pes).map(|pe| Card::read(&*control, layout.card(PeId(pe)))).collect();
        for (pe, card) in cards.iter().enumerate() {
            if (card.magic, card.version) != (own.magic, own.version) {
                return Err(failed(format!(
                    "element {pe} is of another version: start all of them from one build"
                )));
            }
        }
        let largest = cards.iter().map(|card| card.region_bytes).max().unwrap_or(0);
        let largest =
            usize::try_from(largest).map_err(|_| failed("a region is beyond all numbers".into()))?;
        let region = pgas.allocate(largest.max(TEST_BYTES * 2))?;
        let first_transfer = first_transfer(&mut *pgas, &*control, &*region).map_err(failed)?;
        let members = cards
            .iter()
            .map(|card| Member { process: card.watch(&own), checksum: card.checksum != 0 })
            .collect();
        let [low, high] = cards[0].world.map(u64::to_le_bytes);
        let mut id = [0; 16];
        id[..8].copy_from_slice(&low);
        id[8..].copy_from_slice(&high);
        Ok(Self { pgas, control, region, id, members, first_transfer })
    }
}

/// Puts bytes into the next element's region, and a word behind them; compares what came from the one before. Leaves zeros.
fn first_transfer(
    pgas: &mut dyn Pgas,
    control: &dyn SymmetricMemory,
    region: &dyn SymmetricMemory,
) -> Result<FirstTransfer, String> {
    let (me, num_pes) = (pgas.pe(), pgas.num_pes());
    let layout = Layout::new(num_pes);
    let (next, before) = (PeId((me.0 + 1) % num_pes), PeId((me.0 + num_pes - 1) % num_pes));
    let pattern =
        |pe: PeId| -> Vec<u8> { (0..TEST_BYTES).map(|at| (at * 31 + pe.0 as usize * 7 + 1) as u8).collect() };
    region.write(0, &pattern(me));
    let begin = now();
    pgas.put(Put {
        pe: next,
        target: region,
        target_offset: TEST_BYTES,
        source: region,
        source_offset: 0,
        num_bytes: TEST_BYTES,
    });
    pgas.fence();
    pgas.put_word(next, control, layout.pulse(me), xxh3_64(&pattern(me)));
    pgas.quiet();
    let took = now().saturating_sub(begin);
    pgas.barrier();
    let mut arrived = vec![0; TEST_BYTES];
    region.read(TEST_BYTES, &mut arrived);
    let said = control.load_word(layout.pulse(before));
    if arrived != pattern(before) || said != xxh3_64(&arrived) {
        return Err(format!("what element {before} put here in the first transfer is not what arrived"));
    }
    region.write(0, &vec![0; TEST_BYTES * 2]);
    pgas.barrier();
    Ok(FirstTransfer { num_pes, num_bytes: TEST_BYTES, took })
}

/// The part of the symmetric region that this element asked for.
#[derive(Debug)]
pub(crate) struct Region {
    memory: Arc<dyn SymmetricMemory>,
    num_bytes: usize,
}

impl Region {
    pub(crate) fn new(memory: Arc<dyn SymmetricMemory>, num_bytes: usize) -> Self {
        Self { memory, num_bytes }
    }

    fn check(&self, offset: usize, num_bytes: usize) {
        let end = offset.checked_add(num_bytes);
        assert!(
            end.is_some_and(|end| end <= self.num_bytes),
            "{num_bytes} bytes at {offset} do not lie in a region of {} bytes",
            self.num_bytes
        );
    }
}

impl KvMemory for Region {
    fn kind(&self) -> MemoryKind {
        self.memory.kind()
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn base_address(&self) -> usize {
        self.memory.base_address()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        self.memory.read(offset, into);
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.check(offset, from.len());
        self.memory.write(offset, from);
    }
}
