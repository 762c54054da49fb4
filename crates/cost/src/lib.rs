//! What serving costs, in seconds.
//!
//! - [`Profile`] is what one type of engine takes: to prefill, to decode, to prefill while it decodes, to move KV. It is a set of measured
//!   tables, read from and written to a small JSON file; [`Profile::roofline`] makes one of a [`HardwareProfile`] instead.
//! - [`Correction`] follows the ratio of what things took to what a profile said, one a phase.
//! - [`ArrivalRate`] estimates how often requests come, from a prior that the first arrivals cannot overturn.
//! - [`planned_share`] is the steady-state answer to how much of a prompt a decoding engine should prefill itself.
//!
//! # Why tables and not a formula
//!
//! A roofline has a dozen constants, and on a machine that nobody has published them for they are guesses. What a router decides by are
//! four functions of time, and each can be measured in seconds on the machine itself. So a profile is tables of measurements, and a
//! roofline is one way to fill them. Tables are made monotone when they are read: more work never takes less time, whatever the noise
//! of a measurement says, and beyond the last measurement they go on as steeply as there.
//!
//! # Example
//!
//! ```
//! use microserving_cost::{HardwareProfile, Profile};
//!
//! let profile = Profile::roofline(&HardwareProfile::llama3_70b_fp8_h100_tp4(), &[("nvlink", 5e-6, 400e9)]);
//! let alone = profile.prefill_seconds(3000.0, 0.0);
//! assert!((alone - 0.171).abs() < 0.005);
//! // Leaving 300 tokens to an engine that decodes six sequences slows these down by less than those 300 take alone.
//! assert!(profile.riding_seconds(300.0, 2700.0, 6.0) < profile.prefill_seconds(300.0, 2700.0));
//!
//! let text = profile.to_json();
//! assert_eq!(Profile::from_json(text.as_bytes())?, profile);
//! # Ok::<(), microserving_cost::BadProfile>(())
//! ```

#![forbid(unsafe_code)]

mod arrivals;
mod correction;
mod file;
mod planning;
mod profile;
mod roofline;
mod table;

pub use arrivals::ArrivalRate;
pub use correction::{Correction, Phase};
pub use file::BadProfile;
pub use planning::planned_share;
pub use profile::{About, Link, Profile};
pub use roofline::{Chunk, DeviceRates, HardwareProfile, ModelShape, StepShape};
pub use table::{Rise, Table};
