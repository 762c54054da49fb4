//! Which of a few candidates is taken.
//!
//! What an engine would have to compute is known; how busy it is, only as of its last report, and every other router looks at the same report. If
//! each took the cheapest, all of them would take the same one until the next report. So engines that differ by no more than that uncertainty are
//! drawn from: two of the best four, and the cheaper of the two (Mitzenmacher 2001, *The Power of Two Choices*).
//!
//! An engine that holds a long prefix is not within that uncertainty of one that does not, so it is still followed. docs/adr/011 argues it.

use crate::ids::Draws;

/// Candidates that two are drawn from.
pub(crate) const BEST: usize = 4;

/// A candidate, with what it would cost to send the request there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scored {
    /// Its place among the engines that were offered.
    pub(crate) at: usize,
    /// Until the first token, in any unit.
    pub(crate) cost: f64,
    /// The part of it that the request itself brings, in the same unit.
    pub(crate) own: f64,
    /// The part of it that other routers brought, as the engine last told.
    pub(crate) told: f64,
    /// Among equals, the one where this is false goes first, then the lower `turn`.
    pub(crate) is_second: bool,
    pub(crate) turn: usize,
}

/// Takes one of `candidates`, given what one sequence costs those it runs beside: drawn from the best `best` if they are close.
pub(crate) fn pick(mut candidates: Vec<Scored>, sequence: f64, best: usize, draws: &Draws) -> Option<Scored> {
    let order = |a: &Scored, b: &Scored| {
        a.cost.total_cmp(&b.cost).then((a.is_second, a.turn).cmp(&(b.is_second, b.turn)))
    };
    let first = candidates.iter().copied().min_by(order)?;
    // Since the last report other routers may have taken away what they had there, brought as much again, and one request more.
    let told = candidates.iter().map(|one| one.told).sum::<f64>() / candidates.len() as f64;
    // The first one is always among those that are close to it.
    let uncertain = (told + first.own.max(sequence)).max(0.0);
    candidates.retain(|one| one.cost <= first.cost + uncertain && one.own <= first.own + sequence);
    candidates.sort_by(order);
    candidates.truncate(best);
    #[allow(clippy::float_cmp, reason = "equal costs are the same sum of the same numbers")]
    if candidates.iter().all(|one| one.cost == first.cost) {
        // Nothing to be uncertain about: equals take turns, which spreads better than any draw.
        return candidates.into_iter().next();
    }
    let one = draws.below(candidates.len());
    let other = draws.below(candidates.len() - 1);
    let other = other + usize::from(other >= one);
    Some(candidates[one.min(other)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(costs: &[(f64, f64)]) -> Vec<Scored> {
        let one = |(at, &(cost, own))| Scored { at, cost, own, told: 0.0, is_second: false, turn: at };
        costs.iter().enumerate().map(one).collect()
    }

    fn shares(costs: &[(f64, f64)]) -> Vec<usize> {
        let draws = Draws::new(3);
        let mut counts = vec![0; costs.len()];
        for _ in 0..600 {
            counts[pick(scored(costs), 32.0, BEST, &draws).expect("there are candidates").at] += 1;
        }
        counts
    }

    #[test]
    fn somebody_is_chosen_whatever_the_figures() {
        let figures = [-5000.0, -1.0, 0.0, 1.0, 5000.0, f64::INFINITY];
        for told in figures {
            for costs in figures.iter().flat_map(|a| figures.map(|b| [*a, b])) {
                let one =
                    |at: usize| Scored { at, cost: costs[at], own: 100.0, told, is_second: false, turn: at };
                let picked = pick(vec![one(0), one(1)], 32.0, BEST, &Draws::new(1));
                assert!(picked.is_some(), "{costs:?}, told {told}");
            }
        }
    }

    #[test]
    fn a_held_prefix_is_followed() {
        assert_eq!(shares(&[(3100.0, 3100.0), (100.0, 100.0), (3100.0, 3100.0)]), [0, 600, 0]);
        // Also when the holder is busier, as long as it is cheaper.
        assert_eq!(shares(&[(3100.0, 3100.0), (2900.0, 100.0), (3200.0, 3100.0)]), [0, 600, 0]);
        // And left when it is not.
        assert_eq!(shares(&[(3100.0, 3100.0), (9000.0, 100.0)]), [600, 0]);
    }

    #[test]
    fn a_clearly_shorter_queue_is_followed() {
        assert_eq!(shares(&[(5000.0, 100.0), (200.0, 100.0), (400.0, 100.0)]), [0, 600, 0]);
    }

    #[test]
    fn of_close_ones_two_of_the_best_four_are_drawn() {
        let close: Vec<_> = (0..6).map(|i| (1000.0 + 10.0 * f64::from(i), 500.0)).collect();
        let shares = shares(&close);
        // 1/2, 1/3, 1/6: the pairs of four in which each is the better one.
        assert!((250..350).contains(&shares[0]), "{shares:?}");
        assert!((150..250).contains(&shares[1]), "{shares:?}");
        assert!((60..140).contains(&shares[2]), "{shares:?}");
        assert_eq!(shares[3..], [0, 0, 0]);
        // The better of two is always taken.
        assert_eq!(self::shares(&close[..2]), [600, 0]);
    }

    #[test]
    fn equals_take_turns() {
        let mut equals = scored(&[(7.0, 7.0); 6]);
        for turn in 0..6 {
            for one in &mut equals {
                one.turn = (one.at + 6 - turn) % 6;
            }
            assert_eq!(pick(equals.clone(), 32.0, BEST, &Draws::new(1)).map(|one| one.at), Some(turn));
        }
        equals.iter_mut().for_each(|one| one.is_second = one.at != 4);
        assert_eq!(pick(equals, 32.0, BEST, &Draws::new(1)).map(|one| one.at), Some(4));
        assert_eq!(pick(Vec::new(), 32.0, BEST, &Draws::new(1)), None);
    }
}
