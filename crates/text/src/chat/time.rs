//! `strftime`, for the date that some system prompts tell.

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const SECONDS_PER_DAY: u64 = 86_400;
/// The end of the year 9999, past which a date has no four-digit year.
const MAX_SECONDS: u64 = 253_402_300_799;

/// A moment, in UTC.
#[derive(Debug)]
struct Moment {
    year: u64,
    /// From 1.
    month: u64,
    /// Of the month, from 1.
    day: u64,
    /// Of the year, from 1.
    day_of_year: u64,
    /// 0 is a Thursday, as 1970 began.
    weekday: u64,
    second_of_day: u64,
}

impl Moment {
    fn at(unix_seconds: u64) -> Self {
        let seconds = unix_seconds.min(MAX_SECONDS);
        let days = seconds / SECONDS_PER_DAY;
        let mut year = 1970;
        let mut left = days;
        while left >= days_in_year(year) {
            left -= days_in_year(year);
            year += 1;
        }
        let day_of_year = left + 1;
        let mut month = 1;
        while left >= days_in_month(year, month) {
            left -= days_in_month(year, month);
            month += 1;
        }
        Self {
            year,
            month,
            day: left + 1,
            day_of_year,
            weekday: days % 7,
            second_of_day: seconds % SECONDS_PER_DAY,
        }
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in_year(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_in_month(year: u64, month: u64) -> u64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if is_leap(year) => 29,
        2 => 28,
        _ => 31,
    }
}

/// Writes a moment as the format says; a directive it does not know is an error.
pub(super) fn strftime(format: &str, unix_seconds: u64) -> Result<String, Error> {
    let moment = Moment::at(unix_seconds);
    let month = MONTHS[usize::try_from(moment.month - 1).unwrap_or(0)];
    let weekday = DAYS[usize::try_from(moment.weekday).unwrap_or(0)];
    let (hour, minute, second) =
        (moment.second_of_day / 3600, moment.second_of_day / 60 % 60, moment.second_of_day % 60);
    let twelve = match hour % 12 {
        0 => 12,
        hour => hour,
    };
    let mut output = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            output.push(char);
            continue;
        }
        let mut directive = chars.next();
        // `%-d` is `%d` without the leading zero.
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let two = |number: u64| if bare { number.to_string() } else { format!("{number:02}") };
        let piece = match directive {
            Some('Y') => moment.year.to_string(),
            Some('y') => two(moment.year % 100),
            Some('m') => two(moment.month),
            Some('d') => two(moment.day),
            Some('e') => format!("{:2}", moment.day),
            Some('j') if bare => moment.day_of_year.to_string(),
            Some('j') => format!("{:03}", moment.day_of_year),
            Some('B') => month.to_owned(),
            Some('b' | 'h') => month[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => two(hour),
            Some('I') => two(twelve),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('F') => format!("{}-{:02}-{:02}", moment.year, moment.month, moment.day),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let directive = other.map(String::from).unwrap_or_default();
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now does not know `%{directive}`"),
                ));
            }
        };
        output.push_str(&piece);
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let check =
            |seconds, format, expected: &str| assert_eq!(strftime(format, seconds).unwrap(), expected);
        check(0, "%A, %d %B %Y %H:%M:%S", "Thursday, 01 January 1970 00:00:00");
        check(951_782_400, "%Y-%m-%d %a %j", "2000-02-29 Tue 060");
        check(1_709_164_800, "%-d %b %Y %I %p", "29 Feb 2024 12 AM");
        check(1_735_689_599, "%F %T %j %y", "2024-12-31 23:59:59 366 24");
        check(4_102_444_800, "%d/%m/%Y %A %%", "01/01/2100 Friday %");
        check(u64::MAX, "%F", "9999-12-31");
        assert!(strftime("%Q", 0).is_err());
        assert!(strftime("100%", 0).is_err());
    }
}
