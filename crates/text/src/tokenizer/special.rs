//! Special tokens written out in a text.

use std::collections::HashMap;

use microserving_protocol::TokenId;

/// Finds the names of special tokens in a text: the leftmost first, the longest if several begin there.
#[derive(Debug, Default)]
pub(super) struct SpecialFinder {
    /// By first byte, longest name first.
    by_first_byte: HashMap<u8, Vec<(String, TokenId)>>,
}

/// A stretch of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stretch<'text> {
    Text(&'text str),
    Special(TokenId),
}

impl SpecialFinder {
    pub(super) fn new(names: impl IntoIterator<Item = (String, TokenId)>) -> Self {
        let mut by_first_byte: HashMap<u8, Vec<(String, TokenId)>> = HashMap::new();
        for (name, id) in names {
            if let Some(&first) = name.as_bytes().first() {
                by_first_byte.entry(first).or_default().push((name, id));
            }
        }
        for names in by_first_byte.values_mut() {
            names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        }
        Self { by_first_byte }
    }

    pub(super) fn id(&self, name: &str) -> Option<TokenId> {
        let names = self.by_first_byte.get(name.as_bytes().first()?)?;
        names.iter().find(|(other, _)| other == name).map(|&(_, id)| id)
    }

    /// Cuts a text into stretches; none is empty.
    pub(super) fn split<'text>(&self, text: &'text str) -> Vec<Stretch<'text>> {
        let mut stretches = Vec::new();
        let mut begin = 0;
        let mut at = 0;
        while at < text.len() {
            let found = self.by_first_byte.get(&text.as_bytes()[at]).and_then(|names| {
                names.iter().find(|(name, _)| text.as_bytes()[at..].starts_with(name.as_bytes()))
            });
            match found {
                Some((name, id)) => {
                    if begin < at {
                        stretches.push(Stretch::Text(&text[begin..at]));
                    }
                    stretches.push(Stretch::Special(*id));
                    at += name.len();
                    begin = at;
                }
                None => at += 1,
            }
        }
        if begin < text.len() {
            stretches.push(Stretch::Text(&text[begin..]));
        }
        stretches
    }
}

#[cfg(test)]
mod tests {
    use super::Stretch::{Special, Text};
    use super::*;

    #[test]
    fn the_leftmost_and_longest_name_is_found() {
        let finder = SpecialFinder::new([
            ("<a>".to_owned(), TokenId(1)),
            ("<a><b>".to_owned(), TokenId(2)),
            ("é".to_owned(), TokenId(3)),
        ]);
        assert_eq!(finder.split("x<a>y"), [Text("x"), Special(TokenId(1)), Text("y")]);
        assert_eq!(finder.split("<a><b><a>"), [Special(TokenId(2)), Special(TokenId(1))]);
        assert_eq!(finder.split("<a"), [Text("<a")]);
        assert_eq!(finder.split("èé"), [Text("è"), Special(TokenId(3))]);
        assert_eq!(finder.split(""), []);
        assert_eq!(finder.id("<a><b>"), Some(TokenId(2)));
        assert_eq!(finder.id("<b>"), None);
    }
}
