//! The writer thread: copies slices from our region into the peers', so that `put` never waits for memory.

use std::sync::Arc;
use std::time::Duration;

use microserving_transport::ByteRun;
use microserving_transport::one_sided::{Copied, Record, Slice};
use rustix::time::{ClockId, clock_gettime};

use crate::memory::{PeerMemory, Region};
use crate::shared::{Command, Shared};

/// Copies until the transport shuts down. A slice under way is always ended, and its channel told, before that.
pub(crate) fn run(shared: &Shared) {
    let mut channels = shared.channels();
    while !channels.is_shut_down() {
        let (slice, mut notice) = channels.next_slice(shared.config.slice_bytes);
        if let Some(slice) = slice {
            drop(channels);
            let copied = match shared.region.get() {
                Some(region) => copy(region, &slice),
                // Cannot be: a channel is opened only by a transport that has a region.
                None => Copied { num_bytes: 0, busy: Duration::ZERO, records: Vec::new() },
            };
            channels = shared.channels();
            notice = channels.copied(slice.channel, copied);
        } else if notice.is_none() {
            channels = shared.wait_for_work(channels);
        }
        if let Some(notice) = notice {
            drop(channels);
            shared.command([Command::Notice(notice)]);
            channels = shared.channels();
        }
    }
}

fn copy(region: &Region, slice: &Slice<Arc<PeerMemory>>) -> Copied {
    let begin = now();
    let mut records = Vec::new();
    let mut num_bytes = 0;
    let target = &slice.target;
    for run in &slice.runs {
        if target.checksum {
            let hash = region.mapping().hash(run.local_offset, run.num_bytes);
            records
                .push(Record { run: ByteRun { offset: run.remote_offset, num_bytes: run.num_bytes }, hash });
        }
        let to = target.memory.region();
        region.mapping().copy_to(run.local_offset, to, run.remote_offset, run.num_bytes);
        num_bytes += run.num_bytes as u64;
    }
    target.memory.count_arrived(target.slot, num_bytes);
    Copied { num_bytes, busy: now().saturating_sub(begin), records }
}

fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
