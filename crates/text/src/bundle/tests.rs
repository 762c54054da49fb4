use std::fs;

use super::*;
use crate::chat::ChatOptions;
use crate::testing::{asset, byte_level_vocab};
use crate::tokenizer::Specials;

const TEXTS: [&str; 5] =
    ["", "Hello, world", "<|im_end|> the <s>", "日本 😀 e\u{301} \u{fffd}", "  spaces\n\ttabs 12345 it's"];

/// Checks that the bundle survives its JSON, and that what is built from either tokenizes the same.
fn check_round_trip(bundle: &TextBundle) {
    let json = bundle.to_json();
    let read = TextBundle::from_json(&json).unwrap();
    assert_eq!(&read, bundle);
    let (before, after) = (bundle.build().unwrap(), read.build().unwrap());
    assert_eq!(before.eos_token_ids, after.eos_token_ids);
    for text in TEXTS {
        let tokens = before.tokenizer.encode(text).unwrap();
        assert_eq!(after.tokenizer.encode(text).unwrap(), tokens);
        assert_eq!(
            after.tokenizer.decode(&tokens, Specials::Show).unwrap(),
            before.tokenizer.decode(&tokens, Specials::Show).unwrap()
        );
    }
}

fn gguf_vocab() -> GgufVocab {
    let mut vocab = byte_level_vocab("qwen2", &["t h", "Ġ th"]);
    vocab.bos = Some(TokenId(258));
    vocab.eos = Some(TokenId(259));
    vocab.chat_template = Some("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}".to_owned());
    vocab
}

#[test]
fn bundles_survive_their_json() {
    check_round_trip(&TextBundle::toy("toy"));
    check_round_trip(&TextBundle::from_gguf(gguf_vocab(), "gguf").unwrap());
    if let Some(fixtures) = asset("MICROSERVING_FIXTURES") {
        check_round_trip(&TextBundle::from_hf_dir(&fixtures.join("models/stories260K"), "tiny").unwrap());
    }
    if let Some(demo) = asset("MICROSERVING_DEMO_MODEL") {
        check_round_trip(&TextBundle::from_gguf_file(&demo, "demo").unwrap());
    }
}

#[test]
fn a_gguf_bundle_knows_every_token_that_ends_an_answer() {
    let bundle = TextBundle::from_gguf(gguf_vocab(), "m").unwrap();
    assert_eq!(bundle.eos_token_ids, [TokenId(258), TokenId(259)]);
    assert_eq!(bundle.bos_token.as_deref(), Some("<|endoftext|>"));
    let model = bundle.build().unwrap();
    let messages = [serde_json::json!({ "role": "user", "content": "x" })];
    let prompt = model.chat_template.unwrap().render(&messages, &ChatOptions::default()).unwrap();
    assert_eq!(prompt, "<|endoftext|>x<|im_end|>");
    assert_eq!(&*model.name, "m");
}

#[test]
fn other_documents_and_later_versions_are_refused() {
    let check = |json: &str, expected: &str| {
        let error = TextBundle::from_json(json).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check("{}", "text bundle");
    check("[", "text bundle");
    check(&TextBundle::toy("m").to_json().replace("\"version\":1", "\"version\":2"), "version");
}

const TOKENIZER_JSON: &str = r#"{ "version": "1.0", "added_tokens": [
    { "id": 2, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true },
    { "id": 3, "content": "<|eot|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true }],
  "decoder": { "type": "Fuse" }, "model": { "type": "BPE", "vocab": { "a": 0, "b": 1 }, "merges": [] } }"#;

fn dir(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), TOKENIZER_JSON).unwrap();
    for (name, contents) in files {
        fs::write(dir.path().join(name), contents).unwrap();
    }
    dir
}

#[test]
fn a_directory_says_by_several_files_what_ends_an_answer() {
    let check = |files: &[(&str, &str)], eos: &[u32], eos_token: Option<&str>| {
        let dir = dir(files);
        let bundle = TextBundle::load(dir.path(), "m").unwrap();
        let expected: Vec<TokenId> = eos.iter().map(|&id| TokenId(id)).collect();
        assert_eq!((bundle.eos_token_ids.clone(), bundle.eos_token.as_deref()), (expected, eos_token));
        // The file inside the directory stands for it.
        assert_eq!(TextBundle::load(&dir.path().join("tokenizer.json"), "m").unwrap(), bundle);
    };
    check(&[], &[], None);
    check(&[("config.json", r#"{ "eos_token_id": 2 }"#)], &[2], None);
    check(
        &[
            ("config.json", r#"{ "eos_token_id": 0 }"#),
            ("tokenizer_config.json", r#"{ "eos_token": { "content": "</s>" } }"#),
        ],
        &[2],
        Some("</s>"),
    );
    check(
        &[
            ("generation_config.json", r#"{ "eos_token_id": [3, 2] }"#),
            ("tokenizer_config.json", r#"{ "eos_token": "</s>", "bos_token": null }"#),
        ],
        &[2, 3],
        Some("</s>"),
    );
}

#[test]
fn well_known_ends_of_a_turn_end_an_answer_in_every_format() {
    let dir = dir(&[("generation_config.json", r#"{ "eos_token_id": 2 }"#)]);
    let json = TOKENIZER_JSON.replace("<|eot|>", "<|im_end|>");
    fs::write(dir.path().join("tokenizer.json"), json).unwrap();
    let bundle = TextBundle::load(dir.path(), "m").unwrap();
    assert_eq!(bundle.eos_token_ids, [TokenId(2), TokenId(3)]);
}

#[test]
fn the_chat_template_comes_from_the_most_specific_file() {
    let check = |files: &[(&str, &str)], expected: Option<&str>| {
        let bundle = TextBundle::load(dir(files).path(), "m").unwrap();
        assert_eq!(bundle.chat_template.as_deref(), expected);
    };
    let config = ("tokenizer_config.json", r#"{ "chat_template": "config" }"#);
    check(&[], None);
    check(&[config], Some("config"));
    check(&[config, ("chat_template.json", r#"{ "chat_template": "json" }"#)], Some("json"));
    check(&[config, ("chat_template.jinja", "jinja")], Some("jinja"));
    let named = r#"{ "chat_template": [{ "name": "rag", "template": "r" }, { "name": "default", "template": "d" }] }"#;
    check(&[("tokenizer_config.json", named)], Some("d"));
}

#[test]
fn broken_files_are_named() {
    let check = |files: &[(&str, &str)], expected: &str| {
        let error = TextBundle::load(dir(files).path(), "m").unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(&[("config.json", "{")], "config.json");
    check(&[("tokenizer.json", "{")], "tokenizer.json");
    check(&[("generation_config.json", r#"{ "eos_token_id": -1 }"#)], "generation_config.json: eos_token_id");
    check(&[("tokenizer_config.json", r#"{ "eos_token": 3 }"#)], "tokenizer_config.json: eos_token");
    check(&[("tokenizer_config.json", r#"{ "chat_template": [] }"#)], "chat_template");
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(TextBundle::load(empty.path(), "m"), Err(TextError::Read { .. })));
    let odd = empty.path().join("model.bin");
    fs::write(&odd, "x").unwrap();
    assert!(TextBundle::load(&odd, "m").unwrap_err().to_string().contains("model.bin"));
}

#[test]
fn a_saved_bundle_loads_under_the_name_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bundle.json");
    fs::write(&path, TextBundle::toy("old").to_json()).unwrap();
    assert_eq!(TextBundle::load(&path, "new").unwrap(), TextBundle::toy("new"));
}

#[test]
fn a_broken_template_is_found_when_the_model_is_built() {
    let bundle = TextBundle { chat_template: Some("{% if %}".to_owned()), ..TextBundle::toy("m") };
    assert!(matches!(bundle.build(), Err(TextError::Template { .. })));
}
