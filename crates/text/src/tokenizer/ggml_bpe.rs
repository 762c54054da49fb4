//! Byte-level BPE vocabularies embedded in GGUF files.
//!
//! Some lack tokens for bytes that their training texts never had (control characters, bytes that UTF-8 never
//! uses). Such a byte in a prompt has no tokens, as under the models' own tokenizers.

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel as ByteLevelSplit;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::byte_level::ByteLevel;
use super::pre::PreTokenizer;
use super::segments::{Segments, is_cut_inside};
use super::{Around, Encoder, Tokenizer};
use crate::error::TextError;
use crate::gguf::{GgufTokenType, GgufVocab};
use crate::token_table::{LeadingSpace, TokenKind, TokenTable};

pub(super) fn build(vocab: &GgufVocab) -> Result<Tokenizer, TextError> {
    let pre = PreTokenizer::named(vocab.pre.as_deref())?;
    let mut model = tokenizers::Tokenizer::new(merges(vocab, &pre)?);
    if pre.nfc {
        model
            .with_normalizer(Some(NFC))
            .map_err(|error| TextError::malformed("tokenizer.ggml.pre", error))?;
    }
    model.with_pre_tokenizer(Some(splits(&pre)?));

    let level = ByteLevel::new();
    let mut added = Vec::new();
    let mut entries = Vec::with_capacity(vocab.tokens.len());
    for (index, token) in vocab.tokens.iter().enumerate() {
        entries.push(match vocab.token_type(index) {
            GgufTokenType::Control => {
                added.push(AddedToken::from(token.clone(), true).normalized(false));
                (token.clone().into_bytes(), TokenKind::Special)
            }
            GgufTokenType::Unknown => (token.clone().into_bytes(), TokenKind::Special),
            GgufTokenType::UserDefined => {
                added.push(AddedToken::from(token.clone(), false).normalized(false));
                (token.clone().into_bytes(), TokenKind::Text)
            }
            GgufTokenType::Normal | GgufTokenType::Unused | GgufTokenType::Byte => {
                (level.decode(token), TokenKind::Text)
            }
        });
    }
    added.retain(|token| !token.content.is_empty());
    let in_pieces = !added.iter().any(|token| is_cut_inside(&token.content));
    model.add_tokens(added).map_err(|error| TextError::malformed("tokenizer.ggml.tokens", error))?;

    let around = Around {
        bos: vocab.bos.filter(|_| vocab.add_bos.unwrap_or(pre.add_bos)),
        eos: vocab.eos.filter(|_| vocab.add_eos.unwrap_or(false)),
    };
    Ok(Tokenizer {
        encoder: Encoder::Bpe { model: Box::new(model), around },
        segments: in_pieces.then(Segments::new),
        table: TokenTable::new(entries),
        leading: LeadingSpace::Keep,
        bos: vocab.bos,
        eos: vocab.eos,
    })
}

fn merges(vocab: &GgufVocab, pre: &PreTokenizer) -> Result<BPE, TextError> {
    let mut ids = Vocab::default();
    for (index, token) in vocab.tokens.iter().enumerate() {
        ids.entry(token.clone()).or_insert(vocab.id(index).0);
    }
    let mut merges = Vec::with_capacity(vocab.merges.len());
    for (index, merge) in vocab.merges.iter().enumerate() {
        // A token may contain a space only where files spell one raw; then the halves are those that are
        // tokens.
        let halves = merge
            .match_indices(' ')
            .map(|(at, _)| (&merge[..at], &merge[at + 1..]))
            .find(|(left, right)| ids.contains_key(*left) && ids.contains_key(*right));
        let joined = |(left, right): (&str, &str)| ids.contains_key(format!("{left}{right}").as_str());
        let Some((left, right)) = halves.filter(|&halves| joined(halves)) else {
            return Err(TextError::malformed(
                format!("tokenizer.ggml.merges[{index}]"),
                format!("`{merge}` does not name two tokens that together are one"),
            ));
        };
        merges.push((left.to_owned(), right.to_owned()));
    }
    BPE::builder()
        .vocab_and_merges(ids, merges)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(|error| TextError::malformed("tokenizer.ggml.merges", error))
}

fn splits(pre: &PreTokenizer) -> Result<PreTokenizerWrapper, TextError> {
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in pre.patterns {
        let split =
            Split::new(SplitPattern::Regex((*pattern).to_owned()), SplitDelimiterBehavior::Isolated, false)
                .map_err(|error| TextError::malformed("tokenizer.ggml.pre", error))?;
        steps.push(split.into());
    }
    steps.push(ByteLevelSplit::new(false, false, false).into());
    Ok(PreTokenizerWrapper::from(Sequence::new(steps)))
}
