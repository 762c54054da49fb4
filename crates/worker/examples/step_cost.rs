//! What a step costs more when its executor is behind a socket: `cargo run --release -p microserving-worker --example step_cost`.
//!
//! The executor computes nothing, so what is measured is the exchange, what is found of the logits, and the draws.

use std::sync::Arc;
use std::time::Duration;

use microserving_executor::{
    Batch, BatchItem, Executor, ExecutorError, ExecutorInfo, LogitNeed, Sampler, StepOutput, ToyConfig,
    ToyExecutor,
};
use microserving_protocol::{KvGeometry, KvMemory, LayerId, PageId, SamplingParams, TokenId};
use microserving_transport::LoopbackHub;
use microserving_worker::{Connection, FrontSocket, Order};
use tokio::time::Instant;

const VOCAB_SIZE: u32 = 151_936;
const CONTEXT: u32 = 4096;
const STEPS: u32 = 300;

/// Has the same logits for every item.
#[derive(Debug)]
struct Still {
    info: ExecutorInfo,
    logits: Vec<f32>,
    scratch: Vec<f32>,
}

impl Still {
    fn new() -> Self {
        let toy = ToyExecutor::new(ToyConfig::default()).expect("a sound toy");
        let info = ExecutorInfo { vocab_size: VOCAB_SIZE, ..toy.info().clone() };
        let logits: Vec<f32> =
            (0..VOCAB_SIZE).map(|token| (token.wrapping_mul(2_654_435_761) >> 16) as f32 / 8192.0).collect();
        Self { info, scratch: logits.clone(), logits }
    }
}

impl Executor for Still {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn attach(&mut self, _: KvGeometry, _: Arc<dyn KvMemory>) -> Result<(), ExecutorError> {
        Ok(())
    }

    fn forward(
        &mut self,
        batch: &mut Batch<'_>,
        on_layer: &mut dyn FnMut(LayerId),
    ) -> Result<StepOutput, ExecutorError> {
        (0..self.info.layout.num_layers).map(LayerId).for_each(on_layer);
        let Self { logits, scratch, .. } = self;
        let mut draw = |sampler: &mut Sampler| match sampler.need(VOCAB_SIZE) {
            // As a device does that finds these by itself.
            LogitNeed::Best => sampler.take_best(TokenId(7)),
            _ => {
                scratch.copy_from_slice(logits);
                sampler.sample(scratch)
            }
        };
        let sampled = batch.items.iter_mut().map(|item| item.sampler.as_mut().map(|sampler| draw(sampler)));
        Ok(StepOutput { sampled: sampled.collect(), modelled: None })
    }
}

fn measure(executor: &mut dyn Executor, num_items: usize, sampling: &SamplingParams) -> Duration {
    let pages: Vec<PageId> = (0..CONTEXT / 16).map(PageId).collect();
    let mut samplers: Vec<Sampler> = (0..num_items).map(|_| Sampler::new(sampling.clone(), 0, &[])).collect();
    let mut times: Vec<Duration> = (0..STEPS)
        .map(|_| {
            let items = samplers.iter_mut().map(|sampler| BatchItem {
                tokens: &[TokenId(5)],
                position: CONTEXT - 1,
                pages: &pages,
                sampler: Some(sampler),
                is_sent: false,
            });
            let mut batch = Batch { items: items.collect() };
            let begun = Instant::now();
            executor.forward(&mut batch, &mut |_| {}).expect("it computes nothing");
            begun.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

#[allow(clippy::print_stdout, reason = "it is what one runs it for")]
fn main() {
    let path = std::env::temp_dir().join(format!("step-cost-{}.sock", std::process::id()));
    let front = FrontSocket::bind(&path).expect("a free path");
    let worker = std::thread::spawn(move || {
        let connection = Connection::to_front(&path, Duration::from_secs(5)).expect("a front");
        let transport = LoopbackHub::new().transport("worker");
        connection.serve(Box::new(Still::new()), Box::new(transport), "up", None).expect("served")
    });
    let mut apart = front.accept(&Order::default(), || true, |_| {}).expect("a worker").expect("in time");
    let mut within = Still::new();
    println!("vocabulary {VOCAB_SIZE}, context {CONTEXT}; median of {STEPS} steps, in µs");
    println!("{:<28} {:>6} {:>10} {:>10} {:>10}", "sampling", "items", "within", "apart", "more");
    let sampled = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    for (name, sampling) in [
        ("greedy", SamplingParams::greedy()),
        ("top_k 40, top_p 0.95", SamplingParams { top_k: 40, top_p: 0.95, ..sampled.clone() }),
        ("all logits", sampled),
    ] {
        for num_items in [1, 16, 64] {
            let within = measure(&mut within, num_items, &sampling);
            let apart = measure(&mut apart.executor, num_items, &sampling);
            let micros = |time: Duration| time.as_secs_f64() * 1e6;
            println!(
                "{name:<28} {num_items:>6} {:>10.1} {:>10.1} {:>10.1}",
                micros(within),
                micros(apart),
                micros(apart) - micros(within)
            );
        }
    }
    drop(apart);
    worker.join().expect("no panic");
}
