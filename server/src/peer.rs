//! Whose requests are whose, as far as sharing goes.

use std::net::{IpAddr, Ipv6Addr};

/// A client: an address, of IPv6 the network of 64 bits that one host has. Clients behind one proxy are one client here, and who
/// has many addresses is as many clients: each of them has a part, so together they have nearly all of the service, and as many as
/// there are places keep everybody else out. Only who knows clients by more than their address, a gateway, can keep them from that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer(IpAddr);

impl Peer {
    /// The client at an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
            v4 => v4,
        })
    }
}

impl Default for Peer {
    /// Nobody that is known.
    fn default() -> Self {
        Self(Ipv6Addr::UNSPECIFIED.into())
    }
}
