//! What kernels must know of a batch, in one run of words that is copied to the device at once.

use std::ops::Range;

use microserving_executor::{BatchItem, LogitNeed};

/// Sections begin at multiples of this many words: 16 bytes.
const ALIGN: usize = 4;

/// Words of a section.
pub(crate) type Section = Range<usize>;

/// Sequences that one launch of attention takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sequences {
    pub(crate) num_seqs: u32,
    /// The largest number of new tokens of one.
    pub(crate) max_new_tokens: u32,
    /// Columns of the page table.
    pub(crate) max_pages: u32,
    /// `[num_seqs + 1]`: where each one's rows begin in the batch, and the last one's end.
    pub(crate) starts: Section,
    /// `[num_seqs]`
    pub(crate) contexts: Section,
    /// `[num_seqs, max_pages]`
    pub(crate) table: Section,
}

/// A row of logits: whose, and what its sampler needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) item: usize,
    pub(crate) need: LogitNeed,
}

/// The places of a step's words.
///
/// ```text
/// rows     [ items of one token: decodes ][ items of several: prefills ]      attention has a launch for each of the two
/// wanted   [ kept: top_k, top_p ][ best ][ all ]                              rows of logits, by what is found on the device
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Inputs {
    pub(crate) num_rows: u32,
    pub(crate) num_words: usize,
    /// `[num_rows]`
    pub(crate) tokens: Section,
    /// `[num_rows]`
    pub(crate) positions: Section,
    /// `[num_rows]`: page * page_size + slot.
    pub(crate) slots: Section,
    /// Items of one new token, and of several.
    pub(crate) attention: [Sequences; 2],
    pub(crate) wanted: Vec<Wanted>,
    /// How many of them are to be drawn among what is kept; they come first.
    pub(crate) num_kept: usize,
    /// How many need all logits; they come last.
    pub(crate) num_all: usize,
    /// `[wanted]`: their rows in the batch.
    pub(crate) wanted_rows: Section,
    /// `[num_kept]` each, f32, u32 and f32.
    pub(crate) temperatures: Section,
    pub(crate) top_ks: Section,
    pub(crate) top_ps: Section,
    /// Items in the order of their rows; scratch of `plan`.
    order: Vec<usize>,
}

impl Inputs {
    /// Places the words of a batch; reuses what it has of memory.
    pub(crate) fn plan(&mut self, items: &[BatchItem<'_>], page_size: u32, vocab_size: u32) {
        self.num_words = 0;
        self.num_rows = items.iter().map(|item| item.tokens.len() as u32).sum();
        let rows = self.num_rows as usize;
        self.order.clear();
        self.order.extend((0..items.len()).filter(|&item| items[item].tokens.len() == 1));
        let num_single = self.order.len();
        self.order.extend((0..items.len()).filter(|&item| items[item].tokens.len() != 1));
        [self.tokens, self.positions, self.slots] = std::array::from_fn(|_| self.section(rows));
        for (at, range) in [0..num_single, num_single..self.order.len()].into_iter().enumerate() {
            let own = || self.order[range.clone()].iter().map(|&item| &items[item]);
            let max_new_tokens = own().map(|item| item.tokens.len() as u32).max().unwrap_or(0);
            let max_pages = own().map(|item| num_pages(item, page_size)).max().unwrap_or(0);
            let num_seqs = range.len();
            self.attention[at] = Sequences {
                num_seqs: num_seqs as u32,
                max_new_tokens,
                max_pages,
                starts: self.section(num_seqs + 1),
                contexts: self.section(num_seqs),
                table: self.section(num_seqs * max_pages as usize),
            };
        }
        self.plan_wanted(items, vocab_size);
    }

    fn plan_wanted(&mut self, items: &[BatchItem<'_>], vocab_size: u32) {
        self.wanted.clear();
        self.wanted.extend(items.iter().enumerate().filter_map(|(item, entry)| {
            let need = entry.sampler.as_ref()?.need(vocab_size);
            Some(Wanted { item, need })
        }));
        self.wanted.sort_by_key(|wanted| match wanted.need {
            LogitNeed::Kept { .. } => 0,
            LogitNeed::Best => 1,
            LogitNeed::All => 2,
        });
        let count = |is: fn(&LogitNeed) -> bool| self.wanted.iter().filter(|wanted| is(&wanted.need)).count();
        self.num_kept = count(|need| matches!(need, LogitNeed::Kept { .. }));
        self.num_all = count(|need| matches!(need, LogitNeed::All));
        self.wanted_rows = self.section(self.wanted.len());
        [self.temperatures, self.top_ks, self.top_ps] = std::array::from_fn(|_| self.section(self.num_kept));
    }

    fn section(&mut self, len: usize) -> Section {
        let begin = self.num_words;
        self.num_words = (begin + len).next_multiple_of(ALIGN);
        begin..begin + len
    }

    /// Writes the words of the batch that was planned.
    pub(crate) fn write(&self, items: &[BatchItem<'_>], page_size: u32, words: &mut [u32]) {
        let mut row = 0;
        let mut ordered = self.order.iter();
        for sequences in &self.attention {
            words[sequences.starts.start] = row as u32;
            for seq in 0..sequences.num_seqs as usize {
                let index = *ordered.next().expect("as many as were planned");
                let item = &items[index];
                for (position, token) in (item.position..).zip(item.tokens) {
                    words[self.tokens.start + row] = token.0;
                    words[self.positions.start + row] = position;
                    let page = item.pages[(position / page_size) as usize];
                    words[self.slots.start + row] = page.0 * page_size + position % page_size;
                    row += 1;
                }
                words[sequences.starts.start + seq + 1] = row as u32;
                words[sequences.contexts.start + seq] = item.position + item.tokens.len() as u32;
                let columns = sequences.max_pages as usize;
                let table = &mut words[sequences.table.clone()][seq * columns..(seq + 1) * columns];
                for (at, page) in table.iter_mut().enumerate() {
                    // Pages past the context are not read; the item may have others there.
                    *page = item.pages.get(at).map_or(0, |page| page.0);
                }
                if let Some(at) = self.wanted.iter().position(|wanted| wanted.item == index) {
                    words[self.wanted_rows.start + at] = row as u32 - 1;
                }
            }
        }
        for (at, wanted) in self.wanted[..self.num_kept].iter().enumerate() {
            if let LogitNeed::Kept { temperature, top_k, top_p } = wanted.need {
                words[self.temperatures.start + at] = temperature.to_bits();
                words[self.top_ks.start + at] = top_k;
                words[self.top_ps.start + at] = top_p.to_bits();
            }
        }
    }
}

/// Returns how many pages an item's context takes.
fn num_pages(item: &BatchItem<'_>, page_size: u32) -> u32 {
    (item.position + item.tokens.len() as u32).div_ceil(page_size)
}

#[cfg(test)]
mod tests {
    use microserving_executor::Sampler;
    use microserving_protocol::{PageId, SamplingParams, TokenId};

    use super::*;

    #[test]
    fn rows_of_single_tokens_come_first_and_sections_are_aligned() {
        let tokens: Vec<TokenId> = (10..15).map(TokenId).collect();
        let pages: Vec<Vec<PageId>> =
            [vec![4, 2], vec![7, 9], vec![1]].map(|ids| ids.into_iter().map(PageId).collect()).into();
        let greedy = Sampler::new(SamplingParams::greedy(), 0, &[]);
        let kept = SamplingParams { temperature: 0.5, top_p: 0.75, top_k: 3, ..SamplingParams::default() };
        let mut samplers = [greedy, Sampler::new(kept, 0, &[])];
        let [greedy, kept] = &mut samplers;
        let item = |tokens, position, at: usize, sampler| {
            let pages = &pages[at];
            BatchItem { tokens, position, pages, sampler, is_sent: false }
        };
        let items = [
            item(&tokens[..3], 2, 0, Some(greedy)),
            item(&tokens[3..4], 6, 1, Some(kept)),
            item(&tokens[3..], 0, 2, None),
        ];
        let mut inputs = Inputs::default();
        inputs.plan(&items, 4, 100);
        let mut words = vec![99; inputs.num_words];
        inputs.write(&items, 4, &mut words);
        let at = |section: &Section| &words[section.clone()];
        assert_eq!(at(&inputs.tokens), [13, 10, 11, 12, 13, 14]);
        assert_eq!(at(&inputs.positions), [6, 2, 3, 4, 0, 1]);
        assert_eq!(at(&inputs.slots), [9 * 4 + 2, 4 * 4 + 2, 4 * 4 + 3, 2 * 4, 4, 5]);
        let [single, several] = &inputs.attention;
        assert_eq!((single.num_seqs, single.max_new_tokens, single.max_pages), (1, 1, 2));
        assert_eq!(
            (at(&single.starts), at(&single.contexts), at(&single.table)),
            (&[0, 1][..], &[7][..], &[7, 9][..])
        );
        assert_eq!((several.num_seqs, several.max_new_tokens, several.max_pages), (2, 3, 2));
        assert_eq!((at(&several.starts), at(&several.contexts)), (&[1, 4, 6][..], &[5, 2][..]));
        assert_eq!(at(&several.table)[..3], [4, 2, 1]);
        // What is kept comes first among the rows of logits.
        assert_eq!(inputs.wanted.iter().map(|wanted| wanted.item).collect::<Vec<_>>(), [1, 0]);
        assert_eq!((at(&inputs.wanted_rows), inputs.num_kept, inputs.num_all), (&[0, 3][..], 1, 0));
        let found = (at(&inputs.temperatures), at(&inputs.top_ks), at(&inputs.top_ps));
        assert_eq!(found, (&[0.5_f32.to_bits()][..], &[3][..], &[0.75_f32.to_bits()][..]));
        for section in [&inputs.positions, &inputs.slots, &several.table, &several.starts, &inputs.top_ps] {
            assert!(section.start.is_multiple_of(ALIGN));
        }
    }
}
