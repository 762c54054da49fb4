//! How a sender finds a receiver: the name of its socket, and where that name means something.

use std::fs;
use std::io;

use microserving_transport::PeerAddress;

use crate::NAME;

const VERSION: u8 = 1;
const NUM_BYTES: usize = 1 + 16 + 8 + 4 + 16;

/// Where a process lives: names of abstract sockets and memory can be shared only between equal places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Drawn by the kernel at boot: tells hosts, and boots of one host, apart.
    boot_id: [u8; 16],
    /// The network namespace, which abstract socket names belong to.
    net_namespace: u64,
    user: u32,
}

impl Place {
    /// Returns where this process lives.
    pub(crate) fn here() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let digits = text.trim().replace('-', "");
        let boot_id = u128::from_str_radix(&digits, 16).map_err(|_| invalid("boot_id is not hexadecimal"))?;
        let link = fs::read_link("/proc/self/ns/net")?;
        let namespace =
            link.to_str().and_then(|link| link.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok());
        Ok(Self {
            boot_id: boot_id.to_be_bytes(),
            net_namespace: namespace.ok_or_else(|| invalid("the network namespace has no number"))?,
            user: rustix::process::geteuid().as_raw(),
        })
    }

    /// Says why a peer at `other` cannot be reached from here, and what to do instead.
    fn why_unreachable(&self, other: &Self) -> Option<String> {
        let why = if self.boot_id != other.boot_id {
            "peers on different hosts need another transport, or the peer is of an earlier boot of this host"
        } else if self.net_namespace != other.net_namespace {
            "the peer lives in another network namespace of this host"
        } else if self.user != other.user {
            "the peer runs as another user of this host"
        } else {
            return None;
        };
        Some(format!(
            "{why}; `{NAME}` connects processes of one user on one host: configure a transport that spans hosts on both engines"
        ))
    }
}

fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// The decoded form of a [`PeerAddress`] of this transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) place: Place,
    /// Drawn by each transport, so that an address never finds another one.
    pub(crate) id: [u8; 16],
}

impl Address {
    pub(crate) fn new(place: Place) -> Result<Self, getrandom::Error> {
        let mut id = [0; 16];
        getrandom::fill(&mut id)?;
        Ok(Self { place, id })
    }

    /// Returns the socket's name in the abstract namespace.
    pub(crate) fn socket_name(&self) -> String {
        format!("microserving-{:032x}", u128::from_be_bytes(self.id))
    }

    pub(crate) fn encode(&self) -> PeerAddress {
        let mut bytes = vec![VERSION];
        bytes.extend(self.place.boot_id);
        bytes.extend(self.place.net_namespace.to_le_bytes());
        bytes.extend(self.place.user.to_le_bytes());
        bytes.extend(self.id);
        PeerAddress { transport: NAME.to_owned(), bytes }
    }

    /// Reads an address and checks that it can be reached from `here`.
    ///
    /// # Errors
    /// Why it cannot, and what to configure instead.
    pub(crate) fn reachable_from(here: &Place, address: &PeerAddress) -> Result<Self, String> {
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
        let field = |at: usize, len: usize| &bytes[at..at + len];
        if bytes[0] != VERSION {
            return Err(format!("the peer's address is of version {}, ours of {VERSION}", bytes[0]));
        }
        let place = Place {
            boot_id: field(1, 16).try_into().expect("16 bytes"),
            net_namespace: u64::from_le_bytes(field(17, 8).try_into().expect("8 bytes")),
            user: u32::from_le_bytes(field(25, 4).try_into().expect("4 bytes")),
        };
        match here.why_unreachable(&place) {
            Some(reason) => Err(reason),
            None => Ok(Self { place, id: field(29, 16).try_into().expect("16 bytes") }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_and_differ() {
        let here = Place::here().unwrap();
        let (a, b) = (Address::new(here).unwrap(), Address::new(here).unwrap());
        assert_eq!(Address::reachable_from(&here, &a.encode()), Ok(a));
        assert_ne!(a.socket_name(), b.socket_name());
    }

    #[test]
    fn other_places_are_named() {
        let here = Place { boot_id: [1; 16], net_namespace: 2, user: 3 };
        let reason = |place| {
            let address = Address { place, id: [4; 16] }.encode();
            Address::reachable_from(&here, &address).unwrap_err()
        };
        let host = reason(Place { boot_id: [9; 16], ..here });
        assert!(host.starts_with("peers on different hosts need another transport"), "{host}");
        assert!(host.contains("configure a transport that spans hosts"), "{host}");
        assert!(reason(Place { net_namespace: 9, ..here }).contains("network namespace"));
        assert!(reason(Place { user: 9, ..here }).contains("another user"));
        let tcp = PeerAddress { transport: "tcp".into(), bytes: Vec::new() };
        assert!(Address::reachable_from(&here, &tcp).unwrap_err().contains("`tcp`"));
        let mut newer = Address { place: here, id: [4; 16] }.encode();
        newer.bytes[0] = 2;
        assert!(Address::reachable_from(&here, &newer).unwrap_err().contains("version 2"));
    }
}
