//! The secret that addresses are signed with.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// The shortest text that makes a key, in bytes.
const MIN_TEXT_BYTES: usize = 8;

/// The key of the signatures on addresses: shared by a cluster, or random for one process.
///
/// It never prints itself.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey([u8; 32]);

/// The text is too short to be a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cluster key has {num_bytes} bytes, must have at least {MIN_TEXT_BYTES}")]
pub struct ShortKey {
    /// The text's length in bytes.
    pub num_bytes: usize,
}

impl ClusterKey {
    /// Makes a key of random bytes.
    #[must_use]
    pub const fn from_random(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Makes a key of a text that the whole cluster was configured with.
    ///
    /// # Errors
    /// If the text is shorter than 8 bytes.
    pub fn from_text(text: &str) -> Result<Self, ShortKey> {
        let text = text.trim();
        if text.len() < MIN_TEXT_BYTES {
            return Err(ShortKey { num_bytes: text.len() });
        }
        let mut hash = Sha256::new();
        hash.update(b"microserving cluster key v1\0");
        hash.update(text.as_bytes());
        Ok(Self(hash.finalize().into()))
    }

    /// Signs bytes.
    pub(crate) fn sign(&self, bytes: &[u8]) -> [u8; 32] {
        self.mac(bytes).finalize().into_bytes().into()
    }

    /// Checks a signature in constant time.
    pub(crate) fn verify(&self, bytes: &[u8], signature: &[u8]) -> bool {
        self.mac(bytes).verify_slice(signature).is_ok()
    }

    fn mac(&self, bytes: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(bytes);
        mac
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}
