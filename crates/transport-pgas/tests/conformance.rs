//! The suite of the contract, over a world within this process whose puts are as weakly ordered as may be.

use microserving_transport::KvTransport;
use microserving_transport::conformance::{Cluster, Factory, Options};
use microserving_transport_pgas::{LocalPgas, PgasConfig, PgasTransport};

struct Local;

impl Factory for Local {
    fn cluster(&self, options: Options) -> Cluster {
        let config = PgasConfig::new(16 << 20).with_checksum(options.checksum);
        let world = LocalPgas::world(options.num_senders as u32 + 1, 7);
        let mut transports: Vec<_> = std::thread::scope(|scope| {
            let form = |pgas| {
                let config = config.clone();
                scope.spawn(move || PgasTransport::form(Box::new(pgas), config).expect("a world"))
            };
            let threads: Vec<_> = world.into_iter().map(form).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, PgasTransport>| -> Box<dyn KvTransport> {
                Box::new(thread.join().expect("formed"))
            };
            threads.into_iter().map(join).collect()
        });
        Cluster { receiver: transports.remove(0), senders: transports, kill_sender: None }
    }
}

microserving_transport::conformance_tests!(Local);
