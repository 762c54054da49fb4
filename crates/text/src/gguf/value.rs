//! A value of a GGUF file's key/value section.

/// A value; arrays have one type of element, which the variants spell out where text needs them.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// A non-negative whole number, of 8 to 64 bits in the file.
    Unsigned(u64),
    /// A whole number, of 8 to 64 bits in the file.
    Signed(i64),
    /// A number, of 32 or 64 bits in the file.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// A text.
    String(String),
    /// An array of texts.
    Strings(Vec<String>),
    /// An array of whole numbers, unsigned 64-bit ones beyond the signed range excepted.
    Integers(Vec<i64>),
    /// An array of numbers.
    Floats(Vec<f64>),
    /// An array of anything else, arrays among them.
    Array(Vec<Self>),
}

impl GgufValue {
    /// Returns the name of the kind of value, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "a whole number",
            Self::Float(_) => "a number",
            Self::Bool(_) => "true or false",
            Self::String(_) => "a text",
            Self::Strings(_) => "a list of texts",
            Self::Integers(_) => "a list of whole numbers",
            Self::Floats(_) => "a list of numbers",
            Self::Array(_) => "a list",
        }
    }
}
