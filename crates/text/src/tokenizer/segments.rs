//! Texts that begin alike need not be cut into tokens again and again: a conversation grows by a turn and is sent whole, a document is
//! asked one question after another.
//!
//! A text is cut where no tokenizer of the kind that is cached here lets a token reach across, whatever stands around the place: before a
//! space between two ASCII letters. The words of all patterns in [`super::pre`] end there, looking ahead no further than the space; no
//! normal form joins across; and what follows is cut into words as if it stood alone. Pieces are taken greedily from the front, so that
//! equal beginnings have equal pieces, and the tokens of each are remembered with its very text: a wrong answer cannot come of a hash.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use microserving_protocol::TokenId;

use crate::error::TextError;

/// Texts below this are not worth remembering.
const SHORTEST_TEXT: usize = 512;
/// A piece is at least so long, if the text is.
const SHORTEST_PIECE: usize = 256;
/// What is remembered of one tokenizer, text and tokens together.
const MAX_BYTES: usize = 32 << 20;

/// The pieces seen lately.
pub(super) struct Segments {
    shortest_piece: usize,
    max_bytes: usize,
    known: Mutex<Known>,
}

/// Two generations: what is used again moves to the young one, and when that is full, the old one is forgotten.
#[derive(Default)]
struct Known {
    young: HashMap<Box<str>, Arc<[TokenId]>>,
    old: HashMap<Box<str>, Arc<[TokenId]>>,
    young_bytes: usize,
}

impl Segments {
    pub(super) fn new() -> Self {
        Self::with(SHORTEST_PIECE, MAX_BYTES)
    }

    fn with(shortest_piece: usize, max_bytes: usize) -> Self {
        Self { shortest_piece, max_bytes, known: Mutex::default() }
    }

    /// Returns the tokens of a text, of which `encode` makes those that are not known. None is a text that is not worth it.
    pub(super) fn encode(
        &self,
        text: &str,
        encode: impl Fn(&str) -> Result<Vec<TokenId>, TextError>,
    ) -> Option<Result<Vec<TokenId>, TextError>> {
        (text.len() >= SHORTEST_TEXT).then(|| self.encode_pieces(text, encode))
    }

    fn encode_pieces(
        &self,
        text: &str,
        encode: impl Fn(&str) -> Result<Vec<TokenId>, TextError>,
    ) -> Result<Vec<TokenId>, TextError> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        for piece in pieces(text, self.shortest_piece) {
            let known = self.lock().get(piece, self.max_bytes / 2);
            if let Some(known) = known {
                tokens.extend_from_slice(&known);
                continue;
            }
            let new = encode(piece)?;
            tokens.extend_from_slice(&new);
            self.lock().put(piece.into(), new.into(), self.max_bytes / 2);
        }
        Ok(tokens)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segments").field("max_bytes", &self.max_bytes).finish_non_exhaustive()
    }
}

impl Known {
    fn get(&mut self, piece: &str, max_bytes: usize) -> Option<Arc<[TokenId]>> {
        if let Some(tokens) = self.young.get(piece) {
            return Some(tokens.clone());
        }
        let (piece, tokens) = self.old.remove_entry(piece)?;
        self.put(piece, tokens.clone(), max_bytes);
        Some(tokens)
    }

    fn put(&mut self, piece: Box<str>, tokens: Arc<[TokenId]>, max_bytes: usize) {
        let num_bytes = piece.len() + size_of_val(&*tokens);
        if num_bytes > max_bytes {
            return;
        }
        if self.young_bytes + num_bytes > max_bytes {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        if self.young.insert(piece, tokens).is_none() {
            self.young_bytes += num_bytes;
        }
    }
}

/// Cuts a text into pieces of at least `shortest` bytes, but for the last; together they are the text.
pub(super) fn pieces(text: &str, shortest: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let bytes = rest.as_bytes();
        let is_cut = |&at: &usize| {
            bytes[at - 1].is_ascii_alphabetic() && bytes[at] == b' ' && bytes[at + 1].is_ascii_alphabetic()
        };
        let cut = (shortest.max(1)..bytes.len().saturating_sub(1)).find(is_cut);
        let (piece, behind) = rest.split_at(cut.unwrap_or(rest.len()));
        rest = behind;
        Some(piece)
    })
}

/// Says whether the name of a token reaches across a place where texts are cut.
pub(super) fn is_cut_inside(name: &str) -> bool {
    pieces(name, 1).nth(1).is_some()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn letters(text: &str) -> Result<Vec<TokenId>, TextError> {
        Ok(text.chars().map(|letter| TokenId(letter.into())).collect())
    }

    #[test]
    fn texts_are_cut_before_spaces_between_letters() {
        let check = |text: &str, shortest: usize, expected: &[&str]| {
            assert_eq!(pieces(text, shortest).collect::<Vec<_>>(), expected);
        };
        check("one two three", 1, &["one", " two", " three"]);
        check("one two three", 4, &["one two", " three"]);
        check("one  two\nthree 4 f,  g h ", 1, &["one  two\nthree 4 f,  g", " h "]);
        check("ä ö a é b", 1, &["ä ö a é b"]);
        check("", 1, &[]);
        check("a", 0, &["a"]);
        assert!(is_cut_inside("<a b>") && !is_cut_inside("<|im_end|>") && !is_cut_inside("< a"));
    }

    #[test]
    fn a_beginning_that_is_known_is_not_cut_again() {
        let segments = Segments::with(SHORTEST_PIECE, MAX_BYTES);
        let made = Cell::new(0);
        let encode = |text: &str| {
            let counted = |piece: &str| {
                made.set(made.get() + piece.len());
                letters(piece)
            };
            made.set(0);
            let tokens = segments.encode(text, counted).expect("long enough").unwrap();
            assert_eq!(tokens, letters(text).unwrap());
            made.get()
        };
        let text: String = (0..200).map(|i| format!("the word {i} of some text ")).collect();
        assert_eq!(encode(&text), text.len());
        assert_eq!(encode(&text), 0);
        let longer = format!("{text}and one more turn");
        assert!(encode(&longer) < 2 * SHORTEST_PIECE + "and one more turn".len());
        assert!(segments.encode("short", letters).is_none());
    }

    #[test]
    fn what_is_remembered_is_bounded_and_what_is_used_stays() {
        let segments = Segments::with(8, 4000);
        let made = Cell::new(0);
        let encode = |text: &str| {
            made.set(0);
            let counted = |piece: &str| {
                made.set(made.get() + 1);
                letters(piece)
            };
            assert_eq!(segments.encode_pieces(text, counted).unwrap(), letters(text).unwrap());
            made.get()
        };
        for i in 0..500 {
            let word = char::from(b'a' + (i % 26) as u8);
            encode(&format!("unique{word}{i} {word} text"));
            assert_eq!(encode("the one that stays"), usize::from(i == 0) * 2, "{i}");
            let known = segments.lock();
            let bytes = |pieces: &HashMap<Box<str>, Arc<[TokenId]>>| -> usize {
                pieces.iter().map(|(piece, tokens)| piece.len() + size_of_val(&**tokens)).sum()
            };
            assert_eq!(bytes(&known.young), known.young_bytes);
            assert!(known.young_bytes + bytes(&known.old) <= 4000, "{i}");
        }
    }
}
