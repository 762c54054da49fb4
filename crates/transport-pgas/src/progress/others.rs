//! The other elements: whether they live, and what becomes of the world when one does not, or ends.

use std::time::Duration;

use microserving_protocol::PeId;
use microserving_transport::one_sided::Stopping;
use microserving_transport::{Ending, Refusal};

use super::{GOODBYE, Progress};
use crate::clock::now;
use crate::peer::{Peer, Standing};

/// How often signs of life are given and looked for.
const PULSE: Duration = Duration::from_millis(100);
/// How long the end of a transport waits for peers to take its last words.
const MAX_FAREWELL: Duration = Duration::from_secs(1);

impl Progress {
    /// Gives a sign of life, and looks for the others'.
    pub(super) fn look_after_peers(&mut self) {
        let time = now();
        if time.saturating_sub(self.last_pulse) < PULSE {
            return;
        }
        self.last_pulse = time;
        let me = self.me;
        for pe in self.everybody().filter(|pe| *pe != me) {
            if self.peer(pe).standing != Standing::Here {
                self.fence_if_exited(pe);
                continue;
            }
            let beat = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            self.pgas.put_word(pe, &*self.control, self.layout.pulse(self.me), beat);
            let seen = self.control.load_word(self.layout.pulse(pe));
            let silence = self.shared.config.silence;
            let peer = self.peer(pe);
            if peer.pulse.0 != seen {
                peer.pulse = (seen, time);
            }
            let reason = match &peer.process {
                Some(_) => peer.has_exited().then(|| "its process has exited".to_owned()),
                None => (time.saturating_sub(peer.pulse.1) > silence)
                    .then(|| format!("it has given no sign of life for {} s", silence.as_secs())),
            };
            if let Some(reason) = reason {
                self.lose(pe, &format!("element {pe} is gone: {reason}"));
            }
        }
        // Not counted as business: a pulse is no reason to look more often.
        self.pgas.quiet();
    }

    /// What an element that was lost may still write ends with its process.
    pub(super) fn fence_if_exited(&mut self, pe: PeId) {
        let peer = self.peer(pe);
        if peer.has_exited() && !peer.vanished.is_empty() {
            for claim in std::mem::take(&mut peer.vanished) {
                self.end(pe, &claim, Ending::Fenced);
            }
        }
    }

    /// An element says that it ends: everything of it is drained before, and nothing more is sent to it.
    pub(super) fn take_leave(&mut self, pe: PeId) {
        tracing::warn!(%pe, "an element has left; a formed world takes nobody in: start all of its engines anew to have it back");
        self.part_with(pe, Standing::Left);
    }

    /// An element is gone, so the world is: what was put into its memory may have gone anywhere. What others write here stays guarded as
    /// before; nothing new is sent.
    pub(super) fn lose(&mut self, pe: PeId, reason: &str) {
        if self.peer(pe).standing != Standing::Here {
            return;
        }
        // What it had said still counts.
        self.peer(pe).standing = Standing::Lost;
        while self.peer(pe).process.is_some() && self.hear_one(pe) {}
        self.part_with(pe, Standing::Lost);
        if self.shared.lose(reason.to_owned()) {
            tracing::error!(reason, "the world is lost: its engines must be started anew, all of them");
        }
        let notices = self.shared.channels().stop_all(Stopping::Because(Refusal::PeerLost));
        notices.into_iter().for_each(|notice| self.tell(notice));
    }

    pub(super) fn part_with(&mut self, pe: PeId, standing: Standing) {
        // One that left listens until all others have left, too: it waits for our own goodbye.
        if !(self.leaving && standing == Standing::Left) {
            self.mailbox.forget(pe);
        }
        let peer = self.peer(pe);
        peer.standing = standing;
        // Only an exit that is certain ends what it may still write.
        let exited = peer.has_exited();
        let ending = match (standing, exited) {
            (Standing::Left, _) => Ending::Drained,
            (_, true) => Ending::Fenced,
            (_, false) => Ending::Vanished,
        };
        let sending = std::mem::take(&mut peer.sending);
        let claims = std::mem::take(&mut peer.claims);
        for claim in claims.values() {
            self.end(pe, claim, ending);
        }
        if ending == Ending::Vanished {
            self.peer(pe).vanished.extend(claims.into_values());
        }
        let mut channels = self.shared.channels();
        for channel in sending.into_keys() {
            if channels.stop(channel, Stopping::Because(Refusal::PeerLost)).is_some() {
                channels.close(channel, None);
            }
        }
    }

    /// Says goodbye, and gives the others a moment to take what waits for them.
    pub(super) fn say_farewell(mut self) {
        self.leaving = true;
        for pe in self.everybody() {
            // Those who said goodbye before us wait for ours.
            if pe != self.me && self.peer(pe).standing != Standing::Lost && !self.peer(pe).has_exited() {
                let _ = self.mailbox.send(pe, GOODBYE);
            }
        }
        // A lost world is left by nobody.
        let leaves = self.shared.config.leave_within.is_some() && self.shared.lost().is_none();
        let patience = self.shared.config.leave_within.filter(|_| leaves).unwrap_or(MAX_FAREWELL);
        let begin = now();
        loop {
            let awaited = leaves && !self.all_have_left();
            if !(awaited || self.mailbox.is_waiting()) || now().saturating_sub(begin) > patience {
                break;
            }
            self.hear();
            self.mailbox.pump(&mut *self.pgas);
            self.pgas.quiet();
            self.shared.sleep(Duration::from_micros(200));
        }
        if !leaves {
            return;
        }
        // One that has gone already did not leave the world with us, and never will.
        let gone = self.peers.iter().any(Peer::has_exited);
        if gone || !self.all_have_left() {
            tracing::warn!(
                "this process leaves a world that others go on in: start all of its engines anew; a launcher may end them now"
            );
            return;
        }
        let Self { mut pgas, control, region, mailbox, .. } = self;
        drop((control, region, mailbox));
        if let Err(error) = pgas.leave() {
            tracing::warn!(%error, "the world is not left in order");
        }
    }

    pub(super) fn all_have_left(&self) -> bool {
        let others = self.peers.iter().enumerate().filter(|(pe, _)| *pe != self.me.0 as usize);
        others.into_iter().all(|(_, peer)| peer.standing == Standing::Left)
    }
}
