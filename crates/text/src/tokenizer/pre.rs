//! How byte-level vocabularies cut a text into words before merging, by the name GGUF files give in
//! `tokenizer.ggml.pre`.
//!
//! The patterns are those of the models' own `tokenizer.json`; GGUF files carry only a name for them.

use crate::error::TextError;

/// The words of GPT-2, and of most models since.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
pub(super) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3_CJK: &str = r"[一-龥぀-ゟ゠-ヿ]+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// Says whether a pattern ends words before a space between two letters, looking ahead no further and never behind: what lies on either
/// side is then cut as if it stood alone.
pub(super) fn parts_words(pattern: &str) -> bool {
    [GPT2, LLAMA3, QWEN2, QWEN35, TEKKEN, GPT4O, SEED_CODER, DEEPSEEK3].contains(&pattern)
}

/// Says whether a pattern at least never takes such a space together with letters on both sides.
pub(super) fn leaves_words(pattern: &str) -> bool {
    parts_words(pattern) || [DEEPSEEK3_CJK, r"\p{N}", r"\p{N}{1,3}", "[0-9][0-9][0-9]"].contains(&pattern)
}

/// A way to cut a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// Applied one after the other, each cutting what the former left whole into matches and gaps.
    pub(super) patterns: &'static [&'static str],
    /// A word that is a token becomes that token even if the merges do not lead there.
    pub(super) ignore_merges: bool,
    /// Whether a beginning-of-sequence token comes first where the file does not say.
    pub(super) add_bos: bool,
    /// The text is brought to Unicode's composed form first.
    pub(super) nfc: bool,
}

impl PreTokenizer {
    /// Looks a name up; files older than the key are read as `default`.
    pub(super) fn named(name: Option<&str>) -> Result<Self, TextError> {
        let plain = |patterns| Self { patterns, ignore_merges: false, add_bos: false, nfc: false };
        Ok(match name.unwrap_or("default") {
            "default" => plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
            "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "exaone4" | "a.x-4.0"
            | "mellum" | "gigachat" => plain(&[GPT2]),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b"
            | "mellum2" => plain(&[r"\p{N}", GPT2]),
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
            | "lfm2" => Self { patterns: &[LLAMA3], ignore_merges: true, add_bos: true, nfc: false },
            "dbrx" | "smaug-bpe" | "chatglm-bpe" => plain(&[LLAMA3]),
            "glm4" | "glm5" => Self { ignore_merges: true, ..plain(&[LLAMA3]) },
            "qwen2" | "megrez" => Self { nfc: true, ..plain(&[QWEN2]) },
            "deepseek-r1-qwen" | "stablelm2" | "hunyuan" | "solar-open" | "kormo" | "grok-2" => {
                plain(&[QWEN2])
            }
            "qwen35" => plain(&[QWEN35]),
            "tekken" => Self { patterns: &[TEKKEN], ignore_merges: true, add_bos: true, nfc: false },
            "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" => plain(&[GPT4O]),
            "deepseek-coder" => plain(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]),
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => {
                plain(&[r"\p{N}{1,3}", DEEPSEEK3_CJK, DEEPSEEK3])
            }
            "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
            "seed-coder" => plain(&[SEED_CODER]),
            other => {
                return Err(TextError::unsupported(
                    "tokenizer.ggml.pre",
                    other,
                    "this pre-tokenizer is not known; serve the model from a directory with its tokenizer.json instead",
                ));
            }
        })
    }
}
