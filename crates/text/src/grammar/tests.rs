use serde_json::{Value, json};

use super::*;
use crate::bundle::TextBundle;
use crate::testing::{asset, byte_level_vocab};
use crate::tokenizer::Specials;

/// A small generator, so that a failing seed can be run again.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        // Steele, Lea and Flood's SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).unwrap()
    }
}

fn allowed(mask: &[u32]) -> Vec<TokenId> {
    (0..u32::try_from(mask.len() * 32).unwrap())
        .filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1)
        .map(TokenId)
        .collect()
}

/// Draws tokens under the mask until the answer ends; `None` if it had no end after `limit` tokens. Like a
/// model that comes to the point, it prefers what closes strings and brackets.
fn sample(
    tokenizer: &Tokenizer,
    mut grammar: Grammar,
    eos: &[TokenId],
    random: &mut Random,
    limit: usize,
) -> Option<String> {
    let mut tokens = Vec::new();
    while !grammar.is_complete() {
        if tokens.len() == limit {
            return None;
        }
        let allowed = allowed(&grammar.mask().unwrap());
        assert!(!allowed.is_empty());
        let closing: Vec<TokenId> = allowed
            .iter()
            .copied()
            .filter(|&token| {
                eos.contains(&token)
                    || tokenizer
                        .token_bytes(token)
                        .is_some_and(|bytes| matches!(bytes, b"\"" | b"}" | b"]" | b":" | b","))
            })
            .collect();
        let from = if !closing.is_empty() && random.below(3) > 0 { &closing } else { &allowed };
        let token = from[random.below(from.len())];
        grammar.accept(token).unwrap();
        tokens.push(token);
    }
    Some(tokenizer.decode(&tokens, Specials::Skip).unwrap())
}

/// Says whether a value satisfies the keywords these tests use.
fn validates(schema: &Value, value: &Value) -> bool {
    if let Some(options) = schema["enum"].as_array()
        && !options.contains(value)
    {
        return false;
    }
    if let Some(options) = schema["anyOf"].as_array() {
        return options.iter().any(|option| validates(option, value));
    }
    match schema["type"].as_str() {
        Some("object") => {
            let Some(object) = value.as_object() else { return false };
            let required = schema["required"].as_array().into_iter().flatten();
            let properties = &schema["properties"];
            required.into_iter().all(|name| object.contains_key(name.as_str().unwrap()))
                && object.iter().all(|(name, value)| match properties.get(name) {
                    Some(schema) => validates(schema, value),
                    None => schema["additionalProperties"] != json!(false),
                })
        }
        Some("array") => value.as_array().is_some_and(|items| {
            items.len() as u64 >= schema["minItems"].as_u64().unwrap_or(0)
                && items.len() as u64 <= schema["maxItems"].as_u64().unwrap_or(u64::MAX)
                && items.iter().all(|item| validates(&schema["items"], item))
        }),
        Some("string") => value.as_str().is_some_and(|text| {
            text.chars().count() as u64 <= schema["maxLength"].as_u64().unwrap_or(u64::MAX)
        }),
        // `-0` is an integer, though not to the parser.
        Some("integer") => value.as_f64().is_some_and(|number| {
            number.fract() == 0.0
                && number >= schema["minimum"].as_f64().unwrap_or(f64::MIN)
                && number <= schema["maximum"].as_f64().unwrap_or(f64::MAX)
        }),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        Some(other) => panic!("{other}"),
        None => true,
    }
}

fn schemas() -> Vec<Value> {
    vec![
        json!({
            "type": "object",
            "properties": {
                "name": { "type": "string", "maxLength": 12 },
                "age": { "type": "integer", "minimum": 0, "maximum": 150 },
                "kind": { "enum": ["cat", "dog", 3, null] },
                "tags": { "type": "array", "items": { "type": "string", "maxLength": 5 }, "minItems": 1, "maxItems": 3 },
            },
            "required": ["name", "age", "kind", "tags"],
            "additionalProperties": false,
        }),
        json!({ "type": "array", "items": { "anyOf": [{ "type": "boolean" }, { "type": "null" }, { "type": "integer", "minimum": -5, "maximum": 5 }] }, "maxItems": 4 }),
        json!({ "type": "object", "properties": { "x": { "type": "number" }, "ok": { "type": "boolean" } }, "required": ["x"], "additionalProperties": false }),
        json!({ "enum": ["yes", "no"] }),
    ]
}

fn check_samples(tokenizer: &Tokenizer, eos: &[TokenId], seeds: u64) {
    let compiler = GrammarCompiler::new(tokenizer, eos).unwrap();
    let mut finished = 0;
    for seed in 0..seeds {
        for schema in schemas() {
            let grammar = compiler.compile(&GrammarSpec::JsonSchema(schema.clone())).unwrap();
            if let Some(text) = sample(tokenizer, grammar, eos, &mut Random(seed), 400) {
                let value: Value = serde_json::from_str(&text)
                    .unwrap_or_else(|error| panic!("seed {seed}: {text:?}: {error}"));
                assert!(validates(&schema, &value), "seed {seed}: {text} against {schema}");
                finished += 1;
            }
        }
        let grammar = compiler.compile(&GrammarSpec::JsonObject).unwrap();
        if let Some(text) = sample(tokenizer, grammar, eos, &mut Random(seed), 400) {
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("seed {seed}: {text:?}: {error}"));
            assert!(value.is_object(), "seed {seed}: {text}");
            finished += 1;
        }
    }
    // Else the checks above looked at next to nothing.
    assert!(finished > seeds * 3, "{finished} of {}", seeds * 5);
}

#[test]
fn answers_drawn_under_the_mask_satisfy_their_schema() {
    let toy = Tokenizer::toy_bytes();
    check_samples(&toy, &[TokenId(257)], 40);
    // Tokens that cross the borders of JSON's symbols, and ends of several kinds.
    let vocab = byte_level_vocab(
        "gpt-2",
        &["\" :", "\" ,", "{ \"", "\" }", "] }", "a g", "ag e", "n a", "m e", "na me", "Ġ Ġ"],
    );
    let tokenizer = Tokenizer::from_gguf(&vocab).unwrap();
    let eos = [tokenizer.special_id("<|im_end|>").unwrap(), tokenizer.special_id("<|endoftext|>").unwrap()];
    check_samples(&tokenizer, &eos, 40);
}

#[test]
fn answers_of_the_demo_models_vocabulary_satisfy_their_schema() {
    let Some(path) = asset("MICROSERVING_DEMO_MODEL") else { return };
    let model = TextBundle::from_gguf_file(&path, "demo").unwrap().build().unwrap();
    check_samples(&model.tokenizer, &model.eos_token_ids, 5);
}

/// Advances by a text, one byte a token.
fn feed(grammar: &mut Grammar, text: &str) {
    for byte in text.bytes() {
        grammar.accept(TokenId(byte.into())).unwrap();
    }
}

fn toy_grammar(schema: Value) -> Result<Grammar, TextError> {
    GrammarCompiler::new(&Tokenizer::toy_bytes(), &[TokenId(257)])
        .unwrap()
        .compile(&GrammarSpec::JsonSchema(schema))
}

#[test]
fn an_object_ends_with_its_last_bracket_and_then_only_the_end_is_allowed() {
    let compiler = GrammarCompiler::new(&Tokenizer::toy_bytes(), &[TokenId(257)]).unwrap();
    let mut grammar = compiler.compile(&GrammarSpec::JsonObject).unwrap();
    assert!(!allowed(&grammar.mask().unwrap()).contains(&TokenId(257)));
    feed(&mut grammar, "{\"a\": [1, {}]");
    assert!(!grammar.is_complete());
    feed(&mut grammar, "}");
    assert!(grammar.is_complete());
    assert_eq!(allowed(&grammar.mask().unwrap()), [TokenId(257)]);
    assert!(grammar.accept(TokenId(97)).is_err());
}

#[test]
fn a_number_may_end_or_go_on() {
    let mut grammar = toy_grammar(json!({ "type": "integer" })).unwrap();
    feed(&mut grammar, "12");
    assert!(!grammar.is_complete());
    let next = allowed(&grammar.mask().unwrap());
    assert!(
        next.contains(&TokenId(257))
            && next.contains(&TokenId(u32::from(b'7')))
            && !next.contains(&TokenId(u32::from(b'a')))
    );
    grammar.accept(TokenId(257)).unwrap();
    assert!(grammar.is_complete());
}

#[test]
fn a_token_that_does_not_fit_changes_nothing() {
    let mut grammar = toy_grammar(json!({ "enum": ["no"] })).unwrap();
    feed(&mut grammar, "\"n");
    let before = grammar.mask().unwrap();
    for token in [TokenId(u32::from(b'x')), TokenId(256), TokenId(257), TokenId(100_000)] {
        let error = grammar.accept(token).unwrap_err();
        assert!(matches!(error, TextError::Grammar { .. }), "{error}");
        assert_eq!(grammar.mask().unwrap(), before);
    }
    feed(&mut grammar, "o\"");
    assert!(grammar.is_complete());
}

#[test]
fn sequences_of_one_grammar_do_not_share_their_state() {
    let mut one = toy_grammar(json!({ "enum": ["a", "b"] })).unwrap();
    let mut other = one.clone();
    feed(&mut one, "\"a\"");
    assert!(one.is_complete() && !other.is_complete());
    feed(&mut other, "\"b\"");

    let compiler = GrammarCompiler::new(&Tokenizer::toy_bytes(), &[TokenId(257)]).unwrap();
    for index in 0..MAX_CACHED + 3 {
        let spec = GrammarSpec::JsonSchema(json!({ "enum": [format!("v{index}")] }));
        for _ in 0..2 {
            feed(&mut compiler.compile(&spec).unwrap(), &format!("\"v{index}\""));
        }
    }
}

#[test]
fn spaces_between_symbols_are_bounded() {
    let mut grammar = toy_grammar(json!({ "type": "object", "properties": { "a": { "type": "null" } }, "required": ["a"], "additionalProperties": false })).unwrap();
    feed(&mut grammar, "{");
    for count in 0.. {
        if !allowed(&grammar.mask().unwrap()).contains(&TokenId(u32::from(b' '))) {
            assert_eq!(count, 40);
            break;
        }
        assert!(count < 100);
        feed(&mut grammar, " ");
    }
}

#[test]
fn schemas_that_cannot_be_enforced_are_refused_naming_the_field() {
    let check = |schema: Value| {
        let error = toy_grammar(schema.clone()).map(|_| ()).unwrap_err();
        assert!(error.field().is_some_and(|field| field.starts_with("response_format")), "{schema}: {error}");
        let text = error.to_string();
        assert!(text.len() < 2000 && !text.contains("backtrace"), "{text}");
    };
    check(json!("text"));
    check(json!([]));
    check(json!({ "type": "nonsense" }));
    check(json!({ "type": 3 }));
    check(json!({ "properties": 3 }));
    check(json!({ "$ref": "https://example.com/schema" }));
    check(json!({ "$ref": "#/$defs/absent" }));
    check(json!({ "type": "string", "pattern": "(" }));
    check(json!({ "type": "string", "pattern": "(?=look)ahead" }));
    check(json!({ "type": "integer", "minimum": 5, "maximum": 3 }));
    check(json!({ "not": { "type": "null" } }));
    check(json!({ "type": "string", "maxLength": 3, "description": "x".repeat(MAX_SCHEMA_BYTES) }));
    let deep = (0..MAX_SCHEMA_DEPTH).fold(json!({}), |inner, _| json!({ "items": inner }));
    check(deep);
}

#[test]
fn schemas_too_costly_to_compile_are_refused_soon() {
    let begin = std::time::SystemTime::now();
    let properties: serde_json::Map<String, Value> = (0..1500)
        .map(|index| (format!("p{index}"), json!({ "type": "string", "pattern": "^(a|b){0,40}c{3,90}$" })))
        .collect();
    for schema in [
        json!({ "type": "string", "pattern": "^((a|b)*a(a|b){300}){200}$" }),
        json!({ "type": "object", "properties": properties }),
    ] {
        match toy_grammar(schema) {
            Err(error) => assert!(error.field().is_some(), "{error}"),
            Ok(mut grammar) => {
                // What compiles must also answer within its bounds.
                let _ = grammar.mask();
            }
        }
    }
    let elapsed = begin.elapsed().unwrap_or_default();
    assert!(elapsed.as_secs() < 20, "{elapsed:?}");
}

#[test]
fn a_model_whose_answers_cannot_end_is_refused() {
    let toy = Tokenizer::toy_bytes();
    assert!(matches!(GrammarCompiler::new(&toy, &[]), Err(TextError::Unsupported { .. })));
    assert!(matches!(GrammarCompiler::new(&toy, &[TokenId(100_000)]), Err(TextError::Unsupported { .. })));
}

#[test]
fn the_engines_own_options_are_not_the_clients() {
    let mut grammar =
        toy_grammar(json!({ "enum": ["a"], "x-guidance": { "lenient": true, "nonsense": 1 } })).unwrap();
    feed(&mut grammar, "\"a\"");
    assert!(grammar.is_complete());
}
