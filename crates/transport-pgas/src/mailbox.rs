//! Messages between elements: a stream of bytes each way between any two, through rings in symmetric memory.
//!
//! ```text
//!  sender                                                    receiver
//!  outbox ─── put ──▶ inbox, fence, `written` ─────────────▶ sees `written`, copies out
//!  sees `taken`: so much room again ◀── `taken` ──────────── puts `taken`
//! ```
//!
//! A message is its length in four bytes, then itself. A byte of the outbox is overwritten only when the receiver has taken it from its
//! inbox, so a put that is still reading it is impossible.

use std::collections::VecDeque;
use std::sync::Arc;

use microserving_protocol::PeId;
use microserving_transport::one_sided::MAX_MESSAGE;

use crate::control::{Layout, RING_BYTES};
use crate::pgas::{Pgas, Put, SymmetricMemory};

/// Bytes that may wait for an element that takes nothing; beyond, it is given up.
const MAX_WAITING: usize = 64 << 20;

/// Why nothing can be said to an element, or understood of it, any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MailError {
    #[error("it takes no messages")]
    Stuck,
    #[error("it wrote something that is no message")]
    Garbled,
}

#[derive(Debug, Default)]
struct Outgoing {
    waiting: VecDeque<u8>,
    written: u64,
}

#[derive(Debug, Default)]
struct Incoming {
    taken: u64,
    parts: Vec<u8>,
}

/// The rings of one element.
#[derive(Debug)]
pub(crate) struct Mailbox {
    control: Arc<dyn SymmetricMemory>,
    layout: Layout,
    me: PeId,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
}

impl Mailbox {
    pub(crate) fn new(control: Arc<dyn SymmetricMemory>, me: PeId, num_pes: u32) -> Self {
        Self {
            control,
            layout: Layout::new(num_pes),
            me,
            outgoing: (0..num_pes).map(|_| Outgoing::default()).collect(),
            incoming: (0..num_pes).map(|_| Incoming::default()).collect(),
        }
    }

    /// Queues a message.
    pub(crate) fn send(&mut self, to: PeId, message: &[u8]) -> Result<(), MailError> {
        let waiting = &mut self.outgoing[to.0 as usize].waiting;
        if waiting.len() + message.len() > MAX_WAITING {
            return Err(MailError::Stuck);
        }
        let length = u32::try_from(message.len()).expect("a message is below the bound above");
        waiting.extend(length.to_le_bytes());
        waiting.extend(message);
        Ok(())
    }

    /// Forgets what waits for an element that is gone.
    pub(crate) fn forget(&mut self, pe: PeId) {
        self.outgoing[pe.0 as usize].waiting.clear();
    }

    /// Says whether messages wait for room.
    pub(crate) fn is_waiting(&self) -> bool {
        self.outgoing.iter().any(|outgoing| !outgoing.waiting.is_empty())
    }

    /// Puts what there is room for. Says whether it put anything: the caller owes a [`Pgas::quiet`] then.
    pub(crate) fn pump(&mut self, pgas: &mut dyn Pgas) -> bool {
        let mut put_any = false;
        for (to, outgoing) in (0..).map(PeId).zip(&mut self.outgoing) {
            if outgoing.waiting.is_empty() {
                continue;
            }
            let taken = self.control.load_word(self.layout.taken(to));
            // A peer that says nonsense gets nothing more.
            let under_way = usize::try_from(outgoing.written.wrapping_sub(taken)).unwrap_or(RING_BYTES);
            let mut room = RING_BYTES.saturating_sub(under_way);
            let mut moved = false;
            while room > 0 && !outgoing.waiting.is_empty() {
                let at = (outgoing.written % RING_BYTES as u64) as usize;
                let len = room.min(outgoing.waiting.len()).min(RING_BYTES - at);
                let piece: Vec<u8> = outgoing.waiting.drain(..len).collect();
                let source_offset = self.layout.outbox(to) + at;
                self.control.write(source_offset, &piece);
                pgas.put(Put {
                    pe: to,
                    target: &*self.control,
                    target_offset: self.layout.inbox(self.me) + at,
                    source: &*self.control,
                    source_offset,
                    num_bytes: len,
                });
                outgoing.written += len as u64;
                room -= len;
                moved = true;
            }
            if moved {
                pgas.fence();
                pgas.put_word(to, &*self.control, self.layout.written(self.me), outgoing.written);
                put_any = true;
            }
        }
        put_any
    }

    /// Takes the messages that have come from an element. What was taken is acknowledged, so the caller owes a [`Pgas::quiet`] if there
    /// was something.
    pub(crate) fn receive(
        &mut self,
        pgas: &mut dyn Pgas,
        from: PeId,
        messages: &mut Vec<Vec<u8>>,
    ) -> Result<bool, MailError> {
        let incoming = &mut self.incoming[from.0 as usize];
        let written = self.control.load_word(self.layout.written(from));
        let new = written.wrapping_sub(incoming.taken);
        if new == 0 {
            return Ok(false);
        }
        let new = usize::try_from(new).ok().filter(|new| *new <= RING_BYTES).ok_or(MailError::Garbled)?;
        let begin = incoming.parts.len();
        incoming.parts.resize(begin + new, 0);
        let at = (incoming.taken % RING_BYTES as u64) as usize;
        let (first, second) = incoming.parts[begin..].split_at_mut(new.min(RING_BYTES - at));
        self.control.read(self.layout.inbox(from) + at, first);
        self.control.read(self.layout.inbox(from), second);
        incoming.taken = written;
        pgas.put_word(from, &*self.control, self.layout.taken(self.me), written);

        let mut rest = incoming.parts.as_slice();
        while let Some((length, behind)) = rest.split_first_chunk() {
            let length = u32::from_le_bytes(*length) as usize;
            if length > MAX_MESSAGE {
                return Err(MailError::Garbled);
            }
            let Some((message, behind)) = behind.split_at_checked(length) else { break };
            messages.push(message.to_vec());
            rest = behind;
        }
        let kept = rest.len();
        incoming.parts.drain(..incoming.parts.len() - kept);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::LocalPgas;

    /// Two elements that are driven by hand.
    fn pair() -> Vec<(LocalPgas, Mailbox)> {
        let form = |mut pgas: LocalPgas| {
            let control = pgas.allocate(Layout::new(2).num_bytes()).unwrap();
            let mailbox = Mailbox::new(control, pgas.pe(), 2);
            (pgas, mailbox)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                LocalPgas::world(2, 5).into_iter().map(|pgas| scope.spawn(move || form(pgas))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn messages_of_all_lengths_arrive_whole_and_in_order() {
        let mut pair = pair();
        let message =
            |at: usize| -> Vec<u8> { (0..at * 977 % 200_000).map(|byte| (byte * at) as u8).collect() };
        let mut received = Vec::new();
        for at in 0..300 {
            pair[0].1.send(PeId(1), &message(at)).unwrap();
            if at % 3 == 0 {
                for (pgas, mailbox) in &mut pair {
                    mailbox.pump(pgas);
                    mailbox.receive(pgas, PeId(0), &mut received).unwrap();
                    pgas.quiet();
                }
            }
        }
        while pair[0].1.is_waiting() || received.len() < 300 {
            for (pgas, mailbox) in &mut pair {
                mailbox.pump(pgas);
                mailbox.receive(pgas, PeId(0), &mut received).unwrap();
                pgas.quiet();
            }
        }
        assert_eq!(received.len(), 300);
        for (at, received) in received.iter().enumerate() {
            assert!(*received == message(at), "message {at} of {} bytes", received.len());
        }
    }

    #[test]
    fn an_element_that_takes_nothing_is_given_up() {
        let mut pair = pair();
        let (pgas, mailbox) = &mut pair[0];
        let piece = vec![7; 1 << 20];
        let sent = (0..100).take_while(|_| mailbox.send(PeId(1), &piece).is_ok()).count();
        assert!((60..100).contains(&sent), "{sent}");
        mailbox.pump(pgas);
        assert!(mailbox.is_waiting(), "a full ring is not overrun");
    }

    #[test]
    fn counters_that_cannot_be_are_noticed() {
        let mut pair = pair();
        let lie = |pair: &mut Vec<(LocalPgas, Mailbox)>, value| {
            let (pgas, mailbox) = &mut pair[0];
            pgas.put_word(PeId(1), &*mailbox.control, mailbox.layout.written(PeId(0)), value);
            pgas.quiet();
            let (pgas, mailbox) = &mut pair[1];
            mailbox.receive(pgas, PeId(0), &mut Vec::new())
        };
        assert_eq!(lie(&mut pair, 4), Ok(true), "an empty message");
        assert_eq!(lie(&mut pair, 3), Err(MailError::Garbled), "backwards");
        assert_eq!(
            lie(&mut pair, 5 + RING_BYTES as u64),
            Err(MailError::Garbled),
            "more than there is room for"
        );
    }
}
