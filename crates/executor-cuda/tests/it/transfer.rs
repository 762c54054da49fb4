//! KV that moves between executors over host memory, as a transport would move it.

use std::cell::RefCell;

use microserving_executor::{Executor, Sampler};
use microserving_protocol::{KvMemory, LayerId, PageId, SamplingParams, TokenId};

use crate::support::{Cuda, Item, Kind, PLAIN, cuda, pages, tokens, write};
use crate::tiny::tiny;

/// Copies a layer of pages from one region into another.
fn put(from: &Cuda, to: &Cuda, layer: LayerId, pairs: &[(PageId, PageId)]) {
    let mut bytes = vec![0; from.geometry.layout.page_bytes()];
    for &(source, target) in pairs {
        from.memory.read(from.geometry.page_offset(layer, source), &mut bytes);
        to.memory.write(to.geometry.page_offset(layer, target), &bytes);
    }
}

fn decode(driver: &mut Cuda, prompt: &[TokenId], begin: usize, pages: &[PageId]) -> Vec<TokenId> {
    let mut sampler = Sampler::new(SamplingParams::greedy(), 0, prompt);
    let mut all = prompt.to_vec();
    let mut position = begin;
    for _ in 0..10 {
        let item = Item { tokens: &all[position..], position, pages, sampler: Some(&mut sampler) };
        let sampled = driver.step(vec![item]).remove(0).unwrap().unwrap();
        position = all.len();
        all.push(sampled.token);
    }
    all.split_off(prompt.len())
}

/// Prefills on one executor, sends layer by layer while it computes, and decodes on another, on other pages.
#[test]
fn layers_are_there_when_they_are_told_of() {
    let directory = write(&tiny("qwen3"));
    let (prompt, end) = (tokens(4, 45), 43);
    let (own, other) = (pages([6, 1, 2, 9]), pages([3, 12, 0, 5]));
    let expected = decode(&mut cuda(directory.path(), PLAIN, 16), &prompt, 0, &own);
    for is_on_device in [false, true] {
        let kind = Kind { is_on_device, ..PLAIN };
        let sender = RefCell::new(cuda(directory.path(), kind, 16));
        let receiver = cuda(directory.path(), kind, 16);
        let (geometry, memory) = (sender.borrow().geometry.clone(), sender.borrow().memory.clone());
        for (begin, end) in [(0, 20), (20, end)] {
            let first = begin / 16;
            let pairs: Vec<(PageId, PageId)> =
                (first..usize::div_ceil(end, 16)).map(|at| (own[at], other[at])).collect();
            let item = Item { tokens: &prompt[begin..end], position: begin, pages: &own, sampler: None };
            let mut bytes = vec![0; geometry.layout.page_bytes()];
            sender.borrow_mut().step_sending(vec![item], |layer, _| {
                let Some(layer) = layer else { return Some(()) };
                for &(source, target) in &pairs {
                    memory.read(geometry.page_offset(layer, source), &mut bytes);
                    receiver.memory.write(receiver.geometry.page_offset(layer, target), &bytes);
                }
                Some(())
            });
        }
        let mut receiver = receiver;
        receiver.executor.import(&other[..3]).unwrap();
        assert_eq!(decode(&mut receiver, &prompt, end, &other), expected, "on the device: {is_on_device}");
    }
}

/// What was computed without a thought of sending is exported; what was imported and computed on is exported again.
#[test]
fn earlier_steps_are_exported() {
    let directory = write(&tiny("llama_tied"));
    let prompt = tokens(4, 40);
    let all = pages([6, 1, 2, 7]);
    let mut first = cuda(directory.path(), PLAIN, 16);
    let expected = decode(&mut first, &prompt, 0, &all);
    let (mut second, mut third) = (cuda(directory.path(), PLAIN, 16), cuda(directory.path(), PLAIN, 16));
    let pairs: Vec<(PageId, PageId)> = all[..2].iter().map(|&page| (page, PageId(page.0 + 4))).collect();
    let moved: Vec<PageId> = pairs.iter().map(|pair| pair.1).chain([PageId(0), PageId(1)]).collect();
    first.executor.export(&all[..2]).unwrap();
    for layer in 0..2 {
        put(&first, &second, LayerId(layer), &pairs);
    }
    second.executor.import(&moved[..2]).unwrap();
    assert_eq!(decode(&mut second, &prompt, 32, &moved), expected);
    second.executor.export(&moved).unwrap();
    let same: Vec<(PageId, PageId)> = moved.iter().map(|&page| (page, page)).collect();
    for layer in 0..2 {
        put(&second, &third, LayerId(layer), &same);
    }
    third.executor.import(&moved).unwrap();
    assert_eq!(decode(&mut third, &prompt, 39, &moved), expected);
}

/// Without an export the region holds what it held: the copy is on the device.
#[test]
fn nothing_is_copied_that_nobody_asks_for() {
    let directory = write(&tiny("qwen3"));
    let mut driver = cuda(directory.path(), PLAIN, 4);
    let prompt = tokens(1, 20);
    decode(&mut driver, &prompt, 0, &pages(0..2));
    assert!(driver.kv_bytes(&pages(0..2), 20).iter().all(|&byte| byte == 0xff));
    driver.executor.export(&pages(0..2)).unwrap();
    assert!(driver.kv_bytes(&pages(0..2), 20).iter().any(|&byte| byte != 0xff));
    let refused = driver.executor.import(&pages([4])).unwrap_err();
    assert!(refused.to_string().contains("page 4 is outside the region of 4"), "{refused}");
}
