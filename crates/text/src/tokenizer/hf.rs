//! Vocabularies in the format of the `tokenizers` library.

use microserving_protocol::TokenId;
use serde_json::Value;

use super::byte_level::ByteLevel;
use super::segments::{Segments, is_cut_inside};
use super::{Around, Encoder, Tokenizer, pre};
use crate::error::TextError;
use crate::token_table::{LeadingSpace, MAX_TOKENS, TokenKind, TokenTable};

pub(super) fn build(json: &str) -> Result<Tokenizer, TextError> {
    let document: Value =
        serde_json::from_str(json).map_err(|error| TextError::malformed("tokenizer.json", error))?;
    let rule = PieceRule::of(&document["decoder"])?;
    check_merges(&document["model"])?;
    let in_pieces = encodes_in_pieces(&document);
    let mut model = tokenizers::Tokenizer::from_bytes(json.as_bytes())
        .map_err(|error| TextError::malformed("tokenizer.json", error))?;
    drop(document);
    model
        .with_truncation(None)
        .map_err(|error| TextError::malformed("tokenizer.json: truncation", error))?
        .with_padding(None);

    let vocab = model.get_vocab(true);
    let num_tokens = vocab.values().max().map_or(0, |&largest| largest as usize + 1);
    if num_tokens == 0 || num_tokens > MAX_TOKENS {
        return Err(TextError::malformed(
            "tokenizer.json: model.vocab",
            format!("ids from 0 to {MAX_TOKENS}, not {num_tokens} of them"),
        ));
    }
    let mut entries = vec![(Vec::new(), TokenKind::Hole); num_tokens];
    let added = model.get_added_tokens_decoder();
    for (text, id) in &vocab {
        let entry = match added.get(id) {
            Some(added) if added.special => (added.content.as_bytes().to_vec(), TokenKind::Special),
            Some(added) => (added.content.as_bytes().to_vec(), TokenKind::Text),
            None => (rule.bytes(text), TokenKind::Text),
        };
        entries[*id as usize] = entry;
    }
    let around = around(&model);
    Ok(Tokenizer {
        encoder: Encoder::Hf { model: Box::new(model), around },
        segments: in_pieces.then(Segments::new),
        table: TokenTable::new(entries),
        leading: rule.leading,
        bos: None,
        eos: None,
    })
}

pub(super) fn encode(
    model: &tokenizers::Tokenizer,
    text: &str,
    add_special_tokens: bool,
) -> Result<Vec<TokenId>, TextError> {
    let encoding = model
        .encode_fast(text, add_special_tokens)
        .map_err(|error| TextError::Encode { reason: error.to_string() })?;
    Ok(encoding.get_ids().iter().map(|&id| TokenId(id)).collect())
}

/// Finds out what the post-processor puts around a text, by what it puts around two of them; none if that is more than a token on either side.
fn around(model: &tokenizers::Tokenizer) -> Option<Around> {
    let found = |text: &str| {
        let (bare, whole) = (encode(model, text, false).ok()?, encode(model, text, true).ok()?);
        let extra = whole.len().checked_sub(bare.len())?;
        (0..=extra.min(1)).find_map(|front| {
            let (before, rest) = whole.split_at(front);
            let behind = rest.strip_prefix(&*bare)?;
            (behind.len() <= 1).then(|| Around { bos: before.first().copied(), eos: behind.first().copied() })
        })
    };
    let (one, other) = (found("a")?, found("Two words\n")?);
    (one == other).then_some(one)
}

/// Says whether pieces of a text have the tokens that the text has; see [`super::segments`].
fn encodes_in_pieces(document: &Value) -> bool {
    let normalizer = &document["normalizer"];
    let model = &document["model"];
    let added = document["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
    let takes_part = |token: &Value| {
        ["single_word", "lstrip", "rstrip"].iter().any(|flag| token[flag] == true)
            || token["content"].as_str().is_none_or(is_cut_inside)
    };
    (normalizer.is_null() || normalizer["type"] == "NFC")
        && model["type"] == "BPE"
        && (model["dropout"].is_null() || model["dropout"] == 0.0)
        && parts_words(&document["pre_tokenizer"])
        && !added.iter().any(takes_part)
}

/// Says whether a pre-tokenizer ends words where texts are cut into pieces, and takes nothing across.
fn parts_words(pre_tokenizer: &Value) -> bool {
    let steps = match pre_tokenizer["type"].as_str() {
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().map_or(&[][..], Vec::as_slice),
        _ => std::slice::from_ref(pre_tokenizer),
    };
    let pattern = |step: &Value, fits: fn(&str) -> bool| {
        step["invert"] == false
            && step["behavior"] == "Isolated"
            && step["pattern"]["Regex"].as_str().is_some_and(fits)
    };
    let parts = |step: &Value| match step["type"].as_str() {
        Some("ByteLevel") => step["use_regex"] != false,
        Some("Split") => pattern(step, pre::parts_words),
        _ => false,
    };
    let harms = |step: &Value| match step["type"].as_str() {
        Some("ByteLevel") => step["add_prefix_space"] != false,
        Some("Split") => !pattern(step, pre::leaves_words),
        Some("Digits") => false,
        _ => true,
    };
    steps.iter().any(parts) && !steps.iter().any(harms)
}

/// Checks that every merge of a BPE model names two tokens that together are one: the library takes that for
/// granted.
fn check_merges(model: &Value) -> Result<(), TextError> {
    let (Some(vocab), Some(merges)) = (model["vocab"].as_object(), model["merges"].as_array()) else {
        return Ok(());
    };
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or_default();
    for (index, merge) in merges.iter().enumerate() {
        let halves = match merge {
            Value::String(pair) => pair.split_once(' '),
            Value::Array(pair) => match pair.as_slice() {
                [Value::String(left), Value::String(right)] => Some((left.as_str(), right.as_str())),
                _ => None,
            },
            _ => None,
        };
        let known = halves.is_some_and(|(left, right)| {
            vocab.contains_key(left)
                && vocab.contains_key(right)
                && right
                    .strip_prefix(prefix)
                    .is_some_and(|right| vocab.contains_key(&format!("{left}{right}")))
        });
        if !known {
            return Err(TextError::malformed(
                format!("tokenizer.json: model.merges[{index}]"),
                format!("{merge} does not name two tokens that together are one"),
            ));
        }
    }
    Ok(())
}

/// How a decoder turns a token into bytes, read off its description.
struct PieceRule {
    byte_level: Option<ByteLevel>,
    /// `<0x0A>` is a byte.
    byte_fallback: bool,
    replacements: Vec<(String, String)>,
    leading: LeadingSpace,
}

impl PieceRule {
    fn of(decoder: &Value) -> Result<Self, TextError> {
        let mut rule = Self {
            byte_level: None,
            byte_fallback: false,
            replacements: Vec::new(),
            leading: LeadingSpace::Keep,
        };
        rule.add(decoder, &mut false)?;
        Ok(rule)
    }

    /// Reads one step of the decoder. `fused` says whether the tokens have been joined, after which a strip
    /// is one of the whole text.
    fn add(&mut self, step: &Value, fused: &mut bool) -> Result<(), TextError> {
        let kind = step["type"].as_str().unwrap_or("null");
        match kind {
            "Sequence" => {
                for step in step["decoders"].as_array().into_iter().flatten() {
                    self.add(step, fused)?;
                }
            }
            "ByteLevel" => {
                self.byte_level = Some(ByteLevel::new());
                *fused = true;
            }
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => *fused = true,
            "Metaspace" => {
                let replacement = step["replacement"].as_str().unwrap_or("▁").to_owned();
                let never =
                    step["prepend_scheme"] == "never" || step["add_prefix_space"] == Value::Bool(false);
                self.replacements.push((replacement, " ".to_owned()));
                if !never {
                    self.leading = LeadingSpace::DropInFirstToken;
                }
            }
            "Replace" => match (step["pattern"]["String"].as_str(), step["content"].as_str()) {
                (Some(from), Some(to)) if !*fused => {
                    self.replacements.push((from.to_owned(), to.to_owned()));
                }
                _ => return Err(unsupported(&step.to_string())),
            },
            "Strip" => match (step["content"].as_str(), step["start"].as_u64(), step["stop"].as_u64()) {
                (Some(" "), Some(start), Some(0)) if *fused => {
                    self.leading = LeadingSpace::Strip(usize::try_from(start).unwrap_or(usize::MAX));
                }
                (_, Some(0), Some(0)) => {}
                _ => return Err(unsupported(&step.to_string())),
            },
            _ => return Err(unsupported(kind)),
        }
        Ok(())
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        if self.byte_fallback
            && let Some(byte) = fallback_byte(token)
        {
            return vec![byte];
        }
        let mut text = token.to_owned();
        for (from, to) in &self.replacements {
            text = text.replace(from, to);
        }
        match &self.byte_level {
            Some(level) => level.decode(&text),
            None => text.into_bytes(),
        }
    }
}

/// Returns the byte that a token like `<0x0A>` stands for.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

fn unsupported(value: &str) -> TextError {
    TextError::unsupported(
        "tokenizer.json: decoder",
        value,
        "its tokens must each have bytes of their own, as with ByteLevel, Metaspace or ByteFallback",
    )
}
