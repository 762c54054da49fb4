//! Real models, where the environment names them: the demo model, a SmolLM2-135M-Instruct GGUF in Q4_1, by
//! `MICROSERVING_DEMO_MODEL`, and a folder of models with their references by `MICROSERVING_FIXTURES`.

use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;

use microserving_executor::Executor;
use microserving_executor_candle::{CandleConfig, WeightDtype};
use microserving_protocol::{KvDtype, TokenId};

use crate::support::{Driver, levels, pages, test_data, tokens};

/// A prompt with the greedy continuation of f32 reference implementations.
const CAPITAL: (&[u32], &[u32]) = (
    &[504, 3575, 282, 4649, 314],
    &[
        7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42,
        33, 34, 42, 37, 35, 30, 2,
    ],
);

/// Set in the child process of [`peak_memory_is_weights_and_kv`].
const CHILD: &str = "MICROSERVING_TEST_CHILD";

fn f32_config(path: &Path) -> CandleConfig {
    let mut config = CandleConfig::new(path);
    config.dtype = WeightDtype::F32;
    config.kv_dtype = KvDtype::F32;
    config
}

#[test]
fn f32_continues_as_the_reference() {
    let Some(path) = test_data("MICROSERVING_DEMO_MODEL") else { return };
    for level in levels() {
        let mut config = f32_config(&path);
        config.kernel_level = Some(level);
        let mut driver = Driver::load(&config, 16);
        let generated = driver.greedy(&tokens(CAPITAL.0), 30, 512, &pages(3..16));
        assert_eq!(generated, tokens(CAPITAL.1), "{level}");
    }
}

#[test]
fn quantised_forms_know_the_capital_on_any_number_of_threads() {
    let Some(path) = test_data("MICROSERVING_DEMO_MODEL") else { return };
    for (dtype, mode) in [(WeightDtype::Auto, "q8_0+q4_1/"), (WeightDtype::Q8_0, "q8_0/")] {
        let generated = [1, 2].map(|threads| {
            let mut config = CandleConfig::new(&path);
            config.dtype = dtype;
            config.threads = NonZeroUsize::new(threads).unwrap();
            let mut driver = Driver::load(&config, 16);
            let numeric_mode = &driver.executor.info().layout.numeric_mode;
            assert!(numeric_mode.starts_with(mode), "{numeric_mode}");
            assert_eq!(driver.executor.info().eos_tokens, [TokenId(2)]);
            driver.greedy(&tokens(CAPITAL.0), 30, 2 * threads, &pages(3..16))
        });
        assert_eq!(generated[0][..2], tokens(&[7042, 30]));
        assert_eq!(generated[0], generated[1]);
    }
}

/// Greedy continuations recorded from an f32 implementation in numpy, one JSON object a line.
fn check_recorded(model: &Path, recorded: &Path) {
    let mut driver = Driver::load(&f32_config(model), 64);
    for line in std::fs::read_to_string(recorded).unwrap().lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let ids = |key: &str| -> Vec<TokenId> {
            let ids = line[key].as_array().unwrap();
            ids.iter().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect()
        };
        let expected = ids("gen_ids");
        for chunk in [7, 512] {
            let generated = driver.greedy(&ids("prompt_ids"), expected.len(), chunk, &pages((0..64).rev()));
            assert_eq!(generated, expected, "{}", line["prompt"]);
        }
    }
}

#[test]
fn recorded_stories_are_told_again() {
    let Some(fixtures) = test_data("MICROSERVING_FIXTURES") else { return };
    check_recorded(
        &fixtures.join("models/stories260K"),
        &fixtures.join("models/reference/stories260K_f32_greedy.jsonl"),
    );
}

#[test]
fn recorded_answers_of_the_demo_model_are_given_again() {
    let Some(fixtures) = test_data("MICROSERVING_FIXTURES") else { return };
    let Some(model) = test_data("MICROSERVING_DEMO_MODEL") else { return };
    check_recorded(&model, &fixtures.join("models/reference/smollm2_135m_q4_1_f32_greedy.jsonl"));
}

/// Loading and running may take the weights, the KV and 15 %, and nothing like a second copy on the way. Measured in a
/// process of its own, since a peak is never forgotten.
#[test]
fn peak_memory_is_weights_and_kv() {
    let Some(path) = test_data("MICROSERVING_DEMO_MODEL") else { return };
    if std::env::var_os(CHILD).is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "demo_model::peak_memory_is_weights_and_kv", "--nocapture"]).env(CHILD, "1");
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        return;
    }
    for dtype in [WeightDtype::Q8_0, WeightDtype::F32] {
        let mut config = CandleConfig::new(&path);
        config.dtype = dtype;
        let mut driver = Driver::load(&config, 64);
        let prompt: Vec<_> = (0..512).map(TokenId).collect();
        driver.greedy(&prompt, 4, 512, &pages(0..64));
        let kept = driver.executor.weight_bytes() + driver.geometry.region_bytes();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let peak: usize = peak.trim().trim_end_matches(" kB").trim().parse::<usize>().unwrap() * 1024;
        println!("{dtype}: peak {peak} bytes, kept {kept}");
        assert!(peak as f64 <= kept as f64 * 1.15, "{dtype}: peak {peak} bytes for {kept} kept");
    }
}
