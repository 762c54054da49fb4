//! Clients that go away: what they asked for is given up at once.

use std::time::Duration;

use microserving_engine::EngineState;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::support::{Node, Settings, completion, one, over, prompt, with};
use crate::wires::Wire;

over_both_wires! {
    gone_in_the_middle_of_a_stream,
    gone_while_waiting_for_a_whole_answer,
    gone_before_the_first_token,
    a_reader_that_does_not_read_holds_nobody_up,
}

/// A generation that was asked for, and of whose answer nothing is read beyond its beginning. Dropping it goes away.
enum Call {
    Tcp(TcpStream),
    Grpc { first: oneshot::Receiver<()>, holding: JoinHandle<()> },
}

impl Call {
    async fn begin(node: &Node, body: Value) -> Self {
        let body = with(body, json!({"begin": 0}));
        if node.wire == Wire::Grpc {
            let (sender, first) = oneshot::channel();
            let caller = node.grpc.clone();
            let holding = tokio::spawn(async move {
                let mut messages = caller.open(&body).await.unwrap().into_inner();
                messages.message().await.unwrap().unwrap();
                let _ = sender.send(());
                std::future::pending::<()>().await;
            });
            return Self::Grpc { first, holding };
        }
        let mut stream = TcpStream::connect(node.address).await.unwrap();
        let (path, body) = ("/microserving/start_generate", body.to_string());
        let request =
            format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).await.unwrap();
        Self::Tcp(stream)
    }

    /// Waits for the beginning of the answer.
    async fn first(&mut self) {
        match self {
            Self::Tcp(stream) => {
                stream.read_exact(&mut [0; 64]).await.unwrap();
            }
            Self::Grpc { first, .. } => first.await.unwrap(),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Self::Grpc { holding, .. } = self {
            holding.abort();
        }
    }
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

fn slow(wire: Wire) -> Settings {
    Settings { step_time: Duration::from_millis(10), ..over(wire) }
}

async fn gone_in_the_middle_of_a_stream(wire: Wire) {
    let node = one(&slow(wire)).await;
    let mut call = Call::begin(&node, with(completion(&prompt(20, 1), 1500), json!({"stream": true}))).await;
    call.first().await;
    drop(call);
    wait_for(&node, "aborted", |state| state.counters.aborted == 1).await;
    let steps = node.state().await.counters.steps;
    assert!(steps < 200, "{steps} steps for a client that left at once");
    node.wait_idle().await;
}

async fn gone_while_waiting_for_a_whole_answer(wire: Wire) {
    let node = one(&slow(wire)).await;
    let call = Call::begin(&node, completion(&prompt(20, 1), 1500)).await;
    wait_for(&node, "running", |state| state.running == 1).await;
    drop(call);
    wait_for(&node, "aborted", |state| state.counters.aborted == 1).await;
    node.wait_idle().await;
}

async fn gone_before_the_first_token(wire: Wire) {
    let node = one(&slow(wire)).await;
    let body = with(completion(&prompt(1500, 1), 100), json!({"stream": true, "n": 4}));
    let call = Call::begin(&node, body).await;
    wait_for(&node, "taken", |state| state.running + state.waiting > 0).await;
    drop(call);
    node.wait_idle().await;
    assert_eq!(node.state().await.counters.aborted, 1);
}

async fn a_reader_that_does_not_read_holds_nobody_up(wire: Wire) {
    let node = one(&over(wire)).await;
    let body = with(completion(&prompt(20, 1), 1900), json!({"stream": true, "logprobs": 20}));
    let stalled = Call::begin(&node, body).await;
    wait_for(&node, "all computed", |state| state.counters.decode_tokens >= 1900).await;
    node.call("/v1/completions", &completion(&prompt(10, 2), 5)).await;
    // Neither on another connection nor on the same one.
    let keyless = with(completion(&prompt(10, 3), 5), json!({"begin": 0}));
    node.call("/microserving/start_generate", &keyless).await;
    node.wait_idle().await;
    drop(stalled);
}
