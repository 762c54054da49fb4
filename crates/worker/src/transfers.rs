//! What front and worker say of transfers, on a stream of its own.
//!
//! ```text
//! front ── a call ──▶ worker ── its answer ──▶ front     allocate, grant, open, rank_of, telemetry, read, write
//! front ── put, finish, cancel, revoke ──▶ worker         nothing answers; their events do
//! worker ── News(events, arrived) ──▶ front               pushed: poll and arrived_bytes ask nobody
//! worker ── Admit(number, credential) ──▶ front ── Admitted(number, …) ──▶ worker
//! ```

use microserving_protocol::{Generation, KvRange, PeId};
use microserving_transport::{
    ByteRun, ChannelId, Claim, Grant, PeerAddress, PutRun, Refusal, Telemetry, TransportError, TransportEvent,
};

use crate::names;
use crate::wire::{In, Malformed, Out};

/// Kinds of frames from the front.
pub(crate) const ALLOCATE: u8 = 32;
pub(crate) const GRANT: u8 = 33;
pub(crate) const REVOKE: u8 = 34;
pub(crate) const OPEN: u8 = 35;
pub(crate) const PUT: u8 = 36;
pub(crate) const FINISH: u8 = 37;
pub(crate) const CANCEL: u8 = 38;
pub(crate) const RANK_OF: u8 = 39;
pub(crate) const READ: u8 = 40;
pub(crate) const WRITE: u8 = 41;
pub(crate) const ADMITTED: u8 = 42;
pub(crate) const TELEMETRY: u8 = 43;
/// And from the worker.
pub(crate) const ANSWER: u8 = 64;
pub(crate) const NEWS: u8 = 65;
pub(crate) const ADMIT: u8 = 66;
pub(crate) const ENDS: u8 = 67;

/// What the front asks of a transport.
#[derive(Debug)]
pub(crate) enum Request {
    Allocate { num_bytes: usize },
    Grant(Grant),
    Revoke(Generation),
    Open(Claim),
    Put { channel: ChannelId, runs: Vec<PutRun> },
    Finish(ChannelId),
    Cancel(ChannelId),
    RankOf(PeerAddress),
    Telemetry,
    Read { offset: usize, num_bytes: usize },
    Write { offset: usize, bytes: Vec<u8> },
}

impl Request {
    pub(crate) fn read(kind: u8, body: &mut In<'_>) -> Result<Self, Malformed> {
        let request = match kind {
            ALLOCATE => Self::Allocate { num_bytes: body.size()? },
            GRANT => Self::Grant(take_grant(body)?),
            REVOKE => Self::Revoke(Generation(body.u64()?)),
            OPEN => Self::Open(Claim {
                peer: take_peer(body)?,
                credential: body.bytes()?.to_vec(),
                range: take_range(body)?,
            }),
            PUT => Self::Put {
                channel: ChannelId(body.u64()?),
                runs: body.list(|body| {
                    let (local_offset, remote_offset, num_bytes) = (body.size()?, body.size()?, body.size()?);
                    Ok(PutRun { local_offset, remote_offset, num_bytes })
                })?,
            },
            FINISH => Self::Finish(ChannelId(body.u64()?)),
            CANCEL => Self::Cancel(ChannelId(body.u64()?)),
            RANK_OF => Self::RankOf(take_peer(body)?),
            TELEMETRY => Self::Telemetry,
            READ => Self::Read { offset: body.size()?, num_bytes: body.size()? },
            WRITE => Self::Write { offset: body.size()?, bytes: body.bytes()?.to_vec() },
            _ => return Err(Malformed("no such request")),
        };
        body.end()?;
        Ok(request)
    }
}

/// Answers to those requests that have one.
#[derive(Debug)]
pub(crate) enum Answer {
    Allocated { address: PeerAddress },
    Granted,
    Opened(ChannelId),
    Rank(Option<PeId>),
    Telemetry(Telemetry),
    Bytes(Vec<u8>),
    Written,
    Error(TransportError),
}

impl Answer {
    pub(crate) fn frame(&self) -> Out {
        let mut out = Out::new(ANSWER);
        match self {
            Self::Allocated { address } => put_peer(out.u8(0), address),
            Self::Granted => {
                out.u8(1);
            }
            Self::Opened(channel) => {
                out.u8(2).u64(channel.0);
            }
            Self::Rank(rank) => {
                out.u8(3).flag(rank.is_some()).u32(rank.map_or(0, |pe| pe.0));
            }
            Self::Bytes(bytes) => {
                out.u8(4).bytes(bytes);
            }
            Self::Written => {
                out.u8(5);
            }
            Self::Error(error) => put_error(out.u8(6), error),
            Self::Telemetry(telemetry) => put_telemetry(out.u8(7), telemetry),
        }
        out
    }

    pub(crate) fn read(body: &mut In<'_>) -> Result<Self, Malformed> {
        let answer = match body.u8()? {
            0 => Self::Allocated { address: take_peer(body)? },
            1 => Self::Granted,
            2 => Self::Opened(ChannelId(body.u64()?)),
            3 => {
                let is_known = body.flag()?;
                Self::Rank(Some(PeId(body.u32()?)).filter(|_| is_known))
            }
            4 => Self::Bytes(body.bytes()?.to_vec()),
            5 => Self::Written,
            6 => Self::Error(take_error(body)?),
            7 => Self::Telemetry(take_telemetry(body)?),
            _ => return Err(Malformed("no such answer")),
        };
        body.end()?;
        Ok(answer)
    }
}

/// What the worker tells unasked.
#[derive(Debug, Default)]
pub(crate) struct News {
    pub(crate) events: Vec<TransportEvent>,
    /// How many bytes there are now, of grants where it is more than it was.
    pub(crate) arrived: Vec<(Generation, u64)>,
}

impl News {
    pub(crate) fn frame(&self) -> Out {
        let mut out = Out::new(NEWS);
        out.list(&self.arrived, |out, (generation, num_bytes)| {
            out.u64(generation.0).u64(*num_bytes);
        });
        out.list(&self.events, put_event);
        out
    }

    pub(crate) fn read(body: &mut In<'_>) -> Result<Self, Malformed> {
        let arrived = body.list(|body| Ok((Generation(body.u64()?), body.u64()?)))?;
        let events = body.list(take_event)?;
        body.end()?;
        Ok(Self { events, arrived })
    }
}

fn put_telemetry(out: &mut Out, telemetry: &Telemetry) {
    let Telemetry { bytes_sent, bytes_received, send_busy, claims_refused, checksum_failures, fences } =
        telemetry;
    out.u64(*bytes_sent).u64(*bytes_received).duration(*send_busy);
    out.u64(*claims_refused).u64(*checksum_failures).u64(*fences);
}

fn take_telemetry(body: &mut In<'_>) -> Result<Telemetry, Malformed> {
    Ok(Telemetry {
        bytes_sent: body.u64()?,
        bytes_received: body.u64()?,
        send_busy: body.duration()?,
        claims_refused: body.u64()?,
        checksum_failures: body.u64()?,
        fences: body.u64()?,
    })
}

fn put_event(out: &mut Out, event: &TransportEvent) {
    match event {
        TransportEvent::Opened { channel } => {
            out.u8(0).u64(channel.0);
        }
        TransportEvent::Finished { channel, num_bytes, busy } => {
            out.u8(1).u64(channel.0).u64(*num_bytes).duration(*busy);
        }
        TransportEvent::Closed { channel, refusal } => {
            out.u8(2).u64(channel.0).u8(refusal.map_or(0, refusal_number));
        }
        TransportEvent::Complete { generation } => {
            out.u8(3).u64(generation.0);
        }
        TransportEvent::Lost { generation, range, corrupt } => {
            put_range(out.u8(4).u64(generation.0), *range).flag(*corrupt);
        }
        TransportEvent::Released { generation, fenced } => {
            out.u8(5).u64(generation.0).flag(*fenced);
        }
    }
}

fn take_event(body: &mut In<'_>) -> Result<TransportEvent, Malformed> {
    Ok(match (body.u8()?, body.u64()?) {
        (0, number) => TransportEvent::Opened { channel: ChannelId(number) },
        (1, number) => TransportEvent::Finished {
            channel: ChannelId(number),
            num_bytes: body.u64()?,
            busy: body.duration()?,
        },
        (2, number) => {
            let refusal = match body.u8()? {
                0 => None,
                refusal => Some(refusal_of(refusal)?),
            };
            TransportEvent::Closed { channel: ChannelId(number), refusal }
        }
        (3, number) => TransportEvent::Complete { generation: Generation(number) },
        (4, number) => TransportEvent::Lost {
            generation: Generation(number),
            range: take_range(body)?,
            corrupt: body.flag()?,
        },
        (5, number) => TransportEvent::Released { generation: Generation(number), fenced: body.flag()? },
        _ => return Err(Malformed("no such event")),
    })
}

/// Writes whom a credential lets in.
pub(crate) fn admitted(number: u64, verdict: Result<Generation, Refusal>) -> Out {
    let mut out = Out::new(ADMITTED);
    match verdict {
        Ok(generation) => out.u64(number).u8(0).u64(generation.0),
        Err(refusal) => out.u64(number).u8(refusal_number(refusal)),
    };
    out
}

pub(crate) fn take_admitted(body: &mut In<'_>) -> Result<(u64, Result<Generation, Refusal>), Malformed> {
    let number = body.u64()?;
    let verdict = match body.u8()? {
        0 => Ok(Generation(body.u64()?)),
        refusal => Err(refusal_of(refusal)?),
    };
    body.end()?;
    Ok((number, verdict))
}

const fn refusal_number(refusal: Refusal) -> u8 {
    match refusal {
        Refusal::BadCredential => 1,
        Refusal::Stale => 2,
        Refusal::RangeTaken => 3,
        Refusal::Revoked => 4,
        Refusal::Unreachable => 5,
        Refusal::PeerLost => 6,
    }
}

fn refusal_of(number: u8) -> Result<Refusal, Malformed> {
    Ok(match number {
        1 => Refusal::BadCredential,
        2 => Refusal::Stale,
        3 => Refusal::RangeTaken,
        4 => Refusal::Revoked,
        5 => Refusal::Unreachable,
        6 => Refusal::PeerLost,
        _ => return Err(Malformed("no such refusal")),
    })
}

pub(crate) fn put_peer(out: &mut Out, peer: &PeerAddress) {
    out.text(&peer.transport).bytes(&peer.bytes);
}

pub(crate) fn take_peer(body: &mut In<'_>) -> Result<PeerAddress, Malformed> {
    Ok(PeerAddress { transport: body.text()?, bytes: body.bytes()?.to_vec() })
}

pub(crate) fn put_range(out: &mut Out, range: KvRange) -> &mut Out {
    out.u32(range.begin()).u32(range.end())
}

fn take_range(body: &mut In<'_>) -> Result<KvRange, Malformed> {
    KvRange::new(body.u32()?, body.u32()?).ok_or(Malformed("a range ends before it begins"))
}

pub(crate) fn put_grant(out: &mut Out, grant: &Grant) {
    put_range(out.u64(grant.generation.0), grant.range).size(grant.token_bytes);
    out.list(&grant.runs, |out, run| {
        out.size(run.offset).size(run.num_bytes);
    });
}

fn take_grant(body: &mut In<'_>) -> Result<Grant, Malformed> {
    Ok(Grant {
        generation: Generation(body.u64()?),
        range: take_range(body)?,
        token_bytes: body.size()?,
        runs: body.list(|body| Ok(ByteRun { offset: body.size()?, num_bytes: body.size()? }))?,
    })
}

fn put_error(out: &mut Out, error: &TransportError) {
    match error {
        TransportError::Misuse { transport, reason } => out.u8(1).text(transport).text(reason),
        TransportError::Unreachable { transport, reason } => out.u8(2).text(transport).text(reason),
        TransportError::System { transport, operation, source } => {
            out.u8(3).text(transport).text(operation).text(&source.to_string())
        }
        other => out.u8(3).text("transport").text("the operation").text(&other.to_string()),
    };
}

fn take_error(body: &mut In<'_>) -> Result<TransportError, Malformed> {
    let kind = body.u8()?;
    let transport = names::keep(&body.text()?);
    Ok(match kind {
        1 => TransportError::Misuse { transport, reason: body.text()? },
        2 => TransportError::Unreachable { transport, reason: body.text()? },
        3 => TransportError::System {
            transport,
            operation: names::keep(&body.text()?),
            source: body.text()?.into(),
        },
        _ => return Err(Malformed("transports have no such error")),
    })
}
