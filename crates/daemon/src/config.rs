//! Reading options: defaults, then a TOML file, then the environment, then the command line.
//!
//! The clap declaration is the only one. A value from the file becomes the argument's default, so that clap's own order
//! (command line over environment over default) does the layering, and clap's own parsers check the file's values.

use std::any::TypeId;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, Parser, value_parser};

use crate::{ByteSize, reference_table};

/// What [`load`] found.
#[derive(Debug)]
pub enum Loaded<T> {
    /// Run with these options.
    Run(T),
    /// Print this to stdout and exit with status 0: help, version, or the effective configuration.
    Print(String),
}

/// Why the options cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The command line or an environment variable is wrong; clap's text is for people.
    #[error("{0}")]
    CommandLine(clap::Error),
    /// The file cannot be read.
    #[error("cannot read {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{} is not TOML: {reason}", file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// Where and why.
        reason: String,
    },
    /// A value is unknown or of the wrong type.
    #[error("{place}: {reason}")]
    Value {
        /// The file and key, or the option.
        place: String,
        /// What is wrong.
        reason: String,
    },
}

/// Reads the options of `T`: defaults < TOML file (`--config FILE`) < environment < command line.
///
/// Every option that has a long flag can stand in the file under the flag's name with underscores. `--config`,
/// `--print-config` and the hidden `--print-options` are added here.
///
/// # Errors
/// If any layer holds an unknown name or a value of the wrong type.
pub fn load<T: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<Loaded<T>, ConfigError> {
    let mut matches = match read::<T>(args)? {
        Loaded::Run(matches) => matches,
        Loaded::Print(text) => return Ok(Loaded::Print(text)),
    };
    T::from_arg_matches_mut(&mut matches).map(Loaded::Run).map_err(ConfigError::CommandLine)
}

/// Returns the values in force by the options' names in the file, from the same places as [`load`]: what differs between two
/// of them is what somebody changed in the file meanwhile. What is not set is not there.
///
/// # Errors
/// As [`load`].
pub fn values<T: Parser>(
    args: impl IntoIterator<Item = OsString>,
) -> Result<BTreeMap<String, Vec<OsString>>, ConfigError> {
    let Loaded::Run(matches) = read::<T>(args)? else { return Ok(BTreeMap::new()) };
    let command = T::command();
    let named = command.get_arguments().filter_map(|arg| Some((key_of(arg)?, arg.get_id().as_str())));
    let values = named.filter_map(|(key, id)| {
        let raw = matches.try_get_raw(id).ok().flatten()?;
        Some((key, raw.map(OsString::from).collect()))
    });
    Ok(values.collect())
}

fn read<T: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<Loaded<ArgMatches>, ConfigError> {
    let args: Vec<OsString> = args.into_iter().collect();
    let mut command = with_own_arguments(T::command());

    // A first look, only to find the file: what it lacks may stand in the file.
    let first = command.clone().ignore_errors(true).try_get_matches_from(&args);
    let first = match first {
        Ok(matches) => matches,
        Err(error) => return help_or_error(error),
    };
    if matches!(first.try_get_one::<bool>(PRINT_OPTIONS), Ok(Some(true))) {
        return Ok(Loaded::Print(reference_table(&command)));
    }
    let mut from_file = HashSet::new();
    if let Ok(Some(file)) = first.try_get_one::<PathBuf>(CONFIG) {
        let mut settings = read_file(&command, file)?;
        from_file = settings.keys().cloned().collect();
        command = command.mut_args(|arg| match settings.remove(arg.get_id().as_str()) {
            Some(values) => arg.required(false).default_values(values),
            None => arg,
        });
    }
    let matches = match command.try_get_matches_from_mut(&args) {
        Ok(matches) => matches,
        Err(error) => return help_or_error(error),
    };
    if matches.get_flag(PRINT_CONFIG) {
        return Ok(Loaded::Print(print_config(&command, &matches, &from_file)));
    }
    Ok(Loaded::Run(matches))
}

const CONFIG: &str = "config";
const PRINT_CONFIG: &str = "print_config";
const PRINT_OPTIONS: &str = "print_options";

fn with_own_arguments(command: Command) -> Command {
    command
        .arg(
            Arg::new(CONFIG)
                .long("config")
                .env("MICROSERVING_CONFIG")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help_heading("Configuration")
                .help("TOML file with options, named like the flags with underscores"),
        )
        .arg(
            Arg::new(PRINT_CONFIG)
                .long("print-config")
                .action(ArgAction::SetTrue)
                .help_heading("Configuration")
                .help("Print the effective configuration as TOML, with where each value came from, and exit"),
        )
        .arg(
            Arg::new(PRINT_OPTIONS)
                .long("print-options")
                .action(ArgAction::SetTrue)
                .hide(true)
                .help("Print the options as a Markdown table and exit"),
        )
}

fn help_or_error<T>(error: clap::Error) -> Result<Loaded<T>, ConfigError> {
    if error.use_stderr() {
        Err(ConfigError::CommandLine(error))
    } else {
        Ok(Loaded::Print(error.render().to_string()))
    }
}

/// Says whether an argument is an option that a file may set, and returns its key.
pub(crate) fn key_of(arg: &Arg) -> Option<String> {
    let own = [CONFIG, PRINT_CONFIG, PRINT_OPTIONS, "help", "version"];
    let exits = matches!(arg.get_action(), ArgAction::Help | ArgAction::Version);
    if exits || own.contains(&arg.get_id().as_str()) {
        return None;
    }
    arg.get_long().map(|long| long.replace('-', "_"))
}

/// What TOML type an argument's values have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Boolean,
    Integer,
    Float,
    /// A string, or an integer.
    Size,
    Text,
}

impl Kind {
    pub(crate) fn of(arg: &Arg) -> Self {
        if matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse) {
            return Self::Boolean;
        }
        let id = arg.get_value_parser().type_id();
        let is_any = |types: &[TypeId]| types.iter().any(|candidate| id == *candidate);
        if is_any(&[TypeId::of::<bool>()]) {
            Self::Boolean
        } else if is_any(&[TypeId::of::<f64>(), TypeId::of::<f32>(), TypeId::of::<Duration>()]) {
            Self::Float
        } else if is_any(&[
            TypeId::of::<u8>(),
            TypeId::of::<u16>(),
            TypeId::of::<u32>(),
            TypeId::of::<u64>(),
            TypeId::of::<usize>(),
            TypeId::of::<i32>(),
            TypeId::of::<i64>(),
        ]) {
            Self::Integer
        } else if is_any(&[TypeId::of::<ByteSize>()]) {
            Self::Size
        } else {
            Self::Text
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Boolean => "a boolean",
            Self::Integer => "an integer",
            Self::Float => "a number",
            Self::Size => "an integer or a string such as \"4GiB\"",
            Self::Text => "a string",
        }
    }

    /// Spells a value of the file as it would stand on the command line.
    fn spell(self, value: &toml::Value) -> Result<String, String> {
        match (self, value) {
            (Self::Boolean, toml::Value::Boolean(value)) => Ok(value.to_string()),
            (Self::Integer | Self::Float | Self::Size, toml::Value::Integer(value)) => Ok(value.to_string()),
            (Self::Float, toml::Value::Float(value)) => Ok(value.to_string()),
            (Self::Size | Self::Text, toml::Value::String(value)) => Ok(value.clone()),
            (_, other) => Err(format!("expected {}, found {}", self.name(), other.type_str())),
        }
    }

    /// Returns a value as it stands in the file.
    fn value(self, raw: &str) -> toml::Value {
        match self {
            Self::Boolean => toml::Value::Boolean(!matches!(
                raw.to_ascii_lowercase().as_str(),
                "" | "0" | "f" | "false" | "n" | "no" | "off"
            )),
            Self::Integer | Self::Size => {
                raw.parse().map_or_else(|_| toml::Value::String(raw.into()), toml::Value::Integer)
            }
            Self::Float => raw.parse().map_or_else(|_| toml::Value::String(raw.into()), toml::Value::Float),
            Self::Text => toml::Value::String(raw.into()),
        }
    }
}

pub(crate) fn takes_several(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// Reads a file into values by the argument's id, each spelled as it would stand on the command line.
fn read_file(command: &Command, file: &PathBuf) -> Result<HashMap<String, Vec<String>>, ConfigError> {
    let text =
        std::fs::read_to_string(file).map_err(|source| ConfigError::Read { file: file.clone(), source })?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| ConfigError::Syntax {
        file: file.clone(),
        reason: error.to_string(),
    })?;
    let mut settings = HashMap::new();
    for (key, value) in &table {
        let wrong =
            |reason: String| ConfigError::Value { place: format!("{}: key `{key}`", file.display()), reason };
        let arg = command
            .get_arguments()
            .find(|arg| key_of(arg).as_deref() == Some(key.as_str()))
            .ok_or_else(|| wrong("unknown; --help lists the options".into()))?;
        let kind = Kind::of(arg);
        let values = match value {
            toml::Value::Array(items) if takes_several(arg) => {
                items.iter().map(|item| kind.spell(item)).collect::<Result<Vec<_>, _>>().map_err(wrong)?
            }
            toml::Value::Array(_) => return Err(wrong("takes one value, not a list".into())),
            value => vec![kind.spell(value).map_err(wrong)?],
        };
        for value in &values {
            check_value(arg, value).map_err(wrong)?;
        }
        settings.insert(arg.get_id().to_string(), values);
    }
    Ok(settings)
}

/// Runs one value through the argument's own parser.
fn check_value(arg: &Arg, value: &str) -> Result<(), String> {
    if matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse) {
        return Ok(());
    }
    let alone = Arg::new("value")
        .long("value")
        .env(Resettable::Reset)
        .action(ArgAction::Set)
        .value_parser(arg.get_value_parser().clone());
    let parsed = Command::new("check")
        .no_binary_name(true)
        .arg(alone)
        .try_get_matches_from([format!("--value={value}")]);
    parsed.map(drop).map_err(|error| {
        let text = error.to_string();
        let line = text.lines().next().unwrap_or_default();
        let line = line.trim_start_matches("error: ").replace(" for '--value <value>'", "");
        match text.lines().find(|line| line.contains("possible values")) {
            Some(values) => format!("{line} {}", values.trim()),
            None => line,
        }
    })
}

fn print_config(command: &Command, matches: &ArgMatches, from_file: &HashSet<String>) -> String {
    let mut out = String::from("# Effective configuration; usable as a file for --config.\n");
    for arg in command.get_arguments() {
        let Some(key) = key_of(arg) else { continue };
        let id = arg.get_id().as_str();
        out.push('\n');
        for line in help_text(arg).lines() {
            let _ = writeln!(out, "# {line}");
        }
        let source = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => "command line".to_owned(),
            Some(ValueSource::EnvVariable) => {
                format!("environment {}", arg.get_env().unwrap_or_default().to_string_lossy())
            }
            Some(_) if from_file.contains(id) => "file".to_owned(),
            Some(_) => "default".to_owned(),
            None => {
                let _ = writeln!(out, "# {key} = (not set)");
                continue;
            }
        };
        if arg.is_hide_env_values_set() {
            let _ = writeln!(out, "# {key} = (set, not shown)  # {source}");
            continue;
        }
        let kind = Kind::of(arg);
        let raw = matches.get_raw(id).unwrap_or_default();
        let mut values: Vec<_> = raw.map(|value| kind.value(&value.to_string_lossy())).collect();
        let value = match values.pop() {
            Some(value) if !takes_several(arg) => value,
            last => {
                values.extend(last);
                toml::Value::Array(values)
            }
        };
        let _ = writeln!(out, "{key} = {value}  # {source}");
    }
    out
}

pub(crate) fn help_text(arg: &Arg) -> String {
    arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests;
