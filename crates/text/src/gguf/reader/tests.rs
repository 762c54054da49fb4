use proptest::prelude::*;

use super::*;

/// Writes GGUF headers, right or wrong.
struct Writer(Vec<u8>);

impl Writer {
    fn new(version: u32, num_keys: u64) -> Self {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        bytes.extend(num_keys.to_le_bytes());
        Self(bytes)
    }

    fn string(mut self, text: &str) -> Self {
        self.0.extend((text.len() as u64).to_le_bytes());
        self.0.extend(text.as_bytes());
        self
    }

    fn u32(mut self, number: u32) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn u64(mut self, number: u64) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn read(&self) -> Result<GgufMetadata, TextError> {
        GgufMetadata::read(self.0.as_slice(), self.0.len() as u64, "test.gguf")
    }
}

fn sample() -> Writer {
    Writer::new(3, 6)
        .string("a.text")
        .u32(8)
        .string("grüße")
        .string("a.flag")
        .u32(7)
        .raw(&[1])
        .string("a.number")
        .u32(5)
        .raw(&(-7_i32).to_le_bytes())
        .string("a.float")
        .u32(6)
        .raw(&1.5_f32.to_le_bytes())
        .string("a.texts")
        .u32(9)
        .u32(8)
        .u64(2)
        .string("x")
        .string("")
        .string("a.nested")
        .u32(9)
        .u32(9)
        .u64(1)
        .u32(0)
        .u64(3)
        .raw(&[1, 2, 3])
}

#[test]
fn every_kind_of_value_is_read() {
    let metadata = sample().read().unwrap();
    assert_eq!(metadata.string("a.text").unwrap(), Some("grüße"));
    assert_eq!(metadata.bool("a.flag").unwrap(), Some(true));
    assert_eq!(metadata.get("a.number"), Some(&GgufValue::Signed(-7)));
    assert_eq!(metadata.get("a.float"), Some(&GgufValue::Float(1.5)));
    assert_eq!(metadata.get("a.texts"), Some(&GgufValue::Strings(vec!["x".to_owned(), String::new()])));
    assert_eq!(metadata.get("a.nested"), Some(&GgufValue::Array(vec![GgufValue::Integers(vec![1, 2, 3])])));
    assert_eq!(metadata.iter().count(), 6);
    assert_eq!(metadata.string("absent").unwrap(), None);
    let error = metadata.u32("a.number").unwrap_err().to_string();
    assert!(error.contains("a.number") && error.contains("number from 0"), "{error}");
    assert!(metadata.bool("a.text").unwrap_err().to_string().contains("a.text"));
}

#[test]
fn broken_headers_are_refused_with_the_reason() {
    let check = |writer: Writer, expected: &str| {
        let error = writer.read().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(Writer(b"GGML1234".to_vec()), "does not begin");
    check(Writer(Vec::new()), "too early");
    check(Writer::new(1, 0), "versions 2 and 3");
    check(Writer::new(3_u32.swap_bytes(), 0), "big endian");
    check(Writer::new(3, u64::MAX), "keys, more than");
    check(Writer::new(3, 1), "too early");
    check(Writer::new(3, 1).u64(u64::MAX), "more than");
    check(Writer::new(3, 1).string("k").u32(13), "`k`: values of type 13");
    check(Writer::new(3, 1).string("k").u32(7).raw(&[2]), "neither true nor false");
    check(Writer::new(3, 1).string("k").u32(8).u64(1 << 40), "more than");
    check(Writer::new(3, 1).string("k").u32(8).u64(1).raw(&[0xff]), "UTF-8");
    check(Writer::new(3, 1).string("k").u32(9).u32(4).u64(u64::MAX), "does not fit");
    check(Writer::new(3, 1).string("k").u32(9).u32(8).u64(1 << 50), "does not fit");
    let deep = (0..6).fold(Writer::new(3, 1).string("k").u32(9), |writer, _| writer.u32(9).u64(1));
    check(deep.u32(0).u64(0).raw(&[0; 64]), "nested");
    check(Writer::new(3, 2).string("k").u32(7).raw(&[1]).string("k").u32(7).raw(&[1]), "twice");
}

#[test]
fn a_header_without_a_vocabulary_says_what_is_missing() {
    let error = sample().read().unwrap().vocab().unwrap_err().to_string();
    assert!(error.contains("tokenizer.ggml.model"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), version in 2..4_u32, keys in 0..5_u64) {
        let _ = Writer(bytes.clone()).read();
        let _ = Writer::new(version, keys).raw(&bytes).read();
    }

    #[test]
    fn damaged_headers_never_panic(at in any::<prop::sample::Index>(), with in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let mut bytes = sample().0;
        let at = at.index(bytes.len());
        bytes[at] = with;
        let cut = cut.index(bytes.len()) + 1;
        if let Ok(metadata) = Writer(bytes[..cut].to_vec()).read() {
            let _ = metadata.vocab();
        }
    }
}
