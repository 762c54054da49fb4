//! How the router's engines are called: each by the wire that it offers.

use std::sync::Arc;

use microserving_client::{BadUrl, EngineAddress, EngineCalls, EngineKind};
use microserving_grpc::{AnyWireClient, WirePolicy};
use microserving_router::Connect;

/// Makes the clients of engines; one of ours takes the wire that it offers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByWire(pub(crate) WirePolicy);

impl Connect for ByWire {
    fn connect(&self, address: &EngineAddress) -> Result<Arc<dyn EngineCalls>, BadUrl> {
        match address.kind {
            EngineKind::Microserving => Ok(Arc::new(AnyWireClient::new(&address.url, self.0)?)),
            EngineKind::Mlc | EngineKind::OpenAi => address.connect(),
        }
    }
}
