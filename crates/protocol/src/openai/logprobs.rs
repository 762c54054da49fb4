//! Log-probabilities, in the form of completions and in that of chats.

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Log-probabilities of the tokens of a choice: four lists of the same length.
///
/// A token whose bytes are not UTF-8 by themselves is spelled `bytes:\xf0\x9f`, as OpenAI does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionLogprobs {
    /// Where each token's text begins, in characters from the start of the choice's text.
    #[serde(default)]
    pub text_offset: Vec<u32>,
    /// The log-probability of each token.
    #[serde(default)]
    pub token_logprobs: Vec<Option<f32>>,
    /// The tokens' texts.
    #[serde(default)]
    pub tokens: Vec<String>,
    /// The most probable tokens at each place.
    #[serde(default)]
    pub top_logprobs: Vec<TopLogprobs>,
}

/// The most probable tokens at one place, best first; a JSON object from text to log-probability.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    /// Two tokens may have one text; the better one is kept.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (i, (text, logprob)) in self.0.iter().enumerate() {
            if !self.0[..i].iter().any(|(earlier, _)| earlier == text) {
                map.serialize_entry(text, logprob)?;
            }
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for TopLogprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = TopLogprobs;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object from text to log-probability")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TopLogprobs, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(TopLogprobs(entries))
            }

            fn visit_unit<E>(self) -> Result<TopLogprobs, E> {
                Ok(TopLogprobs::default())
            }
        }
        deserializer.deserialize_any(Entries)
    }
}

impl CompletionLogprobs {
    /// Appends what a later chunk holds.
    pub fn extend(&mut self, later: Self) {
        self.text_offset.extend(later.text_offset);
        self.token_logprobs.extend(later.token_logprobs);
        self.tokens.extend(later.tokens);
        self.top_logprobs.extend(later.top_logprobs);
    }

    /// Returns the same in the form of chats.
    #[must_use]
    pub fn to_chat(&self) -> ChatLogprobs {
        let content = self
            .tokens
            .iter()
            .enumerate()
            .map(|(i, text)| {
                let (token, bytes) = spelled(text);
                ChatTokenLogprob {
                    token,
                    logprob: self
                        .token_logprobs
                        .get(i)
                        .copied()
                        .flatten()
                        .unwrap_or(wire_logprob(f32::NEG_INFINITY)),
                    bytes,
                    top_logprobs: self
                        .top_logprobs
                        .get(i)
                        .map(|top| {
                            top.0
                                .iter()
                                .map(|(text, logprob)| {
                                    let (token, bytes) = spelled(text);
                                    ChatTopLogprob { token, logprob: *logprob, bytes }
                                })
                                .collect()
                        })
                        .unwrap_or_default(),
                }
            })
            .collect();
        ChatLogprobs { content }
    }
}

/// Returns a log-probability that JSON can carry: impossible tokens are `-9999`, as OpenAI writes them.
#[must_use]
pub const fn wire_logprob(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

/// Log-probabilities of the tokens of a chat's message.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatLogprobs {
    /// One entry a token.
    pub content: Vec<ChatTokenLogprob>,
}

/// One token of a message.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatTokenLogprob {
    /// Its text.
    pub token: String,
    /// Its log-probability.
    pub logprob: f32,
    /// The bytes of its text.
    pub bytes: Vec<u8>,
    /// The most probable tokens at its place.
    pub top_logprobs: Vec<ChatTopLogprob>,
}

/// One of the most probable tokens at a place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatTopLogprob {
    /// Its text.
    pub token: String,
    /// Its log-probability.
    pub logprob: f32,
    /// The bytes of its text.
    pub bytes: Vec<u8>,
}

/// Returns a token's text and bytes, undoing `bytes:\x..`.
fn spelled(text: &str) -> (String, Vec<u8>) {
    if let Some(bytes) = text.strip_prefix("bytes:").and_then(escaped) {
        return (text.to_owned(), bytes);
    }
    (text.to_owned(), text.as_bytes().to_vec())
}

fn escaped(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for part in text.split("\\x").skip(1) {
        bytes.push(u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2)?);
    }
    (text.starts_with("\\x") && !bytes.is_empty()).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chats_carry_the_same_numbers_and_the_true_bytes() {
        let completion: CompletionLogprobs = serde_json::from_str(
            r#"{"tokens":["a","bytes:\\xf0\\x9f"],"token_logprobs":[-0.5,null],
                "top_logprobs":[{"z":-0.25,"a":-0.5},null],"text_offset":[0,1]}"#,
        )
        .expect("valid");
        let chat = completion.to_chat();
        assert_eq!(chat.content[0].bytes, b"a");
        assert_eq!(chat.content[0].top_logprobs[0].token, "z");
        assert_eq!(chat.content[0].top_logprobs[1].logprob, -0.5);
        assert_eq!(chat.content[1].bytes, [0xf0, 0x9f]);
        assert_eq!(chat.content[1].logprob, -9999.0);
        assert_eq!(spelled("bytes:\\xzz").1, b"bytes:\\xzz");
    }

    #[test]
    fn the_order_of_alternatives_is_kept() {
        let top = TopLogprobs(vec![("b".into(), -1.0), ("a".into(), -2.0), ("b".into(), -3.0)]);
        assert_eq!(serde_json::to_string(&top).expect("serialises"), r#"{"b":-1.0,"a":-2.0}"#);
    }
}
