//! The calls' requests.

use microserving_protocol::{
    AbortRequest, AddrError, ApiError, Attempt, CallOptions, CommitRequest, CompletionRequest, PauseRequest,
    PrepRecvRequest, RemoteSendRequest, SeqId, StartGenerateRequest, addr_from_text, addr_to_text,
};

use crate::wire;

impl From<&CallOptions> for wire::CallOptions {
    fn from(call: &CallOptions) -> Self {
        let CallOptions { seq_id, attempt, timeout } = call;
        Self {
            seq_id: seq_id.as_ref().map(ToString::to_string),
            attempt: attempt.map(|attempt| attempt.0),
            timeout_seconds: timeout.map(|timeout| timeout.as_secs_f64()),
        }
    }
}

impl TryFrom<wire::CallOptions> for CallOptions {
    type Error = ApiError;

    fn try_from(message: wire::CallOptions) -> Result<Self, ApiError> {
        let wire::CallOptions { seq_id, attempt, timeout_seconds } = message;
        Self::checked(seq_id, attempt, timeout_seconds)
    }
}

fn common(
    completion: Option<wire::CompletionRequest>,
    call: Option<wire::CallOptions>,
) -> Result<(CompletionRequest, CallOptions), ApiError> {
    // The key first, as the reader of JSON does: with two things wrong, both wires name the same one.
    let call = call.unwrap_or_default().try_into()?;
    Ok((completion.unwrap_or_default().try_into()?, call))
}

impl From<&PrepRecvRequest> for wire::PrepRecvRequest {
    fn from(request: &PrepRecvRequest) -> Self {
        let PrepRecvRequest { completion, call, end, commit, reserve_tokens } = request;
        Self {
            completion: Some(completion.into()),
            call: Some(call.into()),
            end: *end,
            commit: *commit,
            reserve_tokens: *reserve_tokens,
        }
    }
}

impl TryFrom<wire::PrepRecvRequest> for PrepRecvRequest {
    type Error = ApiError;

    fn try_from(message: wire::PrepRecvRequest) -> Result<Self, ApiError> {
        let wire::PrepRecvRequest { completion, call, end, commit, reserve_tokens } = message;
        let (completion, call) = common(completion, call)?;
        Ok(Self { completion, call, end, commit, reserve_tokens })
    }
}

impl TryFrom<&RemoteSendRequest> for wire::RemoteSendRequest {
    type Error = AddrError;

    /// Fails if the address is not the text that an engine hands out.
    fn try_from(request: &RemoteSendRequest) -> Result<Self, AddrError> {
        let RemoteSendRequest { completion, call, begin, end, kv_addr_info, recv_rank } = request;
        Ok(Self {
            completion: Some(completion.into()),
            call: Some(call.into()),
            begin: *begin,
            end: *end,
            kv_addr_info: addr_from_text(kv_addr_info)?,
            recv_rank: *recv_rank,
        })
    }
}

impl TryFrom<wire::RemoteSendRequest> for RemoteSendRequest {
    type Error = ApiError;

    fn try_from(message: wire::RemoteSendRequest) -> Result<Self, ApiError> {
        let wire::RemoteSendRequest { completion, call, begin, end, kv_addr_info, recv_rank } = message;
        let (completion, call) = common(completion, call)?;
        Ok(Self { completion, call, begin, end, kv_addr_info: addr_to_text(&kv_addr_info), recv_rank })
    }
}

impl From<&StartGenerateRequest> for wire::StartGenerateRequest {
    fn from(request: &StartGenerateRequest) -> Self {
        let StartGenerateRequest { completion, call, begin, generated_from, choice_index, resume_from } =
            request;
        Self {
            completion: Some(completion.into()),
            call: Some(call.into()),
            begin: *begin,
            generated_from: *generated_from,
            resume_from: *resume_from,
            choice_index: *choice_index,
        }
    }
}

impl TryFrom<wire::StartGenerateRequest> for StartGenerateRequest {
    type Error = ApiError;

    fn try_from(message: wire::StartGenerateRequest) -> Result<Self, ApiError> {
        let wire::StartGenerateRequest { completion, call, begin, generated_from, resume_from, choice_index } =
            message;
        let (completion, call) = common(completion, call)?;
        Self { completion, call, begin, generated_from, choice_index, resume_from }.checked()
    }
}

fn sequence(seq_id: &SeqId, attempt: Option<Attempt>) -> wire::SequenceRequest {
    wire::SequenceRequest { seq_id: seq_id.to_string(), attempt: attempt.map(|attempt| attempt.0) }
}

/// The calls that name a sequence and nothing else.
macro_rules! sequence_calls {
    ($($request:ident),*) => {$(
        impl From<&$request> for wire::SequenceRequest {
            fn from(request: &$request) -> Self {
                let $request { seq_id, attempt } = request;
                sequence(seq_id, *attempt)
            }
        }

        impl TryFrom<wire::SequenceRequest> for $request {
            type Error = ApiError;

            fn try_from(message: wire::SequenceRequest) -> Result<Self, ApiError> {
                let wire::SequenceRequest { seq_id, attempt } = message;
                Self::checked(seq_id, attempt)
            }
        }
    )*};
}

sequence_calls!(AbortRequest, CommitRequest, PauseRequest);
