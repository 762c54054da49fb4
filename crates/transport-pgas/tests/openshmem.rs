//! Real processes of an OpenSHMEM world: the contract's suite, and what becomes of a world whose element dies.
//!
//! The elements are this test binary again, started by the library's launcher with the test `element` alone and told by the environment
//! what to be.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may unwrap as the test itself does")]
#![allow(clippy::print_stdout, reason = "elements say on their output what they saw")]

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use microserving_protocol::{Generation, KvRange};
use microserving_transport::conformance::remote::{Remote, serve};
use microserving_transport::conformance::{Cluster, Factory, Options, RULES};
use microserving_transport::{
    Admission, ByteRun, Claim, Grant, KvTransport, PeerAddress, PutRun, Refusal, TransportEvent,
};
use microserving_transport_pgas::{OpenShmem, PgasConfig, PgasTransport};

const ROLE: &str = "MICROSERVING_PGAS_TEST_ROLE";
const FOLDER: &str = "MICROSERVING_PGAS_TEST_FOLDER";
/// Elements in the suite's world: the receiver and as many senders as any rule wants.
const NUM_PES: usize = 3;
const REGION_BYTES: usize = 16 << 20;

fn launcher() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|dir| dir.join("oshrun")).find(|file| file.is_file());
    if found.is_none() {
        // Not a failure of a full run either: the launcher is a package of the system, which cannot be had everywhere.
        eprintln!("SKIPPED: oshrun is not installed (openmpi-bin, libopenmpi-dev)");
    }
    found
}

/// A folder that goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("microserving-pgas-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run_world(role: &str, num_pes: usize, folder: &Path) -> Option<Output> {
    let command = Command::new("timeout")
        .args(["--kill-after=5", "300"])
        .arg(launcher()?)
        .args(["--oversubscribe", "--mca", "btl", "^uct", "-np", &num_pes.to_string()])
        .args(["-x", ROLE, "-x", FOLDER, "-x", "SHMEM_SYMMETRIC_HEAP_SIZE"])
        // The launcher asks the others to end when one dies, and kills them a moment later: until then they have something to say.
        .args(["sh", "-c", "trap '' TERM; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "element", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(FOLDER, folder)
        .env("SHMEM_SYMMETRIC_HEAP_SIZE", "1G")
        // Containers' only user.
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .stdin(Stdio::null())
        .output();
    Some(command.unwrap())
}

/// Not a test of its own: what an element is.
#[test]
fn element() {
    let Some(role) = std::env::var_os(ROLE) else { return };
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    match role.to_str().unwrap() {
        "suite" => suite(&folder),
        "death" => death(&folder),
        other => panic!("what is {other}?"),
    }
}

fn form(checksum: bool) -> PgasTransport {
    let config = PgasConfig::new(REGION_BYTES).with_checksum(checksum);
    PgasTransport::form(Box::new(OpenShmem::join().unwrap()), config).unwrap()
}

/// Forms a world of transports anew for every rule.
struct World(Mutex<Vec<Remote>>);

impl Factory for World {
    fn cluster(&self, options: Options) -> Cluster {
        let others = self.0.lock().unwrap();
        others.iter().for_each(|remote| remote.begin_making(options.checksum));
        let receiver = Box::new(form(options.checksum));
        let mut senders: Vec<_> = others.iter().map(Remote::made).collect();
        senders.truncate(options.num_senders);
        Cluster { receiver, senders, kill_sender: None }
    }
}

/// Element 0 holds the receiver and runs all rules; the others hold senders and do what they are told.
fn suite(folder: &Path) {
    // The library must be asked which element this is, and answers only those who have joined.
    let me = form(false).pe().0;
    let socket = folder.join("suite");
    if me > 0 {
        let connect = || loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => return stream,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let calls = connect();
        (&calls).write_all(&[me as u8]).unwrap();
        let wakes = connect();
        (&wakes).write_all(&[me as u8 | 0x80]).unwrap();
        serve(calls, wakes, |checksum| Ok(Box::new(form(checksum))));
    } else {
        let listener = UnixListener::bind(folder.join("new")).unwrap();
        std::fs::rename(folder.join("new"), &socket).unwrap();
        let mut streams: Vec<(u8, UnixStream)> = (0..(NUM_PES - 1) * 2)
            .map(|_| {
                let (stream, _) = listener.accept().unwrap();
                let mut who = [0];
                std::io::Read::read_exact(&mut &stream, &mut who).unwrap();
                (who[0], stream)
            })
            .collect();
        let mut take = |who: u8| {
            let at = streams.iter().position(|(name, _)| *name == who).unwrap();
            streams.swap_remove(at).1
        };
        let remotes = (1..NUM_PES as u8).map(|pe| Remote::new(take(pe), take(pe | 0x80)).unwrap()).collect();
        let world = World(Mutex::new(remotes));
        for (name, rule) in RULES {
            rule(&world);
            println!("held: {name}");
        }
        world.0.into_inner().unwrap().into_iter().for_each(Remote::end);
    }
    OpenShmem::leave_world().unwrap();
}

#[test]
fn the_contract_holds_between_processes() {
    let folder = Folder::new("suite");
    let Some(output) = run_world("suite", NUM_PES, &folder.0) else { return };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let missing: Vec<_> = RULES
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| !out.contains(&format!("held: {name}\n")))
        .collect();
    assert!(
        missing.is_empty() && output.status.success(),
        "{missing:?} do not hold, {}\n{out}\n{err}",
        output.status
    );
}

#[derive(Debug)]
struct Anyone;

impl Admission for Anyone {
    fn admit(&self, _: &[u8]) -> Result<Generation, Refusal> {
        Ok(Generation(1))
    }
}

fn wait_for(transport: &mut PgasTransport, event: &TransportEvent) {
    let mut events = Vec::new();
    while !events.contains(event) {
        transport.poll(Duration::ZERO, &mut events);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads a file that another element renames to `path` when it is whole.
fn read_when_there(path: &Path) -> Vec<u8> {
    loop {
        match std::fs::read(path) {
            Ok(bytes) => return bytes,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn publish(path: &Path, bytes: &[u8]) {
    let beside = path.with_extension("new");
    std::fs::write(&beside, bytes).unwrap();
    std::fs::rename(beside, path).unwrap();
}

/// Element 1 writes half of a claim and dies; element 0 says what it sees, and ends before the launcher ends it.
fn death(folder: &Path) {
    let mut transport = form(false);
    let region = transport.allocate_region(1 << 20).unwrap();
    let range = KvRange::new(0, 16).unwrap();
    let generation = Generation(1);
    if transport.pe().0 == 1 {
        region.write(0, &[7; 1 << 20]);
        let peer =
            PeerAddress { transport: "openshmem".into(), bytes: read_when_there(&folder.join("address")) };
        assert_eq!(transport.rank_of(&peer).map(|pe| pe.0), Some(0));
        let channel = transport.open(Claim { peer, credential: Vec::new(), range }).unwrap();
        transport.put(channel, &[PutRun { local_offset: 0, remote_offset: 0, num_bytes: 512 }]).unwrap();
        publish(&folder.join("pid"), std::process::id().to_string().as_bytes());
        std::thread::sleep(Duration::from_secs(60));
        panic!("it is killed before");
    }
    transport.set_admission(std::sync::Arc::new(Anyone));
    let runs = vec![ByteRun { offset: 0, num_bytes: 1024 }];
    transport.grant(Grant { generation, range, token_bytes: 64, runs }).unwrap();
    publish(&folder.join("address"), &transport.peer_address().bytes);
    while transport.arrived_bytes(generation) < 512 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let said = std::fs::File::create(folder.join("said")).unwrap();
    let pid = String::from_utf8(read_when_there(&folder.join("pid"))).unwrap();
    assert!(Command::new("kill").args(["-KILL", &pid]).status().unwrap().success());
    wait_for(&mut transport, &TransportEvent::Lost { generation, range, corrupt: false });
    writeln!(&said, "{}", transport.watch().lost().unwrap()).unwrap();
    transport.revoke(generation);
    wait_for(&mut transport, &TransportEvent::Released { generation, fenced: true });
    writeln!(&said, "fenced").unwrap();
    let peer = transport.peer_address();
    let channel = transport.open(Claim { peer, credential: Vec::new(), range }).unwrap();
    wait_for(&mut transport, &TransportEvent::Closed { channel, refusal: Some(Refusal::PeerLost) });
    writeln!(&said, "closed").unwrap();
}

/// An element that dies takes the world with it: what it was writing is fenced by its exit, nothing more is sent, and the launcher ends the
/// others, who have a moment to say so.
#[test]
fn a_dead_element_loses_the_world() {
    let folder = Folder::new("death");
    let Some(output) = run_world("death", 2, &folder.0) else { return };
    let said = std::fs::read_to_string(folder.0.join("said")).unwrap_or_default();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "the launcher takes no notice: {said}\n{err}");
    let expected = "element 1 is gone: its process has exited\nfenced\nclosed\n";
    assert_eq!(said, expected, "{err}");
}
