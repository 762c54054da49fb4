//! `tojson` as Python writes it.
//!
//! Models were trained on prompts made by Python's `json.dumps(value, ensure_ascii=False)`: a space after `:`
//! and `,`, nothing escaped for HTML. One space more or less is another prompt.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Nothing nests deeper in a request that was parsed.
const MAX_DEPTH: usize = 128;

/// The filter, with the arguments of Python's function.
pub(super) fn filter(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let indent = match arguments.get::<Option<Value>>("indent")? {
        Some(indent) if !indent.is_none() => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => {
                let width = indent.as_usize().filter(|&width| width <= 32).ok_or_else(|| {
                    Error::new(ErrorKind::InvalidOperation, "tojson: indent must be a number from 0 to 32")
                })?;
                Some(" ".repeat(width))
            }
        },
        _ => None,
    };
    let separators = match arguments.get::<Option<Vec<String>>>("separators")? {
        Some(pair) => match <[String; 2]>::try_from(pair) {
            Ok([item, key]) => Some((item, key)),
            Err(_) => {
                return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be a pair"));
            }
        },
        None => None,
    };
    let (item_separator, key_separator) =
        separators.unwrap_or_else(|| (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()));
    let writer = Writer {
        indent,
        item_separator,
        key_separator,
        ascii: arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    arguments.assert_all_used()?;
    let mut output = String::new();
    writer.write(value, 0, &mut output)?;
    Ok(Value::from_safe_string(output))
}

struct Writer {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ascii: bool,
    sorted: bool,
}

impl Writer {
    fn write(&self, value: &Value, depth: usize, output: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "tojson: nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => output.push_str("null"),
            ValueKind::Bool => output.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value, output),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), output),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.collect::<Vec<_>>();
                self.brackets('[', ']', depth, items.len(), output, |index, output| {
                    self.write(&items[index], depth + 1, output)
                })?;
            }
            ValueKind::Map => {
                let mut keys = value.try_iter()?.collect::<Vec<_>>();
                if self.sorted {
                    keys.sort();
                }
                self.brackets('{', '}', depth, keys.len(), output, |index, output| {
                    let key = &keys[index];
                    match key.as_str() {
                        Some(text) => self.string(text, output),
                        None => self.string(&key.to_string(), output),
                    }
                    output.push_str(&self.key_separator);
                    self.write(&value.get_item(key)?, depth + 1, output)
                })?;
            }
            kind => {
                return Err(Error::new(ErrorKind::BadSerialization, format!("tojson: {kind} is not JSON")));
            }
        }
        Ok(())
    }

    fn brackets(
        &self,
        open: char,
        close: char,
        depth: usize,
        count: usize,
        output: &mut String,
        mut item: impl FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        output.push(open);
        for index in 0..count {
            if index > 0 {
                output.push_str(&self.item_separator);
            }
            self.new_line(depth + 1, output);
            item(index, output)?;
        }
        if count > 0 {
            self.new_line(depth, output);
        }
        output.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, output: &mut String) {
        if let Some(indent) = &self.indent {
            output.push('\n');
            for _ in 0..depth {
                output.push_str(indent);
            }
        }
    }

    fn number(&self, value: &Value, output: &mut String) {
        let text = value.to_string();
        output.push_str(match text.as_str() {
            "NaN" => "NaN",
            "inf" => "Infinity",
            "-inf" => "-Infinity",
            number => number,
        });
    }

    fn string(&self, text: &str, output: &mut String) {
        output.push('"');
        for char in text.chars() {
            match char {
                '"' => output.push_str("\\\""),
                '\\' => output.push_str("\\\\"),
                '\n' => output.push_str("\\n"),
                '\r' => output.push_str("\\r"),
                '\t' => output.push_str("\\t"),
                '\u{8}' => output.push_str("\\b"),
                '\u{c}' => output.push_str("\\f"),
                char if char < ' ' => output.push_str(&format!("\\u{:04x}", u32::from(char))),
                char if self.ascii && !char.is_ascii() => {
                    for unit in char.encode_utf16(&mut [0; 2]) {
                        output.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                char => output.push(char),
            }
        }
        output.push('"');
    }
}
