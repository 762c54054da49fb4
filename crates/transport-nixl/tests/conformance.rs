//! The suite of the contract: with all ends in one process, and between processes of which one is killed.
//!
//! The other processes are this test binary again, started with the test `process` alone and told by the environment where to connect.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may unwrap as the test itself does")]

mod common;

use std::cell::RefCell;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;

use common::{library, transport};
use microserving_transport::KvTransport;
use microserving_transport::conformance::remote::{Remote, serve};
use microserving_transport::conformance::{Cluster, Factory, Options, RULES};

const SOCKET: &str = "MICROSERVING_NIXL_TEST_SOCKET";

struct Within;

impl Factory for Within {
    fn cluster(&self, options: Options) -> Cluster {
        let make = |_| -> Box<dyn KvTransport> { Box::new(transport(options.checksum)) };
        Cluster {
            receiver: make(0),
            senders: (0..options.num_senders).map(make).collect(),
            kill_sender: None,
        }
    }
}

/// A sender's process; killed when dropped.
struct Process(Child);

impl Process {
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A sender's process and what drives it, until it is killed.
type Slot = Option<(Process, Remote)>;

/// Every sender in a process of its own; one that lives serves rule after rule.
struct Processes {
    folder: PathBuf,
    living: Rc<RefCell<Vec<Slot>>>,
}

impl Processes {
    fn start(&self) -> (Process, Remote) {
        let socket = self.folder.join("socket");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process", "--nocapture", "--test-threads=1"])
            .env(SOCKET, &socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let calls = listener.accept().unwrap().0;
        let wakes = listener.accept().unwrap().0;
        (Process(child), Remote::new(calls, wakes).unwrap())
    }

    fn end(self) {
        for (mut process, remote) in self.living.take().into_iter().flatten() {
            remote.end();
            process.0.wait().unwrap();
        }
        std::fs::remove_dir_all(&self.folder).unwrap();
    }
}

impl Factory for Processes {
    fn cluster(&self, options: Options) -> Cluster {
        let mut living = self.living.borrow_mut();
        let num_slots = living.len().max(options.num_senders);
        living.resize_with(num_slots, || None);
        let mut make = |at: usize| {
            let (_, remote) = living[at].get_or_insert_with(|| self.start());
            remote.begin_making(options.checksum);
            remote.made()
        };
        let senders = (0..options.num_senders).map(&mut make).collect();
        let all = self.living.clone();
        let kill = move |sender: usize| {
            let dead = all.borrow_mut()[sender].take();
            dead.unwrap().0.kill();
        };
        Cluster {
            receiver: Box::new(transport(options.checksum)),
            senders,
            kill_sender: Some(Box::new(kill)),
        }
    }
}

/// Not a test of its own: what a sender's process runs.
#[test]
fn process() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let connect = || UnixStream::connect(&socket).unwrap();
    let calls = connect();
    serve(calls, connect(), |checksum| Ok(Box::new(transport(checksum))));
}

/// One rule after the other: agents are made for each.
fn all_rules(factory: &dyn Factory) {
    for (name, rule) in RULES {
        rule(factory);
        let _ = writeln!(std::io::stderr(), "held: {name}");
    }
}

#[test]
fn the_contract_holds_within_a_process() {
    if library().is_some() {
        all_rules(&Within);
    }
}

#[test]
fn the_contract_holds_between_processes() {
    if library().is_none() {
        return;
    }
    let folder = std::env::temp_dir().join(format!("microserving-nixl-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let processes = Processes { folder, living: Rc::default() };
    all_rules(&processes);
    processes.end();
}

/// As between hosts: no process reads another's memory, all bytes go over sockets.
#[test]
fn the_contract_holds_over_tcp() {
    if library().is_none() || std::env::var_os("UCX_TLS").is_some() {
        return;
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_contract_holds_between_processes", "--nocapture"])
        .env("UCX_TLS", "tcp")
        .stdin(Stdio::null())
        .status();
    assert!(status.unwrap().success());
}
