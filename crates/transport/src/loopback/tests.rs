use crate::conformance::{Cluster, Factory, Options};
use crate::{KvTransport, LoopbackHub};

mod faults;

struct Loopback;

impl Factory for Loopback {
    fn cluster(&self, options: Options) -> Cluster {
        let hub = if options.checksum { LoopbackHub::with_checksums() } else { LoopbackHub::new() };
        let receiver = Box::new(hub.transport("receiver"));
        let name = |index: usize| format!("sender {index}");
        let senders = (0..options.num_senders)
            .map(|index| Box::new(hub.transport(&name(index))) as Box<dyn KvTransport>)
            .collect();
        Cluster { receiver, senders, kill_sender: Some(Box::new(move |index| hub.crash(&name(index)))) }
    }
}

crate::conformance_tests!(Loopback);
