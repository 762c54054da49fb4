//! One control connection: messages over TCP, never blocking.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use microserving_transport::one_sided::FrameError;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::agent::NixlError;
use crate::clock::now;
use crate::message::{Assembler, Message};

/// Bytes that may wait for a peer that does not read; beyond, the connection is given up.
const MAX_OUTGOING: usize = 64 << 20;
/// Bytes read at a time.
const PIECE: usize = 64 << 10;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("the peer does not speak the protocol")]
    Frame(#[from] FrameError),
    #[error("the peer breaks the protocol: {0}")]
    Protocol(&'static str),
    #[error("the peer turned us away")]
    Rejected,
    #[error("the peer takes us for a transport that was here before")]
    Stranger,
    #[error("the peer does not read what it is sent")]
    Stuck,
    #[error("the peer gives no sign of life")]
    Silent,
    #[error("its memory cannot be read")]
    Unreadable(#[source] Option<NixlError>),
    #[error("the connection failed")]
    Io(#[from] io::Error),
}

impl LinkError {
    /// Says whether there is nobody at the other end (any more).
    pub(crate) fn is_nobody(&self) -> bool {
        match self {
            Self::Closed | Self::Silent => true,
            Self::Io(error) => {
                matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset)
            }
            _ => false,
        }
    }
}

/// A connection; closed when dropped.
pub(crate) struct Link {
    stream: TcpStream,
    outgoing: VecDeque<u8>,
    assembler: Assembler,
    heard: Duration,
    said: Duration,
}

impl Link {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let (outgoing, assembler, now) = (VecDeque::new(), Assembler::default(), now());
        Ok(Self { stream, outgoing, assembler, heard: now, said: now })
    }

    /// Begins to connect to a receiver. That it cannot be is said by the first read.
    pub(crate) fn connect(address: SocketAddr) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Self::new(socket.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Accepts a sender, if one waits.
    pub(crate) fn accept(listener: &TcpListener) -> io::Result<Option<Self>> {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                return match error.kind() {
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::Interrupted => Ok(None),
                    _ => Err(error),
                };
            }
        };
        stream.set_nonblocking(true)?;
        Self::new(stream).map(Some)
    }

    /// Sends a message, now or when the peer has read enough.
    pub(crate) fn send(&mut self, message: &Message) -> Result<(), LinkError> {
        self.outgoing.extend(message.encode());
        self.said = now();
        self.flush()?;
        if self.outgoing.len() > MAX_OUTGOING { Err(LinkError::Stuck) } else { Ok(()) }
    }

    /// Sends what waits, as far as the socket takes it.
    pub(crate) fn flush(&mut self) -> Result<(), LinkError> {
        while !self.outgoing.is_empty() {
            match self.stream.write(self.outgoing.as_slices().0) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(num_bytes) => drop(self.outgoing.drain(..num_bytes)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(LinkError::Closed),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    pub(crate) fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Reads what has come, at most one piece. Says whether there was anything.
    pub(crate) fn fill(&mut self) -> Result<bool, LinkError> {
        let mut piece = [0; PIECE];
        match self.stream.read(&mut piece) {
            Ok(0) => Err(LinkError::Closed),
            Ok(num_bytes) => {
                self.assembler.push(&piece[..num_bytes]);
                self.heard = now();
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes the next message of what was read, if one is whole.
    pub(crate) fn next(&mut self, max_message: usize) -> Result<Option<Message>, LinkError> {
        Ok(self.assembler.next(max_message)?)
    }

    /// Gives a sign of life if one is due, and looks for the peer's.
    pub(crate) fn beat(&mut self, silence: Duration) -> Result<(), LinkError> {
        let now = now();
        if now.saturating_sub(self.heard) > silence {
            return Err(LinkError::Silent);
        }
        if now.saturating_sub(self.said) > silence / 4 { self.send(&Message::Beat) } else { Ok(()) }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
