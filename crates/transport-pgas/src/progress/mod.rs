//! The progress thread: the only one that uses the address space, and the protocol.
//!
//! Nobody is told when something is put into an element's memory, so it has to look. It looks often while something is open, and once a
//! millisecond otherwise.

mod others;
mod receiving;
mod sending;

use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::PeId;
use microserving_transport::one_sided::{Frame, Stopping, Target};
use microserving_transport::{ByteRun, ChannelId, Refusal};
use xxhash_rust::xxh3::Xxh3;

use crate::clock::now;
use crate::control::Layout;
use crate::mailbox::Mailbox;
use crate::peer::{Peer, Standing};
use crate::pgas::{Pgas, SymmetricMemory};
use crate::shared::{ClaimWriter, Command, Shared};
use crate::world::World;

/// Rounds without anything to do before the thread looks less often.
const EAGER_ROUNDS: u32 = 200;
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
