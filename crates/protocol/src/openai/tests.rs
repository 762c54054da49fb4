//! Tables: a body in, what was read or the error out.

use expect_test::{Expect, expect};

use super::*;
use crate::{ApiError, FinishReason, TokenId};

fn error_line(error: &ApiError) -> String {
    format!("{error} [{}]", error.param.as_deref().unwrap_or("-"))
}

/// Reads and checks a completion; shows it as it serialises.
fn check(body: &str, expected: &Expect) {
    let outcome = CompletionRequest::from_json(body.as_bytes()).and_then(|request| {
        request.generation(7)?;
        Ok(serde_json::to_string(&request).expect("serialises"))
    });
    expected.assert_eq(&outcome.unwrap_or_else(|error| error_line(&error)));
}

/// One field beside a prompt.
fn field(field: &str, expected: &Expect) {
    check(&format!(r#"{{"prompt":[1],{field}}}"#), expected);
}

#[test]
fn prompts() {
    check(r#"{"prompt":"hi"}"#, &expect![[r#"{"prompt":"hi","n":1}"#]]);
    check(r#"{"prompt":[1,2.0,"3"]}"#, &expect![[r#"{"prompt":[1,2,3],"n":1}"#]]);
    check(r#"{"prompt":["hi"]}"#, &expect![[r#"{"prompt":"hi","n":1}"#]]);
    check(r#"{"prompt":[[4,5]]}"#, &expect![[r#"{"prompt":[4,5],"n":1}"#]]);
    check(r#"{"prompt":["a","b"]}"#, &expect!["400: prompt holds 2 prompts, must hold one [prompt]"]);
    check(r#"{"prompt":[[1],[2]]}"#, &expect!["400: prompt holds 2 prompts, must hold one [prompt]"]);
    check(r#"{"prompt":[[[1]]]}"#, &expect!["422: prompt[0] is a list, must be a whole number [prompt]"]);
    check(r#"{"prompt":""}"#, &expect!["400: prompt is empty [prompt]"]);
    check(r#"{"prompt":[]}"#, &expect!["400: prompt is empty [prompt]"]);
    check(r#"{"prompt":[[]]}"#, &expect!["400: prompt is empty [prompt]"]);
    check(r#"{"prompt":null}"#, &expect!["422: prompt is missing [prompt]"]);
    check(r"{}", &expect!["422: prompt is missing [prompt]"]);
    check(
        r#"{"prompt":7}"#,
        &expect!["422: prompt is a number, must be a string or a list of token ids [prompt]"],
    );
    check(r#"{"prompt":[-1]}"#, &expect!["400: prompt[0] is -1, must be in [0, 4294967295] [prompt]"]);
    check(r#"{"prompt":[1,1.5]}"#, &expect!["422: prompt[1] is 1.5, must be a whole number [prompt]"]);
    check(
        r#"{"prompt":[4294967296]}"#,
        &expect!["400: prompt[0] is 4294967296, must be in [0, 4294967295] [prompt]"],
    );
    check("not json", &expect!["422: the body is not JSON: expected ident at line 1 column 2 [-]"]);
}

#[test]
fn bounds() {
    field(r#""temperature":0"#, &expect![[r#"{"prompt":[1],"temperature":0.0,"n":1}"#]]);
    field(r#""temperature":-0.1"#, &expect!["400: temperature is -0.1, must be in [0, 100] [temperature]"]);
    field(r#""temperature":"NaN""#, &expect!["400: temperature is NaN, must be finite [temperature]"]);
    field(r#""temperature":"inf""#, &expect!["400: temperature is inf, must be finite [temperature]"]);
    field(r#""temperature":[]"#, &expect!["422: temperature is a list, must be a number [temperature]"]);
    field(r#""top_p":0"#, &expect!["400: top_p is 0, must be in (0, 1] [top_p]"]);
    field(r#""top_p":1.01"#, &expect!["400: top_p is 1.01, must be in (0, 1] [top_p]"]);
    field(r#""top_k":-1"#, &expect![[r#"{"prompt":[1],"top_k":-1,"n":1}"#]]);
    field(r#""top_k":-2"#, &expect!["400: top_k is -2, must be in [0, 4294967295] [top_k]"]);
    field(r#""min_p":2"#, &expect!["400: min_p is 2, must be in [0, 1] [min_p]"]);
    field(
        r#""repetition_penalty":0"#,
        &expect!["400: repetition_penalty is 0, must be in (0, 100] [repetition_penalty]"],
    );
    field(
        r#""frequency_penalty":2.5"#,
        &expect!["400: frequency_penalty is 2.5, must be in [-2, 2] [frequency_penalty]"],
    );
    field(
        r#""presence_penalty":-3"#,
        &expect!["400: presence_penalty is -3, must be in [-2, 2] [presence_penalty]"],
    );
    field(r#""max_tokens":0"#, &expect!["400: max_tokens is 0, must be in [1, 4294967295] [max_tokens]"]);
    field(r#""max_tokens":"8""#, &expect![[r#"{"prompt":[1],"max_tokens":8,"n":1}"#]]);
    field(r#""max_completion_tokens":8"#, &expect![[r#"{"prompt":[1],"max_tokens":8,"n":1}"#]]);
    field(
        r#""max_completion_tokens":8,"max_tokens":9"#,
        &expect!["400: max_completion_tokens is 8 and max_tokens is 9: give one [max_completion_tokens]"],
    );
    field(
        r#""min_tokens":9,"max_tokens":8"#,
        &expect!["400: min_tokens is 9, must not be above max_tokens, which is 8 [min_tokens]"],
    );
    field(r#""n":0"#, &expect!["400: n is 0, must be in [1, 64] [n]"]);
    field(r#""n":65"#, &expect!["400: n is 65, must be in [1, 64] [n]"]);
    field(r#""n":2,"best_of":1"#, &expect![[r#"{"prompt":[1],"n":2}"#]]);
    field(r#""n":2,"best_of":2"#, &expect![[r#"{"prompt":[1],"n":2}"#]]);
    field(
        r#""best_of":3"#,
        &expect!["400: best_of is 3: choosing among more candidates than n = 1 is not implemented [best_of]"],
    );
    field(r#""logprobs":21"#, &expect!["400: logprobs is 21, must be in [0, 20] [logprobs]"]);
    field(
        r#""logprobs":1,"echo":true"#,
        &expect![
            "400: logprobs together with echo (log-probabilities of the prompt) is not implemented [logprobs]"
        ],
    );
    field(
        r#""priority":3000000000"#,
        &expect!["400: priority is 3000000000, must be in [-2147483648, 2147483647] [priority]"],
    );
    field(r#""seed":-1"#, &expect![[r#"{"prompt":[1],"seed":-1,"n":1}"#]]);
}

#[test]
fn null_is_for_optional_fields_only() {
    field(
        r#""temperature":null,"max_tokens":null,"stop":null,"logit_bias":null,"user":null,"debug_config":null"#,
        &expect![[r#"{"prompt":[1],"n":1}"#]],
    );
    field(r#""n":null"#, &expect!["422: n is null, must be given or left out [n]"]);
    field(r#""best_of":null"#, &expect!["422: best_of is null, must be given or left out [best_of]"]);
    field(r#""echo":null"#, &expect!["422: echo is null, must be given or left out [echo]"]);
    field(r#""stream":null"#, &expect!["422: stream is null, must be given or left out [stream]"]);
}

#[test]
fn stops_biases_and_formats() {
    field(r#""stop":"x""#, &expect![[r#"{"prompt":[1],"n":1,"stop":["x"]}"#]]);
    field(r#""stop":["x","y"]"#, &expect![[r#"{"prompt":[1],"n":1,"stop":["x","y"]}"#]]);
    field(r#""stop":"""#, &expect!["400: stop[0] is empty [stop]"]);
    field(r#""stop":[1]"#, &expect!["422: stop[0] is a number, must be a string [stop]"]);
    field(r#""stop":{}"#, &expect!["422: stop is an object, must be a string or a list of strings [stop]"]);
    field(r#""stop_token_ids":[7,"8"]"#, &expect![[r#"{"prompt":[1],"n":1,"stop_token_ids":[7,8]}"#]]);
    field(
        r#""logit_bias":{"5":1.5,"2":"-1"}"#,
        &expect![[r#"{"prompt":[1],"logit_bias":{"2":-1.0,"5":1.5},"n":1}"#]],
    );
    field(
        r#""logit_bias":{"x":1}"#,
        &expect![[r#"400: logit_bias has the key "x", must be token ids [logit_bias]"#]],
    );
    field(
        r#""logit_bias":{"5":101}"#,
        &expect!["400: logit_bias is 101, must be in [-100, 100] [logit_bias]"],
    );
    field(r#""logit_bias":{"5":"nan"}"#, &expect!["400: logit_bias.5 is NaN, must be finite [logit_bias]"]);
    field(
        r#""response_format":{"type":"text","json_schema":null}"#,
        &expect![[r#"{"prompt":[1],"n":1,"response_format":{"type":"text"}}"#]],
    );
    field(
        r#""response_format":{"type":"json_object","json_schema":null}"#,
        &expect![[r#"{"prompt":[1],"n":1,"response_format":{"type":"json_object"}}"#]],
    );
    field(
        r#""response_format":{"type":"json_object","schema":"{\"z\":1,\"a\":2}"}"#,
        &expect![[
            r#"{"prompt":[1],"n":1,"response_format":{"type":"json_schema","json_schema":{"name":"schema","schema":{"z":1,"a":2}}}}"#
        ]],
    );
    field(
        r#""response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"},"strict":true}}"#,
        &expect![[
            r#"{"prompt":[1],"n":1,"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"}}}}"#
        ]],
    );
    field(
        r#""response_format":{"type":"json_schema"}"#,
        &expect!["400: response_format.json_schema is missing [response_format]"],
    );
    field(
        r#""response_format":{"type":"json_schema","json_schema":{"schema":7}}"#,
        &expect!["400: the schema in response_format is a number, must be an object [response_format]"],
    );
    field(
        r#""response_format":{"type":"regex"}"#,
        &expect![[
            r#"400: response_format.type is "regex", must be text, json_object or json_schema [response_format]"#
        ]],
    );
}

#[test]
fn known_and_not_implemented_is_refused_and_unknown_ignored() {
    field(r#""suffix":"x""#, &expect!["400: suffix is not implemented [suffix]"]);
    field(r#""guided_json":{}"#, &expect!["400: guided_json is not implemented [guided_json]"]);
    field(
        r#""skip_special_tokens":false"#,
        &expect!["400: skip_special_tokens is not implemented [skip_special_tokens]"],
    );
    field(r#""skip_special_tokens":true"#, &expect![[r#"{"prompt":[1],"n":1}"#]]);
    field(
        r#""debug_config":{"special_request":"query_engine_metrics"}"#,
        &expect!["400: debug_config.special_request is not implemented [debug_config.special_request]"],
    );
    field(
        r#""debug_config":{"disagg_config":{"kind":"x"}}"#,
        &expect!["400: debug_config.disagg_config is not implemented [debug_config.disagg_config]"],
    );
    field(r#""debug_config":{"ignore_eos":true}"#, &expect![[r#"{"prompt":[1],"n":1,"ignore_eos":true}"#]]);
    field(
        r#""debug_config":"x""#,
        &expect!["422: debug_config is a string, must be an object [debug_config]"],
    );
    field(r#""no_such_field":{"a":[1]}"#, &expect![[r#"{"prompt":[1],"n":1}"#]]);
}

/// What MLC's router sends, every field, mostly null.
pub(crate) const MLC_BODY: &str = r#"{"model": null, "prompt": [104, 101, 108], "best_of": 1, "echo": false,
    "frequency_penalty": null, "presence_penalty": null, "logprobs": null, "logit_bias": null, "max_tokens": 3, "n": 1,
    "seed": null, "stop": null, "stream": true, "stream_options": {"include_usage": true}, "suffix": null,
    "temperature": null, "top_p": null, "user": "cmpl-9e71", "response_format": {"type": "json_object", "json_schema": null},
    "debug_config": {"ignore_eos": false, "pinned_system_prompt": false, "special_request": null,
    "grammar_execution_mode": "jump_forward", "disagg_config": null}}"#;

#[test]
fn mlcs_body() {
    check(
        MLC_BODY,
        &expect![[
            r#"{"prompt":[104,101,108],"max_tokens":3,"n":1,"stream":true,"stream_options":{"include_usage":true},"user":"cmpl-9e71","response_format":{"type":"json_object"}}"#
        ]],
    );
}

#[test]
fn what_is_written_is_read_back() {
    let body = r#"{"model":"m","prompt":[1,2],"echo":true,"temperature":0.5,"top_p":0.25,"top_k":4,"min_p":0.125,
        "repetition_penalty":1.5,"frequency_penalty":-1,"presence_penalty":1,"logit_bias":{"3":-100},"seed":9,
        "max_tokens":5,"min_tokens":1,"n":2,"stop":["a"],"stop_token_ids":[8],"ignore_eos":true,"stream":true,
        "stream_options":{"include_usage":true,"continuous_usage_stats":true},"user":"u",
        "response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object"}}},
        "cache_salt":"s","priority":-2,"return_token_ids":true}"#;
    let request = CompletionRequest::from_json(body.as_bytes()).expect("valid");
    let written = serde_json::to_vec(&request).expect("serialises");
    assert_eq!(CompletionRequest::from_json(&written).as_ref(), Ok(&request));
    let params = request.generation(1).expect("in bounds");
    assert_eq!(params.n, 2);
    assert_eq!(params.sampling.seed, 9);
    assert_eq!(params.sampling.logit_bias, [(TokenId(3), -100.0)]);
    assert_eq!((params.max_tokens, params.min_tokens, params.priority), (Some(5), 1, -2));
    assert_eq!((&*params.cache_salt, params.echo, params.stream), ("s", true, true));
    assert!(
        params.include_usage && params.continuous_usage_stats && params.return_token_ids && params.ignore_eos
    );
    assert!(matches!(params.format, OutputFormat::JsonSchema(_)));
}

fn check_chat(body: &str, expected: &Expect) {
    let outcome = ChatCompletionRequest::from_json(body.as_bytes()).and_then(|request| {
        let messages = serde_json::to_string(&request.messages).expect("serialises");
        let rest = request.into_completion(Prompt::Text("P".into()));
        rest.generation(0)?;
        Ok(format!("{messages} {}", serde_json::to_string(&rest).expect("serialises")))
    });
    expected.assert_eq(&outcome.unwrap_or_else(|error| error_line(&error)));
}

#[test]
fn chats() {
    check_chat(
        r#"{"model":"m","messages":[{"role":"developer","content":"be brief"},
            {"role":"user","name":"eve","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],
            "max_completion_tokens":4,"logprobs":true,"top_logprobs":2,"tool_choice":"none","tools":[]}"#,
        &expect![[
            r#"[{"role":"system","content":"be brief"},{"role":"user","content":"ab","name":"eve"}] {"model":"m","prompt":"P","logprobs":2,"max_tokens":4,"n":1}"#
        ]],
    );
    let user = r#""messages":[{"role":"user","content":"x"}]"#;
    check_chat(r#"{"messages":[]}"#, &expect!["400: messages is empty [messages]"]);
    check_chat(r"{}", &expect!["422: messages is missing [messages]"]);
    check_chat(
        r#"{"messages":["x"]}"#,
        &expect!["422: messages[0] is a string, must be an object [messages[0]]"],
    );
    check_chat(
        r#"{"messages":[{"role":"user"}]}"#,
        &expect!["422: messages[0].content is missing [messages[0].content]"],
    );
    check_chat(
        r#"{"messages":[{"role":"robot","content":"x"}]}"#,
        &expect![[
            r#"400: messages[0].role is "robot", must be system, developer, user or assistant [messages[0].role]"#
        ]],
    );
    check_chat(
        r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}"#,
        &expect![[
            r#"400: messages[0].content[0].type is "image_url"; only text is implemented [messages[0].content[0].type]"#
        ]],
    );
    check_chat(&format!(r#"{{{user},"tools":[{{}}]}}"#), &expect!["400: tools is not implemented [tools]"]);
    check_chat(
        &format!(r#"{{{user},"tool_choice":"required"}}"#),
        &expect!["400: tool_choice is not implemented [tool_choice]"],
    );
    check_chat(
        &format!(r#"{{{user},"top_logprobs":2}}"#),
        &expect!["400: top_logprobs needs logprobs to be true [top_logprobs]"],
    );
    check_chat(
        &format!(r#"{{{user},"logprobs":true,"top_logprobs":21}}"#),
        &expect!["400: top_logprobs is 21, must be in [0, 20] [top_logprobs]"],
    );
    check_chat(
        &format!(r#"{{{user},"modalities":["text","audio"]}}"#),
        &expect!["400: modalities is not implemented [modalities]"],
    );
    check_chat(
        &format!(r#"{{{user},"temperature":-1}}"#),
        &expect!["400: temperature is -1, must be in [0, 100] [temperature]"],
    );
}

#[test]
fn tokenize_bodies() {
    let read = |body: &str| {
        TokenizeRequest::from_json(body.as_bytes()).map_or_else(
            |error| error_line(&error),
            |request| format!("{:?} {}", request.input, request.add_special_tokens),
        )
    };
    assert_eq!(read(r#"{"prompt":"a","add_special_tokens":false}"#), r#"Text("a") false"#);
    assert_eq!(
        read(r#"{"messages":[{"role":"user","content":"a"}]}"#),
        r#"Chat([ChatMessage { role: "user", content: "a", name: None }]) true"#
    );
    assert_eq!(read("{}"), "422: prompt is missing [prompt]");
    assert_eq!(
        DetokenizeRequest::from_json(br#"{"tokens":[1,"2"]}"#).map(|request| request.tokens),
        Ok(vec![TokenId(1), TokenId(2)])
    );
    assert_eq!(DetokenizeRequest::from_json(b"{}").expect_err("no tokens").param.as_deref(), Some("tokens"));
}

fn chunk(index: u32, text: &str, finish_reason: Option<FinishReason>) -> CompletionResponse {
    let choice = CompletionChoice {
        index,
        text: text.into(),
        finish_reason,
        token_ids: Some(vec![TokenId(index)]),
        ..CompletionChoice::default()
    };
    CompletionResponse::new("cmpl-1", 5, "m", vec![choice])
}

#[test]
fn a_chunk_has_every_field_that_clients_read() {
    let mut first = chunk(0, "a", None);
    first.choices[0].token_ids = None;
    expect![[r#"{"id":"cmpl-1","object":"text_completion","created":5,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}],"usage":null}"#]]
        .assert_eq(&serde_json::to_string(&first).expect("serialises"));
    let usage = CompletionResponse {
        usage: Some(Usage::new(3, 2, 1)),
        ..CompletionResponse::new("i", 5, "m", vec![])
    };
    expect![[r#"{"id":"i","object":"text_completion","created":5,"model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}}"#]]
        .assert_eq(&serde_json::to_string(&usage).expect("serialises"));
    // MLC's chunks have fewer fields, and its usage one more.
    let mlc = r#"{"id":"c","choices":[{"finish_reason":"preempt","index":0,"logprobs":{"text_offset":[]},"text":"a"}],"created":1,"model":null,
        "object":"text_completion","usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,"extra":{"ttft_s":0.01}}}"#;
    let mlc: CompletionResponse = serde_json::from_str(mlc).expect("readable");
    assert_eq!(mlc.choices[0].finish_reason, Some(FinishReason::Preempt));
}

#[test]
fn chunks_make_one_answer_and_one_chat() {
    let chunks = [
        chunk(1, "x", None),
        chunk(0, "a", None),
        chunk(1, "y", Some(FinishReason::Length)),
        chunk(0, "", Some(FinishReason::Stop)),
        CompletionResponse {
            usage: Some(Usage::new(3, 4, 0)),
            ..CompletionResponse::new("cmpl-1", 5, "m", vec![])
        },
    ];
    let mut assembler = CompletionAssembler::new();
    let mut stream = ChatStream::new();
    let mut deltas = Vec::new();
    for chunk in chunks {
        assembler.push(chunk.clone());
        deltas.push(stream.convert(chunk));
    }
    let whole = assembler.finish().expect("chunks came");
    let texts: Vec<_> = whole.choices.iter().map(|c| (c.index, c.text.as_str(), c.finish_reason)).collect();
    assert_eq!(texts, [(0, "a", Some(FinishReason::Stop)), (1, "xy", Some(FinishReason::Length))]);
    assert_eq!(whole.choices[1].token_ids, Some(vec![TokenId(1), TokenId(1)]));
    assert_eq!(whole.usage, Some(Usage::new(3, 4, 0)));

    let chat = chat_response(whole);
    assert_eq!((chat.id.as_str(), chat.object.as_str()), ("chatcmpl-1", "chat.completion"));
    assert_eq!(chat.choices[1].message, ChatMessage::new("assistant", "xy"));

    let roles: Vec<_> = deltas.iter().flat_map(|d| &d.choices).map(|c| c.delta.role.is_some()).collect();
    assert_eq!(roles, [true, true, false, false]);
    assert_eq!(deltas[3].choices[0].delta, ChatDelta::default());
    assert_eq!(serde_json::to_string(&deltas[3].choices[0].delta).expect("serialises"), "{}");
    assert_eq!(deltas[4].usage, Some(Usage::new(3, 4, 0)));
}
