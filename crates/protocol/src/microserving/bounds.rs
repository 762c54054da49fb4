//! From positions as clients write them, negative ones counted from the end, to checked ranges.

use crate::{ApiError, KvRange};

/// Checks `prep_recv`'s `end`: `0 <= end < len`, or `<= len` with `commit`.
///
/// ```
/// use microserving_protocol::normalise_prep_end;
/// assert_eq!(normalise_prep_end(-1, 10, false), Ok(9));
/// assert!(normalise_prep_end(10, 10, false).is_err());
/// assert_eq!(normalise_prep_end(10, 10, true), Ok(10));
/// ```
///
/// # Errors
/// 400 naming `end`, its value and the bound.
pub fn normalise_prep_end(end: i64, prompt_len: usize, commit: bool) -> Result<u32, ApiError> {
    let most = if commit { prompt_len as i64 } else { prompt_len as i64 - 1 };
    position("end", end, prompt_len, 0, most, if commit { "0 <= end <= len" } else { "0 <= end < len" })
}

/// Checks `remote_send`'s range: `0 <= begin < end < len`, or `end <= len` with `commit`.
///
/// `commit` is not a field of `remote_send`: it holds when the address ends at the end of the prompt, which only a
/// `prep_recv` with `commit` hands out.
///
/// # Errors
/// 400 naming the field, its value and the bound.
pub fn normalise_send_range(
    begin: i64,
    end: i64,
    prompt_len: usize,
    commit: bool,
) -> Result<KvRange, ApiError> {
    let most = if commit { prompt_len as i64 } else { prompt_len as i64 - 1 };
    let bound = if commit { "0 < end <= len" } else { "0 < end < len" };
    let end = position("end", end, prompt_len, 1, most, bound)?;
    let begin =
        position("begin", begin, prompt_len, 0, i64::from(end) - 1, &format!("0 <= begin < end = {end}"))?;
    Ok(KvRange::new(begin, end).expect("begin was checked to be below end"))
}

/// Checks `start_generate`'s `begin`: `0 <= begin < len`.
///
/// # Errors
/// 400 naming `begin`, its value and the bound.
pub fn normalise_begin(begin: i64, prompt_len: usize) -> Result<u32, ApiError> {
    position("begin", begin, prompt_len, 0, prompt_len as i64 - 1, "0 <= begin < len")
}

fn position(name: &str, value: i64, len: usize, least: i64, most: i64, bound: &str) -> Result<u32, ApiError> {
    let absolute = if value < 0 { value.saturating_add(len as i64) } else { value };
    if (least..=most).contains(&absolute)
        && let Ok(position) = u32::try_from(absolute)
    {
        return Ok(position);
    }
    Err(ApiError::bad_request(name, format!("{name} is {value}, must satisfy {bound} (len is {len})")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show<T: std::fmt::Display>(result: Result<T, ApiError>) -> String {
        result.map_or_else(|e| format!("{}: {}", e.param.expect("named"), e.message), |v| v.to_string())
    }

    #[test]
    fn prep_end() {
        for (end, len, commit, expected) in [
            (-1, 10, false, "9"),
            (0, 10, false, "0"),
            (9, 10, false, "9"),
            (-10, 10, false, "0"),
            (-1, 1, false, "0"),
            (10, 10, true, "10"),
            (10, 10, false, "end: end is 10, must satisfy 0 <= end < len (len is 10)"),
            (11, 10, true, "end: end is 11, must satisfy 0 <= end <= len (len is 10)"),
            (-11, 10, false, "end: end is -11, must satisfy 0 <= end < len (len is 10)"),
            (0, 0, false, "end: end is 0, must satisfy 0 <= end < len (len is 0)"),
            (i64::MIN, 3, false, "end: end is -9223372036854775808, must satisfy 0 <= end < len (len is 3)"),
            (i64::MAX, 3, true, "end: end is 9223372036854775807, must satisfy 0 <= end <= len (len is 3)"),
        ] {
            assert_eq!(show(normalise_prep_end(end, len, commit)), expected);
        }
    }

    #[test]
    fn send_range() {
        for (begin, end, len, commit, expected) in [
            (0, -1, 10, false, "[0, 9)"),
            (-3, -1, 10, false, "[7, 9)"),
            (4, 5, 10, false, "[4, 5)"),
            (0, 10, 10, true, "[0, 10)"),
            (0, 10, 10, false, "end: end is 10, must satisfy 0 < end < len (len is 10)"),
            (0, 0, 10, false, "end: end is 0, must satisfy 0 < end < len (len is 10)"),
            (0, -10, 10, true, "end: end is -10, must satisfy 0 < end <= len (len is 10)"),
            (5, 5, 10, false, "begin: begin is 5, must satisfy 0 <= begin < end = 5 (len is 10)"),
            (-1, -1, 10, false, "begin: begin is -1, must satisfy 0 <= begin < end = 9 (len is 10)"),
            (-11, 5, 10, false, "begin: begin is -11, must satisfy 0 <= begin < end = 5 (len is 10)"),
            (0, -1, 1, false, "end: end is -1, must satisfy 0 < end < len (len is 1)"),
        ] {
            assert_eq!(show(normalise_send_range(begin, end, len, commit)), expected);
        }
    }

    #[test]
    fn begin() {
        for (begin, len, expected) in [
            (0, 1, "0"),
            (-1, 5, "4"),
            (-5, 5, "0"),
            (4, 5, "4"),
            (5, 5, "begin: begin is 5, must satisfy 0 <= begin < len (len is 5)"),
            (-6, 5, "begin: begin is -6, must satisfy 0 <= begin < len (len is 5)"),
        ] {
            assert_eq!(show(normalise_begin(begin, len)), expected);
        }
    }
}
