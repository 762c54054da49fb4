//! Who runs where: the router that is measured has the last core for itself, everything else the others.
//!
//! Otherwise the clients and the engines take time from a router just when it is busy, and a fast router is measured by how slow they are.

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores of this process as they were; given back on drop.
pub(super) struct Cores {
    before: CpuSet,
    others: CpuSet,
    last: CpuSet,
}

impl Cores {
    /// Leaves the last core to routers; nothing if there is only one.
    pub(super) fn divide() -> Result<Option<Self>> {
        let before = sched_getaffinity(None).context("the cores are not told")?;
        let Some(last) = (0..CpuSet::MAX_CPU).rev().find(|&core| before.is_set(core)) else {
            return Ok(None);
        };
        if before.count() < 2 {
            return Ok(None);
        }
        let (mut others, mut only) = (before, CpuSet::new());
        others.unset(last);
        only.set(last);
        sched_setaffinity(None, &others).context("the cores cannot be divided")?;
        Ok(Some(Self { before, others, last: only }))
    }

    /// Starts what is to run on the routers' core.
    pub(super) fn on_last<T>(cores: Option<&Self>, start: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(cores) = cores else { return start() };
        sched_setaffinity(None, &cores.last).context("the cores cannot be divided")?;
        let started = start();
        sched_setaffinity(None, &cores.others).context("the cores cannot be divided")?;
        started
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        // What was allowed before is allowed still.
        let _ = sched_setaffinity(None, &self.before);
    }
}
