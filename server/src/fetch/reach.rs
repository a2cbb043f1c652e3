//! Which addresses may be connected to: checked for each address that a connection is made to, so that neither a redirect
//! nor a name that leads elsewhere the second time gets past it.
//!
//! Names are resolved by [`Resolver`], which leaves out what may not be reached and hands on the rest; the client connects
//! to these and asks for no other. An address that stands in a URL itself is never resolved: [`Reach::check`] is for these,
//! before a request and before each redirect. Absent: ports, and what of the network lets whom connect (NetworkPolicies).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Where models may be fetched from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Whether from private addresses, as those of a cluster and its machines are.
    pub private: bool,
    /// Whether from this machine: for tests, whose servers are here.
    pub loopback: bool,
}

impl Default for Reach {
    fn default() -> Self {
        Self { private: true, loopback: false }
    }
}

/// An address that models are not fetched from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}")]
pub(crate) struct Unreachable {
    kind: Kind,
}

/// What an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Kind {
    #[error("it leads to the pod itself, from which models are not fetched")]
    Loopback,
    #[error(
        "it leads to a link-local address or a cloud's metadata, from which models are not fetched; use the address of a file server"
    )]
    LinkLocal,
    #[error(
        "it leads to a private address, from which models may not be fetched here (the chart's value privateSources); use a public address, or ask whoever installed Gantry to allow them; pods that run by then have to be replaced (annotation gantry.dev/restart)"
    )]
    Private,
    #[error("it leads to no single machine; use the address of a file server")]
    Reserved,
}

/// Addresses of the metadata and of the agents of clouds that are outside the link-local networks: Alibaba Cloud, Azure,
/// Oracle Cloud.
const METADATA_V4: [Ipv4Addr; 3] =
    [Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(168, 63, 129, 16), Ipv4Addr::new(192, 0, 0, 192)];
/// Networks of EC2 and of Google Cloud, 32 bits long, with more than the metadata in them: `fd00:ec2::23` gives out pods'
/// credentials.
const METADATA_V6: [[u16; 2]; 2] = [[0xfd00, 0xec2], [0xfd20, 0xce]];

impl Reach {
    /// Checks an address that is connected to.
    fn allows(self, address: IpAddr) -> Result<(), Unreachable> {
        let kind = match address {
            IpAddr::V4(address) => kind_of_v4(address),
            IpAddr::V6(address) => match (embedded(address), locally_translated(address)) {
                (Some(address), _) => kind_of_v4(address),
                (None, Some(kind)) => kind,
                (None, None) => kind_of_v6(address),
            },
        };
        match kind {
            None => Ok(()),
            Some(Kind::Private) if self.private => Ok(()),
            Some(Kind::Loopback) if self.loopback => Ok(()),
            Some(kind) => Err(Unreachable { kind }),
        }
    }

    /// Checks a URL whose host is an address; one whose host is a name is for the [`Resolver`].
    pub(crate) fn check(self, url: &Url) -> Result<(), Unreachable> {
        // The parser has made an address of whatever a resolver would take for one: 127.1, 0x7f000001, 2130706433.
        let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        host.parse().map_or(Ok(()), |address| self.allows(address))
    }
}

fn kind_of_v4(address: Ipv4Addr) -> Option<Kind> {
    let [a, b, ..] = address.octets();
    if address.is_loopback() || a == 0 {
        // Linux connects to itself for 0.0.0.0.
        return Some(Kind::Loopback);
    }
    if address.is_link_local() || METADATA_V4.contains(&address) {
        return Some(Kind::LinkLocal);
    }
    // Class E, the broadcast among it, and multicast.
    if a >= 224 {
        return Some(Kind::Reserved);
    }
    let shared = a == 100 && (64..128).contains(&b);
    (address.is_private() || shared).then_some(Kind::Private)
}

fn kind_of_v6(address: Ipv6Addr) -> Option<Kind> {
    if address.is_loopback() || address.is_unspecified() {
        return Some(Kind::Loopback);
    }
    let [first, second, ..] = address.segments();
    let site_local = first & 0xffc0 == 0xfec0;
    if address.is_unicast_link_local() || site_local || METADATA_V6.contains(&[first, second]) {
        return Some(Kind::LinkLocal);
    }
    if address.is_multicast() {
        return Some(Kind::Reserved);
    }
    address.is_unique_local().then_some(Kind::Private)
}

/// The IPv4 address that an IPv6 address stands for: mapped, compatible, translated (SIIT, NAT64), or by a tunnel (6to4).
fn embedded(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let of = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        Ipv4Addr::new(a, b, c, d)
    };
    match address.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(of(high, low)),
        // ::1 and :: are IPv6's own.
        [0, 0, 0, 0, 0, 0, high, low] if high != 0 => Some(of(high, low)),
        [0x2002, high, low, ..] => Some(of(high, low)),
        _ => None,
    }
}

/// What an address of the network for local translation is (NAT64, RFC 8215): which of RFC 6052's layouts it has is the network's
/// own affair, so all that its bits can stand for are looked at, and what may not be reached by any of them is that. `None`: it is
/// not of that network.
fn locally_translated(address: Ipv6Addr) -> Option<Option<Kind>> {
    if address.segments()[..3] != [0x64, 0xff9b, 1] {
        return None;
    }
    let octets = address.octets();
    // The octets of the IPv4 address where the prefix has 48, 56, 64 and 96 bits. Octet 8, and what is behind, is zero.
    let layouts = [[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], [12, 13, 14, 15]];
    let fits = |layout: &[usize; 4]| octets[8] == 0 && octets[layout[3] + 1..].iter().all(|&octet| octet == 0);
    let of = |layout: [usize; 4]| Ipv4Addr::from(layout.map(|at| octets[at]));
    // 0.0.0.0/8 is translated to nothing, and stands where the layout is another.
    let kinds = layouts.into_iter().filter(fits).map(of).filter(|address| address.octets()[0] != 0).map(kind_of_v4);
    let kinds: Vec<Option<Kind>> = kinds.collect();
    let strictest =
        [Kind::LinkLocal, Kind::Loopback, Kind::Private].into_iter().find(|&kind| kinds.contains(&Some(kind)));
    // What can be no machine's is not reached through the network, either.
    let is_nothing = kinds.iter().all(|kind| *kind == Some(Kind::Reserved));
    Some(strictest.or(is_nothing.then_some(Kind::Reserved)))
}

/// Resolves names as the system does, and leaves out what may not be reached.
pub(crate) struct Resolver(pub(crate) Reach);

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let reach = self.0;
        Box::pin(async move {
            // The client puts the port in.
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            Ok(reachable(reach, found)?)
        })
    }
}

fn reachable(reach: Reach, found: Vec<SocketAddr>) -> Result<Addrs, Unreachable> {
    let mut refused = None;
    let allowed = |address: &SocketAddr| reach.allows(address.ip()).map_err(|error| refused = Some(error)).is_ok();
    let allowed: Vec<SocketAddr> = found.into_iter().filter(allowed).collect();
    match refused {
        Some(refused) if allowed.is_empty() => Err(refused),
        _ => Ok(Box::new(allowed.into_iter())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const LOOPBACK: [&str; 11] = [
        "127.0.0.1",
        "127.1.2.3",
        "0.0.0.0",
        "0.1.2.3",
        "::1",
        "::",
        "::ffff:127.0.0.1",
        "64:ff9b::127.0.0.1",
        "2002:7f00:1::",
        "64:ff9b:1::127.0.0.1",
        "64:ff9b:1:7f00:0:100::",
    ];
    const LINK_LOCAL: [&str; 22] = [
        "169.254.169.254",
        "169.254.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fe80::1",
        "febf::1",
        "fec0::1",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd00:ec2:1::254",
        "fd20:ce::254",
        "::ffff:0:169.254.169.254",
        "::ffff:169.254.169.254",
        "::169.254.169.254",
        // By each of the layouts of a local prefix, and with a longer prefix of one's own.
        "64:ff9b:1:a9fe:a9:fe00::",
        "64:ff9b:1:a9:fe:a9fe::",
        "64:ff9b:1:0:a9:fea9:fe00:0",
        "64:ff9b:1::169.254.169.254",
        "64:ff9b:1:abcd::169.254.169.254",
        "64:ff9b:1:abcd::100.100.100.200",
        "64:ff9b:1::192.0.0.192",
    ];
    const PRIVATE: [&str; 14] = [
        "10.0.0.1",
        "10.96.0.10",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "100.64.0.1",
        "100.127.255.255",
        "fc00::1",
        "fd12:3456::1",
        "::ffff:10.0.0.1",
        "64:ff9b::192.168.1.1",
        "64:ff9b:1::192.168.1.1",
        "64:ff9b:1:1234::10.0.0.1",
        "64:ff9b:1:0:c0:a801:100:0",
    ];
    const RESERVED: [&str; 7] = [
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "ff02::1",
        "::ffff:239.1.1.1",
        "64:ff9b:1::239.1.1.1",
        "64:ff9b:1::",
    ];
    const PUBLIC: [&str; 13] = [
        "1.1.1.1",
        "172.32.0.1",
        "100.128.0.1",
        "192.0.2.1",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2002:808:808::1",
        "64:ff9b:1::8.8.8.8",
        "64:ff9b:1::1.1.1.239",
        "64:ff9b:1:808:8:800::",
        "64:ff9b:1:8:8:808::",
        "64:ff9b:1:0:8:808:ef00:0",
    ];

    fn refused(reach: Reach, addresses: &[&str]) -> usize {
        addresses.iter().filter(|address| reach.allows(address.parse().unwrap()).is_err()).count()
    }

    #[test]
    fn what_an_address_is_decides_however_it_is_written() {
        for (private, loopback) in [(true, false), (false, false), (true, true), (false, true)] {
            let reach = Reach { private, loopback };
            assert_eq!(refused(reach, &LOOPBACK), if loopback { 0 } else { LOOPBACK.len() }, "{reach:?}");
            assert_eq!(refused(reach, &PRIVATE), if private { 0 } else { PRIVATE.len() }, "{reach:?}");
            assert_eq!(refused(reach, &LINK_LOCAL), LINK_LOCAL.len(), "{reach:?}");
            assert_eq!(refused(reach, &RESERVED), RESERVED.len(), "{reach:?}");
            assert_eq!(refused(reach, &PUBLIC), 0, "{reach:?}");
        }
    }

    #[test]
    fn addresses_in_urls_are_checked_before_anything_is_asked() {
        for host in ["169.254.169.254", "0xa9fea9fe", "2852039166", "169.254.43518", "0251.0376.0251.0376", "[fe80::1]"]
        {
            let url = Url::parse(&format!("http://{host}/latest/meta-data")).unwrap();
            assert_eq!(Reach::default().check(&url), Err(Unreachable { kind: Kind::LinkLocal }), "{host}");
        }
        for host in ["files.ns.svc", "10.0.0.1", "1.1.1.1", "[2606:4700::1111]"] {
            let url = Url::parse(&format!("http://{host}/m.gguf")).unwrap();
            assert_eq!(Reach::default().check(&url), Ok(()), "{host}");
        }
    }

    #[test]
    fn of_a_names_addresses_those_that_may_be_reached_are_left() {
        let addresses =
            |list: &[&str]| list.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect::<Vec<_>>();
        let mixed = reachable(Reach::default(), addresses(&["169.254.169.254", "10.0.0.1", "::1"])).unwrap();
        assert_eq!(mixed.collect::<Vec<_>>(), addresses(&["10.0.0.1"]));
        let Err(none) = reachable(Reach::default(), addresses(&["169.254.169.254"])) else { panic!("it is reachable") };
        assert_eq!(none.kind, Kind::LinkLocal);
        assert_eq!(
            reachable(Reach::default(), Vec::new()).unwrap().count(),
            0,
            "a name without addresses is the client's"
        );
    }
}
