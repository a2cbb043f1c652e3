//! The connections of one listener: what each is doing, and which one makes room when there are as many as may be.
//!
//! Pure: [`Table`] is told what happened and when. Who has asked for something (`Busy`) is never made to leave. Of the
//! others, the silent go first, of which no whole head has ever come (`Waiting`), the one that has waited longest before the
//! others, so that a client that has just connected gets to send its request while thousands are silent; then those of which a
//! part of a further head has come (`Waiting` too); then those between two requests (`Idle`), the one idle longest first; then
//! those whose clients have taken nothing of a whole answer for a while (`Unread`); at last those whose body is still coming
//! (`Receiving`), in the same order, or as many slow bodies, or unread answers, as there are places would keep everybody out.
//!
//! A silent one is let be for a moment ([`SHED_MIN_AGE`]), since it may be an honest client's whose request is on its way; meanwhile
//! one that was answered goes, which clients put up with between two requests. Where more than a few are silent
//! ([`SILENT_CROWD_MIN`]), that is a crowd: they take each other's places from then on, the oldest first, and clients that were answered
//! keep theirs.
//!
//! Some places are for others than any one address, or one that has asked for something on each would keep everybody else out. A
//! further connection of an address that has the rest takes the place of one of its own, in the same order, and is refused where it
//! has asked for something on all. Absent: sockets, which are
//! [`super::connection`]'s.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::api::Peer;
use crate::limits::{SHED_MIN_AGE, SILENT_CROWD_DIVISOR, SILENT_CROWD_MIN, UNREAD_MIN_AGE};

/// A connection's number.
pub(super) type Id = u64;

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// It is new, or a part of a head has come.
    Waiting,
    /// A request's head has come, and its body has not come to its end.
    Receiving,
    /// A whole request has come and its answer has not gone out to its end.
    Busy,
    /// An answer is whole, and the client takes nothing of it.
    Unread,
    /// It has been answered, and nothing has come since.
    Idle,
}

impl Phase {
    /// The label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Receiving => "receiving",
            Self::Busy => "busy",
            Self::Unread => "unread",
            Self::Idle => "idle",
        }
    }
}

struct Entry {
    peer: Peer,
    phase: Phase,
    /// A whole head has come at some time.
    has_asked: bool,
    since: Instant,
    /// Tells it to leave.
    leave: Arc<Notify>,
}

/// Whether there is room for one more.
#[derive(Debug)]
pub(super) enum Room {
    /// There is.
    Free,
    /// There is, since this one leaves.
    Made(Phase, Arc<Notify>),
    /// There is none before one ends, or this time passes.
    None(Option<Duration>),
    /// There is none for this address, which has as many as one may have.
    Refused,
}

/// See the module.
pub(super) struct Table {
    limit: usize,
    /// Places that no one address has beside all others.
    of_others: usize,
    entries: HashMap<Id, Entry>,
    /// How many each address has.
    of_peers: HashMap<Peer, usize>,
    /// Waiting, and no whole head has ever come.
    silent: BTreeSet<(Instant, Id)>,
    /// Waiting for the rest of a further head.
    begun: BTreeSet<(Instant, Id)>,
    idle: BTreeSet<(Instant, Id)>,
    receiving: BTreeSet<(Instant, Id)>,
    unread: BTreeSet<(Instant, Id)>,
    next: Id,
    last_opened: Option<Instant>,
}

impl Table {
    /// So many at most; `of_others` of them are for others than any one address.
    pub(super) fn new(limit: usize, of_others: usize) -> Self {
        let [silent, begun, idle, receiving, unread] = [const { BTreeSet::new() }; 5];
        Self {
            limit,
            of_others,
            entries: HashMap::new(),
            of_peers: HashMap::new(),
            silent,
            begun,
            idle,
            receiving,
            unread,
            next: 0,
            last_opened: None,
        }
    }

    pub(super) fn open(&mut self, peer: Peer, now: Instant) -> (Id, Arc<Notify>) {
        let (id, leave) = (self.next, Arc::new(Notify::new()));
        self.next += 1;
        self.last_opened = Some(now);
        let (phase, has_asked) = (Phase::Waiting, false);
        self.entries.insert(id, Entry { peer, phase, has_asked, since: now, leave: Arc::clone(&leave) });
        *self.of_peers.entry(peer).or_default() += 1;
        self.silent.insert((now, id));
        (id, leave)
    }

    /// When the last one came.
    pub(super) fn last_opened(&self) -> Option<Instant> {
        self.last_opened
    }

    /// It has gone over to another phase. One that was told to leave is not in the table any more.
    pub(super) fn change(&mut self, id: Id, phase: Phase, now: Instant) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let (before, had_asked, since) = (entry.phase, entry.has_asked, entry.since);
        let has_asked = had_asked || phase != Phase::Waiting;
        (entry.phase, entry.has_asked, entry.since) = (phase, has_asked, now);
        if let Some(of_phase) = self.of_phase(before, had_asked) {
            of_phase.remove(&(since, id));
        }
        if let Some(of_phase) = self.of_phase(phase, has_asked) {
            of_phase.insert((now, id));
        }
    }

    pub(super) fn close(&mut self, id: Id) {
        let Some(entry) = self.entries.remove(&id) else { return };
        if let Some(of_phase) = self.of_phase(entry.phase, entry.has_asked) {
            of_phase.remove(&(entry.since, id));
        }
        if let Some(count) = self.of_peers.get_mut(&entry.peer) {
            *count -= 1;
            if *count == 0 {
                self.of_peers.remove(&entry.peer);
            }
        }
    }

    /// Whether there are as many as may be.
    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= self.limit
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Since when nothing is asked on it, or `None` while something is.
    pub(super) fn quiet_since(&self, id: Id) -> Option<(Phase, Instant)> {
        let entry = self.entries.get(&id)?;
        matches!(entry.phase, Phase::Waiting | Phase::Idle).then_some((entry.phase, entry.since))
    }

    /// Makes room for one more of this address where that is needed and can be.
    pub(super) fn make_room(&mut self, peer: Peer, now: Instant) -> Room {
        let own = self.of_peers.get(&peer).copied().unwrap_or(0);
        if self.of_others > 0 && own >= self.limit.saturating_sub(self.of_others) {
            return match self.shed_of(Some(peer), now) {
                Room::None(_) => Room::Refused,
                room => room,
            };
        }
        if self.is_full() { self.shed(now) } else { Room::Free }
    }

    /// Has the one leave that is missed least.
    pub(super) fn shed(&mut self, now: Instant) -> Room {
        self.shed_of(None, now)
    }

    /// The same, of one address alone where it is given.
    fn shed_of(&mut self, peer: Option<Peer>, now: Instant) -> Room {
        let is_of_peer = |id: &Id| peer.is_none_or(|peer| self.entries.get(id).is_some_and(|entry| entry.peer == peer));
        // How long it is until the one that has been in its phase longest may be told to leave.
        let left = |of_phase: &BTreeSet<(Instant, Id)>, least: Duration| {
            let &(since, id) = of_phase.iter().find(|(_, id)| is_of_peer(id))?;
            Some((least.saturating_sub(now.saturating_duration_since(since)), id))
        };
        let asked = [
            left(&self.begun, SHED_MIN_AGE),
            left(&self.idle, Duration::ZERO),
            left(&self.unread, UNREAD_MIN_AGE),
            left(&self.receiving, SHED_MIN_AGE),
        ];
        let crowd = SILENT_CROWD_MIN.max(self.limit / SILENT_CROWD_DIVISOR);
        let is_crowd = self.silent.iter().filter(|(_, id)| is_of_peer(id)).nth(crowd - 1).is_some();
        let might_go = asked.iter().flatten().any(|(left, _)| left.is_zero());
        let silent = left(&self.silent, if is_crowd && might_go { Duration::ZERO } else { SHED_MIN_AGE });
        let oldest = [silent].into_iter().chain(asked).flatten();
        let Some((_, id)) = oldest.clone().find(|(left, _)| left.is_zero()) else {
            return Room::None(oldest.map(|(left, _)| left).min());
        };
        let Some(entry) = self.entries.get(&id) else { return Room::None(None) };
        let (phase, leave) = (entry.phase, Arc::clone(&entry.leave));
        self.close(id);
        Room::Made(phase, leave)
    }

    fn of_phase(&mut self, phase: Phase, has_asked: bool) -> Option<&mut BTreeSet<(Instant, Id)>> {
        match phase {
            Phase::Waiting if has_asked => Some(&mut self.begun),
            Phase::Waiting => Some(&mut self.silent),
            Phase::Idle => Some(&mut self.idle),
            Phase::Receiving => Some(&mut self.receiving),
            Phase::Unread => Some(&mut self.unread),
            Phase::Busy => None,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn peer(host: u8) -> Peer {
        Peer::of(std::net::IpAddr::from([10, 0, 0, host]))
    }

    /// What leaves for one more of an address that has few: its number, by the notification that it gets.
    fn shed(table: &mut Table, tokens: &[(Id, Arc<Notify>)], now: Instant) -> Option<Id> {
        match table.make_room(peer(u8::MAX), now) {
            Room::Made(_, leave) => Some(tokens.iter().find(|(_, token)| Arc::ptr_eq(token, &leave)).unwrap().0),
            Room::Free | Room::None(_) | Room::Refused => None,
        }
    }

    #[test]
    fn an_address_that_has_all_it_may_makes_room_among_its_own_and_keeps_nobody_out() {
        let start = Instant::now();
        let mut table = Table::new(8, 2);
        let other = table.open(peer(2), start);
        table.change(other.0, Phase::Idle, start);
        let crowd: Vec<_> = (0..6).map(|_| table.open(peer(1), start)).collect();
        let later = start + SHED_MIN_AGE;
        // There is a place, which is not for this one; what makes room is of its own, though another's has less claim.
        let Room::Made(Phase::Waiting, leave) = table.make_room(peer(1), later) else { panic!() };
        assert!(Arc::ptr_eq(&leave, &crowd[0].1));
        let crowd = [&crowd[1..], &[table.open(peer(1), later)]].concat();
        for (id, _) in &crowd {
            table.change(*id, Phase::Busy, later);
        }
        assert!(matches!(table.make_room(peer(1), later), Room::Refused), "it has asked for something on all");
        assert!(matches!(table.make_room(peer(2), later), Room::Free));
        table.close(crowd[0].0);
        assert!(matches!(table.make_room(peer(1), later), Room::Free));
        crowd[1..].iter().for_each(|(id, _)| table.close(*id));
        table.close(other.0);
        assert!(table.of_peers.is_empty());
    }

    #[test]
    fn the_silent_go_first_then_the_idle_and_nobody_who_asks() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut table = Table::new(5, 0);
        let tokens: Vec<_> = (0..5).map(|n| table.open(peer(n as u8), at(n))).collect();
        table.change(0, Phase::Busy, at(10));
        table.change(3, Phase::Busy, at(11));
        table.change(1, Phase::Busy, at(12));
        table.change(1, Phase::Idle, at(13));
        table.change(3, Phase::Idle, at(20));
        // 2 and 4 have sent nothing, 3 was answered after 1, 0 is being answered, 5 sends a body, and 6 reads nothing.
        let tokens = [tokens, vec![table.open(peer(6), at(30)), table.open(peer(7), at(31))]].concat();
        table.change(5, Phase::Receiving, at(31));
        table.change(6, Phase::Unread, at(32));
        table.limit = 7;
        let later = at(10_000);
        let mut gone = Vec::new();
        while let Some(id) = shed(&mut table, &tokens, later) {
            gone.push(id);
            table.limit -= 1;
        }
        assert_eq!(gone, [2, 4, 1, 3, 6, 5]);
        assert!(matches!(table.make_room(peer(9), later), Room::None(None)));
        table.change(0, Phase::Idle, later);
        assert_eq!(shed(&mut table, &tokens, later), Some(0));
    }

    #[test]
    fn one_that_has_just_come_gets_to_ask() {
        let start = Instant::now();
        let mut table = Table::new(2, 0);
        let mut tokens = vec![table.open(peer(1), start), table.open(peer(2), start)];
        table.change(0, Phase::Busy, start);
        // The newcomer does not go for the next one, but the one that is idle.
        let Room::None(Some(wait)) = table.make_room(peer(9), start) else { panic!() };
        assert_eq!(wait, SHED_MIN_AGE);
        table.change(0, Phase::Idle, start);
        assert_eq!(shed(&mut table, &tokens, start), Some(0));
        tokens.push(table.open(peer(3), start + SHED_MIN_AGE));
        assert_eq!(shed(&mut table, &tokens, start + SHED_MIN_AGE), Some(1));
    }

    /// A crowd of silent connections that comes at once: how many of those leave that had been answered.
    fn answered_that_leave(answered: usize, places: usize, of_others: usize, peers: u8) -> usize {
        let start = Instant::now();
        let mut table = Table::new(places, of_others);
        let before: Vec<_> = (0..answered).map(|_| table.open(peer(0), start)).collect();
        for (id, _) in &before {
            table.change(*id, Phase::Busy, start);
            table.change(*id, Phase::Idle, start);
        }
        let mut silent: Vec<Arc<Notify>> = Vec::new();
        let mut gone = 0;
        for number in 0..100 {
            let now = start + Duration::from_micros(100 * number);
            let of = peer((number % u64::from(peers)) as u8);
            match table.make_room(of, now) {
                Room::Free => {}
                Room::Made(Phase::Waiting, leave) => {
                    assert!(Arc::ptr_eq(&leave, &silent[gone]), "{number}: the oldest of the silent goes");
                    gone += 1;
                }
                Room::Made(phase, _) => assert_eq!(phase, Phase::Idle),
                room => panic!("{number}: {room:?}"),
            }
            silent.push(table.open(of, now).1);
        }
        before.iter().filter(|(id, _)| table.quiet_since(*id).is_none()).count()
    }

    #[test]
    fn a_crowd_of_silent_connections_takes_its_own_places_and_none_of_who_was_answered() {
        // As of one address that has all it may, and as of several that have all places together.
        assert_eq!(answered_that_leave(4, 48, 12, 1), 0);
        assert_eq!(answered_that_leave(4, 48, 0, 3), 0);
        // Where all places are taken by those who were answered, a few newcomers get theirs.
        assert_eq!(answered_that_leave(48, 48, 0, 1), SILENT_CROWD_MIN);
    }

    #[test]
    fn a_part_of_a_further_head_goes_after_the_silent_and_before_the_idle() {
        let start = Instant::now();
        let mut table = Table::new(3, 0);
        let tokens: Vec<_> = (0..3).map(|_| table.open(peer(1), start)).collect();
        table.change(0, Phase::Idle, start);
        table.change(1, Phase::Idle, start);
        table.change(1, Phase::Waiting, start);
        let mut gone = Vec::new();
        while let Some(id) = shed(&mut table, &tokens, start + SHED_MIN_AGE) {
            gone.push(id);
            table.limit -= 1;
        }
        assert_eq!(gone, [2, 1, 0]);
    }

    #[test]
    fn who_reads_an_answer_slowly_stays_and_who_does_not_read_it_leaves() {
        let start = Instant::now();
        let mut table = Table::new(1, 0);
        let tokens = vec![table.open(peer(1), start)];
        table.change(0, Phase::Unread, start);
        // It takes some, and then nothing more.
        let taken = start + UNREAD_MIN_AGE / 2;
        table.change(0, Phase::Busy, taken);
        assert!(matches!(table.make_room(peer(9), taken), Room::None(None)));
        table.change(0, Phase::Unread, taken);
        let Room::None(Some(wait)) = table.make_room(peer(9), start + UNREAD_MIN_AGE) else { panic!() };
        assert_eq!(wait, UNREAD_MIN_AGE / 2);
        assert_eq!(shed(&mut table, &tokens, taken + UNREAD_MIN_AGE), Some(0));
    }

    proptest! {
        /// Against a plain list: who leaves is never busy, and the one with the least claim.
        #[test]
        fn the_one_with_the_least_claim_leaves(steps in prop::collection::vec((0_u8..7, 0_usize..12, 0_u64..400), 1..200)) {
            let mut now = Instant::now();
            let mut table = Table::new(8, 0);
            let mut tokens = Vec::new();
            let mut open: Vec<(Id, Phase, Instant, bool)> = Vec::new();
            for (step, pick, ms) in steps {
                now += Duration::from_millis(ms);
                let picked = (!open.is_empty()).then(|| pick % open.len());
                match (step, picked) {
                    (0, Some(at)) => table.close(open.swap_remove(at).0),
                    (1..=5, Some(at)) => {
                        let phases = [Phase::Waiting, Phase::Receiving, Phase::Busy, Phase::Idle, Phase::Unread];
                        let phase = phases[usize::from(step) - 1];
                        table.change(open[at].0, phase, now);
                        open[at] = (open[at].0, phase, now, open[at].3 || phase != Phase::Waiting);
                    }
                    _ => {
                        let claim = |&(id, phase, since, has_asked): &(Id, Phase, Instant, bool)| match phase {
                            Phase::Waiting if has_asked => (now - since >= SHED_MIN_AGE).then_some((1, since, id)),
                            Phase::Waiting => (now - since >= SHED_MIN_AGE).then_some((0, since, id)),
                            Phase::Idle => Some((2, since, id)),
                            Phase::Unread => (now - since >= UNREAD_MIN_AGE).then_some((3, since, id)),
                            Phase::Receiving => (now - since >= SHED_MIN_AGE).then_some((4, since, id)),
                            Phase::Busy => None,
                        };
                        let full = open.len() >= 8;
                        let expected = open.iter().filter(|_| full).filter_map(claim).min().map(|(_, _, id)| id);
                        prop_assert_eq!(shed(&mut table, &tokens, now), expected);
                        open.retain(|(id, ..)| Some(*id) != expected);
                        if open.len() < 8 {
                            let (id, token) = table.open(peer((tokens.len() % 4) as u8), now);
                            tokens.push((id, token));
                            open.push((id, Phase::Waiting, now, false));
                        }
                    }
                }
                prop_assert_eq!(table.len(), open.len());
                let not_busy = open.iter().filter(|(_, phase, ..)| *phase != Phase::Busy).count();
                let sets = [&table.silent, &table.begun, &table.idle, &table.receiving, &table.unread];
                prop_assert_eq!(sets.map(BTreeSet::len).iter().sum::<usize>(), not_busy);
            }
        }
    }
}
