//! Log lines: where they go and how they look.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

use crate::ConfigError;

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One line of text an event; coloured on a terminal.
    Text,
    /// One JSON object an event, spans included.
    Json,
}

/// Sends the process's log to stderr; stdout stays free for what was asked for.
///
/// # Errors
/// If `filter` cannot be read. A subscriber that is set already stays, and that is no error: tests set theirs first.
pub fn init_logging(filter: &str, format: LogFormat) -> Result<(), ConfigError> {
    let filter = EnvFilter::builder()
        .parse(filter)
        .map_err(|source| ConfigError::Value { place: "--log".into(), reason: source.to_string() })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let _already_set = match format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    Ok(())
}
