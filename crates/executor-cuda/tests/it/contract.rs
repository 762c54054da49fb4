//! Refusals, and what a step may not do.

use std::sync::Arc;

use microserving_executor::{Batch, BatchItem, Executor, ExecutorError};
use microserving_executor_cuda::{Accelerator, CudaConfig, CudaExecutor, EmulatedDevice};
use microserving_kernels::Order;
use microserving_protocol::{KvGeometry, KvMemory, MemoryKind, PageId, SamplingParams, TokenId};

use crate::memory::HeapMemory;
use crate::support::{PLAIN, cuda, cuda_on, pages, tokens, write};
use crate::tiny::{Tiny, tiny};

fn device() -> Arc<EmulatedDevice> {
    Arc::new(EmulatedDevice::open(Order::Forward).unwrap())
}

#[test]
fn options_and_sizes_are_refused_by_name() {
    let mut odd = tiny("llama3_scaled_untied").config;
    odd["head_dim"] = 12.into();
    let (directory, odd) = (write(&tiny("qwen3")), write(&Tiny::new(odd)));
    let device: Arc<dyn Accelerator> = device();
    let check = |change: &dyn Fn(&mut CudaConfig), what: &str| {
        let mut config = CudaConfig::new(directory.path());
        change(&mut config);
        let error = CudaExecutor::load(&device, &config, &mut |_| ()).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    check(&|config| config.page_size = 0, "page_size is 0");
    check(&|config| config.max_batch_tokens = 65_536, "max_batch_tokens is 65536, outside 1..=65535");
    check(&|config| config.max_context = Some(257), "max_context is 257, the model allows 1..=256");
    check(&|config| config.path = odd.path().to_owned(), "head_dim is 12, must be a multiple of 8");
    check(&|config| config.path.push("none"), "No such file");
    check(
        &|config| (config.dtype, config.tensor_cores) = (PLAIN.dtype, Some(true)),
        "tensor_cores: f32 has none",
    );
}

#[test]
fn malformed_items_are_named() {
    let directory = write(&tiny("qwen3"));
    let mut driver = cuda(directory.path(), PLAIN, 4);
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
        match driver.executor.forward(&mut Batch { items }, &mut |_| panic!("nothing is computed")) {
            Err(ExecutorError::MalformedBatch { item, reason }) => {
                assert!(item == which && reason.contains(what), "item {item}: {reason}");
            }
            other => panic!("{what}: {other:?}"),
        }
    };
    let (good, all) = (tokens(1, 3), pages(0..4));
    check(&[(&[], 0, &all)], 0, "no tokens");
    check(&[(&good, 0, &all[..1]), (&[TokenId(85)], 0, &all[1..2])], 1, "vocabulary");
    check(&[(&good, 254, &all)], 0, "context");
    check(&[(&good, 14, &all[..1])], 0, "2 are needed");
    check(&[(&good, 0, &pages([4]))], 0, "outside the region");
    check(&[(&good, 0, &all[..1]), (&good, 16, &pages([3, 0]))], 1, "written twice");
    let mut layers = 0;
    let output = driver.executor.forward(&mut Batch::default(), &mut |_| layers += 1).unwrap();
    assert!(output.sampled.is_empty() && layers == 2, "an empty batch is a step");
}

#[test]
fn memory_must_fit() {
    #[derive(Debug)]
    struct Elsewhere;
    impl KvMemory for Elsewhere {
        fn kind(&self) -> MemoryKind {
            MemoryKind::Cuda { ordinal: 1 }
        }
        fn num_bytes(&self) -> usize {
            1 << 30
        }
        fn base_address(&self) -> usize {
            1 << 20
        }
        fn read(&self, _: usize, _: &mut [u8]) {
            unreachable!("refused");
        }
        fn write(&self, _: usize, _: &[u8]) {
            unreachable!("refused");
        }
    }
    let directory = write(&tiny("qwen3"));
    let device: Arc<dyn Accelerator> = device();
    let mut executor = CudaExecutor::load(&device, &CudaConfig::new(directory.path()), &mut |_| ()).unwrap();
    let (prompt, first) = (tokens(1, 1), pages(0..1));
    let item = BatchItem { tokens: &prompt, position: 0, pages: &first, sampler: None, is_sent: false };
    let mut batch = Batch { items: vec![item] };
    assert!(matches!(executor.forward(&mut batch, &mut |_| ()), Err(ExecutorError::Memory { .. })));
    assert!(matches!(executor.import(&first), Err(ExecutorError::Memory { .. })));

    let geometry = KvGeometry { layout: executor.info().layout.clone(), num_pages: 4 };
    let mut refused = |geometry: &KvGeometry, memory: Arc<dyn KvMemory>, what: &str| {
        let error = executor.attach(geometry.clone(), memory).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    let heap = |num_bytes| Arc::new(HeapMemory::new(num_bytes, 0));
    refused(&geometry, heap(geometry.region_bytes() - 64), "4 pages need");
    refused(
        &geometry,
        Arc::new(Elsewhere),
        "Cuda { ordinal: 1 } memory, the device addresses Cuda { ordinal: 0 }",
    );
    let mut other = geometry.clone();
    other.layout.page_size = 8;
    refused(&other, heap(geometry.region_bytes()), "not the model's");
    executor.attach(geometry.clone(), heap(geometry.region_bytes())).unwrap();
    executor.forward(&mut batch, &mut |_| ()).unwrap();
}

/// Memory is set aside when the model is loaded and by the largest step; the others allocate nothing on the device or for it.
#[test]
fn steps_allocate_nothing_once_they_have_been_this_large() {
    let directory = write(&tiny("qwen3"));
    let device = device();
    let mut driver = cuda_on(&device, directory.path(), PLAIN, 16);
    let generate = |driver: &mut crate::support::Cuda, len, top_k| {
        let params = SamplingParams { temperature: 1.0, top_k, ..SamplingParams::default() };
        driver.generate(params, &tokens(1, len), (6, 12), &pages(0..4));
    };
    generate(&mut driver, 40, 0);
    generate(&mut driver, 40, 5);
    let before = device.num_allocations();
    for len in [40, 3, 25] {
        generate(&mut driver, len, 5);
        generate(&mut driver, len, 0);
        driver.executor.export(&pages(0..4)).unwrap();
        driver.executor.import(&pages(0..4)).unwrap();
    }
    assert_eq!(device.num_allocations(), before);
    generate(&mut driver, 52, 5);
    assert_eq!(device.num_allocations(), before, "chunks are no larger than before");
}
