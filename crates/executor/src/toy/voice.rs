//! From a hidden word to logits that read like words.

use microserving_protocol::TokenId;

use super::ToyExecutor;
use super::state::mix;

/// What no ordinary byte reaches, and what no byte can beat.
const NEVER: f32 = -40.0;
const ALWAYS: f32 = 40.0;

#[derive(Clone, Copy, PartialEq)]
enum After {
    Vowel,
    /// A consonant that words end with.
    Last,
    /// Any other.
    Consonant,
    Mark,
    Gap,
}

/// Fills `logits` with the taste of the language, given the last token, plus noise from the hidden word. Once in
/// `eos_one_in` the end of the text beats everything.
pub(super) fn speak(hidden: u64, last: TokenId, eos_one_in: u64, logits: &mut [f32]) {
    let after = match u8::try_from(last.0) {
        Ok(b'a' | b'e' | b'i' | b'o' | b'u' | b'y') => After::Vowel,
        Ok(b'd' | b'l' | b'n' | b'r' | b's' | b't') => After::Last,
        Ok(b'a'..=b'z') => After::Consonant,
        Ok(b'.' | b',') => After::Mark,
        _ => After::Gap,
    };
    for (token, logit) in (0u32..).zip(logits.iter_mut()) {
        let bits = mix(hidden, u64::from(token)) >> 40;
        let noise = bits as f32 * (4.0 / (1u64 << 24) as f32);
        *logit = u8::try_from(token).map_or(NEVER, |byte| taste(after, byte)) + noise;
    }
    let ends = eos_one_in > 0 && mix(hidden, u64::MAX).is_multiple_of(eos_one_in);
    logits[ToyExecutor::EOS.0 as usize] = if ends { ALWAYS } else { NEVER };
}

fn taste(after: After, byte: u8) -> f32 {
    use After::{Consonant, Gap, Last, Mark, Vowel};
    match (byte, after) {
        (b'a' | b'e' | b'i' | b'o', Consonant | Last) => 6.6,
        (b'u', Consonant | Last) => 5.6,
        (b'r' | b'l' | b'h', Consonant) => 4.4,
        (b't' | b's' | b'd', Last) => 3.6,
        (b'n' | b'r' | b's' | b't' | b'l' | b'd' | b'm', Vowel) => 5.6,
        (b'a' | b'e' | b'i' | b'o' | b'u', Vowel) => 3.2,
        (b'b' | b'c' | b'f' | b'g' | b'h' | b'k' | b'm' | b'p' | b'v' | b'w', Gap) => 5.6,
        (b's' | b't' | b'a' | b'o', Gap) => 4.4,
        (b'q' | b'x' | b'z' | b'j', _) => 1.6,
        (b'a'..=b'z', Consonant | Last) => 2.2,
        (b'a'..=b'z', _) => 4.4,
        (b' ', Vowel) => 6.4,
        (b' ', Last) => 7.2,
        (b' ', Consonant) => 2.8,
        (b' ', Mark) => 12.0,
        (b',', Vowel | Last) => 4.8,
        (b'.', Vowel | Last) => 4.4,
        // Rare in free text, but a grammar that asks for them gets somewhere.
        (b'"', _) => 1.5,
        (b'}' | b']' | b':' | b',' | b'.', _) => 0.5,
        (b'{' | b'[' | b'0'..=b'9', _) => -1.0,
        (b'A'..=b'Z' | b'!' | b'?' | b'-' | b'\'' | b'(' | b')' | b'\n', _) => -4.0,
        (0x20..=0x7e, _) => -8.0,
        _ => -20.0,
    }
}
