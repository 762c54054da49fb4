//! What a pattern will not do with the engines that there are.

use tracing::warn;

use crate::RouterService;

impl RouterService {
    /// Returns why the pattern in use runs data parallel whatever the load, if it does: it would move KV, and no engine that may receive some
    /// is of a kind and in a state to.
    #[must_use]
    pub fn caution(&self) -> Option<&'static str> {
        let engines = self.cluster().engines();
        if engines.is_empty() || !self.patterns().moves_kv() {
            return None;
        }
        let movers: Vec<_> = engines.iter().filter(|engine| engine.kind().moves_kv()).collect();
        if movers.is_empty() {
            return Some("no engine moves KV: every request runs on one engine, as in data_parallel");
        }
        let knows = self.codecs.is_given() || movers.iter().any(|engine| engine.kind().is_ours());
        let foreign = "the router has no tokenizer of its MLC-LLM servers: text and chats run on one engine each, as in data_parallel";
        (!knows).then_some(foreign)
    }

    /// Says it in the log too.
    pub(crate) fn warn_of_caution(&self) {
        if let Some(caution) = self.caution() {
            warn!(pattern = %self.patterns().current(), caution);
        }
    }
}
