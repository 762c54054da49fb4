//! The demo model, a SmolLM2-135M-Instruct GGUF in Q4_1.

use microserving_executor::Executor;
use microserving_executor_candle::{CandleConfig, KernelLevel, WeightDtype};
use microserving_protocol::KvDtype;

use crate::support::{Driver, pages, test_data, tokens};

/// Prompts with the greedy continuations of an f32 reference implementation.
const REFERENCE: [(&[u32], &[u32]); 1] = [(
    &[504, 3575, 282, 4649, 314],
    &[
        7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42,
        33, 34, 42, 37, 35, 30, 2,
    ],
)];

#[test]
fn f32_continues_as_the_reference() {
    let Some(path) = test_data("MICROSERVING_DEMO_MODEL") else { return };
    for level in KernelLevel::ALL {
        if !level.is_supported() {
            continue;
        }
        let mut config = CandleConfig::new(&path);
        config.dtype = WeightDtype::F32;
        config.kv_dtype = KvDtype::F32;
        config.kernel_level = Some(level);
        let mut driver = Driver::load(&config, 16);
        for (prompt, expected) in REFERENCE {
            let generated = driver.greedy(&tokens(prompt), 30, 512, &pages(3..16));
            assert_eq!(generated, tokens(expected), "{level}");
        }
    }
}

#[test]
fn q8_knows_the_capital() {
    let Some(path) = test_data("MICROSERVING_DEMO_MODEL") else { return };
    let mut driver = Driver::load(&CandleConfig::new(&path), 16);
    assert!(driver.executor.info().layout.numeric_mode.starts_with("q8_0/"));
    let generated = driver.greedy(&tokens(REFERENCE[0].0), 30, 512, &pages(3..16));
    assert_eq!(generated[..2], tokens(&[7042, 30]));
}
