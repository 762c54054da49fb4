//! What a sender says that it wrote, where checksums are asked for.

use crate::{ByteRun, run_is_allowed};

/// A run that was written, and the checksum of its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Where, in the receiver's region.
    pub run: ByteRun,
    /// The checksum of the source's bytes.
    pub hash: u64,
}

/// The records of one claim, as they come in.
#[derive(Debug, Default)]
pub struct Records {
    records: Vec<Record>,
    recorded_bytes: u64,
}

impl Records {
    /// Takes records of a claim of `num_bytes` under `runs`.
    ///
    /// # Errors
    /// If one is empty or lies outside, or there are more bytes than the claim has: the sender breaks the protocol.
    pub fn extend(
        &mut self,
        records: Vec<Record>,
        runs: &[ByteRun],
        num_bytes: u64,
    ) -> Result<(), &'static str> {
        for Record { run, .. } in &records {
            self.recorded_bytes = self.recorded_bytes.saturating_add(run.num_bytes as u64);
            let inside = run_is_allowed(runs, run.offset, run.num_bytes);
            if run.num_bytes == 0 || !inside || self.recorded_bytes > num_bytes {
                return Err("records outside the claim");
            }
        }
        self.records.extend(records);
        Ok(())
    }

    /// Says whether the records cover a claim of `num_bytes`, each byte once, and match what the region holds by `hash`.
    pub fn are_intact(mut self, num_bytes: u64, hash: impl Fn(ByteRun) -> u64) -> bool {
        self.records.sort_unstable_by_key(|record| record.run.offset);
        let overlap = self
            .records
            .windows(2)
            .any(|pair| pair[0].run.offset + pair[0].run.num_bytes > pair[1].run.offset);
        let covered: u64 = self.records.iter().map(|record| record.run.num_bytes as u64).sum();
        !overlap && covered == num_bytes && self.records.iter().all(|record| hash(record.run) == record.hash)
    }
}
