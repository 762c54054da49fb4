//! Peers that do not behave: played by bare connections in this process.

use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, KvRange};
use microserving_transport::one_sided::{Frame, MAX_MESSAGE};
use microserving_transport::{
    Admission, ByteRun, Claim, Grant, KvTransport, PutRun, Refusal, TransportEvent,
};

use crate::address::Address;
use crate::link::{Link, LinkError};
use crate::message::{Introduction, MAX_FIRST_MESSAGE, Message, VERSION};
use crate::{NixlConfig, NixlTransport};

const G: Generation = Generation(1);
const NUM_BYTES: usize = 64 << 10;

/// Makes a transport, if there is a library.
fn make() -> Option<NixlTransport> {
    let Some(library) = std::env::var_os("NIXL_LIBRARY") else {
        assert!(std::env::var_os("MICROSERVING_FULL").is_none(), "NIXL_LIBRARY is not set");
        eprintln!("SKIPPED: NIXL_LIBRARY does not name a libnixl_capi.so (cargo xtask nixl --fetch)");
        return None;
    };
    let mut config = NixlConfig::new("127.0.0.1:0".parse().unwrap()).with_library(Some(library.into()));
    config.max_senders = 4;
    Some(NixlTransport::new(config).unwrap())
}

#[derive(Debug)]
struct Anyone;

impl Admission for Anyone {
    fn admit(&self, credential: &[u8]) -> Result<Generation, Refusal> {
        if credential == b"forged" { Err(Refusal::BadCredential) } else { Ok(G) }
    }
}

fn whole() -> KvRange {
    KvRange::new(0, 64).expect("ordered")
}

fn receiver() -> Option<(NixlTransport, Arc<dyn KvMemory>)> {
    let mut transport = make()?;
    let memory = transport.allocate_region(NUM_BYTES).unwrap();
    transport.set_admission(Arc::new(Anyone));
    let runs = vec![ByteRun { offset: 0, num_bytes: NUM_BYTES / 2 }];
    transport.grant(Grant { generation: G, range: whole(), token_bytes: NUM_BYTES / 128, runs }).unwrap();
    Some((transport, memory))
}

/// Polls until `done` or 20 seconds.
fn wait<T>(mut done: impl FnMut() -> Option<T>) -> T {
    for _ in 0..20_000 {
        if let Some(result) = done() {
            return result;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it did not happen");
}

fn next(link: &mut Link) -> Result<Message, LinkError> {
    wait(|| match link.next(MAX_MESSAGE) {
        Ok(Some(message)) => Some(Ok(message)),
        Ok(None) => link.fill().err().map(Err),
        Err(error) => Some(Err(error)),
    })
}

fn is_dropped(link: &mut Link) -> bool {
    wait(|| match link.fill() {
        Ok(_) => None,
        Err(error) => Some(error.is_nobody()),
    })
}

/// A sender of `NUM_BYTES` that nobody can read from: its metadata is none.
fn introduction(transport: &NixlTransport) -> Introduction {
    let whom = Address::decode(&transport.peer_address()).unwrap().id;
    let metadata = b"not NIXL's".to_vec();
    Introduction { version: VERSION, whom, checksum: false, base: 4096, num_bytes: NUM_BYTES, metadata }
}

fn connect(transport: &NixlTransport) -> Link {
    Link::connect(transport.listens_at()).unwrap()
}

fn open(channel: u64) -> Message {
    Message::Frame(Frame::Open { channel, range: whole(), credential: b"fine".to_vec() })
}

fn put(channel: u64, local_offset: usize, remote_offset: usize, num_bytes: usize) -> Message {
    Message::Put { channel, runs: vec![PutRun { local_offset, remote_offset, num_bytes }] }
}

/// A sender by hand, its claim accepted.
fn accepted(transport: &NixlTransport) -> Link {
    let mut link = connect(transport);
    link.send(&Message::Introduce(introduction(transport))).unwrap();
    link.send(&open(1)).unwrap();
    let answer = next(&mut link).unwrap();
    assert!(matches!(answer, Message::Frame(Frame::Accept { channel: 1, .. })), "{answer:?}");
    link
}

fn poll_for(transport: &mut NixlTransport, seen: &mut Vec<TransportEvent>, event: &TransportEvent) {
    wait(|| {
        transport.poll(Duration::ZERO, seen);
        seen.contains(event).then_some(())
    });
}

#[test]
fn strangers_and_babblers_are_dropped() {
    let Some((mut transport, memory)) = receiver() else { return };
    let known = Message::Introduce(introduction(&transport));
    let stranger = Message::Introduce(Introduction { whom: [9; 16], ..introduction(&transport) });
    let long =
        Message::Introduce(Introduction { metadata: vec![0; MAX_FIRST_MESSAGE], ..introduction(&transport) });
    for messages in [
        vec![open(1)],
        vec![stranger, open(1)],
        vec![known.clone(), known.clone()],
        vec![long],
        vec![known.clone(), Message::Taken { channel: 1, num_bytes: 1 }],
        vec![known.clone(), Message::Frame(Frame::Stop { channel: 1 })],
        vec![known.clone(), Message::Frame(Frame::Hello { version: 1, start_time: 0, checksum: false })],
    ] {
        let mut link = connect(&transport);
        messages.iter().for_each(|message| link.send(message).unwrap());
        assert!(is_dropped(&mut link), "{messages:?}");
    }
    let mut newer = connect(&transport);
    newer.send(&Message::Introduce(Introduction { version: 9, ..introduction(&transport) })).unwrap();
    let Message::Frame(Frame::Reject { reason }) = next(&mut newer).unwrap() else { panic!("not rejected") };
    assert!(reason.contains("the sender 9"), "{reason}");

    let mut events = Vec::new();
    transport.poll(Duration::ZERO, &mut events);
    assert_eq!(events, [], "nobody had a claim");
    let mut bytes = vec![1; NUM_BYTES];
    memory.read(0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn what_an_admitted_sender_may_not_say_ends_its_claims() {
    let half = NUM_BYTES / 2;
    let finish = Message::Frame(Frame::Finish { channel: 1, num_bytes: half as u64 });
    for (message, what) in [
        (put(1, 0, half, 1), "outside the grant"),
        (put(1, 0, half - 1, 2), "across the grant's end"),
        (put(1, 0, usize::MAX, 1), "beyond everything"),
        (put(1, NUM_BYTES, 0, 1), "outside the sender's region"),
        (put(1, usize::MAX, 0, 1), "beyond the sender's addresses"),
        (put(1, 0, 0, 0), "of no bytes"),
        (Message::Put { channel: 1, runs: Vec::new() }, "no runs"),
        (open(1), "the same channel"),
        // Its metadata are none: nothing can be read from it.
        (put(1, 0, 0, 8), "unreadable"),
    ] {
        let Some((mut transport, _)) = receiver() else { return };
        let mut link = accepted(&transport);
        link.send(&message).unwrap();
        assert!(is_dropped(&mut link), "{what}");
        let mut events = Vec::new();
        poll_for(
            &mut transport,
            &mut events,
            &TransportEvent::Lost { generation: G, range: whole(), corrupt: false },
        );
        transport.revoke(G);
        poll_for(&mut transport, &mut events, &TransportEvent::Released { generation: G, fenced: true });
    }
    let Some((mut transport, _)) = receiver() else { return };
    let mut link = accepted(&transport);
    // Saying that all was announced makes nothing complete.
    link.send(&finish).unwrap();
    let answer = next(&mut link).unwrap();
    let refusal = Some(Refusal::Revoked);
    assert_eq!(answer, Message::Frame(Frame::Finished { channel: 1, refusal }));
    let lost = TransportEvent::Lost { generation: G, range: whole(), corrupt: false };
    poll_for(&mut transport, &mut Vec::new(), &lost);
}

#[test]
fn runs_of_a_claim_that_has_ended_are_taken_unread() {
    let Some((mut transport, memory)) = receiver() else { return };
    let mut link = accepted(&transport);
    transport.revoke(G);
    poll_for(&mut transport, &mut Vec::new(), &TransportEvent::Released { generation: G, fenced: false });
    link.send(&put(1, 0, 0, 8)).unwrap();
    assert_eq!(next(&mut link).unwrap(), Message::Frame(Frame::Stop { channel: 1 }));
    assert_eq!(next(&mut link).unwrap(), Message::Taken { channel: 1, num_bytes: 0 });
    let mut bytes = [1; 8];
    memory.read(0, &mut bytes);
    assert_eq!(bytes, [0; 8]);
}

#[test]
fn those_who_say_nothing_make_room() {
    let Some((transport, _)) = receiver() else { return };
    let mut claimed = accepted(&transport);
    let silent: Vec<_> = (0..6).map(|_| connect(&transport)).collect();
    let mut late = accepted_again(&transport);
    late.send(&Message::Beat).unwrap();
    claimed.send(&Message::Beat).unwrap();
    assert_eq!(silent.len(), 6);
    // Whoever has a claim was not dropped for them.
    claimed.send(&Message::Frame(Frame::Drained { channel: 1 })).unwrap();
    claimed.send(&Message::Frame(Frame::Finish { channel: 7, num_bytes: 0 })).unwrap();
    let stale = Some(Refusal::Stale);
    assert_eq!(next(&mut claimed).unwrap(), Message::Frame(Frame::Finished { channel: 7, refusal: stale }));
}

/// A second sender; the range is taken, which it is told.
fn accepted_again(transport: &NixlTransport) -> Link {
    let mut link = connect(transport);
    link.send(&Message::Introduce(introduction(transport))).unwrap();
    link.send(&open(2)).unwrap();
    let answer = next(&mut link).unwrap();
    let refusal = Refusal::RangeTaken;
    assert_eq!(answer, Message::Frame(Frame::Refuse { channel: 2, refusal }));
    link
}

/// A receiver by hand.
#[test]
fn a_receiver_that_takes_more_than_there_is_is_given_up() {
    let Some(mut sender) = make() else { return };
    sender.allocate_region(NUM_BYTES).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::new(listener.local_addr().unwrap()).unwrap();
    let claim = Claim { peer: address.encode(), credential: b"fine".to_vec(), range: whole() };
    let channel = sender.open(claim).unwrap();
    let mut link = wait(|| Link::accept(&listener).unwrap());
    let Message::Introduce(introduced) = next(&mut link).unwrap() else { panic!("no introduction") };
    assert_eq!((introduced.whom, introduced.num_bytes), (address.id, NUM_BYTES));
    assert!(matches!(next(&mut link).unwrap(), Message::Frame(Frame::Open { .. })));
    link.send(&Message::Taken { channel: channel.0, num_bytes: 1 }).unwrap();
    let closed = TransportEvent::Closed { channel, refusal: Some(Refusal::Unreachable) };
    poll_for(&mut sender, &mut Vec::new(), &closed);
}

#[test]
fn an_address_that_nobody_can_connect_to_is_refused() {
    let Some(transport) = make() else { return };
    let taken = NixlConfig { listen: transport.listens_at(), ..transport_config() };
    let error = NixlTransport::new(taken).unwrap_err().to_string();
    assert!(error.contains("listen for senders"), "{error}");
    let everywhere = NixlConfig { listen: "0.0.0.0:0".parse().unwrap(), ..transport_config() };
    let error = NixlTransport::new(everywhere).unwrap_err().to_string();
    assert!(error.contains("name the one that they reach"), "{error}");
}

fn transport_config() -> NixlConfig {
    let library = std::env::var_os("NIXL_LIBRARY").map(Into::into);
    NixlConfig::new("127.0.0.1:0".parse().unwrap()).with_library(library)
}
