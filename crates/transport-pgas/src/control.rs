//! Where in the control memory what lies. It is symmetric: as many bytes, with the same meaning, on every element.
//!
//! ```text
//!  cards     one per element, put by it into everybody's memory when the world is formed: who it is
//!  pulses    one word per element, put by it: it lives
//!  written   one word per element, put by it: bytes that it has written into my inbox from it
//!  taken     one word per element, put by it: bytes that it has taken from its inbox from me
//!  arrived   one word per element and slot, put by it: bytes of a claim that it has written into my region
//!  inboxes   one ring per element, put by it: messages
//!  outboxes  one ring per element, mine: where messages lie until they are put; a put reads symmetric memory
//! ```

use microserving_protocol::PeId;

/// Bytes of a ring. A longer message goes through it in pieces.
pub(crate) const RING_BYTES: usize = 64 << 10;
/// Claims that one element may hold at a time on another.
pub(crate) const NUM_SLOTS: u32 = 256;
/// Elements that a world may have: each costs every other one a pair of rings.
pub(crate) const MAX_PES: u32 = 256;

/// Words that different elements write lie on cache lines of their own.
const LINE: usize = 64;

/// The places for a world of some size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    num_pes: usize,
}

impl Layout {
    pub(crate) const CARD_BYTES: usize = 128;

    pub(crate) fn new(num_pes: u32) -> Self {
        Self { num_pes: num_pes as usize }
    }

    pub(crate) fn num_bytes(self) -> usize {
        self.outbox(PeId(0)) + self.num_pes * RING_BYTES
    }

    pub(crate) fn card(self, of: PeId) -> usize {
        of.0 as usize * Self::CARD_BYTES
    }

    pub(crate) fn pulse(self, of: PeId) -> usize {
        self.num_pes * Self::CARD_BYTES + of.0 as usize * LINE
    }

    pub(crate) fn written(self, by: PeId) -> usize {
        self.pulse(PeId(0)) + (self.num_pes + by.0 as usize) * LINE
    }

    pub(crate) fn taken(self, by: PeId) -> usize {
        self.written(PeId(0)) + (self.num_pes + by.0 as usize) * LINE
    }

    pub(crate) fn arrived(self, by: PeId, slot: u32) -> usize {
        let slots = by.0 as usize * NUM_SLOTS as usize + slot as usize;
        self.taken(PeId(0)) + self.num_pes * LINE + slots * 8
    }

    pub(crate) fn inbox(self, from: PeId) -> usize {
        self.arrived(PeId(0), 0) + self.num_pes * NUM_SLOTS as usize * 8 + from.0 as usize * RING_BYTES
    }

    pub(crate) fn outbox(self, to: PeId) -> usize {
        self.inbox(PeId(0)) + (self.num_pes + to.0 as usize) * RING_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for num_pes in [1, 2, 5, MAX_PES] {
            let layout = Layout::new(num_pes);
            let mut places = Vec::new();
            for pe in (0..num_pes).map(PeId) {
                places.push((layout.card(pe), Layout::CARD_BYTES));
                for word in [layout.pulse(pe), layout.written(pe), layout.taken(pe)] {
                    places.push((word, LINE));
                }
                places.push((layout.arrived(pe, 0), NUM_SLOTS as usize * 8));
                assert_eq!(
                    layout.arrived(pe, NUM_SLOTS - 1) - layout.arrived(pe, 0),
                    (NUM_SLOTS as usize - 1) * 8
                );
                places.push((layout.inbox(pe), RING_BYTES));
                places.push((layout.outbox(pe), RING_BYTES));
            }
            places.sort_unstable();
            assert!(places.iter().all(|(offset, _)| offset % 64 == 0));
            assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0), "one behind the other");
            assert_eq!(places.last().map(|(offset, bytes)| offset + bytes), Some(layout.num_bytes()));
        }
    }
}
