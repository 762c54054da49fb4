//! Every kind of bad input: a clear error that names the field, nothing left behind, and an engine that goes on serving.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Node, Settings, completion, one, over, prompt, two, with};
use crate::wires::Wire;

over_both_wires! {
    positions_outside_their_bounds,
    keys_that_do_not_fit,
    addresses_that_are_none_of_ours,
    a_lease_ends,
    an_engine_without_room_says_when_to_come_back,
}

fn check(case: &str, answer: &Answer, status: u16, param: Option<&str>) {
    assert_eq!(answer.status, status, "{case}: {}", answer.body);
    assert_eq!(answer.header("content-type"), "application/json", "{case}");
    let error = &answer.json()["error"];
    let message = error["message"].as_str().unwrap_or_else(|| panic!("{case}: {}", answer.body));
    assert!(!message.is_empty(), "{case}");
    for key in ["type", "param", "code"] {
        assert!(error.get(key).is_some(), "{case}: no {key} in {}", answer.body);
    }
    if let Some(param) = param {
        assert_eq!(error["param"], param, "{case}: {}", answer.body);
    }
    if status == 503 {
        assert!(answer.header("retry-after").parse::<u64>().is_ok(), "{case}");
    }
}

async fn still_serves(node: &Node) {
    node.wait_idle().await;
    node.call("/v1/completions", &completion(&prompt(5, 9), 2)).await;
    node.wait_idle().await;
}

#[tokio::test]
async fn bodies_that_are_no_requests() {
    let node = one(&Settings::default()).await;
    let paths = [
        "/v1/completions",
        "/v1/chat/completions",
        "/microserving/prep_recv",
        "/microserving/remote_send",
        "/microserving/start_generate",
        "/microserving/abort",
        "/microserving/commit",
        "/microserving/pause",
        "/tokenize",
        "/detokenize",
    ];
    let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
    let bodies: [&[u8]; 8] = [
        b"",
        b"not json",
        b"[1,2]",
        b"null",
        b"{\"prompt\": ",
        b"{\"prompt\": NaN}",
        b"{\"prompt\": \"\xff\"}",
        deep.as_bytes(),
    ];
    for path in paths {
        for body in bodies {
            let answer = node.send(node.request(Method::POST, path, body.to_vec())).await;
            check(path, &answer, 422, None);
        }
        check(path, &node.post(path, &json!({})).await, 422, None);
    }
    still_serves(&node).await;
}

/// Fields that are wrong, with the status and the field that the error names.
fn wrong_fields() -> Vec<(Value, u16, &'static str)> {
    let long = prompt(3000, 1);
    vec![
        (json!({"prompt": ""}), 400, "prompt"),
        (json!({"prompt": []}), 400, "prompt"),
        (json!({"prompt": {}}), 422, "prompt"),
        (json!({"prompt": [1, "x"]}), 422, "prompt"),
        (json!({"prompt": [1, -2]}), 400, "prompt"),
        (json!({"prompt": [1, 259]}), 400, "prompt"),
        (json!({"prompt": long}), 400, "prompt"),
        (json!({"prompt": "x".repeat(3000)}), 400, "prompt"),
        (json!({"max_tokens": 0}), 400, "max_tokens"),
        (json!({"max_tokens": -1}), 400, "max_tokens"),
        (json!({"max_tokens": "many"}), 422, "max_tokens"),
        (json!({"max_tokens": 5, "min_tokens": 6}), 400, "min_tokens"),
        (json!({"temperature": -0.1}), 400, "temperature"),
        (json!({"temperature": "NaN"}), 400, "temperature"),
        (json!({"temperature": 1e300}), 400, "temperature"),
        (json!({"temperature": []}), 422, "temperature"),
        (json!({"top_p": 0}), 400, "top_p"),
        (json!({"top_p": 1.01}), 400, "top_p"),
        (json!({"top_k": -2}), 400, "top_k"),
        (json!({"min_p": 2}), 400, "min_p"),
        (json!({"repetition_penalty": 0}), 400, "repetition_penalty"),
        (json!({"frequency_penalty": 2.5}), 400, "frequency_penalty"),
        (json!({"presence_penalty": -3}), 400, "presence_penalty"),
        (json!({"n": 0}), 400, "n"),
        (json!({"n": 65}), 400, "n"),
        (json!({"n": null}), 422, "n"),
        (json!({"stream": "yes"}), 422, "stream"),
        (json!({"stop": ["a", 1]}), 422, "stop"),
        (json!({"stop": [""]}), 400, "stop"),
        (json!({"logprobs": 21}), 400, "logprobs"),
        (json!({"logit_bias": {"x": 1}}), 400, "logit_bias"),
        (json!({"logit_bias": {"5": 101}}), 400, "logit_bias"),
        (json!({"logit_bias": {"259": 1}}), 400, "logit_bias"),
        (json!({"stop_token_ids": [300]}), 400, "stop_token_ids"),
        (json!({"seed": 1.5}), 422, "seed"),
        (json!({"suffix": "x"}), 400, "suffix"),
        (json!({"best_of": 3}), 400, "best_of"),
        (json!({"timeout_seconds": 0}), 400, "timeout_seconds"),
        (json!({"response_format": {"type": "xml"}}), 400, "response_format"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}}),
            400,
            "",
        ),
        (json!({"model": "another"}), 404, "model"),
        (json!({"debug_config": {"special_request": "x"}}), 400, "debug_config.special_request"),
    ]
}

#[tokio::test]
async fn fields_out_of_type_or_bounds() {
    let node = one(&Settings::default()).await;
    for (fields, status, param) in wrong_fields() {
        for stream in [false, true] {
            let body = with(json!({"prompt": "x", "max_tokens": 3, "stream": stream}), fields.clone());
            let answer = node.post("/v1/completions", &body).await;
            let case: String = fields.to_string().chars().take(80).collect();
            check(&case, &answer, status, Some(param).filter(|param| !param.is_empty()));
        }
    }
    still_serves(&node).await;
}

/// The same table, as far as messages can say it: there are no wrong types, and no parameters that are not implemented.
#[tokio::test]
async fn fields_out_of_bounds_in_messages() {
    let node = one(&over(Wire::Grpc)).await;
    let unsayable = [
        json!({"prompt": [1, -2]}),
        json!({"temperature": "NaN"}),
        json!({"logit_bias": {"x": 1}}),
        json!({"suffix": "x"}),
        json!({"best_of": 3}),
        json!({"debug_config": {"special_request": "x"}}),
    ];
    let mut num_cases = 0;
    for (fields, status, param) in wrong_fields() {
        if status == 422 || unsayable.contains(&fields) {
            continue;
        }
        num_cases += 1;
        for stream in [false, true] {
            let body = json!({"prompt": "x", "max_tokens": 3, "stream": stream, "begin": 0});
            let answer = node.post("/microserving/start_generate", &with(body, fields.clone())).await;
            let case: String = fields.to_string().chars().take(80).collect();
            check(&case, &answer, status, Some(param).filter(|param| !param.is_empty()));
        }
    }
    assert!(num_cases >= 25, "{num_cases}");
    still_serves(&node).await;
}

#[tokio::test]
async fn chats_out_of_form() {
    let node = one(&Settings::default()).await;
    for (fields, status, param) in [
        (json!({"messages": []}), 400, "messages"),
        (json!({"messages": "hi"}), 422, "messages"),
        (json!({"messages": [{"content": "x"}]}), 422, "messages[0].role"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), 400, "messages[0].role"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            400,
            "messages[0].content[0].type",
        ),
        (json!({"tools": [{}]}), 400, "tools"),
        (json!({"top_logprobs": 3}), 400, "top_logprobs"),
    ] {
        let body = with(json!({"messages": [{"role": "user", "content": "x"}]}), fields.clone());
        check(&fields.to_string(), &node.post("/v1/chat/completions", &body).await, status, Some(param));
    }
    still_serves(&node).await;
}

async fn positions_outside_their_bounds(wire: Wire) {
    let (p, d) = two(&Settings { lease: Duration::from_secs(1), ..over(wire) }).await;
    let tokens = prompt(20, 1);
    for end in [20, 21, -21, i64::MAX, i64::MIN] {
        let body = with(completion(&tokens, 4), json!({"end": end}));
        check(&format!("end {end}"), &d.post("/microserving/prep_recv", &body).await, 400, Some("end"));
    }
    for begin in [20, -21, i64::MAX, i64::MIN] {
        let body = with(completion(&tokens, 4), json!({"begin": begin}));
        check(
            &format!("begin {begin}"),
            &d.post("/microserving/start_generate", &body).await,
            400,
            Some("begin"),
        );
    }
    let prep = with(completion(&tokens, 4), json!({"end": -1, "user": "a"}));
    let prep = d.call("/microserving/prep_recv", &prep).await;
    for (begin, end, param) in [
        (0, 20, "end"),
        (0, 0, "end"),
        (0, -20, "end"),
        (5, 5, "begin"),
        (-1, 19, "begin"),
        (-21, 19, "begin"),
        (0, 99, "end"),
    ] {
        let send = json!({
            "begin": begin, "end": end, "kv_addr_info": prep["kv_append_metadata"], "recv_rank": 0, "user": "a",
        });
        let answer = p.post("/microserving/remote_send", &with(completion(&tokens, 4), send)).await;
        check(&format!("[{begin}, {end})"), &answer, 400, Some(param));
    }
    still_serves(&p).await;
    still_serves(&d).await;
}

async fn keys_that_do_not_fit(wire: Wire) {
    let (_p, d) = two(&Settings { lease: Duration::from_secs(1), ..over(wire) }).await;
    let tokens = prompt(20, 1);
    let prep = |fields: Value| with(with(completion(&tokens, 4), json!({"end": -1})), fields);
    if wire == Wire::Rest {
        // gRPC has one name for the key, and it is a string.
        let two = prep(json!({"user": "a", "seq_id": "b"}));
        check("two keys", &d.post("/microserving/prep_recv", &two).await, 400, Some("seq_id"));
        let number = prep(json!({"user": 5}));
        check("a number", &d.post("/microserving/prep_recv", &number).await, 422, Some("user"));
    }
    check(
        "an empty key",
        &d.post("/microserving/prep_recv", &prep(json!({"seq_id": ""}))).await,
        400,
        Some("seq_id"),
    );
    check(
        "no key",
        &d.post("/microserving/prep_recv", &prep(json!({"attempt": 2}))).await,
        400,
        Some("attempt"),
    );
    for path in ["commit", "pause"] {
        let answer = d.post(&format!("/microserving/{path}"), &json!({"seq_id": "nobody"})).await;
        check(path, &answer, 404, Some("seq_id"));
    }
    check("unknown", &d.get("/microserving/sequences/nobody").await, 404, Some("seq_id"));

    let keyed = json!({"seq_id": "a", "attempt": 2});
    d.call("/microserving/prep_recv", &prep(keyed.clone())).await;
    let other = with(with(completion(&prompt(20, 2), 4), json!({"end": -1})), keyed.clone());
    check("another prompt", &d.post("/microserving/prep_recv", &other).await, 409, None);
    let stale = prep(json!({"seq_id": "a", "attempt": 1}));
    check("a lower attempt", &d.post("/microserving/prep_recv", &stale).await, 409, Some("attempt"));
    let start = with(with(completion(&prompt(20, 2), 4), json!({"begin": 19})), keyed.clone());
    check(
        "another prompt to start",
        &d.post("/microserving/start_generate", &start).await,
        409,
        Some("prompt"),
    );
    let start = with(with(completion(&tokens, 4), json!({"begin": 7})), keyed.clone());
    check("another begin", &d.post("/microserving/start_generate", &start).await, 400, Some("begin"));
    // The data never arrives: the call waits, but not longer than the lease.
    let start = with(with(completion(&tokens, 4), json!({"begin": 19})), keyed);
    let answer = d.post("/microserving/start_generate", &start).await;
    assert!([200, 410, 504].contains(&answer.status), "{}", answer.body);
    still_serves(&d).await;
}

async fn addresses_that_are_none_of_ours(wire: Wire) {
    let (p, d) = two(&Settings { lease: Duration::from_secs(1), ..over(wire) }).await;
    let other_layout = one(&Settings { page_size: 8, ..over(wire) }).await;
    let tokens = prompt(40, 1);
    let prep = with(completion(&tokens, 4), json!({"end": -1, "user": "a"}));
    let prep = d.call("/microserving/prep_recv", &prep).await;
    let address = prep["kv_append_metadata"].as_str().unwrap();
    let body = |address: &str| {
        let send = json!({"begin": 0, "end": -1, "kv_addr_info": address, "recv_rank": 0, "user": "a"});
        with(completion(&tokens, 4), send)
    };
    for (case, text) in [
        ("empty", ""),
        ("not base64", "***"),
        ("another's", "CgAAAAAAAABbMSwxNjAsMjFd"),
        ("cut short", &address[..address.len() / 8 * 4]),
    ] {
        check(case, &p.post("/microserving/remote_send", &body(text)).await, 400, Some("kv_addr_info"));
    }
    // One character inside is another: still well-formed bytes, no longer what was signed.
    let mut forged = 0;
    for at in (8..address.len() - 8).step_by(5) {
        let mut text = address.as_bytes().to_vec();
        text[at] = if text[at] == b'A' { b'B' } else { b'A' };
        let answer = p.post("/microserving/remote_send", &body(std::str::from_utf8(&text).unwrap())).await;
        assert!([400, 403].contains(&answer.status), "{at}: {} {}", answer.status, answer.body);
        forged += u32::from(answer.status == 403);
    }
    assert!(forged > 0, "no forgery got as far as the signature");
    let answer = other_layout.post("/microserving/remote_send", &body(address)).await;
    check("other layout", &answer, 409, Some("kv_addr_info"));

    d.call("/microserving/abort", &json!({"seq_id": "a"})).await;
    let answer = p.post("/microserving/remote_send", &body(address)).await;
    check("aborted", &answer, 410, Some("kv_addr_info"));
    still_serves(&p).await;
    still_serves(&d).await;
}

async fn a_lease_ends(wire: Wire) {
    let (p, d) = two(&Settings { lease: Duration::from_millis(200), ..over(wire) }).await;
    let tokens = prompt(40, 1);
    let prep = with(completion(&tokens, 4), json!({"end": -1, "user": "a"}));
    let prep = d.call("/microserving/prep_recv", &prep).await;
    assert!(d.state().await.pages.reserved > 0);
    d.wait_idle().await;
    assert_eq!(d.state().await.counters.leases_expired, 1);
    let send = json!({
        "begin": 0, "end": -1, "kv_addr_info": prep["kv_append_metadata"], "recv_rank": 0, "user": "a",
    });
    let answer = p.post("/microserving/remote_send", &with(completion(&tokens, 4), send)).await;
    check("expired address", &answer, 410, None);
    let start = with(completion(&tokens, 4), json!({"begin": -1, "user": "a"}));
    check("expired key", &d.post("/microserving/start_generate", &start).await, 410, Some("seq_id"));
    still_serves(&p).await;
    still_serves(&d).await;
}

#[tokio::test]
async fn bodies_too_large_and_paths_that_are_none() {
    let node = one(&Settings { max_body_bytes: 4096, ..Settings::default() }).await;
    let body = json!({"prompt": "x".repeat(5000)}).to_string();
    check("announced", &node.send(node.request(Method::POST, "/v1/completions", body)).await, 413, None);
    check("chunked", &chunked(&node, 5000).await, 413, None);
    check("no path", &node.get("/v1/nothing").await, 404, None);
    check("no method", &node.get("/v1/completions").await, 405, None);
    still_serves(&node).await;
}

/// Posts a body whose length is not announced.
async fn chunked(node: &Node, size: usize) -> Answer {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(node.address).await.unwrap();
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let body = format!("{head}{size:x}\r\n{}\r\n0\r\n\r\n", "x".repeat(size));
    stream.write_all(body.as_bytes()).await.unwrap();
    let mut text = String::new();
    let read = stream.read_to_string(&mut text);
    tokio::time::timeout(Duration::from_secs(10), read).await.unwrap().unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let mut headers = http::HeaderMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ").unwrap();
        headers.insert(http::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
    }
    Answer { status, headers, body: body.to_owned() }
}

async fn an_engine_without_room_says_when_to_come_back(wire: Wire) {
    let settings = Settings { num_pages: 4, lease: Duration::from_secs(1), ..over(wire) };
    let d = one(&settings).await;
    let body = |seq_id: &str, len| with(completion(&prompt(len, 1), 4), json!({"end": -1, "user": seq_id}));
    d.call("/microserving/prep_recv", &body("a", 49)).await;
    check("no pages", &d.post("/microserving/prep_recv", &body("b", 33)).await, 503, None);
    let answer = d.post("/microserving/prep_recv", &body("c", 100)).await;
    check("never fits", &answer, 400, Some("prompt"));
    still_serves(&d).await;
}
