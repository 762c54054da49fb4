//! The address that a receiver hands out and a sender writes to.
//!
//! On the wire it is a prost message with the signature as its last field, so the signed bytes are simply all bytes before
//! it: what was signed is what was read, unknown fields of later versions included.
//!
//! ```text
//! | version engine incarnation … page_runs | 0x7a 0x20 signature (32 bytes) |
//! |<------------ signed ------------------>|
//! ```

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost::Message;
use sha2::{Digest as _, Sha256};

use std::time::Duration;

use crate::{
    Attempt, ClusterKey, EngineId, Generation, Incarnation, KvLayout, KvRange, PageId, SeqId, TokenId,
};

/// The version that this crate writes and reads.
const VERSION: u32 = 1;
/// Field 15, length-delimited, 32 bytes.
const SIGNATURE_HEAD: [u8; 2] = [0x7a, 0x20];
const SIGNATURE_BYTES: usize = 32;
/// Addresses larger than this are refused unread.
const MAX_ENCODED_BYTES: usize = 1 << 20;
/// A region has at most this many pages, so that a forged address cannot make us allocate more.
const MAX_PAGES: u32 = 1 << 22;

/// Where a receiver wants the KV of a range, and under whose promise.
///
/// Decoding checks all that can be checked without knowing the layout; [`KvAddrInfo::fits`] checks the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvAddrInfo {
    /// The receiving engine.
    pub engine_id: EngineId,
    /// Its boot.
    pub incarnation: Incarnation,
    /// The request.
    pub seq_id: SeqId,
    /// The try.
    pub attempt: Attempt,
    /// The reservation.
    pub generation: Generation,
    /// How long it stands without a sign of life.
    pub lease: Duration,
    /// [`KvLayout::fingerprint`] of the receiver.
    pub layout_fingerprint: u64,
    /// Pages in the receiver's region, which offsets there depend on.
    pub num_pages: u32,
    /// The name of the transport that understands `peer`.
    pub transport: String,
    /// How to reach the receiver, in the transport's own encoding.
    pub peer: Vec<u8>,
    /// The positions to be received, `[matched, end)`; not empty.
    pub range: KvRange,
    /// The receiver's pages that hold `range`, in order; the first holds position `range.begin()`.
    pub pages: Vec<PageId>,
    /// [`prompt_digest`] of the tokens `[0, end)`: KV of anything else has no place here.
    pub prompt_digest: u64,
}

/// Returns a digest of the tokens whose KV an address is for, so that a sender with another prompt is refused before it writes.
#[must_use]
pub fn prompt_digest(tokens: &[TokenId]) -> u64 {
    let mut hash = Sha256::new();
    for token in tokens {
        hash.update(token.0.to_le_bytes());
    }
    let digest = hash.finalize();
    u64::from_le_bytes(digest[..8].try_into().expect("a SHA-256 digest has 32 bytes"))
}

/// Why an address cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddrError {
    /// The bytes are no address.
    #[error("the address is malformed: {reason}")]
    Malformed {
        /// What is wrong.
        reason: String,
    },
    /// It was written by another version of this software.
    #[error("the address has version {version}, only {VERSION} is understood")]
    Version {
        /// Its version.
        version: u32,
    },
    /// The signature does not fit: forged, changed, or signed with another key.
    #[error("the address does not carry the receiver's signature")]
    BadSignature,
    /// Sender and receiver do not store KV alike.
    #[error("the address has KV layout {theirs:016x}, this engine has {ours:016x}")]
    Layout {
        /// Our fingerprint.
        ours: u64,
        /// The address's.
        theirs: u64,
    },
}

impl KvAddrInfo {
    /// Encodes and signs the address.
    #[must_use]
    pub fn encode(&self, key: &ClusterKey) -> Vec<u8> {
        let mut bytes = self.to_wire().encode_to_vec();
        let signature = key.sign(&bytes);
        bytes.extend_from_slice(&SIGNATURE_HEAD);
        bytes.extend_from_slice(&signature);
        bytes
    }

    /// Decodes an address without judging its signature: what a sender does that does not share the receiver's key.
    ///
    /// # Errors
    /// [`AddrError::Malformed`] or [`AddrError::Version`].
    pub fn decode(bytes: &[u8]) -> Result<Self, AddrError> {
        let (signed, _) = split(bytes)?;
        let wire = WireAddr::decode(signed).map_err(|error| malformed(error.to_string()))?;
        Self::from_wire(wire)
    }

    /// Verifies the signature, then decodes.
    ///
    /// # Errors
    /// [`AddrError::BadSignature`], and as [`KvAddrInfo::decode`].
    pub fn decode_verified(bytes: &[u8], key: &ClusterKey) -> Result<Self, AddrError> {
        let (signed, signature) = split(bytes)?;
        if !key.verify(signed, signature) {
            return Err(AddrError::BadSignature);
        }
        Self::decode(bytes)
    }

    /// Checks the address against the layout of the engine that is to write.
    ///
    /// # Errors
    /// [`AddrError::Layout`], or [`AddrError::Malformed`] if the pages are not those of the range.
    pub fn fits(&self, layout: &KvLayout) -> Result<(), AddrError> {
        let ours = layout.fingerprint();
        if ours != self.layout_fingerprint {
            return Err(AddrError::Layout { ours, theirs: self.layout_fingerprint });
        }
        if !self.range.begin().is_multiple_of(layout.page_size) {
            return Err(malformed(format!("the range {} does not begin at a page border", self.range)));
        }
        let needed = self.range.num_tokens().div_ceil(layout.page_size) as usize;
        if self.pages.len() != needed {
            return Err(malformed(format!(
                "{} pages for {}, must be {needed}",
                self.pages.len(),
                self.range
            )));
        }
        Ok(())
    }

    fn to_wire(&self) -> WireAddr {
        WireAddr {
            version: VERSION,
            engine_id: self.engine_id.to_string(),
            incarnation: self.incarnation.0,
            seq_id: self.seq_id.to_string(),
            attempt: self.attempt.0,
            generation: self.generation.0,
            lease_millis: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            layout_fingerprint: self.layout_fingerprint,
            num_pages: self.num_pages,
            transport: self.transport.clone(),
            peer: self.peer.clone(),
            matched: self.range.begin(),
            end: self.range.end(),
            page_runs: code_runs(&self.pages),
            prompt_digest: self.prompt_digest,
        }
    }

    fn from_wire(wire: WireAddr) -> Result<Self, AddrError> {
        if wire.version != VERSION {
            return Err(AddrError::Version { version: wire.version });
        }
        if wire.num_pages > MAX_PAGES {
            return Err(malformed(format!("{} pages in a region, at most {MAX_PAGES}", wire.num_pages)));
        }
        let range = KvRange::new(wire.matched, wire.end)
            .filter(|range| !range.is_empty())
            .ok_or_else(|| malformed(format!("the range [{}, {}) is empty", wire.matched, wire.end)))?;
        Ok(Self {
            engine_id: wire.engine_id.into(),
            incarnation: Incarnation(wire.incarnation),
            seq_id: wire.seq_id.into(),
            attempt: Attempt(wire.attempt),
            generation: Generation(wire.generation),
            lease: Duration::from_millis(wire.lease_millis),
            layout_fingerprint: wire.layout_fingerprint,
            num_pages: wire.num_pages,
            transport: wire.transport,
            peer: wire.peer,
            range,
            pages: decode_runs(&wire.page_runs, wire.num_pages)?,
            prompt_digest: wire.prompt_digest,
        })
    }
}

/// Writes address bytes as the base64 text that travels in JSON.
#[must_use]
pub fn addr_to_text(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Reads the base64 text that travels in JSON.
///
/// # Errors
/// [`AddrError::Malformed`] if it is not base64 or too long.
pub fn addr_from_text(text: &str) -> Result<Vec<u8>, AddrError> {
    if text.len() > MAX_ENCODED_BYTES * 2 {
        return Err(malformed(format!("{} characters", text.len())));
    }
    STANDARD.decode(text).map_err(|error| malformed(format!("not base64: {error}")))
}

fn malformed(reason: String) -> AddrError {
    AddrError::Malformed { reason }
}

/// Splits an address into what is signed and the signature.
fn split(bytes: &[u8]) -> Result<(&[u8], &[u8]), AddrError> {
    if bytes.len() > MAX_ENCODED_BYTES {
        return Err(malformed(format!("{} bytes, at most {MAX_ENCODED_BYTES}", bytes.len())));
    }
    let at = bytes
        .len()
        .checked_sub(SIGNATURE_HEAD.len() + SIGNATURE_BYTES)
        .ok_or_else(|| malformed(format!("{} bytes, too short for a signature", bytes.len())))?;
    let (signed, tail) = bytes.split_at(at);
    let signature =
        tail.strip_prefix(&SIGNATURE_HEAD).ok_or_else(|| malformed("no signature at its end".into()))?;
    Ok((signed, signature))
}

/// Codes pages as runs of neighbours: for each run the zigzag distance from the end of the run before, then its length.
fn code_runs(pages: &[PageId]) -> Vec<u64> {
    let mut runs = Vec::new();
    let mut expected: i64 = 0;
    let mut at = 0;
    while at < pages.len() {
        let first = pages[at].0;
        let mut len = 1;
        while at + len < pages.len() && u64::from(pages[at + len].0) == u64::from(first) + len as u64 {
            len += 1;
        }
        let delta = i64::from(first) - expected;
        runs.push(((delta << 1) ^ (delta >> 63)).cast_unsigned());
        runs.push(len as u64);
        expected = i64::from(first) + len as i64;
        at += len;
    }
    runs
}

fn decode_runs(runs: &[u64], num_pages: u32) -> Result<Vec<PageId>, AddrError> {
    if !runs.len().is_multiple_of(2) {
        return Err(malformed("half a page run".into()));
    }
    let mut pages = Vec::new();
    let mut spans: Vec<(u32, u32)> = Vec::with_capacity(runs.len() / 2);
    let mut expected: i64 = 0;
    for run in runs.chunks_exact(2) {
        let delta = (run[0] >> 1).cast_signed() ^ -(run[0] & 1).cast_signed();
        let first = expected.checked_add(delta).and_then(|first| u32::try_from(first).ok());
        let len = u32::try_from(run[1]).ok().filter(|&len| len > 0);
        let end =
            first.zip(len).and_then(|(first, len)| first.checked_add(len)).filter(|&end| end <= num_pages);
        let (Some(first), Some(end)) = (first, end) else {
            return Err(malformed(format!("a page lies outside the region of {num_pages} pages")));
        };
        spans.push((first, end));
        if pages.len() + (end - first) as usize > num_pages as usize {
            return Err(malformed(format!("more pages than the region's {num_pages}")));
        }
        pages.extend((first..end).map(PageId));
        expected = i64::from(end);
    }
    spans.sort_unstable();
    if spans.windows(2).any(|pair| pair[1].0 < pair[0].1) {
        return Err(malformed("a page occurs twice".into()));
    }
    Ok(pages)
}

/// The message without its signature; tags are never reused.
#[derive(Clone, PartialEq, Eq, Message)]
struct WireAddr {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(string, tag = "2")]
    engine_id: String,
    #[prost(fixed64, tag = "3")]
    incarnation: u64,
    #[prost(string, tag = "4")]
    seq_id: String,
    #[prost(uint32, tag = "5")]
    attempt: u32,
    #[prost(uint64, tag = "6")]
    generation: u64,
    #[prost(uint64, tag = "7")]
    lease_millis: u64,
    #[prost(fixed64, tag = "8")]
    layout_fingerprint: u64,
    #[prost(uint32, tag = "9")]
    num_pages: u32,
    #[prost(string, tag = "10")]
    transport: String,
    #[prost(bytes = "vec", tag = "11")]
    peer: Vec<u8>,
    #[prost(uint32, tag = "12")]
    matched: u32,
    #[prost(uint32, tag = "13")]
    end: u32,
    #[prost(uint64, repeated, tag = "14")]
    page_runs: Vec<u64>,
    #[prost(fixed64, tag = "16")]
    prompt_digest: u64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::KvDtype;

    fn layout() -> KvLayout {
        KvLayout {
            page_size: 16,
            num_layers: 2,
            num_kv_heads: 1,
            head_dim: 4,
            dtype: KvDtype::U64,
            model_hash: 1,
            numeric_mode: "toy".into(),
            tp_rank: 0,
            tp_size: 1,
        }
    }

    fn address() -> KvAddrInfo {
        KvAddrInfo {
            engine_id: "d0".into(),
            incarnation: Incarnation(u64::MAX),
            seq_id: "cmpl-1".into(),
            attempt: Attempt(2),
            generation: Generation(77),
            lease: Duration::from_millis(1500),
            layout_fingerprint: layout().fingerprint(),
            num_pages: 64,
            transport: "loopback".into(),
            peer: vec![0, 255, 7],
            range: KvRange::new(16, 100).expect("ordered"),
            pages: [5, 6, 7, 40, 3, 2].map(PageId).to_vec(),
            prompt_digest: prompt_digest(&[TokenId(1), TokenId(2)]),
        }
    }

    fn key(byte: u8) -> ClusterKey {
        ClusterKey::from_random([byte; 32])
    }

    #[test]
    fn it_comes_back_as_it_went() {
        let bytes = address().encode(&key(1));
        assert_eq!(KvAddrInfo::decode(&bytes), Ok(address()));
        assert_eq!(KvAddrInfo::decode_verified(&bytes, &key(1)), Ok(address()));
        assert_eq!(addr_from_text(&addr_to_text(&bytes)), Ok(bytes));
        assert_eq!(address().fits(&layout()), Ok(()));
    }

    #[test]
    fn another_key_is_refused() {
        let bytes = address().encode(&key(1));
        assert_eq!(KvAddrInfo::decode_verified(&bytes, &key(2)), Err(AddrError::BadSignature));
        let a = ClusterKey::from_text("correct horse").expect("long enough");
        let b = ClusterKey::from_text(" correct horse\n").expect("long enough");
        assert_eq!(KvAddrInfo::decode_verified(&address().encode(&a), &b), Ok(address()));
        assert_eq!(ClusterKey::from_text("short"), Err(ShortKey { num_bytes: 5 }));
        assert_eq!(format!("{a:?}"), "ClusterKey(..)");
    }

    use crate::ShortKey;

    #[test]
    fn every_changed_bit_is_noticed() {
        let bytes = address().encode(&key(1));
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut forged = bytes.clone();
                forged[at] ^= 1 << bit;
                assert!(KvAddrInfo::decode_verified(&forged, &key(1)).is_err(), "byte {at} bit {bit}");
            }
        }
        for len in 0..bytes.len() {
            assert!(KvAddrInfo::decode_verified(&bytes[..len], &key(1)).is_err(), "cut to {len}");
        }
    }

    #[test]
    fn what_a_signed_address_may_not_say() {
        let check = |change: fn(&mut KvAddrInfo), expected: &str| {
            let mut addr = address();
            change(&mut addr);
            let result = KvAddrInfo::decode(&addr.encode(&key(1))).and_then(|addr| addr.fits(&layout()));
            assert_eq!(result.expect_err(expected).to_string(), expected);
        };
        check(
            |a| a.pages[0] = PageId(64),
            "the address is malformed: a page lies outside the region of 64 pages",
        );
        check(|a| a.pages[5] = PageId(3), "the address is malformed: a page occurs twice");
        check(|a| a.pages[3] = PageId(7), "the address is malformed: a page occurs twice");
        check(
            |a| a.num_pages = u32::MAX,
            "the address is malformed: 4294967295 pages in a region, at most 4194304",
        );
        check(|a| a.range = KvRange::default(), "the address is malformed: the range [0, 0) is empty");
        check(
            |a| a.range = KvRange::new(17, 100).expect("ordered"),
            "the address is malformed: the range [17, 100) does not begin at a page border",
        );
        check(|a| a.pages.truncate(5), "the address is malformed: 5 pages for [16, 100), must be 6");
        let ours = layout().fingerprint();
        assert_eq!(
            KvAddrInfo { layout_fingerprint: 3, ..address() }.fits(&layout()),
            Err(AddrError::Layout { ours, theirs: 3 })
        );
    }

    #[test]
    fn other_versions_are_named() {
        let mut wire = address().to_wire();
        wire.version = 9;
        let mut bytes = wire.encode_to_vec();
        let signature = key(1).sign(&bytes);
        bytes.extend_from_slice(&SIGNATURE_HEAD);
        bytes.extend_from_slice(&signature);
        assert_eq!(KvAddrInfo::decode_verified(&bytes, &key(1)), Err(AddrError::Version { version: 9 }));
    }

    #[test]
    fn forged_runs_do_not_allocate() {
        assert!(decode_runs(&[0, u64::MAX], 10).is_err());
        assert!(decode_runs(&[u64::MAX, 1], 10).is_err());
        assert!(decode_runs(&[0, 0], 10).is_err());
        assert!(decode_runs(&[0], 10).is_err());
        assert!(decode_runs(&[0, 10, 19, 10, 19, 10], 10).is_err());
    }

    proptest! {
        #[test]
        fn any_pages_survive(mut pages in prop::collection::vec(0u32..1000, 0..80), shuffle in any::<bool>()) {
            pages.sort_unstable();
            pages.dedup();
            if shuffle {
                let mid = pages.len() / 2;
                pages.rotate_left(mid);
            }
            let pages: Vec<_> = pages.into_iter().map(PageId).collect();
            prop_assert_eq!(decode_runs(&code_runs(&pages), 1000), Ok(pages));
        }

        #[test]
        fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200), sealed in any::<bool>()) {
            if sealed {
                let signature = key(1).sign(&bytes);
                bytes.extend_from_slice(&SIGNATURE_HEAD);
                bytes.extend_from_slice(&signature);
            }
            let _ = KvAddrInfo::decode(&bytes);
            let _ = KvAddrInfo::decode_verified(&bytes, &key(1));
        }

        #[test]
        fn no_change_of_a_signed_body_makes_it_panic(at in 0usize..100, byte in any::<u8>()) {
            let mut body = address().to_wire().encode_to_vec();
            let at = at % body.len();
            body[at] = byte;
            let signature = key(1).sign(&body);
            body.extend_from_slice(&SIGNATURE_HEAD);
            body.extend_from_slice(&signature);
            if let Ok(addr) = KvAddrInfo::decode_verified(&body, &key(1)) {
                let _ = addr.fits(&layout());
            }
        }

        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,60}") {
            let _ = addr_from_text(&text);
        }
    }
}
