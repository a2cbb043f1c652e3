#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::params::Priority::{High, Low, Normal};

fn waiting(ticket: u64, priority: Priority, since: Instant) -> Waiting<u64> {
    Waiting { ticket, turn: Turn::default(), priority, has_begun: false, since, deadline: None, value: ticket }
}

fn tickets<T>(requests: &[Waiting<T>]) -> Vec<u64> {
    requests.iter().map(|r| r.ticket).collect()
}

#[test]
fn priority_first_then_the_order_of_submission_whatever_the_order_of_arrival() {
    let now = Instant::now();
    let mut queue = Queue::default();
    for (ticket, priority) in [(5, Low), (2, Normal), (4, High), (1, Normal), (3, High), (0, Low)] {
        queue.push(waiting(ticket, priority, now));
    }
    assert_eq!(queue.depth(), QueueDepth { high: 2, normal: 2, low: 2 });
    assert_eq!(queue.peek(now).unwrap().ticket, 3);
    assert_eq!(queue.iter(now).map(|r| r.ticket).collect::<Vec<_>>(), [3, 4, 1, 2, 0, 5]);
    assert_eq!(tickets(&queue.drain(now)), [3, 4, 1, 2, 0, 5]);
    assert!(queue.is_empty());
    assert_eq!(queue.pop(now), None);
}

#[test]
fn waiting_lifts_a_request_and_the_ticket_decides_at_its_new_level() {
    let start = Instant::now();
    let mut queue = Queue::default();
    queue.push(waiting(1, Low, start));
    queue.push(waiting(2, Normal, start + AGEING_STEP / 2));
    queue.push(waiting(3, High, start + AGEING_BOUND));
    let order = |at: Duration| queue.iter(start + at).map(|r| r.ticket).collect::<Vec<_>>();
    assert_eq!(order(AGEING_STEP - Duration::from_nanos(1)), [3, 2, 1]);
    // Low is Normal now, and older than the other.
    assert_eq!(order(AGEING_STEP), [3, 1, 2]);
    // Normal became High before Low did.
    assert_eq!(order(AGEING_STEP * 3 / 2), [2, 3, 1]);
    assert_eq!(order(AGEING_BOUND), [1, 2, 3]);
}

#[test]
fn a_preempted_request_comes_first_at_its_level_but_its_run_is_not_waiting() {
    let start = Instant::now();
    let mut queue = Queue::default();
    queue.push(waiting(7, Low, start));
    let preempted = queue.pop(start).unwrap();
    let now = start + AGEING_BOUND * 2;
    queue.push(waiting(8, Low, now));
    queue.push(waiting(9, High, now));
    queue.push(Waiting { since: now, deadline: None, ..preempted });
    assert_eq!(tickets(&queue.drain(now)), [9, 7, 8]);
}

#[test]
fn requests_that_share_a_ticket_are_all_kept_in_their_order_of_entry() {
    let now = Instant::now();
    let mut queue = Queue::default();
    for value in ["first", "second", "third"] {
        queue.push(Waiting { deadline: Some(now), ..waiting(1, Normal, now).map(|_| value) });
    }
    let values = queue.expire(now).into_iter().map(|r| r.value).collect::<Vec<_>>();
    assert_eq!(values, ["first", "second", "third"]);
}

#[test]
fn what_fits_may_go_before_what_does_not() {
    let now = Instant::now();
    let mut queue = Queue::default();
    for ticket in 0..4 {
        queue.push(waiting(ticket, Normal, now));
    }
    assert_eq!(queue.pop_where(now, |r| r.ticket >= 2).unwrap().ticket, 2);
    assert_eq!(queue.pop_where(now, |r| r.ticket > 9), None);
    assert_eq!(tickets(&queue.drain(now)), [0, 1, 3]);
}

#[test]
fn a_deadline_goes_with_its_request() {
    let now = Instant::now();
    let at = |s| Some(now + Duration::from_secs(s));
    let mut queue = Queue::default();
    for ticket in 0..4 {
        queue.push(Waiting { deadline: at(ticket + 1), ..waiting(ticket, Normal, now) });
    }
    assert_eq!(queue.next_deadline(), at(1));
    assert_eq!(queue.pop(now).unwrap().ticket, 0);
    assert_eq!(tickets(&queue.remove_if(|&value| value == 1)), [1]);
    assert_eq!(queue.next_deadline(), at(3));
    assert_eq!(tickets(&queue.expire(now + Duration::from_secs(3))), [2]);
    assert_eq!(queue.len(), 1);
    assert_eq!(queue.drain(now).len(), 1);
    assert_eq!(queue.next_deadline(), None);
}

#[test]
fn watermarks_default_to_the_queue_and_three_quarters_of_it_and_stay_in_order() {
    let marks = |max, high, low| {
        let w = Watermarks::new(max, high, low);
        (w.high, w.low)
    };
    assert_eq!(marks(512, None, None), (512, 384));
    assert_eq!(marks(512, Some(10), None), (10, 7));
    assert_eq!(marks(512, Some(9999), Some(9999)), (512, 512));
    assert_eq!(marks(usize::MAX, None, None).1, usize::MAX / 4 * 3 + 2);
}

fn of(client: u64, start_tag: u64, request: Waiting<u64>) -> Waiting<u64> {
    Waiting { turn: Turn { client, start_tag }, ..request }
}

#[test]
fn start_tags_share_out_one_priority_and_each_client_keeps_its_order() {
    let now = Instant::now();
    let mut queue = Queue::default();
    for ticket in 0..4 {
        queue.push(of(1, ticket * 10, waiting(ticket, Normal, now)));
    }
    queue.push(of(2, 0, waiting(4, Normal, now)));
    queue.push(of(2, 15, waiting(5, Normal, now)));
    queue.push(of(3, 99, waiting(6, High, now)));
    let order = [6, 0, 4, 1, 5, 2, 3];
    assert_eq!(queue.iter(now).map(|r| r.ticket).collect::<Vec<_>>(), order);
    assert_eq!(queue.clients().collect::<BTreeSet<_>>(), BTreeSet::from([1, 2, 3]));
    assert_eq!(tickets(&queue.drain(now)), order);
    assert_eq!(queue.clients().count(), 0);
}

#[test]
fn who_has_much_waiting_is_not_lifted_before_others_by_its_own_queue() {
    let start = Instant::now();
    let mut queue = Queue::default();
    for ticket in 0..9 {
        queue.push(of(1, ticket, waiting(ticket, Low, start)));
    }
    // Nobody had anything until then.
    let mut now = start + AGEING_BOUND * 2;
    queue.push(of(2, 0, waiting(10, Normal, now)));
    assert_eq!(queue.pop(now).unwrap().ticket, 0);
    // From now on they wait for those of others, as who comes now would.
    assert_eq!(queue.pop(now).unwrap().ticket, 10);
    let mut ticket = 11;
    while now < start + AGEING_BOUND * 2 + AGEING_STEP {
        queue.push(of(2, 0, waiting(ticket, Normal, now)));
        assert_eq!(queue.pop(now).unwrap().ticket, ticket);
        (now, ticket) = (now + AGEING_STEP / 4, ticket + 1);
    }
    // And they are lifted again while they have nothing.
    queue.push(of(2, 0, waiting(ticket, Normal, now)));
    assert_eq!(queue.pop(now).unwrap().ticket, 1);
    // Of one client that is alone each is lifted by its own time.
    queue.remove_if(|&value| value >= 10);
    now += AGEING_BOUND;
    for served in 2..5 {
        queue.push(of(1, 20, waiting(100 + served, Normal, now)));
        assert_eq!(queue.pop(now).unwrap().ticket, served);
    }
}

#[test]
fn a_line_is_lifted_by_its_oldest_and_whoever_is_next_in_it_keeps_that_level() {
    let start = Instant::now();
    let mut queue = Queue::default();
    queue.push(of(1, 50, waiting(1, Low, start)));
    let now = start + AGEING_BOUND;
    // It came later, and is before the other one in their line.
    queue.push(of(2, 10, waiting(2, Low, now)));
    queue.push(of(3, 0, waiting(3, High, now)));
    let standings: Vec<_> = queue.iter(now).map(|r| (r.ticket, queue.standing(r, now))).collect();
    assert_eq!(standings, [(2, High), (1, High), (3, High)]);
    assert_eq!(tickets(&queue.drain(now)), [2, 1, 3]);
}

#[test]
fn the_standing_of_who_has_much_waiting_is_that_at_which_it_is_served() {
    let start = Instant::now();
    let mut queue = Queue::default();
    for ticket in 0..3 {
        queue.push(of(1, ticket, waiting(ticket, Low, start)));
    }
    let now = start + AGEING_BOUND;
    queue.push(of(2, 0, waiting(9, Normal, now)));
    assert_eq!(queue.pop(now).unwrap().ticket, 0);
    let order: Vec<_> = queue.iter(now).map(|r| (r.ticket, queue.standing(r, now))).collect();
    assert_eq!(order, [(9, Normal), (1, Low), (2, Low)], "it has just had something");
}

#[test]
fn who_had_a_slot_is_before_those_of_its_tag_that_had_none() {
    let now = Instant::now();
    let mut queue = Queue::default();
    queue.push(of(1, 7, waiting(1, Normal, now)));
    queue.push(of(1, 7, waiting(2, Normal, now)));
    queue.push(Waiting { has_begun: true, ..of(1, 7, waiting(5, Normal, now)) });
    queue.push(Waiting { has_begun: true, ..of(1, 8, waiting(0, Normal, now)) });
    assert_eq!((queue.least_own_tag(1, Normal), queue.least_own_tag(1, High)), (Some(7), None));
    assert_eq!(tickets(&queue.drain(now)), [5, 1, 2, 0]);
}

#[test]
fn who_goes_behind_its_own_is_not_behind_those_of_others() {
    let now = Instant::now();
    let mut queue = Queue::default();
    for (ticket, client, start_tag) in [(1, 1, 10), (2, 1, 20), (3, 2, 30)] {
        queue.push(of(client, start_tag, waiting(ticket, Normal, now)));
    }
    queue.push_behind_own(of(1, 0, waiting(0, Normal, now)), 3, 0);
    assert_eq!(tickets(&queue.drain(now)), [1, 2, 0, 3]);
    // With nothing of its own there it comes as one that has just come would.
    for (ticket, client, start_tag) in [(1, 2, 10), (2, 3, 30)] {
        queue.push(of(client, start_tag, waiting(ticket, Normal, now)));
    }
    queue.push_behind_own(Waiting { has_begun: true, ..of(1, 0, waiting(0, Normal, now)) }, 2, 30);
    queue.push(of(3, 30, waiting(3, Normal, now)));
    assert_eq!(tickets(&queue.drain(now)), [1, 2, 0, 3]);
}

fn priority() -> impl Strategy<Value = Priority> {
    prop_oneof![Just(High), Just(Normal), Just(Low)]
}

#[derive(Clone, Debug)]
struct Pushed {
    priority: Priority,
    late_ms: u64,
    ticket_back: u64,
    timeout_ms: Option<u64>,
    turn: Turn,
    has_begun: bool,
}

#[derive(Clone, Debug)]
enum Op {
    Push(Pushed),
    PushBehind(Pushed, u64),
    Pop,
    PopEven,
    Cancel(u64),
    Expire,
    Wait(u64),
}

/// Of so many clients; of one alone all tags are alike.
fn pushed(clients: u64) -> impl Strategy<Value = Pushed> {
    let timeout_ms = proptest::option::of(0_u64..40_000);
    let turn = (0..clients, 0..1 + 30 * (clients - 1)).prop_map(|(client, start_tag)| Turn { client, start_tag });
    (priority(), 0_u64..20, 0_u64..3, timeout_ms, turn, proptest::bool::weighted(0.2)).prop_map(
        |(priority, late_ms, ticket_back, timeout_ms, turn, has_begun)| Pushed {
            priority,
            late_ms,
            ticket_back,
            timeout_ms,
            turn,
            has_begun,
        },
    )
}

fn op(clients: u64) -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => pushed(clients).prop_map(Op::Push),
        1 => (pushed(clients), 0_u64..40).prop_map(|(pushed, least_tag)| Op::PushBehind(pushed, least_tag)),
        4 => Just(Op::Pop),
        2 => Just(Op::PopEven),
        2 => (0_u64..5).prop_map(Op::Cancel),
        2 => Just(Op::Expire),
        4 => (0_u64..15_000).prop_map(Op::Wait),
    ]
}

/// The oracle: a plain list, each with its place in its line, and when each client was served in each line.
#[derive(Default)]
struct Plain {
    list: Vec<(Waiting<u64>, (u64, bool, u64))>,
    served: Vec<(Priority, u64, Instant)>,
}

impl Plain {
    fn counts_from(&self, request: &Waiting<u64>) -> Instant {
        let of = |s: &&(Priority, u64, Instant)| (s.0, s.1) == (request.priority, request.turn.client);
        self.served.iter().find(of).map_or(request.since, |served| served.2.max(request.since))
    }

    /// By level, then age, then ticket; of each line only the first of those left, which stands for the oldest where it is the
    /// first of all.
    fn next(&self, now: Instant, fits: impl Fn(&Waiting<u64>) -> bool) -> Option<usize> {
        let mut rest: Vec<usize> = (0..self.list.len()).collect();
        loop {
            let first = |p: Priority, of: &[usize]| {
                of.iter().copied().filter(|&i| self.list[i].0.priority == p).min_by_key(|&i| self.list[i].1)
            };
            let all: Vec<usize> = (0..self.list.len()).collect();
            let best =
                [High, Normal, Low].into_iter().filter_map(|p| Some((p, first(p, &rest)?))).min_by_key(|&(p, i)| {
                    let request = &self.list[i].0;
                    let line = self.list.iter().map(|(other, _)| other).filter(|other| other.priority == p);
                    let from = if first(p, &all) == Some(i) {
                        line.map(|other| self.counts_from(other)).min().unwrap()
                    } else {
                        self.counts_from(request)
                    };
                    let lifted = (now.saturating_duration_since(from).as_millis() / AGEING_STEP.as_millis()) as usize;
                    (Reverse((p as usize + lifted).min(2)), from, self.list[i].1.2)
                })?;
            if fits(&self.list[best.1].0) {
                return Some(best.1);
            }
            rest.retain(|&i| i != best.1);
        }
    }

    fn take(&mut self, now: Instant, fits: impl Fn(&Waiting<u64>) -> bool) -> Option<Waiting<u64>> {
        let (taken, _) = self.list.remove(self.next(now, fits)?);
        let (priority, client) = (taken.priority, taken.turn.client);
        if self.list.iter().any(|(other, _)| other.turn.client != client) {
            self.served.retain(|s| (s.0, s.1) != (priority, client));
            self.served.push((priority, client, now));
        }
        self.forget();
        Some(taken)
    }

    /// Takes out all that `leave`, by ticket.
    fn extract(&mut self, leave: impl Fn(&Waiting<u64>) -> bool) -> Vec<u64> {
        let mut left: Vec<u64> = self.list.extract_if(.., |(r, _)| leave(r)).map(|(r, _)| r.ticket).collect();
        left.sort_unstable();
        self.forget();
        left
    }

    fn forget(&mut self) {
        let list = &self.list;
        self.served.retain(|s| list.iter().any(|(r, _)| (r.priority, r.turn.client) == (s.0, s.1)));
    }
}

fn does_what_a_plain_list_does(ops: Vec<Op>) -> Result<(), TestCaseError> {
    let start = Instant::now();
    let mut now = start + Duration::from_secs(60);
    let (mut queue, mut plain) = (Queue::default(), Plain::default());
    let sorted = |requests: &[Waiting<u64>]| {
        let mut tickets = tickets(requests);
        tickets.sort_unstable();
        tickets
    };
    for (i, op) in ops.into_iter().enumerate() {
        match op {
            Op::Push(Pushed { priority, late_ms, ticket_back, timeout_ms, turn, has_begun })
            | Op::PushBehind(Pushed { priority, late_ms, ticket_back, timeout_ms, turn, has_begun }, _)
                if plain.list.iter().all(|(r, _)| r.ticket != (i as u64 * 4 + 12) - ticket_back * 5 % 12) =>
            {
                // Distinct, and slightly out of order.
                let ticket = (i as u64 * 4 + 12) - ticket_back * 5 % 12;
                let since = now - Duration::from_millis(late_ms);
                let deadline = timeout_ms.map(|ms| since + Duration::from_millis(ms));
                let request = Waiting { deadline, turn, has_begun, ..waiting(ticket, priority, since) };
                let behind = if let Op::PushBehind(_, least_tag) = op { Some(least_tag) } else { None };
                let place = match behind {
                    Some(least_tag) => {
                        let own =
                            plain.list.iter().filter(|(r, _)| (r.priority, r.turn.client) == (priority, turn.client));
                        let tag = own.map(|(_, place)| place.0).fold(least_tag.max(turn.start_tag), u64::max);
                        queue.push_behind_own(request.clone(), ticket, least_tag);
                        (tag, true, ticket)
                    }
                    None => {
                        queue.push(request.clone());
                        (turn.start_tag, !has_begun, ticket)
                    }
                };
                plain.list.push((request, place));
            }
            Op::Push(_) | Op::PushBehind(..) => continue,
            Op::Pop => prop_assert_eq!(queue.pop(now), plain.take(now, |_| true)),
            Op::PopEven => {
                let even = |r: &Waiting<u64>| r.value.is_multiple_of(2);
                prop_assert_eq!(queue.pop_where(now, even), plain.take(now, even));
            }
            Op::Cancel(residue) => {
                let got = sorted(&queue.remove_if(|value| value % 5 == residue));
                prop_assert_eq!(got, plain.extract(|r| r.value % 5 == residue));
            }
            Op::Expire => {
                prop_assert_eq!(sorted(&queue.expire(now)), plain.extract(|r| r.deadline.is_some_and(|d| d <= now)));
            }
            Op::Wait(ms) => now += Duration::from_millis(ms),
        }
        prop_assert_eq!(queue.len(), plain.list.len());
        prop_assert_eq!(queue.peek(now).map(|r| r.ticket), plain.next(now, |_| true).map(|i| plain.list[i].0.ticket));
        prop_assert_eq!(queue.next_deadline(), plain.list.iter().filter_map(|(r, _)| r.deadline).min());
    }
    let (mut order, mut all) = (queue.iter(now).map(|r| r.ticket).collect::<Vec<_>>(), tickets(&queue.drain(now)));
    prop_assert_eq!(order.first(), all.first());
    order.sort_unstable();
    all.sort_unstable();
    prop_assert_eq!(order, all);
    prop_assert_eq!(queue.clients().count(), 0);
    Ok(())
}

proptest! {
    #[test]
    fn the_queue_does_what_a_plain_list_does(ops in proptest::collection::vec(op(1), 1..120)) {
        does_what_a_plain_list_does(ops)?;
    }

    #[test]
    fn with_several_clients_it_does_so_too(ops in proptest::collection::vec(op(4), 1..120)) {
        does_what_a_plain_list_does(ops)?;
    }

    /// Clients that come again as soon as they have been served, two inside each, whatever their priorities: nobody waits
    /// longer than a line needs to be lifted, for each that its client has there, and for those before it to be served.
    #[test]
    fn nobody_waits_longer_than_its_line_and_its_turn_take(
        clients in 1_u64..6, tick_ms in 50_u64..500, priorities in proptest::collection::vec(priority(), 1..40),
    ) {
        let start = Instant::now();
        let tick = Duration::from_millis(tick_ms);
        let mut queue = Queue::default();
        let (mut begun, mut next) = ([0; Priority::COUNT], vec![[0; Priority::COUNT]; clients as usize]);
        let (mut now, mut ticket) = (start, 0);
        let mut comes = |queue: &mut Queue<u64>, begun: &[u64], client: u64, now| {
            let priority = priorities[ticket as usize % priorities.len()];
            let next = &mut next[client as usize][priority.rank()];
            let start_tag = begun[priority.rank()].max(*next);
            *next = start_tag + 10;
            queue.push(of(client, start_tag, waiting(ticket, priority, now)));
            ticket += 1;
        };
        (0..clients * 2).for_each(|number| comes(&mut queue, &begun, number % clients, now));
        let most = 2 * AGEING_BOUND + tick * u32::try_from(12 * clients).unwrap();
        for _ in 0..2_000 {
            now += tick;
            let served = queue.pop(now).unwrap();
            let waited = now - served.since;
            prop_assert!(waited <= most, "{:?} at {:?} of {:?}", served, waited, most);
            let begun_here = &mut begun[served.priority.rank()];
            *begun_here = served.turn.start_tag.max(*begun_here);
            comes(&mut queue, &begun, served.turn.client, now);
        }
    }

    /// **Feature: distributed-inference-server, Property 6: Priority Queue Ordering**
    /// **Validates: Requirements 3.4, 3.5**
    ///
    /// For requests that waited less than an ageing step; past it, see the next one.
    #[test]
    fn higher_priorities_leave_first_and_each_in_its_order(
        requests in proptest::collection::vec((priority(), 0_u64..9_999), 0..200),
    ) {
        let start = Instant::now();
        let mut queue = Queue::default();
        for (ticket, &(priority, at_ms)) in requests.iter().enumerate() {
            queue.push(waiting(ticket as u64, priority, start + Duration::from_millis(at_ms)));
        }
        let order = queue.drain(start + AGEING_STEP - Duration::from_millis(1));
        prop_assert_eq!(order.len(), requests.len());
        for pair in order.windows(2) {
            prop_assert!(pair[0].priority >= pair[1].priority);
            prop_assert!(pair[0].priority > pair[1].priority || pair[0].ticket < pair[1].ticket);
        }
    }

    /// A flood of High requests, one each tick and one served each tick: what waited for the bound goes before all that
    /// came after it.
    #[test]
    fn nothing_waits_longer_than_the_bound_and_what_came_before_it(
        backlog in proptest::collection::vec(priority(), 1..30), tick_ms in 100_u64..3_000,
    ) {
        let start = Instant::now();
        let tick = Duration::from_millis(tick_ms);
        let mut queue = Queue::default();
        for (ticket, &priority) in backlog.iter().enumerate() {
            queue.push(waiting(ticket as u64, priority, start));
        }
        let (mut now, mut ticket, mut left) = (start, backlog.len() as u64, backlog.len());
        // At the bound all of the backlog is at the top, in front: one leaves each tick.
        let last = start + AGEING_BOUND + tick * backlog.len() as u32 + tick;
        while left > 0 {
            prop_assert!(now <= last, "{left} of {} still wait", backlog.len());
            queue.push(waiting(ticket, High, now));
            ticket += 1;
            let served = queue.pop(now).unwrap();
            left -= usize::from((served.ticket as usize) < backlog.len());
            now += tick;
        }
    }

    /// **Feature: distributed-inference-server, Property 7: Backpressure Hysteresis**
    /// **Validates: Requirements 3.1, 3.2**
    #[test]
    fn acceptance_changes_only_where_a_watermark_is_crossed(
        high in 0_usize..60, low in 0_usize..60, depths in proptest::collection::vec(0_usize..70, 1..200),
    ) {
        let marks = Watermarks::new(60, Some(high), Some(low));
        let low = low.min(high);
        let mut before = marks.is_accepting();
        prop_assert!(before);
        for depth in depths {
            let accepting = marks.observe(depth);
            prop_assert_eq!(accepting, marks.is_accepting());
            prop_assert!(depth <= high || !accepting);
            prop_assert!(depth >= low || accepting);
            if accepting != before {
                let crossed = if accepting { depth <= low } else { depth > high };
                prop_assert!(crossed);
            }
            before = accepting;
        }
    }

    /// **Feature: distributed-inference-server, Property 8: Request Timeout Enforcement**
    /// **Validates: Requirements 3.3**
    ///
    /// The queue's part: each is handed back for its 408 as soon as its time is over, and never before.
    #[test]
    fn a_request_leaves_at_its_deadline_and_not_before(
        requests in proptest::collection::vec((priority(), 0_u64..5_000, proptest::option::of(1_u64..5_000)), 0..80),
        looks in proptest::collection::vec(0_u64..800, 1..20),
    ) {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let mut queue = Queue::default();
        for (ticket, &(priority, at, timeout)) in requests.iter().enumerate() {
            let since = start + ms(at);
            queue.push(Waiting { deadline: timeout.map(|t| since + ms(t)), ..waiting(ticket as u64, priority, since) });
        }
        let mut now = start;
        for look in looks {
            let before = now;
            now += ms(look);
            for request in queue.expire(now) {
                let deadline = request.deadline.unwrap();
                prop_assert!(deadline <= now && (deadline > before || before == start));
            }
            prop_assert!(queue.iter(now).all(|r| r.deadline.is_none_or(|d| d > now)));
        }
        queue.expire(start + ms(10_000));
        let without = requests.iter().filter(|(_, _, timeout)| timeout.is_none()).count();
        prop_assert_eq!(queue.len(), without);
    }
}

#[test]
fn watermarks_are_shared_by_threads_and_settle_by_the_last_depth() {
    let marks = Watermarks::new(100, Some(80), Some(20));
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let marks = &marks;
            scope.spawn(move || {
                for i in 0..10_000_usize {
                    let depth = (i * 7 + thread * 13) % 100;
                    let accepting = marks.observe(depth);
                    assert!(depth <= 80 || !accepting);
                    assert!(depth > 20 || accepting);
                }
            });
        }
    });
    assert!(!marks.observe(81) && !marks.observe(50) && marks.observe(20) && marks.observe(50));
}
