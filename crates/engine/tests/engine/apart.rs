//! Executors that compute in memory of their own: what transfers read and write is copied, and only then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use microserving_engine::{Call, Engine};
use microserving_executor::{Batch, Executor, ExecutorError, ExecutorInfo, StepOutput, ToyExecutor};
use microserving_protocol::{KvGeometry, KvMemory, LayerId, PageId};
use microserving_testkit::PlainMemory;
use microserving_transport::LoopbackHub;

use crate::support::{PAGE, Rig, again, config, entropy, key, prompt, reference, start, toy};

/// A toy whose KV is in memory that no transport sees.
#[derive(Debug)]
struct Apart {
    toy: ToyExecutor,
    copies: Option<Copies>,
    /// It takes nothing over.
    is_deaf: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Copies {
    geometry: KvGeometry,
    own: Arc<PlainMemory>,
    region: Arc<dyn KvMemory>,
}

impl Copies {
    fn copy(&self, layer: LayerId, page: PageId, from: &dyn KvMemory, to: &dyn KvMemory) {
        let at = self.geometry.slot_offset(layer, page, 0, 0, 0);
        let mut bytes = vec![0; self.geometry.layout.page_bytes()];
        from.read(at, &mut bytes);
        to.write(at, &bytes);
    }

    fn layers(&self) -> impl Iterator<Item = LayerId> {
        (0..self.geometry.layout.num_layers).map(LayerId)
    }
}

impl Executor for Apart {
    fn info(&self) -> &ExecutorInfo {
        self.toy.info()
    }

    fn attach(&mut self, geometry: KvGeometry, region: Arc<dyn KvMemory>) -> Result<(), ExecutorError> {
        let own = PlainMemory::new(geometry.region_bytes());
        self.toy.attach(geometry.clone(), Arc::clone(&own) as Arc<dyn KvMemory>)?;
        self.copies = Some(Copies { geometry, own, region });
        Ok(())
    }

    fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError> {
        let copies = self.copies.as_ref().expect("attached");
        let page_size = copies.geometry.layout.page_size as usize;
        let sent = batch.items.iter().filter(|item| item.is_sent).flat_map(|item| {
            let end = item.position as usize + item.tokens.len();
            item.pages[item.position as usize / page_size..end.div_ceil(page_size)].to_vec()
        });
        let sent: Vec<PageId> = sent.collect();
        self.toy.forward(batch, &mut |layer| {
            for &page in &sent {
                copies.copy(layer, page, &*copies.own, &*copies.region);
            }
            on_layer(layer);
        })
    }

    fn import(&mut self, pages: &[PageId]) -> Result<(), ExecutorError> {
        if self.is_deaf.load(Ordering::Relaxed) {
            return Err(ExecutorError::Compute { reason: "a test wants it so".into() });
        }
        let copies = self.copies.as_ref().expect("attached");
        for layer in copies.layers() {
            for &page in pages {
                copies.copy(layer, page, &*copies.region, &*copies.own);
            }
        }
        Ok(())
    }

    fn export(&mut self, pages: &[PageId]) -> Result<(), ExecutorError> {
        let copies = self.copies.as_ref().expect("attached");
        for layer in copies.layers() {
            for &page in pages {
                copies.copy(layer, page, &*copies.own, &*copies.region);
            }
        }
        Ok(())
    }
}

fn rig(is_deaf: &Arc<AtomicBool>) -> Rig {
    let hub = LoopbackHub::with_checksums();
    let mut rig = Rig::with(hub.clone(), [(config("p", 64), toy()), (config("d", 64), toy())]);
    for (engine, (name, seed)) in rig.engines.iter_mut().zip([("p", 1), ("d", 2)]) {
        let apart = Apart {
            toy: ToyExecutor::new(toy()).expect("a sound toy"),
            copies: None,
            is_deaf: Arc::clone(is_deaf),
        };
        *engine =
            Engine::new(config(name, 64), Box::new(apart), Box::new(hub.transport(name)), entropy(seed))
                .expect("sound");
    }
    rig
}

#[test]
fn splits_equal_one_engine_whether_computed_or_cached() {
    for len in [2, PAGE, PAGE + 1, 3 * PAGE, 100] {
        for end in [1, len / 2, len - 1] {
            let call = start(Some(key("a")), &prompt(len), 0, 12);
            let alone = reference(&call);
            let mut rig = rig(&Arc::default());
            // The sender has computed the prompt for itself before: what it puts is of an earlier step.
            for warm in [false, true] {
                if warm {
                    let id =
                        rig.call(0, Call::StartGenerate(Box::new(start(Some(key("w")), &prompt(len), 0, 1))));
                    rig.settle();
                    assert!(rig.output(id).error.is_none());
                }
                let name = if warm { "b" } else { "a" };
                let (_, output) = rig.disaggregate(0, 1, end, start(Some(key(name)), &prompt(len), 0, 12));
                assert_eq!(output.tokens, alone.tokens, "length {len}, end {end}, warm {warm}");
            }
            // And back: what the receiver took over and computed is sent on from its cache.
            let (_, output) = rig.disaggregate(1, 0, end, start(Some(key("c")), &prompt(len), 0, 12));
            assert_eq!(output.tokens, alone.tokens, "length {len}, end {end}, back");
        }
    }
}

#[test]
fn what_cannot_be_taken_over_is_computed() {
    let call = start(Some(key("a")), &prompt(100), 0, 12);
    let alone = reference(&call);
    let mut rig = rig(&Arc::new(AtomicBool::new(true)));
    let (_, output) = rig.disaggregate(0, 1, 99, again(&call));
    assert_eq!(output.tokens, alone.tokens);
    let usage = output.usage.expect("done");
    assert_eq!((usage.received_tokens, usage.computed_tokens), (0, 100));
    rig.assert_idle();
}
