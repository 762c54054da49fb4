//! Parsing the body of a request: JSON values, but for a prompt of token ids, which is most of a body where there is one. As values, each of
//! its numbers would take 32 bytes and a branch or two, three times a request.

use std::fmt;

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
    use super::*;

    /// Parses both ways, and returns whether the ids were read as such.
    fn check(body: &str) -> bool {
        let plain: Result<Value, _> = serde_json::from_str(body);
        match (serde_json::from_str(body), plain) {
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
        let deep = format!(r#"{{"prompt":{}{}}}"#, "[".repeat(200), "]".repeat(200));
        assert!(!check(&deep));
    }
}
