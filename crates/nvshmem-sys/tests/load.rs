//! Loading, with and without a library, and two processes that find each other. Needs no GPU.

#![cfg(feature = "nvshmem")]
#![allow(clippy::unwrap_used, reason = "tests may unwrap")]

use std::error::Error;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nvshmem_sys::{JoinError, LoadError, NvshmemHost, UniqueId, join, load, version};

const RANK: &str = "MICROSERVING_NVSHMEM_TEST_RANK";

#[test]
fn a_missing_library_is_an_error_value_that_names_it() {
    let missing = Path::new("/nonexistent/libnvshmem_host.so.3");
    // SAFETY: there is no file, so nothing is run.
    let error = unsafe { load(Some(missing)) }.err().unwrap();
    assert_eq!(error.to_string(), format!("cannot load NVSHMEM from {}", missing.display()));
    assert!(error.source().is_some());
}

#[test]
fn another_library_is_an_error_value_too() {
    // SAFETY: the C library runs in every process as it is.
    let error = unsafe { load(Some(Path::new("libc.so.6"))) }.err().unwrap();
    assert!(matches!(error, LoadError::Missing { .. }), "{error}");
    assert!(format!("{:?}", error.source().unwrap()).contains("undefined symbol: nvshmem"), "{error:?}");
}

/// Where the real library is; what needs it says aloud that it is skipped without.
fn library_path() -> Option<PathBuf> {
    let path = std::env::var_os("NVSHMEM_LIBRARY").map(PathBuf::from);
    if path.is_none() {
        eprintln!("SKIPPED: NVSHMEM_LIBRARY does not name a libnvshmem_host.so.3");
    }
    path
}

fn library(path: &Path) -> NvshmemHost {
    // SAFETY: whoever sets the variable vouches for the file.
    unsafe { load(Some(path)) }.unwrap()
}

#[test]
fn the_library_tells_its_version_and_makes_unique_ids() {
    let Some(path) = library_path() else { return };
    let library = library(&path);
    assert_eq!(version(&library).major, 3, "{}", version(&library));
    let (one, other) = (UniqueId::new(&library).unwrap(), UniqueId::new(&library).unwrap());
    assert_ne!(one, other);
    // SAFETY: takes nothing, changes nothing.
    assert!(unsafe { library.nvshmemx_init_status() } < 2, "nobody has initialised a device");
}

/// Not a test of its own: one of the two processes below. Prints what became of it.
#[test]
fn one_of_two() {
    let Some(rank) = std::env::var_os(RANK) else { return };
    let rank = rank.to_str().unwrap().parse().unwrap();
    let library = library(&library_path().unwrap());
    let mut bytes = [0; UniqueId::NUM_BYTES];
    if rank == 0 {
        bytes = *UniqueId::new(&library).unwrap().as_bytes();
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("id {text}");
    } else {
        std::io::stdin().read_exact(&mut bytes).unwrap();
    }
    // SAFETY: this process does nothing else, and it does this once.
    let joined = unsafe { join(&library, &UniqueId::from_bytes(bytes), rank, 2, 0) };
    // SAFETY: these take nothing and change nothing.
    let (status, pe, pes) =
        unsafe { (library.nvshmemx_init_status(), library.nvshmem_my_pe(), library.nvshmem_n_pes()) };
    println!("rank {rank} joined {joined:?} status {status} pe {pe} of {pes}");
    // The library's own end-of-process handlers are not for a world that was only half made.
    std::io::stdout().flush().unwrap();
    let _ = Command::new("kill").args(["-KILL", &std::process::id().to_string()]).status();
}

/// Two processes find each other by a unique id over the loopback interface, as far as that goes without a GPU: bootstrapped, which is
/// asked of the status, and no device, which is a value.
#[test]
fn two_processes_bootstrap_and_say_what_they_lack() {
    if library_path().is_none() {
        return;
    }
    let spawn = |rank: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "one_of_two", "--nocapture", "--test-threads=1"]);
        command.env(RANK, rank).env("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut first = spawn("0");
    let mut printed = first.stdout.take().unwrap();
    let mut text = String::new();
    let id = loop {
        let mut byte = [0];
        assert_eq!(printed.read(&mut byte).unwrap(), 1, "rank 0 ended without an id: {text}");
        text.push(char::from(byte[0]));
        if let Some((_, line)) = text.split_once("id ")
            && let Some(hex) = line.strip_suffix('\n')
        {
            let digits = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            break (0..hex.len()).step_by(2).map(digits).collect::<Vec<u8>>();
        }
    };
    let mut second = spawn("1");
    second.stdin.take().unwrap().write_all(&id).unwrap();
    let (watched, other) = (first.id(), second.id());
    let (done, stopped) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if stopped
            .recv_timeout(Duration::from_secs(60))
            .is_err_and(|e| e == std::sync::mpsc::RecvTimeoutError::Timeout)
        {
            let _ = Command::new("kill").args(["-KILL", &watched.to_string(), &other.to_string()]).status();
        }
    });
    printed.read_to_string(&mut text).unwrap();
    second.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let _ = (first.wait(), second.wait());
    drop(done);
    watchdog.join().unwrap();

    for rank in 0..2 {
        let line = text.lines().find(|line| line.contains(&format!("rank {rank} joined")));
        let line = line.unwrap_or_else(|| panic!("rank {rank} said nothing within a minute: {text}"));
        assert!(line.ends_with(&format!("pe {rank} of 2")), "{line}");
        let no_device = format!("joined {:?} status 1 ", Err::<(), _>(JoinError::NoDevice { status: 1 }));
        let with_device = ["joined Ok(()) status 2 ", "joined Ok(()) status 3 ", "joined Ok(()) status 4 "];
        assert!(line.contains(&no_device) || with_device.iter().any(|text| line.contains(text)), "{line}");
    }
}
