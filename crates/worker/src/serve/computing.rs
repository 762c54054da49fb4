//! The thread that computes.

use std::io;
use std::os::unix::net::UnixStream;

use microserving_executor::{Batch, BatchItem, Executor, ExecutorError, NotedSampler};
use microserving_protocol::KvGeometry;

use super::{Ended, Region};
use crate::WorkerError;
use crate::executor::take_pages;
use crate::hello::take_layout;
use crate::steps::{
    ATTACH, DONE, EXPORT, FAILED, FORWARD, IMPORT, Items, LAYER, STEPPED, put_error, put_stepped,
};
use crate::wire::{Frames, In, Malformed, Out};

/// Answers the front until it leaves.
pub(super) fn run(
    mut frames: Frames,
    executor: Box<dyn Executor>,
    region: &Region,
) -> Result<Ended, WorkerError> {
    let writer = frames.stream().try_clone().map_err(WorkerError::system("sharing the front's stream"))?;
    let mut bench =
        Bench { executor, writer, items: Items::default(), pages: Vec::new(), memory: Vec::new() };
    loop {
        let answered = frames.next().and_then(|(kind, mut body)| bench.answer(kind, &mut body, region));
        if let Err(error) = answered {
            return left(error);
        }
    }
}

/// Says what the end of a stream means.
pub(super) fn left(error: io::Error) -> Result<Ended, WorkerError> {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            Ok(Ended::FrontLeft)
        }
        _ => Err(WorkerError::system("speaking with the front")(error)),
    }
}

struct Bench {
    executor: Box<dyn Executor>,
    writer: UnixStream,
    /// These are kept for their memory.
    items: Items,
    pages: Vec<microserving_protocol::PageId>,
    memory: Vec<u8>,
}

impl Bench {
    fn answer(&mut self, kind: u8, body: &mut In<'_>, region: &Region) -> io::Result<()> {
        let done = match kind {
            FORWARD => return self.step(body),
            IMPORT => {
                take_pages(body, &mut self.pages)?;
                self.executor.import(&self.pages)
            }
            EXPORT => {
                take_pages(body, &mut self.pages)?;
                self.executor.export(&self.pages)
            }
            ATTACH => {
                let geometry = KvGeometry { layout: take_layout(body)?, num_pages: body.u32()? };
                body.end()?;
                match region.get() {
                    Some(memory) => self.executor.attach(geometry, memory.clone()),
                    None => Err(ExecutorError::Memory { reason: "no region is allocated".into() }),
                }
            }
            _ => return Err(Malformed("no such request").into()),
        };
        self.send(match done {
            Ok(()) => Out::new(DONE),
            Err(error) => failed(&error),
        })
    }

    fn step(&mut self, body: &mut In<'_>) -> io::Result<()> {
        self.items.read(body)?;
        let Items { items, tokens, pages } = &self.items;
        let mut samplers: Vec<Option<NotedSampler>> =
            items.iter().map(|item| item.need.map(NotedSampler::new)).collect();
        let (mut first_token, mut first_page) = (0, 0);
        let batch_items = items.iter().zip(&mut samplers).map(|(item, sampler)| {
            let batch_item = BatchItem {
                tokens: &tokens[first_token..item.tokens_end],
                position: item.position,
                pages: &pages[first_page..item.pages_end],
                sampler: sampler.as_mut().map(NotedSampler::as_sampler),
                is_sent: item.is_sent,
            };
            (first_token, first_page) = (item.tokens_end, item.pages_end);
            batch_item
        });
        let mut batch = Batch { items: batch_items.collect() };
        // Without a transfer nobody needs to hear of layers before the end.
        let is_told = items.iter().any(|item| item.is_sent);
        let mut untold = None;
        let writer = &mut self.writer;
        let result = self.executor.forward(&mut batch, &mut |layer| {
            if is_told && untold.is_none() {
                let mut out = Out::new(LAYER);
                out.u32(layer.0);
                untold = out.send(writer).err();
            }
        });
        drop(batch);
        if let Some(error) = untold {
            return Err(error);
        }
        let out = match result {
            Ok(output) => {
                let mut out = Out::reusing(std::mem::take(&mut self.memory), STEPPED);
                let rows = samplers.into_iter().map(|sampler| sampler.and_then(NotedSampler::found));
                put_stepped(&mut out, output.modelled, rows);
                out
            }
            Err(error) => failed(&error),
        };
        self.send(out)
    }

    fn send(&mut self, out: Out) -> io::Result<()> {
        self.memory = out.send(&mut self.writer)?;
        Ok(())
    }
}

fn failed(error: &ExecutorError) -> Out {
    let mut out = Out::new(FAILED);
    put_error(&mut out, error);
    out
}
