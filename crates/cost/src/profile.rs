//! What one type of engine takes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Chunk, HardwareProfile, Rise, StepShape, Table};

/// What a profile was measured on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct About {
    /// The model.
    pub model: String,
    /// Its numeric mode, which says how it is computed.
    pub numeric_mode: String,
    /// The machine.
    pub machine: String,
}

/// What moving KV over one kind of link takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Seconds of any transfer, however short.
    pub fixed_seconds: f64,
    /// Seconds that each token adds.
    pub seconds_per_token: f64,
}

/// What one type of engine takes, in seconds.
///
/// Sizes are of the kinds that a router knows: tokens, sequences, and tokens of context.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    pub(crate) about: About,
    /// New tokens by context: a prefill with nothing else in the step.
    pub(crate) prefill: Table,
    /// Sequences by the context of each: a step of one token a sequence.
    pub(crate) decode: Table,
    /// New tokens by sequences: what a prefill without context adds to a step that decodes. Less than it takes alone, since the
    /// weights are read anyway, so the table has no column for no sequences.
    pub(crate) riding: Table,
    pub(crate) links: BTreeMap<String, Link>,
}

impl Profile {
    /// Makes a profile of its tables: prefill by new tokens and context, decode by sequences and the context of each, riding by new
    /// tokens and sequences.
    #[must_use]
    pub fn new(about: About, prefill: Table, decode: Table, riding: Table) -> Self {
        Self { about, prefill, decode, riding, links: BTreeMap::new() }
    }

    /// Adds a link.
    #[must_use]
    pub fn with_link(mut self, name: &str, link: Link) -> Self {
        self.links.insert(name.to_owned(), link);
        self
    }

    /// Makes the profile of hardware that is not at hand. Links have a name, seconds of latency, and bytes a second.
    #[must_use]
    pub fn roofline(hardware: &HardwareProfile, links: &[(&str, f64, f64)]) -> Self {
        const TOKENS: [u32; 26] = [
            1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
            6144, 8192, 12288, 16384, 32768,
        ];
        const CONTEXTS: [u32; 7] = [0, 1024, 2048, 4096, 8192, 16384, 65536];
        const SEQUENCES: [u32; 12] = [1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256];
        let step = |prefills: &[Chunk], decodes: Vec<u32>| {
            hardware.step_time(&StepShape { prefills: prefills.to_vec(), decodes }).as_secs_f64()
        };
        let chunk = |num_tokens, context| Chunk { num_tokens, context };
        let prefill =
            table(&TOKENS, &CONTEXTS, Rise::Both, |new, context| step(&[chunk(new, context)], vec![]));
        let decode = table(&SEQUENCES, &CONTEXTS, Rise::Both, |batch, context| {
            step(&[], vec![context; batch as usize])
        });
        let riding = table(&TOKENS, &SEQUENCES, Rise::Rows, |new, batch| {
            let decodes = vec![1024; batch as usize];
            step(&[chunk(new, 0)], decodes.clone()) - step(&[], decodes)
        });
        let about = About { model: hardware.name.to_owned(), ..About::default() };
        let bytes = hardware.model.kv_token_bytes();
        links.iter().fold(Self::new(about, prefill, decode, riding), |profile, (name, latency, rate)| {
            profile.with_link(name, Link { fixed_seconds: *latency, seconds_per_token: bytes / rate })
        })
    }

    /// Makes the profile of an engine that nobody knows anything of: 10 ms a step, 100 µs a prefilled token, 1 µs a token moved.
    ///
    /// Its shape is what matters: work adds up, and is the same on every engine that has no profile. Corrections find its size.
    #[must_use]
    pub fn neutral() -> Self {
        const STEP: f64 = 10e-3;
        const TOKEN: f64 = 100e-6;
        let points = [1, 1024];
        let prefill = table(&points, &[0], Rise::Both, |new, _| STEP + TOKEN * f64::from(new));
        let decode = table(&points, &[0], Rise::Both, |batch, _| STEP + TOKEN * f64::from(batch));
        let riding = table(&points, &[1], Rise::Rows, |new, _| TOKEN * f64::from(new));
        let about = About { model: "neutral".to_owned(), ..About::default() };
        Self::new(about, prefill, decode, riding)
            .with_link("any", Link { fixed_seconds: 1e-3, seconds_per_token: 1e-6 })
    }

    /// Returns what it was measured on.
    #[must_use]
    pub const fn about(&self) -> &About {
        &self.about
    }

    /// Returns what prefilling `new` tokens behind `context` cached ones takes: *a_P(n, c)*.
    #[must_use]
    pub fn prefill_seconds(&self, new: f64, context: f64) -> f64 {
        if new <= 0.0 { 0.0 } else { self.prefill.at(new, context) }
    }

    /// Returns what a step of `sequences` that have `total_context` tokens together takes: *τ(b, C)*.
    #[must_use]
    pub fn decode_seconds(&self, sequences: f64, total_context: f64) -> f64 {
        if sequences <= 0.0 { 0.0 } else { self.decode.at(sequences, total_context / sequences) }
    }

    /// Returns what prefilling `new` tokens behind `context` adds to a step in which `sequences` decode: *σ(n | c, b)*.
    ///
    /// Attention to the context costs the same whether others decode or not.
    #[must_use]
    pub fn riding_seconds(&self, new: f64, context: f64, sequences: f64) -> f64 {
        if new <= 0.0 {
            return 0.0;
        }
        if sequences < 1.0 {
            return self.prefill.at(new, context);
        }
        let attention = self.prefill.at(new, context) - self.prefill.at(new, 0.0);
        self.riding.at(new, sequences) + attention.max(0.0)
    }

    /// Returns what moving the KV of `tokens` takes over a link, or over the slowest that was measured: *t_kv*. None without any.
    #[must_use]
    pub fn transfer_seconds(&self, tokens: f64, link: Option<&str>) -> Option<f64> {
        if tokens <= 0.0 {
            return Some(0.0);
        }
        let over = |link: &Link| link.fixed_seconds + link.seconds_per_token * tokens;
        match link.and_then(|name| self.links.get(name)) {
            Some(link) => Some(over(link)),
            None => self.links.values().map(over).max_by(f64::total_cmp),
        }
    }

    /// Returns the seconds of prefills, by new tokens and context.
    #[must_use]
    pub const fn prefill_table(&self) -> &Table {
        &self.prefill
    }

    /// Returns the seconds of decode steps, by sequences and the context of each.
    #[must_use]
    pub const fn decode_table(&self) -> &Table {
        &self.decode
    }

    /// Returns what prefills add to decode steps, by new tokens and sequences.
    #[must_use]
    pub const fn riding_table(&self) -> &Table {
        &self.riding
    }

    /// Returns the links by name.
    #[must_use]
    pub const fn links(&self) -> &BTreeMap<String, Link> {
        &self.links
    }
}

fn table(rows: &[u32], columns: &[u32], rise: Rise, seconds: impl Fn(u32, u32) -> f64) -> Table {
    let axis = |points: &[u32]| points.iter().map(|point| f64::from(*point)).collect::<Vec<_>>();
    let seconds =
        rows.iter().map(|row| columns.iter().map(|column| seconds(*row, *column)).collect()).collect();
    Table::new(axis(rows), axis(columns), seconds, rise)
        .expect("the axes are constants and a model's times are times")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h100() -> Profile {
        Profile::roofline(&HardwareProfile::llama3_70b_fp8_h100_tp4(), &[("nic", 10e-6, 11e9)])
    }

    fn assert_near(value: f64, expected: f64, tolerance: f64) {
        assert!((value / expected - 1.0).abs() <= tolerance, "{value}, not {expected}");
    }

    #[test]
    fn the_tables_say_what_the_roofline_says() {
        let profile = h100();
        let hardware = HardwareProfile::llama3_70b_fp8_h100_tp4();
        for (new, context) in [(1, 0), (16, 2984), (300, 2700), (700, 100), (3000, 0), (5000, 3000)] {
            let shape = StepShape { prefills: vec![Chunk { num_tokens: new, context }], decodes: vec![] };
            let expected = hardware.step_time(&shape).as_secs_f64();
            assert_near(profile.prefill_seconds(new.into(), context.into()), expected, 0.02);
        }
        assert_near(profile.decode_seconds(6.0, 18000.0), 13.4e-3, 0.03);
        assert_near(profile.decode_seconds(10.0, 31000.0), 14.3e-3, 0.03);
        // 4000 tokens of 327 680 bytes at 11 GB/s.
        assert_near(profile.transfer_seconds(4000.0, Some("nic")).expect("measured"), 0.119, 0.01);
    }

    /// What the last tokens of a 3000-token prompt cost an engine that decodes six sequences.
    #[test]
    fn a_prefill_among_decodes() {
        let profile = h100();
        for (left, expected) in
            [(16.0, 4.0), (64.0, 7.4), (300.0, 17.4), (600.0, 32.8), (1500.0, 80.8), (3000.0, 158.7)]
        {
            assert_near(profile.riding_seconds(left, 3000.0 - left, 6.0) * 1e3, expected, 0.03);
        }
        assert_eq!(profile.riding_seconds(300.0, 0.0, 0.0), profile.prefill_seconds(300.0, 0.0));
    }

    #[test]
    fn nothing_takes_no_time() {
        for profile in [h100(), Profile::neutral()] {
            assert_eq!(profile.prefill_seconds(0.0, 100.0), 0.0);
            assert_eq!(profile.decode_seconds(0.0, 0.0), 0.0);
            assert_eq!(profile.riding_seconds(0.0, 100.0, 3.0), 0.0);
            assert_eq!(profile.transfer_seconds(0.0, None), Some(0.0));
        }
    }

    #[test]
    fn an_unknown_link_is_the_slowest_known() {
        let link = |seconds_per_token| Link { fixed_seconds: 0.0, seconds_per_token };
        let profile = Profile::neutral().with_link("any", link(1.0)).with_link("slow", link(2.0));
        for (name, expected) in [(Some("any"), 3.0), (Some("slow"), 6.0), (Some("other"), 6.0), (None, 6.0)] {
            assert_eq!(profile.transfer_seconds(3.0, name), Some(expected));
        }
    }
}
