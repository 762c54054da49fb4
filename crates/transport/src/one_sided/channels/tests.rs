use super::*;

fn target(num_bytes: u64) -> Target<()> {
    let runs = [ByteRun { offset: 100, num_bytes: 1000 }].into();
    Target { memory: (), slot: 0, num_bytes, runs, checksum: false }
}

fn run(remote_offset: usize, num_bytes: usize) -> PutRun {
    PutRun { local_offset: 0, remote_offset, num_bytes }
}

fn copied(num_bytes: u64) -> Copied {
    Copied { num_bytes, busy: Duration::from_micros(1), records: Vec::new() }
}

#[test]
fn long_runs_are_cut_and_channels_take_turns() {
    let mut channels = Channels::default();
    let (a, b) = (channels.open(), channels.open());
    for id in [a, b] {
        assert_eq!(channels.put(id, &[run(100, 700), run(800, 300)], 10), Ok(true));
        assert_eq!(channels.accept(id, target(1000)), None);
    }
    let mut seen = Vec::new();
    while let (Some(slice), None) = channels.next_slice(400) {
        let num_bytes: usize = slice.runs.iter().map(|run| run.num_bytes).sum();
        seen.push((slice.channel, slice.runs[0].remote_offset, num_bytes));
        assert_eq!(channels.copied(slice.channel, copied(num_bytes as u64)), None);
    }
    assert_eq!(
        seen,
        [(a, 100, 400), (b, 100, 400), (a, 500, 400), (b, 500, 400), (a, 900, 200), (b, 900, 200)]
    );
    assert_eq!(channels.finish(a), Some(Notice::Written(a)));
    assert_eq!(channels.finish(a), None, "said once");
    assert_eq!(channels.delivered(a).map(|delivered| delivered.num_bytes), Some(1000));
}

#[test]
fn nothing_is_said_while_a_copy_is_under_way() {
    let mut channels = Channels::default();
    let id = channels.open();
    assert_eq!(channels.put(id, &[run(100, 700)], 10), Ok(true));
    channels.accept(id, target(1000));
    let (slice, _) = channels.next_slice(100);
    assert!(slice.is_some());
    assert_eq!(channels.finish(id), None);
    assert_eq!(channels.stop(id, Stopping::Because(Refusal::Revoked)), None, "a Drained would be a lie now");
    assert_eq!(channels.stop(id, Stopping::Cancelled), None);
    assert_eq!(channels.copied(id, copied(100)), Some(Notice::Stopped(id)));
    assert!(channels.next_slice(100).0.is_none(), "the queue was dropped");
    assert!(channels.delivered(id).is_none());
    channels.close(id, None);
    let mut events = Vec::new();
    assert_eq!(channels.put(id, &[run(100, 1)], 10), Ok(false), "the news is on the way");
    channels.drain_events(&mut events);
    let refusal = Some(Refusal::Revoked);
    assert_eq!(
        events,
        [TransportEvent::Opened { channel: id }, TransportEvent::Closed { channel: id, refusal }]
    );
    assert_eq!(channels.put(id, &[run(100, 1)], 10), Err(PutError::Unknown(id)));
}

#[test]
fn runs_outside_the_grant_are_never_given_to_the_writer() {
    for bad in [run(99, 2), run(1099, 2), run(100, 1001), run(2000, 1)] {
        let mut channels = Channels::default();
        let id = channels.open();
        assert_eq!(channels.put(id, &[bad], 10), Ok(true));
        channels.accept(id, target(5000));
        let (slice, notice) = channels.next_slice(1 << 20);
        assert!(slice.is_none());
        assert_eq!(notice, Some(Notice::Stopped(id)));
    }
    let mut channels = Channels::default();
    let id = channels.open();
    assert_eq!(channels.put(id, &[run(100, 10), run(200, 11)], 10), Ok(true));
    channels.accept(id, target(20));
    assert_eq!(channels.next_slice(5).0.map(|slice| slice.runs), Some(vec![run(100, 5)]));
}

#[test]
fn the_queue_is_bounded() {
    let mut channels = Channels::<()>::default();
    let id = channels.open();
    assert_eq!(channels.put(id, &[run(0, 1); 3], 4), Ok(true));
    assert_eq!(
        channels.put(id, &[run(0, 1); 2], 4),
        Err(PutError::QueueFull { channel: id, max_queued_runs: 4 })
    );
    assert_eq!(channels.put(id, &[run(0, 1)], 4), Ok(true));
}
