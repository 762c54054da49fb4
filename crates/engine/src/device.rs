//! The device beneath an engine, and how an engine outlives it.
//!
//! Executor, transport and the region between them come and go together: they may live in a process of their own, and that
//! process may end (docs/adr/020). What is left then is what the heart itself holds, tokens and samplers, and that is enough
//! to compute everything again:
//!
//! ```text
//!  lost      generations    preempted, with their tokens so far; they wait
//!            reservations   gone; a start that waits for one is computed here
//!            sends          failed; their callers try again
//!            cache          empty; quarantined pages are free, as no write reaches a region that is gone
//!            incarnation    another: addresses of before are stale
//!  replaced  what waits is computed on the new device; reservations and sends are taken again
//! ```

use std::fmt;
use std::sync::Arc;

use microserving_executor::Executor;
use microserving_kvcache::lifecycle;
use microserving_protocol::{Generation, Incarnation, KvGeometry, KvMemory};
use microserving_transport::KvTransport;

use crate::engine::StartError;
use crate::gatekeeper::Gatekeeper;
use crate::sequence::{Pages, Slot, State, Work};
use crate::{Engine, EngineError, Reply};

/// An executor and a transport, with the region that one allocated and the other computes in.
#[derive(Debug)]
pub struct Device {
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) transport: Box<dyn KvTransport>,
    pub(crate) geometry: KvGeometry,
    pub(crate) memory: Arc<dyn KvMemory>,
}

impl Device {
    /// Allocates a region of `num_pages` pages from the transport and gives it to the executor. May take as long as either likes.
    ///
    /// # Errors
    /// [`StartError::Region`] or [`StartError::Executor`].
    pub fn join(
        mut executor: Box<dyn Executor>,
        mut transport: Box<dyn KvTransport>,
        num_pages: u32,
    ) -> Result<Self, StartError> {
        let geometry = KvGeometry { layout: executor.info().layout.clone(), num_pages };
        let num_bytes = geometry.region_bytes();
        let memory = transport
            .allocate_region(num_bytes)
            .map_err(|source| StartError::Region { num_bytes, source })?;
        executor.attach(geometry.clone(), Arc::clone(&memory)).map_err(StartError::Executor)?;
        Ok(Self { executor, transport, geometry, memory })
    }
}

/// What a transport calls when it has news, kept for the next transport.
#[derive(Clone)]
pub(crate) struct Waker(pub(crate) Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}

impl Engine {
    /// Puts another device in the place of the one that was lost, or of one that still works: that one is given up as if it were lost.
    ///
    /// # Errors
    /// [`EngineError::InvalidField`] if it runs another model, or has another number of pages. Nothing is changed then.
    pub fn replace_device(&mut self, device: Device) -> Result<(), EngineError> {
        let differs =
            |field, reason: &str| Err(EngineError::InvalidField { field, reason: reason.to_owned() });
        if *device.executor.info() != self.info.executor {
            return differs("executor", "the new device runs another model, or in another layout");
        }
        if device.geometry != self.geometry {
            return differs("num_pages", "the new device has another number of pages");
        }
        if device.transport.name() != self.info.transport {
            return differs("transport", "the new device has another one");
        }
        if !self.device_lost {
            self.lose_device("it is replaced");
        }
        let Device { executor, transport, geometry: _, memory } = device;
        // The region of the old one is unmapped last: nothing refers to it any more.
        (self.executor, self.transport, self.memory) = (executor, transport, memory);
        self.transport.set_admission(Arc::clone(&self.gate) as Arc<_>);
        if let Some(waker) = &self.waker {
            self.transport.set_waker(Arc::clone(&waker.0));
        }
        for sequence in self.sequences.values_mut() {
            // Nobody could have let them in.
            sequence.since = self.now;
        }
        self.device_lost = false;
        tracing::info!(incarnation = %self.info.incarnation, "the device is replaced");
        Ok(())
    }

    /// Notices that the device is gone, once.
    pub(crate) fn look_after_device(&mut self) {
        if !self.device_lost
            && let Some(reason) = self.executor.lost()
        {
            self.lose_device(&reason);
        }
    }

    /// Refuses what needs a device at once.
    pub(crate) fn refuse_without_device(&self) -> Result<(), EngineError> {
        if self.device_lost { Err(self.no_room("the device is gone and not yet replaced")) } else { Ok(()) }
    }

    fn lose_device(&mut self, reason: &str) {
        tracing::error!(
            reason,
            num_sequences = self.sequences.len(),
            "the device is gone; what runs is computed again on the next"
        );
        self.device_lost = true;
        self.counters.devices_lost += 1;
        self.info.incarnation = Incarnation(self.mint.draw());
        self.gate = Arc::new(Gatekeeper::new(
            self.entropy.cluster_key.clone(),
            self.info.engine_id.clone(),
            self.info.incarnation,
        ));
        let slots: Vec<Slot> = self.sequences.keys().copied().collect();
        for slot in slots {
            let Some(sequence) = self.sequences.get(&slot) else { continue };
            let seq_id = sequence.key.seq_id.clone();
            match sequence.work {
                Work::Generate(_) => self.lose_pages(slot),
                Work::Receive(_) => self.lose_reservation(slot),
                Work::Send(_) => {
                    self.counters.transfers_lost += 1;
                    self.fail_send(slot, &EngineError::TransferLost { seq_id });
                }
            }
        }
        // No transfer reads or writes a region that is gone.
        self.closing.clear();
        self.channels.clear();
        let quarantined: Vec<Generation> = self.quarantined.keys().copied().collect();
        for generation in quarantined {
            self.release_quarantine(generation);
        }
        self.receiving.clear();
        self.cache.clear_unused();
        let counts = self.cache.counts();
        if counts.free != counts.total {
            tracing::error!(?counts, "pages are held though their device is gone");
            debug_assert!(false, "pages are held though their device is gone: {counts:?}");
        }
    }

    /// Preempts a generation, whatever it is at.
    fn lose_pages(&mut self, slot: Slot) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        match sequence.state {
            State::Prefilling | State::Decoding => self.preempt(slot),
            // Admitted before, and to be let in again before others.
            State::Waiting if !matches!(sequence.pages, Pages::Nothing) => self.preempt(slot),
            _ => {
                if let Pages::Table(table) = sequence.pages.take() {
                    self.cache.release_table(table);
                }
                sequence.computed = 0;
            }
        }
    }

    /// Ends a reservation; whoever waits for it gets what is computed here, or hears that it is lost.
    fn lose_reservation(&mut self, slot: Slot) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let seq_id = sequence.key.seq_id.clone();
        let pages = sequence.pages.take();
        sequence.computed = 0;
        let Work::Receive(reception) = &mut sequence.work else { return };
        (reception.matched, reception.generation) = (0, None);
        reception.stage = lifecycle::State::Accepted { received: false };
        let is_wanted = reception.start.is_some();
        match pages {
            Pages::Promised(reservation) => {
                if let Err(error) = self.cache.cancel(reservation) {
                    tracing::error!(%error, "a reservation is not this cache's");
                }
            }
            Pages::Table(table) => self.cache.release_table(table),
            Pages::Nothing => {}
        }
        self.counters.transfers_lost += 1;
        if is_wanted {
            self.proceed(slot);
        } else {
            self.fail_reception(slot, &EngineError::TransferLost { seq_id });
        }
    }

    pub(crate) fn take_device(&mut self, id: crate::CallId, device: Device) {
        let replaced = self.replace_device(device).map(|()| Reply::DeviceReplaced);
        self.reply(id, replaced);
    }
}
