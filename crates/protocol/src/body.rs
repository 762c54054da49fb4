//! Parsing the body of a request: JSON values, but for a prompt of token ids, which is most of a body where there is one. As values, each of
//! its numbers would take 32 bytes and a branch or two, three times a request.

use std::fmt;

use memchr::memmem;
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::TokenId;

/// The field that may hold many token ids.
pub(crate) const PROMPT: &str = "prompt";

/// A parsed body.
pub(crate) enum Body {
    /// An object, without its field [`PROMPT`] if that is a list of token ids.
    Object {
        map: Map<String, Value>,
        prompt: Option<Vec<TokenId>>,
    },
    Other(Value),
}

impl Body {
    /// Parses a body. The ids of a prompt are lifted out first, which is several times as quick as asking a parser for each of them.
    pub(crate) fn parse(text: &[u8]) -> serde_json::Result<Self> {
        if let Some((ids, rest)) = lift_ids(text)
            && let Ok(Self::Object { map, prompt: Some(_) }) = serde_json::from_slice(&rest)
        {
            return Ok(Self::Object { map, prompt: Some(ids) });
        }
        serde_json::from_slice(text)
    }
}

/// Takes the ids of the prompt out of a body, and returns it with an empty list in their place; nothing if there is any doubt which list is the prompt's.
///
/// There is none if the name is written once in the whole body, nothing is written by code points, and the rest turns out to have a prompt: a name
/// of one's own may end in an escaped quote and these letters, or be within another field, but then the rest has no other that could be the prompt.
fn lift_ids(text: &[u8]) -> Option<(Vec<TokenId>, Vec<u8>)> {
    const NAME: &[u8] = br#""prompt""#;
    let behind_name = memmem::find(text, NAME)? + NAME.len();
    let colon = skip_space(text, behind_name);
    let open = skip_space(text, colon + 1);
    if text.get(colon) != Some(&b':') || text.get(open) != Some(&b'[') {
        return None;
    }
    let (ids, end) = read_ids(text, open + 1)?;
    let (before, behind) = (&text[..open], &text[end..]);
    if memmem::find(behind, NAME).is_some()
        || [before, behind].iter().any(|part| memmem::find(part, br"\u").is_some())
    {
        return None;
    }
    Some((ids, [before, b"[]", behind].concat()))
}

/// Reads ids up to the end of their list, and returns where that is; nothing if there is anything else among them.
fn read_ids(text: &[u8], mut at: usize) -> Option<(Vec<TokenId>, usize)> {
    // Most ids of a vocabulary have four or five digits, and a comma.
    let mut ids = Vec::with_capacity(memchr::memchr(b']', text.get(at..)?)? / 5);
    loop {
        at = skip_space(text, at);
        let first = at;
        let mut id = 0_u32;
        while let Some(digit) = text.get(at).map(|byte| byte.wrapping_sub(b'0')).filter(|digit| *digit < 10) {
            id = id.checked_mul(10)?.checked_add(digit.into())?;
            at += 1;
        }
        // No digits, or a zero in front of others.
        if at == first || (text[first] == b'0' && at > first + 1) {
            return None;
        }
        ids.push(TokenId(id));
        at = skip_space(text, at);
        at += 1;
        match text.get(at - 1)? {
            b',' => {}
            b']' => return Some((ids, at)),
            _ => return None,
        }
    }
}

fn skip_space(text: &[u8], at: usize) -> usize {
    let is_space = |byte: &&u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    at + text.get(at..).unwrap_or_default().iter().take_while(is_space).count()
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BodyVisitor)
    }
}

/// A list of nothing but token ids, or whatever else stands in its place.
enum List {
    Ids(Vec<TokenId>),
    Other(Value),
}

impl<'de> Deserialize<'de> for List {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListVisitor)
    }
}

/// One element of a list.
enum Item {
    Id(TokenId),
    Other(Value),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemVisitor)
    }
}

struct BodyVisitor;
struct ListVisitor;
struct ItemVisitor;

/// The kinds of values that a visitor has nothing special for, made into what `$wrap` makes of a [`Value`].
macro_rules! values {
    ($wrap:path: $($scalar:ident($type:ty)),*) => {
        $(fn $scalar<E: Error>(self, value: $type) -> Result<Self::Value, E> {
            Ok($wrap(Value::from(value)))
        })*

        fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
            Ok($wrap(Value::Null))
        }

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("any JSON value")
        }
    };
}

impl<'de> Visitor<'de> for BodyVisitor {
    type Value = Body;

    values!(Body::Other: visit_bool(bool), visit_u64(u64), visit_i64(i64), visit_f64(f64), visit_str(&str), visit_string(String));

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Body, A::Error> {
        Value::deserialize(SeqAccessDeserializer::new(seq)).map(Body::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Body, A::Error> {
        let (mut map, mut prompt) = (Map::new(), None);
        while let Some(key) = entries.next_key::<String>()? {
            if key != PROMPT {
                map.insert(key, entries.next_value()?);
                continue;
            }
            // As with every other field, the last one counts if there are several.
            match entries.next_value()? {
                List::Ids(ids) => {
                    map.shift_remove(PROMPT);
                    prompt = Some(ids);
                }
                List::Other(value) => {
                    prompt = None;
                    map.insert(key, value);
                }
            }
        }
        Ok(Body::Object { map, prompt })
    }
}

impl<'de> Visitor<'de> for ListVisitor {
    type Value = List;

    values!(List::Other: visit_bool(bool), visit_u64(u64), visit_i64(i64), visit_f64(f64), visit_str(&str), visit_string(String));

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<List, A::Error> {
        let mut ids = Vec::new();
        while let Some(item) = items.next_element()? {
            match item {
                Item::Id(id) => ids.push(id),
                Item::Other(value) => {
                    let mut values: Vec<Value> = ids.into_iter().map(|id: TokenId| id.0.into()).collect();
                    values.push(value);
                    while let Some(value) = items.next_element()? {
                        values.push(value);
                    }
                    return Ok(List::Other(Value::Array(values)));
                }
            }
        }
        Ok(List::Ids(ids))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<List, A::Error> {
        Value::deserialize(MapAccessDeserializer::new(map)).map(List::Other)
    }
}

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = Item;

    values!(Item::Other: visit_bool(bool), visit_i64(i64), visit_f64(f64), visit_str(&str), visit_string(String));

    fn visit_u64<E: Error>(self, value: u64) -> Result<Item, E> {
        Ok(u32::try_from(value).map_or_else(|_| Item::Other(value.into()), |id| Item::Id(TokenId(id))))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Item, A::Error> {
        Value::deserialize(SeqAccessDeserializer::new(seq)).map(Item::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Item, A::Error> {
        Value::deserialize(MapAccessDeserializer::new(map)).map(Item::Other)
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    /// Parses both ways, and returns whether the ids were read as such.
    fn check(body: &str) -> bool {
        let plain: Result<Value, _> = serde_json::from_str(body);
        match (Body::parse(body.as_bytes()), plain) {
            (Ok(Body::Object { mut map, prompt }), Ok(Value::Object(plain))) => {
                let found = prompt.is_some();
                if let Some(ids) = prompt {
                    let ids = ids.into_iter().map(|id| Value::from(id.0)).collect();
                    assert!(map.insert(PROMPT.into(), Value::Array(ids)).is_none(), "{body}");
                }
                assert_eq!(map, plain, "{body}");
                found
            }
            (Ok(Body::Other(value)), Ok(plain)) => {
                assert_eq!(value, plain, "{body}");
                false
            }
            (Err(error), Err(plain)) => {
                assert_eq!(error.to_string(), plain.to_string(), "{body}");
                false
            }
            (parsed, plain) => panic!("{body}: {} beside {plain:?}", parsed.is_ok()),
        }
    }

    /// Objects whose names and values look like prompts, some of them twice.
    fn objects() -> impl Strategy<Value = String> {
        let leaves = [
            "1",
            "[]",
            "[1,2]",
            "[ 3 ,4 ]",
            "[5,-6]",
            r#""prompt""#,
            r#""\"prompt""#,
            r#"["prompt"]"#,
            "null",
        ];
        let names = ["prompt", r"pr\u006fmpt", "a", r#"say \"prompt"#];
        let leaf = select(leaves.to_vec()).prop_map(str::to_owned).boxed();
        let object = move |value: BoxedStrategy<String>| {
            let field =
                (select(names.to_vec()), value).prop_map(|(name, value)| format!(r#""{name}":{value}"#));
            vec(field, 0..4).prop_map(|fields| format!("{{{}}}", fields.join(","))).boxed()
        };
        object(leaf.prop_recursive(2, 8, 3, object).boxed())
    }

    proptest! {
        #[test]
        fn no_body_is_taken_for_another(body in objects()) {
            check(&body);
        }
    }

    #[test]
    fn ids_are_lifted_out_where_the_list_is_surely_the_prompts() {
        let lifted = |body: &str| {
            let (ids, rest) = lift_ids(body.as_bytes())?;
            Some((ids.len(), String::from_utf8(rest).expect("text")))
        };
        let (plain, spaced) = (r#"{"prompt":[1,22],"n":1}"#, r#"{"n":1, "prompt": [ 1, 22 ] }"#);
        assert_eq!(lifted(plain), Some((2, r#"{"prompt":[],"n":1}"#.to_owned())));
        assert_eq!(lifted(spaced), Some((2, r#"{"n":1, "prompt": [] }"#.to_owned())));
        for body in [
            r#"{"prompt":[1],"stop":"\u00e4"}"#,
            r#"{"prompt":"x"}"#,
            r#"{"prompt":[]}"#,
            r#"{"prompt":[-1]}"#,
        ] {
            assert_eq!(lifted(body), None, "{body}");
        }
    }

    #[test]
    fn a_body_is_what_its_values_are() {
        for ids in ["[]", "[0]", "[1,2,3]", "[4294967295]", " [ 1 , 2 ] "] {
            assert!(check(&format!(r#"{{"a":1,"prompt":{ids},"b":[1,"x"]}}"#)), "{ids}");
        }
        for other in [
            "null",
            "true",
            "7",
            "-7",
            "1.5",
            r#""text""#,
            r#""\u00e4\n""#,
            "{}",
            r#"{"a":[1]}"#,
            "[1,2.0]",
            "[-1]",
            "[4294967296]",
            r#"[1,"2"]"#,
            "[[1,2]]",
            r#"["a"]"#,
            "[1,null,{}]",
            "[true]",
            "1e400",
            "[1",
            "[1,]",
            "",
            "[01]",
            "18446744073709551616",
        ] {
            assert!(!check(&format!(r#"{{"prompt":{other}}}"#)), "{other}");
            assert!(!check(other), "{other}");
        }
        assert!(check(r#"{"prompt":"a","prompt":[1]}"#));
        assert!(!check(r#"{"prompt":[1],"prompt":"a"}"#));
        assert!(!check(r#"{"a":1} trailing"#));
        // What looks like the prompt's list and is another's.
        for (body, found) in [
            (r#"{"say \"prompt":[1,2]}"#, false),
            (r#"{"say \"prompt":[1,2],"prompt":[3]}"#, true),
            (r#"{"x":{"prompt":[1,2]}}"#, false),
            (r#"{"x":{"prompt":[1,2]},"prompt":[3]}"#, true),
            (r#"{"x":{"prompt":[1,2]},"pr\u006fmpt":[3]}"#, true),
            (r#"{"prompt":[1,2],"pr\u006fmpt":[]}"#, true),
            (r#"{"pr\u006fmpt":[],"prompt":[1,2]}"#, true),
            (r#"{"x":"prompt","prompt":[1,2]}"#, true),
            (r#"{"prompt" : [ 10 ,\t0]}"#, false),
            ("{\"prompt\"\n: [ 10 ,\t0\r]}", true),
            (r#"[{"prompt":[1,2]}]"#, false),
            (r#"{"prompt":[1,2]}}"#, false),
            (r#"{"prompt":[1 2]}"#, false),
            (r#"{"prompt":[1,2]"#, false),
            (r#"{"prompt":[1,2"#, false),
            (r#"{"prompt":"#, false),
            (r#"{"prompt"}"#, false),
            (r#"{"prompt":[00]}"#, false),
        ] {
            assert_eq!(check(body), found, "{body}");
        }
        let deep = format!(r#"{{"prompt":{}{}}}"#, "[".repeat(200), "]".repeat(200));
        assert!(!check(&deep));
    }
}
