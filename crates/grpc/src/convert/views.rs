//! What an engine shows of itself.

use microserving_protocol::{CountersView, EngineId, KvEvent, KvEventKind, PageHash, PagesView, StateView};

use super::BadMessage;
use crate::wire;

fn boot(incarnation: &str) -> Result<u64, BadMessage> {
    let hex = incarnation.len() == 16 && incarnation.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = u64::from_str_radix(incarnation, 16).ok().filter(|_| hex);
    number.ok_or_else(|| BadMessage(format!("the incarnation {incarnation:?} is not 16 hex digits")))
}

impl TryFrom<StateView> for wire::StateResponse {
    type Error = BadMessage;

    fn try_from(view: StateView) -> Result<Self, BadMessage> {
        let StateView {
            engine_id,
            incarnation,
            model,
            max_context,
            page_size,
            layout_fingerprint,
            pages,
            waiting,
            running,
            receiving,
            sending,
            queued_prefill_tokens,
            draining,
            counters,
            grpc,
            marks,
        } = view;
        Ok(Self {
            engine_id: engine_id.to_string(),
            incarnation: boot(&incarnation)?,
            model,
            max_context,
            page_size,
            layout_fingerprint,
            pages: Some(pages.into()),
            waiting,
            running,
            receiving,
            sending,
            queued_prefill_tokens,
            draining,
            counters: Some(counters.into()),
            grpc,
            marks,
        })
    }
}

impl From<wire::StateResponse> for StateView {
    fn from(message: wire::StateResponse) -> Self {
        let wire::StateResponse {
            engine_id,
            incarnation,
            model,
            max_context,
            page_size,
            layout_fingerprint,
            pages,
            waiting,
            running,
            receiving,
            sending,
            queued_prefill_tokens,
            draining,
            counters,
            grpc,
            marks,
        } = message;
        Self {
            engine_id: EngineId::from(engine_id),
            incarnation: format!("{incarnation:016x}"),
            model,
            max_context,
            page_size,
            layout_fingerprint,
            pages: pages.unwrap_or_default().into(),
            waiting,
            running,
            receiving,
            sending,
            queued_prefill_tokens,
            draining,
            counters: counters.unwrap_or_default().into(),
            grpc,
            marks,
        }
    }
}

/// Types whose fields are the same on both sides.
macro_rules! alike {
    ($($name:ident as $message:ident { $($field:ident),* })*) => {$(
        impl From<$name> for wire::$message {
            fn from(view: $name) -> Self {
                let $name { $($field),* } = view;
                Self { $($field),* }
            }
        }

        impl From<wire::$message> for $name {
            fn from(message: wire::$message) -> Self {
                let wire::$message { $($field),* } = message;
                Self { $($field),* }
            }
        }
    )*};
}

alike! {
    PagesView as Pages { free, reserved, owned, cached, quarantined, total }
    CountersView as Counters {
        steps, prefill_tokens, decode_tokens, matched_tokens, lookup_tokens, evicted_pages, preemptions, leases_expired,
        transfers_lost, aborted, bytes_sent, bytes_received, transfer_micros, exposed_transfer_micros,
        devices_lost
    }
}

impl TryFrom<KvEvent> for wire::KvEvent {
    type Error = BadMessage;

    fn try_from(event: KvEvent) -> Result<Self, BadMessage> {
        let KvEvent { incarnation, number, kind } = event;
        let kind = match kind {
            KvEventKind::Stored { pages } => wire::kv_event::Kind::Stored(hashes(&pages)?),
            KvEventKind::Removed { pages } => wire::kv_event::Kind::Removed(hashes(&pages)?),
            KvEventKind::Cleared => wire::kv_event::Kind::Cleared(wire::Cleared {}),
            KvEventKind::Snapshot { pages } => wire::kv_event::Kind::Snapshot(hashes(&pages)?),
        };
        Ok(Self { incarnation: boot(&incarnation)?, number, kind: Some(kind) })
    }
}

impl TryFrom<wire::KvEvent> for KvEvent {
    type Error = BadMessage;

    fn try_from(message: wire::KvEvent) -> Result<Self, BadMessage> {
        let wire::KvEvent { incarnation, number, kind } = message;
        let kind = match kind {
            Some(wire::kv_event::Kind::Stored(list)) => KvEventKind::Stored { pages: pages(&list)? },
            Some(wire::kv_event::Kind::Removed(list)) => KvEventKind::Removed { pages: pages(&list)? },
            Some(wire::kv_event::Kind::Cleared(wire::Cleared {})) => KvEventKind::Cleared,
            Some(wire::kv_event::Kind::Snapshot(list)) => KvEventKind::Snapshot { pages: pages(&list)? },
            None => return Err(BadMessage(format!("the event {number} says nothing of what changed"))),
        };
        Ok(Self { incarnation: format!("{incarnation:016x}"), number, kind })
    }
}

fn hashes(pages: &[String]) -> Result<wire::PageHashes, BadMessage> {
    let mut hashes = Vec::with_capacity(16 * pages.len());
    for page in pages {
        let hash: PageHash = page.parse().map_err(BadMessage)?;
        hashes.extend_from_slice(&hash.0.to_be_bytes());
    }
    Ok(wire::PageHashes { hashes })
}

fn pages(list: &wire::PageHashes) -> Result<Vec<String>, BadMessage> {
    let (hashes, rest) = list.hashes.as_chunks::<16>();
    if !rest.is_empty() {
        return Err(BadMessage(format!("{} bytes of page hashes, must be 16 a page", list.hashes.len())));
    }
    Ok(hashes.iter().map(|bytes| PageHash(u128::from_be_bytes(*bytes)).to_string()).collect())
}
