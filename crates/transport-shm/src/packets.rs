//! Messages in packets, as a seqpacket socket carries them.
//!
//! A message is cut into packets of at most [`MAX_PACKET`] bytes, each led by a byte that says whether more follow; an
//! [`Assembler`] joins them again, up to [`MAX_MESSAGE`] bytes.

use microserving_transport::one_sided::{Frame, FrameError, MAX_MESSAGE};

/// Bytes of a packet, its leading byte included: what a socket buffer takes without asking for one large piece.
pub(crate) const MAX_PACKET: usize = 32 << 10;
const MORE_FOLLOWS: u8 = 1;

/// Cuts a message into packets.
pub(crate) fn packets(message: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let pieces = message.chunks(MAX_PACKET - 1);
    let last = pieces.len().saturating_sub(1);
    pieces.enumerate().map(move |(at, piece)| {
        let lead = if at < last { MORE_FOLLOWS } else { 0 };
        [&[lead], piece].concat()
    })
}

/// Joins packets to messages.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    parts: Vec<u8>,
}

impl Assembler {
    /// Takes a packet; returns the frame that it completes, if it does.
    pub(crate) fn push(&mut self, packet: &[u8]) -> Result<Option<Frame>, FrameError> {
        let (&lead, piece) = packet.split_first().ok_or(FrameError::Truncated)?;
        if self.parts.len() + piece.len() > MAX_MESSAGE {
            return Err(FrameError::TooLong);
        }
        match lead {
            MORE_FOLLOWS => {
                self.parts.extend(piece);
                Ok(None)
            }
            0 if self.parts.is_empty() => Frame::decode(piece).map(Some),
            0 => {
                self.parts.extend(piece);
                Frame::decode(&std::mem::take(&mut self.parts)).map(Some)
            }
            _ => Err(FrameError::BadField { field: "lead" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use microserving_protocol::KvRange;
    use microserving_transport::ByteRun;
    use proptest::prelude::*;

    use super::*;

    fn through_packets(frame: &Frame) -> Frame {
        let mut assembler = Assembler::default();
        let packets: Vec<_> = packets(&frame.encode()).collect();
        let (last, rest) = packets.split_last().expect("at least one packet");
        for packet in rest {
            assert!(packet.len() <= MAX_PACKET);
            assert_eq!(assembler.push(packet), Ok(None));
        }
        assembler.push(last).expect("a whole frame").expect("the last packet completes it")
    }

    #[test]
    fn every_frame_survives_the_way() {
        let short = Frame::Stop { channel: 7 };
        assert_eq!(through_packets(&short), short);
        let long = Frame::Accept {
            channel: 1,
            slot: 0,
            num_bytes: 0,
            checksum: false,
            runs: (0..100_000).map(|offset| ByteRun { offset, num_bytes: 1 }).collect(),
        };
        assert_eq!(through_packets(&long), long);
        let credential = vec![7; 3 * MAX_PACKET];
        let long = Frame::Open { channel: 1, range: KvRange::default(), credential };
        assert_eq!(through_packets(&long), long);
    }

    #[test]
    fn packets_that_are_none_are_refused() {
        let mut assembler = Assembler::default();
        assert_eq!(assembler.push(&[]), Err(FrameError::Truncated));
        assert_eq!(assembler.push(&[2, 8]), Err(FrameError::BadField { field: "lead" }));
    }

    #[test]
    fn an_endless_message_is_cut_off() {
        let mut assembler = Assembler::default();
        let mut packet = vec![0; MAX_PACKET];
        packet[0] = MORE_FOLLOWS;
        let failed_at = (0..).find(|_| assembler.push(&packet).is_err()).expect("bounded");
        assert!(failed_at <= MAX_MESSAGE / (MAX_PACKET - 1));
        assert!(assembler.parts.len() <= MAX_MESSAGE);
    }

    proptest! {
        #[test]
        fn noise_never_panics(packets in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..80), 1..8)) {
            let mut assembler = Assembler::default();
            for mut packet in packets {
                // Plausible leads and tags, so that the fields are reached.
                if let [lead, tag, ..] = packet.as_mut_slice() {
                    *lead %= 3;
                    *tag %= 12;
                }
                let _ = assembler.push(&packet);
            }
        }
    }
}
