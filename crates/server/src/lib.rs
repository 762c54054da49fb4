//! An engine over HTTP: the MicroServing calls and the OpenAI API.
//!
//! - [`router`] makes an axum router of an engine's handle, its [`ModelText`], and a [`ServerConfig`].
//! - [`EngineService`] is the same for another wire beside these routes, such as gRPC: the calls without HTTP and JSON.
//! - The routes are one table, from which `/openapi.json` is made; each call has a file of its own under `calls/` and `openai/`.
//! - Every answer is made by one pipeline: the engine's tokens become text, text becomes chunks, chunks become events or,
//!   put together, one body. Streaming changes when a client sees its text, never which text.
//!
//! # The status of a stream is decided by its first token
//!
//! An engine accepts a generation before it knows whether it will ever run: room may not come, the deadline may pass, the
//! transfer that it waits for may be lost. A handler that answered 200 at once would have to say all that inside the
//! stream, where few clients look and where a router can no longer tell "try another engine" from "half an answer". So the
//! head of a stream goes out with its first token. Nothing is lost by it, for a client has nothing to show before that
//! token, and every failure before any output has the status and the `Retry-After` that it has without streaming.
//!
//! # Example
//!
//! An engine with the toy model answers a request; the router could as well be served from a port or nested in another one.
//!
//! ```
//! use axum::body::Body;
//! use http::Request;
//! use microserving_engine::{Engine, EngineConfig, EngineHandle, Entropy};
//! use microserving_executor::{ToyConfig, ToyExecutor};
//! use microserving_protocol::{ClusterKey, Incarnation};
//! use microserving_server::{ModelText, ServerConfig, router};
//! use microserving_transport::LoopbackHub;
//! use tower::ServiceExt;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let entropy = Entropy {
//!     incarnation: Incarnation(1),
//!     cluster_key: ClusterKey::from_random([7; 32]),
//!     key_is_shared: false,
//!     mint_seed: 1,
//! };
//! let engine = Engine::new(
//!     EngineConfig::new("engine-0", 64),
//!     Box::new(ToyExecutor::new(ToyConfig::default())?),
//!     Box::new(LoopbackHub::new().transport("engine-0")),
//!     entropy,
//! )?;
//! let (engine, _thread) = EngineHandle::spawn(engine)?;
//! let routes = router(engine, ModelText::toy(), ServerConfig::new("toy"));
//!
//! let request = Request::post("/v1/completions").body(Body::from(r#"{"prompt": "Once", "max_tokens": 3}"#))?;
//! let response = routes.oneshot(request).await?;
//! assert_eq!(response.status(), 200);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod answer;
mod app;
mod body;
mod calls;
mod chunks;
mod constraint;
mod deliver;
mod errors;
mod generate;
mod metrics;
mod openai;
mod openapi;
mod prompt;
mod random;
mod routes;
mod scrape;
mod service;
mod sse;
mod text;
mod tracking;

pub use app::{ServerConfig, router};
pub use calls::kv_events::KvEvents;
pub use chunks::Chunks;
pub use service::EngineService;
pub use text::ModelText;
pub use tracking::{Arrival, CountedStatus};
