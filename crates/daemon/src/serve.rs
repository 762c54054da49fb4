//! An HTTP server that owns its connections, answers health from the first moment, and drains.
//!
//! ```text
//! bind ── health answers, all else 503 ── install(router) ── serving ── shutdown begins: health says draining,
//!   work goes on ── nothing in flight, or the drain is over ── no more accepting, connections end ── finished
//! ```

use std::convert::Infallible;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Extension;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, DefaultBodyLimit, Request};
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tower::ServiceExt;
use tracing::{info, warn};

use crate::connection::{self, Limits};
use crate::in_flight::{InFlight, InFlightGuard};
use crate::{DaemonOptions, Health, Shutdown};

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("cannot listen on {listen}")]
    Bind {
        /// The address asked for.
        listen: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The port file cannot be written.
    #[error("cannot write the port file {path}")]
    PortFile {
        /// The file.
        path: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// A bound port with its connections. Dropping it ends them at once; [`HttpServer::finished`] waits for an orderly end.
#[derive(Debug)]
pub struct HttpServer {
    address: SocketAddr,
    app: Arc<App>,
    accepting: JoinHandle<()>,
}

/// An answer being made.
pub type ResponseFuture = Pin<Box<dyn Future<Output = Response> + Send>>;

/// A way past the routes for requests that are too many to look for theirs: takes a request and the largest body it may have, or gives
/// it back.
pub type Shortcut = dyn Fn(Request, usize) -> Result<ResponseFuture, Request> + Send + Sync;

/// What serves all requests but those for health.
struct Installed {
    shortcut: Option<Box<Shortcut>>,
    routes: Router,
}

impl std::fmt::Debug for Installed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Installed").field("has_shortcut", &self.shortcut.is_some()).finish_non_exhaustive()
    }
}

/// What a request meets.
#[derive(Debug)]
struct App {
    health: Health,
    installed: OnceLock<Installed>,
    max_body_bytes: usize,
    in_flight: InFlight,
}

impl HttpServer {
    /// Opens `listen` (`host:port`; port 0 takes a free one), logs the bound address, writes it to the port file if there
    /// is one, and serves health. Must be called on a tokio runtime; connections live on it.
    ///
    /// # Errors
    /// If the address is taken or wrong, or the port file cannot be written.
    pub async fn bind(
        listen: &str,
        options: &DaemonOptions,
        health: Health,
        shutdown: Shutdown,
    ) -> Result<Self, ServeError> {
        let bind_error = |source| ServeError::Bind { listen: listen.to_owned(), source };
        let listener = TcpListener::bind(listen).await.map_err(bind_error)?;
        let address = listener.local_addr().map_err(bind_error)?;
        if let Some(path) = &options.port_file {
            write_port_file(path, address)
                .map_err(|source| ServeError::PortFile { path: path.display().to_string(), source })?;
        }
        info!(%address, "listening");
        let app = Arc::new(App {
            health,
            installed: OnceLock::new(),
            max_body_bytes: usize::try_from(options.max_body_bytes.num_bytes()).unwrap_or(usize::MAX),
            in_flight: InFlight::default(),
        });
        let acceptor = Acceptor {
            listener,
            app: Arc::clone(&app),
            shutdown,
            limits: Limits {
                header_timeout: options.header_timeout_seconds,
                write_timeout: options.write_timeout_seconds,
                max_streams: options.max_connections,
            },
            slots: Arc::new(Semaphore::new(options.max_connections as usize)),
        };
        Ok(Self { address, app, accepting: tokio::spawn(acceptor.run()) })
    }

    /// Returns the bound address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets what is served beside health. The first call counts; later ones change nothing.
    pub fn install(&self, router: Router) {
        self.set(router, None);
    }

    /// As [`HttpServer::install`], with a shortcut that is asked first.
    pub fn install_with(&self, router: Router, shortcut: Box<Shortcut>) {
        self.set(router, Some(shortcut));
    }

    fn set(&self, router: Router, shortcut: Option<Box<Shortcut>>) {
        let routes = router.layer(DefaultBodyLimit::max(self.app.max_body_bytes));
        if self.app.installed.set(Installed { shortcut, routes }).is_err() {
            warn!("a router is installed already; the second one is ignored");
        }
    }

    /// Waits until the shutdown has begun and every connection has ended.
    pub async fn finished(mut self) {
        if let Err(error) = (&mut self.accepting).await {
            warn!(%error, "the acceptor failed");
        }
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        // The acceptor owns the connections; they go with it.
        self.accepting.abort();
    }
}

/// Writes beside the file and renames, so that a reader sees all of the address or nothing. It says nothing to whoever comes after a crash of
/// the machine, so a start need not wait for a slow disk.
fn write_port_file(path: &Path, address: SocketAddr) -> std::io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    let beside = Path::new(&name);
    let mut file = std::fs::File::create(beside)?;
    writeln!(file, "{address}")?;
    std::fs::rename(beside, path).inspect_err(|_| {
        let _ = std::fs::remove_file(beside);
    })
}

struct Acceptor {
    listener: TcpListener,
    app: Arc<App>,
    shutdown: Shutdown,
    limits: Limits,
    slots: Arc<Semaphore>,
}

impl Acceptor {
    async fn run(self) {
        let app = Arc::clone(&self.app);
        let routes = self.app.health.routes().fallback(move |request| answer(Arc::clone(&app), request));
        // Connections end when this is cancelled, which is after requests in flight had their time.
        let closing = tokio_util::sync::CancellationToken::new();
        let mut connections = JoinSet::new();
        let mut idle = pin!(self.app.in_flight.idle_after(&self.shutdown));
        loop {
            tokio::select! {
                () = &mut idle => break,
                Some(ended) = connections.join_next() => report(ended),
                accepted = self.accept() => {
                    let Some((stream, peer, slot)) = accepted else { continue };
                    let routes = routes.clone().layer(Extension(ConnectInfo(peer)));
                    let front = Front { app: Arc::clone(&self.app), routes: TowerToHyperService::new(routes) };
                    let (limits, closing) = (self.limits, closing.clone());
                    connections.spawn(async move {
                        let _slot = slot;
                        connection::serve(stream, front, limits, closing).await;
                    });
                }
            }
        }
        closing.cancel();
        let gone = async {
            while let Some(ended) = connections.join_next().await {
                report(ended);
            }
        };
        // Requests in flight have ended or had their time; a second is for the last bytes on their way out.
        if tokio::time::timeout(Duration::from_secs(1), gone).await.is_err() {
            connections.shutdown().await;
        }
    }

    async fn accept(&self) -> Option<(TcpStream, SocketAddr, tokio::sync::OwnedSemaphorePermit)> {
        let slot = Arc::clone(&self.slots).acquire_owned().await.ok()?;
        match self.listener.accept().await {
            Ok((stream, peer)) => {
                // Tokens are small and must not wait for each other.
                let _ = stream.set_nodelay(true);
                Some((stream, peer, slot))
            }
            Err(error) => {
                // Out of file descriptors, or the peer is gone already: the next accept may work.
                warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(20)).await;
                None
            }
        }
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        warn!(%error, "a connection's task panicked");
    }
}

impl App {
    /// Counts a request, here and on its connection.
    fn enter(&self, extensions: &http::Extensions) -> (InFlightGuard, Option<InFlightGuard>) {
        (self.in_flight.enter(), extensions.get::<InFlight>().map(InFlight::enter))
    }
}

/// What answers the requests of a connection: the shortcut, or else the routes, health first.
#[derive(Clone)]
struct Front {
    app: Arc<App>,
    routes: TowerToHyperService<Router>,
}

impl Service<http::Request<Incoming>> for Front {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
        let request = match self.app.installed.get() {
            Some(Installed { shortcut: Some(shortcut), .. }) => {
                let guards = self.app.enter(request.extensions());
                match shortcut(request.map(Body::new), self.app.max_body_bytes) {
                    Ok(answering) => {
                        return Box::pin(async move {
                            Ok(answering.await.map(|body| Body::new(Guarded { body, _guards: guards })))
                        });
                    }
                    Err(request) => request,
                }
            }
            _ => request.map(Body::new),
        };
        Box::pin(self.routes.call(request))
    }
}

/// Every request but health.
async fn answer(app: Arc<App>, request: Request) -> Response {
    let Some(installed) = app.installed.get() else { return app.health.unavailable() };
    let guards = app.enter(request.extensions());
    let response = match installed.routes.clone().oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    response.map(|body| Body::new(Guarded { body, _guards: guards }))
}

struct Guarded {
    body: Body,
    _guards: (InFlightGuard, Option<InFlightGuard>),
}

impl HttpBody for Guarded {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests;
