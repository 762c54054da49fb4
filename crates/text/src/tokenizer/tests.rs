use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::bundle::TextBundle;
use crate::gguf::GgufMetadata;
use crate::testing::{asset, byte_level_vocab};

fn ids(tokens: &[u32]) -> Vec<TokenId> {
    tokens.iter().map(|&token| TokenId(token)).collect()
}

/// A `tokenizer.json` with a model of its own and the given decoder.
fn hf_json(decoder: &str) -> String {
    let mut vocab = serde_json::Map::new();
    for (id, token) in ["<unk>", "▁", "a", "b", "▁a", "ab", "<0xC3>", "<0xA9>"].iter().enumerate() {
        vocab.insert((*token).to_owned(), id.into());
    }
    vocab.insert("<end>".to_owned(), 8.into());
    vocab.insert("<tool>".to_owned(), 12.into());
    serde_json::json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0 },
        "padding": null,
        "added_tokens": [
            { "id": 8, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true },
            { "id": 12, "content": "<tool>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false },
        ],
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": serde_json::from_str::<Value>(decoder).unwrap(),
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": [["▁", "a"], ["a", "b"]],
        },
    })
    .to_string()
}

const LLAMA_DECODER: &str = r#"{ "type": "Sequence", "decoders": [
    { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
    { "type": "ByteFallback" }, { "type": "Fuse" }, { "type": "Strip", "content": " ", "start": 1, "stop": 0 } ] }"#;

#[test]
fn toy_bytes_has_a_token_a_byte() {
    let toy = Tokenizer::toy_bytes();
    assert_eq!(toy.num_tokens(), 259);
    assert_eq!(toy.encode("é<eos>").unwrap(), ids(&[0xc3, 0xa9, 60, 101, 111, 115, 62]));
    assert_eq!(toy.decode(&ids(&[256, 104, 105, 257]), Specials::Skip).unwrap(), "hi");
    assert_eq!(toy.decode(&ids(&[256, 104, 105, 257]), Specials::Show).unwrap(), "<bos>hi<eos>");
    assert_eq!(
        (toy.bos(), toy.eos(), toy.special_id("<pad>")),
        (Some(TokenId(256)), Some(TokenId(257)), Some(TokenId(258)))
    );
    assert!(toy.is_special(TokenId(258)) && !toy.is_special(TokenId(0)));
    assert!(matches!(
        toy.decode(&ids(&[259]), Specials::Skip),
        Err(TextError::UnknownToken { token: TokenId(259), num_tokens: 259 })
    ));
}

#[test]
fn a_tokenizer_json_is_read_with_its_decoder_and_without_its_truncation() {
    let tokenizer = Tokenizer::from_hf_json(&hf_json(LLAMA_DECODER)).unwrap();
    // Ten tokens, though the file would cut after three.
    assert_eq!(tokenizer.encode(" a a a a a<end>aé").unwrap(), ids(&[4, 4, 4, 4, 4, 8, 2, 6, 7]));
    assert_eq!(tokenizer.num_tokens(), 13);
    let tokens = ids(&[4, 5, 6, 7, 8, 12]);
    assert_eq!(tokenizer.decode(&tokens, Specials::Skip).unwrap(), "aabé<tool>");
    assert_eq!(tokenizer.decode(&tokens, Specials::Show).unwrap(), "aabé<end><tool>");
    assert_eq!(tokenizer.token_bytes(TokenId(6)), Some(&[0xc3][..]));
    assert_eq!(tokenizer.token_text(TokenId(6)), "\u{fffd}");
    assert_eq!(tokenizer.token_bytes(TokenId(9)), None, "a hole");
    assert!(tokenizer.decode(&ids(&[9]), Specials::Skip).is_err());
}

#[test]
fn metaspace_drops_the_space_of_the_first_token_only_where_one_was_put() {
    let check = |scheme: &str, expected: &str| {
        let decoder = format!(
            r#"{{ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "{scheme}", "split": false }}"#
        );
        let tokenizer = Tokenizer::from_hf_json(&hf_json(&decoder)).unwrap();
        assert_eq!(tokenizer.decode(&ids(&[4, 4]), Specials::Skip).unwrap(), expected);
    };
    check("always", "a a");
    check("first", "a a");
    check("never", " a a");
}

#[test]
fn decoders_without_bytes_of_their_own_are_refused_by_name() {
    let check = |decoder: &str, name: &str| {
        let error = Tokenizer::from_hf_json(&hf_json(decoder)).unwrap_err();
        assert!(matches!(&error, TextError::Unsupported { value, .. } if value.contains(name)), "{error}");
    };
    check(r###"{ "type": "WordPiece", "prefix": "##", "cleanup": true }"###, "WordPiece");
    check("null", "null");
    check(r#"{ "type": "Replace", "pattern": { "Regex": "x+" }, "content": "" }"#, "Regex");
    check(
        r#"{ "type": "Sequence", "decoders": [{ "type": "Fuse" }, { "type": "Strip", "content": "x", "start": 1, "stop": 1 }] }"#,
        "Strip",
    );
}

#[test]
fn broken_tokenizer_files_are_errors_not_panics() {
    let good = hf_json(LLAMA_DECODER);
    for (from, to) in [
        (r#"["a","b"]"#, r#"["a","▁a"]"#),
        (r#"["a","b"]"#, r#"["ab","ab"]"#),
        (r#"["a","b"]"#, r#""a""#),
        (r#"["a","b"]"#, "7"),
        (r#""type":"BPE""#, r#""type":"Nothing""#),
        (r#""ab":5"#, r#""ab":4294967295"#),
        (r#""version":"1.0""#, r#""version":"9""#),
        ("{", "["),
    ] {
        assert!(good.contains(from), "{from}");
        let error = Tokenizer::from_hf_json(&good.replacen(from, to, 1)).unwrap_err();
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }
}

#[test]
fn byte_level_vocabularies_merge_inside_words_and_keep_special_tokens_whole() {
    let vocab = byte_level_vocab("smollm", &["t h", "th e", "Ġ the", "1 2"]);
    let tokenizer = Tokenizer::from_gguf(&vocab).unwrap();
    let the = TokenId(258);
    let (end_of_text, end) = (TokenId(260), TokenId(261));
    assert_eq!(tokenizer.encode(" the").unwrap(), [the]);
    assert_eq!(tokenizer.encode(" the<|im_end|> the<|endoftext|>").unwrap(), [the, end, the, end_of_text]);
    // Digits stand alone under this pre-tokenizer, so the merge of 1 and 2 is never reached.
    assert_eq!(tokenizer.encode("12").unwrap(), ids(&[u32::from(b'1'), u32::from(b'2')]));
    assert_eq!(tokenizer.decode(&[the, end, the], Specials::Skip).unwrap(), " the the");
    assert_eq!(tokenizer.encode("").unwrap(), []);
}

/// Texts of what tokenizers treat differently, with many places where they can be cut.
fn texts() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => Just("the"), 4 => Just(" word"), 2 => Just("It's"), 2 => Just(" We'll"), 2 => Just("\n"), 1 => Just("\r\n "), 2 => Just(" "),
        1 => Just("  "), 1 => Just("\t"), 2 => Just("1234"), 1 => Just(" 7"), 1 => Just(", "), 1 => Just("...\n\n"), 1 => Just("/"), 1 => Just("漢字"),
        1 => Just("e\u{301}"), 1 => Just("\u{301}"), 1 => Just("ÄÖ"), 1 => Just("<|im_end|>"), 1 => Just("<|"), 1 => Just("🙂"), 1 => Just("$x_y")
    ];
    proptest::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn pieces_of_a_text_have_its_tokens(text in texts()) {
        let merges = ["t h", "th e", "Ġ w", "Ġw o", "r d", "Ġ t", "I t", "Ċ Ċ", "Ġ Ġ", "e Ġ", "Ġ Ċ"];
        let names = [
            "default", "gpt-2", "smollm", "llama-bpe", "qwen2", "stablelm2", "qwen35", "tekken", "gpt-4o", "deepseek-coder", "deepseek-v3",
            "falcon", "seed-coder",
        ];
        for pre in names {
            let tokenizer = Tokenizer::from_gguf(&byte_level_vocab(pre, &merges)).unwrap();
            prop_assert!(tokenizer.segments.is_some(), "{}", pre);
            let whole = tokenizer.encode_bare(&text).unwrap();
            let pieces: Vec<_> = segments::pieces(&text, 1)
                .flat_map(|piece| tokenizer.encode_bare(piece).unwrap())
                .collect();
            prop_assert_eq!(&pieces, &whole, "{}", pre);
        }
    }
}

#[test]
fn only_tokenizers_known_to_allow_it_encode_in_pieces() {
    let llama3 =
        json!({"type": "Split", "pattern": {"Regex": pre::LLAMA3}, "behavior": "Isolated", "invert": false});
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let gpt2 =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let both = json!({"type": "Sequence", "pretokenizers": [llama3, bytes]});
    let check = |pre_tokenizer: &Value, change: &dyn Fn(&mut Value), expected: bool| {
        let mut document: Value = serde_json::from_str(&hf_json(LLAMA_DECODER)).unwrap();
        document["normalizer"] = Value::Null;
        document["pre_tokenizer"] = pre_tokenizer.clone();
        change(&mut document);
        let tokenizer = Tokenizer::from_hf_json(&document.to_string()).unwrap();
        assert_eq!(tokenizer.segments.is_some(), expected, "{document}");
    };
    let as_is = |_: &mut Value| {};
    check(&both, &as_is, true);
    check(&gpt2, &as_is, true);
    check(&bytes, &as_is, false);
    check(&Value::Null, &as_is, false);
    check(
        &json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}),
        &as_is,
        false,
    );
    check(&both, &|document| document["normalizer"] = json!({"type": "NFC"}), true);
    check(&both, &|document| document["normalizer"] = json!({"type": "Lowercase"}), false);
    check(
        &both,
        &|document| document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("a b"),
        false,
    );
    check(
        &both,
        &|document| document["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("MergedWithNext"),
        false,
    );
    check(
        &both,
        &|document| document["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = json!(true),
        false,
    );
    check(&both, &|document| document["added_tokens"][0]["rstrip"] = json!(true), false);
    check(&both, &|document| document["added_tokens"][1]["content"] = json!("<a tool>"), false);
}

#[test]
fn a_text_that_was_seen_has_the_same_tokens_again() {
    let tokenizer = Tokenizer::from_gguf(&byte_level_vocab("qwen2", &["t h", "th e", "Ġ t"])).unwrap();
    let text = "the other thing, then<|im_end|>\nthat there ".repeat(60);
    for end in [text.len(), text.len() / 2, text.len()] {
        let Encoder::Bpe { model, .. } = &tokenizer.encoder else { panic!("a byte-level vocabulary") };
        let plain = hf::encode(model, &text[..end], false).unwrap();
        assert_eq!(tokenizer.encode_bare(&text[..end]).unwrap(), plain);
    }
}

#[test]
fn bos_and_eos_go_round_a_prompt_and_not_round_a_bare_text() {
    let mut vocab = byte_level_vocab("gpt-2", &[]);
    vocab.bos = Some(TokenId(256));
    vocab.eos = Some(TokenId(257));
    let check = |vocab: &GgufVocab, expected: &[u32]| {
        let tokenizer = Tokenizer::from_gguf(vocab).unwrap();
        assert_eq!(tokenizer.encode("a").unwrap(), ids(expected));
        assert_eq!(tokenizer.encode_bare("a").unwrap(), ids(&[97]));
    };
    check(&vocab, &[97]);
    check(&GgufVocab { pre: Some("llama-bpe".to_owned()), ..vocab.clone() }, &[256, 97]);
    check(&GgufVocab { add_bos: Some(true), add_eos: Some(true), ..vocab }, &[256, 97, 257]);
}

#[test]
fn vocabularies_nobody_knows_are_refused_by_name() {
    let check = |vocab: &GgufVocab, field: &str, value: &str| match Tokenizer::from_gguf(vocab).unwrap_err() {
        TextError::Unsupported { field: got, value: found, .. } => {
            assert_eq!((got.as_str(), found.as_str()), (field, value));
        }
        other => panic!("{other}"),
    };
    check(&byte_level_vocab("unheard-of", &[]), "tokenizer.ggml.pre", "unheard-of");
    let bert = GgufVocab { model: "bert".to_owned(), ..byte_level_vocab("gpt-2", &[]) };
    check(&bert, "tokenizer.ggml.model", "bert");
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused_by_key() {
    let good = byte_level_vocab("gpt-2", &["a b"]);
    let check = |change: &dyn Fn(&mut GgufVocab), key: &str| {
        let mut vocab = good.clone();
        change(&mut vocab);
        let error = Tokenizer::from_gguf(&vocab).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    };
    check(&|vocab| vocab.tokens.clear(), "tokens");
    check(&|vocab| vocab.merges[0] = "a bc".to_owned(), "merges[0]");
    check(&|vocab| vocab.merges[0] = "b a".to_owned(), "merges[0]");
    check(&|vocab| vocab.merges[0] = "ab".to_owned(), "merges[0]");
    check(&|vocab| vocab.token_types[3] = 9, "token_type");
    check(&|vocab| vocab.token_types.truncate(3), "token_type");
    check(&|vocab| vocab.scores = vec![0.0], "scores");
    check(&|vocab| vocab.bos = Some(TokenId(9999)), "bos_token_id");
    check(&|vocab| vocab.other_eos = vec![TokenId(9999)], "eot_token_id");
    let spm = GgufVocab { model: "llama".to_owned(), ..good.clone() };
    assert!(Tokenizer::from_gguf(&spm).unwrap_err().to_string().contains("byte tokens"));
    let mut bad_byte = spm;
    bad_byte.token_types[0] = 6;
    assert!(Tokenizer::from_gguf(&bad_byte).unwrap_err().to_string().contains("tokens[0]"));
}

#[test]
fn every_known_pre_tokenizer_compiles_and_loses_nothing() {
    let names = [
        "default",
        "gpt-2",
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "llama-bpe",
        "llama3",
        "qwen2",
        "qwen35",
        "tekken",
        "gpt-4o",
        "deepseek-coder",
        "deepseek-v3",
        "deepseek-r1-qwen",
        "falcon",
        "seed-coder",
        "glm4",
    ];
    let text = "Hello, it's  12345 \n\n tabs\tand 日本語 ñ 😀!\r\n  end ";
    for name in names {
        let tokenizer = Tokenizer::from_gguf(&byte_level_vocab(name, &["Ġ Ġ", "l l"])).unwrap();
        let tokens = tokenizer.encode_bare(text).unwrap();
        assert_eq!(tokenizer.decode(&tokens, Specials::Skip).unwrap(), text, "{name}");
    }
}

/// A SentencePiece vocabulary: bytes, and scored pieces.
fn spm(pieces: &[(&str, f32)]) -> GgufVocab {
    let mut vocab = GgufVocab { model: "llama".to_owned(), ..GgufVocab::default() };
    for (token, kind) in [("<unk>", 2), ("<s>", 3), ("</s>", 3)] {
        vocab.tokens.push(token.to_owned());
        vocab.token_types.push(kind);
    }
    for byte in 0..=255_u8 {
        vocab.tokens.push(format!("<0x{byte:02X}>"));
        vocab.token_types.push(6);
    }
    vocab.scores = vec![0.0; vocab.tokens.len()];
    for &(piece, score) in pieces {
        vocab.tokens.push(piece.to_owned());
        vocab.token_types.push(1);
        vocab.scores.push(score);
    }
    vocab.bos = Some(TokenId(1));
    vocab.eos = Some(TokenId(2));
    vocab
}

#[test]
fn sentencepiece_joins_the_best_pair_first_and_the_leftmost_of_equals() {
    let vocab = spm(&[
        ("▁", -9.0),
        ("a", -9.0),
        ("b", -9.0),
        ("c", -9.0),
        ("ab", -2.0),
        ("bc", -1.0),
        ("aa", -3.0),
        ("▁a", -4.0),
    ]);
    let tokenizer = Tokenizer::from_gguf(&vocab).unwrap();
    let check = |text: &str, expected: &[&str]| {
        let tokens = tokenizer.encode_bare(text).unwrap();
        let pieces: Vec<String> = tokens.iter().map(|&token| tokenizer.token_text(token)).collect();
        assert_eq!(pieces, expected, "{text}");
        assert_eq!(tokenizer.decode(&tokens, Specials::Show).unwrap(), text);
    };
    check("abc", &[" a", "bc"]);
    check("bab", &[" ", "b", "ab"]);
    // The space cannot take the first `a`: the pair of two scores higher, leftmost first.
    check("aaa", &[" ", "aa", "a"]);
    check("a a", &[" a", " a"]);
    check("d", &[" ", "d"]);
    assert_eq!(tokenizer.encode("é").unwrap(), ids(&[1, 259, 3 + 0xc3, 3 + 0xa9]));
    // What follows a special token begins anew.
    assert_eq!(tokenizer.encode_bare("a</s>a").unwrap(), ids(&[266, 2, 266]));
    assert_eq!(tokenizer.encode("").unwrap(), ids(&[1]));

    let bare = GgufVocab { add_space_prefix: Some(false), add_bos: Some(false), ..vocab };
    let tokenizer = Tokenizer::from_gguf(&bare).unwrap();
    assert_eq!(tokenizer.encode("abc").unwrap(), ids(&[260, 264]));
    assert_eq!(tokenizer.decode(&ids(&[266]), Specials::Skip).unwrap(), " a");
}

proptest! {
    #[test]
    fn any_text_comes_back_from_its_tokens(text in "(\\PC|[ a-c\\n]){0,40}") {
        for tokenizer in [
            Tokenizer::toy_bytes(),
            Tokenizer::from_gguf(&byte_level_vocab("llama-bpe", &["Ġ Ġ", "a b", "ab c"])).unwrap(),
            Tokenizer::from_gguf(&spm(&[("▁", -9.0), ("a", -9.0), ("b", -9.0), ("ab", -2.0), ("▁▁", -1.0), ("▁ab", -0.5)])).unwrap(),
        ] {
            // `▁` in a text is a space afterwards: the vocabulary has no other way to spell one. And what follows a special token, whose name
            // begins with `<`, begins anew, with a space.
            let text = if matches!(tokenizer.encoder, Encoder::Spm { .. }) { text.replace(['▁', '<'], " ") } else { text.clone() };
            let tokens = tokenizer.encode_bare(&text).unwrap();
            prop_assert_eq!(tokenizer.decode(&tokens, Specials::Show).unwrap(), text);
        }
    }

    #[test]
    fn garbage_never_panics(json in "\\PC{0,60}") {
        let _ = Tokenizer::from_hf_json(&json);
    }
}

#[test]
fn the_demo_model_tokenizes_as_its_reference() {
    let Some(path) = asset("MICROSERVING_DEMO_MODEL") else { return };
    let vocab = GgufMetadata::open(&path).unwrap().vocab().unwrap();
    let tokenizer = Tokenizer::from_gguf(&vocab).unwrap();
    assert_eq!(tokenizer.num_tokens(), 49_152);
    assert_eq!(tokenizer.encode("The capital of France is").unwrap(), ids(&[504, 3575, 282, 4649, 314]));
    let answer = ids(&[
        7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42,
        33, 34, 42, 37, 35, 30, 2,
    ]);
    let text = " Paris.\n\nThe answer is: 2018-01-22 12:12:53.";
    assert_eq!(tokenizer.decode(&answer, Specials::Skip).unwrap(), text);
    assert_eq!(tokenizer.encode(&format!("{text}<|im_end|>")).unwrap(), answer);
}

/// Checks prompts and answers of reference runs: lines of JSON with `prompt`, `prompt_ids`, `gen_ids` and
/// `text`.
fn check_reference(tokenizer: &Tokenizer, path: &Path, encodes: bool) {
    for line in std::fs::read_to_string(path).unwrap().lines() {
        let run: Value = serde_json::from_str(line).unwrap();
        let list = |key: &str| serde_json::from_value::<Vec<TokenId>>(run[key].clone()).unwrap();
        let prompt = run["prompt"].as_str().unwrap();
        if encodes {
            assert_eq!(tokenizer.encode(prompt).unwrap(), list("prompt_ids"), "{prompt}");
        }
        let both = [list("prompt_ids"), list("gen_ids")].concat();
        let whole = tokenizer.decode(&both, Specials::Skip).unwrap();
        assert!(whole.ends_with(run["text"].as_str().unwrap()), "{whole}");
    }
}

#[test]
fn the_tiny_model_and_the_demo_model_tokenize_as_their_reference_runs() {
    let Some(fixtures) = asset("MICROSERVING_FIXTURES") else { return };
    let models = fixtures.join("models");
    let tiny = TextBundle::from_hf_dir(&models.join("stories260K"), "tiny").unwrap().build().unwrap();
    assert_eq!(tiny.eos_token_ids[..], ids(&[2]));
    check_reference(&tiny.tokenizer, &models.join("reference/stories260K_f32_greedy.jsonl"), true);
    let Some(demo) = asset("MICROSERVING_DEMO_MODEL") else { return };
    let demo = TextBundle::from_gguf_file(&demo, "demo").unwrap().build().unwrap();
    check_reference(&demo.tokenizer, &models.join("reference/smollm2_135m_q4_1_f32_greedy.jsonl"), true);
}

#[test]
fn our_decoding_is_that_of_the_library() {
    let Some(fixtures) = asset("MICROSERVING_FIXTURES") else { return };
    let json = std::fs::read_to_string(fixtures.join("models/stories260K/tokenizer.json")).unwrap();
    let ours = Tokenizer::from_hf_json(&json).unwrap();
    let theirs = tokenizers::Tokenizer::from_bytes(json.as_bytes()).unwrap();
    for text in ["Once upon a time", " two  spaces ", "naïve 日本 😀", "<s>Lily</s> said \"hi\"\n", ""] {
        let tokens = ours.encode(text).unwrap();
        let raw: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        assert_eq!(ours.decode(&tokens, Specials::Skip).unwrap(), theirs.decode(&raw, true).unwrap());
        assert_eq!(ours.decode(&tokens, Specials::Show).unwrap(), theirs.decode(&raw, false).unwrap());
    }
}

/// Checks the vocabularies of llama.cpp's `models` folder against the vectors beside them.
#[test]
#[ignore = "needs llama.cpp's vocabulary files: set MICROSERVING_VOCABS to their folder"]
fn vocabularies_of_many_models_match_their_vectors() {
    let folder = std::env::var("MICROSERVING_VOCABS").unwrap();
    let mut failures = BTreeSet::new();
    let mut checked = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let vectors = |suffix: &str| std::fs::read_to_string(format!("{}.{suffix}", path.display()));
        let (true, Ok(inputs), Ok(outputs)) =
            (path.extension().is_some_and(|extension| extension == "gguf"), vectors("inp"), vectors("out"))
        else {
            continue;
        };
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let tokenizer = match GgufMetadata::open(&path).and_then(|file| Tokenizer::from_gguf(&file.vocab()?))
        {
            Ok(tokenizer) => tokenizer,
            Err(TextError::Unsupported { field, value, .. }) => {
                eprintln!("{name}: {field} `{value}` is not supported");
                continue;
            }
            Err(error) => panic!("{name}: {error}"),
        };
        let inputs = inputs.split("\n__ggml_vocab_test__\n");
        for (input, output) in inputs.zip(outputs.lines()) {
            let expected: Vec<TokenId> =
                output.split_whitespace().map(|id| TokenId(id.parse().unwrap())).collect();
            let tokens = tokenizer.encode_bare(input).unwrap();
            checked += 1;
            if tokens != expected {
                failures.insert(format!("{name}: {input:?}: {tokens:?}, not {expected:?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {checked}:\n{failures:#?}", failures.len());
    assert!(checked > 0);
}
