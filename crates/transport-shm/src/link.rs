//! One connection: frames over a Unix seqpacket socket, never blocking.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use microserving_transport::one_sided::{Frame, FrameError};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::packets::{Assembler, MAX_PACKET, packets};

/// Bytes that may wait for a peer that does not read; beyond, the connection is given up.
const MAX_OUTGOING: usize = 64 << 20;
/// File descriptors in one message: the region and the counters.
const NUM_FDS: usize = 2;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

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
    #[error("the peer does not read what it is sent")]
    Stuck,
    #[error("the connection failed")]
    Io(#[from] io::Error),
}

impl LinkError {
    /// Says whether there is nobody at the other end (any more).
    pub(crate) fn is_nobody(&self) -> bool {
        match self {
            Self::Closed => true,
            Self::Io(error) => error.kind() == io::ErrorKind::ConnectionRefused,
            Self::Frame(_) | Self::Protocol(_) | Self::Rejected | Self::Stuck => false,
        }
    }
}

struct Packet {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// A frame, and the file descriptors that came with it.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) frame: Frame,
    pub(crate) fds: Vec<OwnedFd>,
}

/// A connection; closed when dropped.
pub(crate) struct Link {
    socket: OwnedFd,
    outgoing: VecDeque<Packet>,
    outgoing_bytes: usize,
    assembler: Assembler,
    /// Descriptors are taken from receivers only; what anybody else sends, the kernel drops.
    takes_fds: bool,
    fds: Vec<OwnedFd>,
}

impl Link {
    fn new(socket: OwnedFd, takes_fds: bool) -> Self {
        let (outgoing, assembler, fds) = (VecDeque::new(), Assembler::default(), Vec::new());
        Self { socket, outgoing, outgoing_bytes: 0, assembler, takes_fds, fds }
    }

    /// Connects to a receiver.
    pub(crate) fn connect(name: &str) -> io::Result<Self> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        Ok(Self::new(socket, true))
    }

    /// Accepts a sender, if one waits.
    pub(crate) fn accept(listener: &OwnedFd) -> io::Result<Option<Self>> {
        match rustix::net::accept_with(listener, FLAGS) {
            Ok(socket) => Ok(Some(Self::new(socket, false))),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => {
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Sends a frame, now or when the peer has read enough.
    pub(crate) fn send(&mut self, frame: &Frame, mut fds: Vec<OwnedFd>) -> Result<(), LinkError> {
        for bytes in packets(&frame.encode()) {
            self.outgoing_bytes += bytes.len();
            self.outgoing.push_back(Packet { bytes, fds: std::mem::take(&mut fds) });
        }
        self.flush()?;
        if self.outgoing_bytes > MAX_OUTGOING { Err(LinkError::Stuck) } else { Ok(()) }
    }

    /// Sends what waits, as far as the socket takes it.
    pub(crate) fn flush(&mut self) -> Result<(), LinkError> {
        while let Some(packet) = self.outgoing.front() {
            let fds: Vec<BorrowedFd<'_>> = packet.fds.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(NUM_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(LinkError::Protocol("more descriptors than a message carries"));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(&packet.bytes)], &mut control, flags) {
                Ok(_) => {
                    self.outgoing_bytes -= packet.bytes.len();
                    self.outgoing.pop_front();
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(LinkError::Closed),
                Err(error) => return Err(LinkError::Io(error.into())),
            }
        }
        Ok(())
    }

    pub(crate) fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Receives one packet. Answers whether there was one, and the frame that it completed, if it did.
    pub(crate) fn receive(&mut self) -> Result<Option<Option<Received>>, LinkError> {
        let mut buffer = [0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(NUM_FDS))];
        let space = if self.takes_fds { space.as_mut_slice() } else { &mut [] };
        let mut control = RecvAncillaryBuffer::new(space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut pieces = [IoSliceMut::new(&mut buffer)];
        let message = match rustix::net::recvmsg(&self.socket, &mut pieces, &mut control, flags) {
            Ok(message) => message,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(rustix::io::Errno::CONNRESET) => return Err(LinkError::Closed),
            Err(error) => return Err(LinkError::Io(error.into())),
        };
        for ancillary in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = ancillary {
                self.fds.extend(fds.take(NUM_FDS));
            }
        }
        if message.bytes == 0 {
            return Err(LinkError::Closed);
        }
        if message.flags.contains(ReturnFlags::TRUNC) || self.fds.len() > NUM_FDS {
            return Err(LinkError::Protocol("a packet is too large"));
        }
        let frame = self.assembler.push(&buffer[..message.bytes])?;
        Ok(Some(frame.map(|frame| Received { frame, fds: std::mem::take(&mut self.fds) })))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Makes the socket that senders connect to.
pub(crate) fn listen(name: &str) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}
