//! The connections to one engine.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::connection::{Body, Broken, Connection, Head};

/// How long a connection may take to be made; a host that is down does not say so.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an unused connection is kept.
const IDLE: Duration = Duration::from_secs(30);

/// Where an engine is, and the connections to it that nobody uses just now.
///
/// A connection belongs to one request at a time, whose own task reads and writes it; there is no task a connection that requests would
/// have to talk to. A request that is dropped drops its connection, which is how the engine learns of it.
#[derive(Debug)]
pub(crate) struct Pool {
    host: String,
    port: u16,
    /// What every request to it says of it: the path that goes before those of the calls, and the line with the host.
    prefix: String,
    host_line: String,
    /// The one used last is at the back, and is the next to be used: so those that are not needed grow old.
    idle: Mutex<VecDeque<(Instant, Connection)>>,
}

impl Pool {
    /// Makes a pool for a checked address, `http://host:port` and perhaps a path; nothing if there is no host in it.
    pub(crate) fn new(base: &str) -> Option<Self> {
        let uri: Uri = base.parse().ok()?;
        let authority = uri.authority()?;
        // An address in brackets is IPv6, which sockets know without them.
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = uri.port_u16().unwrap_or(80);
        // Credentials have no place in that line, and engines take none.
        let named = authority.as_str().rsplit('@').next().unwrap_or_default();
        let host_line = format!(" HTTP/1.1\r\nhost: {named}\r\n");
        let prefix = uri.path().trim_end_matches('/').to_owned();
        Some(Self { host, port, prefix, host_line, idle: Mutex::default() })
    }

    /// Begins the head of a request.
    pub(crate) fn head(&self, method: &str, path: &str) -> Vec<u8> {
        let mut head = Vec::with_capacity(384);
        for part in [method, " ", &self.prefix, path, &self.host_line] {
            head.extend_from_slice(part.as_bytes());
        }
        head
    }

    /// Sends a request, on a connection that is there or on a new one, and returns the answer once its head is there.
    ///
    /// The engine may close a connection in the very moment when it is used again; then nothing of the answer comes, and the request
    /// is sent once more on another one. The calls of an engine are made to be repeated.
    pub(crate) async fn exchange(self: &Arc<Self>, head: &[u8], body: &[Bytes]) -> io::Result<(Head, Body)> {
        while let Some(mut connection) = self.take() {
            match connection.exchange(head, body).await {
                Ok(head) => return Ok(Body::begin(head, connection, self)),
                Err(Broken { silent: true, .. }) => {}
                Err(broken) => return Err(broken.cause),
            }
        }
        let mut connection = self.connect().await?;
        let head = connection.exchange(head, body).await.map_err(|broken| broken.cause)?;
        Ok(Body::begin(head, connection, self))
    }

    async fn connect(&self) -> io::Result<Connection> {
        let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect((self.host.as_str(), self.port)))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no connection in time"))??;
        // Calls are small and must not wait for each other.
        stream.set_nodelay(true)?;
        Ok(Connection::new(stream))
    }

    /// Takes a connection that is still open.
    fn take(&self) -> Option<Connection> {
        let mut idle = self.idle();
        while let Some((since, connection)) = idle.pop_back() {
            if since.elapsed() < IDLE && connection.is_quiet() {
                return Some(connection);
            }
        }
        None
    }

    /// Puts a connection back whose last answer has been read to its end.
    pub(crate) fn put(&self, connection: Connection) {
        let now = Instant::now();
        let mut idle = self.idle();
        idle.push_back((now, connection));
        while idle.front().is_some_and(|(since, _)| now.duration_since(*since) >= IDLE) {
            idle.pop_front();
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, VecDeque<(Instant, Connection)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Appends a line to a request's head. The value must hold no line end.
pub(crate) fn put_header(head: &mut Vec<u8>, name: &str, value: &[u8]) {
    for part in [name.as_bytes(), b": ", value, b"\r\n"] {
        head.extend_from_slice(part);
    }
}
