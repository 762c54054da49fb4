//! The methods of Python's strings, dictionaries and lists that templates call.

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Calls a method that minijinja itself does not know.
pub(super) fn call(
    _: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let known = match value.kind() {
        ValueKind::String => string(value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Map => map(value, method, args)?,
        ValueKind::Seq => list(value, method, args)?,
        _ => None,
    };
    known.ok_or_else(|| {
        Error::new(ErrorKind::UnknownMethod, format!("{} has no method `{method}`", value.kind()))
    })
}

fn string(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let value = match method {
        "strip" => strip(text, args, true, true)?.into(),
        "lstrip" => strip(text, args, true, false)?.into(),
        "rstrip" => strip(text, args, false, true)?.into(),
        "split" => split(text, args, false)?,
        "rsplit" => split(text, args, true)?,
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            lines(text, keep.unwrap_or(false)).collect::<Vec<_>>().into()
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            partition(text, separator, method == "rpartition")?
        }
        "startswith" => affix(args, |prefix| text.starts_with(prefix))?.into(),
        "endswith" => affix(args, |suffix| text.ends_with(suffix))?.into(),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "upper" => none(args, text.to_uppercase())?,
        "lower" | "casefold" => none(args, text.to_lowercase())?,
        "capitalize" => none(args, capitalize(text))?,
        "title" => none(args, title(text))?,
        "replace" => {
            let (from, to, count): (&str, &str, Option<i64>) = from_args(args)?;
            match count.and_then(|count| usize::try_from(count).ok()) {
                Some(count) => text.replacen(from, to, count).into(),
                None => text.replace(from, to).into(),
            }
        }
        "find" | "rfind" => {
            let (needle,): (&str,) = from_args(args)?;
            let at = if method == "find" { text.find(needle) } else { text.rfind(needle) };
            at.map_or(-1, |at| i64::try_from(text[..at].chars().count()).unwrap_or(i64::MAX)).into()
        }
        "count" => {
            let (needle,): (&str,) = from_args(args)?;
            match needle {
                "" => (text.chars().count() + 1).into(),
                needle => text.matches(needle).count().into(),
            }
        }
        "join" => {
            let (parts,): (Value,) = from_args(args)?;
            let mut joined = String::new();
            for (index, part) in parts.try_iter()?.enumerate() {
                if index > 0 {
                    joined.push_str(text);
                }
                match part.as_str() {
                    Some(part) => joined.push_str(part),
                    None => return Err(bad(format!("join: item {index} is {}, not a string", part.kind()))),
                }
            }
            joined.into()
        }
        "format" => format(text, args)?.into(),
        "isdigit" | "isnumeric" | "isdecimal" => {
            none(args, !text.is_empty() && text.chars().all(char::is_numeric))?
        }
        "isalpha" => none(args, !text.is_empty() && text.chars().all(char::is_alphabetic))?,
        "isalnum" => none(args, !text.is_empty() && text.chars().all(char::is_alphanumeric))?,
        "isspace" => none(args, !text.is_empty() && text.chars().all(char::is_whitespace))?,
        "isupper" => none(args, has_case(text) && text == text.to_uppercase())?,
        "islower" => none(args, has_case(text) && text == text.to_lowercase())?,
        _ => return Ok(None),
    };
    Ok(Some(value))
}

fn map(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "keys" => none(args, value.try_iter()?.collect::<Vec<_>>())?,
        "values" => {
            let values = value.try_iter()?.map(|key| value.get_item(&key)).collect::<Result<Vec<_>, _>>()?;
            none(args, values)?
        }
        "items" => {
            let pairs = value
                .try_iter()?
                .map(|key| Ok(Value::from(vec![key.clone(), value.get_item(&key)?])))
                .collect::<Result<Vec<_>, Error>>()?;
            none(args, pairs)?
        }
        "get" => {
            let (key, default): (Value, Option<Value>) = from_args(args)?;
            match value.get_item(&key)? {
                found if found.is_undefined() => default.unwrap_or_else(|| Value::from(())),
                found => found,
            }
        }
        _ => return Ok(None),
    }))
}

fn list(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let (wanted,): (Value,) = match method {
        "index" | "count" => from_args(args)?,
        "append" | "extend" | "insert" | "pop" | "remove" | "sort" | "reverse" => {
            return Err(bad(format!("`{method}` changes a list, which templates here cannot")));
        }
        _ => return Ok(None),
    };
    let items = value.try_iter()?;
    match method {
        "count" => Ok(Some(items.filter(|item| *item == wanted).count().into())),
        _ => match items.into_iter().position(|item| item == wanted) {
            Some(at) => Ok(Some(at.into())),
            None => Err(bad(format!("index: {wanted} is not in the list"))),
        },
    }
}

/// Returns the value of a method that takes no arguments.
fn none(args: &[Value], value: impl Into<Value>) -> Result<Value, Error> {
    let () = from_args(args)?;
    Ok(value.into())
}

fn bad(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn strip(text: &str, args: &[Value], start: bool, end: bool) -> Result<String, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    let strips = |char: char| chars.map_or_else(|| char.is_whitespace(), |chars| chars.contains(char));
    let mut text = text;
    if start {
        text = text.trim_start_matches(strips);
    }
    if end {
        text = text.trim_end_matches(strips);
    }
    Ok(text.to_owned())
}

fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (separator, limit, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = match separator {
        Some(separator) => Some(separator),
        None => named.get::<Option<Value>>("sep")?,
    };
    let limit = match limit {
        Some(limit) => Some(limit),
        None => named.get::<Option<i64>>("maxsplit")?,
    };
    named.assert_all_used()?;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok());
    let mut parts: Vec<String> = match separator.filter(|separator| !separator.is_none()) {
        None => split_whitespace(text, limit, from_right),
        Some(separator) => {
            let separator =
                separator.as_str().filter(|separator| !separator.is_empty()).ok_or_else(|| {
                    bad("split: the separator must be a string with something in it".to_owned())
                })?;
            match (limit, from_right) {
                (None, _) => text.split(separator).map(str::to_owned).collect(),
                (Some(limit), false) => text.splitn(limit + 1, separator).map(str::to_owned).collect(),
                (Some(limit), true) => text.rsplitn(limit + 1, separator).map(str::to_owned).collect(),
            }
        }
    };
    if from_right && limit.is_some() {
        parts.reverse();
    }
    Ok(parts.into())
}

/// Splits at runs of whitespace; from the right, the parts come last first.
fn split_whitespace(text: &str, limit: Option<usize>, from_right: bool) -> Vec<String> {
    let Some(limit) = limit else {
        return text.split_whitespace().map(str::to_owned).collect();
    };
    let mut parts = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let at = if from_right { rest.rfind(char::is_whitespace) } else { rest.find(char::is_whitespace) };
        match at {
            Some(at) if parts.len() < limit => {
                let (left, right) = rest.split_at(at);
                let (part, left_over) = if from_right {
                    (right.trim_start(), left.trim_end())
                } else {
                    (left, right.trim_start())
                };
                parts.push(part.to_owned());
                rest = left_over;
            }
            _ => {
                parts.push(rest.to_owned());
                break;
            }
        }
    }
    parts
}

fn lines(text: &str, keep: bool) -> impl Iterator<Item = String> + '_ {
    text.split_inclusive('\n').map(move |line| {
        if keep {
            return line.to_owned();
        }
        let line = line.strip_suffix('\n').unwrap_or(line);
        line.strip_suffix('\r').unwrap_or(line).to_owned()
    })
}

fn partition(text: &str, separator: &str, from_right: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(bad("partition: the separator must not be empty".to_owned()));
    }
    let found = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match (found, from_right) {
        (Some((left, right)), _) => [left, separator, right],
        (None, false) => [text, "", ""],
        (None, true) => ["", "", text],
    };
    Ok(parts.map(Value::from).to_vec().into())
}

/// Applies a test to an affix, or to each of several.
fn affix(args: &[Value], test: impl Fn(&str) -> bool) -> Result<bool, Error> {
    let (affix,): (Value,) = from_args(args)?;
    if let Some(affix) = affix.as_str() {
        return Ok(test(affix));
    }
    if affix.kind() != ValueKind::Seq {
        return Err(bad(format!("startswith and endswith take a string, not {}", affix.kind())));
    }
    Ok(affix.try_iter()?.any(|affix| affix.as_str().is_some_and(&test)))
}

/// Fills `{}`, `{0}` and `{name}`; width and the like are refused.
fn format(text: &str, args: &[Value]) -> Result<String, Error> {
    let (positional, named): (Rest<Value>, Kwargs) = from_args(args)?;
    let mut output = String::with_capacity(text.len());
    let mut automatic = 0;
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        output.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            output.push_str(brace);
            rest = after;
            continue;
        }
        let field = if brace == "{" { rest.split_once('}') } else { None };
        let Some((field, after)) = field else {
            return Err(bad(format!("format: a `{brace}` has no partner")));
        };
        rest = after;
        let place = match field {
            "" => {
                automatic += 1;
                Some(automatic - 1)
            }
            field => field.parse::<usize>().ok(),
        };
        let value = match place {
            Some(place) => positional.get(place).cloned(),
            None => named.get::<Option<Value>>(field)?,
        };
        let value = value.ok_or_else(|| bad(format!("format: nothing is given for `{{{field}}}`")))?;
        output.push_str(&value.to_string());
    }
    output.push_str(rest);
    Ok(output)
}

fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars.as_str().to_lowercase().chars()).collect(),
        None => String::new(),
    }
}

fn title(text: &str) -> String {
    let mut output = String::with_capacity(text.len());
    let mut in_word = false;
    for char in text.chars() {
        if in_word {
            output.extend(char.to_lowercase());
        } else {
            output.extend(char.to_uppercase());
        }
        in_word = char.is_alphabetic();
    }
    output
}

fn has_case(text: &str) -> bool {
    text.chars().any(|char| char.is_uppercase() || char.is_lowercase())
}
