//! From an engine's address to a way of calling it.

use std::fmt;
use std::sync::Arc;

use microserving_client::{BadUrl, EngineAddress, EngineCalls};

/// Makes the callers of engines that join by their address.
pub trait Connect: Send + Sync + fmt::Debug {
    /// Makes the caller of an engine; connects on the first call, not here.
    ///
    /// # Errors
    /// If the address cannot be used.
    fn connect(&self, address: &EngineAddress) -> Result<Arc<dyn EngineCalls>, BadUrl>;
}

/// Calls engines over HTTP and JSON.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectHttp;

impl Connect for ConnectHttp {
    fn connect(&self, address: &EngineAddress) -> Result<Arc<dyn EngineCalls>, BadUrl> {
        address.connect()
    }
}
