//! A transport in a worker keeps every rule of the contract.

use microserving_transport::conformance::{Cluster, Factory, Options};
use microserving_transport::{KvTransport, LoopbackHub};
use microserving_transport_shm::{ShmConfig, ShmTransport};

use crate::support::{start, toy};

fn in_worker(transport: Box<dyn KvTransport>) -> Box<dyn KvTransport> {
    let (worker, _thread) = start(toy(), transport, None);
    // Nobody computes here; dropped, it would end the worker before its transport does.
    std::mem::forget(worker.executor);
    Box::new(worker.transport)
}

/// Behind sockets, the loopback hub of one process.
struct Loopback;

impl Factory for Loopback {
    fn cluster(&self, options: Options) -> Cluster {
        let hub = if options.checksum { LoopbackHub::with_checksums() } else { LoopbackHub::new() };
        let remote = |name: &str| in_worker(Box::new(hub.transport(name)));
        let name = |index: usize| format!("sender {index}");
        let receiver = remote("receiver");
        let senders = (0..options.num_senders).map(|index| remote(&name(index))).collect();
        Cluster { receiver, senders, kill_sender: Some(Box::new(move |index| hub.crash(&name(index)))) }
    }
}

mod loopback {
    microserving_transport::conformance_tests!(super::Loopback);
}

/// And shared memory, whose senders really write from other threads.
struct Shm;

impl Factory for Shm {
    fn cluster(&self, options: Options) -> Cluster {
        let remote = || {
            let config = ShmConfig::default().with_checksum(options.checksum);
            in_worker(Box::new(ShmTransport::new(config).expect("shared memory")))
        };
        let receiver = remote();
        let senders = (0..options.num_senders).map(|_| remote()).collect();
        Cluster { receiver, senders, kill_sender: None }
    }
}

mod shm {
    microserving_transport::conformance_tests!(super::Shm);
}
