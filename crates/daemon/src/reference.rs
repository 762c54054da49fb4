//! The options as a Markdown table, for the documentation.

use std::fmt::Write;

use clap::{Arg, Command};

use crate::config::{help_text, key_of, takes_several};

/// Renders every visible option of a command as Markdown: one table a help heading.
///
/// The documentation's table is this function's output, and a check compares the two, so it cannot fall behind.
#[must_use]
pub fn reference_table(command: &Command) -> String {
    let mut headings: Vec<&str> = Vec::new();
    let visible = |arg: &&Arg| !arg.is_hide_set() && arg.get_long().is_some();
    for arg in command.get_arguments().filter(visible) {
        let heading = heading(arg);
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    let mut out = String::new();
    for name in headings {
        if !out.is_empty() {
            out.push('\n');
        }
        let _ = writeln!(out, "### {name}\n");
        out.push_str("| flag | environment | TOML key | default | meaning |\n|---|---|---|---|---|\n");
        for arg in command.get_arguments().filter(visible).filter(|arg| heading(arg) == name) {
            out.push_str(&row(arg));
        }
    }
    out
}

fn heading(arg: &Arg) -> &str {
    arg.get_help_heading().unwrap_or("Options")
}

fn row(arg: &Arg) -> String {
    let code = |text: &str| if text.is_empty() { "–".to_owned() } else { format!("`{text}`") };
    let mut flag = format!("--{}", arg.get_long().unwrap_or_default());
    if arg.get_action().takes_values() {
        let name = arg.get_value_names().and_then(|names| names.first());
        let name = name.map_or_else(|| arg.get_id().as_str().to_uppercase(), ToString::to_string);
        let _ = write!(flag, " {name}");
        if takes_several(arg) {
            flag.push('…');
        }
    }
    let environment = arg.get_env().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let default: Vec<_> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    let mut meaning = help_text(arg).split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    // clap takes the full stop off the last sentence.
    if !meaning.ends_with('.') {
        meaning.push('.');
    }
    let values: Vec<_> = arg
        .get_possible_values()
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if arg.get_action().takes_values() && !values.is_empty() {
        let _ = write!(meaning, " One of {}.", values.join(", "));
    }
    format!(
        "| {} | {} | {} | {} | {meaning} |\n",
        code(&flag),
        code(&environment),
        code(&key_of(arg).unwrap_or_default()),
        code(&default.join(", "))
    )
}
