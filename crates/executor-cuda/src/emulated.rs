//! The device on the CPU: kernels by their shim, and streams that do nothing until someone waits for it.
//!
//! Work is queued and done as late as it may be: only what an event or a stream's end needs that is waited for. A copy that should
//! have waited for a kernel, or memory that is reused too early, is then wrong in every run instead of in some.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use microserving_kernels::{Device, DevicePtr, Emulated, KernelError, Launch, Order};
use microserving_protocol::MemoryKind;

use crate::accelerator::{Accelerator, Event, Stream};

const DEVICE_ALIGN: usize = 256;
const HOST_ALIGN: usize = 64;

/// Work in a stream.
#[derive(Debug)]
enum Work {
    Kernel { launch: Launch, params: Vec<u8> },
    Copy { from: usize, to: usize, num_bytes: usize },
    Pass(Ticket),
    Wait(Ticket),
}

/// One recording of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticket {
    stream: Stream,
    number: u64,
}

#[derive(Debug, Default)]
struct Queues {
    compute: VecDeque<Work>,
    transfer: VecDeque<Work>,
    /// Recordings so far, and the last passed, by stream.
    recorded: [u64; 2],
    passed: [u64; 2],
    events: Vec<Option<Ticket>>,
    /// Sizes of what is allocated on the device.
    allocated: HashMap<usize, usize>,
}

impl Queues {
    fn of(&mut self, stream: Stream) -> &mut VecDeque<Work> {
        match stream {
            Stream::Compute => &mut self.compute,
            Stream::Transfer => &mut self.transfer,
        }
    }
}

/// The CPU as a device; it passes for CUDA's device 0.
#[derive(Debug)]
pub struct EmulatedDevice {
    kernels: Emulated,
    queues: Mutex<Queues>,
    num_allocations: AtomicUsize,
}

impl EmulatedDevice {
    /// Opens the kernels that were built for the CPU.
    ///
    /// # Errors
    /// If they are gone from the folder that they were built into.
    pub fn open(order: Order) -> Result<Self, KernelError> {
        Ok(Self {
            kernels: Emulated::open(order)?,
            queues: Mutex::default(),
            num_allocations: AtomicUsize::new(0),
        })
    }

    /// Returns how often device or host memory was allocated.
    #[must_use]
    pub fn num_allocations(&self) -> usize {
        self.num_allocations.load(Ordering::Relaxed)
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self, stream: Stream, work: Work) {
        self.queues().of(stream).push_back(work);
    }

    fn copy(&self, stream: Stream, from: usize, to: usize, num_bytes: usize) {
        self.queue(stream, Work::Copy { from, to, num_bytes });
    }

    /// Does what comes before a recording, and what that waits for.
    fn run_to(&self, queues: &mut Queues, ticket: Ticket) -> Result<(), KernelError> {
        while queues.passed[ticket.stream as usize] < ticket.number {
            let Some(work) = queues.of(ticket.stream).pop_front() else { break };
            self.run(queues, work)?;
        }
        Ok(())
    }

    fn run(&self, queues: &mut Queues, work: Work) -> Result<(), KernelError> {
        match work {
            Work::Pass(ticket) => queues.passed[ticket.stream as usize] = ticket.number,
            Work::Wait(ticket) => self.run_to(queues, ticket)?,
            // SAFETY: as whoever queued it has promised.
            Work::Kernel { launch, params } => unsafe { self.kernels.launch(&launch, &params)? },
            Work::Copy { from, to, num_bytes } => {
                // SAFETY: as whoever queued it has promised.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, num_bytes) };
            }
        }
        Ok(())
    }

    fn finish(&self, queues: &mut Queues, stream: Stream) -> Result<(), KernelError> {
        while let Some(work) = queues.of(stream).pop_front() {
            self.run(queues, work)?;
        }
        Ok(())
    }

    fn reserve(&self, num_bytes: usize, align: usize) -> Result<NonNull<u8>, KernelError> {
        self.num_allocations.fetch_add(1, Ordering::Relaxed);
        let refused = || KernelError::Device {
            kernel: "an allocation",
            reason: format!("there are no {num_bytes} bytes"),
        };
        let layout = Layout::from_size_align(num_bytes.max(1), align).map_err(|_| refused())?;
        // SAFETY: the layout has a size.
        NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)
    }
}

impl Device for EmulatedDevice {
    unsafe fn launch(&self, launch: &Launch, params: &[u8]) -> Result<(), KernelError> {
        self.queue(Stream::Compute, Work::Kernel { launch: *launch, params: params.to_vec() });
        Ok(())
    }
}

impl Accelerator for EmulatedDevice {
    fn kernels(&self) -> &dyn Device {
        self
    }

    fn name(&self) -> &str {
        "emulated"
    }

    fn memory_kind(&self) -> MemoryKind {
        MemoryKind::Cuda { ordinal: 0 }
    }

    fn allocate(&self, num_bytes: usize) -> Result<DevicePtr, KernelError> {
        let ptr = self.reserve(num_bytes, DEVICE_ALIGN)?;
        self.queues().allocated.insert(ptr.as_ptr() as usize, num_bytes);
        Ok(DevicePtr(ptr.as_ptr() as u64))
    }

    unsafe fn free(&self, ptr: DevicePtr) {
        let mut queues = self.queues();
        for stream in [Stream::Compute, Stream::Transfer] {
            // What failed was, or will be, told to whoever waits for it.
            let _ = self.finish(&mut queues, stream);
        }
        let at = ptr.0 as usize;
        let num_bytes = queues.allocated.remove(&at).expect("allocated here and given back once");
        let layout = Layout::from_size_align(num_bytes.max(1), DEVICE_ALIGN).expect("it was allocated so");
        // SAFETY: allocated with this layout, as the table says; nothing uses it, as the caller promises.
        unsafe { dealloc(at as *mut u8, layout) };
    }

    fn allocate_host(&self, num_bytes: usize) -> Result<NonNull<u8>, KernelError> {
        self.reserve(num_bytes, HOST_ALIGN)
    }

    unsafe fn free_host(&self, ptr: NonNull<u8>, num_bytes: usize) {
        let layout = Layout::from_size_align(num_bytes.max(1), HOST_ALIGN).expect("it was allocated so");
        // SAFETY: allocated with this layout, as the caller promises.
        unsafe { dealloc(ptr.as_ptr(), layout) };
    }

    unsafe fn pin(&self, _ptr: NonNull<u8>, _num_bytes: usize) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn unpin(&self, _ptr: NonNull<u8>) {}

    unsafe fn copy_in(
        &self,
        stream: Stream,
        to: DevicePtr,
        from: NonNull<u8>,
        num_bytes: usize,
    ) -> Result<(), KernelError> {
        self.copy(stream, from.as_ptr() as usize, to.0 as usize, num_bytes);
        Ok(())
    }

    unsafe fn copy_out(
        &self,
        stream: Stream,
        to: NonNull<u8>,
        from: DevicePtr,
        num_bytes: usize,
    ) -> Result<(), KernelError> {
        self.copy(stream, from.0 as usize, to.as_ptr() as usize, num_bytes);
        Ok(())
    }

    fn event(&self) -> Result<Event, KernelError> {
        let mut queues = self.queues();
        queues.events.push(None);
        Ok(Event(queues.events.len() - 1))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), KernelError> {
        let mut queues = self.queues();
        let number = queues.recorded[stream as usize] + 1;
        queues.recorded[stream as usize] = number;
        let ticket = Ticket { stream, number };
        queues.events[event.0] = Some(ticket);
        queues.of(stream).push_back(Work::Pass(ticket));
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), KernelError> {
        let mut queues = self.queues();
        if let Some(ticket) = queues.events[event.0] {
            queues.of(stream).push_back(Work::Wait(ticket));
        }
        Ok(())
    }

    fn wait_on_host(&self, event: Event) -> Result<(), KernelError> {
        let mut queues = self.queues();
        match queues.events[event.0] {
            Some(ticket) => self.run_to(&mut queues, ticket),
            None => Ok(()),
        }
    }

    fn synchronize(&self, stream: Stream) -> Result<(), KernelError> {
        self.finish(&mut self.queues(), stream)
    }
}
