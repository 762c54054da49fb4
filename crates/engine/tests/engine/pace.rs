//! Steps that are sized to end in time.

use std::time::Duration;

use microserving_engine::{Call, CallId, Command, Effect, EngineConfig, GenerateEvent};
use microserving_executor::ToyConfig;
use microserving_protocol::TokenId;
use microserving_transport::LoopbackHub;

use crate::support::{config, engine, key, prompt, start, toy};

/// Runs two prompts on an engine of a millisecond a token; returns their tokens and what each step took.
fn run(max_step: Option<Duration>) -> (Vec<(CallId, TokenId)>, Vec<Duration>) {
    let slow = ToyConfig { token_time: Duration::from_millis(1), ..toy() };
    let config = EngineConfig { max_step, max_batch_tokens: 400, ..config("paced", 64) };
    let mut engine = engine(&LoopbackHub::new(), config, slow, 1);
    let mut commands: Vec<_> = [400, 300]
        .into_iter()
        .enumerate()
        .map(|(number, len)| {
            let call = start(Some(key(&format!("request-{number}"))), &prompt(len), 0, 8);
            Command::Call { id: CallId(number as u64), call: Call::StartGenerate(Box::new(call)) }
        })
        .collect();
    let (mut now, mut tokens, mut times) = (Duration::ZERO, Vec::new(), Vec::new());
    loop {
        let effects = engine.step(now, commands.drain(..));
        let took = effects.modelled.unwrap_or(Duration::ZERO);
        now += took;
        if effects.computed {
            engine.note_step(took);
            times.push(took);
        }
        for effect in effects.effects {
            if let Effect::Event { call, event: GenerateEvent::Token { token, .. } } = effect {
                tokens.push((call, token));
            }
        }
        if engine.is_idle() {
            tokens.sort_by_key(|(call, _)| *call);
            return (tokens, times);
        }
    }
}

#[test]
fn steps_are_short_and_tokens_are_the_same() {
    let (whole, long) = run(None);
    let (chunked, short) = run(Some(Duration::from_millis(100)));
    assert_eq!(whole.len(), 16);
    assert_eq!(whole, chunked);
    let longest = |times: &[Duration]| times.iter().max().copied();
    assert!(longest(&long) >= Some(Duration::from_millis(400)));
    assert!(longest(&short) <= Some(Duration::from_millis(110)), "{short:?}");
}
