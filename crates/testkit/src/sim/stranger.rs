//! Someone who calls engines with what they must refuse.

use std::sync::Arc;
use std::time::Duration;

use microserving_engine::{Call, CallKey, CallOptions, Commit, Pause, PrepRecv, RemoteSend, StartGenerate};
use microserving_protocol::{Attempt, KvRange, SamplingParams, SeqId, TokenId};

use super::Invariant;
use super::world::{CallError, World};
use crate::Dice;

/// How long it waits for an answer; shorter than what follows the fault phase, so that no call of its own is left.
const PATIENCE: Duration = Duration::from_secs(1);

/// Calls until the fault phase ends.
pub(crate) async fn knock(world: Arc<World>, every: Duration, mut dice: Dice) {
    let mut number = 0;
    loop {
        tokio::time::sleep(dice.time(every / 4, every * 7 / 4)).await;
        if world.now() >= world.options.fault_phase {
            return;
        }
        number += 1;
        let engine = dice.below(world.options.num_engines as u64) as usize;
        let Some(call) = draw(&world, &mut dice, number) else { continue };
        let what = format!("{call:?}");
        let mut connection = world.send(engine, call);
        let answer = tokio::time::timeout(PATIENCE, connection.answer()).await;
        match answer {
            Ok(Ok(reply)) => {
                let detail = format!("engine {engine} answered {reply:?} to {what}");
                world.violate(Invariant::BadCallsRefused, detail);
            }
            Ok(Err(CallError::Engine(_))) => world.state().tally.strangers_refused += 1,
            Ok(Err(CallError::Broken)) | Err(_) => {}
        }
    }
}

/// Returns a call that no engine may answer well; `None` if there is nothing yet to forge.
fn draw(world: &World, dice: &mut Dice, number: u32) -> Option<Call> {
    let key = CallKey { seq_id: SeqId::new(format!("stranger-{number}")), attempt: Attempt(0) };
    let vocabulary = if dice.chance(0.5) { 259 } else { u32::MAX };
    let prompt: Vec<_> = (0..8).map(|_| TokenId(dice.below(256) as u32)).collect();
    let mut unspeakable = prompt.clone();
    unspeakable[dice.below(8) as usize] = TokenId(vocabulary);
    let too_long = vec![TokenId(1); (world.options.num_pages * world.options.page_size) as usize + 1];
    let prompts = [unspeakable, too_long, Vec::new()];
    Some(match dice.below(8) {
        0..=2 => Call::RemoteSend(forge(world, dice)?),
        3 => Call::PrepRecv(prep(key, prompts[dice.below(3) as usize].clone(), 0)),
        4 => Call::PrepRecv(prep(key, prompt, dice.pick(&[8, 9, u32::MAX]))),
        5 => Call::StartGenerate(Box::new(start(key, prompts[dice.below(3) as usize].clone(), 0, 1))),
        6 => {
            let (begin, n) = dice.pick(&[(8, 1), (u32::MAX, 1), (0, 0), (0, u32::MAX)]);
            Call::StartGenerate(Box::new(start(key, prompt, begin, n)))
        }
        _ if dice.chance(0.5) => Call::Commit(Commit { seq_id: key.seq_id, attempt: None }),
        _ => Call::Pause(Pause { seq_id: key.seq_id, attempt: None }),
    })
}

fn prep(key: CallKey, prompt: Vec<TokenId>, end: u32) -> PrepRecv {
    let options = CallOptions::default();
    PrepRecv { key: Some(key), prompt: prompt.into(), end, reserve_tokens: 0, commit: false, options }
}

fn start(key: CallKey, prompt: Vec<TokenId>, begin: u32, n: u32) -> StartGenerate {
    StartGenerate {
        key: Some(key),
        begin,
        generated_from: prompt.len() as u32,
        prompt: prompt.into(),
        n,
        first_choice: 0,
        sampling: SamplingParams::greedy(),
        max_tokens: Some(4),
        min_tokens: 0,
        stop_tokens: Vec::new(),
        ignore_eos: false,
        constraints: Vec::new(),
        resume_from: None,
        options: CallOptions::default(),
    }
}

/// Takes a real address and changes a bit of it, cuts it, or makes one up.
fn forge(world: &World, dice: &mut Dice) -> Option<RemoteSend> {
    // A prompt that someone asked for: a sender may well compute it before the receiver says no.
    let (mut address, prompt) = {
        let state = world.state();
        let place = dice.below(state.addresses.len() as u64) as usize;
        let address = state.addresses.get(place)?.clone();
        (address, Arc::clone(state.prompts.get(dice.below(state.prompts.len() as u64) as usize)?))
    };
    match dice.below(3) {
        0 => {
            let at = dice.below(address.len() as u64) as usize;
            address[at] ^= 1 << dice.below(8);
        }
        1 => address.truncate(dice.below(address.len() as u64) as usize),
        _ => address.iter_mut().for_each(|byte| *byte = dice.throw() as u8),
    }
    let len = prompt.len() as u64;
    let begin = dice.below(len) as u32;
    let end = begin + 1 + dice.below(len - u64::from(begin)) as u32;
    Some(RemoteSend {
        key: None,
        prompt,
        range: KvRange::new(begin, end)?,
        kv_addr_info: address,
        recv_rank: 0,
        options: CallOptions::default(),
    })
}
