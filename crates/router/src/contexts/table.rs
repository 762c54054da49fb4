//! The prefixes that requests share, and how often each is asked for where.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{PageHash, TokenId};
use tokio::time::Instant;

/// How long a request counts in a rate.
pub(crate) const MEMORY: Duration = Duration::from_secs(60);
/// Pages remembered of which one request has been seen, in each of two generations.
const MAX_PAGES: usize = 1 << 18;
/// Bytes of tokens kept.
const MAX_BYTES: usize = 32 << 20;
/// Contexts kept.
const MAX_CONTEXTS: usize = 4096;
/// Tokens that an answer is taken to have where its client sets no lower bound.
const ANSWER: u32 = 128;
/// The weight of the newest request in a mean.
const NEWEST: f64 = 0.125;
/// A rate below this, in requests a second, is none: e⁻⁸ of one that was.
const NO_RATE: f64 = 5e-6;

/// What is asked of one engine.
#[derive(Debug)]
pub(crate) struct Seen<'a> {
    /// The names of the prompt's whole pages.
    pub(crate) chain: &'a [PageHash],
    /// Tokens in a page.
    pub(crate) page_size: u32,
    /// The prompt.
    pub(crate) tokens: &'a [TokenId],
    pub(crate) model: Option<&'a str>,
    pub(crate) salt: &'a str,
    /// The longest answer that its client takes.
    pub(crate) answer: Option<u32>,
}

/// A prefix that at least two requests had.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    /// Its tokens, whole pages of them.
    pub(crate) tokens: Arc<[TokenId]>,
    /// Tokens in a page.
    pub(crate) page_size: u32,
    /// The model that its requests named.
    pub(crate) model: Option<Arc<str>>,
    /// Whose cache it is in.
    pub(crate) salt: Arc<str>,
    /// Tokens of a prompt behind it, in the mean.
    pub(crate) behind: f64,
    /// Tokens of an answer, at most, in the mean.
    pub(crate) answer: f64,
    rates: HashMap<u32, Rate>,
    last: Instant,
}

impl Context {
    /// Returns the requests a second for which this is the longest shared prefix, by engine.
    pub(crate) fn rates(&self, now: Instant) -> Vec<(u32, f64)> {
        let mut rates: Vec<_> = self
            .rates
            .iter()
            .map(|(&engine, rate)| (engine, rate.at(now)))
            .filter(|(_, r)| *r > NO_RATE)
            .collect();
        rates.sort_by_key(|(engine, _)| *engine);
        rates
    }
}

/// Requests a second, decaying.
#[derive(Clone, Copy, Debug)]
struct Rate {
    per_second: f64,
    at: Instant,
}

impl Rate {
    fn at(&self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.at).as_secs_f64();
        self.per_second * (-age / MEMORY.as_secs_f64()).exp()
    }
}

/// The table. Time is an argument.
#[derive(Debug, Default)]
pub(crate) struct ContextTable {
    /// Pages seen lately, and those seen before: one generation goes when the other is full.
    young: HashSet<PageHash>,
    old: HashSet<PageHash>,
    /// By the name of the last page.
    contexts: HashMap<PageHash, Context>,
    bytes: usize,
}

impl ContextTable {
    /// Notes a request that goes to `engine`: it counts for the longest prefix that it shares with others.
    pub(crate) fn note(&mut self, now: Instant, engine: u32, seen: &Seen<'_>) {
        let known = |page: &&PageHash| self.young.contains(*page) || self.old.contains(*page);
        let shared = seen.chain.iter().take_while(known).count();
        for &page in seen.chain {
            if self.young.len() >= MAX_PAGES {
                self.old = std::mem::take(&mut self.young);
            }
            self.young.insert(page);
        }
        if let Some(last) = shared.checked_sub(1).map(|last| seen.chain[last])
            && !self.contexts.contains_key(&last)
        {
            self.keep(now, last, shared * seen.page_size as usize, seen);
        }
        // What is shared is in the table unless it is too large; then something shorter may be.
        let Some(context) = seen.chain[..shared].iter().rev().find(|page| self.contexts.contains_key(*page))
        else {
            return;
        };
        let Some(context) = self.contexts.get_mut(context) else { return };
        let behind = seen.tokens.len().saturating_sub(context.tokens.len()) as f64 + 1.0;
        context.behind += NEWEST * (behind - context.behind);
        let answer = f64::from(seen.answer.unwrap_or(ANSWER).min(ANSWER));
        context.answer += NEWEST * (answer - context.answer);
        context.last = now;
        let rate = context.rates.entry(engine).or_insert(Rate { per_second: 0.0, at: now });
        *rate = Rate { per_second: rate.at(now) + 1.0 / MEMORY.as_secs_f64(), at: now };
        if context.rates.len() > 1 {
            context.rates.retain(|_, rate| rate.at(now) > NO_RATE);
        }
    }

    /// Returns those that matter most: by tokens a second that would be computed if no cache held them.
    pub(crate) fn busiest(&self, now: Instant, most: usize) -> Vec<(f64, PageHash, Context)> {
        let weigh = |(&name, context): (&PageHash, &Context)| {
            let rate: f64 = context.rates(now).iter().map(|(_, rate)| rate).sum();
            (rate * context.tokens.len() as f64, name)
        };
        let mut weights: Vec<_> =
            self.contexts.iter().map(weigh).filter(|(weight, _)| *weight > 0.0).collect();
        // Names settle ties, so that equal tables give equal plans.
        weights.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        weights.truncate(most);
        weights.into_iter().map(|(weight, name)| (weight, name, self.contexts[&name].clone())).collect()
    }

    fn keep(&mut self, now: Instant, name: PageHash, len: usize, seen: &Seen<'_>) {
        let bytes = len * size_of::<TokenId>();
        if bytes > MAX_BYTES / 8 {
            return;
        }
        while self.bytes + bytes > MAX_BYTES || self.contexts.len() >= MAX_CONTEXTS {
            let Some(oldest) =
                self.contexts.iter().min_by_key(|(_, context)| context.last).map(|(&name, _)| name)
            else {
                return;
            };
            if let Some(context) = self.contexts.remove(&oldest) {
                self.bytes -= context.tokens.len() * size_of::<TokenId>();
            }
        }
        self.bytes += bytes;
        let context = Context {
            tokens: seen.tokens[..len].into(),
            page_size: seen.page_size,
            model: seen.model.map(Arc::from),
            salt: seen.salt.into(),
            behind: (seen.tokens.len() - len + 1) as f64,
            answer: f64::from(seen.answer.unwrap_or(ANSWER).min(ANSWER)),
            rates: HashMap::new(),
            last: now,
        };
        self.contexts.insert(name, context);
    }
}

#[cfg(test)]
mod tests {
    use microserving_protocol::page_hashes;

    use super::*;

    fn note(table: &mut ContextTable, now: Instant, engine: u32, numbers: &[u32]) {
        let tokens: Vec<_> = numbers.iter().copied().map(TokenId).collect();
        let chain = page_hashes("", &tokens, 2);
        let seen =
            Seen { chain: &chain, page_size: 2, tokens: &tokens, model: None, salt: "", answer: Some(8) };
        table.note(now, engine, &seen);
    }

    fn shown(table: &ContextTable, now: Instant) -> Vec<(usize, Vec<(u32, f64)>)> {
        let busiest = table.busiest(now, 8);
        busiest.iter().map(|(_, _, context)| (context.tokens.len(), context.rates(now))).collect()
    }

    #[test]
    fn what_two_requests_share_is_a_context() {
        let (mut table, now) = (ContextTable::default(), Instant::now());
        note(&mut table, now, 0, &[1, 2, 3, 4, 5, 6]);
        assert!(shown(&table, now).is_empty(), "one request shares nothing");
        note(&mut table, now, 0, &[1, 2, 3, 4, 9, 9]);
        assert_eq!(shown(&table, now), [(4, vec![(0, 1.0 / 60.0)])]);
        note(&mut table, now, 1, &[1, 2, 3, 4, 8, 8]);
        note(&mut table, now, 1, &[7, 7, 3, 4, 8, 8]);
        assert_eq!(
            shown(&table, now),
            [(4, vec![(0, 1.0 / 60.0), (1, 1.0 / 60.0)])],
            "another prefix is another one"
        );
        let (_, _, context) = &table.busiest(now, 1)[0];
        assert_eq!(
            (&*context.tokens, context.behind, context.answer),
            (&[1, 2, 3, 4].map(TokenId)[..], 3.0, 8.0)
        );
    }

    #[test]
    fn a_request_counts_for_the_longest_context_and_fades() {
        let (mut table, mut now) = (ContextTable::default(), Instant::now());
        for last in [5, 6, 7] {
            note(&mut table, now, 0, &[1, 2, 3, 4, last, last]);
        }
        note(&mut table, now, 0, &[1, 2, 9, 9]);
        now += MEMORY;
        // Two for the long one, one for the short one, a minute ago: the long one comes first.
        let old = (-1.0_f64).exp() / 60.0;
        let found = shown(&table, now);
        assert_eq!(found.iter().map(|(len, _)| *len).collect::<Vec<_>>(), [4, 2]);
        assert!(
            (found[0].1[0].1 - 2.0 * old).abs() < 1e-12 && (found[1].1[0].1 - old).abs() < 1e-12,
            "{found:?}"
        );
        assert!(shown(&table, now + MEMORY * 10).is_empty());
    }

    #[test]
    fn it_keeps_what_was_used_last_within_its_bounds() {
        let (mut table, mut now) = (ContextTable::default(), Instant::now());
        for number in 0..MAX_CONTEXTS as u32 + 10 {
            now += Duration::from_millis(1);
            note(&mut table, now, 0, &[number, number, 1, 1]);
            note(&mut table, now, 0, &[number, number, 2, 2]);
        }
        assert_eq!((table.contexts.len(), table.bytes), (MAX_CONTEXTS, MAX_CONTEXTS * 2 * 4));
        let kept = table.busiest(now, usize::MAX);
        assert!(kept.iter().all(|(_, _, context)| context.tokens[0].0 >= 10), "the oldest are gone");
        let long = vec![3; MAX_BYTES / 8 / 4 + 2];
        note(&mut table, now, 0, &long);
        note(&mut table, now, 0, &long);
        assert_eq!(table.contexts.len(), MAX_CONTEXTS, "too long to keep");
    }
}
