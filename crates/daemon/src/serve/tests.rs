use axum::routing::{get, post};
use clap::Parser;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::*;

#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    daemon: DaemonOptions,
}

fn options(flags: &[&str]) -> DaemonOptions {
    Options::parse_from(["testd"].iter().chain(flags)).daemon
}

async fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = stream.read_to_string(&mut answer);
    tokio::time::timeout(Duration::from_secs(10), read).await.expect("the server closes").unwrap();
    answer
}

async fn get_path(address: SocketAddr, path: &str) -> String {
    ask(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await
}

async fn server(flags: &[&str], drain: Duration) -> (HttpServer, Health, Shutdown) {
    let (health, shutdown) = (Health::new(), Shutdown::manual(drain));
    let server =
        HttpServer::bind("127.0.0.1:0", &options(flags), health.clone(), shutdown.clone()).await.unwrap();
    (server, health, shutdown)
}

#[tokio::test]
async fn health_answers_before_there_is_anything_else() {
    let folder = tempfile::tempdir().unwrap();
    let port_file = folder.path().join("port");
    let (server, health, shutdown) =
        server(&["--port-file", port_file.to_str().unwrap()], Duration::ZERO).await;
    let address = server.address();
    assert_eq!(std::fs::read_to_string(&port_file).unwrap(), format!("{address}\n"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside the port file");

    health.starting("loading the model: 40 %");
    assert!(get_path(address, "/health/live").await.starts_with("HTTP/1.1 200"));
    assert!(get_path(address, "/health/ready").await.contains("40 %"));
    let refused = get_path(address, "/v1/models").await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert!(refused.contains("retry-after: 1") && refused.contains("\"code\":\"not_ready\""), "{refused}");

    server.install(Router::new().route("/v1/models", get(|| async { "here" })));
    health.ready();
    assert!(get_path(address, "/v1/models").await.ends_with("here"));
    assert!(get_path(address, "/health").await.starts_with("HTTP/1.1 200"));
    assert!(get_path(address, "/nothing").await.starts_with("HTTP/1.1 404"));
    shutdown.begin();
    tokio::time::timeout(Duration::from_secs(5), server.finished()).await.expect("nothing is in flight");
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn work_in_flight_ends_and_health_answers_meanwhile() {
    let (server, health, shutdown) = server(&[], Duration::from_secs(20)).await;
    let address = server.address();
    let (begun, mut has_begun) = mpsc::channel::<()>(1);
    let (end, may_end) = tokio::sync::watch::channel(false);
    server.install(Router::new().route(
        "/slow",
        get(move || async move {
            begun.send(()).await.unwrap();
            let mut may_end = may_end;
            may_end.wait_for(|end| *end).await.unwrap();
            "finished"
        }),
    ));
    health.ready();
    let slow = tokio::spawn(async move { get_path(address, "/slow").await });
    has_begun.recv().await.unwrap();
    shutdown.begin();
    health.draining();
    assert!(get_path(address, "/health/live").await.starts_with("HTTP/1.1 200"));
    assert!(get_path(address, "/health/ready").await.starts_with("HTTP/1.1 503"));
    end.send(true).unwrap();
    assert!(slow.await.unwrap().ends_with("finished"));
    tokio::time::timeout(Duration::from_secs(5), server.finished())
        .await
        .expect("the last request has ended");
}

#[tokio::test]
async fn work_that_never_ends_is_ended_when_the_drain_is_over() {
    let (server, _, shutdown) = server(&[], Duration::from_millis(50)).await;
    let address = server.address();
    let (begun, mut has_begun) = mpsc::channel::<()>(1);
    server.install(Router::new().route(
        "/forever",
        get(move || async move {
            begun.send(()).await.unwrap();
            std::future::pending::<&str>().await
        }),
    ));
    let forever = tokio::spawn(async move { get_path(address, "/forever").await });
    has_begun.recv().await.unwrap();
    shutdown.begin();
    tokio::time::timeout(Duration::from_secs(5), server.finished()).await.expect("ended by force");
    assert_eq!(forever.await.unwrap(), "");
}

#[tokio::test]
async fn limits_hold() {
    let (server, _, _shutdown) =
        server(&["--max-body-bytes", "1KiB", "--header-timeout-seconds", "0.1"], Duration::ZERO).await;
    let address = server.address();
    server.install(Router::new().route("/echo", post(|body: Bytes| async move { body.len().to_string() })));
    let post_of = |size: usize| {
        format!(
            "POST /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n{}",
            "x".repeat(size)
        )
    };
    assert!(ask(address, &post_of(1024)).await.ends_with("1024"));
    assert!(ask(address, &post_of(1025)).await.starts_with("HTTP/1.1 413"));
    // A head that never ends: the server gives up, and `ask` sees the end of the stream.
    let begun = tokio::time::Instant::now();
    let _ = ask(address, "GET / HTTP/1.1\r\nhost: x\r\n").await;
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn errors_name_what_was_asked_for() {
    let (first, _, _shutdown) = server(&[], Duration::ZERO).await;
    let taken = first.address().to_string();
    let bind = HttpServer::bind(&taken, &options(&[]), Health::new(), Shutdown::manual(Duration::ZERO)).await;
    assert!(bind.unwrap_err().to_string().contains(&taken));
    let unwritable = options(&["--port-file", "/nowhere/port"]);
    let bind =
        HttpServer::bind("127.0.0.1:0", &unwritable, Health::new(), Shutdown::manual(Duration::ZERO)).await;
    assert!(bind.unwrap_err().to_string().contains("/nowhere/port"));
}

fn http2() -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).http2_only(true).build_http()
}

#[tokio::test]
async fn one_port_speaks_both_versions() {
    let (server, health, shutdown) = server(&["--max-body-bytes", "1KiB"], Duration::from_secs(20)).await;
    let address = server.address();
    let (begun, mut has_begun) = mpsc::channel::<()>(1);
    let (end, may_end) = tokio::sync::watch::channel(false);
    let slow = get(move || async move {
        begun.send(()).await.unwrap();
        let mut may_end = may_end;
        may_end.wait_for(|end| *end).await.unwrap();
        "finished"
    });
    let echo = post(|body: Bytes| async move { body.len().to_string() });
    server.install(Router::new().route("/echo", echo).route("/slow", slow));
    health.ready();
    let client = http2();
    let send = |path: &str, size: usize| {
        let request = Request::post(format!("http://{address}{path}"));
        client.request(request.body(Full::new(Bytes::from(vec![b'x'; size]))).unwrap())
    };
    let answer = send("/echo", 1024).await.unwrap();
    assert_eq!(answer.version(), http::Version::HTTP_2);
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "1024");
    assert_eq!(send("/echo", 1025).await.unwrap().status(), 413);
    assert!(get_path(address, "/health/ready").await.starts_with("HTTP/1.1 200"));

    // What is in flight when the server drains is finished over HTTP/2 too.
    let slow = client.get(format!("http://{address}/slow").parse().unwrap());
    let slow =
        tokio::spawn(async move { slow.await.unwrap().into_body().collect().await.unwrap().to_bytes() });
    has_begun.recv().await.unwrap();
    shutdown.begin();
    end.send(true).unwrap();
    assert_eq!(slow.await.unwrap(), "finished");
    let finished = tokio::time::timeout(Duration::from_secs(5), server.finished());
    finished.await.expect("an idle connection of HTTP/2 holds nobody up");
}

#[tokio::test]
async fn connections_of_http2_have_limits_too() {
    let (server, health, _shutdown) = server(&["--header-timeout-seconds", "0.1"], Duration::ZERO).await;
    let address = server.address();
    health.ready();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    // A preface that never ends is a head that never ends.
    assert_eq!(ask(address, std::str::from_utf8(&preface[..20]).unwrap()).await, "");
    // A connection on which nothing is asked is said goodbye to.
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(preface).await.unwrap();
    stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
    let mut frames = Vec::new();
    let read = stream.read_to_end(&mut frames);
    tokio::time::timeout(Duration::from_secs(10), read).await.expect("the server closes").unwrap();
    let mut kinds = Vec::new();
    let mut rest = frames.as_slice();
    while let [a, b, c, kind, ..] = *rest {
        kinds.push(kind);
        rest = &rest[9 + usize::from(a) * 65536 + usize::from(b) * 256 + usize::from(c)..];
    }
    assert!(kinds.contains(&7), "no GOAWAY among frames of the kinds {kinds:?}");
}
