//! Values with units, as options spell them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes: `1048576`, `512KiB`, `1.5GiB`, `2GB`.
///
/// ```
/// use microserving_daemon::ByteSize;
/// assert_eq!("1.5 GiB".parse::<ByteSize>()?.num_bytes(), 3 << 29);
/// assert!("1.5 parsec".parse::<ByteSize>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(u64);

impl ByteSize {
    /// Wraps a number of bytes.
    #[must_use]
    pub const fn new(num_bytes: u64) -> Self {
        Self(num_bytes)
    }

    /// Returns the number of bytes.
    #[must_use]
    pub const fn num_bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if self.0 >= 1 << shift && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        self.0.fmt(f)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "kib" | "k" => 1024.0,
            "mib" | "m" => 1_048_576.0,
            "gib" | "g" => 1_073_741_824.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            other => return Err(format!("unknown unit `{other}`; use B, KiB, MiB, GiB, KB, MB or GB")),
        };
        if let (Ok(whole), 1.0) = (number.parse::<u64>(), factor) {
            return Ok(Self(whole));
        }
        let number: f64 = number.parse().map_err(|_| "not a size in bytes".to_owned())?;
        let num_bytes = number * factor;
        // 2^53: beyond it a double no longer counts single bytes.
        if !(0.0..=9_007_199_254_740_992.0).contains(&num_bytes) {
            return Err("too large".into());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the range was checked above"
        )]
        Ok(Self(num_bytes as u64))
    }
}

/// Reads a number of seconds that may be 0: for clap's `value_parser`.
///
/// # Errors
/// If the text is not a finite number, negative, or longer than a year.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let value: f64 = text.trim().parse().map_err(|_| "not a number of seconds".to_owned())?;
    if !(0.0..=31_536_000.0).contains(&value) {
        return Err("must lie between 0 and 31536000 seconds".into());
    }
    Ok(Duration::from_secs_f64(value))
}

/// Reads a number of seconds above 0: for clap's `value_parser`.
///
/// # Errors
/// As [`seconds`], and if the value is 0.
pub fn positive_seconds(text: &str) -> Result<Duration, String> {
    match seconds(text)? {
        Duration::ZERO => Err("must be more than 0 seconds".into()),
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_back_as_printed() {
        for num_bytes in [0, 1, 1000, 1024, 1536, 1 << 20, 3 << 29, u64::from(u32::MAX)] {
            let size = ByteSize::new(num_bytes);
            assert_eq!(size.to_string().parse::<ByteSize>(), Ok(size));
        }
    }

    #[test]
    fn bad_values_say_why() {
        assert!("12 miles".parse::<ByteSize>().unwrap_err().contains("miles"));
        assert!("".parse::<ByteSize>().is_err());
        assert!("-1".parse::<ByteSize>().is_err());
        assert!("1e400GiB".parse::<ByteSize>().is_err());
        for bad in ["nan", "-1", "inf", "1e300", "", "soon"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
        assert!(positive_seconds("0").is_err());
        assert_eq!(positive_seconds("0.5"), Ok(Duration::from_millis(500)));
    }
}
