//! Peers that do not behave, and connections that end without a proof: played by bare sockets in this process.

use std::sync::Arc;
use std::time::Duration;

use microserving_protocol::{Generation, KvMemory, KvRange};
use microserving_transport::one_sided::{Frame, Record, VERSION, own_start_time};
use microserving_transport::{
    Admission, ByteRun, Claim, Grant, KvTransport, PutRun, Refusal, TransportEvent,
};

use crate::address::{Address, Place};
use crate::link::{Link, LinkError, Received, listen};
use crate::memory::PeerMemory;
use crate::packets::MAX_PACKET;
use crate::{ShmConfig, ShmTransport};

const G: Generation = Generation(1);
const NUM_BYTES: usize = 64 << 10;

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

fn receiver(config: ShmConfig) -> (ShmTransport, Arc<dyn KvMemory>) {
    let mut transport = ShmTransport::new(config).unwrap();
    let memory = transport.allocate_region(NUM_BYTES).unwrap();
    transport.set_admission(Arc::new(Anyone));
    let runs = vec![ByteRun { offset: 0, num_bytes: NUM_BYTES }];
    transport.grant(Grant { generation: G, range: whole(), token_bytes: NUM_BYTES / 64, runs }).unwrap();
    (transport, memory)
}

fn socket_name(transport: &ShmTransport) -> String {
    Address::reachable_from(&Place::here().unwrap(), &transport.peer_address()).unwrap().socket_name()
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

fn next_frame(link: &mut Link) -> Result<Received, LinkError> {
    wait(|| match link.receive() {
        Ok(Some(Some(received))) => Some(Ok(received)),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    })
}

fn hello() -> Frame {
    Frame::Hello { version: VERSION, start_time: own_start_time().unwrap(), checksum: false }
}

fn open(channel: u64) -> Frame {
    Frame::Open { channel, range: whole(), credential: b"fine".to_vec() }
}

/// A sender by hand, its claim accepted.
fn accepted(transport: &ShmTransport) -> (Link, PeerMemory) {
    let mut link = Link::connect(&socket_name(transport)).unwrap();
    link.send(&hello(), Vec::new()).unwrap();
    link.send(&open(1), Vec::new()).unwrap();
    let received = next_frame(&mut link).unwrap();
    assert!(matches!(received.frame, Frame::Accept { channel: 1, .. }), "{received:?}");
    let memory = PeerMemory::map(&received.fds[0], &received.fds[1]).unwrap();
    (link, memory)
}

fn poll_for(transport: &mut ShmTransport, seen: &mut Vec<TransportEvent>, event: &TransportEvent) {
    wait(|| {
        transport.poll(Duration::ZERO, seen);
        seen.contains(event).then_some(())
    });
}

fn lost(corrupt: bool) -> TransportEvent {
    TransportEvent::Lost { generation: G, range: whole(), corrupt }
}

#[test]
fn a_closed_socket_is_no_proof() {
    let (mut transport, memory) = receiver(ShmConfig::default());
    let (link, mapped) = accepted(&transport);
    drop(link);
    let mut seen = Vec::new();
    poll_for(&mut transport, &mut seen, &lost(false));
    transport.revoke(G);
    for _ in 0..200 {
        transport.poll(Duration::ZERO, &mut seen);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(seen, [lost(false)], "the writer lives, and here is why that matters:");
    let own = crate::memory::Region::allocate(4096).unwrap();
    own.write(0, b"late");
    own.mapping().copy_to(0, mapped.region(), 0, 4);
    let mut bytes = [0; 4];
    memory.read(0, &mut bytes);
    assert_eq!(&bytes, b"late");
}

#[test]
fn hostile_senders_are_dropped_and_others_served() {
    let (mut transport, memory) = receiver(ShmConfig::default());
    let name = socket_name(&transport);
    let accept = Frame::Accept { channel: 1, slot: 0, num_bytes: 0, checksum: false, runs: Vec::new() };
    let run = |offset, num_bytes| Record { run: ByteRun { offset, num_bytes }, hash: 0 };
    let frames =
        |frames: &[Frame]| frames.iter().map(|frame| [&[0], frame.encode().as_slice()].concat()).collect();
    let endless: Vec<Vec<u8>> = vec![[&[1], vec![0; MAX_PACKET - 1].as_slice()].concat(); 600];
    let unknown = Frame::Records { channel: 9, records: vec![run(0, 1)] };
    let cases: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("garbage", vec![vec![0xff; 100]]),
        ("a lead that does not exist", vec![vec![7]]),
        ("an empty frame", vec![vec![0]]),
        ("an endless message", endless),
        ("no Hello", frames(&[open(1)])),
        ("two Hellos", frames(&[hello(), hello()])),
        ("a receiver's frame", frames(&[hello(), accept])),
        ("another version", frames(&[Frame::Hello { version: 99, start_time: 0, checksum: false }])),
        (
            "a stranger's start time",
            frames(&[Frame::Hello { version: VERSION, start_time: 1, checksum: false }]),
        ),
        ("records of no claim, then garbage", [frames(&[hello(), unknown]), vec![vec![0, 0xff]]].concat()),
    ];
    for (what, packets) in cases {
        let link = Link::connect(&name).unwrap();
        let mut sent_all = true;
        for packet in packets {
            let flags = rustix::net::SendFlags::NOSIGNAL;
            let result = wait(|| match rustix::net::send(&link, &packet, flags) {
                Err(rustix::io::Errno::AGAIN) => None,
                other => Some(other),
            });
            sent_all &= result.is_ok();
        }
        assert!(sent_all || what == "an endless message", "{what}");
        let mut link = link;
        let error = wait(|| match link.receive() {
            Ok(Some(Some(received))) => {
                assert!(matches!(received.frame, Frame::Reject { .. }), "{what}: {received:?}");
                None
            }
            Ok(_) => None,
            Err(error) => Some(error),
        });
        assert!(matches!(error, LinkError::Closed), "{what}: {error}");
    }
    let mut seen = Vec::new();
    transport.poll(Duration::ZERO, &mut seen);
    assert_eq!(seen, []);

    let mut sender = ShmTransport::new(ShmConfig::default()).unwrap();
    sender.allocate_region(NUM_BYTES).unwrap().write(0, &[3; NUM_BYTES]);
    let claim = Claim { peer: transport.peer_address(), credential: Vec::new(), range: whole() };
    let channel = sender.open(claim).unwrap();
    sender.put(channel, &[PutRun { local_offset: 0, remote_offset: 0, num_bytes: NUM_BYTES }]).unwrap();
    sender.finish(channel);
    poll_for(&mut transport, &mut seen, &TransportEvent::Complete { generation: G });
    let mut bytes = vec![0; NUM_BYTES];
    memory.read(0, &mut bytes);
    assert!(bytes == [3; NUM_BYTES]);
}

#[test]
fn lies_about_what_was_written_are_found() {
    let run = |offset, num_bytes| Record { run: ByteRun { offset, num_bytes }, hash: 0 };
    // Each with the bytes that the counter says, and what the sender says in the end.
    let finish = |num_bytes| Frame::Finish { channel: 1, num_bytes };
    let whole_bytes = NUM_BYTES as u64;
    let cases = [
        (false, whole_bytes - 1, vec![finish(whole_bytes)], false),
        (false, whole_bytes, vec![finish(whole_bytes + 1)], false),
        (false, u64::MAX, vec![finish(whole_bytes)], false),
        (true, whole_bytes, vec![finish(whole_bytes)], true),
        (
            true,
            whole_bytes,
            vec![Frame::Records { channel: 1, records: vec![run(0, NUM_BYTES)] }, finish(whole_bytes)],
            true,
        ),
    ];
    for (checksum, counted, frames, corrupt) in cases {
        let (mut transport, _memory) = receiver(ShmConfig::default().with_checksum(checksum));
        let (mut link, mapped) = accepted(&transport);
        mapped.count_arrived(0, counted);
        assert!(transport.arrived_bytes(G) <= whole_bytes);
        for frame in &frames {
            link.send(frame, Vec::new()).unwrap();
        }
        let mut seen = Vec::new();
        poll_for(&mut transport, &mut seen, &lost(corrupt));
        let received = next_frame(&mut link).unwrap();
        assert_eq!(received.frame, Frame::Finished { channel: 1, refusal: Some(Refusal::Revoked) });
        transport.revoke(G);
        poll_for(&mut transport, &mut seen, &TransportEvent::Released { generation: G, fenced: false });
    }
    for records in [vec![run(0, NUM_BYTES + 1)], vec![run(0, NUM_BYTES), run(0, 1)], vec![run(5, 0)]] {
        let (transport, _memory) = receiver(ShmConfig::default().with_checksum(true));
        let (mut link, _mapped) = accepted(&transport);
        link.send(&Frame::Records { channel: 1, records }, Vec::new()).unwrap();
        assert!(matches!(next_frame(&mut link), Err(LinkError::Closed)));
    }
}

#[test]
fn a_connection_holds_a_bounded_number_of_claims() {
    let (mut transport, _memory) = receiver(ShmConfig::default());
    let mut link = Link::connect(&socket_name(&transport)).unwrap();
    link.send(&hello(), Vec::new()).unwrap();
    let nothing = KvRange::default();
    let mut accepted = 0;
    for channel in 0..=u64::from(crate::memory::Counters::NUM_SLOTS) {
        link.send(&Frame::Open { channel, range: nothing, credential: Vec::new() }, Vec::new()).unwrap();
        match next_frame(&mut link).unwrap().frame {
            Frame::Accept { .. } => accepted += 1,
            Frame::Refuse { refusal, .. } => assert_eq!(refusal, Refusal::Unreachable),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(accepted, crate::memory::Counters::NUM_SLOTS);
    link.send(&Frame::Drained { channel: 5 }, Vec::new()).unwrap();
    link.send(&Frame::Open { channel: 5, range: nothing, credential: Vec::new() }, Vec::new()).unwrap();
    assert!(matches!(next_frame(&mut link).unwrap().frame, Frame::Accept { .. }), "a slot came free");
    transport.poll(Duration::ZERO, &mut Vec::new());
}

#[test]
fn senders_that_say_nothing_make_room_for_those_that_do() {
    let (transport, _memory) = receiver(ShmConfig { max_senders: 4, ..ShmConfig::default() });
    let name = socket_name(&transport);
    let mut silent: Vec<_> = (0..4).map(|_| Link::connect(&name).unwrap()).collect();
    let (_link, _memory) = accepted(&transport);
    let error = next_frame(&mut silent[0]).unwrap_err();
    assert!(matches!(error, LinkError::Closed), "{error}");
}

/// Receivers may be hostile, too.
#[test]
fn a_receiver_that_breaks_the_protocol_ends_the_claim() {
    let accept =
        |slot, runs: Vec<ByteRun>| Frame::Accept { channel: 1, slot, num_bytes: 64, checksum: false, runs };
    let run = |offset, num_bytes| ByteRun { offset, num_bytes };
    let cases: Vec<(&str, Vec<Frame>, bool)> = vec![
        ("no memory", vec![accept(0, Vec::new())], false),
        ("a slot that does not exist", vec![accept(1 << 20, vec![run(0, 64)])], true),
        ("runs outside", vec![accept(0, vec![run(NUM_BYTES, 1)])], true),
        ("runs beyond all numbers", vec![accept(0, vec![run(usize::MAX, 2)])], true),
        ("finished before it was written", vec![Frame::Finished { channel: 1, refusal: None }], false),
        (
            "refused after it was accepted",
            vec![accept(0, vec![run(0, 64)]), Frame::Refuse { channel: 1, refusal: Refusal::Stale }],
            true,
        ),
        ("a sender's frame", vec![hello()], false),
        ("turned away", vec![Frame::Reject { reason: "go away".into() }], false),
        ("says nothing and leaves", Vec::new(), false),
    ];
    for (what, frames, with_memory) in cases {
        let address = Address::new(Place::here().unwrap()).unwrap();
        let listener = listen(&address.socket_name()).unwrap();
        let mut sender = ShmTransport::new(ShmConfig::default()).unwrap();
        sender.allocate_region(NUM_BYTES).unwrap();
        let claim = Claim { peer: address.encode(), credential: Vec::new(), range: whole() };
        let channel = sender.open(claim).unwrap();
        assert_eq!(channel.0, 1);
        let mut link = wait(|| Link::accept(&listener).unwrap());
        assert!(matches!(next_frame(&mut link).unwrap().frame, Frame::Hello { .. }));
        assert!(matches!(next_frame(&mut link).unwrap().frame, Frame::Open { .. }));
        let (region, counters) = (
            crate::memory::Region::allocate(NUM_BYTES).unwrap(),
            crate::memory::Counters::allocate().unwrap(),
        );
        let mut fds = if with_memory {
            vec![rustix::io::dup(region.memfd()).unwrap(), rustix::io::dup(counters.memfd()).unwrap()]
        } else {
            Vec::new()
        };
        for frame in frames {
            link.send(&frame, std::mem::take(&mut fds)).unwrap();
        }
        drop(link);
        let mut seen = Vec::new();
        wait(|| {
            sender.poll(Duration::ZERO, &mut seen);
            seen.iter().any(|event| matches!(event, TransportEvent::Closed { .. })).then_some(())
        });
        let refusal = match seen.last() {
            Some(TransportEvent::Closed { refusal, .. }) => *refusal,
            other => panic!("{what}: {other:?}"),
        };
        let met = with_memory || what == "says nothing and leaves";
        let expected = if met { Refusal::PeerLost } else { Refusal::Unreachable };
        assert_eq!(refusal, Some(expected), "{what}");
    }
}

#[test]
fn one_connection_serves_many_claims() {
    let (mut transport, _memory) = receiver(ShmConfig::default());
    let (mut link, _mapped) = accepted(&transport);
    link.send(&open(2), Vec::new()).unwrap();
    let second = next_frame(&mut link).unwrap();
    assert_eq!(second.frame, Frame::Refuse { channel: 2, refusal: Refusal::RangeTaken });
    let empty = Frame::Open { channel: 3, range: KvRange::default(), credential: Vec::new() };
    link.send(&empty, Vec::new()).unwrap();
    let third = next_frame(&mut link).unwrap();
    assert!(matches!(third.frame, Frame::Accept { channel: 3, .. }));
    assert!(third.fds.is_empty(), "the memory is sent once");
    transport.revoke(G);
    let stops: Vec<_> = (0..2).map(|_| next_frame(&mut link).unwrap().frame).collect();
    assert_eq!(stops, [Frame::Stop { channel: 1 }, Frame::Stop { channel: 3 }]);
    for channel in [1, 3] {
        link.send(&Frame::Drained { channel }, Vec::new()).unwrap();
    }
    poll_for(&mut transport, &mut Vec::new(), &TransportEvent::Released { generation: G, fenced: false });
}

#[test]
fn a_sender_that_says_all_at_once_and_hangs_up_is_still_awaited() {
    let (mut transport, _memory) = receiver(ShmConfig::default());
    let mut link = Link::connect(&socket_name(&transport)).unwrap();
    link.send(&hello(), Vec::new()).unwrap();
    link.send(&open(1), Vec::new()).unwrap();
    drop(link);
    let mut seen = Vec::new();
    poll_for(&mut transport, &mut seen, &lost(false));
    transport.revoke(G);
    for _ in 0..100 {
        transport.poll(Duration::ZERO, &mut seen);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(seen, [lost(false)], "this process, which connected, lives");
}
