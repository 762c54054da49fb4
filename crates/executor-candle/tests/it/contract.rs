//! Batches that break the contract are refused with their reason and change nothing.

use std::sync::Arc;

use candle_core::DType;
use microserving_executor::{Batch, BatchItem, Executor, ExecutorError, Sampler};
use microserving_executor_candle::{CandleConfig, CandleExecutor};
use microserving_protocol::{KvDtype, KvGeometry, KvMemory, MemoryKind, PageId, SamplingParams, TokenId};

use crate::memory::HeapMemory;
use crate::support::{Driver, pages, tokens};
use crate::tiny::tiny;

fn model() -> (tempfile::TempDir, CandleConfig) {
    let directory = tempfile::tempdir().unwrap();
    tiny("llama_tied").write_directory(directory.path(), DType::F32, 1);
    let config = CandleConfig::new(directory.path());
    (directory, config)
}

#[test]
fn malformed_items_are_named() {
    let (_directory, mut config) = model();
    config.max_context = Some(40);
    let mut driver = Driver::load(&config, 8);
    let before = driver.kv_bytes(&pages(0..8), 128);
    let mut check = |items: &[(&[TokenId], u32, &[PageId])], which: usize, what: &str| {
        let items = items
            .iter()
            .map(|&(tokens, position, pages)| BatchItem {
                tokens,
                position,
                pages,
                sampler: None,
                is_sent: false,
            })
            .collect();
        let mut layers = 0;
        match driver.executor.forward(&mut Batch { items }, &mut |_| layers += 1) {
            Err(ExecutorError::MalformedBatch { item, reason }) => {
                assert!(item == which && reason.contains(what), "item {item}: {reason}");
            }
            other => panic!("{what}: {other:?}"),
        }
        assert_eq!(layers, 0);
    };
    let (good, all) = (tokens(&[1, 2, 3]), pages(0..8));
    check(&[(&[], 0, &all)], 0, "no tokens");
    check(&[(&good, 0, &all[..1]), (&tokens(&[90]), 0, &all[1..2])], 1, "vocabulary");
    check(&[(&good, 38, &all)], 0, "context");
    check(&[(&good, u32::MAX, &all)], 0, "context");
    check(&[(&good, 14, &all[..1])], 0, "2 are needed");
    check(&[(&good, 0, &pages([8]))], 0, "outside the region");
    check(&[(&good, 0, &all[..1]), (&good, 16, &pages([3, 0]))], 1, "written twice");
    check(&[(&tokens(&[1; 20]), 0, &pages([3, 3]))], 0, "written twice");
    assert!(before == driver.kv_bytes(&all, 128), "a refused batch writes nothing");
    // Pages past what is needed may be anything; shared pages below the position are fine.
    let more = pages([0, 99]);
    let items = vec![BatchItem { tokens: &good, position: 0, pages: &more, sampler: None, is_sent: false }];
    driver.executor.forward(&mut Batch { items }, &mut |_| ()).unwrap();
}

#[test]
fn an_empty_batch_is_a_step() {
    let (_directory, config) = model();
    let mut driver = Driver::load(&config, 8);
    let mut layers = 0;
    let output = driver.executor.forward(&mut Batch::default(), &mut |_| layers += 1).unwrap();
    assert!(output.sampled.is_empty() && layers == 2);
}

#[test]
fn a_failed_sampler_ends_its_own_sequence_only() {
    let (_directory, config) = model();
    let mut driver = Driver::load(&config, 8);
    let prompt = tokens(&[4, 5, 6]);
    let expected = driver.greedy(&prompt, 1, 512, &pages(0..1));
    let mut bad = Sampler::new(SamplingParams { top_p: 2.0, ..SamplingParams::greedy() }, 0, &prompt);
    let mut good = Sampler::new(SamplingParams::greedy(), 0, &prompt);
    let (one, two, three) = (pages(1..2), pages(2..3), pages(3..4));
    let items = vec![
        BatchItem { tokens: &prompt, position: 0, pages: &one, sampler: Some(&mut bad), is_sent: false },
        BatchItem { tokens: &prompt, position: 0, pages: &two, sampler: None, is_sent: false },
        BatchItem { tokens: &prompt, position: 0, pages: &three, sampler: Some(&mut good), is_sent: false },
    ];
    let output = driver.executor.forward(&mut Batch { items }, &mut |_| ()).unwrap();
    assert!(matches!(output.sampled[0], Some(Err(_))));
    assert!(output.sampled[1].is_none());
    assert_eq!(output.sampled[2].clone().unwrap().unwrap().token, expected[0]);
}

/// More samplers than are computed at a time.
#[test]
fn many_samplers_get_their_own_logits() {
    let (_directory, config) = model();
    let mut driver = Driver::load(&config, 64);
    let prompts: Vec<_> = (0..40_u32).map(|i| tokens(&[i, i + 7, (i * 5) % 90])).collect();
    let expected: Vec<_> =
        prompts.iter().map(|prompt| driver.greedy(prompt, 1, 512, &pages(63..64))[0]).collect();
    let mut samplers: Vec<_> =
        prompts.iter().map(|prompt| Sampler::new(SamplingParams::greedy(), 0, prompt)).collect();
    let own: Vec<_> = (0..40).map(|i| pages(i..i + 1)).collect();
    let items = samplers
        .iter_mut()
        .enumerate()
        .map(|(i, sampler)| BatchItem {
            tokens: &prompts[i],
            position: 0,
            pages: &own[i],
            sampler: (i % 3 != 1).then_some(sampler),
            is_sent: false,
        })
        .collect();
    let output = driver.executor.forward(&mut Batch { items }, &mut |_| ()).unwrap();
    for (i, sampled) in output.sampled.into_iter().enumerate() {
        assert_eq!(sampled.map(|sampled| sampled.unwrap().token), (i % 3 != 1).then_some(expected[i]));
    }
}

#[test]
fn memory_must_fit() {
    let (_directory, config) = model();
    let mut executor = CandleExecutor::load(&config, &mut |_| ()).unwrap();
    let (prompt, first) = (tokens(&[1]), pages(0..1));
    let mut batch = Batch {
        items: vec![BatchItem { tokens: &prompt, position: 0, pages: &first, sampler: None, is_sent: false }],
    };
    assert!(matches!(executor.forward(&mut batch, &mut |_| ()), Err(ExecutorError::Memory { .. })));

    let geometry = KvGeometry { layout: executor.info().layout.clone(), num_pages: 4 };
    let small: Arc<dyn KvMemory> = Arc::new(HeapMemory::new(geometry.region_bytes() - 64, 0));
    let refused = executor.attach(geometry.clone(), small).unwrap_err();
    assert!(refused.to_string().contains("4 pages need"), "{refused}");

    let whole: Arc<dyn KvMemory> = Arc::new(HeapMemory::new(geometry.region_bytes(), 0));
    let mut other = geometry.clone();
    other.layout.dtype = KvDtype::F32;
    assert!(executor.attach(other, Arc::clone(&whole)).is_err());

    #[derive(Debug)]
    struct OnDevice(Arc<dyn KvMemory>);
    impl KvMemory for OnDevice {
        fn kind(&self) -> MemoryKind {
            MemoryKind::Cuda { ordinal: 0 }
        }
        fn num_bytes(&self) -> usize {
            self.0.num_bytes()
        }
        fn base_address(&self) -> usize {
            self.0.base_address()
        }
        fn read(&self, offset: usize, into: &mut [u8]) {
            self.0.read(offset, into);
        }
        fn write(&self, offset: usize, from: &[u8]) {
            self.0.write(offset, from);
        }
    }
    let refused = executor.attach(geometry.clone(), Arc::new(OnDevice(Arc::clone(&whole)))).unwrap_err();
    assert!(refused.to_string().contains("host memory"), "{refused}");

    executor.attach(geometry, whole).unwrap();
    executor.forward(&mut batch, &mut |_| ()).unwrap();
}
