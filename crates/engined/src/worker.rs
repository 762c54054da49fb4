//! `engined worker`: the device half of an engine, whose front is another process (docs/adr/020).

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::builder::Resettable;
use clap::{CommandFactory, FromArgMatches, Parser};
use microserving_daemon::{LogFormat, Refused, init_logging};
use microserving_executor::Executor;
use microserving_protocol::KvGeometry;
use microserving_worker::{Connection, Ended, Order};
use tracing::info;

use crate::model;
use crate::options::Options;
use crate::run::num_pages;
use crate::transport::{self, Opened};

/// The word that makes a process a worker.
pub(crate) const SUBCOMMAND: &str = "worker";
/// How long a worker looks for its front: a launcher may start both at a time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Computes and transfers for an engine's front. What it is to be, model and transport, its front tells it.
#[derive(Debug, Parser)]
#[command(name = "engined worker", version)]
pub(crate) struct WorkerOptions {
    /// Socket of the front, where that one was started with `--worker PATH`.
    #[arg(long, env = "MICROSERVING_FRONT", value_name = "PATH")]
    pub(crate) front: PathBuf,

    /// What to log: a level, or directives such as `info,microserving_engine=debug`.
    #[arg(long, env = "MICROSERVING_LOG", value_name = "FILTER", default_value = "info")]
    pub(crate) log: String,

    /// How log lines look.
    #[arg(long, env = "MICROSERVING_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    pub(crate) log_format: LogFormat,
}

/// Runs a worker with the arguments after its word.
pub(crate) fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments = std::iter::once(OsString::from("engined worker")).chain(arguments);
    let options = match WorkerOptions::try_parse_from(arguments) {
        Ok(options) => options,
        Err(error) => {
            // Help is no error, and a closed pipe is not worth one.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let ended =
        init_logging(&options.log, options.log_format).map_err(Into::into).and_then(|()| run(&options));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "engined worker: {error:#}");
            if error.is::<Refused>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn run(options: &WorkerOptions) -> Result<()> {
    let front = options.front.display();
    let connection = Connection::to_front(&options.front, PATIENCE)
        .with_context(|| format!("there is no front at {front}"))?;
    info!(front = %front, "the front is found");
    let teller = connection.teller()?;
    let (executor, opened) = match come_up(connection.order(), &teller) {
        Ok(up) => up,
        Err(error) => {
            connection.fail(error.is::<Refused>(), &format!("{error:#}"));
            return Err(error);
        }
    };
    let Opened { transport, report, world } = opened;
    info!("{report}");
    let world_end = world.map(|world| -> microserving_worker::WorldEnd { Box::new(move || world.lost()) });
    match connection.serve(executor, transport, &report, world_end)? {
        Ended::FrontLeft => {
            info!("the front has left");
            Ok(())
        }
        Ended::WorldLost(reason) => bail!("the world is lost: {reason}; start all of its workers anew"),
        Ended::Broken(thread) => bail!("the {thread} thread has panicked; see the log"),
    }
}

/// Loads the model and opens the transport that the front asks for.
fn come_up(order: &Order, tell: &(dyn Fn(&str) + Sync)) -> Result<(Box<dyn Executor>, Opened)> {
    std::env::set_current_dir(&order.folder)
        .with_context(|| format!("cannot work in the front's folder, {}", order.folder.display()))?;
    let options = options_of(order)?;
    let device = model::check(&options)?;
    transport::check(&options)?;
    let executor = model::load(&options, &device, tell)?.executor;
    let info = executor.info();
    let num_pages = num_pages(&options, info)?;
    let region_bytes = KvGeometry { layout: info.layout.clone(), num_pages }.region_bytes();
    tell("opening and testing the transport");
    let name = options.engine_id.as_deref().unwrap_or("worker");
    let opened = transport::open(&options, name, region_bytes)?;
    Ok((executor, opened))
}

/// Reads the front's options. Only the front's: what this process has in its environment is not asked.
fn options_of(order: &Order) -> Result<Options> {
    let command = Options::command().mut_args(|arg| arg.env(Resettable::Reset));
    let arguments = std::iter::once(OsString::from("engined")).chain(order.arguments.iter().cloned());
    let matches = command.try_get_matches_from(arguments).context("the front's options cannot be read")?;
    Options::from_arg_matches(&matches).context("the front's options cannot be read")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fronted::order_of;

    /// What a front says comes to its worker whole, whatever option it is; what is the front's alone stays there.
    #[test]
    fn workers_have_their_fronts_options() {
        let args = [
            "engined",
            "--model",
            "toy",
            "--page-size",
            "32",
            "--checksum",
            "--kv-bytes",
            "3MiB",
            "--transport",
            "shm",
            "--toy-step-ms",
            "4",
            "--cluster-key",
            "a secret of ours",
            "--listen",
            "0.0.0.0:1",
            "--worker",
            "spawn",
        ];
        let order = order_of(&args.map(OsString::from)).expect("an order");
        let secret = order.arguments.iter().any(|argument| argument.to_string_lossy().contains("secret"));
        assert!(!secret, "{:?}", order.arguments);
        let ours = Options::try_parse_from(args).expect("sound options");
        let theirs = options_of(&order).expect("sound options");
        assert_eq!(
            (theirs.model, theirs.page_size, theirs.checksum, theirs.kv_bytes, theirs.toy_step_ms),
            (ours.model, ours.page_size, ours.checksum, ours.kv_bytes, ours.toy_step_ms)
        );
        assert_eq!((theirs.transport, theirs.threads, theirs.pin_threads), (ours.transport, None, false));
        assert_eq!(theirs.worker, crate::options::WorkerPlace::Within);
    }

    #[test]
    fn the_declaration_is_sound() {
        WorkerOptions::command().debug_assert();
    }
}
