//! How fronts and workers find each other, or do not.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use microserving_transport::LoopbackHub;
use microserving_worker::{Connection, FrontSocket, Order, WorkerError};

use crate::support::toy;

const PATIENCE: Duration = Duration::from_secs(5);

#[test]
fn a_front_takes_the_place_of_a_dead_one_and_of_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("front.sock");
    // A listener that goes leaves its file.
    drop(UnixListener::bind(&path).expect("a socket"));
    let front = FrontSocket::bind(&path).expect("nobody listens there");
    let mode = std::fs::metadata(&path).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "others may not connect");
    let error = FrontSocket::bind(&path).expect_err("one is there");
    assert!(matches!(error, WorkerError::Taken { .. }), "{error}");
    drop(front);
    assert!(!path.exists());
    std::fs::write(&path, "a file of somebody").expect("written");
    let error = FrontSocket::bind(&path).expect_err("it is no socket");
    assert!(error.to_string().contains("there is something else"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).expect("still there"), "a file of somebody");
}

#[test]
fn a_front_waits_no_longer_than_it_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let front = FrontSocket::bind(&folder.path().join("front.sock")).expect("a free path");
    let mut looks = 0;
    let still = || {
        looks += 1;
        looks < 3
    };
    assert!(front.accept(&Order::default(), still, |_| {}).expect("no error").is_none());
    assert_eq!(looks, 3);
}

#[test]
fn a_worker_waits_for_its_front_and_says_how_it_comes_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("front.sock");
    let error = Connection::to_front(&path, Duration::ZERO).expect_err("nobody is there");
    assert!(matches!(error, WorkerError::System { operation: "finding the front", .. }), "{error}");

    let to = path.clone();
    let worker = std::thread::spawn(move || {
        let refused = Connection::to_front(&to, PATIENCE).expect("a front");
        refused.fail(true, "dtype: there is no such");
        let failed = Connection::to_front(&to, PATIENCE).expect("a front");
        failed.fail(false, "the device is busy");
        // One that ends without a word.
        drop(Connection::to_front(&to, PATIENCE).expect("a front"));
        let good = Connection::to_front(&to, PATIENCE).expect("a front");
        good.progress("loading: 50 %");
        good.teller().expect("a teller")("loading: 100 %");
        let transport = LoopbackHub::new().transport("w");
        good.serve(toy(), Box::new(transport), "up", None).expect("served")
    });
    let front = FrontSocket::bind(&path).expect("a free path");
    let mut told = Vec::new();
    let accept =
        |told: &mut Vec<String>| front.accept(&Order::default(), || true, |text| told.push(text.to_owned()));
    let refused = accept(&mut told).expect_err("refused");
    assert!(
        matches!(&refused, WorkerError::Refused { reason } if reason == "dtype: there is no such"),
        "{refused}"
    );
    let failed = accept(&mut told).expect_err("failed");
    assert!(matches!(&failed, WorkerError::Failed { reason } if reason == "the device is busy"), "{failed}");
    let silent = accept(&mut told).expect_err("gone");
    assert!(matches!(&silent, WorkerError::Failed { reason } if reason == "its process ended"), "{silent}");
    let up = accept(&mut told).expect("up").expect("in time");
    assert_eq!(told, ["loading: 50 %", "loading: 100 %"]);
    assert_eq!(up.pid, std::process::id());
    drop(up);
    worker.join().expect("no panic");
}

#[test]
fn strangers_are_no_workers() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("front.sock");
    let front = FrontSocket::bind(&path).expect("a free path");
    // Another build: told so, and by whom.
    let mut other = UnixStream::connect(&path).expect("a front");
    let frame = [&17_u32.to_le_bytes()[..], &[96], b"mswk", &9_u32.to_le_bytes(), &[0; 8]].concat();
    other.write_all(&frame).expect("written");
    let error = front.accept(&Order::default(), || true, |_| {}).expect_err("another build");
    assert!(matches!(error, WorkerError::Version { theirs: 9, .. }), "{error}");
    let mut answer = [0; 9];
    other.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer[4], 98, "turned away");
    // Something else altogether.
    let mut browser = UnixStream::connect(&path).expect("a front");
    browser.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("written");
    drop(browser);
    assert!(front.accept(&Order::default(), || true, |_| {}).is_err());
}
