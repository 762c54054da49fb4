//! A profile as a JSON file.
//!
//! ```json
//! {
//!   "version": 1,
//!   "about": {"model": "smollm2-135m", "numeric_mode": "cpu-avx2/q8_0/f16", "machine": "x86_64, 2 cores"},
//!   "prefill": {"new_tokens": [1, 64], "context": [0, 512], "seconds": [[0.01, 0.012], [0.2, 0.24]]},
//!   "decode": {"sequences": [1, 4], "context": [16, 512], "seconds": [[0.01, 0.012], [0.03, 0.04]]},
//!   "riding": {"new_tokens": [16, 64], "sequences": [1, 4], "seconds": [[0.05, 0.05], [0.2, 0.2]]},
//!   "links": {"shm": {"fixed_seconds": 0.0001, "seconds_per_token": 0.000002}}
//! }
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{About, Link, Profile, Rise, Table};

/// The version of the format.
const VERSION: u32 = 1;

/// A profile cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BadProfile {
    /// It is not JSON, or has other fields than a profile.
    #[error("it is no profile")]
    Syntax(#[source] serde_json::Error),
    /// It is of a version that this build does not know.
    #[error("version is {found}, must be {VERSION}")]
    Version {
        /// What the file says.
        found: u32,
    },
    /// A field holds what cannot be.
    #[error("{field} {reason}")]
    Field {
        /// The field.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    #[serde(default)]
    about: About,
    prefill: Prefill,
    decode: Decode,
    riding: Riding,
    #[serde(default)]
    links: BTreeMap<String, Link>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Prefill {
    new_tokens: Vec<f64>,
    context: Vec<f64>,
    seconds: Vec<Vec<f64>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Decode {
    sequences: Vec<f64>,
    context: Vec<f64>,
    seconds: Vec<Vec<f64>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Riding {
    new_tokens: Vec<f64>,
    sequences: Vec<f64>,
    seconds: Vec<Vec<f64>>,
}

impl Profile {
    /// Reads a profile.
    ///
    /// # Errors
    /// [`BadProfile`], naming the field that is wrong.
    pub fn from_json(json: &[u8]) -> Result<Self, BadProfile> {
        /// Read first: another version may well have other fields.
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version: found } = serde_json::from_slice(json).map_err(BadProfile::Syntax)?;
        if found != VERSION {
            return Err(BadProfile::Version { found });
        }
        let file: File = serde_json::from_slice(json).map_err(BadProfile::Syntax)?;
        let field = |field: &str| {
            let field = field.to_owned();
            move |reason| BadProfile::Field { field, reason }
        };
        let Prefill { new_tokens, context, seconds } = file.prefill;
        let prefill = Table::new(new_tokens, context, seconds, Rise::Both).map_err(field("prefill"))?;
        let Decode { sequences, context, seconds } = file.decode;
        let decode = Table::new(sequences, context, seconds, Rise::Both).map_err(field("decode"))?;
        let Riding { new_tokens, sequences, seconds } = file.riding;
        let riding = Table::new(new_tokens, sequences, seconds, Rise::Rows).map_err(field("riding"))?;
        for (name, link) in &file.links {
            let is_time = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
            if !is_time(link.fixed_seconds) || !is_time(link.seconds_per_token) {
                return Err(field(&format!("links.{name}"))("has a negative time".to_owned()));
            }
        }
        Ok(Self { about: file.about, prefill, decode, riding, links: file.links })
    }

    /// Writes a profile.
    #[must_use]
    pub fn to_json(&self) -> String {
        let axes =
            |table: &Table| (table.axes().0.to_vec(), table.axes().1.to_vec(), table.seconds().to_vec());
        let (new_tokens, context, seconds) = axes(&self.prefill);
        let prefill = Prefill { new_tokens, context, seconds };
        let (sequences, context, seconds) = axes(&self.decode);
        let decode = Decode { sequences, context, seconds };
        let (new_tokens, sequences, seconds) = axes(&self.riding);
        let riding = Riding { new_tokens, sequences, seconds };
        let (about, links) = (self.about.clone(), self.links.clone());
        let file = File { version: VERSION, about, prefill, decode, riding, links };
        serde_json::to_string(&file).expect("numbers and strings are JSON, and times are finite")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::HardwareProfile;

    #[test]
    fn what_is_written_is_read() {
        let hardware = HardwareProfile::llama3_70b_fp8_h100_tp4();
        for profile in [Profile::neutral(), Profile::roofline(&hardware, &[("a", 1e-6, 1e9)])] {
            let json = profile.to_json();
            assert_eq!(Profile::from_json(json.as_bytes()).expect("reads"), profile);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let right: Value = serde_json::from_str(&Profile::neutral().to_json()).expect("JSON");
        let with = |path: &str, value: Value| {
            let mut wrong = right.clone();
            *wrong.pointer_mut(path).expect("a field") = value;
            let error = Profile::from_json(wrong.to_string().as_bytes()).expect_err("refused");
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
            format!("{error}{}", cause.unwrap_or_default())
        };
        for (path, value, expected) in [
            ("/version", json!(2), "version is 2, must be 1"),
            ("/prefill/seconds", json!([[1.0]]), "prefill has 1 rows of seconds, must have 2"),
            ("/decode/sequences", json!([4, 1]), "decode does not rise along the rows"),
            ("/riding/seconds/0/0", json!(-1), "riding says -1 at 1, which is no time"),
            ("/links/any/fixed_seconds", json!(-1.0), "links.any has a negative time"),
            ("/links/any", json!({"fixed_seconds": 1}), "missing field `seconds_per_token`"),
            ("/prefill", json!({"tokens": []}), "unknown field `tokens`"),
            ("/decode", json!(3), "it is no profile"),
        ] {
            let told = with(path, value);
            assert!(told.contains(expected), "{path}: {told}");
        }
        assert!(matches!(Profile::from_json(b"{"), Err(BadProfile::Syntax(_))));
    }
}
