//! How KV lies in memory, and the fingerprint that two engines must share before one may write to the other.
//!
//! ```text
//! region: [layer][page]                     layer_bytes = num_pages * page_bytes
//! page of one layer: [k|v][kv_head][slot][head_dim]   page_bytes, one contiguous run
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{KvRange, LayerId, PageId};

/// The number format of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// IEEE single precision, 4 bytes.
    F32,
    /// IEEE half precision, 2 bytes.
    F16,
    /// bfloat16, 2 bytes.
    Bf16,
    /// Opaque 8-byte words: what the toy executor keeps.
    U64,
}

impl KvDtype {
    /// Returns the size of one element in bytes.
    #[must_use]
    pub const fn num_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U64 => 8,
        }
    }

    /// Returns the name used in configuration and fingerprints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::U64 => "u64",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// All that two engines must agree on before KV written by one means anything to the other.
///
/// The number of pages is not part of it: engines of different sizes may exchange pages (see [`KvGeometry`]).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    /// Tokens in a page.
    pub page_size: u32,
    /// Transformer layers.
    pub num_layers: u32,
    /// KV heads held by this rank.
    pub num_kv_heads: u32,
    /// Elements of one head's key or value.
    pub head_dim: u32,
    /// Element type of the cache.
    pub dtype: KvDtype,
    /// Hash of the model: architecture, configuration and weights as loaded.
    pub model_hash: u64,
    /// The numeric mode: two engines return the same tokens only if weights' form and kernels' arithmetic are the same,
    /// for example `q8_0/avx512vnni`.
    pub numeric_mode: String,
    /// This engine's rank in its tensor-parallel group.
    pub tp_rank: u32,
    /// Ranks in the group; 1 for a single device.
    pub tp_size: u32,
}

impl KvLayout {
    /// Returns the bytes of one page of one layer: `2 * num_kv_heads * page_size * head_dim * dtype`.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        2 * self.num_kv_heads as usize * self.page_size as usize * self.slot_bytes()
    }

    /// Returns the bytes of one head's key (or value) of one token in one layer.
    #[must_use]
    pub const fn slot_bytes(&self) -> usize {
        self.head_dim as usize * self.dtype.num_bytes()
    }

    /// Returns the bytes that one token's KV takes over all layers.
    #[must_use]
    pub const fn token_bytes(&self) -> usize {
        self.num_layers as usize * 2 * self.num_kv_heads as usize * self.slot_bytes()
    }

    /// Returns the pages that hold `num_tokens` tokens.
    #[must_use]
    pub const fn pages_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.page_size)
    }

    /// Returns a hash over every field; equal fingerprints mean interchangeable KV.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let text = format!(
            "v1 page {} layers {} kv_heads {} head_dim {} dtype {} model {:016x} mode {} tp {}/{}",
            self.page_size,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.model_hash,
            self.numeric_mode,
            self.tp_rank,
            self.tp_size
        );
        let digest = Sha256::digest(text.as_bytes());
        u64::from_le_bytes(digest[..8].try_into().expect("a SHA-256 digest has 32 bytes"))
    }
}

/// A layout together with the number of pages of one engine's region: enough to compute any offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGeometry {
    /// The layout of a page.
    pub layout: KvLayout,
    /// Pages in the region.
    pub num_pages: u32,
}

impl KvGeometry {
    /// Returns the bytes of the whole region.
    #[must_use]
    pub const fn region_bytes(&self) -> usize {
        self.layout.num_layers as usize * self.num_pages as usize * self.layout.page_bytes()
    }

    /// Returns where a page of a layer begins, in bytes from the start of the region.
    #[must_use]
    pub const fn page_offset(&self, layer: LayerId, page: PageId) -> usize {
        (layer.0 as usize * self.num_pages as usize + page.0 as usize) * self.layout.page_bytes()
    }

    /// Returns where one head's key (`kv = 0`) or value (`kv = 1`) of one slot begins, in bytes from the start of the region.
    #[must_use]
    pub const fn slot_offset(&self, layer: LayerId, page: PageId, kv: u32, kv_head: u32, slot: u32) -> usize {
        let row = (kv * self.layout.num_kv_heads + kv_head) * self.layout.page_size + slot;
        self.page_offset(layer, page) + row as usize * self.layout.slot_bytes()
    }

    /// Calls `each` with `(first_slot, num_slots, index_of_page)` for every page that `range` touches.
    ///
    /// `index_of_page` counts pages from position 0 of the sequence.
    pub fn for_each_page(&self, range: KvRange, mut each: impl FnMut(u32, u32, usize)) {
        let page_size = self.layout.page_size;
        let mut at = range.begin();
        while at < range.end() {
            let slot = at % page_size;
            let num_slots = (page_size - slot).min(range.end() - at);
            each(slot, num_slots, (at / page_size) as usize);
            at += num_slots;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> KvGeometry {
        KvGeometry {
            layout: KvLayout {
                page_size: 4,
                num_layers: 2,
                num_kv_heads: 3,
                head_dim: 8,
                dtype: KvDtype::F16,
                model_hash: 7,
                numeric_mode: "f32/plain".into(),
                tp_rank: 0,
                tp_size: 1,
            },
            num_pages: 10,
        }
    }

    #[test]
    fn offsets_tile_the_region_without_gaps() {
        let geometry = geometry();
        let mut next = 0;
        for layer in 0..2 {
            for page in 0..10 {
                for kv in 0..2 {
                    for head in 0..3 {
                        for slot in 0..4 {
                            assert_eq!(
                                geometry.slot_offset(LayerId(layer), PageId(page), kv, head, slot),
                                next
                            );
                            next += geometry.layout.slot_bytes();
                        }
                    }
                }
            }
        }
        assert_eq!(next, geometry.region_bytes());
        assert_eq!(next, geometry.layout.token_bytes() * 4 * 10);
    }

    #[test]
    fn ranges_are_cut_at_page_borders() {
        let mut seen = Vec::new();
        geometry().for_each_page(KvRange::new(3, 9).expect("ordered"), |slot, count, page| {
            seen.push((slot, count, page));
        });
        assert_eq!(seen, [(3, 1, 0), (0, 4, 1), (0, 1, 2)]);
    }

    #[test]
    fn the_fingerprint_depends_on_every_field() {
        let base = geometry().layout;
        let mut all = vec![base.fingerprint()];
        let changes: [fn(&mut KvLayout); 9] = [
            |l| l.page_size = 16,
            |l| l.num_layers = 3,
            |l| l.num_kv_heads = 4,
            |l| l.head_dim = 16,
            |l| l.dtype = KvDtype::Bf16,
            |l| l.model_hash = 8,
            |l| l.numeric_mode = "f32/avx2".into(),
            |l| l.tp_rank = 1,
            |l| l.tp_size = 2,
        ];
        for change in changes {
            let mut layout = base.clone();
            change(&mut layout);
            all.push(layout.fingerprint());
        }
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 10);
    }
}
