//! The OpenAI surface: one pipeline, streamed or not.

use microserving_protocol::{RELAY_HEADER, RelayCutter, RelayUsage};
use serde_json::{Value, json};

use crate::support::{Settings, completion, one, prompt, with};

#[tokio::test]
async fn a_completion_has_openais_shape() {
    let node = one(&Settings::default()).await;
    let answer = node.call("/v1/completions", &completion(&prompt(20, 1), 5)).await;
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["model"], "toy");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["index"], 0);
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
    assert_eq!(answer["usage"]["prompt_tokens"], 20);
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    assert_eq!(answer["usage"]["total_tokens"], 25);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let again = node.call("/v1/completions", &completion(&prompt(20, 1), 5)).await;
    assert_eq!(again["choices"][0]["text"], answer["choices"][0]["text"]);
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 16, "the full page is cached");
    node.wait_idle().await;
}

#[tokio::test]
async fn streamed_or_not_the_text_is_one() {
    let node = one(&Settings { eos_one_in: 16, ..Settings::default() }).await;
    let base = node.call("/v1/completions", &completion(&prompt(10, 3), 60)).await;
    let text = base["choices"][0]["text"].as_str().unwrap().to_owned();
    assert!(text.len() > 20, "{text:?}");
    // Stop strings of every length, at every place, whole words and single letters.
    let stops: Vec<Value> = vec![
        json!(text[12..15]),
        json!([text[5..6], "zzz"]),
        json!([text[20..24]]),
        json!("\u{1f600}"),
        json!([]),
    ];
    for (case, stop) in stops.into_iter().enumerate() {
        for n in [1, 3] {
            let fields = json!({
                "stop": stop, "n": n, "seed": 7, "temperature": if n == 1 { 0.0 } else { 1.0 }, "ignore_eos": false,
            });
            let body = with(completion(&prompt(10, 3), 60), fields);
            let whole = node.call("/v1/completions", &body).await;
            let options = json!({"stream": true, "stream_options": {"include_usage": true}});
            let streamed = node.post("/v1/completions", &with(body, options)).await;
            let events = streamed.events();
            let choices = whole["choices"].as_array().unwrap();
            assert_eq!(choices.len(), n);
            for (index, choice) in choices.iter().enumerate() {
                assert_eq!(choice["index"], index);
                assert_eq!(choice["text"], streamed.streamed_text(index as u64), "case {case}");
                let finishes: Vec<_> = events
                    .iter()
                    .flat_map(|event| event["choices"].as_array().unwrap())
                    .filter(|part| part["index"] == index && !part["finish_reason"].is_null())
                    .map(|part| part["finish_reason"].clone())
                    .collect();
                assert_eq!(finishes, [choice["finish_reason"].clone()], "case {case}");
            }
            let last = events.last().unwrap();
            assert_eq!(last["choices"], json!([]));
            assert_eq!(
                last["usage"]["completion_tokens"], whole["usage"]["completion_tokens"],
                "case {case}"
            );
        }
    }
    node.wait_idle().await;
}

#[tokio::test]
async fn a_stop_string_ends_text_usage_and_sequence() {
    let node = one(&Settings::default()).await;
    let base = node.call("/v1/completions", &completion(&prompt(10, 3), 200)).await;
    let text = base["choices"][0]["text"].as_str().unwrap().to_owned();
    let at = 30;
    let stop = &text[at..at + 3];
    let first = text.find(stop).unwrap();
    let body = with(completion(&prompt(10, 3), 200), json!({"stop": [stop]}));
    let stopped = node.call("/v1/completions", &body).await;
    assert_eq!(stopped["choices"][0]["text"], text[..first]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["usage"]["completion_tokens"], first + 3, "up to the token that completes the string");
    let state = node.state().await;
    assert_eq!(state.counters.aborted, 0, "a stop string is an orderly end");
    let late = with(body, json!({"min_tokens": first + 10}));
    let late = node.call("/v1/completions", &late).await;
    assert!(late["choices"][0]["text"].as_str().unwrap().len() > first, "it does not count in min_tokens");
    node.wait_idle().await;
}

#[tokio::test]
async fn chunks_follow_the_wire_to_the_letter() {
    let node = one(&Settings::default()).await;
    let body = with(completion(&prompt(10, 1), 3), json!({"stream": true}));
    let answer = node.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 200);
    let events = answer.events();
    assert_eq!(events.len(), 3, "one a token and no usage chunk: {}", answer.body);
    for (index, event) in events.iter().enumerate() {
        assert_eq!(event["id"], events[0]["id"]);
        assert_eq!(event["object"], "text_completion");
        assert!(event["usage"].is_null() && event["created"].is_u64());
        let choice = &event["choices"][0];
        assert!(choice["text"].is_string() && choice["logprobs"].is_null() && choice["index"] == 0);
        let reason = if index == 2 { json!("length") } else { Value::Null };
        assert_eq!(choice["finish_reason"], reason);
    }
    let options = json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let events = node.post("/v1/completions", &with(body, options)).await.events();
    let counts: Vec<_> = events.iter().map(|event| event["usage"]["completion_tokens"].clone()).collect();
    assert_eq!(counts, [json!(1), json!(2), json!(3), json!(3)]);
}

#[tokio::test]
async fn chats_are_completions_in_other_words() {
    let node = one(&Settings::default()).await;
    let body = json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "text", "text": "Hello"}]}],
        "max_completion_tokens": 12, "temperature": 0, "ignore_eos": true,
    });
    let chat = node.call("/v1/chat/completions", &body).await;
    assert_eq!(chat["object"], "chat.completion");
    assert!(chat["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(chat["choices"][0]["message"]["role"], "assistant");
    let text = chat["choices"][0]["message"]["content"].as_str().unwrap();
    let rendered = "system: Be brief.\nuser: Hello\nassistant: ";
    let plain = json!({"prompt": rendered, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let plain = node.call("/v1/completions", &plain).await;
    assert_eq!(plain["choices"][0]["text"], text);
    let tokens = node.call("/tokenize", &json!({"messages": body["messages"]})).await;
    assert_eq!(tokens["count"], rendered.len());

    let streamed = node.post("/v1/chat/completions", &with(body, json!({"stream": true}))).await;
    let events = streamed.events();
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let joined: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(joined, text);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn logprobs_echo_and_token_ids() {
    let node = one(&Settings::default()).await;
    let body = with(completion(&prompt(10, 1), 4), json!({"logprobs": 2, "return_token_ids": true}));
    let answer = node.call("/v1/completions", &body).await;
    let choice = &answer["choices"][0];
    let logprobs = &choice["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), 4, "{list}: {choice}");
    }
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3]));
    let spelled: String =
        logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(choice["text"], spelled);
    let ids: Vec<u8> = serde_json::from_value(choice["token_ids"].clone()).unwrap();
    assert_eq!(String::from_utf8(ids).unwrap(), spelled);
    let streamed = node.post("/v1/completions", &with(body, json!({"stream": true}))).await.events();
    let offsets: Vec<_> =
        streamed.iter().map(|event| event["choices"][0]["logprobs"]["text_offset"][0].clone()).collect();
    assert_eq!(offsets, [json!(0), json!(1), json!(2), json!(3)]);

    let chat = json!({
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": true, "top_logprobs": 3,
        "ignore_eos": true,
    });
    let chat = node.call("/v1/chat/completions", &chat).await;
    let content = chat["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 2);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 3);

    let echo = json!({"prompt": "Grüße, ", "max_tokens": 3, "echo": true, "n": 2, "ignore_eos": true});
    let echoed = node.call("/v1/completions", &echo).await;
    let streamed = node.post("/v1/completions", &with(echo, json!({"stream": true}))).await;
    for index in 0..2 {
        assert!(echoed["choices"][index]["text"].as_str().unwrap().starts_with("Grüße, "));
        assert!(streamed.streamed_text(index as u64).starts_with("Grüße, "));
    }
}

#[tokio::test]
async fn seeds_make_draws_repeatable_and_absent_ones_differ() {
    let node = one(&Settings::default()).await;
    let body = |seed: Value| {
        with(completion(&prompt(10, 1), 30), json!({"temperature": 1.0, "seed": seed, "logit_bias": {}}))
    };
    let text = |answer: Value| answer["choices"][0]["text"].as_str().unwrap().to_owned();
    let first = text(node.call("/v1/completions", &body(json!(5))).await);
    assert_eq!(text(node.call("/v1/completions", &body(json!(5))).await), first);
    assert_ne!(text(node.call("/v1/completions", &body(json!(6))).await), first);
    let drawn = text(node.call("/v1/completions", &body(Value::Null)).await);
    assert_ne!(text(node.call("/v1/completions", &body(Value::Null)).await), drawn);
}

#[tokio::test]
async fn answers_are_held_to_a_schema() {
    let node = one(&Settings::default()).await;
    let schema = json!({
        "type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["ok", "n"], "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let body = json!({"prompt": "json:", "max_tokens": 200, "response_format": format, "seed": 3});
    for stream in [false, true] {
        let body = with(body.clone(), json!({"stream": stream}));
        let answer = node.post("/v1/completions", &body).await;
        let text = if stream {
            answer.streamed_text(0)
        } else {
            let answer = answer.json();
            assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
            answer["choices"][0]["text"].as_str().unwrap().to_owned()
        };
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
        assert!(value["ok"].is_boolean() && [1, 2].contains(&value["n"].as_i64().unwrap()), "{text}");
    }
}

#[tokio::test]
async fn the_small_routes() {
    let node = one(&Settings::default()).await;
    let models = node.get("/v1/models").await.json();
    assert_eq!(models["object"], "list");
    assert_eq!(models["data"][0]["id"], "toy");
    assert_eq!(models["data"][0]["object"], "model");
    assert_eq!(models["data"][0]["max_model_len"], 2048);
    let tokens = node.call("/tokenize", &json!({"prompt": "é!"})).await;
    assert_eq!(tokens["tokens"], json!([0xc3, 0xa9, 0x21]));
    let text = node.call("/detokenize", &json!({"tokens": [0xc3, 0xa9, 0x21, 257]})).await;
    assert_eq!(text["prompt"], "é!<eos>");
    let bundle = node.get("/microserving/tokenizer").await.json();
    assert_eq!(bundle["tokenizer"]["kind"], "toy-bytes");
    let named = with(completion(&prompt(4, 1), 1), json!({"model": "toy"}));
    node.call("/v1/completions", &named).await;
}

#[tokio::test]
async fn a_router_that_passes_answers_on_gets_marks() {
    let node = one(&Settings::default()).await;
    let marked = async |fields: Value| {
        let body = with(completion(&prompt(20, 1), 5), fields).to_string();
        let mut request = node.request(http::Method::POST, "/v1/completions", body);
        request.headers_mut().insert(RELAY_HEADER, "1".parse().unwrap());
        node.send(request).await
    };
    let salted = |salt: &str| json!({"stream": true, "return_token_ids": true, "cache_salt": salt});
    let plain = node.post("/v1/completions", &with(completion(&prompt(20, 1), 5), salted("a"))).await;
    let plain_tokens: Vec<u64> = plain
        .events()
        .iter()
        .flat_map(|event| event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .map(|id| id.as_u64().unwrap())
        .collect();
    assert_eq!((plain_tokens.len(), plain.header(RELAY_HEADER)), (5, ""));

    let answer = marked(salted("b")).await;
    assert_eq!(answer.header(RELAY_HEADER), "1");
    let part = RelayCutter::default().push(answer.body.into()).unwrap();
    let cut = String::from_utf8(part.events.to_vec()).unwrap();
    assert_eq!(cut.matches("data: ").count(), plain.events().len() + 1);
    assert!(cut.ends_with("data: [DONE]\n\n") && !cut.contains("\n:"), "{cut}");
    assert_eq!(part.tokens.iter().map(|token| u64::from(token.0)).collect::<Vec<_>>(), plain_tokens);
    let usage = part.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (20, 5, 0));

    let whole = marked(json!({"cache_salt": "b"})).await;
    let usage: RelayUsage = whole.header(RELAY_HEADER).parse().unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (20, 5, 16));
    assert!(usage.first_token_micros > 0);
    node.wait_idle().await;
}
