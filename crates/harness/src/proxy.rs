//! A proxy before one engine that says where a call stands, so that a test can act at exactly that point.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// How long a peer may take over anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// Hears of each point that a call comes to; false cuts the connection there.
///
/// A point is named `CALL NUMBER WHERE`: the call (`relay` is a client's request that is passed on), its number among those of this name through all proxies that share [`Points`], and
/// `before` (nothing has reached the engine), `answered` (nothing has reached the router), `after` (everything has), or `event N` (so
/// many events of the stream have).
pub type OnPoint = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Counts calls over several proxies. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Points(Arc<Mutex<HashMap<String, usize>>>);

impl Points {
    /// Begins to count anew.
    pub fn reset(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn number(&self, call: &str) -> usize {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(call.to_owned()).or_default();
        *count += 1;
        *count - 1
    }
}

/// A proxy; stops taking connections when dropped.
pub struct Proxy {
    url: String,
    upstream: Arc<Mutex<SocketAddr>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Proxy {
    /// Starts a proxy on a free loopback port before the engine at `url`.
    ///
    /// # Errors
    /// If there is no port, or `url` is none.
    pub fn start(url: &str, points: Points, on_point: OnPoint) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
        let own = listener.local_addr()?;
        let upstream = Arc::new(Mutex::new(address(url)?));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (upstream, stop) = (upstream.clone(), stop.clone());
            move || {
                for client in listener.incoming() {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let Ok(client) = client else { continue };
                    let upstream = *upstream.lock().unwrap_or_else(PoisonError::into_inner);
                    let (points, on_point) = (points.clone(), on_point.clone());
                    // Ends with its connection. A connection that breaks is what this is here for.
                    std::thread::spawn(move || {
                        let _ = relay(client, upstream, &points, &*on_point);
                    });
                }
            }
        });
        Ok(Self { url: format!("http://{own}"), upstream, stop, thread: Some(thread) })
    }

    /// Returns where it listens.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Sends new connections to another engine.
    ///
    /// # Errors
    /// If `url` is none.
    pub fn set_upstream(&self, url: &str) -> Result<()> {
        *self.upstream.lock().unwrap_or_else(PoisonError::into_inner) = address(url)?;
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the listener.
        if let Ok(own) = address(&self.url) {
            let _ = TcpStream::connect_timeout(&own, Duration::from_secs(1));
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn address(url: &str) -> Result<SocketAddr> {
    let host = url.trim_start_matches("http://");
    host.parse().with_context(|| format!("{url} is no address"))
}

/// Relays one request and its answer; the connection is not used again.
fn relay(
    client: TcpStream,
    upstream: SocketAddr,
    points: &Points,
    on_point: &dyn Fn(&str) -> bool,
) -> Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_nodelay(true)?;
    let mut to_client = client.try_clone()?;
    let mut from_client = BufReader::new(client);
    let (head, body) = read_request(&mut from_client)?;
    let call = head
        .strip_prefix("POST /microserving/")
        .and_then(|rest| rest.split(' ').next())
        .filter(|call| {
            ["prep_recv", "remote_send", "start_generate", "commit", "pause", "abort"].contains(call)
        })
        .or_else(|| is_relayed(&head).then_some("relay"))
        .map(|call| format!("{call} {}", points.number(call)));
    let passes = |place: &str| call.as_ref().is_none_or(|call| on_point(&format!("{call} {place}")));
    if !passes("before") {
        return Ok(());
    }
    let mut engine = TcpStream::connect_timeout(&upstream, Duration::from_secs(2))?;
    engine.set_nodelay(true)?;
    engine.set_read_timeout(Some(PATIENCE))?;
    engine.write_all(head.as_bytes())?;
    engine.write_all(&body)?;
    if call.as_ref().is_some_and(|call| call.starts_with("start_generate") || call.starts_with("relay")) {
        return relay_events(&mut engine, &mut to_client, &passes);
    }
    if call.is_none() {
        std::io::copy(&mut engine, &mut to_client)?;
        return Ok(());
    }
    let mut answer = Vec::new();
    engine.read_to_end(&mut answer)?;
    if passes("answered") {
        to_client.write_all(&answer)?;
        passes("after");
    }
    Ok(())
}

/// Says whether a router passes a client's request on as it is.
fn is_relayed(head: &str) -> bool {
    head.starts_with("POST /v1/")
        && head.lines().any(|line| line.to_ascii_lowercase().starts_with("x-microserving-relay:"))
}

/// Returns the head, changed so that the connection closes behind the answer, and the body.
fn read_request(from: &mut BufReader<TcpStream>) -> Result<(String, Vec<u8>)> {
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        anyhow::ensure!(from.read_line(&mut line)? > 0, "the connection was closed");
        let name = line.split(':').next().unwrap_or_default().to_ascii_lowercase();
        if name == "content-length" {
            length = line[name.len() + 1..].trim().parse()?;
        }
        if line == "\r\n" {
            break;
        }
        if name != "connection" {
            head.push_str(&line);
        }
    }
    head.push_str("connection: close\r\n\r\n");
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    Ok((head, body))
}

/// Relays event by event. Chunk frames go through as they are: no frame has two line feeds in a row but at an event's end.
fn relay_events(engine: &mut TcpStream, client: &mut TcpStream, passes: &dyn Fn(&str) -> bool) -> Result<()> {
    let (mut held, mut buffer) = (Vec::new(), [0; 4096]);
    let mut events = 0;
    let mut answered = false;
    loop {
        let read = engine.read(&mut buffer)?;
        if read == 0 {
            client.write_all(&held)?;
            return Ok(());
        }
        if !std::mem::replace(&mut answered, true) && !passes("answered") {
            return Ok(());
        }
        held.extend_from_slice(&buffer[..read]);
        while let Some(end) = held.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = held.drain(..end + 2).collect();
            client.write_all(&event)?;
            events += 1;
            if !passes(&format!("event {events}")) {
                return Ok(());
            }
        }
    }
}
