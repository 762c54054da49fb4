//! One connection: HTTP/1.1, or HTTP/2 by a client that knows beforehand that we speak it, on the same port.

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::time::Duration;

use axum::response::Response;
use hyper::Request;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

use crate::in_flight::InFlight;
use crate::stall::StallGuard;

/// What a client sends first on an HTTP/2 connection; no HTTP/1.1 request begins like it.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of one stream that wait for its reader, beside what the reader has granted.
const SEND_BUFFER: usize = 64 << 10;

/// What holds for every connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// For a request's head, and for how long a connection may idle.
    pub(crate) header_timeout: Duration,
    /// For a peer that reads nothing, or does not answer a ping.
    pub(crate) write_timeout: Duration,
    /// Requests at once on one HTTP/2 connection.
    pub(crate) max_streams: u32,
}

/// What answers the requests of a connection.
pub(crate) trait Answers:
    Service<Request<Incoming>, Response = Response, Error = Infallible, Future: Send + 'static> + Clone
{
}

impl<S> Answers for S where
    S: Service<Request<Incoming>, Response = Response, Error = Infallible, Future: Send + 'static> + Clone
{
}

/// Serves a connection until its peer or `closing` ends it; what is in flight then is finished.
pub(crate) async fn serve(
    stream: TcpStream,
    service: impl Answers,
    limits: Limits,
    closing: CancellationToken,
) {
    let mut stream = StallGuard::new(stream, limits.write_timeout);
    let version = tokio::select! {
        version = timeout(limits.header_timeout, speaks_http2(&mut stream)) => version,
        () = closing.cancelled() => return,
    };
    match version {
        Ok(Ok(true)) => serve_http2(stream, service, limits, closing).await,
        Ok(Ok(false)) => serve_http1(stream, service, limits, closing).await,
        Ok(Err(error)) => debug!(%error, "connection ended at its first bytes"),
        Err(_) => debug!("connection said nothing in time"),
    }
}

/// Reads the first bytes, only as many as it takes to tell, and puts them back.
async fn speaks_http2<S>(stream: &mut StallGuard<S>) -> io::Result<bool>
where
    StallGuard<S>: tokio::io::AsyncRead + Unpin,
{
    let mut bytes = [0; PREFACE.len()];
    let mut len = 0;
    let is_preface = loop {
        let read = stream.read(&mut bytes[len..]).await?;
        len += read;
        if read == 0 || bytes[..len] != PREFACE[..len] {
            break false;
        }
        if len == PREFACE.len() {
            break true;
        }
    };
    stream.put_back(&bytes[..len]);
    Ok(is_preface)
}

async fn serve_http1<S: tokio::io::AsyncRead + AsyncWrite + Unpin>(
    stream: StallGuard<S>,
    service: impl Answers,
    limits: Limits,
    closing: CancellationToken,
) {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = closing.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        debug!(%error, "connection ended");
    }
}

async fn serve_http2<S: tokio::io::AsyncRead + AsyncWrite + Unpin>(
    stream: StallGuard<S>,
    service: impl Answers,
    limits: Limits,
    closing: CancellationToken,
) {
    let streams = StreamTasks::default();
    let mut builder = http2::Builder::new(streams.clone());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.max_streams)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(limits.write_timeout)
        .keep_alive_timeout(limits.write_timeout);
    let here = InFlight::default();
    let service = {
        let (here, inner) = (here.clone(), service);
        service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(here.clone());
            inner.call(request)
        })
    };
    let result = {
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        tokio::select! {
            result = connection.as_mut() => result,
            () = closing.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
            () = here.idle_for(limits.header_timeout) => {
                // Says goodbye first; what the client has sent by then is still answered.
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    result = connection => result,
                    // It says nothing at all, and nothing of it is in flight.
                    () = here.idle_for(limits.header_timeout) => Ok(()),
                }
            }
        }
    };
    if let Err(error) = result {
        debug!(%error, "connection ended");
    }
    // Its requests see that it is gone, and end.
    streams.0.close();
    streams.0.wait().await;
}

/// Runs the requests of one HTTP/2 connection, which waits for them.
#[derive(Clone, Debug, Default)]
struct StreamTasks(TaskTracker);

impl<F: Future<Output: Send + 'static> + Send + 'static> Executor<F> for StreamTasks {
    fn execute(&self, request: F) {
        self.0.spawn(request);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, duplex};

    use super::*;

    async fn check(pieces: &[&[u8]], expected: bool) {
        let (ours, mut theirs) = duplex(1024);
        let mut stream = StallGuard::new(ours, Duration::from_secs(60));
        let writing = async {
            for piece in pieces {
                theirs.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
            theirs.shutdown().await.unwrap();
        };
        let (is_http2, ()) = tokio::join!(speaks_http2(&mut stream), writing);
        assert_eq!(is_http2.unwrap(), expected, "{pieces:?}");
        let mut read = Vec::new();
        stream.read_to_end(&mut read).await.unwrap();
        assert_eq!(read, pieces.concat(), "nothing is lost");
    }

    #[tokio::test]
    async fn the_first_bytes_tell() {
        check(&[b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"], false).await;
        check(&[b"P", b"OST / HTTP/1.1\r\n"], false).await;
        check(&[b"PRI * HTTP/1.1\r\n"], false).await;
        check(&[b"PRI"], false).await;
        check(&[], false).await;
        check(&[PREFACE, b"more"], true).await;
        let single: Vec<&[u8]> = PREFACE.chunks(1).collect();
        check(&single, true).await;
    }
}
