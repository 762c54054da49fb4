//! Choosing engines.

mod rule;
#[cfg(test)]
mod tests;

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::Instant;

use crate::ctx::Given;
use crate::ids::Draws;
use crate::relay::TextIndex;
use crate::{Engine, HeldPrefix, Load, PrefixIndex, Request};
use rule::{BEST, Scored, pick};

/// What one running sequence costs a new request, in prompt tokens: it takes part in every step that the prompt waits for.
const TOKENS_PER_SEQUENCE: f64 = 32.0;
/// Up to so many engines all are looked at.
const ALL: usize = 8;
/// Of more, so many that hold the longest prefixes are looked at,
const LONGEST: usize = 4;
/// of so many that hold anything, since not all of those may take this request,
const MAX_HOLDERS: usize = 32;
/// and so many drawn ones, of which the least loaded is nearly as good as the least loaded of all.
const DRAWN: usize = 8;
/// Up to so many engines each is asked whether it fits; of more, drawn ones are asked, so many at most.
const ASKED: usize = 64;
/// The page size of engines that do not tell theirs; their caches are guessed anyway.
const USUAL_PAGE_SIZE: u32 = 16;

/// How engines are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlacementPolicy {
    /// Each in turn.
    RoundRobin,
    /// The one with the fewest requests in flight, in turn among equals.
    LeastLoaded,
    /// The one where this prompt's first token is nearest: fewest tokens to compute, its own uncached ones and those queued there.
    #[default]
    Prefix,
}

impl FromStr for PlacementPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "round-robin" => Ok(Self::RoundRobin),
            "least-loaded" => Ok(Self::LeastLoaded),
            "prefix" => Ok(Self::Prefix),
            _ => Err(format!("{text:?} is no placement, must be round-robin, least-loaded or prefix")),
        }
    }
}

/// Chooses engines by load and by the prefixes they probably hold.
#[derive(Debug)]
pub struct Placement {
    policy: PlacementPolicy,
    /// One counter a job: with a common one, two engines that take turns at both jobs would never change places.
    decode_turn: AtomicUsize,
    prefill_turn: AtomicUsize,
    index: Arc<PrefixIndex>,
    texts: TextIndex,
    /// Close candidates that two are drawn from; 1 only in the test that shows what they are for.
    best: usize,
    draws: Draws,
}

/// What an engine is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    Decode,
    Prefill,
}

/// An engine that was chosen.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub(crate) engine: Arc<Engine>,
    /// Tokens of the prompt that it probably holds; nothing if nobody looked.
    pub(crate) hinted: Option<u32>,
}

/// An engine that is looked at.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    /// Its place among those that were offered.
    at: usize,
    held: Held,
}

/// What an engine probably holds of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) tokens: u32,
    is_latest: bool,
}

/// The golden ratio's fraction: its multiples spread evenly over any number of shares.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// What it costs to send a request to an engine.
#[derive(Clone, Copy, Debug)]
struct Cost {
    total: f64,
    /// The part of it that the request itself brings.
    own: f64,
    /// The part of it that other routers brought, as the engine last told.
    told: f64,
    /// Of two that cost the same, take the one that got the prompt later.
    prefer_latest: bool,
}

impl Placement {
    /// Makes a placement; routers with different seeds draw differently, and take turns from different places.
    #[must_use]
    pub fn new(policy: PlacementPolicy, index: Arc<PrefixIndex>, seed: u64) -> Self {
        let draws = Draws::new(seed);
        let turn = || AtomicUsize::new(draws.below(1 << 20));
        let texts = TextIndex::default();
        Self { policy, decode_turn: turn(), prefill_turn: turn(), index, texts, best: BEST, draws }
    }

    /// Returns the index of held prefixes.
    #[must_use]
    pub const fn index(&self) -> &Arc<PrefixIndex> {
        &self.index
    }

    /// Returns the index by which requests are placed that are text as yet.
    pub(crate) const fn texts(&self) -> &TextIndex {
        &self.texts
    }

    /// Chooses one of those `engines` that fit to hold the first `end` tokens of a request; nothing if there is none. They are in the order of
    /// their numbers, and not all of them are asked whether they fit if they are many.
    pub(crate) fn choose(
        &self,
        job: Job,
        engines: &[Arc<Engine>],
        fits: &dyn Fn(&Engine) -> bool,
        request: &Request,
        end: u32,
    ) -> Option<Choice> {
        let prompt = Prompt::Pages { request, end, index: &self.index };
        let turn = self.turn(job);
        self.choose_by(engines, fits, &prompt, &|| turn.fetch_add(1, Ordering::Relaxed), &self.draws)
    }

    /// As [`Placement::choose`], for a request of about `num_tokens` tokens that is text as yet. `holders` are the numbers of engines that
    /// probably hold some of them, and how many, those with most first.
    pub(crate) fn choose_by_text(
        &self,
        engines: &[Arc<Engine>],
        fits: &dyn Fn(&Engine) -> bool,
        num_tokens: u32,
        holders: &[(u32, u32)],
    ) -> Option<Choice> {
        let prompt = Prompt::Text { num_tokens, holders };
        let turn = self.turn(Job::Decode);
        self.choose_by(engines, fits, &prompt, &|| turn.fetch_add(1, Ordering::Relaxed), &self.draws)
    }

    /// Returns what [`Placement::choose`] would choose of `engines` next for a whole request. Nobody's turn is over by that, and nothing is drawn.
    pub(crate) fn peek(&self, job: Job, engines: &[Arc<Engine>], request: &Request) -> Option<Choice> {
        let prompt = Prompt::Pages { request, end: request.len(), index: &self.index };
        let turn = self.turn(job);
        self.choose_by(engines, &|_| true, &prompt, &|| turn.load(Ordering::Relaxed), &self.draws.clone())
    }

    const fn turn(&self, job: Job) -> &AtomicUsize {
        match job {
            Job::Decode => &self.decode_turn,
            Job::Prefill => &self.prefill_turn,
        }
    }

    fn choose_by(
        &self,
        engines: &[Arc<Engine>],
        fits: &dyn Fn(&Engine) -> bool,
        prompt: &Prompt<'_>,
        next_turn: &dyn Fn() -> usize,
        draws: &Draws,
    ) -> Option<Choice> {
        let now = Instant::now();
        let look_up = |candidates: &mut [Candidate], more: &mut dyn FnMut(Candidate)| {
            prompt.look_up(now, engines, fits, draws, candidates, more);
        };
        // A turn is taken only by a choice that is made.
        let chosen = match self.policy {
            PlacementPolicy::RoundRobin => {
                let fitting: Vec<usize> = (0..engines.len()).filter(|at| fits(&engines[*at])).collect();
                if fitting.is_empty() {
                    return None;
                }
                let at = in_turn(now, engines, &fitting, next_turn());
                let mut one = [Candidate { at, held: Held::default() }];
                look_up(&mut one, &mut |_| {});
                one[0]
            }
            PlacementPolicy::LeastLoaded => {
                let mut candidates = some_of(engines, fits, draws);
                if candidates.is_empty() {
                    return None;
                }
                look_up(&mut candidates, &mut |_| {});
                let choosing = Choosing { now, turn: next_turn(), sequence: 1.0, best: self.best, draws };
                choosing.pick(engines, &candidates, |engine, _| {
                    // Our own load changes while it is looked at, so no part is taken as the difference of two looks.
                    let (ours, told) =
                        (f64::from(engine.in_flight()), f64::from(engine.others_load().requests));
                    Cost { total: ours + told + 1.0, own: 1.0, told, prefer_latest: false }
                })?
            }
            PlacementPolicy::Prefix => {
                let mut candidates = some_of(engines, fits, draws);
                if candidates.is_empty() {
                    return None;
                }
                let mut more = Vec::new();
                look_up(&mut candidates, &mut |candidate| more.push(candidate));
                candidates.extend(more);
                let sequence = TOKENS_PER_SEQUENCE;
                let choosing = Choosing { now, turn: next_turn(), sequence, best: self.best, draws };
                choosing.pick(engines, &candidates, |engine, held| {
                    let own = f64::from(prompt.num_tokens().saturating_sub(held.tokens));
                    let (ours, told) = (queue(engine.own_load()), queue(engine.others_load()));
                    // After a disaggregated turn both engines hold the prompt; the one that decoded also holds the answer.
                    Cost { total: own + ours + told, own, told, prefer_latest: true }
                })?
            }
        };
        Some(Choice { engine: engines[chosen.at].clone(), hinted: Some(chosen.held.tokens) })
    }

    /// Chooses the one of `engines` to decode a request, for programs that have their own idea of which engines may.
    #[must_use]
    pub fn place(&self, engines: &[Arc<Engine>], request: &Request) -> Option<Arc<Engine>> {
        self.choose(Job::Decode, engines, &|_| true, request, request.len()).map(|choice| choice.engine)
    }

    /// Returns for each engine how many tokens of a request's prompt it probably holds.
    pub(crate) fn hints(&self, engines: &[Arc<Engine>], request: &Request) -> Vec<u32> {
        let mut all: Vec<_> = (0..engines.len()).map(|at| Candidate { at, held: Held::default() }).collect();
        let prompt = Prompt::Pages { request, end: request.len(), index: &self.index };
        prompt.look_up(Instant::now(), engines, &|_| false, &self.draws.clone(), &mut all, &mut |_| {});
        all.into_iter().map(|one| one.held.tokens).collect()
    }

    /// Notes that engines were given the first so many tokens of a request, and so hold them soon.
    pub(crate) fn note(&self, request: &Request, given: &[Given]) {
        let mut left: Vec<(u32, u32, u32)> =
            given.iter().map(|(engine, end)| (page_size(engine), engine.number(), *end)).collect();
        while let Some(&(page_size, ..)) = left.first() {
            let num_pages = |end: u32| end.min(request.len()).checked_div(page_size).unwrap_or(0) as usize;
            let alike = left.iter().filter(|&&(size, ..)| size == page_size);
            let holders: Vec<_> = alike.map(|&(_, engine, end)| (engine, num_pages(end))).collect();
            let mut pages = request.pages(page_size);
            self.index.note_all(Instant::now(), &holders, |depth| pages.get(depth));
            left.retain(|&(size, ..)| size != page_size);
        }
    }

    /// Drops what is believed of an engine's cache.
    pub(crate) fn forget(&self, engine: u32) {
        self.index.forget(engine);
        self.texts.forget(engine);
    }
}

/// Returns the engines that are looked at whatever they hold: all that fit if they are few, else some drawn ones.
fn some_of(engines: &[Arc<Engine>], fits: &dyn Fn(&Engine) -> bool, draws: &Draws) -> Vec<Candidate> {
    let candidate = |at| Candidate { at, held: Held::default() };
    if engines.len() <= ASKED {
        let mut all: Vec<_> = (0..engines.len()).filter(|at| fits(&engines[*at])).map(candidate).collect();
        while all.len() > ALL.max(DRAWN) {
            all.swap_remove(draws.below(all.len()));
        }
        return all;
    }
    let mut drawn: Vec<Candidate> = Vec::with_capacity(DRAWN + LONGEST);
    for _ in 0..ASKED {
        let at = draws.below(engines.len());
        if drawn.iter().all(|one| one.at != at) && fits(&engines[at]) {
            drawn.push(candidate(at));
            if drawn.len() == DRAWN {
                break;
            }
        }
    }
    if drawn.is_empty() {
        // Hardly any fits: find one, or know that there is none.
        let start = draws.below(engines.len());
        let all = (0..engines.len()).map(|i| (start + i) % engines.len());
        drawn.extend(all.filter(|at| fits(&engines[*at])).take(DRAWN).map(candidate));
    }
    drawn
}

/// What is known of a request when an engine is chosen for it.
enum Prompt<'a> {
    /// The pages of its first `end` tokens.
    Pages { request: &'a Request, end: u32, index: &'a PrefixIndex },
    /// Its text: about how many tokens it has, and the numbers of engines that probably hold some of them, those with most first.
    Text { num_tokens: u32, holders: &'a [(u32, u32)] },
}

impl Prompt<'_> {
    const fn num_tokens(&self) -> u32 {
        match self {
            Self::Pages { end, .. } => *end,
            Self::Text { num_tokens, .. } => *num_tokens,
        }
    }

    /// Finds what the candidates hold, and calls `more` with a few others that hold most.
    fn look_up(
        &self,
        now: Instant,
        engines: &[Arc<Engine>],
        fits: &dyn Fn(&Engine) -> bool,
        draws: &Draws,
        candidates: &mut [Candidate],
        more: &mut dyn FnMut(Candidate),
    ) {
        match self {
            Self::Pages { request, end, index } => {
                let sizes: Vec<u32> = candidates.iter().map(|one| page_size(&engines[one.at])).collect();
                for (place, &size) in sizes.iter().enumerate() {
                    if size == 0 || sizes[..place].contains(&size) {
                        continue;
                    }
                    let num_pages = (end / size) as usize;
                    let mut pages = request.pages(size);
                    let held = index.look_up(now, |depth| (depth < num_pages).then(|| pages.get(depth))?);
                    drop(pages);
                    for (one, _) in candidates.iter_mut().zip(&sizes).filter(|(_, other)| **other == size) {
                        one.held = Held::new(held.of(engines[one.at].number()), size);
                    }
                    let mut others = Others { engines, candidates, seen: 0, found: 0 };
                    if engines.len() <= ALL {
                        continue;
                    }
                    held.longest(draws.below(1 << 16), |number, num_pages| {
                        let fits = |engine: &Engine| page_size(engine) == size && fits(engine);
                        others.offer(number, &fits, |at| {
                            let held = HeldPrefix { num_pages, is_latest: held.of(number).is_latest };
                            more(Candidate { at, held: Held::new(held, size) });
                        })
                    });
                }
            }
            Self::Text { holders, .. } => {
                for one in candidates.iter_mut() {
                    let number = engines[one.at].number();
                    let holder = holders.iter().find(|(holder, _)| *holder == number);
                    one.held.tokens = holder.map_or(0, |&(_, tokens)| tokens);
                }
                let mut others = Others { engines, candidates, seen: 0, found: 0 };
                if engines.len() <= ALL {
                    return;
                }
                for &(number, tokens) in *holders {
                    let held = Held { tokens, is_latest: false };
                    if !others.offer(number, fits, |at| more(Candidate { at, held })) {
                        break;
                    }
                }
            }
        }
    }
}

/// Holders of a prompt that are looked at beside the candidates.
struct Others<'a> {
    engines: &'a [Arc<Engine>],
    candidates: &'a [Candidate],
    seen: usize,
    found: usize,
}

impl Others<'_> {
    /// Calls `take` with the place of an engine if it fits and is no candidate yet; says whether to go on.
    fn offer(&mut self, number: u32, fits: &dyn Fn(&Engine) -> bool, take: impl FnOnce(usize)) -> bool {
        self.seen += 1;
        if let Ok(at) = self.engines.binary_search_by_key(&number, |engine| engine.number())
            && fits(&self.engines[at])
        {
            self.found += 1;
            if self.candidates.iter().all(|one| one.at != at) {
                take(at);
            }
        }
        self.seen < MAX_HOLDERS && self.found < LONGEST
    }
}

/// One choice that is being made.
struct Choosing<'a> {
    now: Instant,
    turn: usize,
    /// What one running sequence costs those beside it.
    sequence: f64,
    best: usize,
    draws: &'a Draws,
}

impl Choosing<'_> {
    /// Takes one of the candidates.
    fn pick(
        &self,
        engines: &[Arc<Engine>],
        candidates: &[Candidate],
        cost: impl Fn(&Engine, Held) -> Cost,
    ) -> Option<Candidate> {
        let scored = candidates.iter().enumerate().map(|(at, one)| {
            let Cost { total, own, told, prefer_latest } = cost(&engines[one.at], one.held);
            // Starting each search one further makes equals take turns.
            let turn = (at + candidates.len() - self.turn % candidates.len()) % candidates.len();
            // An engine of twice the weight is as near with twice the queue.
            let weight = engines[one.at].effective_weight(self.now);
            let (cost, own, told) = (total / weight, own / weight, told / weight);
            Scored { at, cost, own, told, is_second: prefer_latest && !one.held.is_latest, turn }
        });
        let picked = pick(scored.collect(), self.sequence, self.best, self.draws);
        picked.map(|picked| candidates[picked.at])
    }
}

impl Held {
    fn new(held: HeldPrefix, page_size: u32) -> Self {
        let pages = u32::try_from(held.num_pages).unwrap_or(u32::MAX);
        Self { tokens: pages.saturating_mul(page_size), is_latest: held.is_latest }
    }
}

/// Returns whose turn it is among those that fit: each in its own, or as often as its weight says.
fn in_turn(now: Instant, engines: &[Arc<Engine>], fitting: &[usize], turn: usize) -> usize {
    let weights = || fitting.iter().map(|at| engines[*at].effective_weight(now));
    let first = weights().next().unwrap_or(1.0);
    #[allow(clippy::float_cmp, reason = "weights that were never changed are the same number")]
    if weights().all(|weight| weight == first) {
        return fitting[turn % fitting.len()];
    }
    let mut left = (turn as f64 * GOLDEN).fract() * weights().sum::<f64>();
    let found = weights().position(|weight| {
        left -= weight;
        left < 0.0
    });
    fitting[found.unwrap_or(fitting.len() - 1)]
}

/// Returns what a queue costs a new request, in prompt tokens.
fn queue(load: Load) -> f64 {
    load.queued_tokens as f64 + TOKENS_PER_SEQUENCE * f64::from(load.requests)
}

fn page_size(engine: &Engine) -> u32 {
    engine.page_size().unwrap_or(USUAL_PAGE_SIZE)
}
