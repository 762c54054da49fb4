//! How a sender finds a receiver: where it listens, and which of all that ever listened there it is.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use microserving_transport::PeerAddress;

use crate::NAME;

const VERSION: u8 = 1;
/// The version, the id, an address of either family in IPv6's form, the port.
const NUM_BYTES: usize = 1 + 16 + 16 + 2;

/// The decoded form of a [`PeerAddress`] of this transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Drawn by each transport: a later one at the same port is another.
    pub(crate) id: [u8; 16],
    pub(crate) listen: SocketAddr,
}

impl Address {
    pub(crate) fn new(listen: SocketAddr) -> Result<Self, getrandom::Error> {
        let mut id = [0; 16];
        getrandom::fill(&mut id)?;
        Ok(Self { id, listen })
    }

    /// Returns the id as text, for names.
    pub(crate) fn id_text(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.id))
    }

    pub(crate) fn encode(&self) -> PeerAddress {
        let mut bytes = vec![VERSION];
        bytes.extend(self.id);
        let ip = match self.listen.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes.extend(ip.octets());
        bytes.extend(self.listen.port().to_le_bytes());
        PeerAddress { transport: NAME.to_owned(), bytes }
    }

    /// Reads an address.
    ///
    /// # Errors
    /// Why it is none of this transport, and what to configure instead.
    pub(crate) fn decode(address: &PeerAddress) -> Result<Self, String> {
        if address.transport != NAME {
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
        let sixteen = |at: usize| -> [u8; 16] { bytes[at..at + 16].try_into().expect("16 bytes") };
        let ip = Ipv6Addr::from(sixteen(17));
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let port = u16::from_le_bytes([bytes[33], bytes[34]]);
        if is_unspecified(ip) || port == 0 {
            return Err(format!("the peer's address names no place to connect to: {ip}, port {port}"));
        }
        Ok(Self { id: sixteen(1), listen: SocketAddr::new(ip, port) })
    }
}

/// Says whether an address stands for all of a host's, so that nobody can connect to it.
pub(crate) fn is_unspecified(ip: IpAddr) -> bool {
    ip == IpAddr::V4(Ipv4Addr::UNSPECIFIED) || ip == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_and_differ() {
        for listen in ["127.0.0.1:4711", "[2001:db8::7]:65535"] {
            let address = Address::new(listen.parse().unwrap()).unwrap();
            assert_eq!(Address::decode(&address.encode()), Ok(address));
            assert_ne!(Address::new(address.listen).unwrap(), address);
        }
    }

    #[test]
    fn what_is_no_place_is_named() {
        let address = |listen: &str| Address { id: [4; 16], listen: listen.parse().unwrap() }.encode();
        for listen in ["0.0.0.0:80", "[::]:80", "10.0.0.1:0"] {
            assert!(Address::decode(&address(listen)).unwrap_err().contains("no place to connect to"));
        }
        let shm = PeerAddress { transport: "shm".into(), bytes: Vec::new() };
        assert!(Address::decode(&shm).unwrap_err().contains("`shm`"));
        let mut newer = address("10.0.0.1:80");
        newer.bytes[0] = 2;
        assert!(Address::decode(&newer).unwrap_err().contains("version 2"));
    }
}
