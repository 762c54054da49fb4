//! Judges the addresses that senders present; shared with the transport's own thread.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use microserving_protocol::{AddrError, ClusterKey, EngineId, Generation, Incarnation, KvAddrInfo};
use microserving_transport::{Admission, Refusal};

/// Knows this engine's key and boot, and which of its reservations still want data.
#[derive(Debug)]
pub(crate) struct Gatekeeper {
    key: ClusterKey,
    engine_id: EngineId,
    incarnation: Incarnation,
    /// Open generations, with the number of claims admitted: each is a sign of life of a sender. Locked for a look-up only.
    open: Mutex<BTreeMap<Generation, u64>>,
}

impl Gatekeeper {
    pub(crate) fn new(key: ClusterKey, engine_id: EngineId, incarnation: Incarnation) -> Self {
        Self { key, engine_id, incarnation, open: Mutex::default() }
    }

    /// Lets senders in.
    pub(crate) fn open(&self, generation: Generation) {
        self.lock().insert(generation, 0);
    }

    /// Lets no one in any more.
    pub(crate) fn close(&self, generation: Generation) {
        self.lock().remove(&generation);
    }

    /// Returns how many claims were admitted so far.
    pub(crate) fn claims(&self, generation: Generation) -> u64 {
        self.lock().get(&generation).copied().unwrap_or(0)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Generation, u64>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Admission for Gatekeeper {
    fn admit(&self, credential: &[u8]) -> Result<Generation, Refusal> {
        let address = match KvAddrInfo::decode_verified(credential, &self.key) {
            Ok(address) => address,
            Err(error) => {
                tracing::warn!(%error, "a sender's address was refused");
                // An address of another version may well be ours, from before an update; all else was not written by us.
                return Err(match error {
                    AddrError::Version { .. } => Refusal::Stale,
                    _ => Refusal::BadCredential,
                });
            }
        };
        if address.engine_id != self.engine_id {
            return Err(Refusal::BadCredential);
        }
        if address.incarnation != self.incarnation {
            return Err(Refusal::Stale);
        }
        match self.lock().get_mut(&address.generation) {
            Some(claims) => {
                *claims += 1;
                Ok(address.generation)
            }
            None => Err(Refusal::Stale),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use microserving_protocol::{Attempt, KvRange, PageId};

    use super::*;

    fn address() -> KvAddrInfo {
        KvAddrInfo {
            engine_id: "d0".into(),
            incarnation: Incarnation(5),
            seq_id: "a".into(),
            attempt: Attempt(0),
            generation: Generation(7),
            lease: Duration::from_secs(1),
            layout_fingerprint: 1,
            num_pages: 8,
            transport: "loopback".into(),
            peer: vec![1],
            range: KvRange::new(0, 4).expect("ordered"),
            pages: vec![PageId(3)],
            prompt_digest: 9,
        }
    }

    #[test]
    fn only_an_open_reservation_of_this_boot_is_let_in() {
        let ours = ClusterKey::from_random([1; 32]);
        let foreign = ClusterKey::from_random([2; 32]);
        let gate = Gatekeeper::new(ours.clone(), "d0".into(), Incarnation(5));
        let judge = |address: KvAddrInfo, key: &ClusterKey| gate.admit(&address.encode(key));
        assert_eq!(judge(address(), &ours), Err(Refusal::Stale), "not open yet");
        gate.open(Generation(7));
        assert_eq!(judge(address(), &ours), Ok(Generation(7)));
        assert_eq!(judge(address(), &foreign), Err(Refusal::BadCredential));
        assert_eq!(
            judge(KvAddrInfo { incarnation: Incarnation(4), ..address() }, &ours),
            Err(Refusal::Stale)
        );
        assert_eq!(
            judge(KvAddrInfo { engine_id: "d1".into(), ..address() }, &ours),
            Err(Refusal::BadCredential)
        );
        assert_eq!(gate.admit(b"nonsense"), Err(Refusal::BadCredential));
        assert_eq!(gate.claims(Generation(7)), 1, "refusals are no sign of life");
        gate.close(Generation(7));
        assert_eq!(judge(address(), &ours), Err(Refusal::Stale));
    }
}
