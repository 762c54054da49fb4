//! What the next step computes: who is admitted, who is preempted, whose tokens are in the batch.
//!
//! ```text
//! budget  [ d d d d | prefill chunk of the first | chunk of the second |   ]
//!           one token    in order of priority and arrival, remote_send
//!           a decode     and start_generate in one queue
//! ```
//!
//! Decodes go first, so that streams flow; prefills get what is left, and at least [`MIN_PREFILL`] tokens, so that they
//! always advance. (Agrawal et al., "Sarathi-Serve", 2024: chunked prefills that ride along with decodes.)
//!
//! # Why nothing waits for ever
//!
//! There is one order: priority and arrival, a level of priority being worth so much waiting. Only the first that cannot be
//! admitted is waited for, nobody behind it is let in before it. Pages are taken only from sequences further back in the
//! order, so the first one always gets on; and a sequence that cannot get a page though nobody is behind it gives up
//! its own. What was refused at the door as too long can never be the first.

use std::cmp::Reverse;
use std::ops::Range;
use std::time::Duration;

use crate::mutants::Mutant;
use crate::sequence::{Event, Pages, Sequence, Slot, State, Work};
use crate::{Engine, EngineError};

/// Prefill tokens of a step, however many decodes there are and however slow the device is.
pub(crate) const MIN_PREFILL: u32 = 16;
/// Tokens that running sequences are expected to still yield, for which room is kept when another is admitted.
const HEADROOM_TOKENS: u32 = 64;

/// One sequence's part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlanItem {
    pub(crate) slot: Slot,
    /// The tokens to compute.
    pub(crate) range: Range<u32>,
    /// Whether a token is drawn after them.
    pub(crate) draw: bool,
}

/// A sequence's place in the order; the least is the first. It never changes while the sequence lives, so that two
/// sequences cannot take each other's pages in turn.
type Place = (Reverse<i64>, Slot);

impl Engine {
    /// Admits, preempts, and chooses the batch of this step.
    pub(crate) fn plan(&mut self) -> Vec<PlanItem> {
        if self.device_lost {
            return Vec::new();
        }
        let mut plan = self.plan_decodes();
        self.plan_prefills(&mut plan);
        while plan.is_empty() && self.break_hold_and_wait() {
            self.plan_prefills(&mut plan);
        }
        self.note_plan(&plan);
        plan
    }

    /// Tells the pace what it will be told the time of.
    fn note_plan(&mut self, plan: &[PlanItem]) {
        let (mut prefill, mut decodes) = (0, 0);
        for item in plan {
            match self.sequences.get(&item.slot).map(|sequence| sequence.state) {
                Some(State::Decoding) => decodes += 1,
                _ => prefill += item.range.end - item.range.start,
            }
        }
        self.pace.planned(prefill, decodes);
    }

    fn plan_decodes(&mut self) -> Vec<PlanItem> {
        let mut plan = Vec::new();
        for slot in self.in_order(|sequence| sequence.state == State::Decoding) {
            // One before it may have taken its pages.
            let Some(sequence) = self.sequences.get(&slot) else { continue };
            if sequence.state != State::Decoding {
                continue;
            }
            let (computed, len) = (sequence.computed, sequence.len());
            if self.grow_by_preempting(slot, len) {
                plan.push(PlanItem { slot, range: computed..len, draw: true });
            }
        }
        plan
    }

    fn plan_prefills(&mut self, plan: &mut Vec<PlanItem>) {
        let decodes = u32::try_from(plan.len()).unwrap_or(u32::MAX);
        let most = self.config.max_batch_tokens;
        let budget = most.saturating_sub(decodes).max(MIN_PREFILL.min(most));
        let mut budget = self.pace.limit(budget, decodes);
        let mut running = self
            .sequences
            .values()
            .filter(|s| matches!(s.state, State::Prefilling | State::Decoding))
            .count();
        let mut door_open = true;
        for slot in self.in_order(|s| matches!(s.state, State::Prefilling | State::Waiting)) {
            if budget == 0 {
                break;
            }
            let Some(sequence) = self.sequences.get(&slot) else { continue };
            if sequence.state == State::Waiting {
                if is_behind(sequence) {
                    continue;
                }
                let free_place = running < self.config.max_running as usize;
                if !door_open || !free_place || !self.admit(slot) {
                    door_open = false;
                    continue;
                }
                running += 1;
            }
            let Some(sequence) = self.sequences.get(&slot) else { continue };
            if sequence.state != State::Prefilling {
                continue;
            }
            let (computed, goal) = (sequence.computed, sequence.goal());
            let end = goal.min(computed + budget);
            let draw = end == goal && matches!(sequence.work, Work::Generate(_));
            budget -= end - computed;
            plan.push(PlanItem { slot, range: computed..end, draw });
        }
    }

    /// Gives a waiting sequence pages for all of its tokens, if there is room for them beside what runs.
    fn admit(&mut self, slot: Slot) -> bool {
        let headroom = self.headroom();
        let Some(sequence) = self.sequences.get_mut(&slot) else { return false };
        let goal = sequence.goal();
        if matches!(sequence.pages, Pages::Nothing) {
            // Looked at first without a use being counted: it may wait for many steps.
            let found = self.cache.peek_prefix(&sequence.salt, &sequence.tokens[..goal as usize]);
            let missing = self.cache.pages_for(goal) - self.cache.pages_for(found);
            if !self.cache.can_allocate(missing.saturating_add(headroom)) {
                return false;
            }
        }
        let held = sequence.pages.take();
        let had_pages = matches!(held, Pages::Table(_));
        let mut table = match held {
            Pages::Table(table) => table,
            // A sequence that is generated from must compute at least its last token, to have logits.
            Pages::Nothing | Pages::Promised(_) => {
                let upto = match sequence.work {
                    Work::Generate(_) => goal - 1,
                    Work::Send(_) | Work::Receive(_) => goal,
                };
                let prefix = self.cache.match_prefix(&sequence.salt, &sequence.tokens[..upto as usize]);
                prefix.into_table()
            }
        };
        let matched = table.num_shared_tokens();
        let missing = self.cache.pages_for(goal).saturating_sub(self.cache.pages_for(table.capacity()));
        let room = missing == 0 || self.cache.can_allocate(missing.saturating_add(headroom));
        if !room || self.cache.grow(&mut table, goal).is_err() {
            if had_pages {
                sequence.pages = Pages::Table(table);
            } else {
                self.cache.release_table(table);
            }
            return false;
        }
        if !had_pages {
            sequence.computed = if self.rules.break_by(Mutant::OffByOnePage) {
                let page_size = self.geometry.layout.page_size;
                if matched + page_size < goal { matched + page_size } else { matched }
            } else {
                matched
            };
        }
        sequence.pages = Pages::Table(table);
        sequence.happen(Event::Admitted);
        if !had_pages {
            self.note_match(slot);
        }
        if matches!(self.sequences.get(&slot), Some(Sequence { work: Work::Send(_), .. })) {
            self.send_cached_part(slot);
        }
        true
    }

    /// Counts what a sequence found when it was first admitted.
    fn note_match(&mut self, slot: Slot) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        let (computed, goal) = (sequence.computed, sequence.goal());
        let first_time = sequence.preemptions == 0;
        match &mut sequence.work {
            Work::Send(delivery) => {
                delivery.reply.cached_tokens = computed;
                delivery.reply.computed_tokens = goal - computed;
            }
            Work::Generate(choice) if choice.index == 0 && first_time => {
                if let Some(request) = self.requests.get_mut(&choice.request) {
                    let prompt = request.usage.prompt_tokens;
                    request.usage.cached_tokens = computed.min(prompt);
                    request.usage.computed_tokens = prompt.saturating_sub(computed);
                }
            }
            Work::Generate(_) | Work::Receive(_) => {}
        }
    }

    /// Returns the pages that running generations are likely to want soon.
    pub(crate) fn headroom(&self) -> u32 {
        let running =
            self.sequences.values().filter(|s| matches!(s.state, State::Prefilling | State::Decoding));
        running
            .map(|sequence| match &sequence.work {
                Work::Generate(choice) => {
                    let left = self.requests.get(&choice.request).map_or(0, |request| {
                        let max = request.limits.max_tokens;
                        max.saturating_sub(request.next_output(choice.index) - 1)
                    });
                    let want = sequence.len() + left.min(HEADROOM_TOKENS);
                    let held = sequence.pages.list().len();
                    self.cache.pages_for(want).saturating_sub(u32::try_from(held).unwrap_or(u32::MAX))
                }
                Work::Send(_) | Work::Receive(_) => 0,
            })
            .sum()
    }

    /// Makes room in a decoding sequence's table, taking pages from the last in the order if need be. If nobody is behind
    /// it, it gives its own pages up and returns false.
    fn grow_by_preempting(&mut self, slot: Slot, num_tokens: u32) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(&slot) else { return false };
            let Pages::Table(table) = &mut sequence.pages else { return false };
            if self.cache.grow(table, num_tokens).is_ok() {
                return true;
            }
            match self.victim(Some(slot)) {
                Some(victim) => self.preempt(victim),
                None => {
                    self.preempt(slot);
                    return false;
                }
            }
        }
    }

    /// Returns the last generation in the order that holds pages and stands behind `before`.
    ///
    /// Those that were preempted often come last among the victims, as long as that leaves one.
    fn victim(&self, before: Option<Slot>) -> Option<Slot> {
        let place = |slot: Slot| self.sequences.get(&slot).map(|sequence| self.place(slot, sequence));
        let limit = before.and_then(place);
        let holders = self.sequences.iter().filter(|(slot, sequence)| {
            Some(**slot) != before
                && matches!(sequence.work, Work::Generate(_))
                && matches!(sequence.state, State::Waiting | State::Prefilling | State::Decoding)
                && matches!(sequence.pages, Pages::Table(_))
                && limit.is_none_or(|limit| self.place(**slot, sequence) > limit)
        });
        holders
            .max_by_key(|(slot, sequence)| {
                let spared = sequence.preemptions >= self.config.max_preemptions;
                (!spared, self.place(**slot, sequence), Reverse(sequence.len()))
            })
            .map(|(slot, _)| *slot)
    }

    /// Takes a sequence's pages. Its full pages stay cached until somebody needs them, so that coming back may cost
    /// little; its tokens, and what was sent of them, stay as they are.
    pub(crate) fn preempt(&mut self, slot: Slot) {
        let Some(sequence) = self.sequences.get_mut(&slot) else { return };
        if let Pages::Table(table) = sequence.pages.take() {
            self.cache.release_table(table);
        }
        sequence.computed = 0;
        sequence.preemptions += 1;
        sequence.since = self.now;
        sequence.happen(Event::Preempted);
        self.counters.preemptions += 1;
        tracing::debug!(seq_id = %sequence.key.seq_id, num_tokens = sequence.len(), "preempted");
    }

    /// If nothing can be computed because sequences that wait hold pages that others wait for, takes some back.
    ///
    /// A prepared sequence holds pages for what it received and waits for the rest of its pages; two of them can hold
    /// everything. Returns whether anything was given up.
    fn break_hold_and_wait(&mut self) -> bool {
        let waiting = self.in_order(|s| s.state == State::Waiting && !is_behind(s));
        let Some(&first) = waiting.first() else { return false };
        match self.victim(Some(first)) {
            Some(victim) => self.preempt(victim),
            None => {
                let holds = self.sequences.get(&first).is_some_and(|s| matches!(s.pages, Pages::Table(_)));
                if !holds {
                    return false;
                }
                self.preempt(first);
            }
        }
        true
    }

    /// Refuses new arrivals if there are too many of their kind, `kind` in words.
    ///
    /// Those that wait hold no page, and neither need a reservation or a send whose context is cached: without a bound they
    /// would be as many as callers like.
    pub(crate) fn refuse_if_crowded(
        &self,
        arrivals: u32,
        kind: &'static str,
        is_of_kind: impl Fn(&Sequence) -> bool,
    ) -> Result<(), EngineError> {
        let there = self.sequences.values().filter(|sequence| is_of_kind(sequence)).count();
        let limit = self.config.max_waiting as usize;
        if there + arrivals as usize > limit {
            return Err(self.no_room(format!("{there} sequences are {kind}, at most {limit} may be")));
        }
        Ok(())
    }

    /// Returns the slots of the sequences that `wanted` picks, first in the order first.
    fn in_order(&self, wanted: impl Fn(&Sequence) -> bool) -> Vec<Slot> {
        let mut places: Vec<Place> = self
            .sequences
            .iter()
            .filter(|(_, sequence)| wanted(sequence))
            .map(|(slot, sequence)| self.place(*slot, sequence))
            .collect();
        places.sort_unstable();
        places.into_iter().map(|(_, slot)| slot).collect()
    }

    fn place(&self, slot: Slot, sequence: &Sequence) -> Place {
        // A level of priority is worth `aging` of waiting: whoever came so much earlier goes first.
        let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        let bonus = i64::from(sequence.priority).saturating_mul(micros(self.config.aging));
        (Reverse(bonus.saturating_sub(micros(sequence.arrived))), slot)
    }
}

/// Says whether a sequence waits for the first choice of its request.
fn is_behind(sequence: &Sequence) -> bool {
    matches!(&sequence.work, Work::Generate(choice) if choice.behind.is_some())
}
