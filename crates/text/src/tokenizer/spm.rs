//! SentencePiece vocabularies as GGUF files carry them: pieces with scores.
//!
//! The algorithm is SentencePiece's for BPE models (Kudo and Richardson, arXiv 1808.06226; `bpe_model.cc`),
//! which llama.cpp applies to every vocabulary it calls `llama`: begin with single characters, and as long as
//! two neighbours together are a piece, join the pair whose piece scores highest, the leftmost of equals.
//! Characters that are no piece fall back to byte tokens.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use microserving_protocol::TokenId;

use super::hf::fallback_byte;
use super::special::{SpecialFinder, Stretch};
use super::{Around, Encoder, Tokenizer};
use crate::error::TextError;
use crate::gguf::{GgufTokenType, GgufVocab};
use crate::token_table::{LeadingSpace, TokenKind, TokenTable};

/// The character that stands for a space inside pieces.
const SPACE: &str = "▁";

pub(super) fn build(vocab: &GgufVocab) -> Result<Tokenizer, TextError> {
    let prefix = vocab.add_space_prefix.unwrap_or(true);
    let mut pieces = HashMap::with_capacity(vocab.tokens.len());
    let mut bytes: [Option<TokenId>; 256] = [None; 256];
    let mut specials = Vec::new();
    let mut entries = Vec::with_capacity(vocab.tokens.len());
    for (index, token) in vocab.tokens.iter().enumerate() {
        let id = vocab.id(index);
        let kind = vocab.token_type(index);
        let entry = match kind {
            GgufTokenType::Normal => (token.replace(SPACE, " ").into_bytes(), TokenKind::Text),
            GgufTokenType::UserDefined => {
                specials.push((token.replace(SPACE, " "), id));
                (token.replace(SPACE, " ").into_bytes(), TokenKind::Text)
            }
            GgufTokenType::Control => {
                specials.push((token.clone(), id));
                (token.clone().into_bytes(), TokenKind::Special)
            }
            GgufTokenType::Unknown => (token.clone().into_bytes(), TokenKind::Special),
            GgufTokenType::Unused => (token.clone().into_bytes(), TokenKind::Text),
            GgufTokenType::Byte => {
                let byte = fallback_byte(token).ok_or_else(|| {
                    TextError::malformed(
                        format!("tokenizer.ggml.tokens[{index}]"),
                        format!("`{token}` is not the name of a byte"),
                    )
                })?;
                bytes[usize::from(byte)] = Some(id);
                (vec![byte], TokenKind::Text)
            }
        };
        entries.push(entry);
        // Only text joins to pieces: a control token's name is not a word, however it is spelled.
        if matches!(kind, GgufTokenType::Normal | GgufTokenType::UserDefined) {
            let score = vocab.scores.get(index).copied().unwrap_or(0.0);
            pieces.entry(token.clone()).or_insert(Piece { id, score });
        }
    }
    let unknown = vocab.unk;
    if unknown.is_none() && bytes.iter().any(Option::is_none) {
        return Err(TextError::malformed(
            "tokenizer.ggml.tokens",
            "neither all 256 byte tokens nor an unknown token are there, so not every text has tokens",
        ));
    }
    let model = SpmEncoder { pieces, bytes, unknown, prefix, specials: SpecialFinder::new(specials) };
    let around = Around {
        bos: vocab.bos.filter(|_| vocab.add_bos.unwrap_or(true)),
        eos: vocab.eos.filter(|_| vocab.add_eos.unwrap_or(false)),
    };
    Ok(Tokenizer {
        encoder: Encoder::Spm { model: Box::new(model), around },
        segments: None,
        table: TokenTable::new(entries),
        leading: if prefix { LeadingSpace::Strip(1) } else { LeadingSpace::Keep },
        bos: vocab.bos,
        eos: vocab.eos,
    })
}

/// Pieces, scores and what to do with the rest.
#[derive(Debug)]
pub(super) struct SpmEncoder {
    pieces: HashMap<String, Piece>,
    bytes: [Option<TokenId>; 256],
    unknown: Option<TokenId>,
    /// A text, and what follows a special token, begins with a space that is not written.
    prefix: bool,
    specials: SpecialFinder,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    id: TokenId,
    score: f32,
}

/// A run of the text that is one piece so far; the runs form a list that joins shorten.
#[derive(Debug)]
struct Run {
    begin: usize,
    end: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours that could become a piece.
#[derive(Debug)]
struct Join {
    score: f32,
    left: usize,
    right: usize,
    num_bytes: usize,
}

impl Ord for Join {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Join {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Join {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Join {}

impl SpmEncoder {
    pub(super) fn special_id(&self, name: &str) -> Option<TokenId> {
        self.specials.id(name)
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        let mut tokens = Vec::new();
        let mut at_start = true;
        for stretch in self.specials.split(text) {
            match stretch {
                Stretch::Special(id) => {
                    tokens.push(id);
                    at_start = true;
                }
                Stretch::Text(text) => {
                    let mut escaped = text.replace(' ', SPACE);
                    if self.prefix && at_start {
                        escaped.insert_str(0, SPACE);
                    }
                    self.encode_stretch(&escaped, &mut tokens)?;
                    at_start = false;
                }
            }
        }
        Ok(tokens)
    }

    fn encode_stretch(&self, text: &str, tokens: &mut Vec<TokenId>) -> Result<(), TextError> {
        let num_runs = text.chars().count();
        let mut runs: Vec<Run> = text
            .char_indices()
            .enumerate()
            .map(|(index, (begin, char))| Run {
                begin,
                end: begin + char.len_utf8(),
                previous: index.checked_sub(1),
                next: (index + 1 < num_runs).then_some(index + 1),
            })
            .collect();
        let mut joins = BinaryHeap::new();
        for left in 0..num_runs.saturating_sub(1) {
            joins.extend(self.join(text, &runs, left));
        }
        while let Some(Join { left, right, num_bytes, .. }) = joins.pop() {
            // Either run may have been joined to another since; one joined to its left has no next.
            let stale = runs[left].next != Some(right) || runs[right].end - runs[left].begin != num_bytes;
            if stale {
                continue;
            }
            runs[left].end = runs[right].end;
            runs[left].next = runs[right].next.take();
            if let Some(after) = runs[left].next {
                runs[after].previous = Some(left);
            }
            joins.extend(self.join(text, &runs, left));
            if let Some(before) = runs[left].previous {
                joins.extend(self.join(text, &runs, before));
            }
        }
        let mut at = (num_runs > 0).then_some(0);
        while let Some(index) = at {
            self.emit(&text[runs[index].begin..runs[index].end], tokens)?;
            at = runs[index].next;
        }
        Ok(())
    }

    /// Returns the join of run `left` with its neighbour, if together they are a piece.
    fn join(&self, text: &str, runs: &[Run], left: usize) -> Option<Join> {
        let right = runs[left].next?;
        let joined = &text[runs[left].begin..runs[right].end];
        let piece = self.pieces.get(joined)?;
        Some(Join { score: piece.score, left, right, num_bytes: joined.len() })
    }

    fn emit(&self, piece: &str, tokens: &mut Vec<TokenId>) -> Result<(), TextError> {
        if let Some(piece) = self.pieces.get(piece) {
            tokens.push(piece.id);
            return Ok(());
        }
        for byte in piece.bytes() {
            match self.bytes[usize::from(byte)].or(self.unknown) {
                Some(id) => tokens.push(id),
                None => return Err(TextError::Encode { reason: format!("byte {byte:#04x} has no token") }),
            }
        }
        Ok(())
    }
}
