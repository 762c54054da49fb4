//! How front and worker meet, on the first stream; the second one joins it.
//!
//! ```text
//! worker ── Hello(version, pid) ──▶ front
//!        ◀── Welcome(session, order) ──
//! worker ── Join(version, session) ──▶ front      on the stream for transfers
//! worker ── Progress … Ready(what it is) ──▶ front, or Failed
//! ```

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use microserving_executor::ExecutorInfo;
use microserving_protocol::{KvDtype, KvLayout, TokenId};
use microserving_transport::PeerAddress;

use crate::WorkerError;
use crate::transfers::{put_peer, take_peer};
use crate::wire::{In, Malformed, Out};

/// Grows with every change of any frame.
pub(crate) const VERSION: u32 = 1;
/// What the first frame of a stream begins with.
const MAGIC: u32 = u32::from_le_bytes(*b"mswk");

pub(crate) const HELLO: u8 = 96;
pub(crate) const WELCOME: u8 = 97;
pub(crate) const TURNED_AWAY: u8 = 98;
pub(crate) const JOIN: u8 = 99;
pub(crate) const PROGRESS: u8 = 100;
pub(crate) const READY: u8 = 101;
pub(crate) const FAILED: u8 = 102;

/// What a front asks of its worker: to be what these options say, in this folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// What relative paths begin at.
    pub folder: PathBuf,
    /// Options as on a command line.
    pub arguments: Vec<OsString>,
}

impl Order {
    pub(crate) fn welcome(&self, session: u64) -> Out {
        let mut out = Out::new(WELCOME);
        out.u32(VERSION).u64(session).bytes(self.folder.as_os_str().as_bytes());
        out.list(&self.arguments, |out, argument| {
            out.bytes(argument.as_bytes());
        });
        out
    }

    pub(crate) fn read(body: &mut In<'_>) -> Result<(u64, Self), WorkerError> {
        let read = |body: &mut In<'_>| {
            let (session, folder) = (body.u64()?, PathBuf::from(OsStr::from_bytes(body.bytes()?)));
            let arguments = body.list(|body| Ok(OsString::from_vec(body.bytes()?.to_vec())))?;
            body.end()?;
            Ok::<_, Malformed>((session, Self { folder, arguments }))
        };
        let theirs = body.u32().map_err(|error| WorkerError::protocol(error.0))?;
        check_version(theirs)?;
        read(body).map_err(|error| WorkerError::protocol(error.0))
    }
}

/// Begins a stream.
pub(crate) fn first_frame(kind: u8, number: u64) -> Out {
    let mut out = Out::new(kind);
    out.u32(MAGIC).u32(VERSION).u64(number);
    out
}

/// Reads what a stream begins with: the number is the session, or the process of the worker.
pub(crate) fn take_first(body: &mut In<'_>) -> Result<u64, WorkerError> {
    let read = |body: &mut In<'_>| Ok::<_, Malformed>((body.u32()?, body.u32()?, body.u64()?));
    let (magic, theirs, number) = read(body).map_err(|error| WorkerError::protocol(error.0))?;
    if magic != MAGIC {
        return Err(WorkerError::protocol("it is no worker"));
    }
    check_version(theirs)?;
    Ok(number)
}

pub(crate) fn check_version(theirs: u32) -> Result<(), WorkerError> {
    if theirs == VERSION { Ok(()) } else { Err(WorkerError::Version { ours: VERSION, theirs }) }
}

/// What a worker is, once it is up.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ready {
    pub(crate) info: ExecutorInfo,
    /// Of its transport.
    pub(crate) name: String,
    pub(crate) address: PeerAddress,
    pub(crate) report: String,
}

impl Ready {
    pub(crate) fn frame(&self) -> Out {
        let mut out = Out::new(READY);
        let ExecutorInfo { model, layout, vocab_size, max_context, eos_tokens } = &self.info;
        out.text(model);
        put_layout(&mut out, layout);
        out.u32(*vocab_size).u32(*max_context).u32s(eos_tokens.iter().map(|token| token.0));
        put_peer(out.text(&self.name), &self.address);
        out.text(&self.report);
        out
    }

    pub(crate) fn read(body: &mut In<'_>) -> Result<Self, Malformed> {
        let (model, layout) = (body.text()?, take_layout(body)?);
        let (vocab_size, max_context) = (body.u32()?, body.u32()?);
        let mut eos_tokens = Vec::new();
        body.u32s(&mut eos_tokens, TokenId)?;
        let info = ExecutorInfo { model, layout, vocab_size, max_context, eos_tokens };
        let ready = Self { info, name: body.text()?, address: take_peer(body)?, report: body.text()? };
        body.end()?;
        Ok(ready)
    }
}

pub(crate) fn put_layout(out: &mut Out, layout: &KvLayout) {
    let KvLayout {
        page_size,
        num_layers,
        num_kv_heads,
        head_dim,
        dtype,
        model_hash,
        numeric_mode,
        tp_rank,
        tp_size,
    } = layout;
    out.u32(*page_size).u32(*num_layers).u32(*num_kv_heads).u32(*head_dim).text(dtype.name());
    out.u64(*model_hash).text(numeric_mode).u32(*tp_rank).u32(*tp_size);
}

pub(crate) fn take_layout(body: &mut In<'_>) -> Result<KvLayout, Malformed> {
    const DTYPES: [KvDtype; 4] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::U64];
    Ok(KvLayout {
        page_size: body.u32()?,
        num_layers: body.u32()?,
        num_kv_heads: body.u32()?,
        head_dim: body.u32()?,
        dtype: {
            let name = body.text()?;
            DTYPES
                .into_iter()
                .find(|dtype| dtype.name() == name)
                .ok_or(Malformed("no element type has this name"))?
        },
        model_hash: body.u64()?,
        numeric_mode: body.text()?,
        tp_rank: body.u32()?,
        tp_size: body.u32()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends a frame to itself and hands out its body.
    fn echo<T>(out: Out, read: impl FnOnce(u8, &mut In<'_>) -> T) -> T {
        let mut bytes = Vec::new();
        out.send(&mut bytes).expect("memory takes all");
        read(bytes[4], &mut In(&bytes[5..]))
    }

    #[test]
    fn workers_say_what_they_are() {
        let layout = KvLayout {
            page_size: 16,
            num_layers: 2,
            num_kv_heads: 3,
            head_dim: 4,
            dtype: KvDtype::Bf16,
            model_hash: u64::MAX,
            numeric_mode: "q8_0/avx2".into(),
            tp_rank: 0,
            tp_size: 1,
        };
        let info = ExecutorInfo {
            model: "m".into(),
            layout,
            vocab_size: 9,
            max_context: 8,
            eos_tokens: vec![TokenId(7)],
        };
        let address = PeerAddress { transport: "shm".into(), bytes: vec![1, 2] };
        let ready = Ready { info, name: "shm".into(), address, report: "fine".into() };
        let read = echo(ready.frame(), |kind, body| (kind, Ready::read(body).expect("whole")));
        assert_eq!(read, (READY, ready));
    }

    #[test]
    fn orders_come_over_and_other_builds_do_not() {
        let order = Order { folder: "/a b".into(), arguments: vec!["--model".into(), "toy".into()] };
        let read = echo(order.welcome(5), |_, body| Order::read(body).expect("whole"));
        assert_eq!(read, (5, order));
        assert_eq!(echo(first_frame(HELLO, 77), |_, body| take_first(body).expect("whole")), 77);
        let mut other = Out::new(HELLO);
        other.u32(MAGIC).u32(VERSION + 1).u64(0);
        let error = echo(other, |_, body| take_first(body).expect_err("another build"));
        assert!(matches!(error, WorkerError::Version { theirs, .. } if theirs == VERSION + 1), "{error}");
        let error = echo(Out::new(HELLO), |_, body| take_first(body).expect_err("nothing"));
        assert!(matches!(error, WorkerError::Protocol { .. }), "{error}");
    }
}
