//! What the tests of this crate share.

use std::path::PathBuf;

use crate::gguf::GgufVocab;

/// Returns the place named by an environment variable, or says aloud that the test is skipped; where nothing
/// may be skipped, that fails.
pub(crate) fn asset(variable: &str) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Some(path.into());
    }
    assert!(
        std::env::var_os("MICROSERVING_FULL").is_none_or(|full| full != "1"),
        "{variable} is not set, and MICROSERVING_FULL=1 allows no skips"
    );
    eprintln!("SKIPPED: {variable} is not set");
    None
}

/// A byte-level vocabulary of the 256 bytes, the given merges and two control tokens.
pub(crate) fn byte_level_vocab(pre: &str, merges: &[&str]) -> GgufVocab {
    let mut tokens: Vec<String> =
        crate::tokenizer::byte_level_alphabet().iter().map(char::to_string).collect();
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut token_types = vec![1; tokens.len()];
    for name in ["<|endoftext|>", "<|im_end|>"] {
        tokens.push(name.to_owned());
        token_types.push(3);
    }
    GgufVocab {
        model: "gpt2".to_owned(),
        pre: Some(pre.to_owned()),
        merges: merges.iter().map(|merge| (*merge).to_owned()).collect(),
        tokens,
        token_types,
        ..GgufVocab::default()
    }
}
