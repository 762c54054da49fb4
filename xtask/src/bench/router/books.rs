//! What the router did between two moments, by its own metrics and the kernel's.

use anyhow::Result;
use microserving_harness::{Daemon, http};

use super::Setup;

/// What the router has done so far.
pub(super) struct Books {
    /// Calls to engines that went well, as many as there are of each kind, and the others.
    ok: [(&'static str, u64); 4],
    not_ok: u64,
    retries: u64,
}

impl Books {
    pub(super) fn of(router: &Daemon) -> Result<Self> {
        let metrics = http::get(&format!("{}/metrics", router.url()))?.body;
        Ok(Self::read(&metrics))
    }

    fn read(metrics: &str) -> Self {
        let sum = |name: &str, labels: &[&str]| -> u64 {
            let fits =
                |line: &&str| line.starts_with(name) && labels.iter().all(|label| line.contains(label));
            let value = |line: &str| line.rsplit_once(' ').and_then(|(_, value)| value.parse::<u64>().ok());
            metrics.lines().filter(fits).filter_map(value).sum()
        };
        let calls = "microserving_router_engine_calls_total{";
        let ok = ["prep_recv", "remote_send", "start_generate", "relay"]
            .map(|call| (call, sum(calls, &[&format!("call=\"{call}\""), "outcome=\"ok\""])));
        let num_ok: u64 = ok.iter().map(|(_, count)| count).sum();
        Self {
            ok,
            not_ok: sum(calls, &[]).saturating_sub(num_ok),
            retries: sum("microserving_router_retries_total{", &[]),
        }
    }

    pub(super) fn since(&self, before: &Self) -> Self {
        let mut ok = self.ok;
        for ((_, count), (_, earlier)) in ok.iter_mut().zip(before.ok) {
            *count = count.saturating_sub(earlier);
        }
        Self {
            ok,
            not_ok: self.not_ok.saturating_sub(before.not_ok),
            retries: self.retries.saturating_sub(before.retries),
        }
    }

    /// Says what is wrong if the router did not make exactly the calls of the pattern: an answer that took another way would be
    /// measured as if it had taken this one.
    pub(super) fn deviation(&self, setup: Setup, num_sent: u64) -> Option<String> {
        let wanted = |call: &str| if setup.calls().contains(&call) { num_sent } else { 0 };
        let fits = self.ok.iter().all(|&(call, count)| count == wanted(call));
        (!fits || self.not_ok > 0 || self.retries > 0).then(|| {
            format!(
                "{num_sent} requests by {setup:?} made the calls {:?}, {} failed calls and {} retries",
                self.ok, self.not_ok, self.retries
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_way_than_the_patterns_is_a_failure() {
        let metrics = |sends: u64, refused: u64, retries: u64| {
            Books::read(&format!(
                "microserving_router_engine_calls_total{{call=\"prep_recv\",outcome=\"ok\"}} 7\n\
                 microserving_router_engine_calls_total{{call=\"remote_send\",outcome=\"ok\"}} {sends}\n\
                 microserving_router_engine_calls_total{{call=\"start_generate\",outcome=\"ok\"}} 7\n\
                 microserving_router_engine_calls_total{{call=\"start_generate\",outcome=\"503\"}} {refused}\n\
                 microserving_router_retries_total{{reason=\"no_room\"}} {retries}\n\
                 # EOF\n"
            ))
        };
        let deviation = |books: Books| books.deviation(Setup::PrefillDecode, 7);
        assert_eq!(deviation(metrics(7, 0, 0)), None);
        assert!(deviation(metrics(6, 0, 0)).is_some());
        assert!(deviation(metrics(7, 1, 0)).is_some());
        assert!(deviation(metrics(7, 0, 1)).is_some());
        assert!(metrics(7, 0, 0).deviation(Setup::DataParallel, 7).is_some());
        let later = metrics(20, 0, 0).since(&metrics(7, 0, 0));
        assert_eq!(later.ok, [("prep_recv", 0), ("remote_send", 13), ("start_generate", 0), ("relay", 0)]);
        assert!(later.deviation(Setup::Direct, 0).is_some());
    }
}
