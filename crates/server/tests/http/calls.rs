//! The three calls and their companions, on two engines.

use std::time::Duration;

use http::Method;
use microserving_protocol::RelayCutter;
use serde_json::{Value, json};

use crate::support::{Answer, Node, Settings, completion, one, over, prompt, two, with};
use crate::wires::Wire;

over_both_wires! {
    disaggregated_tokens_are_those_of_one_engine,
    what_d_matched_is_neither_computed_nor_sent,
    a_client_without_keys_uses_its_transfer,
    a_key_never_seen_is_plain_generation,
    another_engine_goes_on_where_the_first_stopped,
    a_stream_can_be_attached_to,
    a_context_moves_by_commit,
    a_generation_pauses_and_is_aborted,
    an_abort_that_overtakes_its_call_wins,
    changes_of_the_cache_can_be_followed,
    followers_are_let_go_when_the_engine_drains,
}

async fn text_alone(tokens: &[u32], max_tokens: u32) -> String {
    let node = one(&Settings::default()).await;
    let answer = node.call("/v1/completions", &completion(tokens, max_tokens)).await;
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Runs the three calls and returns the answers of the first two and the whole text.
async fn three_calls(
    p: &Node,
    d: &Node,
    tokens: &[u32],
    end: i64,
    key: Value,
) -> (Value, Option<Value>, String) {
    let keyed = |body| with(body, key.clone());
    let prep =
        d.call("/microserving/prep_recv", &keyed(with(completion(tokens, 8), json!({"end": end})))).await;
    let matched = prep["prefix_matched_length"].as_u64().unwrap();
    let absolute = if end < 0 { tokens.len() as i64 + end } else { end };
    let mut sent = None;
    if matched < absolute as u64 {
        let send = json!({
            "begin": matched, "end": end, "kv_addr_info": prep["kv_append_metadata"], "recv_rank": 1,
        });
        sent = Some(p.call("/microserving/remote_send", &keyed(with(completion(tokens, 8), send))).await);
    }
    let start = with(completion(tokens, 8), json!({"begin": absolute}));
    let answer = d.call("/microserving/start_generate", &keyed(start)).await;
    (prep, sent, answer["choices"][0]["text"].as_str().unwrap().to_owned())
}

async fn disaggregated_tokens_are_those_of_one_engine(wire: Wire) {
    for (case, (len, end)) in
        [(2, -1), (16, -1), (17, -1), (40, -1), (40, 20), (40, 16), (100, 3)].into_iter().enumerate()
    {
        let (p, d) = two(&over(wire)).await;
        let tokens = prompt(len, 5);
        let key = if case % 2 == 0 { json!({"user": "r1"}) } else { json!({"seq_id": "r1", "attempt": 3}) };
        let (prep, sent, text) = three_calls(&p, &d, &tokens, end, key).await;
        let received = if end < 0 { i64::from(len) + end } else { end };
        assert_eq!(prep["prefix_matched_length"], 0);
        assert_eq!(prep["engine_id"], "d");
        assert_eq!(prep["seq_id"], "r1");
        assert_eq!(prep["lease_seconds"], 30.0);
        let sent = sent.unwrap();
        assert_eq!(sent["sent_tokens"], received);
        assert_eq!(sent["computed_tokens"], received);
        assert!(sent["bytes"].as_u64().unwrap() > 0);
        assert_eq!(text, text_alone(&tokens, 8).await, "prompt {len}, end {end}");
        let counters = d.state().await.counters;
        assert_eq!(counters.prefill_tokens, u64::from(len) - received as u64, "D computed the rest only");
        p.wait_idle().await;
        d.wait_idle().await;
    }
}

async fn what_d_matched_is_neither_computed_nor_sent(wire: Wire) {
    let (p, d) = two(&over(wire)).await;
    let tokens = prompt(60, 2);
    d.call("/v1/completions", &completion(&tokens[..40], 1)).await;
    let (prep, sent, text) = three_calls(&p, &d, &tokens, -1, json!({"user": "r"})).await;
    assert_eq!(prep["prefix_matched_length"], 32);
    assert_eq!(sent.unwrap()["sent_tokens"], 59 - 32);
    assert_eq!(text, text_alone(&tokens, 8).await);
    let (prep, sent, again) = three_calls(&p, &d, &tokens, 48, json!({"user": "r2"})).await;
    assert_eq!(prep["prefix_matched_length"], 48);
    assert_eq!(prep["kv_append_metadata"], "", "nothing is to be sent");
    assert!(sent.is_none());
    assert_eq!(again, text);
    d.wait_idle().await;
}

/// The client of the printed example: no key, no `debug_config`, a stream at the end.
async fn a_client_without_keys_uses_its_transfer(wire: Wire) {
    let (p, d) = two(&over(wire)).await;
    let tokens = prompt(50, 8);
    let prep =
        d.call("/microserving/prep_recv", &json!({"prompt": tokens, "end": -1, "stream": false})).await;
    let send = json!({
        "prompt": tokens, "begin": prep["prefix_matched_length"], "end": 49,
        "kv_addr_info": prep["kv_append_metadata"], "recv_rank": 1, "stream": false,
    });
    p.call("/microserving/remote_send", &send).await;
    let start = json!({"prompt": tokens, "begin": 49, "stream": true, "max_tokens": 100, "temperature": 0});
    let answer = d.post("/microserving/start_generate", &start).await;
    assert!(!answer.events().is_empty());
    assert_eq!(d.state().await.counters.prefill_tokens, 1, "only the last token");
    d.wait_idle().await;
}

async fn a_key_never_seen_is_plain_generation(wire: Wire) {
    let d = one(&over(wire)).await;
    let tokens = prompt(33, 4);
    let body = with(completion(&tokens, 8), json!({"begin": -1, "user": "fresh"}));
    let answer = d.call("/microserving/start_generate", &body).await;
    assert_eq!(answer["id"], "fresh");
    assert_eq!(answer["choices"][0]["text"], text_alone(&tokens, 8).await);
    d.wait_idle().await;
}

async fn another_engine_goes_on_where_the_first_stopped(wire: Wire) {
    let tokens = prompt(30, 6);
    let options = json!({"return_token_ids": true, "stop": ["qqqq"], "temperature": 0.9, "seed": 11});
    let first = one(&over(wire)).await;
    let whole = with(with(completion(&tokens, 24), options.clone()), json!({"begin": 0}));
    let whole = first.call("/microserving/start_generate", &whole).await;
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let ids: Vec<u32> = serde_json::from_value(whole["choices"][0]["token_ids"].clone()).unwrap();
    for cut in [1, 7, 23] {
        let second = one(&over(wire)).await;
        let mut replay = tokens.clone();
        replay.extend(&ids[..cut]);
        let body = with(
            with(completion(&replay, 24), options.clone()),
            json!({"begin": 0, "generated_from": tokens.len(), "user": "r", "attempt": 1}),
        );
        let rest = second.call("/microserving/start_generate", &body).await;
        assert_eq!(rest["choices"][0]["text"], text[cut..], "cut at {cut}");
        assert_eq!(rest["usage"]["prompt_tokens"], 30);
        assert_eq!(rest["usage"]["completion_tokens"], 24);
    }
}

async fn a_stream_can_be_attached_to(wire: Wire) {
    let d = one(&over(wire)).await;
    let body = with(completion(&prompt(20, 1), 12), json!({"begin": 0, "user": "a"}));
    let whole = d.call("/microserving/start_generate", &body).await;
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let again = d.call("/microserving/start_generate", &with(body, json!({"resume_from": 5}))).await;
    assert_eq!(again["choices"][0]["text"], text[5..]);
    assert_eq!(again["choices"][0]["finish_reason"], "length");
    assert_eq!(d.state().await.counters.decode_tokens, 12, "nothing was computed twice");
}

async fn a_context_moves_by_commit(wire: Wire) {
    let (p, d) = two(&over(wire)).await;
    let tokens = prompt(48, 3);
    let prep = json!({"prompt": tokens, "end": 48, "commit": true, "seq_id": "m"});
    let prep = d.call("/microserving/prep_recv", &prep).await;
    let send = json!({
        "prompt": tokens, "begin": 0, "end": 48, "kv_addr_info": prep["kv_append_metadata"], "recv_rank": 0,
        "seq_id": "m",
    });
    p.call("/microserving/remote_send", &send).await;
    let committed = d.call("/microserving/commit", &json!({"seq_id": "m"})).await;
    assert_eq!(committed["committed_tokens"], 48);
    d.wait_idle().await;
    let after = d.call("/v1/completions", &completion(&[&tokens[..], &[1, 2, 3]].concat(), 4)).await;
    assert_eq!(after["usage"]["prompt_tokens_details"]["cached_tokens"], 48);
}

async fn a_generation_pauses_and_is_aborted(wire: Wire) {
    let d = one(&Settings { step_time: Duration::from_millis(5), ..over(wire) }).await;
    let body = with(completion(&prompt(20, 1), 500), json!({"begin": 0, "user": "a", "stream": true}));
    let streaming = async { d.post("/microserving/start_generate", &body).await };
    let pausing = async {
        let decoding = async {
            loop {
                let view = d.get("/microserving/sequences/a").await;
                if view.status == 200 && view.json()["output_tokens"].as_u64().unwrap() > 2 {
                    return view.json();
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let view = tokio::time::timeout(Duration::from_secs(20), decoding).await.expect("it decodes");
        assert_eq!(view["state"], "decoding");
        let paused = d.call("/microserving/pause", &json!({"seq_id": "a"})).await;
        let tokens = paused["token_ids"][0].as_array().unwrap().len();
        assert!(tokens > 2, "{paused}");
        let list = d.get("/microserving/sequences").await.json();
        assert_eq!(list["sequences"][0]["state"], "paused");
        assert_eq!(list["sequences"][0]["seq_id"], "a");
        let aborted = d.call("/microserving/abort", &json!({"seq_id": "a"})).await;
        assert_eq!(aborted["aborted"], true);
        let again = d.call("/microserving/abort", &json!({"user": "a"})).await;
        assert_eq!(again["aborted"], false, "idempotent");
    };
    let (answer, ()) = tokio::join!(streaming, pausing);
    let (events, done) = answer.events_and_done();
    assert!(!done, "an aborted stream does not end well");
    assert_eq!(events.last().unwrap()["error"]["status"], 410);
    d.wait_idle().await;
}

async fn an_abort_that_overtakes_its_call_wins(wire: Wire) {
    let d = one(&over(wire)).await;
    d.call("/microserving/abort", &json!({"seq_id": "a"})).await;
    let body = with(completion(&prompt(20, 1), 4), json!({"end": -1, "seq_id": "a"}));
    let answer = d.post("/microserving/prep_recv", &body).await;
    assert_eq!(answer.status, 410, "{}", answer.body);
    d.wait_idle().await;
}

async fn changes_of_the_cache_can_be_followed(wire: Wire) {
    let d = one(&over(wire)).await;
    d.call("/v1/completions", &completion(&prompt(40, 1), 1)).await;
    for (from, kind) in [("", "snapshot"), ("?from=0", "snapshot"), ("?from=1", "stored")] {
        let events = first_events(&d, from, 1).await;
        assert_eq!(events[0]["type"], kind, "{from}: {events:?}");
        assert_eq!(events[0]["incarnation"], format!("{:016x}", u64::from(b'd')));
        assert!(events[0]["pages"].as_array().is_some_and(|pages| !pages.is_empty()), "{events:?}");
    }
    let numbers: Vec<_> =
        first_events(&d, "?from=1", 1).await.iter().map(|event| event["number"].clone()).collect();
    assert_eq!(numbers[0], 1);
    for wrong in ["/microserving/kv_events?from=1&from=2", "/microserving/sequences/%ff"] {
        let answer = d.get(wrong).await;
        assert_eq!(answer.status, 400, "{wrong}");
        assert!(answer.json()["error"]["param"].is_string(), "{wrong}: {}", answer.body);
    }
    let bad = d.get("/microserving/kv_events?from=-1").await;
    assert_eq!((bad.status, bad.json()["error"]["param"].as_str()), (400, Some("from")));
}

async fn followers_are_let_go_when_the_engine_drains(wire: Wire) {
    let d = one(&over(wire)).await;
    let following = d.get("/microserving/kv_events");
    let draining = async {
        // Any moment will do: a follower that comes after the drain is let go as well.
        tokio::time::sleep(Duration::from_millis(50)).await;
        d.engine.drain().await.unwrap();
    };
    let (answer, ()) = tokio::join!(following, draining);
    let (events, done) = answer.events_and_done();
    assert!(!done);
    assert_eq!(events.last().unwrap()["error"]["code"], "draining");
    let refused = d.post("/v1/completions", &completion(&prompt(5, 1), 2)).await;
    assert_eq!(refused.status, 503);
    assert_eq!(d.get("/microserving/state").await.json()["draining"], true);
}

async fn first_events(d: &Node, query: &str, count: usize) -> Vec<Value> {
    if d.wire == Wire::Grpc {
        let from = query.strip_prefix("?from=").map_or(0, |from| from.parse().unwrap());
        return d.grpc.first_events(from, count).await;
    }
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(d.address).await.unwrap();
    let request = format!("GET /microserving/kv_events{query} HTTP/1.1\r\nhost: x\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    let read = async {
        while text.matches("\n\n").count() < count {
            let mut bytes = [0; 4096];
            let n = stream.read(&mut bytes).await.unwrap();
            assert!(n > 0, "the stream ended: {text}");
            text.push_str(std::str::from_utf8(&bytes[..n]).unwrap());
        }
    };
    tokio::time::timeout(Duration::from_secs(10), read).await.expect("events come");
    text.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|json| serde_json::from_str(json).unwrap())
        .collect()
}

#[tokio::test]
async fn a_marked_answer_tells_every_token_and_shows_what_others_do() {
    const PATH: &str = "/microserving/start_generate";
    let node = one(&Settings::default()).await;
    let body = |key: &str, ids: bool| {
        let fields = json!({
            "seq_id": key, "begin": 0, "stream": true, "seed": 5, "temperature": 1.0, "stop": ["ab", "never"],
            "return_token_ids": ids,
        });
        with(completion(&prompt(20, 5), 60), fields)
    };
    let without_names = |mut event: Value| {
        event["id"] = json!("");
        event["created"] = json!(0);
        event
    };
    let plain: Vec<Value> =
        node.post(PATH, &body("a", false)).await.events().into_iter().map(without_names).collect();
    let told = node.post(PATH, &body("b", true)).await.events();
    let tokens: Vec<Value> =
        told.iter().flat_map(|event| event["choices"][0]["token_ids"].as_array().unwrap().clone()).collect();
    assert!(plain.len() < tokens.len(), "no text was held back");
    for form in ["completion", "chat"] {
        let mut request = node.request(Method::POST, PATH, body(form, false).to_string());
        request.headers_mut().insert("x-microserving-relay", form.parse().unwrap());
        let marked = node.send(request).await;
        assert_eq!(marked.header("x-microserving-relay"), "1");
        let part = RelayCutter::default().push(marked.body.clone().into()).unwrap();
        assert_eq!(json!(part.tokens), json!(tokens), "{form}");
        let bare = marked.body.lines().zip(marked.body.lines().skip(1));
        let num_bare = bare.filter(|(mark, next)| mark.starts_with(": ") && next.is_empty()).count();
        assert_eq!(num_bare, tokens.len() - plain.len(), "{form}: {}", marked.body);
        assert_eq!(part.usage.unwrap().completion_tokens as usize, tokens.len(), "{form}");
        let events = Answer { body: String::from_utf8(part.events.to_vec()).unwrap(), ..marked }.events();
        if form == "completion" {
            assert_eq!(events.into_iter().map(without_names).collect::<Vec<_>>(), plain);
        } else {
            let text = |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
            let plain_text = |event: &Value| event["choices"][0]["text"].as_str().map(str::to_owned);
            let (chat, plain): (String, String) =
                (events.iter().filter_map(text).collect(), plain.iter().filter_map(plain_text).collect());
            assert_eq!(chat, plain);
        }
    }
    let mut request = node.request(Method::POST, PATH, body("c", false).to_string());
    request.headers_mut().insert("x-microserving-relay", "1".parse().unwrap());
    let refused = node.send(request).await;
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("x-microserving-relay")));
}
