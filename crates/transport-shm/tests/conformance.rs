//! The suite of the contract, with sender and receiver in one process; `processes.rs` has what needs two.

use microserving_transport::KvTransport;
use microserving_transport::conformance::{Cluster, Factory, Options};
use microserving_transport_shm::{ShmConfig, ShmTransport};

struct Shm;

impl Factory for Shm {
    fn cluster(&self, options: Options) -> Cluster {
        let make = |_| {
            let config = ShmConfig::default().with_checksum(options.checksum);
            Box::new(ShmTransport::new(config).expect("a transport")) as Box<dyn KvTransport>
        };
        Cluster {
            receiver: make(0),
            senders: (0..options.num_senders).map(make).collect(),
            kill_sender: None,
        }
    }
}

microserving_transport::conformance_tests!(Shm);
