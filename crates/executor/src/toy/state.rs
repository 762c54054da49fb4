//! One layer of the toy: reads the context's pages, writes the new tokens' slots, and carries the hidden words on.

use microserving_protocol::{KvGeometry, KvMemory, LayerId};

use crate::BatchItem;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Mixes two words; a bijection of either one while the other stands still.
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(25).wrapping_mul(GOLDEN) ^ b;
    x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

/// Takes one more word into a running digest; a bijection of either argument. Cheaper than [`mix`], as it runs over every
/// word of the context in every step.
fn fold(digest: u64, word: u64) -> u64 {
    (digest.rotate_left(23) ^ word).wrapping_mul(GOLDEN)
}

/// Working memory for one layer of one item; each run begins anew.
#[derive(Debug, Default)]
pub(super) struct LayerState {
    /// One running digest for each row of a page: `[k|v][kv_head]`. A row's slots follow each other in memory.
    rows: Vec<u64>,
    page: Vec<u8>,
}

impl LayerState {
    /// Computes `layer` for one item: digests the context, writes each new token's slots, updates `hidden`.
    pub(super) fn run(
        &mut self,
        geometry: &KvGeometry,
        memory: &dyn KvMemory,
        layer: LayerId,
        item: &BatchItem<'_>,
        hidden: &mut [u64],
    ) {
        let layout = &geometry.layout;
        let num_rows = 2 * layout.num_kv_heads;
        self.rows.clear();
        self.rows.extend((0..num_rows).map(|row| mix(u64::from(layer.0), u64::from(row))));
        self.page.resize(layout.page_bytes(), 0);

        let (page_size, slot_bytes) = (layout.page_size as usize, layout.slot_bytes());
        let row_bytes = page_size * slot_bytes;
        let position = item.position as usize;
        let end = position + hidden.len();
        for (first, &page) in (0..end).step_by(page_size).zip(item.pages) {
            let offset = geometry.page_offset(layer, page);
            // Slots of the page: [0, known) hold context, [known, filled) take new tokens.
            let known = position.saturating_sub(first).min(page_size);
            let filled = (end - first).min(page_size);
            if known > 0 {
                memory.read(offset, &mut self.page);
                for (digest, row) in self.rows.iter_mut().zip(self.page.chunks_exact(row_bytes)) {
                    *digest = row[..known * slot_bytes].chunks_exact(8).fold(*digest, |digest, word| {
                        fold(digest, u64::from_le_bytes(word.try_into().expect("chunks of 8 bytes")))
                    });
                }
            }
            if known == filled {
                continue;
            }
            for slot in known..filled {
                let hidden = &mut hidden[first + slot - position];
                let chain = mix(*hidden, combine(&self.rows));
                for (row_index, digest) in self.rows.iter_mut().enumerate() {
                    let begin = row_index * row_bytes + slot * slot_bytes;
                    let row_chain = mix(chain, row_index as u64);
                    for (dim, bytes) in self.page[begin..begin + slot_bytes].chunks_exact_mut(8).enumerate() {
                        let word = mix(row_chain, dim as u64);
                        bytes.copy_from_slice(&word.to_le_bytes());
                        *digest = fold(*digest, word);
                    }
                }
                *hidden = mix(*hidden, combine(&self.rows));
            }
            for row in 0..num_rows as usize {
                let begin = row * row_bytes + known * slot_bytes;
                let bytes = &self.page[begin..row * row_bytes + filled * slot_bytes];
                memory.write(offset + begin, bytes);
            }
        }
    }
}

fn combine(rows: &[u64]) -> u64 {
    rows.iter().fold(0, |sum, &row| mix(sum, row))
}
