//! The progress thread: the only one that uses the address space, and the protocol.
//!
//! Nobody is told when something is put into an element's memory, so it has to look. It looks often while something is open, and once a
//! millisecond otherwise.

use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{KvRange, PeId};
use microserving_transport::one_sided::{
    Copied, Frame, MAX_RECORDS, Notice, Record, Records, Slice, Stopping, Target,
};
use microserving_transport::{ByteRun, ChannelId, Delivery, Ending, Refusal};
use xxhash_rust::xxh3::Xxh3;

use crate::clock::now;
use crate::control::{Layout, NUM_SLOTS};
use crate::mailbox::Mailbox;
use crate::peer::{Claim, Peer, Standing};
use crate::pgas::{Pgas, Put, SymmetricMemory};
use crate::shared::{ClaimWriter, Command, Shared};
use crate::world::World;

/// How often signs of life are given and looked for.
const PULSE: Duration = Duration::from_millis(100);
/// Rounds without anything to do before the thread looks less often.
const EAGER_ROUNDS: u32 = 200;
/// How long the end of a transport waits for peers to take its last words.
const MAX_FAREWELL: Duration = Duration::from_secs(1);
/// The message that says goodbye; a frame is never empty.
const GOODBYE: &[u8] = &[];

pub(crate) struct Progress {
    shared: Arc<Shared>,
    pgas: Box<dyn Pgas>,
    control: Arc<dyn SymmetricMemory>,
    region: Arc<dyn SymmetricMemory>,
    layout: Layout,
    mailbox: Mailbox,
    me: PeId,
    peers: Vec<Peer>,
    last_pulse: Duration,
    /// Something was put that has to be waited for.
    owes_quiet: bool,
    /// This element says goodbye.
    leaving: bool,
}

impl Progress {
    pub(crate) fn new(world: World, shared: Arc<Shared>) -> Self {
        let World { pgas, control, region, members, .. } = world;
        let (me, num_pes) = (pgas.pe(), pgas.num_pes());
        let layout = Layout::new(num_pes);
        let peers = (0..).map(PeId).zip(members);
        let peers =
            peers.map(|(pe, member)| Peer::new(member, control.load_word(layout.pulse(pe)), now())).collect();
        let mailbox = Mailbox::new(Arc::clone(&control), me, num_pes);
        Self {
            shared,
            pgas,
            control,
            region,
            layout,
            mailbox,
            me,
            peers,
            last_pulse: Duration::ZERO,
            owes_quiet: false,
            leaving: false,
        }
    }

    /// Serves until the transport shuts down.
    pub(crate) fn run(mut self) {
        let mut idle_rounds = 0;
        loop {
            let mut busy = self.obey();
            busy |= self.hear();
            self.count_arrivals();
            busy |= self.write_slice();
            self.owes_quiet |= self.mailbox.pump(&mut *self.pgas);
            if std::mem::take(&mut self.owes_quiet) {
                self.pgas.quiet();
                busy = true;
            }
            self.look_after_peers();
            self.shared.wake_caller();
            if busy {
                idle_rounds = 0;
                continue;
            }
            if self.shared.channels().is_shut_down() {
                self.say_farewell();
                return;
            }
            idle_rounds += 1;
            let eager = idle_rounds < EAGER_ROUNDS;
            let open = self.mailbox.is_waiting() || self.peers.iter().any(Peer::is_busy);
            let micros = match (open, eager) {
                (true, true) => 20,
                (true, false) | (false, true) => 200,
                (false, false) => 1000,
            };
            self.shared.sleep(Duration::from_micros(micros));
        }
    }

    fn peer(&mut self, pe: PeId) -> &mut Peer {
        &mut self.peers[pe.0 as usize]
    }

    fn everybody(&self) -> impl Iterator<Item = PeId> + use<> {
        (0..u32::try_from(self.peers.len()).unwrap_or(0)).map(PeId)
    }

    /// Carries out what the caller's thread asked for; says whether it was anything.
    fn obey(&mut self) -> bool {
        let commands = self.shared.take_commands();
        let any = !commands.is_empty();
        for command in commands {
            match command {
                Command::Open { channel, pe, credential, range } => {
                    if self.shared.lost().is_some() || self.peer(pe).standing != Standing::Here {
                        self.give_up(channel);
                    } else {
                        self.peer(pe).sending.insert(channel, 0);
                        self.send(pe, &Frame::Open { channel: channel.0, range, credential });
                    }
                }
                Command::Stop(ClaimWriter { pe, channel }) => {
                    if self.peer(pe).claims.contains_key(&channel) {
                        self.send(pe, &Frame::Stop { channel });
                    }
                }
                Command::Notice(notice) => self.tell(notice),
            }
        }
        any
    }

    /// Says a frame to an element; one that takes nothing is lost.
    fn send(&mut self, pe: PeId, frame: &Frame) {
        if self.peer(pe).standing == Standing::Here
            && let Err(error) = self.mailbox.send(pe, &frame.encode())
        {
            self.lose(pe, &format!("element {pe} cannot be spoken to: {error}"));
        }
    }

    /// Tells a receiver what the channels say.
    fn tell(&mut self, notice: Notice) {
        let (Notice::Written(channel) | Notice::Stopped(channel)) = notice;
        let Some(pe) = self.everybody().find(|pe| self.peers[pe.0 as usize].sending.contains_key(&channel))
        else {
            // It was never opened, or its receiver is gone.
            self.shared.channels().close(channel, Some(Refusal::PeerLost));
            return;
        };
        match notice {
            Notice::Written(channel) => {
                // A channel that was stopped meanwhile says `Stopped` next.
                let Some(delivered) = self.shared.channels().delivered(channel) else { return };
                for records in delivered.records.chunks(MAX_RECORDS) {
                    self.send(pe, &Frame::Records { channel: channel.0, records: records.to_vec() });
                }
                self.send(pe, &Frame::Finish { channel: channel.0, num_bytes: delivered.num_bytes });
            }
            Notice::Stopped(channel) => {
                self.peer(pe).sending.remove(&channel);
                self.send(pe, &Frame::Drained { channel: channel.0 });
                self.shared.channels().close(channel, None);
            }
        }
    }

    /// Closes a channel whose receiver is not there.
    fn give_up(&self, channel: ChannelId) {
        let mut channels = self.shared.channels();
        if channels.stop(channel, Stopping::Because(Refusal::PeerLost)).is_some() {
            channels.close(channel, None);
        }
    }

    /// Takes what the others say; says whether it was anything.
    fn hear(&mut self) -> bool {
        let mut heard = false;
        for pe in self.everybody() {
            if self.peer(pe).standing == Standing::Here {
                heard |= self.hear_one(pe);
            }
        }
        heard
    }

    fn hear_one(&mut self, pe: PeId) -> bool {
        let mut messages = Vec::new();
        let received = self.mailbox.receive(&mut *self.pgas, pe, &mut messages);
        self.owes_quiet |= received == Ok(true);
        for message in &messages {
            let handled = match Frame::decode(message) {
                _ if message == GOODBYE => {
                    self.take_leave(pe);
                    Ok(())
                }
                Ok(frame) => self.handle(pe, frame),
                Err(error) => Err(error.to_string()),
            };
            if let Err(reason) = handled {
                self.lose(pe, &format!("element {pe} breaks the protocol: {reason}"));
                break;
            }
        }
        if let Err(error) = received {
            self.lose(pe, &format!("element {pe} cannot be understood: {error}"));
        }
        !messages.is_empty()
    }

    fn handle(&mut self, from: PeId, frame: Frame) -> Result<(), String> {
        match frame {
            Frame::Open { channel, range, credential } => self.on_open(from, channel, range, &credential),
            Frame::Records { channel, records } => {
                // A claim that has ended here may have records on the way.
                let Some(claim) = self.peer(from).claims.get_mut(&channel) else { return Ok(()) };
                claim.records.extend(records, &claim.runs, claim.num_bytes).map_err(str::to_owned)
            }
            Frame::Finish { channel, num_bytes } => {
                self.on_finish(from, channel, num_bytes);
                Ok(())
            }
            Frame::Drained { channel } => {
                self.on_drained(from, channel);
                Ok(())
            }
            Frame::Accept { channel, slot, num_bytes, checksum, runs } => {
                let target = Target { memory: from, slot, num_bytes, runs: runs.into(), checksum };
                self.on_accept(from, ChannelId(channel), target)
            }
            Frame::Refuse { channel, refusal } => {
                let channel = ChannelId(channel);
                let mut channels = self.shared.channels();
                if channels.is_accepted(channel) {
                    return Err("a claim is refused after it was accepted".into());
                }
                if self.peers[from.0 as usize].sending.remove(&channel).is_some() {
                    channels.close(channel, Some(refusal));
                }
                Ok(())
            }
            Frame::Stop { channel } => {
                let channel = ChannelId(channel);
                if self.peer(from).sending.contains_key(&channel) {
                    let notice = self.shared.channels().stop(channel, Stopping::Because(Refusal::Revoked));
                    notice.into_iter().for_each(|notice| self.tell(notice));
                }
                Ok(())
            }
            Frame::Finished { channel, refusal } => {
                let channel = ChannelId(channel);
                if !self.peer(from).sending.contains_key(&channel) {
                    return Ok(());
                }
                let mut channels = self.shared.channels();
                if !channels.is_written(channel) {
                    return Err("a claim is finished before it was written".into());
                }
                match refusal {
                    None => channels.complete(channel),
                    Some(refusal) => channels.close(channel, Some(refusal)),
                }
                drop(channels);
                self.peer(from).sending.remove(&channel);
                Ok(())
            }
            Frame::Hello { .. } | Frame::Reject { .. } => Err("there is no greeting between elements".into()),
        }
    }

    // As a receiver.

    fn on_open(&mut self, from: PeId, channel: u64, range: KvRange, credential: &[u8]) -> Result<(), String> {
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

    fn claim(
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

    fn on_finish(&mut self, from: PeId, channel: u64, said_bytes: u64) {
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

    fn on_drained(&mut self, from: PeId, channel: u64) {
        // A claim that was refused, or had finished already, is drained for nobody.
        let Some(claim) = self.peer(from).claims.remove(&channel) else { return };
        self.end(from, &claim, Ending::Drained);
        self.peer(from).free_slots.push(claim.slot);
    }

    fn end(&self, from: PeId, claim: &Claim, ending: Ending) {
        let counted = self.control.load_word(self.layout.arrived(from, claim.slot));
        let mut receiving = self.shared.receiving();
        receiving.book.progress(claim.id, counted);
        receiving.book.end(claim.id, ending);
    }

    /// Looks up how far writers have come.
    fn count_arrivals(&self) {
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

    // As a sender.

    fn on_accept(&mut self, from: PeId, channel: ChannelId, target: Target<PeId>) -> Result<(), String> {
        if target.slot >= NUM_SLOTS {
            return Err("a counter that does not exist".into());
        }
        let bounds = self.region.num_bytes();
        let inside = |run: &ByteRun| run.offset.checked_add(run.num_bytes).is_some_and(|end| end <= bounds);
        if !target.runs.iter().all(inside) || !target.runs.is_sorted_by_key(|run| run.offset) {
            return Err("runs outside the region".into());
        }
        // A channel that we gave up meanwhile is drained already, or will be.
        if self.peer(from).sending.contains_key(&channel) {
            let notice = self.shared.channels().accept(channel, target);
            notice.into_iter().for_each(|notice| self.tell(notice));
        }
        Ok(())
    }

    /// Writes the next slice; says whether there was one.
    fn write_slice(&mut self) -> bool {
        let (slice, mut notice) = self.shared.channels().next_slice(self.shared.config.slice_bytes);
        let any = slice.is_some() || notice.is_some();
        if let Some(slice) = slice {
            let copied = self.copy(&slice);
            notice = self.shared.channels().copied(slice.channel, copied);
        }
        notice.into_iter().for_each(|notice| self.tell(notice));
        any
    }

    /// Puts a slice's bytes, then the counter, and waits until both are there.
    fn copy(&mut self, slice: &Slice<PeId>) -> Copied {
        let begin = now();
        let (mut records, mut num_bytes) = (Vec::new(), 0);
        let Target { memory: pe, slot, checksum, .. } = slice.target;
        for run in &slice.runs {
            if checksum {
                let source = ByteRun { offset: run.local_offset, num_bytes: run.num_bytes };
                let hash = hash(&*self.region, source);
                records.push(Record {
                    run: ByteRun { offset: run.remote_offset, num_bytes: run.num_bytes },
                    hash,
                });
            }
            self.pgas.put(Put {
                pe,
                target: &*self.region,
                target_offset: run.remote_offset,
                source: &*self.region,
                source_offset: run.local_offset,
                num_bytes: run.num_bytes,
            });
            num_bytes += run.num_bytes as u64;
        }
        let total = match self.peers[pe.0 as usize].sending.get_mut(&slice.channel) {
            Some(total) => {
                *total += num_bytes;
                *total
            }
            // Cannot be: a channel is closed behind its last slice.
            None => num_bytes,
        };
        self.pgas.fence();
        self.pgas.put_word(pe, &*self.control, self.layout.arrived(self.me, slot), total);
        self.pgas.quiet();
        Copied { num_bytes, busy: now().saturating_sub(begin), records }
    }

    // The others.

    /// Gives a sign of life, and looks for the others'.
    fn look_after_peers(&mut self) {
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
    fn fence_if_exited(&mut self, pe: PeId) {
        let peer = self.peer(pe);
        if peer.has_exited() && !peer.vanished.is_empty() {
            for claim in std::mem::take(&mut peer.vanished) {
                self.end(pe, &claim, Ending::Fenced);
            }
        }
    }

    /// An element says that it ends: everything of it is drained before, and nothing more is sent to it.
    fn take_leave(&mut self, pe: PeId) {
        tracing::warn!(%pe, "an element has left; a formed world takes nobody in: start all of its engines anew to have it back");
        self.part_with(pe, Standing::Left);
    }

    /// An element is gone, so the world is: what was put into its memory may have gone anywhere. What others write here stays guarded as
    /// before; nothing new is sent.
    fn lose(&mut self, pe: PeId, reason: &str) {
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

    fn part_with(&mut self, pe: PeId, standing: Standing) {
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
    fn say_farewell(mut self) {
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

    fn all_have_left(&self) -> bool {
        let others = self.peers.iter().enumerate().filter(|(pe, _)| *pe != self.me.0 as usize);
        others.into_iter().all(|(_, peer)| peer.standing == Standing::Left)
    }
}

/// Returns the checksum of a run of a memory.
fn hash(memory: &dyn SymmetricMemory, run: ByteRun) -> u64 {
    let mut hasher = Xxh3::new();
    let mut buffer = vec![0; run.num_bytes.min(16 << 10)];
    let mut done = 0;
    while done < run.num_bytes {
        let len = (run.num_bytes - done).min(buffer.len());
        memory.read(run.offset + done, &mut buffer[..len]);
        hasher.update(&buffer[..len]);
        done += len;
    }
    hasher.digest()
}
