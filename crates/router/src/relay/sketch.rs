//! What of a body the router must know to relay it, read in one pass that keeps nothing else.
//!
//! The engine checks the body with the same parser as the router's own, so nothing is judged here: whatever is unusual makes the
//! sketch fail, and the request goes the long way, where it is read as it must be or refused in the right words.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::chain::TextChain;
use microserving_client::Door;

/// A body as far as it is read.
#[derive(Debug, Default)]
pub(crate) struct Sketch<'a> {
    pub(crate) model: Option<Cow<'a, str>>,
    /// The prompt or the messages.
    pub(crate) chain: TextChain,
    /// Token ids in the prompt, if it is token ids.
    num_ids: usize,
    pub(crate) stream: bool,
    pub(crate) has_seed: bool,
    /// One choice, so that its tokens alone tell how the answer goes on.
    pub(crate) single: bool,
    /// The class that it waits in, if it has to.
    pub(crate) priority: i64,
    has_prompt: bool,
}

impl<'a> Sketch<'a> {
    /// Reads a body; nothing if there is something in it that is better read in full.
    pub(crate) fn read(body: &'a [u8], door: Door) -> Option<Self> {
        let mut deserializer = serde_json::Deserializer::from_slice(body);
        let sketch = deserializer.deserialize_map(BodyVisitor { door }).ok()?;
        deserializer.end().ok()?;
        sketch.has_prompt.then_some(sketch)
    }

    /// Guesses the prompt's length in tokens: a token of usual text has about four bytes.
    pub(crate) fn num_tokens(&self) -> u32 {
        let text_bytes = self.chain.num_bytes() - 4 * self.num_ids;
        u32::try_from(self.num_ids + text_bytes / 4).unwrap_or(u32::MAX).max(1)
    }

    /// As [`Sketch::num_tokens`], for so many of its first bytes.
    pub(crate) fn tokens_in(&self, num_bytes: usize) -> u32 {
        u32::try_from(num_bytes / 4).unwrap_or(u32::MAX)
    }
}

struct BodyVisitor {
    door: Door,
}

impl<'de> Visitor<'de> for BodyVisitor {
    type Value = Sketch<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a request")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Sketch<'de>, A::Error> {
        let mut sketch = Sketch { single: true, ..Sketch::default() };
        let mut salt: Option<Cow<'de, str>> = None;
        let mut seen = 0_u32;
        let mut once = |bit: u32| {
            let first = seen & (1 << bit) == 0;
            seen |= 1 << bit;
            // Who sends a field twice means who knows what.
            if first { Ok(()) } else { Err(A::Error::custom("a field is there twice")) }
        };
        while let Some(Text(key)) = map.next_key()? {
            match (&*key, self.door) {
                ("prompt", Door::Completions) | ("messages", Door::Chats) => {
                    once(0)?;
                    map.next_value_seed(Feed(&mut sketch))?;
                    sketch.has_prompt = true;
                }
                ("model", _) => {
                    once(1)?;
                    sketch.model = map.next_value::<Option<Text<'de>>>()?.map(|text| text.0);
                }
                ("stream", _) => {
                    once(2)?;
                    sketch.stream = map.next_value()?;
                }
                ("seed", _) => {
                    once(3)?;
                    map.next_value::<i64>()?;
                    sketch.has_seed = true;
                }
                ("n", _) => {
                    once(4)?;
                    sketch.single = map.next_value::<u32>()? == 1;
                }
                ("cache_salt", _) => {
                    once(5)?;
                    salt = map.next_value::<Option<Text<'de>>>()?.map(|text| text.0);
                }
                ("priority", _) => {
                    once(6)?;
                    sketch.priority = map.next_value::<Option<i64>>()?.unwrap_or(0);
                }
                // The router keeps the prompt's own text for an echo, and the time for a timeout.
                ("echo" | "timeout_seconds", _) => return Err(A::Error::custom("is read in full")),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        if let Some(salt) = salt {
            sketch.chain.set_apart(&salt);
        }
        Ok(sketch)
    }
}

/// Text that is borrowed where it stands as it is.
struct Text<'a>(Cow<'a, str>);

impl<'de> serde::Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }
}

/// Feeds whatever stands there to the chain: text as its bytes, numbers as four bytes each, as a token id has.
struct Feed<'s, 'a>(&'s mut Sketch<'a>);

impl Feed<'_, '_> {
    fn text(self, text: &str) {
        self.0.chain.feed(text.as_bytes());
        // Whose text ends here must not look like a longer one.
        self.0.chain.feed(&[0]);
    }

    fn id(self, id: u64) {
        self.0.num_ids += 1;
        #[allow(
            clippy::cast_possible_truncation,
            reason = "a token id is that short, and of others it is a hint"
        )]
        let id = id as u32;
        self.0.chain.feed(&id.to_le_bytes());
    }
}

impl<'de> DeserializeSeed<'de> for Feed<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Feed<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a prompt or messages")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.text(text);
        Ok(())
    }

    fn visit_u64<E>(self, id: u64) -> Result<(), E> {
        self.id(id);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Feed(&mut *self.0))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(Feed(&mut *self.0))?.is_some() {
            map.next_value_seed(Feed(&mut *self.0))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Option<Sketch<'_>> {
        Sketch::read(body.as_bytes(), Door::Completions)
    }

    #[test]
    fn what_matters_is_found_wherever_it_stands() {
        let sketch =
            read(r#"{"max_tokens":3,"stream":true,"model":"a\u0062","prompt":"12345678","x":{"seed":1}}"#)
                .expect("usual");
        assert_eq!((sketch.model.as_deref(), sketch.stream, sketch.has_seed), (Some("ab"), true, false));
        assert!(sketch.single && sketch.num_tokens() == 2);
        let sketch = read(r#"{"prompt":[1,2,3],"seed":-4,"n":2,"model":null}"#).expect("usual");
        assert_eq!((sketch.model, sketch.stream, sketch.has_seed, sketch.single), (None, false, true, false));
        assert_eq!(Sketch::read(br#"{"prompt":[1,2,3]}"#, Door::Completions).expect("usual").num_tokens(), 3);
    }

    #[test]
    fn prompts_that_begin_alike_have_names_in_common() {
        let long = "x".repeat(300);
        let names =
            |body: &str, door| Sketch::read(body.as_bytes(), door).expect("usual").chain.names().to_vec();
        let one = names(&format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}]}}"#), Door::Chats);
        let two = names(
            &format!(
                r#"{{"messages":[{{"role":"user","content":"{long}"}},{{"role":"assistant","content":"{long}"}}],"n":1}}"#
            ),
            Door::Chats,
        );
        assert_eq!(one[..2], two[..2]);
        let other = names(
            &format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}],"cache_salt":"t"}}"#),
            Door::Chats,
        );
        assert_ne!(one[0], other[0]);
    }

    #[test]
    fn the_unusual_is_left_to_others() {
        for body in [
            "",
            "x",
            "[]",
            "{}",
            r#"{"messages":[]}"#,
            r#"{"prompt":"a"} x"#,
            r#"{"prompt":null}"#,
            r#"{"prompt":[1.5]}"#,
            r#"{"prompt":[-1]}"#,
            r#"{"prompt":"a","prompt":"b"}"#,
            r#"{"prompt":"a","stream":"true"}"#,
            r#"{"prompt":"a","stream":null}"#,
            r#"{"prompt":"a","seed":null}"#,
            r#"{"prompt":"a","seed":"7"}"#,
            r#"{"prompt":"a","n":"2"}"#,
            r#"{"prompt":"a","echo":true}"#,
            r#"{"prompt":"a","timeout_seconds":3}"#,
            r#"{"prompt":"a","model":7}"#,
        ] {
            assert!(read(body).is_none(), "{body}");
        }
        assert!(Sketch::read(br#"{"prompt":"a"}"#, Door::Chats).is_none());
    }
}
