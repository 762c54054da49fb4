//! What goes over a control connection: the frames of all one-sided transports, and what only receivers who read need.
//!
//! ```text
//! sender                                             receiver
//!   Introduce{whom, region, metadata}     ─────────▶   first on a connection: how to read from here
//!   Open, then Put{channel, runs}…        ─────────▶   reads
//!   ◀─────────  Taken{channel, num_bytes}              one for every Put, when nothing of it is under way any more
//!   Records…, Finish, Drained             ─────────▶   only when every Put is Taken
//!   Beat                                  ◀────────▶   a sign of life
//! ```
//!
//! The rest is as [`Frame`] says it, without `Hello`. A message is led by its length in four bytes; numbers are little-endian.

use microserving_transport::PutRun;
use microserving_transport::one_sided::{Fields, Frame, FrameError, MAX_MESSAGE};

/// The version of everything in this file; peers of other versions are turned away.
pub(crate) const VERSION: u16 = 1;
/// Runs in one `Put`; longer lists travel in several.
pub(crate) const MAX_PUT_RUNS: usize = 4096;
/// Bytes of a message from somebody who has no claim admitted yet.
pub(crate) const MAX_FIRST_MESSAGE: usize = 64 << 10;

const RUN_BYTES: usize = 24;
/// Tags below it are those of frames.
const FIRST_TAG: u8 = 32;

/// How a sender is read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Introduction {
    pub(crate) version: u16,
    /// The id in the address that the sender holds: whom it takes us for.
    pub(crate) whom: [u8; 16],
    pub(crate) checksum: bool,
    /// Address of the first byte of the sender's region, there.
    pub(crate) base: usize,
    pub(crate) num_bytes: usize,
    /// NIXL's own.
    pub(crate) metadata: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Frame(Frame),
    Introduce(Introduction),
    Put { channel: u64, runs: Vec<PutRun> },
    Taken { channel: u64, num_bytes: u64 },
    Beat,
}

impl Message {
    /// Returns the bytes, led by their number.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; 4];
        let mut word = |tag: u8, words: &[u64]| {
            out.push(FIRST_TAG + tag);
            words.iter().for_each(|word| out.extend(word.to_le_bytes()));
        };
        match self {
            Self::Frame(frame) => out.extend(frame.encode()),
            Self::Introduce(Introduction { version, whom, checksum, base, num_bytes, metadata }) => {
                let [high, low] = [u128::from_be_bytes(*whom) >> 64, u128::from_be_bytes(*whom)];
                let whom = [high as u64, low as u64];
                word(0, &[u64::from(*version), whom[0], whom[1], u64::from(*checksum)]);
                [*base, *num_bytes].iter().for_each(|word| out.extend((*word as u64).to_le_bytes()));
                out.extend(metadata);
            }
            Self::Put { channel, runs } => {
                word(1, &[*channel]);
                for PutRun { local_offset, remote_offset, num_bytes } in runs {
                    for word in [local_offset, remote_offset, num_bytes] {
                        out.extend((*word as u64).to_le_bytes());
                    }
                }
            }
            Self::Taken { channel, num_bytes } => word(2, &[*channel, *num_bytes]),
            Self::Beat => word(3, &[]),
        }
        let num_bytes = u32::try_from(out.len() - 4).expect("messages are far shorter");
        out[..4].copy_from_slice(&num_bytes.to_le_bytes());
        out
    }

    /// Reads a message, without its length.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let (&tag, rest) = bytes.split_first().ok_or(FrameError::Truncated)?;
        let mut input = Fields::new(rest);
        let message = match tag {
            tag if tag < FIRST_TAG => return Frame::decode(bytes).map(Self::Frame),
            32 => {
                let version = input.small("version")?;
                let whom = (u128::from(input.word()?) << 64) | u128::from(input.word()?);
                Self::Introduce(Introduction {
                    version,
                    whom: whom.to_be_bytes(),
                    checksum: input.flag("checksum")?,
                    base: input.small("base")?,
                    num_bytes: input.small("num_bytes")?,
                    metadata: input.rest().to_vec(),
                })
            }
            33 => Self::Put {
                channel: input.word()?,
                runs: input.list(RUN_BYTES, MAX_PUT_RUNS, |input| {
                    Ok(PutRun {
                        local_offset: input.small("local_offset")?,
                        remote_offset: input.small("remote_offset")?,
                        num_bytes: input.small("num_bytes")?,
                    })
                })?,
            },
            34 => Self::Taken { channel: input.word()?, num_bytes: input.word()? },
            35 => Self::Beat,
            tag => return Err(FrameError::UnknownTag { tag }),
        };
        match input.rest().len() {
            0 => Ok(message),
            num_bytes => Err(FrameError::TrailingBytes { num_bytes }),
        }
    }
}

/// Cuts what comes over a stream into messages.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    bytes: Vec<u8>,
    /// Where the next message begins.
    at: usize,
}

impl Assembler {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.at));
        self.bytes.extend(bytes);
    }

    /// Takes the next message, if it is whole.
    ///
    /// # Errors
    /// If it is longer than `max_message` bytes, or is none.
    pub(crate) fn next(&mut self, max_message: usize) -> Result<Option<Message>, FrameError> {
        let Some((length, rest)) = self.bytes[self.at..].split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > max_message.min(MAX_MESSAGE) {
            return Err(FrameError::TooLong);
        }
        let Some(message) = rest.get(..length) else { return Ok(None) };
        self.at += 4 + length;
        Message::decode(message).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use microserving_protocol::KvRange;
    use proptest::prelude::*;

    use super::*;

    fn one_of_each() -> Vec<Message> {
        let run = PutRun { local_offset: 1, remote_offset: 2, num_bytes: 3 };
        vec![
            Message::Frame(Frame::Open {
                channel: 9,
                range: KvRange::default(),
                credential: b"signed".to_vec(),
            }),
            Message::Introduce(Introduction {
                version: VERSION,
                whom: std::array::from_fn(|at| at as u8),
                checksum: true,
                base: 0x7f00_0000_0000,
                num_bytes: 1 << 30,
                metadata: b"how to reach me".to_vec(),
            }),
            Message::Put { channel: 7, runs: vec![run; 3] },
            Message::Put { channel: 7, runs: Vec::new() },
            Message::Taken { channel: 7, num_bytes: 9 },
            Message::Beat,
        ]
    }

    #[test]
    fn every_message_survives_the_way_however_it_is_cut() {
        let stream: Vec<u8> = one_of_each().iter().flat_map(Message::encode).collect();
        for piece in [1, 3, 64, stream.len()] {
            let mut assembler = Assembler::default();
            let mut seen = Vec::new();
            for bytes in stream.chunks(piece) {
                assembler.push(bytes);
                while let Some(message) = assembler.next(MAX_MESSAGE).unwrap() {
                    seen.push(message);
                }
            }
            assert_eq!(seen, one_of_each());
        }
    }

    #[test]
    fn long_messages_are_refused_by_their_length() {
        let mut assembler = Assembler::default();
        assembler.push(&1025u32.to_le_bytes());
        assert_eq!(assembler.next(1024), Err(FrameError::TooLong));
    }

    #[test]
    fn values_that_do_not_exist_are_refused() {
        assert_eq!(Message::decode(&[]), Err(FrameError::Truncated));
        assert_eq!(Message::decode(&[36]), Err(FrameError::UnknownTag { tag: 36 }));
        assert_eq!(Message::decode(&[35, 0]), Err(FrameError::TrailingBytes { num_bytes: 1 }));
        assert_eq!(Message::decode(&[33, 0, 0, 0, 0, 0, 0, 0, 0, 1]), Err(FrameError::Truncated));
        let runs = vec![PutRun { local_offset: 0, remote_offset: 0, num_bytes: 1 }; MAX_PUT_RUNS + 1];
        let put = Message::Put { channel: 1, runs }.encode();
        assert_eq!(Message::decode(&put[4..]), Err(FrameError::TooLong));
    }

    proptest! {
        #[test]
        fn noise_never_panics(mut bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            // A plausible tag, so that the fields are reached.
            if let Some(tag) = bytes.first_mut() {
                *tag %= 40;
            }
            let _ = Message::decode(&bytes);
        }
    }
}
