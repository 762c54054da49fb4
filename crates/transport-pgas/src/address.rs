//! How a sender finds a receiver: by its number, if both are of one world.

use microserving_protocol::PeId;
use microserving_transport::PeerAddress;

const VERSION: u8 = 1;
const NUM_BYTES: usize = 1 + 16 + 4;

/// An element of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Drawn when the world was formed.
    pub(crate) world: [u8; 16],
    pub(crate) pe: PeId,
}

impl Address {
    pub(crate) fn encode(&self, transport: &str) -> PeerAddress {
        let mut bytes = vec![VERSION];
        bytes.extend(self.world);
        bytes.extend(self.pe.0.to_le_bytes());
        PeerAddress { transport: transport.to_owned(), bytes }
    }

    /// Reads an address of this transport, whatever its world.
    pub(crate) fn decode(transport: &str, address: &PeerAddress) -> Result<Self, String> {
        if address.transport != transport {
            return Err(format!(
                "the peer is reached by `{}`; configure the same transport on both engines",
                address.transport
            ));
        }
        let bytes: &[u8; NUM_BYTES] = address
            .bytes
            .as_slice()
            .try_into()
            .map_err(|_| format!("an address has {NUM_BYTES} bytes, not {}", address.bytes.len()))?;
        if bytes[0] != VERSION {
            return Err(format!("the peer's address is of version {}, ours of {VERSION}", bytes[0]));
        }
        let (_, [world @ .., a, b, c, d]) = bytes.split_first().expect("more than one byte") else {
            return Err("an address is too short".into());
        };
        let world = world.try_into().map_err(|_| "an address is too short".to_owned())?;
        Ok(Self { world, pe: PeId(u32::from_le_bytes([*a, *b, *c, *d])) })
    }

    /// Checks that the element is one of ours.
    pub(crate) fn check_reachable(&self, world: [u8; 16], num_pes: u32) -> Result<(), String> {
        if self.world != world {
            return Err("the peer belongs to another world: a formed world takes nobody in and lets nobody go; start all engines \
                 that exchange KV as one world, or use a transport whose engines come and go"
                .into());
        }
        if self.pe.0 >= num_pes {
            return Err(format!(
                "the world has {num_pes} elements, and the address names number {}",
                self.pe
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_and_worlds_are_told_apart() {
        let address = Address { world: [7; 16], pe: PeId(0x0102_0304) };
        let encoded = address.encode("pgas");
        assert_eq!(Address::decode("pgas", &encoded), Ok(address));
        assert!(Address::decode("shm", &encoded).unwrap_err().contains("`pgas`"));
        let address = Address { pe: PeId(3), ..address };
        assert_eq!(address.check_reachable([7; 16], 4), Ok(()));
        assert!(address.check_reachable([7; 16], 3).unwrap_err().contains("has 3 elements"));
        assert!(address.check_reachable([8; 16], 4).unwrap_err().contains("a formed world takes nobody in"));
    }
}
