//! Choosing and opening a transport.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use microserving_daemon::Refused;
use microserving_transport::{KvTransport, LoopbackHub};
use microserving_transport_nixl::{NixlConfig, NixlTransport};
use microserving_transport_pgas::{OpenShmem, Pgas, PgasConfig, PgasTransport, WorldWatch};
use microserving_transport_shm::{ShmConfig, ShmTransport};

use crate::options::{Device, Options, TransportName};
use crate::self_test;

/// How long an engine that ends waits for the others of its world to end, too.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);
/// How long engines wait for the one that names their world.
#[cfg(feature = "nvshmem")]
const WORLD_PATIENCE: Duration = Duration::from_secs(120);

/// A transport that has carried bytes.
pub(crate) struct Opened {
    pub(crate) transport: Box<dyn KvTransport>,
    /// Which it is and why, and how its first transfer went.
    pub(crate) report: String,
    /// Tells of the end of its world, if it has one.
    pub(crate) world: Option<WorldWatch>,
}

/// What is to be opened, and why.
#[derive(Debug, PartialEq)]
struct Choice {
    name: TransportName,
    why: String,
}

/// Refuses options that do not go together, before anything is loaded.
pub(crate) fn check(options: &Options) -> Result<()> {
    let world = options.world_rank.is_some();
    let pgas = matches!(options.transport, TransportName::Openshmem | TransportName::Nvshmem);
    let nixl = options.transport == TransportName::Nixl
        || options.transport == TransportName::Auto && options.nixl_listen.is_some();
    let wrong = [
        (
            world && !matches!(options.transport, TransportName::Nvshmem | TransportName::Auto),
            "world_rank: only for the transport nvshmem; others take their number from their launcher, or have none",
        ),
        (world && options.world_rank >= options.world_size, "world_rank: it must be below world_size"),
        (
            options.transport == TransportName::Nvshmem && !world,
            "transport: nvshmem needs world_rank, world_size and world_file",
        ),
        (
            (options.transport == TransportName::Nvshmem || world) && !cfg!(feature = "nvshmem"),
            "transport: this build has no nvshmem; build with the feature `nvshmem`",
        ),
        (
            options.transport == TransportName::Nvshmem && options.device == Device::Cpu,
            "transport: nvshmem moves the memory of GPUs; use openshmem or shm with the device cpu",
        ),
        (options.nixl_listen.is_some() && !nixl, "nixl_listen: only for the transport nixl"),
        (
            options.nixl_listen.is_some() && world,
            "nixl_listen: only for the transport nixl, and the world options are for nvshmem",
        ),
        (
            options.nixl_library.is_some() && !nixl,
            "nixl_library: only for the transport nixl, which auto takes with nixl_listen",
        ),
        (
            nixl && nixl_listen(options).is_none(),
            "nixl_listen: needed where listen names no single address: nixl tells senders where to connect",
        ),
        (
            options.calibrate && (pgas || world || nixl),
            "calibrate: it measures one process alone; use the transport shm",
        ),
    ];
    match wrong.iter().find(|(holds, _)| *holds) {
        Some((_, reason)) => Err(Refused((*reason).to_owned()).into()),
        None => Ok(()),
    }
}

/// Returns where senders connect over `nixl`: where it is told to listen, else at the address that clients use.
fn nixl_listen(options: &Options) -> Option<SocketAddr> {
    let told = options.nixl_listen.or_else(|| {
        let listen: SocketAddr = options.listen.parse().ok()?;
        Some(SocketAddr::new(listen.ip(), 0))
    });
    told.filter(|listen| !listen.ip().is_unspecified())
}

/// Returns how many processes a launcher of OpenSHMEM started together, if this is one of them.
fn launched_with() -> Option<u32> {
    std::env::var("OMPI_COMM_WORLD_SIZE").ok()?.parse().ok()
}

fn choose(options: &Options, launched_with: Option<u32>) -> Choice {
    let choice = |name, why: &str| Choice { name, why: why.to_owned() };
    match (options.transport, launched_with) {
        (TransportName::Auto, _) if options.world_rank.is_some() => {
            choice(TransportName::Nvshmem, "a world of GPUs is given")
        }
        (TransportName::Auto, _) if options.nixl_listen.is_some() => {
            choice(TransportName::Nixl, "it is told where engines of other hosts connect")
        }
        (TransportName::Auto, Some(num_pes)) if num_pes > 1 && !options.calibrate => Choice {
            name: TransportName::Openshmem,
            why: format!("a launcher started this process as one of {num_pes}"),
        },
        (TransportName::Auto, _) => {
            choice(TransportName::Shm, "no launcher and no world: engines of this host")
        }
        (name, _) => choice(name, "as configured"),
    }
}

/// Opens the transport that the options ask for, for a region of so many bytes, and has it carry bytes. Blocks; where engines form a
/// world, until all of them have come here.
pub(crate) fn open(options: &Options, engine_id: &str, region_bytes: usize) -> Result<Opened> {
    let Choice { name, why } = choose(options, launched_with());
    let checksum = options.checksum;
    match name {
        TransportName::Openshmem => {
            let pgas = OpenShmem::join().context("the transport openshmem cannot be used")?;
            form(Box::new(pgas), region_bytes, checksum, &why)
        }
        TransportName::Nvshmem => form(nvshmem(options)?, region_bytes, checksum, &why),
        TransportName::Loopback => tested(loopback(checksum, engine_id), checksum, &why),
        TransportName::Nixl => over_nixl(options, &why),
        TransportName::Shm | TransportName::Auto => match (shm(checksum), options.transport) {
            (Ok(transport), _) => tested(transport, checksum, &why),
            (Err(error), TransportName::Auto) => {
                let why =
                    format!("no shared memory ({error:#}): KV can be exchanged within this process only");
                tested(loopback(checksum, engine_id), checksum, &why)
            }
            (Err(error), _) => Err(error.context("the transport shm cannot be used")),
        },
    }
}

fn tested(transport: Box<dyn KvTransport>, checksum: bool, why: &str) -> Result<Opened> {
    let name = transport.name();
    let (num_bytes, took) = self_test::run(name, checksum)?;
    let report = report(name, why, num_bytes, took, "to another transport of this process");
    Ok(Opened { transport, report, world: None })
}

/// Makes a transport over NIXL. The test is between two more of the kind, at the same address of this host.
fn over_nixl(options: &Options, why: &str) -> Result<Opened> {
    let Some(listen) = nixl_listen(options) else {
        anyhow::bail!("nixl_listen: there is no address to listen at")
    };
    let open = |listen| -> Result<Box<dyn KvTransport>> {
        let config = NixlConfig::new(listen)
            .with_library(options.nixl_library.clone())
            .with_checksum(options.checksum);
        Ok(Box::new(NixlTransport::new(config).context("the transport nixl cannot be used")?))
    };
    let any_port = SocketAddr::new(listen.ip(), 0);
    let (num_bytes, took) = self_test::between("nixl", open(any_port)?, open(any_port)?)?;
    let to = format!("to another transport of this process, over {}", listen.ip());
    let report = report("nixl", why, num_bytes, took, &to);
    Ok(Opened { transport: open(listen)?, report, world: None })
}

/// Forms a world; the transfer that forming it ends with is the test.
fn form(pgas: Box<dyn Pgas>, region_bytes: usize, checksum: bool, why: &str) -> Result<Opened> {
    let config = PgasConfig::new(region_bytes).with_checksum(checksum).leaving_within(LEAVE_WITHIN);
    let transport = PgasTransport::form(pgas, config)?;
    let first = transport.first_transfer();
    let to = format!(
        "from element {} of {} to the next; routers name this engine by #recv_rank={}",
        transport.pe(),
        first.num_pes,
        transport.pe()
    );
    let report = report(transport.name(), why, first.num_bytes, first.took, &to);
    let world = Some(transport.watch());
    Ok(Opened { transport: Box::new(transport), report, world })
}

fn report(name: &str, why: &str, num_bytes: usize, took: Duration, whither: &str) -> String {
    format!(
        "transport {name} ({why}); {} KiB in {:.1} µs {whither}",
        num_bytes >> 10,
        took.as_secs_f64() * 1e6
    )
}

#[cfg(feature = "nvshmem")]
fn nvshmem(options: &Options) -> Result<Box<dyn Pgas>> {
    use microserving_protocol::PeId;
    use microserving_transport_pgas::{Nvshmem, NvshmemConfig};

    let (Some(rank), Some(size), Some(file)) = (options.world_rank, options.world_size, &options.world_file)
    else {
        anyhow::bail!("nvshmem needs world_rank, world_size and world_file");
    };
    let config = NvshmemConfig {
        library: None,
        pe: PeId(rank),
        num_pes: size,
        device: 0,
        id_file: file.clone(),
        patience: WORLD_PATIENCE,
    };
    Ok(Box::new(Nvshmem::join(&config).context("the transport nvshmem cannot be used")?))
}

#[cfg(not(feature = "nvshmem"))]
fn nvshmem(_: &Options) -> Result<Box<dyn Pgas>> {
    anyhow::bail!("this build has no nvshmem; build with the feature `nvshmem`")
}

fn loopback(checksum: bool, engine_id: &str) -> Box<dyn KvTransport> {
    let hub = if checksum { LoopbackHub::with_checksums() } else { LoopbackHub::new() };
    Box::new(hub.transport(engine_id))
}

/// Makes a transport between the processes of this host.
pub(crate) fn shm(checksum: bool) -> Result<Box<dyn KvTransport>> {
    Ok(Box::new(ShmTransport::new(ShmConfig::default().with_checksum(checksum))?))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn options(args: &[&str]) -> Options {
        Options::parse_from(["engined", "--model", "toy"].iter().chain(args))
    }

    #[test]
    fn auto_takes_what_the_process_was_started_for() {
        let chosen = |args: &[&str], launched| choose(&options(args), launched).name;
        assert_eq!(chosen(&[], None), TransportName::Shm);
        assert_eq!(chosen(&[], Some(1)), TransportName::Shm);
        assert_eq!(chosen(&[], Some(2)), TransportName::Openshmem);
        assert_eq!(chosen(&["--calibrate"], Some(2)), TransportName::Shm);
        assert_eq!(chosen(&["--transport", "shm"], Some(2)), TransportName::Shm);
        assert_eq!(chosen(&["--nixl-listen", "10.0.0.1:0"], Some(2)), TransportName::Nixl);
        let world = ["--world-rank", "0", "--world-size", "2", "--world-file", "/shared/id"];
        assert_eq!(chosen(&world, None), TransportName::Nvshmem);
        assert!(choose(&options(&[]), Some(2)).why.contains("one of 2"));
    }

    #[test]
    fn options_that_do_nothing_are_refused() {
        let world = ["--world-rank", "2", "--world-size", "2", "--world-file", "/shared/id"];
        for (args, part) in [
            ([&world[..], &["--transport", "shm"]].concat(), "only for the transport nvshmem"),
            (world.to_vec(), "must be below world_size"),
            (vec!["--transport", "nvshmem"], "needs world_rank"),
            (vec!["--transport", "shm", "--nixl-listen", "10.0.0.1:0"], "nixl_listen: only for"),
            (vec!["--nixl-library", "/x.so", "--transport", "loopback"], "nixl_library: only for"),
            (vec!["--transport", "nixl", "--listen", "0.0.0.0:8001"], "listen names no single address"),
            (vec!["--transport", "nixl", "--nixl-listen", "[::]:0"], "listen names no single address"),
            (vec!["--transport", "nixl", "--calibrate"], "measures one process alone"),
            (vec!["--transport", "openshmem", "--calibrate"], "measures one process alone"),
        ] {
            let error = check(&options(&args)).unwrap_err().to_string();
            assert!(error.contains(part), "{args:?}: {error}");
        }
        check(&options(&["--transport", "openshmem"])).unwrap();
        check(&options(&["--transport", "nixl"])).unwrap();
        check(&options(&["--nixl-listen", "10.0.0.1:0", "--nixl-library", "x.so"])).unwrap();
    }

    #[test]
    fn reports_say_which_and_why() {
        let opened = open(&options(&["--transport", "loopback"]), "e", 1 << 20).unwrap();
        assert!(
            opened.report.starts_with("transport loopback (as configured); 64 KiB in "),
            "{}",
            opened.report
        );
        assert!(opened.world.is_none());
    }
}
