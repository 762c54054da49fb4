//! Clients that go away: what they asked for is given up at once.

use std::time::Duration;

use microserving_engine::EngineState;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Node, Settings, completion, one, prompt, with};

async fn post_raw(node: &Node, path: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(node.address).await.unwrap();
    let body = body.to_string();
    let request = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

async fn wait_for(node: &Node, what: &str, holds: impl Fn(&EngineState) -> bool) {
    let waiting = async {
        while !holds(&node.state().await) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let done = tokio::time::timeout(Duration::from_secs(20), waiting).await;
    assert!(done.is_ok(), "{what}: {:?}", node.state().await);
}

fn slow() -> Settings {
    Settings { step_time: Duration::from_millis(10), ..Settings::default() }
}

#[tokio::test]
async fn gone_in_the_middle_of_a_stream() {
    let node = one(&slow()).await;
    let body = with(completion(&prompt(20, 1), 1500), json!({"stream": true}));
    let mut stream = post_raw(&node, "/v1/completions", &body).await;
    let mut some = [0; 64];
    stream.read_exact(&mut some).await.unwrap();
    drop(stream);
    wait_for(&node, "aborted", |state| state.counters.aborted == 1).await;
    let steps = node.state().await.counters.steps;
    assert!(steps < 200, "{steps} steps for a client that left at once");
    node.wait_idle().await;
}

#[tokio::test]
async fn gone_while_waiting_for_a_whole_answer() {
    let node = one(&slow()).await;
    let stream = post_raw(&node, "/v1/completions", &completion(&prompt(20, 1), 1500)).await;
    wait_for(&node, "running", |state| state.running == 1).await;
    drop(stream);
    wait_for(&node, "aborted", |state| state.counters.aborted == 1).await;
    node.wait_idle().await;
}

#[tokio::test]
async fn gone_before_the_first_token() {
    let node = one(&slow()).await;
    let body = with(completion(&prompt(1500, 1), 100), json!({"stream": true, "n": 4}));
    let stream = post_raw(&node, "/v1/completions", &body).await;
    wait_for(&node, "taken", |state| state.running + state.waiting > 0).await;
    drop(stream);
    node.wait_idle().await;
    assert_eq!(node.state().await.counters.aborted, 1);
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_nobody_up() {
    let node = one(&Settings::default()).await;
    let body = with(completion(&prompt(20, 1), 1900), json!({"stream": true, "logprobs": 20}));
    let stalled = post_raw(&node, "/v1/completions", &body).await;
    wait_for(&node, "all computed", |state| state.counters.decode_tokens >= 1900).await;
    node.call("/v1/completions", &completion(&prompt(10, 2), 5)).await;
    node.wait_idle().await;
    drop(stalled);
}
