//! Writing the bodies of calls.

use bytes::Bytes;
use memchr::memmem;
use microserving_protocol::{
    CompletionRequest, PrepRecvRequest, Prompt, RemoteSendRequest, StartGenerateRequest, TokenIds,
};
use serde::Serialize;

/// How a prompt without tokens is written. Inside of a text its quotes would be escaped, so where it stands first is the prompt's place.
const NO_PROMPT: &[u8] = br#""prompt":[]"#;

/// A body that carries a prompt.
pub(crate) trait Prompted: Serialize + Clone + Sync {
    /// Returns the part with the prompt.
    fn completion(&mut self) -> &mut CompletionRequest;
}

impl Prompted for CompletionRequest {
    fn completion(&mut self) -> &mut CompletionRequest {
        self
    }
}

macro_rules! prompted {
    ($($request:ty),+) => {$(
        impl Prompted for $request {
            fn completion(&mut self) -> &mut CompletionRequest {
                &mut self.completion
            }
        }
    )+};
}

prompted!(PrepRecvRequest, RemoteSendRequest, StartGenerateRequest);

/// Writes a body in parts that follow each other. The digits of its prompt are written once for all bodies that share its tokens: a prompt goes
/// to two engines in three calls.
pub(crate) fn with_prompt(body: &impl Prompted) -> serde_json::Result<Vec<Bytes>> {
    let mut rest = body.clone();
    let prompt = &mut rest.completion().prompt;
    let Prompt::Tokens(tokens) = std::mem::replace(prompt, Prompt::Tokens(TokenIds::default())) else {
        return whole(body);
    };
    let rest = Bytes::from(serde_json::to_vec(&rest)?);
    match memmem::find(&rest, NO_PROMPT) {
        Some(at) => {
            let at = at + NO_PROMPT.len();
            Ok(vec![rest.slice(..at - b"[]".len()), tokens.json(), rest.slice(at..)])
        }
        None => whole(body),
    }
}

/// Writes a body in one part.
pub(crate) fn whole(body: &impl Serialize) -> serde_json::Result<Vec<Bytes>> {
    Ok(vec![serde_json::to_vec(body)?.into()])
}

#[cfg(test)]
mod tests {
    use microserving_protocol::{CallOptions, TokenId};

    use super::*;

    fn check(body: &impl Prompted) {
        let parts = with_prompt(body).unwrap();
        assert_eq!(parts.concat(), serde_json::to_vec(body).unwrap());
    }

    #[test]
    fn parts_make_the_body() {
        let hard = r#"a "prompt":[] in a name"#;
        for tokens in [vec![], vec![7], (0..500).collect::<Vec<_>>()] {
            let tokens: TokenIds = tokens.into_iter().map(TokenId).collect::<Vec<_>>().into();
            for model in [None, Some(hard.to_owned())] {
                let completion = CompletionRequest {
                    model,
                    stop: vec![hard.to_owned()],
                    ..CompletionRequest::new(Prompt::Tokens(tokens.clone()))
                };
                check(&completion);
                check(&PrepRecvRequest {
                    completion,
                    call: CallOptions::default(),
                    end: 3,
                    commit: true,
                    reserve_tokens: 0,
                });
            }
        }
        check(&CompletionRequest::new(Prompt::Text(hard.to_owned())));
    }

    #[test]
    fn the_digits_are_shared() {
        let completion = CompletionRequest::new(Prompt::Tokens(vec![TokenId(1), TokenId(2)].into()));
        let digits = || with_prompt(&completion).unwrap()[1].as_ptr();
        assert_eq!(digits(), digits());
    }
}
