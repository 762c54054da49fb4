//! The IO thread: owns every connection, and the protocol.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::KvRange;
use microserving_transport::one_sided::{Notice, Stopping};
use microserving_transport::{ChannelId, Refusal};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::address::Address;
use crate::inbound::Inbound;
use crate::link::{Link, LinkError};
use crate::outbound::Outbound;
use crate::shared::{Command, ConnId, Shared};

/// Packets handled for one connection before the others have their turn.
const MAX_PACKETS: usize = 64;
/// Packets read from a dead writer's connection: more than its socket can hold, so that only an heir of the socket, who
/// goes on sending, is cut short.
const MAX_LAST_PACKETS: usize = 1 << 16;
/// How long the end of a transport waits for peers to take its last words.
const MAX_FAREWELL: Duration = Duration::from_secs(1);
/// How long no connection is accepted after the system had no descriptor left.
const ACCEPT_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

const WAKE: u64 = 0;
const LISTENER: u64 = 1;
/// Connections follow: two numbers each, for the socket and for the pidfd.
const FIRST_CONN: u64 = 1;

enum Conn {
    In(Inbound),
    Out(Outbound),
}

pub(crate) struct Io {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    listener: OwnedFd,
    accepting: bool,
    start_time: u64,
    conns: BTreeMap<ConnId, Conn>,
    last_conn: u64,
}

impl Io {
    pub(crate) fn new(shared: Arc<Shared>, listener: OwnedFd, start_time: u64) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, shared.wake_fd(), EventData::new_u64(WAKE), EventFlags::IN)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        let conns = BTreeMap::new();
        Ok(Self { shared, epoll, listener, accepting: true, start_time, conns, last_conn: FIRST_CONN })
    }

    /// Serves until it is told to shut down.
    pub(crate) fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let timeout = (!self.accepting).then_some(&ACCEPT_PAUSE);
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the shm transport cannot wait for its sockets any more");
                    return;
                }
            }
            if events.is_empty() && !self.accepting {
                self.accept_again();
            }
            for event in &events {
                let (token, flags) = (event.data.u64(), event.flags);
                match token {
                    WAKE => {
                        if self.obey() {
                            self.say_farewell();
                            return;
                        }
                    }
                    LISTENER => self.accept(),
                    token if token % 2 == 0 => self.serve(ConnId(token / 2)),
                    token => {
                        debug_assert!(flags.contains(EventFlags::IN));
                        self.writer_exited(ConnId(token / 2));
                    }
                }
            }
            self.shared.wake_caller();
        }
    }

    /// Carries out what the other threads asked for; says whether to shut down.
    fn obey(&mut self) -> bool {
        for command in self.shared.take_commands() {
            match command {
                Command::Open { channel, address, credential, range } => {
                    self.open(channel, &address, credential, range);
                }
                Command::Stop { conn, channel } => {
                    if let Some(Conn::In(inbound)) = self.conns.get_mut(&conn) {
                        let result = inbound.stop(channel);
                        self.settle(conn, result);
                    }
                }
                Command::Notice(notice) => self.tell(notice),
                Command::ShutDown => return true,
            }
        }
        false
    }

    fn open(&mut self, channel: ChannelId, address: &Address, credential: Vec<u8>, range: KvRange) {
        let name = address.socket_name();
        let known = self.conns.iter().find_map(|(id, conn)| match conn {
            Conn::Out(outbound) if outbound.name() == name => Some(*id),
            _ => None,
        });
        let conn = match known.map_or_else(|| self.connect(name), Ok) {
            Ok(conn) => conn,
            // The address is of this host and boot, so somebody had this socket: nobody there means gone.
            Err(error) => {
                let refusal = if error.is_nobody() { Refusal::PeerLost } else { Refusal::Unreachable };
                tracing::warn!(channel = channel.0, %error, "the receiver cannot be reached");
                self.give_up(channel, refusal);
                return;
            }
        };
        if let Some(Conn::Out(outbound)) = self.conns.get_mut(&conn) {
            let result = outbound.open(channel, range, credential);
            self.settle(conn, result);
        }
    }

    fn connect(&mut self, name: String) -> Result<ConnId, LinkError> {
        let outbound = Outbound::connect(name, self.start_time, self.shared.config.checksum)?;
        let id = self.new_conn();
        epoll::add(&self.epoll, outbound.link(), EventData::new_u64(id.0 * 2), EventFlags::IN)
            .map_err(io::Error::from)?;
        self.conns.insert(id, Conn::Out(outbound));
        Ok(id)
    }

    fn new_conn(&mut self) -> ConnId {
        self.last_conn += 1;
        ConnId(self.last_conn)
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
                self.shared.channels().close(channel, None);
                self.settle(id, result);
            }
            (Notice::Stopped(_), None) => self.shared.channels().close(channel, None),
        }
    }

    /// Closes a channel that no connection serves.
    fn give_up(&self, channel: ChannelId, refusal: Refusal) {
        let mut channels = self.shared.channels();
        if channels.stop(channel, Stopping::Because(refusal)).is_some() {
            channels.close(channel, None);
        }
    }

    fn accept(&mut self) {
        loop {
            let link = match Link::accept(&self.listener) {
                Ok(Some(link)) => link,
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "no sender can be let in for a moment");
                    self.accepting = epoll::delete(&self.epoll, &self.listener).is_err();
                    return;
                }
            };
            if !self.make_room() {
                tracing::warn!(
                    max_senders = self.shared.config.max_senders,
                    "too many senders: turned one away"
                );
                continue;
            }
            let id = self.new_conn();
            match epoll::add(&self.epoll, &link, EventData::new_u64(id.0 * 2), EventFlags::IN) {
                Ok(()) => {
                    self.conns.insert(id, Conn::In(Inbound::new(id, link)));
                }
                Err(error) => tracing::warn!(%error, "cannot watch a sender's connection"),
            }
        }
    }

    fn accept_again(&mut self) {
        let added = epoll::add(&self.epoll, &self.listener, EventData::new_u64(LISTENER), EventFlags::IN);
        self.accepting = added.is_ok();
    }

    /// Sees to it that one more sender may connect: the oldest that has not said who it is makes room.
    fn make_room(&mut self) -> bool {
        let connected = |conn: &&Conn| matches!(conn, Conn::In(inbound) if inbound.link().is_some());
        if self.conns.values().filter(connected).count() < self.shared.config.max_senders {
            return true;
        }
        let nobody = self.conns.iter().find_map(|(id, conn)| match conn {
            Conn::In(inbound) if inbound.writer().is_none() => Some(*id),
            _ => None,
        });
        nobody.is_some_and(|id| self.conns.remove(&id).is_some())
    }

    /// Reads from a connection and writes what it can take.
    fn serve(&mut self, id: ConnId) {
        let mut notices = Vec::new();
        let result = match self.conns.get_mut(&id) {
            None => return,
            Some(Conn::Out(outbound)) => {
                outbound.flush().and_then(|()| outbound.read(&self.shared, MAX_PACKETS, &mut notices))
            }
            Some(Conn::In(inbound)) => {
                let was_known = inbound.writer().is_some();
                let result = inbound.flush().and_then(|()| inbound.read(&self.shared, MAX_PACKETS));
                if was_known { result } else { result.and_then(|()| self.watch_writer(id)) }
            }
        };
        for notice in notices {
            self.tell(notice);
        }
        self.settle(id, result);
    }

    /// Watches for the exit of a sender that has just said who it is.
    fn watch_writer(&self, id: ConnId) -> Result<(), LinkError> {
        let Some(Conn::In(inbound)) = self.conns.get(&id) else { return Ok(()) };
        let Some(writer) = inbound.writer() else { return Ok(()) };
        let token = EventData::new_u64(id.0 * 2 + 1);
        epoll::add(&self.epoll, writer.pidfd(), token, EventFlags::IN).map_err(io::Error::from)?;
        Ok(())
    }

    /// A sender's process is gone: what it had sent still counts, then the fence falls.
    fn writer_exited(&mut self, id: ConnId) {
        let Some(Conn::In(inbound)) = self.conns.get_mut(&id) else { return };
        if !inbound.writer().is_some_and(|writer| writer.has_exited().unwrap_or(false)) {
            return;
        }
        if let Err(error) = inbound.read(&self.shared, MAX_LAST_PACKETS) {
            tracing::debug!(conn = id.0, %error, "read a dead sender's last words");
        }
        inbound.fence(&self.shared);
        self.conns.remove(&id);
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

    /// Asks to hear of room in the socket while frames wait for it.
    fn watch_socket(&self, id: ConnId) {
        let link = match self.conns.get(&id) {
            Some(Conn::In(inbound)) => inbound.link(),
            Some(Conn::Out(outbound)) => Some(outbound.link()),
            None => None,
        };
        let Some(link) = link else { return };
        let flags = if link.is_flushed() { EventFlags::IN } else { EventFlags::IN | EventFlags::OUT };
        if let Err(error) = epoll::modify(&self.epoll, link, EventData::new_u64(id.0 * 2), flags) {
            tracing::warn!(conn = id.0, %error, "cannot watch a connection");
        }
    }

    /// Gives peers a moment to take what waits for them: a `Drained` that arrives spares its receiver the fence.
    fn say_farewell(&mut self) {
        let mut left = MAX_FAREWELL;
        let step = Duration::from_millis(20);
        loop {
            let mut waiting = Vec::new();
            for conn in self.conns.values_mut() {
                if let Conn::Out(outbound) = conn
                    && outbound.flush().is_ok()
                    && !outbound.link().is_flushed()
                {
                    waiting.push(PollFd::new(outbound.link(), PollFlags::OUT));
                }
            }
            if waiting.is_empty() || left.is_zero() {
                return;
            }
            left = left.saturating_sub(step);
            let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(step.subsec_nanos()) };
            if let Err(error) = rustix::event::poll(&mut waiting, Some(&timeout)) {
                tracing::debug!(%error, "cannot wait for a peer to read the farewell");
            }
        }
    }
}
