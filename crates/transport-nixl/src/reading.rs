//! Reads from peers, and when they are over.
//!
//! ```text
//!  reader (an agent) ── reads ──▶ done                              over
//!     │                   └─────▶ failed, or its peer is gone       perhaps under way still
//!     └─ spoilt ── no read of a living peer left ── destroyed       over, all of them
//! ```
//!
//! A spoilt reader begins nothing new; the next read makes another.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::Arc;

use crate::agent::{Agent, Ended, NixlError, Part, ReadId, ReadRun};
use crate::memory::Region;
use crate::nixl::Nixl;
use crate::shared::ConnId;

/// A read of a claim's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Read {
    pub(crate) conn: ConnId,
    pub(crate) channel: u64,
    pub(crate) num_bytes: u64,
}

/// What became of reads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// All bytes are there, and nothing is under way.
    Done(Read),
    /// It failed; [`News::Over`] follows when its peer is given up.
    Failed(Read),
    /// Nothing of it is under way any more; what arrived is not known.
    Over(Read),
}

#[derive(Debug)]
struct Reader {
    agent: Agent,
    peers: BTreeMap<ConnId, CString>,
    reads: BTreeMap<ReadId, Read>,
    /// Failed, and perhaps under way still.
    failed: Vec<Read>,
    spoilt: bool,
}

/// All reads of a transport.
#[derive(Debug)]
pub(crate) struct Reading {
    nixl: Nixl,
    name: String,
    region: Option<Arc<Region>>,
    readers: Vec<Reader>,
    num_made: u64,
}

impl Reading {
    /// `name` leads those of the agents.
    pub(crate) fn new(nixl: Nixl, name: String) -> Self {
        Self { nixl, name, region: None, readers: Vec::new(), num_made: 0 }
    }

    /// Sets where reads go.
    pub(crate) fn set_region(&mut self, region: Arc<Region>) {
        self.region = Some(region);
    }

    /// Says whether there is a reason to look for news soon.
    pub(crate) fn is_busy(&self) -> bool {
        self.readers.iter().any(|reader| reader.spoilt || !reader.agent.is_idle())
    }

    /// Begins a read from a peer that is reached by `metadata`. Even where it fails, [`News::Over`] follows if it was begun at all, which
    /// the answer says.
    pub(crate) fn begin(
        &mut self,
        read: Read,
        metadata: &[u8],
        runs: &[ReadRun],
    ) -> (bool, Result<(), NixlError>) {
        let reader = match self.reader() {
            Ok(reader) => reader,
            Err(error) => return (false, Err(error)),
        };
        let peer = match reader.peers.get(&read.conn) {
            Some(peer) => peer,
            None => match reader.agent.meet(metadata) {
                Ok(peer) => reader.peers.entry(read.conn).or_insert(peer),
                Err(error) => return (false, Err(error)),
            },
        };
        match reader.agent.read(peer, runs) {
            Ok(id) => {
                reader.reads.insert(id, read);
                (true, Ok(()))
            }
            Err(error) => {
                reader.spoilt = true;
                reader.failed.push(read);
                (true, Err(error))
            }
        }
    }

    /// Makes a reader before it is needed: the first read then need not wait for one.
    pub(crate) fn prepare(&mut self) -> Result<(), NixlError> {
        self.reader().map(drop)
    }

    /// Returns the reader that is not spoilt, made if there is none.
    fn reader(&mut self) -> Result<&mut Reader, NixlError> {
        if let Some(at) = self.readers.iter().position(|reader| !reader.spoilt) {
            return Ok(&mut self.readers[at]);
        }
        self.num_made += 1;
        let name = format!("{}-reads-{}", self.name, self.num_made);
        let region = self.region.clone().ok_or_else(NixlError::no_region)?;
        let agent = Agent::new(&self.nixl, &name, Part::Reads, region)?;
        let (peers, reads, failed) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        let at = self.readers.len();
        self.readers.push(Reader { agent, peers, reads, failed, spoilt: false });
        Ok(&mut self.readers[at])
    }

    /// A connection is gone: its peer is forgotten, with whatever is being read from it.
    pub(crate) fn leave(&mut self, conn: ConnId) {
        for reader in &mut self.readers {
            let Some(peer) = reader.peers.remove(&conn) else { continue };
            if reader.reads.values().any(|read| read.conn == conn) {
                reader.spoilt = true;
            } else if !reader.peers.values().any(|other| *other == peer) {
                reader.agent.forget(&peer);
            }
        }
    }

    /// Moves all reads on. `lives` says whether a connection is there.
    pub(crate) fn progress(&mut self, lives: impl Fn(ConnId) -> bool) -> Vec<News> {
        let mut news = Vec::new();
        for reader in &mut self.readers {
            for (id, ended) in reader.agent.progress() {
                let Some(read) = reader.reads.remove(&id) else { continue };
                match ended {
                    Ended::Done => news.push(News::Done(read)),
                    Ended::Failed => {
                        reader.spoilt = true;
                        reader.failed.push(read);
                        news.push(News::Failed(read));
                    }
                }
            }
        }
        let is_over = |reader: &Reader| {
            let all = || reader.failed.iter().chain(reader.reads.values());
            reader.spoilt && !all().any(|read| lives(read.conn))
        };
        for reader in self.readers.extract_if(.., |reader| is_over(reader)) {
            let Reader { agent, reads, failed, .. } = reader;
            let num_reads = reads.len() + failed.len();
            // The fence: its connections end and its memory leaves the network before it is gone.
            if !agent.end() {
                tracing::error!(num_reads, "reads may be under way for ever: their pages stay quarantined");
                continue;
            }
            tracing::info!(num_reads, "fenced reads by destroying the agent that made them");
            news.extend(failed.into_iter().chain(reads.into_values()).map(News::Over));
        }
        news
    }
}
