//! The calls' answers.

use microserving_protocol::{
    AbortResponse, AddrError, CommitResponse, CompletionChoice, CompletionLogprobs, CompletionResponse,
    EngineId, FinishReason, PauseResponse, PrepRecvResponse, PromptTokensDetails, RemoteSendResponse, SeqId,
    ServingStats, TopLogprobs, Usage, addr_from_text, addr_to_text,
};

use super::{BadMessage, ids, tokens};
use crate::wire;

impl TryFrom<PrepRecvResponse> for wire::PrepRecvResponse {
    type Error = AddrError;

    /// Fails if the address is not the text that an engine hands out.
    fn try_from(answer: PrepRecvResponse) -> Result<Self, AddrError> {
        let PrepRecvResponse { kv_addr_info, prefix_matched_length, lease_seconds, seq_id, engine_id } =
            answer;
        Ok(Self {
            kv_addr_info: addr_from_text(&kv_addr_info)?,
            prefix_matched_length,
            lease_seconds,
            seq_id: seq_id.map(|id| id.to_string()),
            engine_id: engine_id.map(|id| id.to_string()),
        })
    }
}

impl From<wire::PrepRecvResponse> for PrepRecvResponse {
    fn from(message: wire::PrepRecvResponse) -> Self {
        let wire::PrepRecvResponse { kv_addr_info, prefix_matched_length, lease_seconds, seq_id, engine_id } =
            message;
        Self {
            kv_addr_info: addr_to_text(&kv_addr_info),
            prefix_matched_length,
            lease_seconds,
            seq_id: seq_id.map(SeqId::from),
            engine_id: engine_id.map(EngineId::from),
        }
    }
}

/// Types whose fields are the same on both sides.
macro_rules! alike {
    ($($name:ident { $($field:ident),* })*) => {$(
        impl From<$name> for wire::$name {
            fn from(answer: $name) -> Self {
                let $name { $($field),* } = answer;
                Self { $($field),* }
            }
        }

        impl From<wire::$name> for $name {
            fn from(message: wire::$name) -> Self {
                let wire::$name { $($field),* } = message;
                Self { $($field),* }
            }
        }
    )*};
}

alike! {
    RemoteSendResponse {
        sent_tokens, cached_tokens, computed_tokens, bytes, transfer_seconds, exposed_transfer_seconds
    }
    AbortResponse { aborted }
    CommitResponse { committed_tokens }
    ServingStats {
        pattern, matched_tokens, received_tokens, computed_tokens, prefill_cached_tokens, prefill_computed_tokens,
        sent_tokens, sent_bytes, transfer_seconds, exposed_transfer_seconds, decode_engine, prefill_engine
    }
}

impl From<PauseResponse> for wire::PauseResponse {
    fn from(answer: PauseResponse) -> Self {
        let PauseResponse { token_ids, microserving } = answer;
        Self {
            token_ids: token_ids.iter().map(|tokens| ids(tokens)).collect(),
            microserving: microserving.map(Into::into),
        }
    }
}

impl From<wire::PauseResponse> for PauseResponse {
    fn from(message: wire::PauseResponse) -> Self {
        let wire::PauseResponse { token_ids, microserving } = message;
        Self {
            token_ids: token_ids.into_iter().map(|list| tokens(list.ids)).collect(),
            microserving: microserving.map(Into::into),
        }
    }
}

impl From<Usage> for wire::Usage {
    fn from(usage: Usage) -> Self {
        let Usage { prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details } = usage;
        let cached_tokens = prompt_tokens_details.map(|details| {
            let PromptTokensDetails { cached_tokens } = details;
            cached_tokens
        });
        Self { prompt_tokens, completion_tokens, total_tokens, cached_tokens }
    }
}

impl From<wire::Usage> for Usage {
    fn from(message: wire::Usage) -> Self {
        let wire::Usage { prompt_tokens, completion_tokens, total_tokens, cached_tokens } = message;
        let prompt_tokens_details = cached_tokens.map(|cached_tokens| PromptTokensDetails { cached_tokens });
        Self { prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details }
    }
}

impl From<CompletionResponse> for wire::CompletionResponse {
    fn from(answer: CompletionResponse) -> Self {
        // `object` is always the same.
        let CompletionResponse { id, object: _, created, model, choices, usage, microserving } = answer;
        Self {
            id,
            created,
            model,
            choices: choices.into_iter().map(Into::into).collect(),
            usage: usage.map(Into::into),
            microserving: microserving.map(Into::into),
        }
    }
}

impl TryFrom<wire::CompletionResponse> for CompletionResponse {
    type Error = BadMessage;

    fn try_from(message: wire::CompletionResponse) -> Result<Self, BadMessage> {
        let wire::CompletionResponse { id, created, model, choices, usage, microserving } = message;
        Ok(Self {
            id,
            object: "text_completion".to_owned(),
            created,
            model,
            choices: choices.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
            usage: usage.map(Into::into),
            microserving: microserving.map(Into::into),
        })
    }
}

impl From<CompletionChoice> for wire::Choice {
    fn from(choice: CompletionChoice) -> Self {
        let CompletionChoice { index, text, logprobs, finish_reason, token_ids } = choice;
        let finish_reason = match finish_reason {
            None => wire::FinishReason::Unspecified,
            Some(FinishReason::Stop) => wire::FinishReason::Stop,
            Some(FinishReason::Length) => wire::FinishReason::Length,
            Some(FinishReason::Preempt) => wire::FinishReason::Preempt,
        };
        Self {
            index,
            text,
            logprobs: logprobs.map(Into::into),
            finish_reason: finish_reason.into(),
            token_ids: token_ids.map(|tokens| ids(&tokens)),
        }
    }
}

impl TryFrom<wire::Choice> for CompletionChoice {
    type Error = BadMessage;

    fn try_from(message: wire::Choice) -> Result<Self, BadMessage> {
        let wire::Choice { index, text, logprobs, finish_reason, token_ids } = message;
        let reason = wire::FinishReason::try_from(finish_reason)
            .map_err(|_| BadMessage(format!("the finish reason {finish_reason} is unknown")))?;
        let finish_reason = match reason {
            wire::FinishReason::Unspecified => None,
            wire::FinishReason::Stop => Some(FinishReason::Stop),
            wire::FinishReason::Length => Some(FinishReason::Length),
            wire::FinishReason::Preempt => Some(FinishReason::Preempt),
        };
        Ok(Self {
            index,
            text,
            logprobs: logprobs.map(Into::into),
            finish_reason,
            token_ids: token_ids.map(|list| tokens(list.ids)),
        })
    }
}

impl From<CompletionLogprobs> for wire::Logprobs {
    fn from(logprobs: CompletionLogprobs) -> Self {
        let CompletionLogprobs { text_offset, token_logprobs, tokens, top_logprobs } = logprobs;
        let top = |TopLogprobs(entries): TopLogprobs| wire::TopLogprobs {
            entries: entries
                .into_iter()
                .map(|(token, logprob)| wire::TopLogprob { token, logprob })
                .collect(),
        };
        Self {
            text_offset,
            token_logprobs: token_logprobs.into_iter().map(|value| wire::Logprob { value }).collect(),
            tokens,
            top_logprobs: top_logprobs.into_iter().map(top).collect(),
        }
    }
}

impl From<wire::Logprobs> for CompletionLogprobs {
    fn from(message: wire::Logprobs) -> Self {
        let wire::Logprobs { text_offset, token_logprobs, tokens, top_logprobs } = message;
        let top = |wire::TopLogprobs { entries }| {
            TopLogprobs(
                entries.into_iter().map(|wire::TopLogprob { token, logprob }| (token, logprob)).collect(),
            )
        };
        Self {
            text_offset,
            token_logprobs: token_logprobs.into_iter().map(|wire::Logprob { value }| value).collect(),
            tokens,
            top_logprobs: top_logprobs.into_iter().map(top).collect(),
        }
    }
}
