//! A byte-level BPE vocabulary of any size, for models whose weights mean nothing: every text has tokens, and every token a text.

use candle_core::quantized::gguf_file::Value;

/// The tokens at the end, which steer: end of text, and ChatML's marks.
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Returns the `tokenizer.*` keys of a file with `size` tokens. `pre` says how texts are cut into words.
pub(crate) fn metadata(pre: &str, size: usize) -> Vec<(String, Value)> {
    let (tokens, merges) = tokens_and_merges(size);
    let first_special = size - SPECIAL.len();
    let kinds = (0..size).map(|id| Value::I32(if id < first_special { 1 } else { 3 })).collect();
    let strings = |list: Vec<String>| Value::Array(list.into_iter().map(Value::String).collect());
    let id = |at: usize| Value::U32((first_special + at) as u32);
    [
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String(pre.into())),
        ("tokenizer.ggml.tokens", strings(tokens)),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.merges", strings(merges)),
        ("tokenizer.ggml.bos_token_id", id(0)),
        ("tokenizer.ggml.eos_token_id", id(2)),
        ("tokenizer.ggml.padding_token_id", id(0)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
        ("tokenizer.chat_template", Value::String(TEMPLATE.into())),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .to_vec()
}

/// Returns the tokens and how they come of each other: bytes, then words of two letters, of three and so on, each a shorter word and a
/// letter, with a space in front and without.
fn tokens_and_merges(size: usize) -> (Vec<String>, Vec<String>) {
    let mut tokens: Vec<String> = (0..=u8::MAX).map(|byte| byte_letter(byte).to_string()).collect();
    let mut merges = Vec::new();
    let starts: Vec<String> = std::iter::once(byte_letter(b' ')).chain('a'..='z').map(String::from).collect();
    let mut shorter = starts;
    while tokens.len() + SPECIAL.len() < size {
        let mut longer = Vec::new();
        for word in &shorter {
            for letter in 'a'..='z' {
                if tokens.len() + SPECIAL.len() == size {
                    break;
                }
                merges.push(format!("{word} {letter}"));
                tokens.push(format!("{word}{letter}"));
                longer.push(format!("{word}{letter}"));
            }
        }
        shorter = longer;
    }
    tokens.extend(SPECIAL.map(str::to_owned));
    (tokens, merges)
}

/// Returns the letter that GPT-2's vocabularies write for a byte: itself where it is one, else one from U+0100 on.
fn byte_letter(byte: u8) -> char {
    let is_letter = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_letter(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|&before| !is_letter(before)).count() as u32;
    char::from_u32(0x100 + place).expect("there are 68 such bytes")
}
