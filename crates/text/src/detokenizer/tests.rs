use proptest::prelude::*;

use super::*;
use crate::gguf::GgufVocab;
use crate::stop::StopStrings;
use crate::stream::TextStream;
use crate::tokenizer::Specials;

fn toy() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::toy_bytes())
}

/// A SentencePiece vocabulary of all bytes and some pieces, most of them with spaces.
fn spm() -> Arc<Tokenizer> {
    let mut vocab = GgufVocab { model: "llama".to_owned(), ..GgufVocab::default() };
    let mut add = |token: &str, kind: u8| {
        vocab.tokens.push(token.to_owned());
        vocab.scores.push(-1.0);
        vocab.token_types.push(kind);
    };
    add("<unk>", 2);
    add("<s>", 3);
    add("</s>", 3);
    for byte in 0..=255_u8 {
        add(&format!("<0x{byte:02X}>"), 6);
    }
    for piece in ["▁", "▁▁", "▁a", "a", "b", "é", "▁👩", "\u{200d}", "\u{301}", "▁the"] {
        add(piece, 1);
    }
    vocab.bos = Some(TokenId(1));
    vocab.eos = Some(TokenId(2));
    Arc::new(Tokenizer::from_gguf(&vocab).unwrap())
}

fn pieces(tokenizer: &Arc<Tokenizer>, tokens: &[u32]) -> (Vec<(String, usize)>, String) {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer));
    let pieces = tokens
        .iter()
        .map(|&token| detokenizer.push(TokenId(token)))
        .map(|piece| (piece.text, piece.offset))
        .collect();
    (pieces, detokenizer.finish())
}

#[track_caller]
fn check(tokenizer: &Arc<Tokenizer>, tokens: &[u32], expected: &[(&str, usize)], rest: &str) {
    let expected: Vec<(String, usize)> =
        expected.iter().map(|&(text, offset)| (text.to_owned(), offset)).collect();
    assert_eq!(pieces(tokenizer, tokens), (expected, rest.to_owned()));
}

#[test]
fn a_character_comes_out_with_its_last_byte() {
    // U+1F600 is f0 9f 98 80.
    check(
        &toy(),
        &[0x61, 0xf0, 0x9f, 0x98, 0x80, 0x62],
        &[("a", 0), ("", 1), ("", 1), ("", 1), ("😀", 1), ("b", 2)],
        "",
    );
    check(&toy(), &[0xc3, 0xa9], &[("", 0), ("é", 0)], "");
}

#[test]
fn bytes_that_can_no_longer_become_a_character_are_replaced_at_once_and_a_tail_at_the_end() {
    check(&toy(), &[0xff, 0x61], &[("\u{fffd}", 0), ("a", 1)], "");
    check(&toy(), &[0xe2, 0x82, 0x61], &[("", 0), ("", 0), ("\u{fffd}a", 1)], "");
    check(&toy(), &[0xe2, 0x82], &[("", 0), ("", 0)], "\u{fffd}");
    // A surrogate is never a character.
    check(&toy(), &[0xed, 0xa0, 0x80], &[("", 0), ("\u{fffd}\u{fffd}", 1), ("\u{fffd}", 2)], "");
}

#[test]
fn special_and_unknown_tokens_say_nothing_even_inside_a_character() {
    check(&toy(), &[256, 0xc3, 257, 9999, 0xa9], &[("", 0), ("", 0), ("", 0), ("", 0), ("é", 0)], "");
}

#[test]
fn the_space_in_front_goes_only_at_the_start_of_a_text() {
    let spm = spm();
    let id = |piece: &str| {
        (0..u32::try_from(spm.num_tokens()).unwrap())
            .find(|&id| spm.token_text(TokenId(id)) == piece)
            .unwrap()
    };
    let (a, two_spaces) = (id(" a"), id("  "));
    check(&spm, &[1, a, a], &[("", 0), ("a", 0), (" a", 1)], "");
    check(&spm, &[two_spaces, a], &[(" ", 0), (" a", 1)], "");

    let mut after_text = Detokenizer::after(Arc::clone(&spm), &[TokenId(1), TokenId(a)]);
    assert_eq!(after_text.push(TokenId(a)).text, " a");
    let mut after_bos = Detokenizer::after(Arc::clone(&spm), &[TokenId(1)]);
    assert_eq!(after_bos.push(TokenId(a)).text, "a");
}

/// The text and the offsets, computed from the whole.
fn reference(tokenizer: &Tokenizer, tokens: &[TokenId]) -> (String, Vec<usize>) {
    let text = tokenizer.decode(tokens, Specials::Skip).unwrap();
    // Where each character of the text begins, in bytes of the undecoded text.
    let mut bytes: Vec<u8> = Vec::new();
    let mut begins = Vec::new();
    let strip = usize::from(tokenizer.leading_space() == LeadingSpace::Strip(1));
    for &token in tokens {
        begins.push(bytes.len());
        bytes.extend_from_slice(tokenizer.table().text_bytes(token));
    }
    let spaces = bytes.iter().take(strip).take_while(|&&byte| byte == b' ').count();
    let mut ends = Vec::new();
    let mut at = spaces;
    for chunk in bytes[spaces..].utf8_chunks() {
        for char in chunk.valid().chars() {
            at += char.len_utf8();
            ends.push(at);
        }
        if !chunk.invalid().is_empty() {
            at += chunk.invalid().len();
            ends.push(at);
        }
    }
    assert_eq!(ends.len(), text.chars().count());
    let offsets = begins.iter().map(|&begin| ends.iter().filter(|&&end| end <= begin).count()).collect();
    (text, offsets)
}

/// Tokens that often make characters, and often break them.
fn tokens() -> impl Strategy<Value = Vec<u32>> {
    let text = prop_oneof![
        Just("👩\u{200d}👧"),
        Just("e\u{301}"),
        Just("日本"),
        Just("a b"),
        Just("\u{fffd}"),
        Just("  ")
    ];
    let part = prop_oneof![
        4 => text.prop_map(|text| text.bytes().map(u32::from).collect::<Vec<_>>()),
        2 => prop_oneof![0x80..0x100_u32, 0..0x80_u32].prop_map(|byte| vec![byte]),
        1 => (256..270_u32).prop_map(|id| vec![id]),
    ];
    proptest::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn pieces_put_together_equal_the_whole(tokens in tokens()) {
        for (tokenizer, shift) in [(toy(), 0), (spm(), 3)] {
            let last = u32::try_from(tokenizer.num_tokens()).unwrap() - 1;
            let tokens: Vec<TokenId> = tokens.iter().map(|&token| TokenId((token + shift).min(last))).collect();
            let (text, offsets) = reference(&tokenizer, &tokens);
            let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer));
            let mut given = String::new();
            for (&token, offset) in tokens.iter().zip(offsets) {
                let piece = detokenizer.push(token);
                // A token without text has no first byte to belong anywhere.
                if !tokenizer.table().text_bytes(token).is_empty() {
                    prop_assert_eq!(piece.offset, offset);
                }
                given.push_str(&piece.text);
                prop_assert!(text.starts_with(&given), "{:?} was given out too early", given);
                prop_assert_eq!(detokenizer.num_chars(), given.chars().count());
            }
            given.push_str(&detokenizer.finish());
            prop_assert_eq!(given, text);
        }
    }

    #[test]
    fn stop_strings_see_the_same_text_however_tokens_cut_it(
        tokens in tokens(),
        stops in proptest::collection::vec(
            prop_oneof![Just("\u{fffd}"), Just("👩"), Just("\u{200d}"), Just("b\u{fffd}"), Just("e\u{301}"), Just("本a"), Just("  ")], 0..3),
    ) {
        let toy = toy();
        let tokens: Vec<TokenId> = tokens.iter().map(|&token| TokenId(token.min(258))).collect();
        let whole = toy.decode(&tokens, Specials::Skip).unwrap();
        let mut at_once = StopStrings::new(&stops).unwrap();
        let mut expected = at_once.push(&whole).text;
        expected.push_str(&at_once.finish());

        let mut stream = TextStream::new(Detokenizer::new(Arc::clone(&toy)), StopStrings::new(&stops).unwrap());
        let mut given = String::new();
        let mut stopped = None;
        for &token in &tokens {
            let step = stream.push(token);
            given.push_str(&step.text);
            stopped = step.stopped_by;
            if stopped.is_some() {
                break;
            }
        }
        let last = stream.finish();
        given.push_str(&last.text);
        prop_assert_eq!(given, expected);
        prop_assert_eq!(stopped.or(last.stopped_by), at_once.matched());
    }
}
