//! How many calls there may be at once, of all clients and of any one: a connection of gRPC has many, so that a limit of connections
//! alone bounds nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::api::Peer;
use crate::limits::OTHERS_CONNECTIONS_DIVISOR;

/// All places, and whose they are.
pub(in crate::api) struct Places {
    limit: usize,
    /// The most that any one address has.
    of_one: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    of_peers: HashMap<Peer, usize>,
}

/// There is no place for one more: there are so many, of which one address may have so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) struct Full {
    pub(in crate::api) limit: usize,
    pub(in crate::api) of_one: usize,
}

/// A place, given back when dropped.
pub(super) struct Place {
    places: Arc<Places>,
    peer: Peer,
}

impl Places {
    pub(in crate::api) fn new(limit: usize) -> Arc<Self> {
        let of_one = (limit - limit / OTHERS_CONNECTIONS_DIVISOR).max(1);
        Arc::new(Self { limit, of_one, taken: Mutex::default() })
    }

    pub(super) fn take(self: &Arc<Self>, peer: Peer) -> Result<Place, Full> {
        let mut taken = self.taken();
        let own = taken.of_peers.get(&peer).copied().unwrap_or_default();
        if taken.all >= self.limit || own >= self.of_one {
            return Err(Full { limit: self.limit, of_one: self.of_one });
        }
        taken.all += 1;
        taken.of_peers.insert(peer, own + 1);
        Ok(Place { places: Arc::clone(self), peer })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        taken.all -= 1;
        if let Some(own) = taken.of_peers.get_mut(&self.peer) {
            *own -= 1;
            if *own == 0 {
                taken.of_peers.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn no_address_has_all_places_and_what_is_given_back_is_anothers() {
        let peer = |host: u8| Peer::of(std::net::IpAddr::from([10, 0, 0, host]));
        let places = Places::new(8);
        let mut first: Vec<Place> = (0..6).map(|_| places.take(peer(1)).unwrap()).collect();
        assert_eq!(places.take(peer(1)).err(), Some(Full { limit: 8, of_one: 6 }));
        let others = [places.take(peer(2)).unwrap(), places.take(peer(3)).unwrap()];
        assert!(places.take(peer(4)).is_err());
        drop(first.pop());
        assert!(places.take(peer(4)).is_ok());
        drop((first, others));
        let taken = places.taken();
        assert_eq!((taken.all, taken.of_peers.len()), (0, 0));
    }
}
