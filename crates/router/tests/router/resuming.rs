//! Streams whose engine is lost, at every point: they go on elsewhere, and no token comes twice.

use std::sync::{Arc, Mutex};

use microserving_protocol::ApiError;
use microserving_router::Role;
use serde_json::{Value, json};

use crate::fake::{Act, Acts, Answer, Fake, World, tokens};

const WHOLE: &str = "abcde";

fn body(stream: bool) -> String {
    format!(
        r#"{{"prompt":{},"stream":{stream},"max_tokens":5,"seed":7,"stream_options":{{"include_usage":true}}}}"#,
        tokens(10)
    )
}

fn acts(acts: &[Act]) -> Acts {
    Arc::new(Mutex::new(acts.to_vec()))
}

/// The texts of all choices of a stream or of a whole answer, and how often each finished.
fn texts(answer: &Answer, n: usize) -> (Vec<String>, Vec<usize>) {
    let events = if answer.body.starts_with("data:") { answer.events() } else { vec![answer.json()] };
    let (mut texts, mut finishes) = (vec![String::new(); n], vec![0; n]);
    for choice in events.iter().flat_map(|event| event["choices"].as_array().into_iter().flatten()) {
        let index = usize::try_from(choice["index"].as_u64().expect("a number")).expect("small");
        texts[index].push_str(choice["text"].as_str().unwrap_or_default());
        finishes[index] += usize::from(!choice["finish_reason"].is_null());
        assert!(choice.get("token_ids").is_none(), "nobody asked for them: {choice}");
    }
    (texts, finishes)
}

fn usage(answer: &Answer) -> Value {
    if answer.body.starts_with("data:") {
        let events = answer.events();
        let usages: Vec<_> = events.iter().filter(|event| !event["usage"].is_null()).collect();
        assert_eq!(usages.len(), 1, "{}", answer.body);
        return usages[0]["usage"].clone();
    }
    answer.json()["usage"].clone()
}

/// What a scripted engine was asked to go on after.
fn continuations(engines: &[&Arc<Fake>]) -> Vec<(u64, String)> {
    let calls = engines.iter().flat_map(|engine| engine.seen()).filter(|seen| seen.call == "start_generate");
    let mut found: Vec<_> = calls
        .map(|seen| {
            let prompt = seen.body["prompt"].as_array().expect("tokens").clone();
            let from = seen.body["generated_from"].as_u64().map(|from| usize::try_from(from).expect("small"));
            assert!(from.is_none_or(|from| from == 10), "{from:?}");
            let output = prompt[from.unwrap_or(prompt.len())..].iter();
            let letters =
                output.map(|t| char::from(u8::try_from(t.as_u64().expect("a token")).expect("a letter")));
            assert_eq!((&seen.body["max_tokens"], &seen.body["seed"]), (&json!(5), &json!(7)));
            (seen.body["attempt"].as_u64().unwrap_or(0), letters.collect())
        })
        .collect();
    found.sort();
    found
}

#[tokio::test(start_paused = true)]
async fn at_every_point_another_engine_goes_on() {
    for pattern in ["data_parallel", "prefill_decode", "balanced:0.25"] {
        for stream in [true, false] {
            // Five tokens and the usage: after the sixth everything has been said.
            for k in 0..=6 {
                for act in [
                    Act::BreakAfter(k),
                    Act::EndAfter(k),
                    Act::PreemptAfter(k),
                    Act::FailAfter(k, ApiError::internal("boom")),
                    Act::FailAfter(k, ApiError::gone("aborted")),
                ] {
                    let (a, b, c) = (Fake::new("a"), Fake::new("b"), Fake::new("c"));
                    // The first one to decode fails.
                    let once = acts(std::slice::from_ref(&act));
                    for fake in [&a, &b, &c] {
                        fake.on_generate_next(&once);
                    }
                    let world =
                        World::new(&[(&a, Role::Any), (&b, Role::Any), (&c, Role::Any)], pattern).await;
                    let answer = world.complete(&body(stream)).await;
                    let what = format!("{pattern} stream {stream} {act:?}: {}", answer.body);
                    assert_eq!(answer.status, 200, "{what}");
                    assert_eq!(texts(&answer, 1), (vec![WHOLE.to_owned()], vec![1]), "{what}");
                    let usage = usage(&answer);
                    assert_eq!(
                        (&usage["prompt_tokens"], &usage["completion_tokens"]),
                        (&json!(10), &json!(5)),
                        "{what}"
                    );
                    let mut expected = vec![(0, String::new())];
                    if k < 5 {
                        expected.push((1, WHOLE[..k].to_owned()));
                    }
                    assert_eq!(continuations(&[&a, &b, &c]), expected, "{what}");
                    world.end().await;
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn several_losses_of_one_stream_are_survived_and_then_no_more() {
    for (losses, text) in [(3, WHOLE), (4, "abcd")] {
        let engines: Vec<_> = (0..6).map(|i| Fake::new(&format!("e{i}"))).collect();
        let acts = acts(&vec![Act::BreakAfter(1); losses]);
        for engine in &engines {
            engine.on_generate_next(&acts);
        }
        let specs: Vec<_> = engines.iter().map(|engine| (engine, Role::Any)).collect();
        let world = World::new(&specs, "data_parallel").await;
        let answer = world.complete(&body(true)).await;
        assert_eq!(texts(&answer, 1).0, [text], "{losses} losses: {}", answer.body);
        let error = answer.events().last().expect("events").get("error").cloned();
        assert_eq!(error.is_some(), losses == 4, "{error:?}");
        world.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn each_choice_that_has_not_finished_goes_on_alone() {
    for stream in [true, false] {
        // a0 a1 b0 b1 c0 c1 and the usage.
        for k in 0..=7 {
            let engines = [Fake::new("a"), Fake::new("b")];
            let once = acts(&[Act::BreakAfter(k)]);
            for fake in &engines {
                fake.on_generate_next(&once);
            }
            let world =
                World::new(&[(&engines[0], Role::Any), (&engines[1], Role::Any)], "data_parallel").await;
            let answer = world
                .complete(&format!(
                    r#"{{"prompt":"hey","n":2,"echo":true,"stream":{stream},"max_tokens":3,"stream_options":{{"include_usage":true}}}}"#
                ))
                .await;
            let what = format!("stream {stream}, after {k}: {}", answer.body);
            assert_eq!(texts(&answer, 2), (vec!["heyabc".to_owned(); 2], vec![1, 1]), "{what}");
            assert_eq!(usage(&answer)["completion_tokens"], 6, "{what}");
            let mut alone: Vec<_> = engines
                .iter()
                .flat_map(|engine| engine.seen())
                .filter(|seen| seen.call == "start_generate" && seen.body["n"] == 1)
                .map(|seen| {
                    let name = seen.body["user"].as_str().expect("a name").to_owned();
                    let index = seen.body["choice_index"].as_u64().expect("a choice");
                    assert!(name.ends_with(&format!("-c{index}")), "{name}");
                    (index, seen.body["prompt"].as_array().expect("tokens").len() - 3)
                })
                .collect();
            alone.sort_unstable();
            let expected: Vec<(u64, usize)> = match k {
                // Nothing had come: both together once more.
                0 => vec![],
                1..=4 => vec![(0, k.div_ceil(2)), (1, k / 2)],
                5 => vec![(1, 2)],
                _ => vec![],
            };
            assert_eq!(alone, expected, "{what}");
            world.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn clients_that_ask_for_token_ids_get_each_once() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let once = acts(&[Act::BreakAfter(2)]);
    for fake in [&a, &b] {
        fake.on_generate_next(&once);
    }
    let world = World::new(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel").await;
    let answer = world
        .complete(&format!(
            r#"{{"prompt":{},"stream":true,"max_tokens":5,"return_token_ids":true}}"#,
            tokens(10)
        ))
        .await;
    let ids: Vec<u64> = answer
        .events()
        .iter()
        .flat_map(|event| event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .filter_map(|id| id.as_u64())
        .collect();
    assert_eq!(ids, [97, 98, 99, 100, 101]);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn text_without_tokens_is_not_continued() {
    let (a, b) = (Fake::new("a"), Fake::new("b"));
    let once = acts(&[Act::BreakAfter(2)]);
    for fake in [&a, &b] {
        fake.hide_tokens();
        fake.on_generate_next(&once);
    }
    let world = World::new(&[(&a, Role::Any), (&b, Role::Any)], "data_parallel").await;
    let answer = world.complete(&body(true)).await;
    assert_eq!(texts(&answer, 1).0, ["ab"]);
    assert_eq!(answer.events().last().expect("events")["error"]["status"], 503);
    assert_eq!(continuations(&[&a, &b]).len(), 1);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_hangs_costs_a_step_and_not_the_request() {
    for slow in ["prep", "send", "generate", "first chunk"] {
        let (p, q, d) = (Fake::new("p"), Fake::new("q"), Fake::new("d"));
        let (e, f) = (Fake::new("e"), Fake::new("f"));
        match slow {
            "prep" => [&d, &e].map(|fake| fake.on_prep(Act::Hang)),
            "send" => [&p, &q].map(|fake| fake.on_send(Act::Hang)),
            "generate" => [&d, &e].map(|fake| fake.on_generate(Act::Hang)),
            _ => [&d, &e].map(|fake| fake.on_generate(Act::HangAfter(0))),
        };
        let world = World::with(
            &[
                (&p, Role::Prefill),
                (&q, Role::Prefill),
                (&d, Role::Decode),
                (&e, Role::Decode),
                (&f, Role::Decode),
            ],
            "prefill_decode",
            |config| config.step_timeout = std::time::Duration::from_millis(700),
        )
        .await;
        let begun = tokio::time::Instant::now();
        let answer = world.complete(&body(true)).await;
        assert_eq!(texts(&answer, 1).0, [WHOLE], "{slow}: {}", answer.body);
        let took = begun.elapsed().as_millis();
        assert!((700..3000).contains(&took), "{slow}: {took} ms");
        world.end().await;
    }
}
