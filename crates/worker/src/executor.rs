//! The worker's executor, as its front sees it.

use std::io;
use std::sync::Arc;

use microserving_executor::{Batch, Executor, ExecutorError, ExecutorInfo, StepOutput};
use microserving_protocol::{KvGeometry, KvMemory, LayerId, PageId};

use crate::hello::put_layout;
use crate::lost::LostWorker;
use crate::steps::{
    ATTACH, DONE, EXPORT, FAILED, FORWARD, IMPORT, LAYER, Row, STEPPED, put_batch, take_error, take_layer,
    take_stepped,
};
use crate::wire::{Frames, In, Malformed, Out};

/// Computes in a worker; samplers stay here and draw from what the worker found of the logits.
#[derive(Debug)]
pub struct RemoteExecutor {
    frames: Frames,
    info: ExecutorInfo,
    lost: LostWorker,
    /// The last request, kept for its memory.
    memory: Vec<u8>,
}

impl RemoteExecutor {
    pub(crate) fn new(frames: Frames, info: ExecutorInfo, lost: LostWorker) -> Self {
        Self { frames, info, lost, memory: Vec::new() }
    }

    fn out(&mut self, kind: u8) -> Out {
        Out::reusing(std::mem::take(&mut self.memory), kind)
    }

    fn send(&mut self, out: Out) -> Result<(), ExecutorError> {
        match out.send(&mut self.frames.stream()) {
            Ok(memory) => {
                self.memory = memory;
                Ok(())
            }
            Err(error) => Err(gone(&self.lost, &error)),
        }
    }

    /// Sends a request that is answered by no more than that it is done.
    fn ask(&mut self, out: Out) -> Result<(), ExecutorError> {
        self.send(out)?;
        let Self { frames, lost, .. } = self;
        let answer = frames.next().and_then(|(kind, mut body)| match kind {
            DONE => Ok(Ok(())),
            FAILED => Ok(Err(take_error(&mut body)?)),
            kind => Err(astray(kind)),
        });
        answer.unwrap_or_else(|error| Err(gone(lost, &error)))
    }

    fn pages(&mut self, kind: u8, pages: &[PageId]) -> Result<(), ExecutorError> {
        let mut out = self.out(kind);
        out.u32s(pages.iter().map(|page| page.0));
        self.ask(out)
    }
}

/// What a step of the worker came to.
type Stepped = Result<(Option<std::time::Duration>, Vec<Row>), ExecutorError>;

/// Hears a step to its end.
fn hear_step(frames: &mut Frames, on_layer: &mut dyn FnMut(LayerId)) -> io::Result<Stepped> {
    loop {
        let (kind, mut body) = frames.next()?;
        match kind {
            LAYER => on_layer(take_layer(&mut body)?),
            STEPPED => return Ok(Ok(take_stepped(&mut body)?)),
            FAILED => return Ok(Err(take_error(&mut body)?)),
            kind => return Err(astray(kind)),
        }
    }
}

fn astray(kind: u8) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("frame {kind} answers another request"))
}

/// Notes that the worker is gone; there is no way back to a stream that broke off within a frame.
fn gone(lost: &LostWorker, error: &io::Error) -> ExecutorError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => lost.set("its process has ended"),
        _ => lost.set(error.to_string()),
    }
    let reason = lost.reason().unwrap_or_default();
    ExecutorError::Device { reason: format!("the worker is gone: {reason}") }
}

impl Executor for RemoteExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    /// Has the worker compute in the region that its transport has allocated; `memory` is that region as its front sees it.
    fn attach(&mut self, geometry: KvGeometry, memory: Arc<dyn KvMemory>) -> Result<(), ExecutorError> {
        if memory.num_bytes() < geometry.region_bytes() {
            let (there, needed) = (memory.num_bytes(), geometry.region_bytes());
            return Err(ExecutorError::Memory { reason: format!("{there} bytes, {needed} are needed") });
        }
        let mut out = self.out(ATTACH);
        put_layout(&mut out, &geometry.layout);
        out.u32(geometry.num_pages);
        self.ask(out)
    }

    fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError> {
        let mut out = self.out(FORWARD);
        put_batch(&mut out, batch, self.info.vocab_size);
        self.send(out)?;
        let stepped = hear_step(&mut self.frames, on_layer);
        let (modelled, rows) = stepped.unwrap_or_else(|error| Err(gone(&self.lost, &error)))?;
        if rows.len() != batch.items.len() {
            let error = Malformed("there are not as many rows as items");
            return Err(gone(&self.lost, &error.into()));
        }
        if !batch.items.iter().any(|item| item.is_sent) {
            // Nobody had to hear of them earlier.
            (0..self.info.layout.num_layers).map(LayerId).for_each(on_layer);
        }
        let items = batch.items.iter_mut().zip(rows);
        let sampled = items.map(|(item, row)| match (&mut item.sampler, row) {
            (Some(sampler), Some(found)) => Some(found.and_then(|found| sampler.draw(found))),
            _ => None,
        });
        Ok(StepOutput { sampled: sampled.collect(), modelled })
    }

    fn import(&mut self, pages: &[PageId]) -> Result<(), ExecutorError> {
        self.pages(IMPORT, pages)
    }

    fn export(&mut self, pages: &[PageId]) -> Result<(), ExecutorError> {
        self.pages(EXPORT, pages)
    }

    fn lost(&self) -> Option<String> {
        self.lost.reason()
    }
}

/// Reads the pages of an import or an export.
pub(crate) fn take_pages(body: &mut In<'_>, pages: &mut Vec<PageId>) -> Result<(), Malformed> {
    pages.clear();
    body.u32s(pages, PageId)?;
    body.end()
}
