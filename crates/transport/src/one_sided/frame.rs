//! What the sender and the receiver of a one-sided transport say to each other, and its bytes.
//!
//! ```text
//! sender                                             receiver
//!   Hello{version, start_time, checksum}  ─────────▶   who writes; first on a connection
//!   Open{channel, range, credential}      ─────────▶   admission, claim
//!   ◀─────────  Accept{slot, num_bytes, runs}  |  Refuse{refusal}  |  Reject{reason}
//!   Records{runs and their hashes}…       ─────────▶   in checksum mode
//!   Finish{num_bytes}                     ─────────▶   counts, verifies
//!   ◀─────────  Finished{refusal?}
//!   ◀─────────  Stop{channel}                          revoked
//!   Drained{channel}                      ─────────▶   nothing of the claim can land any more
//! ```
//!
//! Numbers are little-endian. How a message is delimited is the transport's: a frame is a message of at most [`MAX_MESSAGE`] bytes.
//! Whatever a peer sends, decoding answers with a frame or a [`FrameError`].

use super::{Fields, Record};
use crate::{ByteRun, Refusal};
use microserving_protocol::KvRange;

/// The version of everything in this file; peers of other versions are turned away.
pub const VERSION: u16 = 1;
/// Bytes of a message. The largest is an `Accept` with the runs of a much-scattered grant.
pub const MAX_MESSAGE: usize = 16 << 20;
/// Runs in one `Accept`.
pub const MAX_RUNS: usize = MAX_MESSAGE / RUN_BYTES - 16;
/// Records in one `Records`; longer lists travel in several.
pub const MAX_RECORDS: usize = 4096;

const RUN_BYTES: usize = 16;
const RECORD_BYTES: usize = 24;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "the drawing above says what each is for; the fields are those of claims and grants"
)]
pub enum Frame {
    Hello { version: u16, start_time: u64, checksum: bool },
    Open { channel: u64, range: KvRange, credential: Vec<u8> },
    Records { channel: u64, records: Vec<Record> },
    Finish { channel: u64, num_bytes: u64 },
    Drained { channel: u64 },
    Accept { channel: u64, slot: u32, num_bytes: u64, checksum: bool, runs: Vec<ByteRun> },
    Refuse { channel: u64, refusal: Refusal },
    Stop { channel: u64 },
    Finished { channel: u64, refusal: Option<Refusal> },
    Reject { reason: String },
}

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Bytes are missing.
    #[error("the message ends too early")]
    Truncated,
    /// Bytes follow behind it.
    #[error("{num_bytes} bytes are left over behind the message")]
    TrailingBytes {
        /// How many.
        num_bytes: usize,
    },
    /// The first byte says nothing known.
    #[error("no frame has the tag {tag}")]
    UnknownTag {
        /// The byte.
        tag: u8,
    },
    /// A field is out of its bounds.
    #[error("the field `{field}` has a value that does not exist")]
    BadField {
        /// Which.
        field: &'static str,
    },
    /// More bytes than a message may have.
    #[error("the message is longer than {MAX_MESSAGE} bytes")]
    TooLong,
}

impl Frame {
    /// Returns the bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut word = |tag: u8, words: &[u64]| {
            out.push(tag);
            words.iter().for_each(|word| out.extend(word.to_le_bytes()));
        };
        match self {
            Self::Hello { version, start_time, checksum } => {
                word(1, &[u64::from(*version), *start_time, u64::from(*checksum)]);
            }
            Self::Open { channel, range, credential } => {
                word(2, &[*channel, u64::from(range.begin()), u64::from(range.end())]);
                out.extend(credential);
            }
            Self::Records { channel, records } => {
                word(3, &[*channel]);
                for Record { run, hash } in records {
                    put_run(&mut out, *run);
                    out.extend(hash.to_le_bytes());
                }
            }
            Self::Finish { channel, num_bytes } => word(4, &[*channel, *num_bytes]),
            Self::Drained { channel } => word(5, &[*channel]),
            Self::Accept { channel, slot, num_bytes, checksum, runs } => {
                word(6, &[*channel, u64::from(*slot), *num_bytes, u64::from(*checksum)]);
                runs.iter().for_each(|run| put_run(&mut out, *run));
            }
            Self::Refuse { channel, refusal } => word(7, &[*channel, refusal_code(Some(*refusal))]),
            Self::Stop { channel } => word(8, &[*channel]),
            Self::Finished { channel, refusal } => word(9, &[*channel, refusal_code(*refusal)]),
            Self::Reject { reason } => {
                word(10, &[]);
                out.extend(reason.as_bytes());
            }
        }
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    /// Why the bytes are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let (&tag, rest) = bytes.split_first().ok_or(FrameError::Truncated)?;
        let mut input = Fields::new(rest);
        let frame = match tag {
            1 => Self::Hello {
                version: input.small("version")?,
                start_time: input.word()?,
                checksum: input.flag("checksum")?,
            },
            2 => Self::Open {
                channel: input.word()?,
                range: input.range()?,
                credential: input.rest().to_vec(),
            },
            3 => Self::Records {
                channel: input.word()?,
                records: input.list(RECORD_BYTES, MAX_RECORDS, |input| {
                    Ok(Record { run: input.run()?, hash: input.word()? })
                })?,
            },
            4 => Self::Finish { channel: input.word()?, num_bytes: input.word()? },
            5 => Self::Drained { channel: input.word()? },
            6 => Self::Accept {
                channel: input.word()?,
                slot: input.small("slot")?,
                num_bytes: input.word()?,
                checksum: input.flag("checksum")?,
                runs: input.list(RUN_BYTES, MAX_RUNS, Fields::run)?,
            },
            7 => Self::Refuse {
                channel: input.word()?,
                refusal: input.refusal()?.ok_or(FrameError::BadField { field: "refusal" })?,
            },
            8 => Self::Stop { channel: input.word()? },
            9 => Self::Finished { channel: input.word()?, refusal: input.refusal()? },
            10 => Self::Reject { reason: String::from_utf8_lossy(input.rest()).into_owned() },
            tag => return Err(FrameError::UnknownTag { tag }),
        };
        match input.rest().len() {
            0 => Ok(frame),
            num_bytes => Err(FrameError::TrailingBytes { num_bytes }),
        }
    }
}

fn put_run(out: &mut Vec<u8>, run: ByteRun) {
    out.extend((run.offset as u64).to_le_bytes());
    out.extend((run.num_bytes as u64).to_le_bytes());
}

pub(super) const REFUSALS: [Refusal; 6] = [
    Refusal::BadCredential,
    Refusal::Stale,
    Refusal::RangeTaken,
    Refusal::Revoked,
    Refusal::Unreachable,
    Refusal::PeerLost,
];

/// 0 is no refusal.
fn refusal_code(refusal: Option<Refusal>) -> u64 {
    let place = refusal.and_then(|refusal| REFUSALS.iter().position(|known| *known == refusal));
    place.map_or(0, |place| place as u64 + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(offset: usize, num_bytes: usize) -> ByteRun {
        ByteRun { offset, num_bytes }
    }

    fn one_of_each() -> Vec<Frame> {
        let range = KvRange::new(3, 90).expect("ordered");
        vec![
            Frame::Hello { version: VERSION, start_time: 77, checksum: true },
            Frame::Open { channel: 1, range, credential: b"signed".to_vec() },
            Frame::Open { channel: u64::MAX, range, credential: Vec::new() },
            Frame::Records { channel: 2, records: vec![Record { run: run(64, 128), hash: 9 }; 3] },
            Frame::Finish { channel: 3, num_bytes: 1 << 40 },
            Frame::Drained { channel: 4 },
            Frame::Accept {
                channel: 5,
                slot: 7,
                num_bytes: 8,
                checksum: false,
                runs: vec![run(0, 1), run(9, 10)],
            },
            Frame::Refuse { channel: 6, refusal: Refusal::RangeTaken },
            Frame::Stop { channel: 7 },
            Frame::Finished { channel: 8, refusal: None },
            Frame::Finished { channel: 8, refusal: Some(Refusal::PeerLost) },
            Frame::Reject { reason: "another user".into() },
        ]
    }

    #[test]
    fn every_frame_survives_the_way() {
        for frame in one_of_each() {
            assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }
    }

    #[test]
    fn every_cut_and_every_extra_byte_is_noticed_or_harmless() {
        for frame in one_of_each() {
            let bytes = frame.encode();
            for len in 0..bytes.len() {
                assert_ne!(Frame::decode(&bytes[..len]), Ok(frame.clone()));
            }
            let longer = [bytes.as_slice(), &[1]].concat();
            assert_ne!(Frame::decode(&longer), Ok(frame));
        }
    }

    #[test]
    fn values_that_do_not_exist_are_refused() {
        let words = |tag: u8, words: &[u64]| {
            let bytes = words.iter().flat_map(|word| word.to_le_bytes());
            Frame::decode(&std::iter::once(tag).chain(bytes).collect::<Vec<_>>())
        };
        assert_eq!(words(0, &[]), Err(FrameError::UnknownTag { tag: 0 }));
        assert_eq!(words(1, &[1 << 16, 0, 0]), Err(FrameError::BadField { field: "version" }));
        assert_eq!(words(1, &[1, 0, 2]), Err(FrameError::BadField { field: "checksum" }));
        assert_eq!(words(2, &[1, 5, 4]), Err(FrameError::BadField { field: "range" }));
        assert_eq!(words(2, &[1, 5, 1 << 32]), Err(FrameError::BadField { field: "end" }));
        assert_eq!(words(7, &[1, 0]), Err(FrameError::BadField { field: "refusal" }));
        assert_eq!(words(9, &[1, 7]), Err(FrameError::BadField { field: "refusal" }));
        assert_eq!(words(5, &[1, 1]), Err(FrameError::TrailingBytes { num_bytes: 8 }));
        assert_eq!(Frame::decode(&[]), Err(FrameError::Truncated));
    }

    proptest! {
        #[test]
        fn noise_never_panics(mut bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            // A plausible tag, so that the fields are reached.
            if let Some(tag) = bytes.first_mut() {
                *tag %= 12;
            }
            let _ = Frame::decode(&bytes);
        }
    }
}
