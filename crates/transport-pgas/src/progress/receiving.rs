//! The receiver's half: claims of others on our region.

use microserving_protocol::{KvRange, PeId};
use microserving_transport::one_sided::{Frame, Records};
use microserving_transport::{ByteRun, Delivery, Ending, Refusal};

use super::{Progress, hash};
use crate::peer::Claim;
use crate::shared::ClaimWriter;

impl Progress {
    pub(super) fn on_open(
        &mut self,
        from: PeId,
        channel: u64,
        range: KvRange,
        credential: &[u8],
    ) -> Result<(), String> {
        if self.peer(from).claims.contains_key(&channel) {
            return Err("a channel is opened twice".into());
        }
        let frame = match self.claim(from, channel, range, credential) {
            Ok(frame) => frame,
            Err(refusal) => Frame::Refuse { channel, refusal },
        };
        self.send(from, &frame);
        Ok(())
    }

    pub(super) fn claim(
        &mut self,
        from: PeId,
        channel: u64,
        range: KvRange,
        credential: &[u8],
    ) -> Result<Frame, Refusal> {
        let admission = self.shared.receiving().admission.clone();
        let generation =
            admission.map_or(Err(Refusal::BadCredential), |admission| admission.admit(credential));
        let generation = generation.inspect_err(|_| self.shared.receiving().book.count_refused())?;
        let Some(slot) = self.peer(from).free_slots.pop() else {
            tracing::warn!(%from, "an element holds as many claims as it may");
            self.shared.receiving().book.count_refused();
            return Err(Refusal::Unreachable);
        };
        // Nobody counts in it: whatever the claim before put there came before its last word.
        self.control.write(self.layout.arrived(from, slot), &[0; 8]);
        let accepted =
            self.shared.receiving().book.claim(generation, range, ClaimWriter { pe: from, channel });
        let accepted = accepted.inspect_err(|_| self.peers[from.0 as usize].free_slots.push(slot))?;
        let checksum = self.peer(from).checksum || self.shared.config.checksum;
        let frame = Frame::Accept {
            channel,
            slot,
            num_bytes: accepted.num_bytes,
            checksum,
            runs: accepted.runs.to_vec(),
        };
        let claim = Claim {
            id: accepted.claim,
            slot,
            num_bytes: accepted.num_bytes,
            runs: accepted.runs,
            records: Records::default(),
        };
        self.peer(from).claims.insert(channel, claim);
        Ok(frame)
    }

    pub(super) fn on_finish(&mut self, from: PeId, channel: u64, said_bytes: u64) {
        let Some(claim) = self.peer(from).claims.remove(&channel) else {
            self.send(from, &Frame::Finished { channel, refusal: Some(Refusal::Stale) });
            return;
        };
        let counted = self.control.load_word(self.layout.arrived(from, claim.slot));
        // The counter and the word must agree with the claim; the one that does not decides.
        let num_bytes = if said_bytes == claim.num_bytes { counted } else { said_bytes };
        let checked =
            (self.peer(from).checksum || self.shared.config.checksum) && num_bytes == claim.num_bytes;
        let hash = |run: ByteRun| hash(&*self.region, run);
        let intact = !checked || claim.records.are_intact(claim.num_bytes, hash);
        let result = self.shared.receiving().book.finish(claim.id, Delivery { num_bytes, intact });
        self.peer(from).free_slots.push(claim.slot);
        self.send(from, &Frame::Finished { channel, refusal: result.err() });
    }

    pub(super) fn on_drained(&mut self, from: PeId, channel: u64) {
        // A claim that was refused, or had finished already, is drained for nobody.
        let Some(claim) = self.peer(from).claims.remove(&channel) else { return };
        self.end(from, &claim, Ending::Drained);
        self.peer(from).free_slots.push(claim.slot);
    }

    pub(super) fn end(&self, from: PeId, claim: &Claim, ending: Ending) {
        let counted = self.control.load_word(self.layout.arrived(from, claim.slot));
        let mut receiving = self.shared.receiving();
        receiving.book.progress(claim.id, counted);
        receiving.book.end(claim.id, ending);
    }

    /// Looks up how far writers have come.
    pub(super) fn count_arrivals(&self) {
        if self.peers.iter().all(|peer| peer.claims.is_empty()) {
            return;
        }
        let mut receiving = self.shared.receiving();
        for (pe, peer) in (0..).map(PeId).zip(&self.peers) {
            for claim in peer.claims.values() {
                let counted = self.control.load_word(self.layout.arrived(pe, claim.slot));
                receiving.book.progress(claim.id, counted);
            }
        }
    }
}
