//! `grpc-timeout`: how long the caller waits.

use std::time::Duration;

use microserving_protocol::ApiError;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;

/// When the caller gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// Reads the metadata of a call, which came just now.
    ///
    /// # Errors
    /// 400 if it is not what gRPC says: up to eight digits and a unit.
    pub(crate) fn of(metadata: &MetadataMap) -> Result<Self, ApiError> {
        let Some(value) = metadata.get("grpc-timeout") else { return Ok(Self(None)) };
        let text = value.to_str().unwrap_or_default();
        let timeout = parse(text).ok_or_else(|| {
            let message = format!("grpc-timeout is {text:?}, must be up to 8 digits and a unit of HMSmun");
            ApiError::bad_request("grpc-timeout", message)
        })?;
        // So far away that the clock cannot say it is never.
        Ok(Self(Instant::now().checked_add(timeout)))
    }

    /// Waits for `call`, but not longer than the caller does.
    ///
    /// # Errors
    /// 504 when the deadline has passed, and those of the call.
    pub(crate) async fn within<T>(
        self,
        call: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        match self.0 {
            None => call.await,
            Some(deadline) => tokio::time::timeout_at(deadline, call).await.unwrap_or_else(|_| {
                Err(ApiError::timeout("the caller's deadline has passed").with_code("deadline_exceeded"))
            }),
        }
    }
}

fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_those_of_grpc() {
        for (text, timeout) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("04m", Some(Duration::from_millis(4))),
            ("99999999u", Some(Duration::from_micros(99_999_999))),
            ("5n", Some(Duration::from_nanos(5))),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("", None),
            ("S", None),
            ("5", None),
            ("-5S", None),
            ("5s", None),
            ("123456789n", None),
            ("5ü", None),
        ] {
            assert_eq!(parse(text), timeout, "{text:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_is_dropped_when_nobody_waits_for_it() {
        let mut metadata = MetadataMap::new();
        assert_eq!(Deadline::of(&metadata).unwrap().within(async { Ok(1) }).await, Ok(1));
        metadata.insert("grpc-timeout", "20m".parse().unwrap());
        let deadline = Deadline::of(&metadata).unwrap();
        let error = deadline.within(std::future::pending::<Result<(), _>>()).await.unwrap_err();
        assert_eq!((error.status, error.code.as_deref()), (504, Some("deadline_exceeded")));
        metadata.insert("grpc-timeout", "soon".parse().unwrap());
        assert_eq!(Deadline::of(&metadata).unwrap_err().param.as_deref(), Some("grpc-timeout"));
    }
}
