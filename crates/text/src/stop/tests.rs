use proptest::prelude::*;

use super::*;

/// The rule of [`StopStrings`], read literally.
fn reference(text: &str, stops: &[String]) -> (String, Option<usize>) {
    for (at, char) in text.char_indices() {
        let so_far = &text[..at + char.len_utf8()];
        let mut best: Option<usize> = None;
        for (index, stop) in stops.iter().enumerate() {
            if so_far.ends_with(stop.as_str()) && best.is_none_or(|best| stops[best].len() < stop.len()) {
                best = Some(index);
            }
        }
        if let Some(best) = best {
            return (so_far[..so_far.len() - stops[best].len()].to_owned(), Some(best));
        }
    }
    (text.to_owned(), None)
}

fn streamed(pieces: &[&str], stops: &[&str]) -> (Vec<String>, Option<usize>) {
    let mut matcher = StopStrings::new(stops).unwrap();
    let mut given: Vec<String> = pieces.iter().map(|piece| matcher.push(piece).text).collect();
    given.push(matcher.finish());
    (given, matcher.matched())
}

#[track_caller]
fn check(pieces: &[&str], stops: &[&str], given: &[&str], matched: Option<usize>) {
    let given: Vec<String> = given.iter().map(|text| (*text).to_owned()).collect();
    assert_eq!(streamed(pieces, stops), (given, matched));
}

#[test]
fn text_that_may_begin_a_stop_string_is_held_back_and_no_more() {
    check(&["a", "b", "c"], &[], &["a", "b", "c", ""], None);
    check(&["Hello", " wor", "ld!"], &["world"], &["Hello", " ", "", ""], Some(0));
    check(&["Hello", " wor", "k"], &["world"], &["Hello", " ", "work", ""], None);
    check(&["aab"], &["aac"], &["aab", ""], None);
    check(&["aa", "ab"], &["aab"], &["", "a", ""], Some(0));
    check(&["all of it"], &["all of it"], &["", ""], Some(0));
    check(&["\n", "\n", "x"], &["\n\n"], &["", "", "", ""], Some(0));
}

#[test]
fn the_first_to_be_complete_wins_and_of_those_the_longest() {
    check(&["xabcd"], &["abcd", "bc"], &["xa", ""], Some(1));
    check(&["xabc"], &["bc", "abc", "c"], &["x", ""], Some(1));
    check(&["xab", "cd"], &["abcd", "abce"], &["x", "", ""], Some(0));
    check(&["xab", "ce"], &["abcd", "ce"], &["x", "ab", ""], Some(1));
    check(&["same"], &["me", "me"], &["sa", ""], Some(0));
}

#[test]
fn characters_of_several_bytes_are_never_cut() {
    // The two share their first three bytes.
    check(&["😀", "x"], &["😁"], &["😀", "x", ""], None);
    check(&["👩\u{200d}", "👩", "\u{200d}👧!"], &["👩\u{200d}👧"], &["", "👩\u{200d}", "", ""], Some(0));
    check(&["e", "\u{301}e"], &["\u{301}"], &["e", "", ""], Some(0));
    check(&["bad\u{fffd}end"], &["\u{fffd}"], &["bad", ""], Some(0));
}

#[test]
fn text_after_the_stop_string_is_swallowed() {
    let mut matcher = StopStrings::new(&["."]).unwrap();
    assert_eq!(matcher.push("One. Two."), StopStep { text: "One".to_owned(), matched: Some(0) });
    assert_eq!(matcher.push("Three."), StopStep { text: String::new(), matched: Some(0) });
    assert_eq!(matcher.pass("Four"), "");
    assert_eq!(matcher.finish(), "");
}

#[test]
fn passed_text_neither_ends_nor_begins_a_stop_string() {
    let mut matcher = StopStrings::new(&["ab"]).unwrap();
    assert_eq!(matcher.push("xa").text, "x");
    assert_eq!(matcher.pass("b ab a"), "ab ab a");
    assert_eq!(matcher.push("b"), StopStep { text: "b".to_owned(), matched: None });
    assert_eq!(matcher.push("ab").matched, Some(0));
}

#[test]
fn stop_strings_out_of_bounds_are_refused_by_name() {
    let check = |stops: &[&str], field: &str| {
        let error = StopStrings::new(stops).unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
    };
    check(&[""], "stop");
    check(&["a", ""], "stop[1]");
    check(&[&"a".repeat(MAX_STOP_BYTES + 1)], "stop");
    check(&vec!["a"; MAX_STOPS + 1], "stop");
}

/// Text of few characters, so that stop strings are often met: letters, a combining mark, joined and single
/// emoji, a replacement character.
fn text(length: std::ops::Range<usize>) -> impl Strategy<Value = String> {
    let chars = prop_oneof![
        "[abc]",
        Just("é".into()),
        Just("\u{301}".into()),
        Just("👩".into()),
        Just("\u{200d}".into()),
        Just("😀".into()),
        Just("😁".into()),
        Just("\u{fffd}".into())
    ];
    proptest::collection::vec(chars, length).prop_map(|parts: Vec<String>| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_cutting_gives_what_the_rule_says(
        text in text(0..40),
        stops in proptest::collection::vec(text(1..5), 0..5),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let borders: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| borders[cut.index(borders.len())]).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let mut matcher = StopStrings::new(&stops).unwrap();
        let mut given = String::new();
        for pair in cuts.windows(2) {
            given.push_str(&matcher.push(&text[pair[0]..pair[1]]).text);
            let (expected, _) = reference(&text, &stops);
            prop_assert!(expected.starts_with(&given), "{:?} was given out too early", given);
        }
        given.push_str(&matcher.finish());
        prop_assert_eq!((given, matcher.matched()), reference(&text, &stops));
    }

    #[test]
    fn only_what_could_become_a_stop_string_is_held(
        text in text(0..20),
        stops in proptest::collection::vec(text(1..6), 1..4),
    ) {
        let mut matcher = StopStrings::new(&stops).unwrap();
        let given = matcher.push(&text);
        if given.matched.is_none() {
            let held = &text[given.text.len()..];
            prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held)), "{:?} is held", held);
        }
    }
}
