//! Which contexts to copy where: a pure function of rates, loads, pages and costs.
//!
//! A copy of context *k* to engine *e* is worth it when, over the horizon *H*,
//!
//! ```text
//! f(k,e) · H · a_P(T_k)  >  t_kv(T_k) + Σ f(q,e) · H · a_P(T_q) over what is evicted there + interference
//! ```
//!
//! where *f(k,e)* is the rate of requests that *e* gets, or would get, for *k*. It would get some when the engines that hold *k* are
//! too few: fewer than `⌈f_k · service / ρ_max⌉`, or so loaded that a request would soon rather have its context computed elsewhere.
//! The copy comes from the least loaded holder and goes to the least loaded engine.

use crate::Outlook;

/// What a copy must pay for itself within, in seconds.
const HORIZON: f64 = 60.0;
/// The load that an engine should have at most.
const MAX_LOAD: f64 = 0.7;
/// How much slower a step is while KV goes in or out.
const SLOWDOWN: f64 = 0.1;

/// A context, how often it is asked for and who has it. Engines are named by their numbers.
#[derive(Clone, Debug)]
pub(crate) struct ContextLoad {
    /// Its tokens.
    pub(crate) tokens: u32,
    /// Its pages.
    pub(crate) pages: u32,
    /// Requests a second on each engine.
    pub(crate) rates: Vec<(u32, f64)>,
    /// Tokens of a prompt behind it.
    pub(crate) behind: f64,
    /// Tokens of an answer.
    pub(crate) answer: f64,
    /// Engines that have it.
    pub(crate) holders: Vec<u32>,
    /// Engines that decode its requests.
    pub(crate) decoders: Vec<u32>,
}

impl ContextLoad {
    fn rate(&self) -> f64 {
        self.rates.iter().map(|(_, rate)| rate).sum()
    }

    fn rate_on(&self, engine: u32) -> f64 {
        self.rates.iter().find(|(number, _)| *number == engine).map_or(0.0, |(_, rate)| *rate)
    }
}

/// What a plan knows of an engine.
#[derive(Clone, Debug)]
pub(crate) struct EngineView {
    pub(crate) number: u32,
    pub(crate) outlook: Outlook,
    /// Its queue and its sequences, in prompt tokens, as placement weighs them.
    pub(crate) load_tokens: u64,
    pub(crate) free_pages: u32,
    /// Pages that may be evicted.
    pub(crate) cached_pages: u32,
    /// No copy goes in or out, and its link has rested since the last one.
    pub(crate) is_free: bool,
    /// Engines of one number exchange KV.
    pub(crate) group: u32,
}

/// A copy to make.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Copy {
    /// Which of the contexts.
    pub(crate) context: usize,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// What it saves over the horizon, all that it costs taken off.
    pub(crate) saved_seconds: f64,
}

/// Plans copies, best first by seconds saved per token moved; an engine has a part in one of them at most.
///
/// `seconds_per_token` is what copies took lately, for links that no profile knows.
pub(crate) fn plan(contexts: &[ContextLoad], engines: &[EngineView], seconds_per_token: f64) -> Vec<Copy> {
    let best = |(at, _): (usize, &ContextLoad)| best_copy(contexts, at, engines, seconds_per_token);
    let mut copies: Vec<_> = contexts.iter().enumerate().filter_map(best).collect();
    let per_token = |copy: &Copy| copy.saved_seconds / f64::from(contexts[copy.context].tokens.max(1));
    copies.sort_by(|a, b| per_token(b).total_cmp(&per_token(a)).then(a.context.cmp(&b.context)));
    let mut busy = Vec::new();
    copies.retain(|copy| {
        let free = !busy.contains(&copy.from) && !busy.contains(&copy.to);
        if free {
            busy.extend([copy.from, copy.to]);
        }
        free
    });
    copies
}

fn best_copy(
    contexts: &[ContextLoad],
    at: usize,
    engines: &[EngineView],
    seconds_per_token: f64,
) -> Option<Copy> {
    let context = &contexts[at];
    let holders = || engines.iter().filter(|engine| context.holders.contains(&engine.number));
    let serving = || holders().filter(|engine| context.decoders.contains(&engine.number));
    let least = serving().map(|engine| engine.load_tokens).min();
    let num_serving = serving().count();
    let source = holders().filter(|engine| engine.is_free).min_by_key(|engine| engine.load_tokens)?;
    let tokens = f64::from(context.tokens);
    let candidates = engines.iter().filter(|engine| {
        context.decoders.contains(&engine.number)
            && !context.holders.contains(&engine.number)
            && engine.group == source.group
            && engine.is_free
    });
    let target = candidates.min_by_key(|engine| engine.load_tokens)?;
    // Half way to the point from which placement would have it computed there.
    let is_crowded = least.is_none_or(|least| least > target.load_tokens + u64::from(context.tokens) / 2);
    let wanted = replicas(context, &target.outlook);
    let share =
        if is_crowded || wanted > num_serving { context.rate() / (num_serving + 1) as f64 } else { 0.0 };
    let rate = share.max(context.rate_on(target.number));
    let transfer = source.outlook.transfer_seconds(tokens).max(tokens * seconds_per_token);
    let interference =
        SLOWDOWN * transfer * (f64::from(source.outlook.decoding) + f64::from(target.outlook.decoding));
    let gain = rate * HORIZON * target.outlook.prefill_seconds(tokens, 0.0);
    let saved_seconds = gain - transfer - evicted_seconds(contexts, at, target)? - interference;
    (saved_seconds > 0.0).then_some(Copy {
        context: at,
        from: source.number,
        to: target.number,
        saved_seconds,
    })
}

/// Returns how many engines it takes to serve a context's requests: `⌈f · service / ρ_max⌉`.
fn replicas(context: &ContextLoad, outlook: &Outlook) -> usize {
    let (tokens, together) = (f64::from(context.tokens), f64::from(outlook.decoding) + 1.0);
    let step = outlook.decode_seconds(1.0, tokens + context.behind) / together;
    let service = outlook.prefill_seconds(context.behind, tokens) + context.answer * step;
    (context.rate() * service / MAX_LOAD).ceil() as usize
}

/// Returns what the contexts are worth that a copy would push out; none if there is no room for it at all.
fn evicted_seconds(contexts: &[ContextLoad], at: usize, target: &EngineView) -> Option<f64> {
    let lacking = contexts[at].pages.saturating_sub(target.free_pages);
    if lacking > target.cached_pages {
        return None;
    }
    let mut there: Vec<_> =
        contexts.iter().filter(|context| context.holders.contains(&target.number)).collect();
    // Pages of no context go first: they are not shared. Then what is asked for least.
    let of_contexts: u32 = there.iter().map(|context| context.pages).sum();
    let mut lacking = lacking.saturating_sub(target.cached_pages.saturating_sub(of_contexts));
    there.sort_by(|a, b| a.rate_on(target.number).total_cmp(&b.rate_on(target.number)));
    let mut seconds = 0.0;
    for context in there {
        if lacking == 0 {
            break;
        }
        lacking = lacking.saturating_sub(context.pages);
        let anew = target.outlook.prefill_seconds(f64::from(context.tokens), 0.0);
        seconds += context.rate_on(target.number) * HORIZON * anew;
    }
    Some(seconds)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use microserving_cost::Profile;

    use super::*;

    /// What 1000 tokens take over the neutral profile's link: 1 ms, and 1 µs each.
    const LINK: f64 = 0.002;

    /// The neutral profile: 0.01 s and 0.1 ms a token to prefill, so 1000 tokens take 0.11 s.
    fn engine(number: u32) -> EngineView {
        EngineView {
            number,
            outlook: Outlook::idle(Arc::new(Profile::neutral())),
            load_tokens: 0,
            free_pages: 100,
            cached_pages: 0,
            is_free: true,
            group: 0,
        }
    }

    /// 1000 tokens on 60 pages, held by engine 0, where all its requests are.
    fn context(rate: f64) -> ContextLoad {
        ContextLoad {
            tokens: 1000,
            pages: 60,
            rates: vec![(0, rate)],
            behind: 0.0,
            answer: 0.0,
            holders: vec![0],
            decoders: vec![0, 1, 2],
        }
    }

    fn loaded(number: u32, load_tokens: u64) -> EngineView {
        EngineView { load_tokens, ..engine(number) }
    }

    fn assert_saves(copies: &[Copy], from: u32, to: u32, seconds: f64) {
        let [copy] = copies else { panic!("{copies:?}") };
        assert_eq!((copy.from, copy.to), (from, to));
        assert!((copy.saved_seconds - seconds).abs() < 1e-9, "{copy:?}, not {seconds}");
    }

    #[test]
    fn a_crowded_holder_shares_with_the_least_loaded_engine() {
        let one = [context(0.2)];
        assert!(plan(&one, &[loaded(0, 500), engine(1)], 0.0).is_empty(), "not crowded: 500 is half of 1000");
        // Half of 0.2 a second for 60 s at 0.11 s: 0.66 s.
        assert_saves(&plan(&one, &[loaded(0, 700), loaded(1, 90), loaded(2, 80)], 0.0), 0, 2, 0.66 - LINK);
        // The copy itself takes 1000 · 0.1 ms.
        assert_saves(&plan(&one, &[loaded(0, 700), engine(1)], 1e-4), 0, 1, 0.56);
        assert!(plan(&one, &[loaded(0, 700), engine(1)], 0.7e-3).is_empty(), "0.7 s for 0.66 s");
        // Two sequences that decode at the source are each slowed down by a tenth of it.
        let mut source = loaded(0, 700);
        source.outlook.decoding = 2;
        assert_saves(&plan(&one, &[source, engine(1)], 1e-4), 0, 1, 0.66 - 0.1 - 0.02);
    }

    #[test]
    fn what_is_asked_for_much_is_held_by_enough_engines() {
        // A prompt with 1000 tokens behind it takes about 0.11 s: 7 a second are 0.77 of an engine, of which 0.7 may be used.
        let mut busy = context(7.0);
        busy.behind = 1000.0;
        let service = engine(0).outlook.prefill_seconds(1000.0, 1000.0);
        assert!((service - 0.11).abs() < 0.02, "{service}");
        let engines = [engine(0), engine(1), engine(2)];
        assert_saves(&plan(&[busy.clone()], &engines, 0.0), 0, 1, 3.5 * 60.0 * 0.11 - LINK);
        busy.holders = vec![0, 1];
        assert!(plan(&[busy.clone()], &engines, 0.0).is_empty(), "two are enough");
        busy.rates = vec![(0, 6.0), (1, 7.0), (2, 0.5)];
        assert_saves(&plan(&[busy], &engines, 0.0), 0, 2, 13.5 / 3.0 * 60.0 * 0.11 - LINK);
    }

    #[test]
    fn an_engine_that_gets_requests_gets_their_context() {
        let mut spilled = context(0.2);
        spilled.rates.push((1, 0.05));
        assert_saves(&plan(&[spilled], &[engine(0), engine(1)], 0.0), 0, 1, 0.05 * 60.0 * 0.11 - LINK);
    }

    #[test]
    fn what_is_pushed_out_counts() {
        let (hot, mut cold, mut other) = (context(0.2), context(0.0), context(0.0));
        (cold.holders, cold.rates, cold.pages) = (vec![1], vec![(1, 0.01)], 20);
        (other.holders, other.rates, other.pages) = (vec![1], vec![(1, 0.08)], 30);
        let contexts = [hot, cold, other];
        let with = |free_pages, cached_pages| {
            let target = EngineView { free_pages, cached_pages, ..engine(1) };
            plan(&contexts, &[loaded(0, 700), target], 0.0)
        };
        assert_saves(&with(60, 50), 0, 1, 0.66 - LINK);
        assert_saves(&with(10, 100), 0, 1, 0.66 - LINK); // The 50 pages of no context are enough.
        // 60 wanted, 40 free: 20 of the cold one, which is asked for 0.6 times in a minute.
        assert_saves(&with(40, 50), 0, 1, 0.66 - 0.6 * 0.11 - LINK);
        // 39 free: the other one goes as well.
        assert_saves(&with(39, 50), 0, 1, 0.66 - 0.6 * 0.11 - 4.8 * 0.11 - LINK);
        assert!(with(5, 50).is_empty(), "no room");
    }

    #[test]
    fn an_engine_has_a_part_in_one_copy_and_the_best_goes_first() {
        let (small, mut large) = (context(0.2), context(0.4));
        large.tokens = 1000;
        let engines = [loaded(0, 700), engine(1), loaded(2, 1)];
        let copies = plan(&[small.clone(), large], &engines, 0.0);
        assert_eq!(copies.iter().map(|copy| copy.context).collect::<Vec<_>>(), [1]);
        let mut engines = [loaded(0, 700), engine(1)];
        engines[1].is_free = false;
        assert!(plan(std::slice::from_ref(&small), &engines, 0.0).is_empty(), "the link rests");
        (engines[1].is_free, engines[1].group) = (true, 1);
        assert!(plan(std::slice::from_ref(&small), &engines, 0.0).is_empty(), "another layout");
        let mut lost = small;
        lost.holders.clear();
        assert!(plan(&[lost], &[engine(0), engine(1)], 0.0).is_empty(), "nobody has it");
    }
}
