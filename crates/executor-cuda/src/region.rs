//! The KV region: on the device, where a transport reads and writes it itself, or in host memory, with a copy on the device.
//!
//! ```text
//! transport      host region    ── import, when a peer has written pages ──▶    device copy      kernels
//!                               ◀── export, layer by layer, of what is sent ──
//! ```
//!
//! Between the two, the device's copy is right for all that this engine computed, the host's for all that arrived. The engine says
//! when either must be made so for the other.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use microserving_executor::ExecutorError;
use microserving_kernels::{DevicePtr, KernelError};
use microserving_protocol::{KvGeometry, KvMemory, LayerId, MemoryKind, PageId};

use crate::accelerator::{Accelerator, Buffer, Event, Stream};
use crate::model::failed;

/// Where KV lies.
pub(crate) struct Region {
    geometry: KvGeometry,
    memory: Arc<dyn KvMemory>,
    accelerator: Arc<dyn Accelerator>,
    copy: Option<DeviceCopy>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("memory", &self.memory)
            .field("copy", &self.copy)
            .finish_non_exhaustive()
    }
}

/// What stands in for a region in host memory.
#[derive(Debug)]
struct DeviceCopy {
    buffer: Buffer,
    is_pinned: bool,
    imported: Event,
    /// Scratch: pages in order.
    pages: Vec<PageId>,
}

/// The two ways between host and device.
#[derive(Clone, Copy, Debug)]
enum Way {
    In,
    Out,
}

impl Region {
    /// Takes a region that a transport has allocated.
    pub(crate) fn new(
        accelerator: &Arc<dyn Accelerator>,
        geometry: KvGeometry,
        memory: Arc<dyn KvMemory>,
    ) -> Result<Self, ExecutorError> {
        let refused = |reason: String| Err(ExecutorError::Memory { reason });
        let num_bytes = geometry.region_bytes();
        if memory.num_bytes() < num_bytes {
            let (there, pages) = (memory.num_bytes(), geometry.num_pages);
            return refused(format!("{there} bytes, {pages} pages need {num_bytes}"));
        }
        if u64::from(geometry.num_pages) * u64::from(geometry.layout.page_size) >= u64::from(u32::MAX) {
            return refused(format!("{} pages have more slots than can be numbered", geometry.num_pages));
        }
        if !memory.base_address().is_multiple_of(64) {
            return refused("the region does not begin on a multiple of 64 bytes".into());
        }
        let copy = if memory.kind() == accelerator.memory_kind() {
            None
        } else if memory.kind() == MemoryKind::Host {
            Some(DeviceCopy::new(accelerator, &*memory, num_bytes)?)
        } else {
            return refused(format!(
                "{:?} memory, the device addresses {:?}",
                memory.kind(),
                accelerator.memory_kind()
            ));
        };
        Ok(Self { geometry, memory, accelerator: Arc::clone(accelerator), copy })
    }

    pub(crate) const fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Says whether the step at hand has pages that [`Self::send_layer`] copies.
    pub(crate) fn is_sending(&self) -> bool {
        self.copy.as_ref().is_some_and(|copy| !copy.pages.is_empty())
    }

    /// Returns a layer's address on the device.
    pub(crate) fn layer(&self, layer: usize) -> DevicePtr {
        let offset = self.geometry.page_offset(LayerId(layer as u32), PageId(0));
        match &self.copy {
            Some(copy) => copy.buffer.at(offset),
            None => DevicePtr((self.memory.base_address() + offset) as u64),
        }
    }

    /// Copies pages that others have written to the device; what is computed from now on sees them.
    pub(crate) fn import(&mut self, pages: &[PageId]) -> Result<(), ExecutorError> {
        self.check(pages)?;
        let Some(imported) = self.copy.as_ref().map(|copy| copy.imported) else { return Ok(()) };
        self.sort(pages.iter().copied());
        for layer in 0..self.geometry.layout.num_layers {
            self.copy(Way::In, LayerId(layer)).map_err(failed)?;
        }
        let accelerator = &self.accelerator;
        let queued = accelerator.record(imported, Stream::Transfer);
        queued.and_then(|()| accelerator.wait(Stream::Compute, imported)).map_err(failed)
    }

    /// Copies pages that were computed in earlier steps to the host, and waits for it.
    pub(crate) fn export(&mut self, pages: &[PageId]) -> Result<(), ExecutorError> {
        self.check(pages)?;
        if self.copy.is_none() {
            return Ok(());
        }
        self.sort(pages.iter().copied());
        for layer in 0..self.geometry.layout.num_layers {
            self.copy(Way::Out, LayerId(layer)).map_err(failed)?;
        }
        self.accelerator.synchronize(Stream::Transfer).map_err(failed)
    }

    /// Names the pages that [`Self::send_layer`] copies.
    pub(crate) fn send(&mut self, pages: impl Iterator<Item = PageId>) {
        self.sort(pages);
    }

    /// Queues the copy of a layer of what is sent.
    pub(crate) fn send_layer(&self, layer: usize) -> Result<(), KernelError> {
        self.copy(Way::Out, LayerId(layer as u32))
    }

    fn check(&self, pages: &[PageId]) -> Result<(), ExecutorError> {
        let num_pages = self.geometry.num_pages;
        match pages.iter().find(|page| page.0 >= num_pages) {
            Some(page) => Err(ExecutorError::Memory {
                reason: format!("page {page} is outside the region of {num_pages}"),
            }),
            None => Ok(()),
        }
    }

    fn sort(&mut self, pages: impl Iterator<Item = PageId>) {
        if let Some(copy) = &mut self.copy {
            copy.pages.clear();
            copy.pages.extend(pages);
            copy.pages.sort_unstable();
            copy.pages.dedup();
        }
    }

    /// Queues the copies of one layer of the pages named last, neighbours at once.
    fn copy(&self, way: Way, layer: LayerId) -> Result<(), KernelError> {
        let Some(copy) = &self.copy else { return Ok(()) };
        let page_bytes = self.geometry.layout.page_bytes();
        for run in copy.pages.chunk_by(|a, b| a.0 + 1 == b.0) {
            let offset = self.geometry.page_offset(layer, run[0]);
            let num_bytes = run.len() * page_bytes;
            let host = NonNull::new((self.memory.base_address() + offset) as *mut u8);
            let host = host.expect("a region is not at address zero");
            let (device, stream) = (copy.buffer.at(offset), Stream::Transfer);
            // SAFETY: the pages were checked, so both ranges lie in their regions; that no one else touches the host's is the rule of
            // `KvMemory` and of whoever imports, exports or sends; the device's copy has one writer at a time by events.
            unsafe {
                match way {
                    Way::In => self.accelerator.copy_in(stream, device, host, num_bytes)?,
                    Way::Out => self.accelerator.copy_out(stream, host, device, num_bytes)?,
                }
            }
        }
        Ok(())
    }
}

impl DeviceCopy {
    fn new(
        accelerator: &Arc<dyn Accelerator>,
        memory: &dyn KvMemory,
        num_bytes: usize,
    ) -> Result<Self, ExecutorError> {
        let refused = |error: KernelError| ExecutorError::Memory {
            reason: format!("the region's copy on the device, {num_bytes} bytes: {error}"),
        };
        let buffer = Buffer::new(accelerator, num_bytes).map_err(refused)?;
        let imported = accelerator.event().map_err(refused)?;
        let host = NonNull::new(memory.base_address() as *mut u8);
        let host =
            host.ok_or_else(|| ExecutorError::Memory { reason: "the region is at address zero".into() })?;
        // SAFETY: the region keeps its memory mapped, and unpins it when it is dropped.
        let pinned = unsafe { accelerator.pin(host, num_bytes) };
        if let Err(error) = &pinned {
            tracing::warn!(%error, "the KV region cannot be pinned: transfers are slower");
        }
        Ok(Self { buffer, is_pinned: pinned.is_ok(), imported, pages: Vec::new() })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Some(copy) = &self.copy else { return };
        // What is queued may still copy from or to the host; an error has no one left to hear it.
        let _ = self.accelerator.synchronize(Stream::Transfer);
        if copy.is_pinned
            && let Some(host) = NonNull::new(self.memory.base_address() as *mut u8)
        {
            // SAFETY: pinned by `new`, unpinned once; no copy is queued.
            unsafe { self.accelerator.unpin(host) };
        }
    }
}
