//! What is varied, and the search through every state.

use std::collections::{BTreeSet, HashMap, VecDeque};

use microserving_kvcache::lifecycle::{self, Event, State, Step};

use crate::moves::Moves;
use crate::world::{Action, Holder, MAX_PAGES, NEW, NUM_REQUESTS, Page, Request, World};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fence {
    /// The process is gone and so is its way to the memory: what it posted is gone, too.
    Proven,
    /// A dead sender is waited for.
    Never,
    /// Declared when a heartbeat is missed, whether or not the sender lives.
    OnMissedHeartbeat,
}

#[derive(Clone, Copy)]
pub(crate) struct Variant {
    pub(crate) rules: fn(State, Event) -> Step,
    pub(crate) fence: Fence,
    /// Framed transports: the receiver compares generations before it copies.
    pub(crate) receiver_checks: bool,
    /// The sender looks at the generation just before it posts.
    pub(crate) sender_checks: bool,
    pub(crate) size: Size,
}

/// How much of the world there is. The space grows with the product of what its parts can do, so where there are two pages
/// messages are not lost one by one (they can still stay under way until something else has overtaken them).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) num_pages: usize,
    /// Pages that each request needs.
    pub(crate) needs: [u8; NUM_REQUESTS],
    /// Times the sender may be asked to send a request.
    pub(crate) sends: u8,
    /// Messages may be lost, and are sent again.
    pub(crate) lossy: bool,
}

/// The system as it is.
pub(crate) const OURS: Variant = Variant {
    rules: lifecycle::step,
    fence: Fence::Proven,
    receiver_checks: false,
    sender_checks: false,
    size: ONE_PAGE,
};

pub(crate) const ONE_PAGE: Size = Size { num_pages: 1, needs: [1, 1], sends: 2, lossy: true };

/// One page that both need; two of which each needs one; two that are pages of one request, then of the other.
pub(crate) const SIZES: [Size; 3] = [
    ONE_PAGE,
    Size { num_pages: 2, needs: [1, 1], sends: 1, lossy: false },
    Size { num_pages: 2, needs: [2, 1], sends: 1, lossy: false },
];

/// For what needs every state, but no more than one of a kind.
pub(crate) const FEW: [Size; 2] = [SIZES[0], SIZES[2]];

/// Everything at once; takes minutes without optimisation.
pub(crate) const LARGE: [Size; 2] = [
    Size { num_pages: 2, needs: [2, 1], sends: 2, lossy: true },
    Size { num_pages: 2, needs: [1, 1], sends: 2, lossy: true },
];

pub(crate) struct Verdict {
    pub(crate) num_states: usize,
    pub(crate) violation: Option<String>,
    pub(crate) leak: Option<String>,
    /// Which lines of the transition function were used.
    pub(crate) used: BTreeSet<(State, Event)>,
}

impl Variant {
    pub(crate) const fn sized(self, size: Size) -> Self {
        Self { size, ..self }
    }

    fn begin(self) -> World {
        let request = Request { sends_left: self.size.sends, ..NEW };
        World {
            pages: [Page { holder: Holder::Free, content: None }; MAX_PAGES],
            requests: [request; NUM_REQUESTS],
            sender_up: true,
            sender_epoch: 0,
            fenced: false,
        }
    }

    pub(crate) fn check(self) -> Verdict {
        self.search(false)
    }

    pub(crate) fn search(self, stop_at_violation: bool) -> Verdict {
        let mut used = BTreeSet::new();
        let begin = self.begin();
        let mut worlds = vec![begin];
        let mut reached: Vec<Option<(usize, Action)>> = vec![None];
        let mut numbers: HashMap<World, usize> = HashMap::from([(begin, 0)]);
        let mut before: Vec<Vec<usize>> = vec![Vec::new()];
        let mut queue = VecDeque::from([0]);
        let mut violation = None;
        while let Some(number) = queue.pop_front() {
            if stop_at_violation && violation.is_some() {
                break;
            }
            let mut moves = Moves { variant: self, from: worlds[number], found: Vec::new(), used: &mut used };
            moves.explore();
            for (action, outcome) in moves.found {
                match outcome {
                    Err(what) => {
                        violation.get_or_insert_with(|| {
                            format!("{}{action}\n=> {what}\n", trace(&reached, number))
                        });
                    }
                    Ok(world) => {
                        let world = world.without_the_past();
                        let next = *numbers.entry(world).or_insert_with(|| {
                            worlds.push(world);
                            reached.push(Some((number, action)));
                            before.push(Vec::new());
                            queue.push_back(worlds.len() - 1);
                            worlds.len() - 1
                        });
                        before[next].push(number);
                    }
                }
            }
        }
        let leak = self.first_leak(&worlds, &before).map(|number| trace(&reached, number));
        Verdict { num_states: worlds.len(), violation, leak, used }
    }

    /// Returns the first state from which no clean one can be reached.
    fn first_leak(self, worlds: &[World], before: &[Vec<usize>]) -> Option<usize> {
        let is_clean = |world: &World| {
            world.pages.iter().all(|page| page.holder == Holder::Free)
                && world.requests.iter().all(|request| request.flying == [0; 2])
        };
        let mut can_end: Vec<bool> = worlds.iter().map(is_clean).collect();
        let mut stack: Vec<usize> = (0..worlds.len()).filter(|number| can_end[*number]).collect();
        while let Some(number) = stack.pop() {
            for earlier in &before[number] {
                if !std::mem::replace(&mut can_end[*earlier], true) {
                    stack.push(*earlier);
                }
            }
        }
        can_end.iter().position(|can_end| !can_end)
    }
}

pub(crate) fn trace(reached: &[Option<(usize, Action)>], mut number: usize) -> String {
    let mut actions = Vec::new();
    while let Some((earlier, action)) = reached[number] {
        actions.push(format!("{action}\n"));
        number = earlier;
    }
    actions.reverse();
    actions.concat()
}
