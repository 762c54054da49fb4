//! The IO thread: owns every connection, the agents, and the protocol.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::KvRange;
use microserving_transport::one_sided::{Copied, Notice, Stopping};
use microserving_transport::{ChannelId, Refusal};
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};

use crate::address::Address;
use crate::agent::Agent;
use crate::clock::now;
use crate::inbound::{Inbound, Tools};
use crate::link::{Link, LinkError};
use crate::memory::Region;
use crate::message::{Introduction, VERSION};
use crate::outbound::Outbound;
use crate::reading::{News, Read, Reading};
use crate::shared::{Command, ConnId, Shared};

/// Pieces read from one connection before the others have their turn.
const MAX_PIECES: usize = 64;
/// How long the end of a transport waits for receivers to finish what they are reading, and to take its last words.
const MAX_FAREWELL: Duration = Duration::from_secs(1);
/// For how long after the last news a round begins at once while reads are under way, and how long it sleeps later.
const ALERT: Duration = Duration::from_micros(300);
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000 };
const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

const WAKE: u64 = 0;
const LISTENER: u64 = 1;

enum Conn {
    In(Inbound),
    Out(Outbound),
}

/// The agent that peers read from.
struct Serving {
    /// Held, not used: while it lives, peers can read.
    _agent: Box<Agent>,
    metadata: Vec<u8>,
}

pub(crate) struct Io {
    shared: Arc<Shared>,
    me: Address,
    epoll: OwnedFd,
    listener: TcpListener,
    conns: BTreeMap<ConnId, Conn>,
    last_conn: u64,
    // Readers go before the agent that serves, and both before the region.
    reading: Reading,
    serving: Option<Serving>,
    region: Option<Arc<Region>>,
    /// When reads last brought something.
    news: Duration,
    looked: Duration,
}

impl Io {
    pub(crate) fn new(
        shared: Arc<Shared>,
        me: Address,
        listener: TcpListener,
        reading: Reading,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, shared.wake_fd(), EventData::new_u64(WAKE), EventFlags::IN)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        let (conns, serving, region) = (BTreeMap::new(), None, None);
        Ok(Self {
            shared,
            me,
            epoll,
            listener,
            conns,
            last_conn: LISTENER,
            reading,
            serving,
            region,
            news: Duration::ZERO,
            looked: Duration::ZERO,
        })
    }

    /// Serves until it is told to shut down.
    pub(crate) fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        let mut end: Option<Duration> = None;
        loop {
            events.clear();
            let timeout = self.timeout(end.is_some());
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the nixl transport cannot wait for its sockets any more");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => {
                        if self.obey() {
                            end.get_or_insert(now() + MAX_FAREWELL);
                        }
                    }
                    LISTENER => self.accept(),
                    conn => self.serve(ConnId(conn)),
                }
            }
            self.progress();
            self.announce();
            self.look_after();
            self.shared.wake_caller();
            let busy = |conn: &Conn| matches!(conn, Conn::Out(outbound) if outbound.is_busy());
            if end.is_some_and(|end| now() > end || !self.conns.values().any(busy)) {
                return;
            }
        }
    }

    fn timeout(&self, ending: bool) -> Timespec {
        if self.reading.is_busy() {
            return if now().saturating_sub(self.news) < ALERT { NO_TIME } else { NAP };
        }
        let wait = if ending { MAX_FAREWELL / 100 } else { self.shared.config.silence / 8 };
        Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        }
    }

    /// Carries out what the other thread asked for; says whether to shut down.
    fn obey(&mut self) -> bool {
        let mut ending = false;
        for command in self.shared.take_commands() {
            match command {
                Command::Serve(agent) => self.begin_to_serve(agent),
                Command::Open { channel, address, credential, range } => {
                    self.open(channel, address, credential, range);
                }
                Command::Stop(writer) => {
                    if let Some(Conn::In(inbound)) = self.conns.get_mut(&writer.conn) {
                        let result = inbound.stop(&self.shared, writer.channel);
                        self.settle(writer.conn, result);
                    }
                }
                Command::Notice(notice) => self.tell(notice),
                // It is looked for in every round.
                Command::Work => {}
                Command::ShutDown => ending = true,
            }
        }
        ending
    }

    fn begin_to_serve(&mut self, agent: Box<Agent>) {
        let region = agent.region().clone();
        self.reading.set_region(region.clone());
        self.region = Some(region);
        if let Err(error) = self.reading.prepare() {
            // It is tried again with the first read.
            tracing::error!(%error, "nothing can be received here for now");
        }
        match agent.metadata() {
            Ok(metadata) => self.serving = Some(Serving { _agent: agent, metadata }),
            // Claims on others are refused below, and others' claims on us are not in need of it.
            Err(error) => tracing::error!(%error, "nothing can be sent from here"),
        }
    }

    fn open(&mut self, channel: ChannelId, address: Address, credential: Vec<u8>, range: KvRange) {
        let known = self.conns.iter().find_map(|(id, conn)| match conn {
            Conn::Out(outbound) if *outbound.address() == address => Some(*id),
            _ => None,
        });
        let conn = match known.map_or_else(|| self.connect(address), Ok) {
            Ok(conn) => conn,
            Err(error) => {
                let refusal = if error.is_nobody() { Refusal::PeerLost } else { Refusal::Unreachable };
                let error = &error as &dyn std::error::Error;
                tracing::warn!(channel = channel.0, error, "the receiver cannot be reached");
                self.give_up(channel, refusal);
                return;
            }
        };
        if let Some(Conn::Out(outbound)) = self.conns.get_mut(&conn) {
            let result = outbound.open(channel, range, credential);
            self.settle(conn, result);
        }
    }

    fn connect(&mut self, address: Address) -> Result<ConnId, LinkError> {
        let (Some(serving), Some(region)) = (&self.serving, &self.region) else {
            return Err(LinkError::Unreadable(None));
        };
        let introduction = Introduction {
            version: VERSION,
            whom: address.id,
            checksum: self.shared.config.checksum,
            base: region.base(),
            num_bytes: region.num_bytes(),
            metadata: serving.metadata.clone(),
        };
        let id = self.new_conn();
        let outbound = Outbound::connect(id, address, introduction)?;
        self.watch(id, outbound.link())?;
        self.conns.insert(id, Conn::Out(outbound));
        Ok(id)
    }

    fn new_conn(&mut self) -> ConnId {
        self.last_conn += 1;
        ConnId(self.last_conn)
    }

    fn watch(&self, id: ConnId, link: &Link) -> io::Result<()> {
        epoll::add(&self.epoll, link, EventData::new_u64(id.0), EventFlags::IN)?;
        Ok(())
    }

    /// Tells the receiver of a channel what became of it, and closes it if it has stopped.
    fn tell(&mut self, notice: Notice) {
        let (Notice::Written(channel) | Notice::Stopped(channel)) = notice;
        let conn = self.conns.iter_mut().find_map(|(id, conn)| match conn {
            Conn::Out(outbound) if outbound.has(channel) => Some((*id, outbound)),
            _ => None,
        });
        match (notice, conn) {
            (Notice::Written(_), Some((id, outbound))) => {
                let result = outbound.written(&self.shared, channel);
                self.settle(id, result);
            }
            // The connection broke behind the last byte; whether it was seen is not known.
            (Notice::Written(_), None) => self.give_up(channel, Refusal::PeerLost),
            (Notice::Stopped(_), Some((id, outbound))) => {
                let result = outbound.drained(channel);
                self.shared.state().channels.close(channel, None);
                self.settle(id, result);
            }
            (Notice::Stopped(_), None) => self.shared.state().channels.close(channel, None),
        }
    }

    /// Closes a channel that no connection serves.
    fn give_up(&self, channel: ChannelId, refusal: Refusal) {
        let channels = &mut self.shared.state().channels;
        if channels.stop(channel, Stopping::Because(refusal)).is_some() {
            channels.close(channel, None);
        }
    }

    /// Announces what is queued on channels of which nothing is being read.
    fn announce(&mut self) {
        loop {
            let (slice, notice) = self.shared.state().channels.next_slice(self.shared.config.slice_bytes);
            if slice.is_none() && notice.is_none() {
                return;
            }
            if let Some(slice) = slice {
                let id = slice.target.memory;
                match (self.conns.get_mut(&id), &self.region) {
                    (Some(Conn::Out(outbound)), Some(region)) => {
                        let result = outbound.announce(region, &slice);
                        self.settle(id, result);
                    }
                    // The connection is gone, and the channel is about to hear of it.
                    _ => {
                        let nothing = Copied { num_bytes: 0, busy: Duration::ZERO, records: Vec::new() };
                        let notice = self.shared.state().channels.copied(slice.channel, nothing);
                        notice.into_iter().for_each(|notice| self.tell(notice));
                    }
                }
            }
            notice.into_iter().for_each(|notice| self.tell(notice));
        }
    }

    fn accept(&mut self) {
        loop {
            let link = match Link::accept(&self.listener) {
                Ok(Some(link)) => link,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "no sender can be let in for a moment");
                    // The listener stays readable: do not spin.
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            };
            if !self.make_room() {
                let max_senders = self.shared.config.max_senders;
                tracing::warn!(max_senders, "too many senders: turned one away");
                continue;
            }
            let id = self.new_conn();
            match self.watch(id, &link) {
                Ok(()) => {
                    self.conns.insert(id, Conn::In(Inbound::new(id, link)));
                }
                Err(error) => tracing::warn!(%error, "cannot watch a sender's connection"),
            }
        }
    }

    /// Sees to it that one more sender may connect: the oldest that has no claim admitted yet makes room.
    fn make_room(&mut self) -> bool {
        let connected = |conn: &&Conn| matches!(conn, Conn::In(inbound) if inbound.link().is_some());
        if self.conns.values().filter(connected).count() < self.shared.config.max_senders {
            return true;
        }
        let nobody = self.conns.iter().find_map(|(id, conn)| match conn {
            Conn::In(inbound) if !inbound.is_admitted() => Some(*id),
            _ => None,
        });
        nobody.is_some_and(|id| self.conns.remove(&id).is_some())
    }

    /// Reads from a connection and writes what it can take.
    fn serve(&mut self, id: ConnId) {
        let mut notices = Vec::new();
        let result = self.serve_conn(id, &mut notices);
        for notice in notices {
            self.tell(notice);
        }
        self.settle(id, result);
    }

    fn serve_conn(&mut self, id: ConnId, notices: &mut Vec<Notice>) -> Result<(), LinkError> {
        for piece in 0..MAX_PIECES {
            let Some(conn) = self.conns.get_mut(&id) else { return Ok(()) };
            let link = match conn {
                Conn::Out(outbound) => outbound.link_mut(),
                Conn::In(inbound) => match inbound.link_mut() {
                    Some(link) => link,
                    None => return Ok(()),
                },
            };
            if piece == 0 {
                link.flush()?;
            }
            if !link.fill()? {
                return Ok(());
            }
            match conn {
                Conn::Out(outbound) => outbound.handle_all(&self.shared, notices)?,
                Conn::In(inbound) => {
                    let (shared, reading) = (&*self.shared, &mut self.reading);
                    let region = self.region.as_deref();
                    inbound.handle_all(&mut Tools { shared, reading, region, me: self.me.id })?;
                }
            }
        }
        Ok(())
    }

    /// Moves reads on, and tells what has ended.
    fn progress(&mut self) {
        if !self.reading.is_busy() {
            return;
        }
        let conns = &self.conns;
        let lives = |id| matches!(conns.get(&id), Some(Conn::In(inbound)) if inbound.link().is_some());
        let news = self.reading.progress(lives);
        if !news.is_empty() {
            self.news = now();
        }
        for news in news {
            match news {
                News::Done(read) => self.ended(read, true),
                News::Over(read) => self.ended(read, false),
                News::Failed(read) => self.settle(read.conn, Err(LinkError::Unreadable(None))),
            }
        }
    }

    fn ended(&mut self, read: Read, whole: bool) {
        let Some(Conn::In(inbound)) = self.conns.get_mut(&read.conn) else { return };
        let result = inbound.ended(&self.shared, read, whole);
        if inbound.is_over() {
            self.conns.remove(&read.conn);
        } else {
            self.settle(read.conn, result);
        }
    }

    /// Goes on with a connection, or ends it if it failed.
    fn settle(&mut self, id: ConnId, result: Result<(), LinkError>) {
        let Err(error) = result else {
            self.watch_socket(id);
            return;
        };
        match &error {
            LinkError::Closed => tracing::debug!(conn = id.0, "the peer closed the connection"),
            error => {
                tracing::warn!(conn = id.0, error = error as &dyn std::error::Error, "gave a connection up");
            }
        }
        match self.conns.get_mut(&id) {
            None => {}
            Some(Conn::In(inbound)) => {
                inbound.hang_up(&self.shared);
                if inbound.is_over() {
                    self.conns.remove(&id);
                }
                self.reading.leave(id);
            }
            Some(Conn::Out(outbound)) => {
                let notices = outbound.hang_up(&self.shared, &error);
                // Dropped first: there is nobody to tell, and a later claim connects anew.
                self.conns.remove(&id);
                for notice in notices {
                    self.tell(notice);
                }
            }
        }
    }

    /// Asks to hear of room in the socket while messages wait for it.
    fn watch_socket(&self, id: ConnId) {
        let link = match self.conns.get(&id) {
            Some(Conn::In(inbound)) => inbound.link(),
            Some(Conn::Out(outbound)) => Some(outbound.link()),
            None => None,
        };
        let Some(link) = link else { return };
        let flags = if link.is_flushed() { EventFlags::IN } else { EventFlags::IN | EventFlags::OUT };
        if let Err(error) = epoll::modify(&self.epoll, link, EventData::new_u64(id.0), flags) {
            tracing::warn!(conn = id.0, %error, "cannot watch a connection");
        }
    }

    /// Exchanges signs of life, now and then.
    fn look_after(&mut self) {
        let silence = self.shared.config.silence;
        if now().saturating_sub(self.looked) < silence / 8 {
            return;
        }
        self.looked = now();
        for id in self.conns.keys().copied().collect::<Vec<_>>() {
            let link = match self.conns.get_mut(&id) {
                Some(Conn::In(inbound)) => inbound.link_mut(),
                Some(Conn::Out(outbound)) => Some(outbound.link_mut()),
                None => None,
            };
            let result = link.map_or(Ok(()), |link| link.beat(silence));
            self.settle(id, result);
        }
    }
}
