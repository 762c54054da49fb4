//! A daemon's `main`.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::{ConfigError, DaemonOptions, Loaded, Shutdown, init_logging, load};

/// Threads for work that is too long for those that serve HTTP.
const BLOCKING_THREADS: usize = 16;

/// A daemon's options: a clap declaration that holds [`DaemonOptions`].
pub trait Daemon: Parser {
    /// Returns the shared options.
    fn daemon(&self) -> &DaemonOptions;
}

/// The daemon cannot do what its options ask for: one line on stderr and exit status 2, as for a bad flag.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// Loads the options from the process's arguments, sets up log, runtime and signals, and runs `body` to its end.
///
/// Returns 0 when `body` succeeds, 2 if the options are bad or `body` fails with [`Refused`], 1 on any other error. Errors
/// go to stderr, causes included.
pub fn run_daemon<T: Daemon, F: Future<Output = anyhow::Result<()>>>(
    body: impl FnOnce(T, Shutdown) -> F,
) -> ExitCode {
    let options = match load::<T>(std::env::args_os()) {
        Ok(Loaded::Run(options)) => options,
        Ok(Loaded::Print(text)) => {
            // A closed pipe (`engined --help | head -1`) is not worth an error.
            let _ = std::io::stdout().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(error) => return refuse::<T>(&error),
    };
    if let Err(error) = init_logging(&options.daemon().log, options.daemon().log_format) {
        return refuse::<T>(&error);
    }
    let threads = options.daemon().http_threads as usize;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name("http")
        // For long texts and bodies; more of them at once than this would only slow each other and the engine down.
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return fail::<T>(&anyhow::Error::from(error).context("cannot start the runtime")),
    };
    let result = runtime.block_on(async {
        let shutdown = Shutdown::on_signals(options.daemon().drain_seconds)?;
        body(options, shutdown).await
    });
    // Blocking work that outlived the drain (a template on a huge prompt) must not hold the exit up.
    runtime.shutdown_timeout(Duration::from_secs(1));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail::<T>(&error),
    }
}

fn refuse<T: Daemon>(error: &ConfigError) -> ExitCode {
    let text = match error {
        // clap's text is complete and says "error:" itself.
        ConfigError::CommandLine(error) => error.to_string(),
        other => format!("{}: {}\n", T::command().get_name(), describe(other)),
    };
    let _ = std::io::stderr().write_all(text.as_bytes());
    ExitCode::from(2)
}

fn fail<T: Daemon>(error: &anyhow::Error) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "{}: {error:#}", T::command().get_name());
    if error.downcast_ref::<Refused>().is_some() { ExitCode::from(2) } else { ExitCode::FAILURE }
}

/// Writes an error with its causes.
#[must_use]
pub fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
