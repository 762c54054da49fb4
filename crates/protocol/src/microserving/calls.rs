//! Bodies of the calls. Requests are read by `from_json` and written by `serde`; answers go both ways by `serde`.

use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use crate::lax::Fields;
use crate::openai::{CompletionRequest, ServingStats};
use crate::{ApiError, Attempt, EngineId, SeqId, TokenId};

/// The longest name of a sequence, in bytes.
const MAX_SEQ_ID_BYTES: usize = 256;
/// The longest deadline that a caller may set, in seconds.
const MAX_TIMEOUT_SECONDS: f64 = 86_400.0;

/// What ties the calls of one request together, and how long the caller waits.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CallOptions {
    /// The key. Read from `seq_id` or `user`; written as `user`, which every engine of this protocol understands.
    #[serde(rename = "user", skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<SeqId>,
    /// The number of the try; none is 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<Attempt>,
    /// When the caller gives up, counted from when the engine takes the call.
    #[serde(
        rename = "timeout_seconds",
        skip_serializing_if = "Option::is_none",
        serialize_with = "as_seconds"
    )]
    pub timeout: Option<Duration>,
}

impl CallOptions {
    /// Makes options of plain values, whatever wire they came over.
    ///
    /// # Errors
    /// 400 for a key or a deadline out of bounds.
    pub fn checked(
        seq_id: Option<String>,
        attempt: Option<u32>,
        timeout_seconds: Option<f64>,
    ) -> Result<Self, ApiError> {
        let timeout = timeout_seconds.map(checked_timeout).transpose()?;
        Ok(Self { seq_id: seq_id.map(checked_seq_id).transpose()?, attempt: attempt.map(Attempt), timeout })
    }

    fn from_fields(fields: &mut Fields) -> Result<Self, ApiError> {
        let attempt = fields.opt_u32("attempt")?.map(Attempt);
        let timeout = Self::timeout_from_fields(fields)?;
        Ok(Self { seq_id: seq_id(fields)?, attempt, timeout })
    }

    /// Takes `timeout_seconds` out of `fields`: also requests of OpenAI's API may have it, beside what OpenAI knows.
    ///
    /// # Errors
    /// 422 if it is no number, 400 if it is out of bounds.
    pub fn timeout_from_fields(fields: &mut Fields) -> Result<Option<Duration>, ApiError> {
        fields.opt_f64("timeout_seconds")?.map(checked_timeout).transpose()
    }
}

fn checked_timeout(seconds: f64) -> Result<Duration, ApiError> {
    if seconds > 0.0 && seconds <= MAX_TIMEOUT_SECONDS {
        return Ok(Duration::from_secs_f64(seconds));
    }
    let message = format!("timeout_seconds is {seconds}, must be in (0, {MAX_TIMEOUT_SECONDS}]");
    Err(ApiError::bad_request("timeout_seconds", message))
}

/// Reads `user` and `seq_id`, which are synonyms.
fn seq_id(fields: &mut Fields) -> Result<Option<SeqId>, ApiError> {
    let id = match (fields.opt_string("seq_id")?, fields.opt_string("user")?) {
        (Some(a), Some(b)) if a != b => {
            return Err(ApiError::bad_request(
                "seq_id",
                format!("seq_id is {a:?} and user is {b:?}: they must be equal"),
            ));
        }
        (a, b) => a.or(b),
    };
    id.map(checked_seq_id).transpose()
}

fn checked_seq_id(id: String) -> Result<SeqId, ApiError> {
    if id.is_empty() {
        return Err(ApiError::bad_request("seq_id", "seq_id is empty"));
    }
    if id.len() > MAX_SEQ_ID_BYTES {
        let message = format!("seq_id has {} bytes, must have at most {MAX_SEQ_ID_BYTES}", id.len());
        return Err(ApiError::bad_request("seq_id", message));
    }
    Ok(SeqId::from(id))
}

fn required_seq_id(fields: &mut Fields) -> Result<SeqId, ApiError> {
    seq_id(fields)?.ok_or_else(|| ApiError::unprocessable("seq_id is missing").with_param("seq_id"))
}

fn as_seconds<S: Serializer>(timeout: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match timeout {
        Some(timeout) => serializer.serialize_f64(timeout.as_secs_f64()),
        None => serializer.serialize_none(),
    }
}

/// `POST /microserving/prep_recv`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrepRecvRequest {
    /// The request that the prompt belongs to.
    #[serde(flatten)]
    pub completion: CompletionRequest,
    /// The key and the deadline.
    #[serde(flatten)]
    pub call: CallOptions,
    /// Where the received range ends, as the caller wrote it; see [`crate::normalise_prep_end`].
    pub end: i64,
    /// The transfer ends in a commit; nothing will be generated.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub commit: bool,
    /// Tokens to make room for past `end`.
    #[serde(skip_serializing_if = "is_zero")]
    pub reserve_tokens: u32,
}

impl PrepRecvRequest {
    /// Reads the body.
    ///
    /// # Errors
    /// 422 for wrong types, 400 for what is out of bounds by itself (positions are checked later, against the prompt).
    pub fn from_json(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let end = fields.int("end")?;
        let commit = fields.opt_bool("commit")?.unwrap_or(false);
        let reserve_tokens = fields.opt_u32("reserve_tokens")?.unwrap_or(0);
        let (completion, call) = request(&mut fields)?;
        Ok(Self { completion, call, end, commit, reserve_tokens })
    }
}

/// The answer to `prep_recv`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrepRecvResponse {
    /// The address in base64, opaque to all but engines; empty when nothing is to be sent.
    #[serde(rename = "kv_append_metadata", alias = "kv_addr_info")]
    pub kv_addr_info: String,
    /// Tokens that the engine holds already; `<= end`.
    pub prefix_matched_length: u32,
    /// How long the reservation stands without a sign of life.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_seconds: Option<f64>,
    /// The key under which it stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<SeqId>,
    /// Who answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_id: Option<EngineId>,
}

/// `POST /microserving/remote_send`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RemoteSendRequest {
    /// The request that the prompt belongs to.
    #[serde(flatten)]
    pub completion: CompletionRequest,
    /// The key and the deadline.
    #[serde(flatten)]
    pub call: CallOptions,
    /// The first position to send, as the caller wrote it; see [`crate::normalise_send_range`].
    pub begin: i64,
    /// The position after the last.
    pub end: i64,
    /// The address, as `prep_recv` answered it.
    pub kv_addr_info: String,
    /// The receiver's PE offset under PGAS transports.
    pub recv_rank: i64,
}

impl RemoteSendRequest {
    /// Reads the body.
    ///
    /// # Errors
    /// As [`PrepRecvRequest::from_json`].
    pub fn from_json(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let begin = fields.int("begin")?;
        let end = fields.int("end")?;
        let kv_addr_info = fields.string("kv_addr_info")?;
        let recv_rank = fields.int("recv_rank")?;
        let (completion, call) = request(&mut fields)?;
        Ok(Self { completion, call, begin, end, kv_addr_info, recv_rank })
    }
}

/// The answer to `remote_send`: the receiver can read all of the range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RemoteSendResponse {
    /// Tokens delivered.
    pub sent_tokens: u32,
    /// Tokens of `[0, end)` that were in this engine's context cache.
    pub cached_tokens: u32,
    /// Tokens of `[0, end)` that were computed for this call.
    pub computed_tokens: u32,
    /// Bytes written.
    pub bytes: u64,
    /// Time spent writing.
    pub transfer_seconds: f64,
    /// The part of it that no computing hid.
    pub exposed_transfer_seconds: f64,
}

/// `POST /microserving/start_generate`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StartGenerateRequest {
    /// The request to serve.
    #[serde(flatten)]
    pub completion: CompletionRequest,
    /// The key and the deadline.
    #[serde(flatten)]
    pub call: CallOptions,
    /// Where prefilling begins, as the caller wrote it; see [`crate::normalise_begin`].
    pub begin: i64,
    /// Where the prompt ends and replayed output begins; none is the end of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generated_from: Option<u32>,
    /// What the sampler calls the first choice; none is 0. One choice of several continues with the draws that are its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub choice_index: Option<u32>,
    /// Attach to a running stream and replay its tokens from this index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume_from: Option<u32>,
}

impl StartGenerateRequest {
    /// Reads the body.
    ///
    /// # Errors
    /// As [`PrepRecvRequest::from_json`].
    pub fn from_json(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let begin = fields.int("begin")?;
        let generated_from = fields.opt_u32("generated_from")?;
        let choice_index = fields.opt_u32("choice_index")?;
        let resume_from = fields.opt_u32("resume_from")?;
        let (completion, call) = request(&mut fields)?;
        Self { completion, call, begin, generated_from, choice_index, resume_from }.checked()
    }

    /// Checks what is out of bounds by itself.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn checked(self) -> Result<Self, ApiError> {
        if let (Some(from), Some(tokens)) = (self.generated_from, self.completion.prompt.tokens())
            && (from == 0 || from as usize > tokens.len())
        {
            return Err(ApiError::bad_request(
                "generated_from",
                format!("generated_from is {from}, must be in [1, len] (len is {})", tokens.len()),
            ));
        }
        Ok(self)
    }
}

/// Reads the common part. On these calls `user` is the key, so it does not stay in the completion request.
fn request(fields: &mut Fields) -> Result<(CompletionRequest, CallOptions), ApiError> {
    let call = CallOptions::from_fields(fields)?;
    Ok((CompletionRequest::from_fields(fields)?, call))
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// Bodies that name a sequence and nothing else of their own.
macro_rules! sequence_request {
    ($($(#[$meta:meta])* $name:ident;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        pub struct $name {
            /// The sequence. Read from `seq_id` or `user`.
            pub seq_id: SeqId,
            /// The try; none is any.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub attempt: Option<Attempt>,
        }

        impl $name {
            /// Names a sequence, whatever its attempt.
            #[must_use]
            pub const fn new(seq_id: SeqId) -> Self {
                Self { seq_id, attempt: None }
            }

            /// Names a sequence by plain values, whatever wire they came over.
            ///
            /// # Errors
            /// 400 if `seq_id` is empty or too long.
            pub fn checked(seq_id: String, attempt: Option<u32>) -> Result<Self, ApiError> {
                Ok(Self { seq_id: checked_seq_id(seq_id)?, attempt: attempt.map(Attempt) })
            }

            /// Reads the body.
            ///
            /// # Errors
            /// 422 if `seq_id` is missing or no string, 400 if it is empty or too long.
            pub fn from_json(body: &[u8]) -> Result<Self, ApiError> {
                let mut fields = Fields::parse(body)?;
                Ok(Self {
                    seq_id: required_seq_id(&mut fields)?,
                    attempt: fields.opt_u32("attempt")?.map(Attempt),
                })
            }
        }
    )*};
}

sequence_request! {
    /// `POST /microserving/abort`: gives the sequence up, on whichever side it is. Idempotent.
    AbortRequest;
    /// `POST /microserving/commit`: keeps received KV in the context cache without generating.
    CommitRequest;
    /// `POST /microserving/pause`: stops decoding and answers the tokens so far.
    PauseRequest;
}

/// The answer to `abort`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortResponse {
    /// Something was there to be aborted.
    pub aborted: bool,
}

/// The answer to `commit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitResponse {
    /// Tokens of the prompt that are in the context cache now.
    pub committed_tokens: u32,
}

/// The answer to `pause`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PauseResponse {
    /// The tokens generated so far, one list a choice.
    pub token_ids: Vec<Vec<TokenId>>,
    /// What it took so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microserving: Option<ServingStats>,
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn line<T: Serialize>(outcome: Result<T, ApiError>) -> String {
        match outcome {
            Ok(request) => serde_json::to_string(&request).expect("serialises"),
            Err(error) => format!("{error} [{}]", error.param.as_deref().unwrap_or_default()),
        }
    }

    fn prep(body: &str, expected: &Expect) {
        expected.assert_eq(&line(PrepRecvRequest::from_json(body.as_bytes())));
    }

    #[test]
    fn prep_recv() {
        prep(r#"{"prompt":[1,2],"end":-1,"stream":false}"#, &expect![[r#"{"prompt":[1,2],"n":1,"end":-1}"#]]);
        prep(
            r#"{"prompt":[1,2],"end":"-1","user":"k","attempt":2.0,"commit":true,"reserve_tokens":64,"timeout_seconds":1.5}"#,
            &expect![[
                r#"{"prompt":[1,2],"n":1,"user":"k","attempt":2,"timeout_seconds":1.5,"end":-1,"commit":true,"reserve_tokens":64}"#
            ]],
        );
        prep(
            r#"{"prompt":[1,2],"end":1,"seq_id":"k","user":"k"}"#,
            &expect![[r#"{"prompt":[1,2],"n":1,"user":"k","end":1}"#]],
        );
        prep(
            r#"{"prompt":[1,2],"end":1,"seq_id":"k","user":"l"}"#,
            &expect![[r#"400: seq_id is "k" and user is "l": they must be equal [seq_id]"#]],
        );
        prep(r#"{"prompt":[1,2],"end":1,"seq_id":""}"#, &expect!["400: seq_id is empty [seq_id]"]);
        prep(
            r#"{"prompt":[1,2],"end":1,"seq_id":7}"#,
            &expect!["422: seq_id is a number, must be a string [seq_id]"],
        );
        prep(r#"{"prompt":[1,2]}"#, &expect!["422: end is missing [end]"]);
        prep(r#"{"prompt":[1,2],"end":1.5}"#, &expect!["422: end is 1.5, must be a whole number [end]"]);
        prep(r#"{"prompt":[1,2],"end":null}"#, &expect!["422: end is missing [end]"]);
        prep(
            r#"{"prompt":[1,2],"end":1,"attempt":-1}"#,
            &expect!["400: attempt is -1, must be in [0, 4294967295] [attempt]"],
        );
        prep(
            r#"{"prompt":[1,2],"end":1,"timeout_seconds":0}"#,
            &expect!["400: timeout_seconds is 0, must be in (0, 86400] [timeout_seconds]"],
        );
        prep(
            r#"{"prompt":[1,2],"end":1,"timeout_seconds":"nan"}"#,
            &expect!["400: timeout_seconds is NaN, must be finite [timeout_seconds]"],
        );
        prep(r#"{"prompt":[],"end":0}"#, &expect!["400: prompt is empty [prompt]"]);
    }

    #[test]
    fn remote_send() {
        let check = |body: &str, expected: &Expect| {
            expected.assert_eq(&line(RemoteSendRequest::from_json(body.as_bytes())));
        };
        check(
            r#"{"prompt":[1,2],"begin":0,"end":-1,"kv_addr_info":"AA==","recv_rank":1,"user":"k"}"#,
            &expect![[
                r#"{"prompt":[1,2],"n":1,"user":"k","begin":0,"end":-1,"kv_addr_info":"AA==","recv_rank":1}"#
            ]],
        );
        check(
            r#"{"prompt":[1,2],"begin":0,"end":-1,"recv_rank":1}"#,
            &expect!["422: kv_addr_info is missing [kv_addr_info]"],
        );
        check(
            r#"{"prompt":[1,2],"begin":0,"end":-1,"kv_addr_info":"AA=="}"#,
            &expect!["422: recv_rank is missing [recv_rank]"],
        );
    }

    #[test]
    fn start_generate() {
        let check = |body: &str, expected: &Expect| {
            expected.assert_eq(&line(StartGenerateRequest::from_json(body.as_bytes())));
        };
        check(
            r#"{"prompt":[1,2],"begin":"1","generated_from":1,"resume_from":0,"seed":5}"#,
            &expect![[r#"{"prompt":[1,2],"seed":5,"n":1,"begin":1,"generated_from":1,"resume_from":0}"#]],
        );
        check(
            r#"{"prompt":[1,2],"begin":0,"choice_index":"3"}"#,
            &expect![[r#"{"prompt":[1,2],"n":1,"begin":0,"choice_index":3}"#]],
        );
        check(
            r#"{"prompt":[1,2],"begin":0,"choice_index":-1}"#,
            &expect!["400: choice_index is -1, must be in [0, 4294967295] [choice_index]"],
        );
        check(
            r#"{"prompt":[1,2],"begin":1,"generated_from":3}"#,
            &expect!["400: generated_from is 3, must be in [1, len] (len is 2) [generated_from]"],
        );
        check(r#"{"prompt":[1,2]}"#, &expect!["422: begin is missing [begin]"]);
    }

    #[test]
    fn the_mlc_body_reads_on_every_call() {
        let body = crate::openai::MLC_BODY.replacen(
            '{',
            r#"{"begin": 0, "end": -1, "kv_addr_info": "", "recv_rank": 2,"#,
            1,
        );
        let prep = PrepRecvRequest::from_json(body.as_bytes()).expect("valid");
        assert_eq!(prep.call.seq_id, Some(SeqId::from("cmpl-9e71")));
        assert_eq!(prep.completion.user, None);
        assert!(RemoteSendRequest::from_json(body.as_bytes()).is_ok());
        assert!(StartGenerateRequest::from_json(body.as_bytes()).is_ok());
    }

    #[test]
    fn answers() {
        let prep: PrepRecvResponse =
            serde_json::from_str(r#"{"kv_append_metadata":"AA==","prefix_matched_length":3}"#)
                .expect("MLC's answer");
        assert_eq!(
            (prep.kv_addr_info.as_str(), prep.prefix_matched_length, &prep.seq_id),
            ("AA==", 3, &None)
        );
        assert_eq!(
            serde_json::from_str::<RemoteSendResponse>("{}").expect("MLC's answer"),
            RemoteSendResponse::default()
        );
        let abort = AbortRequest::from_json(br#"{"user":"k"}"#).expect("valid");
        assert_eq!(serde_json::to_string(&abort).expect("serialises"), r#"{"seq_id":"k"}"#);
        assert_eq!(CommitRequest::from_json(b"{}").expect_err("no key").status, 422);
    }
}
