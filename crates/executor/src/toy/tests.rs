use std::sync::Mutex;

use microserving_protocol::{MemoryKind, PageId, SamplingParams};
use proptest::prelude::*;

use super::*;
use crate::{SampleError, Sampler};

/// Plain memory.
#[derive(Debug)]
struct Plain(Mutex<Vec<u8>>);

impl Plain {
    fn new(num_bytes: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(vec![0; num_bytes])))
    }
}

impl KvMemory for Plain {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn num_bytes(&self) -> usize {
        self.0.lock().expect("not poisoned").len()
    }

    fn base_address(&self) -> usize {
        0
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.0.lock().expect("not poisoned")[offset..offset + into.len()]);
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.0.lock().expect("not poisoned")[offset..offset + from.len()].copy_from_slice(from);
    }
}

const NUM_PAGES: u32 = 40;

fn config() -> ToyConfig {
    ToyConfig { page_size: 4, num_layers: 3, num_kv_heads: 2, head_dim: 2, ..ToyConfig::default() }
}

struct Bench {
    toy: ToyExecutor,
    memory: Arc<Plain>,
    geometry: KvGeometry,
}

impl Bench {
    fn new(config: ToyConfig) -> Self {
        let mut toy = ToyExecutor::new(config).expect("within bounds");
        let geometry = KvGeometry { layout: toy.info().layout.clone(), num_pages: NUM_PAGES };
        let memory = Plain::new(geometry.region_bytes());
        toy.attach(geometry.clone(), memory.clone()).expect("fits");
        Self { toy, memory, geometry }
    }

    fn forward(&mut self, items: Vec<BatchItem<'_>>) -> StepOutput {
        self.toy.forward(&mut Batch { items }, &mut |_| {}).expect("well formed")
    }

    /// Prefills in chunks that end at `cuts`, then decodes greedily.
    fn generate(&mut self, prompt: &[TokenId], cuts: &[usize], pages: &[PageId], len: usize) -> Vec<TokenId> {
        let mut sampler = greedy();
        let mut tokens = prompt.to_vec();
        let mut at = 0;
        for &cut in cuts.iter().filter(|&&cut| cut < prompt.len()) {
            if cut > at {
                self.forward(vec![item(&prompt[at..cut], at, pages, None)]);
                at = cut;
            }
        }
        while tokens.len() < prompt.len() + len {
            let output = self.forward(vec![item(&tokens[at..], at, pages, Some(&mut sampler))]);
            at = tokens.len();
            tokens.push(token_of(&output, 0));
        }
        tokens.split_off(prompt.len())
    }
}

fn greedy() -> Sampler {
    Sampler::new(SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() }, 0, &[])
}

fn item<'a>(
    tokens: &'a [TokenId],
    position: usize,
    pages: &'a [PageId],
    sampler: Option<&'a mut Sampler>,
) -> BatchItem<'a> {
    BatchItem { tokens, position: position as u32, pages, sampler, is_sent: false }
}

fn token_of(output: &StepOutput, place: usize) -> TokenId {
    output.sampled[place].clone().expect("had a sampler").expect("sampled").token
}

fn text(bytes: &str) -> Vec<TokenId> {
    std::iter::once(ToyExecutor::BOS).chain(bytes.bytes().map(|byte| TokenId(byte.into()))).collect()
}

fn pages(ids: impl IntoIterator<Item = u32>) -> Vec<PageId> {
    ids.into_iter().map(PageId).collect()
}

#[test]
fn the_text_reads_like_words() {
    let mut bench = Bench::new(ToyConfig { eos_one_in: 0, ..config() });
    let tokens = bench.generate(&text("once upon a time "), &[], &pages(0..NUM_PAGES), 120);
    let text: String = tokens.iter().map(|token| char::from_u32(token.0).expect("a byte")).collect();
    assert!(text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b' ' | b',' | b'.')), "{text:?}");
    let longest = text.split_ascii_whitespace().map(str::len).max().expect("words");
    assert!(longest <= 24, "{text:?}");
    assert!(text.split_ascii_whitespace().count() > 10, "{text:?}");
}

#[test]
fn some_texts_end_and_most_do_not() {
    let mut ended = 0;
    for seed in 0..60 {
        let mut bench = Bench::new(ToyConfig { model_seed: seed, eos_one_in: 128, ..config() });
        let tokens = bench.generate(&text("hello"), &[], &pages(0..NUM_PAGES), 32);
        ended += usize::from(tokens.contains(&ToyExecutor::EOS));
    }
    assert!((3..30).contains(&ended), "{ended} of 60 texts ended");
}

#[test]
fn layers_are_announced_in_order_and_each_is_written_by_then() {
    let mut bench = Bench::new(config());
    let (memory, geometry) = (bench.memory.clone(), bench.geometry.clone());
    let prompt = text("abcdefg");
    let pages = pages([7, 3]);
    let mut seen = Vec::new();
    let mut on_layer = |layer: LayerId| {
        seen.push(layer.0);
        for other in 0..geometry.layout.num_layers {
            for page in &pages {
                let mut bytes = vec![0; geometry.layout.page_bytes()];
                memory.read(geometry.page_offset(LayerId(other), *page), &mut bytes);
                assert_eq!(bytes.iter().any(|&byte| byte != 0), other <= layer.0);
            }
        }
    };
    let items = vec![item(&prompt, 0, &pages, None)];
    bench.toy.forward(&mut Batch { items }, &mut on_layer).expect("well formed");
    assert_eq!(seen, [0, 1, 2]);
}

#[test]
fn a_step_writes_its_own_slots_and_nothing_else() {
    let mut bench = Bench::new(config());
    bench.memory.0.lock().expect("not poisoned").fill(0xAA);
    let prompt = text("abcde");
    let pages = pages([7, 3]);
    bench.forward(vec![item(&prompt[..2], 0, &pages, None)]);
    let before = bench.memory.0.lock().expect("not poisoned").clone();
    bench.forward(vec![item(&prompt[2..], 2, &pages, None)]);
    let after = bench.memory.0.lock().expect("not poisoned").clone();
    let mut may_change = vec![false; after.len()];
    for layer in 0..3 {
        for (kv, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for (page, slot) in [(7, 2), (7, 3), (3, 0), (3, 1)] {
                let at = bench.geometry.slot_offset(LayerId(layer), PageId(page), kv, head, slot);
                may_change[at..at + bench.geometry.layout.slot_bytes()].fill(true);
            }
        }
    }
    for (at, may_change) in may_change.into_iter().enumerate() {
        assert!(may_change || before[at] == after[at], "byte {at} changed");
    }
}

/// Every byte of every slot of the context matters, and no byte outside it does.
#[test]
fn flipping_any_byte_of_the_context_changes_the_logits() {
    let mut bench = Bench::new(config());
    let prompt = text("abcdefghi");
    let pages = pages([5, 9, 2]);
    let context = prompt.len() - 1;
    bench.forward(vec![item(&prompt[..context], 0, &pages, None)]);
    let clean = bench.memory.0.lock().expect("not poisoned").clone();
    let mut logprobs = |flip: Option<usize>| {
        {
            let mut bytes = bench.memory.0.lock().expect("not poisoned");
            bytes.copy_from_slice(&clean);
            if let Some(at) = flip {
                bytes[at] ^= 0x10;
            }
        }
        let mut sampler = greedy();
        let last = [prompt[context]];
        let output = bench.toy.forward(
            &mut Batch { items: vec![item(&last, context, &pages, Some(&mut sampler))] },
            &mut |_| {},
        );
        output.expect("well formed").sampled[0].clone().expect("had a sampler").expect("sampled").logprob
    };
    let expected = logprobs(None);
    let geometry = KvGeometry { layout: config().info().layout, num_pages: NUM_PAGES };
    let mut relevant = vec![false; clean.len()];
    for layer in 0..3 {
        for position in 0..context {
            for (kv, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let (page, slot) = (pages[position / 4], (position % 4) as u32);
                let at = geometry.slot_offset(LayerId(layer), page, kv, head, slot);
                relevant[at..at + geometry.layout.slot_bytes()].fill(true);
            }
        }
    }
    let mut num_relevant = 0;
    for (at, relevant) in relevant.into_iter().enumerate() {
        let page = at / geometry.layout.page_bytes() % NUM_PAGES as usize;
        if relevant || pages.contains(&PageId(page as u32)) {
            assert_eq!(logprobs(Some(at)) != expected, relevant, "byte {at} of the region");
            num_relevant += usize::from(relevant);
        }
    }
    assert_eq!(num_relevant, context * geometry.layout.token_bytes());
}

#[test]
fn swapped_stale_and_foreign_pages_change_the_text() {
    let prompt = text("abcdefghijklmnop");
    let own = pages([0, 1, 2, 3, 4, 5, 6, 7]);
    let mut bench = Bench::new(ToyConfig { eos_one_in: 0, ..config() });
    let expected = bench.generate(&prompt, &[], &own, 8);
    // Another prompt that differs in its first byte only: all later slots differ all the same.
    let other = pages(10..18);
    bench.generate(&text("xbcdefghijklmnop"), &[], &other, 8);
    let mut continue_on = |pages: &[PageId]| {
        let (mut sampler, mut at) = (greedy(), prompt.len() - 1);
        let mut tokens = prompt.clone();
        for _ in 0..8 {
            let output = bench.forward(vec![item(&tokens[at..], at, pages, Some(&mut sampler))]);
            at = tokens.len();
            tokens.push(token_of(&output, 0));
        }
        tokens.split_off(prompt.len())
    };
    assert_eq!(continue_on(&own), expected);
    let mut pages = own.clone();
    pages.swap(1, 2);
    assert_ne!(continue_on(&pages), expected, "swapped");
    let mut pages = own.clone();
    pages[2] = other[2];
    assert_ne!(continue_on(&pages), expected, "foreign");
    let mut pages = own.clone();
    pages[3] = PageId(30);
    assert_ne!(continue_on(&pages), expected, "never written");
    assert_eq!(continue_on(&own), expected, "the rest is as it was");
}

#[test]
fn what_a_model_is_stands_in_its_fingerprint() {
    let fingerprint = |config: ToyConfig| config.info().layout.fingerprint();
    let base = fingerprint(config());
    assert_ne!(fingerprint(ToyConfig { model_seed: 1, ..config() }), base);
    assert_ne!(fingerprint(ToyConfig { eos_one_in: 1, ..config() }), base);
    assert_ne!(fingerprint(ToyConfig { num_layers: 2, ..config() }), base);
    assert_eq!(fingerprint(ToyConfig { step_time: Duration::from_secs(1), ..config() }), base);
}

#[test]
fn modelled_time_counts_steps_and_tokens() {
    let config =
        ToyConfig { step_time: Duration::from_millis(5), token_time: Duration::from_micros(10), ..config() };
    let mut bench = Bench::new(config);
    let (prompt, pages) = (text("abc"), pages([0]));
    let output = bench.forward(vec![item(&prompt, 0, &pages, None)]);
    assert_eq!(output.modelled, Some(Duration::from_micros(5040)));
    assert_eq!(Bench::new(self::config()).forward(vec![item(&prompt, 0, &pages, None)]).modelled, None);
}

#[test]
fn bad_configurations_and_batches_are_named() {
    let load = |config| ToyExecutor::new(config).expect_err("out of bounds").to_string();
    assert_eq!(
        load(ToyConfig { num_layers: 1, ..config() }),
        "cannot load the model: num_layers is 1, less than 2"
    );
    assert!(load(ToyConfig { page_size: 0, ..config() }).contains("page_size"));

    let mut toy = ToyExecutor::new(config()).expect("within bounds");
    let prompt = text("abc");
    let own = pages([0]);
    let error = toy.forward(&mut Batch { items: vec![item(&prompt, 0, &own, None)] }, &mut |_| {});
    assert!(matches!(error, Err(ExecutorError::Memory { .. })));
    let geometry = KvGeometry { layout: toy.info().layout.clone(), num_pages: NUM_PAGES };
    assert!(toy.attach(geometry.clone(), Plain::new(geometry.region_bytes() - 1)).is_err());
    let mut foreign = geometry.clone();
    foreign.layout.page_size = 8;
    assert!(toy.attach(foreign, Plain::new(geometry.region_bytes() * 2)).is_err());

    let mut bench = Bench::new(ToyConfig { max_context: 100, ..config() });
    let mut check = |tokens: &[TokenId], position, pages: &[PageId], expected: &str| {
        let good = text("ab");
        let good_pages = [PageId(39)];
        let items = vec![item(&good, 0, &good_pages, None), item(tokens, position, pages, None)];
        let error = bench.toy.forward(&mut Batch { items }, &mut |_| {}).expect_err(expected).to_string();
        assert_eq!(error, format!("item 1 of the batch is malformed: {expected}"));
    };
    check(&[], 0, &own, "it has no tokens");
    check(&[TokenId(259)], 0, &own, "token 259 is not in the vocabulary of 259");
    check(&prompt, 1, &own, "it ends at 5, past its 1 pages");
    check(&prompt, 98, &pages(0..40), "it ends at 102, past the context of 100");
    check(&prompt, 0, &pages([40]), "page 40 is not among the 40 there are");
    // After all this the executor still works.
    bench.generate(&prompt, &[], &pages(0..4), 3);
}

#[test]
fn a_failing_sampler_ends_its_own_item_only() {
    let mut bench = Bench::new(config());
    let prompt = text("abc");
    let (first, second) = (pages([0]), pages([1]));
    let mut bad = Sampler::new(SamplingParams { top_p: 7.0, ..SamplingParams::default() }, 0, &[]);
    let mut good = greedy();
    let output = bench
        .forward(vec![item(&prompt, 0, &first, Some(&mut bad)), item(&prompt, 0, &second, Some(&mut good))]);
    let invalid = |sampled: &Option<_>| matches!(sampled, Some(Err(SampleError::InvalidParam { .. })));
    assert!(invalid(&output.sampled[0]));
    token_of(&output, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Neither chunks nor places nor neighbours change a token.
    #[test]
    fn tokens_do_not_depend_on_chunks_pages_or_batch(
        prompt in proptest::collection::vec(0u32..259, 1..40),
        mut cuts in proptest::collection::vec(1usize..40, 0..5),
        places in Just((0..20u32).collect::<Vec<_>>()).prop_shuffle(),
        neighbour in proptest::collection::vec(0u32..259, 1..20),
    ) {
        let prompt: Vec<_> = prompt.into_iter().map(TokenId).collect();
        let neighbour: Vec<_> = neighbour.into_iter().map(TokenId).collect();
        let mut bench = Bench::new(config());
        let expected = bench.generate(&prompt, &[], &pages(0..15), 12);

        cuts.sort_unstable();
        let mut bench = Bench::new(config());
        prop_assert_eq!(&bench.generate(&prompt, &cuts, &pages(places.clone()), 12), &expected);

        // The same with a neighbour in every step, decoding on its own pages, now before and now after it.
        let mut bench = Bench::new(config());
        let (own, others) = (pages(places), pages(20..40));
        let (mut tokens, mut other_tokens) = (prompt.clone(), neighbour);
        let (mut at, mut other_at) = (0, 0);
        let (mut sampler, mut other_sampler) = (greedy(), greedy());
        for step in 0..12 {
            let mut items = vec![
                item(&tokens[at..], at, &own, Some(&mut sampler)),
                item(&other_tokens[other_at..], other_at, &others, Some(&mut other_sampler)),
            ];
            if step % 2 == 1 {
                items.reverse();
            }
            let output = bench.forward(items);
            (at, other_at) = (tokens.len(), other_tokens.len());
            tokens.push(token_of(&output, step % 2));
            other_tokens.push(token_of(&output, 1 - step % 2));
        }
        prop_assert_eq!(&tokens[prompt.len()..], &expected[..]);
    }
}
