//! Which engine probably holds which beginning of a text: what was routed where, by the names of `TextChain`.
//!
//! A table of fixed size, like a processor's cache: a name has eight places where it may stand, and when they are taken, the one
//! unused for longest gives way. So its memory is known, nothing is allocated while it works, and an entry costs 16 bytes. It is a hint
//! for requests that are placed without tokenising; a wrong one costs time and never changes an answer.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::chain::TextChain;
use crate::Engine;

/// How long an engine is believed to keep what nobody used.
const TIME_TO_LIVE_SECONDS: u32 = 120;
const PLACES: usize = 8;
/// 4 MiB: some 30 MB of text.
const NUM_SETS: usize = 1 << 15;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    name: u64,
    engine: u32,
    /// Seconds since the beginning, from 1; 0 is no entry.
    seen: u32,
}

/// An engine that probably holds the beginning of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) engine: u32,
    pub(crate) num_bytes: usize,
}

/// The table. Time is an argument.
#[derive(Debug)]
pub(crate) struct TextIndex {
    beginning: Instant,
    sets: Mutex<Box<[[Entry; PLACES]]>>,
}

impl Default for TextIndex {
    fn default() -> Self {
        Self::new(Instant::now())
    }
}

impl TextIndex {
    pub(crate) fn new(now: Instant) -> Self {
        Self { beginning: now, sets: Mutex::new(vec![[Entry::default(); PLACES]; NUM_SETS].into()) }
    }

    /// Returns the engines that hold some of the text, each with how much of it.
    pub(crate) fn holders(&self, now: Instant, chain: &TextChain) -> Vec<Holder> {
        let now = self.seconds(now);
        let alive = |entry: &Entry| entry.seen > 0 && now.saturating_sub(entry.seen) < TIME_TO_LIVE_SECONDS;
        let mut holders: Vec<Holder> = Vec::new();
        let sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        for (depth, &name) in chain.names().iter().enumerate() {
            let num_bytes = TextChain::bytes_in(depth + 1);
            let mut found = false;
            for entry in sets[set_of(name)].iter().filter(|entry| entry.name == name && alive(entry)) {
                match holders.iter_mut().find(|holder| holder.engine == entry.engine) {
                    // Only who holds all that goes before can use this chunk.
                    Some(holder) if holder.num_bytes == TextChain::bytes_in(depth) => {
                        holder.num_bytes = num_bytes;
                    }
                    None if depth == 0 => holders.push(Holder { engine: entry.engine, num_bytes }),
                    _ => continue,
                }
                found = true;
            }
            if !found {
                break;
            }
        }
        holders
    }

    /// Notes that an engine has the text now.
    pub(crate) fn note(&self, now: Instant, engine: &Arc<Engine>, chain: &TextChain) {
        let (engine, seen) = (engine.number(), self.seconds(now));
        let mut sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        for &name in chain.names() {
            let set = &mut sets[set_of(name)];
            let own =
                set.iter().position(|entry| entry.name == name && entry.engine == engine && entry.seen > 0);
            let oldest = || (0..PLACES).min_by_key(|&place| set[place].seen).unwrap_or(0);
            set[own.unwrap_or_else(oldest)] = Entry { name, engine, seen };
        }
    }

    /// Drops what is believed of an engine: it was restarted, or has gone.
    pub(crate) fn forget(&self, engine: u32) {
        let mut sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        for entry in sets.iter_mut().flatten().filter(|entry| entry.engine == engine) {
            *entry = Entry::default();
        }
    }

    fn seconds(&self, now: Instant) -> u32 {
        let since: Duration = now.saturating_duration_since(self.beginning);
        u32::try_from(since.as_secs()).unwrap_or(u32::MAX - 1) + 1
    }
}

#[allow(clippy::cast_possible_truncation, reason = "any bits of the name will do")]
const fn set_of(name: u64) -> usize {
    name as usize % NUM_SETS
}

#[cfg(test)]
mod tests {
    use microserving_client::HttpEngineClient;

    use super::*;
    use crate::{EngineSpec, Role};

    fn engine(number: u32) -> Arc<Engine> {
        let calls = HttpEngineClient::new("http://127.0.0.1:1").expect("an address");
        Arc::new(Engine::new(number, EngineSpec::new(Arc::new(calls), Role::Any), Arc::default()))
    }

    fn chain(text: &[u8]) -> TextChain {
        let mut chain = TextChain::default();
        chain.feed(text);
        chain
    }

    fn held(index: &TextIndex, now: Instant, text: &[u8]) -> Vec<(u32, usize)> {
        let mut held: Vec<_> =
            index.holders(now, &chain(text)).iter().map(|holder| (holder.engine, holder.num_bytes)).collect();
        held.sort_unstable();
        held
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_beginning_of_each_engine_is_found() {
        let now = Instant::now();
        let index = TextIndex::new(now);
        let text: Vec<u8> = (0..1000u32).map(|i| (i % 250) as u8).collect();
        index.note(now, &engine(0), &chain(&text[..300]));
        index.note(now, &engine(1), &chain(&text));
        assert_eq!(held(&index, now, &text), [(0, 256), (1, 896)]);
        assert_eq!(held(&index, now, &text[..200]), [(0, 128), (1, 128)]);
        assert_eq!(held(&index, now, b"something else"), []);
        index.forget(1);
        assert_eq!(held(&index, now, &text), [(0, 256)]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_uses_is_forgotten() {
        let now = Instant::now();
        let index = TextIndex::new(now);
        index.note(now, &engine(0), &chain(&[b'a'; 200]));
        let later = now + Duration::from_secs(119);
        assert_eq!(held(&index, later, &[b'a'; 200]), [(0, 128)]);
        assert_eq!(held(&index, later + Duration::from_secs(1), &[b'a'; 200]), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_set_gives_up_what_was_unused_for_longest() {
        let now = Instant::now();
        let index = TextIndex::new(now);
        let text = [b'a'; 128];
        for number in 0..9 {
            index.note(now + Duration::from_secs(number.into()), &engine(number), &chain(&text));
        }
        let engines: Vec<u32> =
            held(&index, now + Duration::from_secs(9), &text).into_iter().map(|(engine, _)| engine).collect();
        assert_eq!(engines, (1..9).collect::<Vec<_>>());
    }
}
