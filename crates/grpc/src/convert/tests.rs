//! Everything there is survives the way there and back, by bytes.

use std::time::Duration;

use microserving_protocol::{
    AbortRequest, Attempt, CallOptions, CompletionChoice, CompletionLogprobs, CompletionRequest,
    CompletionResponse, CountersView, EngineId, FinishReason, KvEvent, KvEventKind, PageHash, PagesView,
    PauseResponse, PrepRecvRequest, PrepRecvResponse, Prompt, RemoteSendRequest, RemoteSendResponse,
    ResponseFormat, SeqId, ServingStats, StartGenerateRequest, StateView, StreamOptions, TokenId,
    TopLogprobs, Usage, addr_to_text,
};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use prost::Message;

use crate::wire;

/// Sends a message as bytes.
fn sent<M: Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).expect("what was written is read")
}

fn text() -> impl Strategy<Value = String> {
    "[a-zü\\n\"]{0,8}"
}

fn tokens() -> impl Strategy<Value = Vec<TokenId>> {
    vec(any::<u32>().prop_map(TokenId), 1..6)
}

fn prompt() -> impl Strategy<Value = Prompt> {
    prop_oneof![
        tokens().prop_map(|tokens| Prompt::Tokens(tokens.into())),
        "[a-zü]{1,8}".prop_map(Prompt::Text)
    ]
}

fn format() -> impl Strategy<Value = ResponseFormat> {
    let schema =
        text().prop_map(|key| serde_json::json!({"type": "object", "z": 0.1, "a": {key: [1, null]}}));
    prop_oneof![
        Just(ResponseFormat::Text),
        Just(ResponseFormat::JsonObject),
        (text(), schema).prop_map(|(name, schema)| ResponseFormat::JsonSchema { name, schema }),
    ]
}

fn completion() -> impl Strategy<Value = CompletionRequest> {
    let number = || option::of(-100.0_f32..100.0);
    let int = || option::of(any::<i64>());
    let flag = any::<bool>;
    let options = option::of((flag(), flag()).prop_map(|(include_usage, continuous_usage_stats)| {
        StreamOptions { include_usage, continuous_usage_stats }
    }));
    (
        (
            option::of(text()),
            prompt(),
            flag(),
            number(),
            number(),
            int(),
            number(),
            number(),
            number(),
            number(),
        ),
        (btree_map(any::<u32>(), -100.0_f32..100.0, 0..4), int(), int(), int(), int(), any::<i64>()),
        (vec(text(), 0..3), vec(any::<u32>().prop_map(TokenId), 0..3), flag(), flag(), options),
        (option::of(text()), option::of(format()), option::of(text()), int(), flag()),
    )
        .prop_map(|(a, b, c, d)| CompletionRequest {
            model: a.0,
            prompt: a.1,
            echo: a.2,
            temperature: a.3,
            top_p: a.4,
            top_k: a.5,
            min_p: a.6,
            repetition_penalty: a.7,
            frequency_penalty: a.8,
            presence_penalty: a.9,
            logit_bias: b.0,
            seed: b.1,
            logprobs: b.2,
            max_tokens: b.3,
            min_tokens: b.4,
            n: b.5,
            stop: c.0,
            stop_token_ids: c.1,
            ignore_eos: c.2,
            stream: c.3,
            stream_options: c.4,
            user: d.0,
            response_format: d.1,
            cache_salt: d.2,
            priority: d.3,
            return_token_ids: d.4,
        })
}

fn call() -> impl Strategy<Value = CallOptions> {
    // Whole milliseconds: seconds as a double hold them exactly enough to come back.
    let timeout = option::of((1_u64..86_400_000).prop_map(Duration::from_millis));
    (option::of("[a-z]{1,8}"), option::of(any::<u32>()), timeout).prop_map(|(seq_id, attempt, timeout)| {
        CallOptions { seq_id: seq_id.map(SeqId::from), attempt: attempt.map(Attempt), timeout }
    })
}

fn usage() -> impl Strategy<Value = Usage> {
    (any::<u32>(), any::<u32>(), any::<u32>(), any::<bool>()).prop_map(|(a, b, c, details)| {
        let usage = Usage::new(a, b, c);
        if details { usage } else { Usage { prompt_tokens_details: None, ..usage } }
    })
}

fn stats() -> impl Strategy<Value = ServingStats> {
    ((text(), text(), text()), any::<[u32; 6]>(), any::<u64>(), -1e9..1e9, -1e9..1e9).prop_map(
        |((pattern, decode_engine, prefill_engine), numbers, sent_bytes, transfer, exposed)| ServingStats {
            pattern,
            matched_tokens: numbers[0],
            received_tokens: numbers[1],
            computed_tokens: numbers[2],
            prefill_cached_tokens: numbers[3],
            prefill_computed_tokens: numbers[4],
            sent_tokens: numbers[5],
            sent_bytes,
            transfer_seconds: transfer,
            exposed_transfer_seconds: exposed,
            decode_engine,
            prefill_engine,
        },
    )
}

fn logprobs() -> impl Strategy<Value = CompletionLogprobs> {
    let value = || -50.0_f32..0.0;
    (
        vec(any::<u32>(), 0..3),
        vec(option::of(value()), 0..3),
        vec(text(), 0..3),
        vec(vec((text(), value()), 0..3).prop_map(TopLogprobs), 0..3),
    )
        .prop_map(|(text_offset, token_logprobs, tokens, top_logprobs)| CompletionLogprobs {
            text_offset,
            token_logprobs,
            tokens,
            top_logprobs,
        })
}

fn choice() -> impl Strategy<Value = CompletionChoice> {
    let reason = option::of(prop_oneof![
        Just(FinishReason::Stop),
        Just(FinishReason::Length),
        Just(FinishReason::Preempt)
    ]);
    let ids = option::of(vec(any::<u32>().prop_map(TokenId), 0..3));
    (any::<u32>(), text(), option::of(logprobs()), reason, ids).prop_map(
        |(index, text, logprobs, finish_reason, token_ids)| CompletionChoice {
            index,
            text,
            logprobs,
            finish_reason,
            token_ids,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn requests(
        completion in completion(), call in call(), positions in any::<[i64; 3]>(), commit in any::<bool>(),
        reserve_tokens in any::<u32>(), address in vec(any::<u8>(), 0..40), resume_from in option::of(any::<u32>()),
        with_replay in any::<bool>(),
    ) {
        let [begin, end, recv_rank] = positions;
        let prep = PrepRecvRequest { completion, call, end, commit, reserve_tokens };
        prop_assert_eq!(PrepRecvRequest::try_from(sent(&wire::PrepRecvRequest::from(&prep))), Ok(prep.clone()));
        let PrepRecvRequest { completion, call, .. } = prep;
        let kv_addr_info = addr_to_text(&address);
        let send = RemoteSendRequest { completion, call, begin, end, kv_addr_info, recv_rank };
        let message = wire::RemoteSendRequest::try_from(&send).expect("it is base64");
        prop_assert_eq!(&message.kv_addr_info, &address);
        prop_assert_eq!(RemoteSendRequest::try_from(sent(&message)), Ok(send.clone()));
        let RemoteSendRequest { completion, call, .. } = send;
        let generated_from = with_replay.then_some(1);
        let start =
            StartGenerateRequest { completion, call, begin, generated_from, choice_index: resume_from, resume_from };
        let message = wire::StartGenerateRequest::from(&start);
        prop_assert_eq!(StartGenerateRequest::try_from(sent(&message)), Ok(start));
    }

    #[test]
    fn answers(
        id in text(), created in any::<u64>(), model in option::of(text()), choices in vec(choice(), 0..3),
        usage in option::of(usage()), stats in option::of(stats()), lists in vec(tokens(), 0..3),
    ) {
        let mut answer = CompletionResponse::new(&id, created, "", choices);
        answer.model = model;
        answer.usage = usage;
        answer.microserving = stats.clone();
        let message = wire::CompletionResponse::from(answer.clone());
        prop_assert_eq!(CompletionResponse::try_from(sent(&message)), Ok(answer));
        let pause = PauseResponse { token_ids: lists, microserving: stats };
        prop_assert_eq!(PauseResponse::from(sent(&wire::PauseResponse::from(pause.clone()))), pause);
    }

    #[test]
    fn views(
        boot in any::<u64>(), number in any::<u64>(), pages in vec(any::<u128>(), 0..4), small in any::<[u32; 12]>(),
        large in any::<[u64; 15]>(), texts in any::<[bool; 2]>(), lease in option::of(0.0..1e6), name in option::of(text()),
        address in vec(any::<u8>(), 0..40),
    ) {
        let incarnation = format!("{boot:016x}");
        let pages: Vec<String> = pages.into_iter().map(|page| PageHash(page).to_string()).collect();
        for kind in [
            KvEventKind::Stored { pages: pages.clone() },
            KvEventKind::Removed { pages: pages.clone() },
            KvEventKind::Cleared,
            KvEventKind::Snapshot { pages },
        ] {
            let event = KvEvent { incarnation: incarnation.clone(), number, kind };
            let message = wire::KvEvent::try_from(event.clone()).expect("hex");
            prop_assert_eq!(KvEvent::try_from(sent(&message)), Ok(event));
        }
        let view = StateView {
            engine_id: EngineId::from("e"),
            incarnation,
            model: "m".into(),
            max_context: small[0],
            page_size: small[1],
            layout_fingerprint: "0123456789abcdef".into(),
            pages: PagesView {
                free: small[2], reserved: small[3], owned: small[4], cached: small[5], quarantined: small[6],
                total: small[7],
            },
            waiting: small[8],
            running: small[9],
            receiving: small[10],
            sending: small[11],
            queued_prefill_tokens: large[14],
            draining: texts[0],
            counters: CountersView {
                steps: large[0], prefill_tokens: large[1], decode_tokens: large[2], matched_tokens: large[3],
                lookup_tokens: large[4], evicted_pages: large[5], preemptions: large[6], leases_expired: large[7],
                transfers_lost: large[8], aborted: large[9], bytes_sent: large[10], bytes_received: large[11],
                transfer_micros: large[12], exposed_transfer_micros: large[13], devices_lost: large[14],
            },
            grpc: texts[1],
            marks: texts[0],
        };
        let message = wire::StateResponse::try_from(view.clone()).expect("hex");
        prop_assert_eq!(StateView::from(sent(&message)), view);
        let prep = PrepRecvResponse {
            kv_addr_info: addr_to_text(&address),
            prefix_matched_length: small[0],
            lease_seconds: lease,
            seq_id: name.clone().map(SeqId::from),
            engine_id: name.map(EngineId::from),
        };
        let message = wire::PrepRecvResponse::try_from(prep.clone()).expect("base64");
        prop_assert_eq!(PrepRecvResponse::from(sent(&message)), prep);
        let reply = RemoteSendResponse {
            sent_tokens: small[0], cached_tokens: small[1], computed_tokens: small[2], bytes: large[0],
            transfer_seconds: 0.25, exposed_transfer_seconds: 0.125,
        };
        prop_assert_eq!(RemoteSendResponse::from(sent(&wire::RemoteSendResponse::from(reply))), reply);
    }
}

#[test]
fn what_json_refuses_is_refused() {
    let bare = wire::CompletionRequest {
        prompt: Some(wire::completion_request::Prompt::Tokens(wire::TokenIds { ids: vec![1, 2] })),
        ..Default::default()
    };
    let start = |completion: &wire::CompletionRequest, call: wire::CallOptions, generated_from| {
        let message = wire::StartGenerateRequest {
            completion: Some(completion.clone()),
            call: Some(call),
            generated_from,
            ..Default::default()
        };
        StartGenerateRequest::try_from(message)
    };
    let call = wire::CallOptions::default;
    let whole = start(&bare, call(), None).expect("all that is needed");
    assert_eq!(whole.completion.n, 1, "none is one");
    let refused = |result: Result<StartGenerateRequest, microserving_protocol::ApiError>| {
        let error = result.expect_err("refused");
        (error.status, error.param.unwrap_or_default())
    };
    let no_prompt = wire::CompletionRequest { prompt: None, ..bare.clone() };
    assert_eq!(refused(start(&no_prompt, call(), None)), (422, "prompt".into()));
    let empty = wire::completion_request::Prompt::Text(String::new());
    let empty = wire::CompletionRequest { prompt: Some(empty), ..bare.clone() };
    assert_eq!(refused(start(&empty, call(), None)), (400, "prompt".into()));
    let key = |seq_id: String| wire::CallOptions { seq_id: Some(seq_id), ..call() };
    assert_eq!(refused(start(&bare, key(String::new()), None)), (400, "seq_id".into()));
    assert_eq!(refused(start(&bare, key("x".repeat(257)), None)), (400, "seq_id".into()));
    for timeout in [0.0, -1.0, f64::NAN, f64::INFINITY, 86_401.0] {
        let late = wire::CallOptions { timeout_seconds: Some(timeout), ..call() };
        assert_eq!(refused(start(&bare, late, None)), (400, "timeout_seconds".into()), "{timeout}");
    }
    assert_eq!(refused(start(&bare, call(), Some(3))), (400, "generated_from".into()));
    for (kind, schema) in [
        ("xml", None),
        ("json_schema", None),
        ("json_schema", Some("{")),
        ("text", Some("{}")),
        ("json_schema", Some("3")),
    ] {
        let json_schema = schema.map(|schema| wire::JsonSchema { name: "n".into(), schema: schema.into() });
        let format = wire::ResponseFormat { r#type: kind.into(), json_schema };
        let request = wire::CompletionRequest { response_format: Some(format), ..bare.clone() };
        assert_eq!(
            refused(start(&request, call(), None)),
            (400, "response_format".into()),
            "{kind} {schema:?}"
        );
    }
    let nameless = wire::SequenceRequest { seq_id: String::new(), attempt: None };
    assert_eq!(AbortRequest::try_from(nameless).expect_err("no name").param.as_deref(), Some("seq_id"));
}

#[test]
fn answers_that_make_no_sense_are_malformed() {
    let choice = wire::Choice { finish_reason: 9, ..Default::default() };
    let answer = wire::CompletionResponse { choices: vec![choice], ..Default::default() };
    assert!(CompletionResponse::try_from(answer).unwrap_err().0.contains('9'));
    let event = |kind| KvEvent::try_from(wire::KvEvent { incarnation: 1, number: 7, kind });
    assert!(event(None).unwrap_err().0.contains('7'));
    let hashes = wire::PageHashes { hashes: vec![0; 17] };
    assert!(event(Some(wire::kv_event::Kind::Stored(hashes))).unwrap_err().0.contains("17"));
}
