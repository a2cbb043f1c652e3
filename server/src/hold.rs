//! Where requests wait while no version answers, since one is unloaded and another one loaded, or the first one is loaded.
//!
//! They stand in one line, by priority and age as in a version's own [queue](crate::version), and are let go one after the other, each
//! once the one before it has been taken by the version that answers then: who came first has the first place there, too. The line
//! is as long as the queue of the version that went, and who was in that has a place in any case. Where others fill it, a client
//! that has less than its equal part of it is let in all the same, as long as there are no more than [`SHARED_PLACES`] too many.
//! Absent: how long a request waits, which whoever submits it knows, and what is unloaded and loaded.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gantry_engine::{AGEING_STEP, Priority};
use tokio::sync::Notify;

use crate::limits::{SHARED_PLACES, TURN_PATIENCE};
use crate::peer::Peer;
use crate::version::{LoadClock, Version, VersionSpec, retry_after_load};

/// The line, and what it waits for.
#[derive(Default)]
pub struct Hold(Mutex<State>);

#[derive(Default)]
struct State {
    /// What is waited for; `None` once a version answers.
    switch: Option<Switch>,
    line: BTreeMap<Place, Waiting>,
    /// Answers that those in line ask for.
    waiting: usize,
    clients: HashMap<Peer, usize>,
    next: u64,
    places: usize,
    timeout: Option<Duration>,
    closed: Option<LineClosed>,
}

/// Who stands at a place.
struct Waiting {
    woken: Arc<Notify>,
    /// Answers that it asks for.
    answers: usize,
    /// Since when it could have gone to a version that answers.
    due_since: Option<Instant>,
}

/// By priority and age.
type Place = (Instant, u64);

/// A change of model.
struct Switch {
    /// The one that is loaded; empty while the one before ends.
    to: String,
    /// Whether none was there before it.
    is_first: bool,
    clock: LoadClock,
    /// What the load of the version before took.
    usual: Option<Duration>,
}

/// What a place in the line is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// A version answers, and the ones in front are on their way to it.
    Queued,
    /// What answered before ends its last requests and is unloaded.
    ForModel,
    /// The next version is being loaded.
    Loading,
}

impl Waits {
    /// The word for it that clients are told.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::ForModel => "waiting_for_model",
            Self::Loading => "loading",
        }
    }
}

/// How it stands with a place in the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct News {
    /// What is waited for.
    pub waits: Waits,
    /// From 1 on.
    pub position: usize,
    /// How long until a version answers, as far as can be told.
    pub left: Option<Duration>,
}

/// As many wait as may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// How many wait.
    pub waiting: usize,
    /// How many may.
    pub places: usize,
}

/// Why nobody waits any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineClosed {
    /// The server was told to end.
    ServerEnds,
    /// The first model could not be loaded, and the server ends.
    NoModel,
}

/// A place in the line, left when it is dropped.
pub struct Ticket {
    hold: Arc<Hold>,
    place: Place,
    client: Peer,
    woken: Arc<Notify>,
    /// It came while no version answered, and so has a place in the queue of the next one.
    pub has_place: bool,
}

impl Hold {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No version answers from now on: this one is unloaded.
    pub(crate) fn begin(&self, from: &Version) {
        self.begin_after(from.usual_load(), from.capacity(), from.queue_timeout());
    }

    fn begin_after(&self, usual: Option<Duration>, places: usize, timeout: Option<Duration>) {
        let mut state = self.state();
        (state.places, state.timeout) = (places, timeout);
        state.line.values_mut().for_each(|waiting| waiting.due_since = None);
        state.switch = Some(Switch { to: String::new(), is_first: false, clock: LoadClock::default(), usual });
    }

    /// The first version is loaded from now on.
    pub(crate) fn begin_first(&self, spec: &VersionSpec, now: Instant) {
        let scheduling = &spec.runtime.scheduling;
        let mut state = self.state();
        state.places = scheduling.capacity(spec.runtime.parallel);
        state.timeout = scheduling.queue_timeout_ms.map(Duration::from_millis);
        let mut clock = LoadClock::default();
        clock.begin(now);
        state.switch = Some(Switch { to: spec.name.clone(), is_first: true, clock, usual: None });
    }

    /// This version is loaded while requests wait, and so much of it is read, from 0 to 1, where it is known.
    pub(crate) fn loads(&self, version: &str, share: Option<f32>, now: Instant) {
        let mut state = self.state();
        let Some(switch) = &mut state.switch else { return };
        if switch.to != version {
            version.clone_into(&mut switch.to);
            switch.clock = LoadClock::default();
            switch.clock.begin(now);
        }
        if let Some(share) = share {
            switch.clock.read(share);
        }
    }

    /// So much of the first version is read, from 0 to 1.
    pub fn read_first(&self, share: f32) {
        if let Some(first) = self.state().switch.as_mut().filter(|switch| switch.is_first) {
            first.clock.read(share);
        }
    }

    /// Nobody waits any more, for the reason that is given first.
    pub fn close(&self, why: LineClosed) {
        let mut state = self.state();
        state.closed.get_or_insert(why);
        state.line.values().for_each(|waiting| waiting.woken.notify_one());
    }

    /// A version answers.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        if state.switch.take().is_some() {
            state.wake();
        }
    }

    /// Whether a request has to stand in line.
    #[must_use]
    pub fn is_held(&self) -> bool {
        let state = self.state();
        state.switch.is_some() || !state.line.is_empty()
    }

    /// Whether no version answers.
    #[must_use]
    pub fn is_switching(&self) -> bool {
        self.state().switch.is_some()
    }

    /// Which share of the first version is read, from 0 to 1, while that is loaded.
    #[must_use]
    pub fn first_share(&self) -> Option<f32> {
        self.state().switch.as_ref().filter(|switch| switch.is_first).map(|switch| switch.clock.share())
    }

    /// Whether no version has answered yet, and the first one is loaded.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.first_share().is_some()
    }

    /// How many may wait.
    #[must_use]
    pub fn places(&self) -> usize {
        self.state().places
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state().waiting
    }

    /// How long requests wait that do not say so themselves.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        self.state().timeout
    }

    /// When a try is worth it, for one that does not wait.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        retry_after_load(self.state().left(Instant::now()).unwrap_or_default())
    }

    /// What is waited for by all.
    #[must_use]
    pub fn waits(&self) -> Waits {
        self.state().waits()
    }

    /// Takes a place in the line for a request for so many `answers` that came at this time. `has_place`: it was in the queue of the
    /// version that went.
    ///
    /// # Errors
    /// As many wait as may.
    pub fn enter(
        self: &Arc<Self>,
        client: Peer,
        priority: Priority,
        came: Instant,
        answers: usize,
        has_place: bool,
    ) -> Result<Ticket, Full> {
        let mut state = self.state();
        let waiting = state.waiting;
        if !has_place && waiting.saturating_add(answers) > state.places {
            let own = state.clients.get(&client).copied().unwrap_or(0);
            let clients = state.clients.len() + usize::from(own == 0);
            let part = state.places / clients.max(1);
            let is_let_in = own.saturating_add(answers) <= part
                && waiting.saturating_add(answers) <= state.places.saturating_add(SHARED_PLACES);
            if clients <= 1 || !is_let_in {
                return Err(Full { waiting, places: state.places });
            }
        }
        let later = match priority {
            Priority::High => Duration::ZERO,
            Priority::Normal => AGEING_STEP,
            Priority::Low => 2 * AGEING_STEP,
        };
        let (place, woken) = ((came + later, state.next), Arc::new(Notify::new()));
        state.next += 1;
        state.line.insert(place, Waiting { woken: Arc::clone(&woken), answers, due_since: None });
        state.waiting += answers;
        *state.clients.entry(client).or_default() += answers;
        let has_place = has_place || state.switch.is_some();
        Ok(Ticket { hold: Arc::clone(self), place, client, woken, has_place })
    }
}

impl State {
    /// The first one goes, where there is a version that answers.
    fn wake(&mut self) {
        let now = Instant::now();
        if let Some(first) = self.first(now).and_then(|place| self.line.get_mut(&place)) {
            first.due_since.get_or_insert(now);
            first.woken.notify_one();
        }
    }

    /// Whose turn it is, where there is a version that answers: not one who does not take it, since a client that does not read what it
    /// is told must not hold up all behind it.
    fn first(&self, now: Instant) -> Option<Place> {
        let takes_it = |waiting: &Waiting| waiting.due_since.is_none_or(|since| now < since + TURN_PATIENCE);
        let mut line = self.line.iter().filter(|_| self.switch.is_none());
        line.find(|(_, waiting)| takes_it(waiting)).map(|(place, _)| *place)
    }

    fn waits(&self) -> Waits {
        match &self.switch {
            None => Waits::Queued,
            Some(Switch { to, .. }) if to.is_empty() => Waits::ForModel,
            Some(_) => Waits::Loading,
        }
    }

    fn left(&self, now: Instant) -> Option<Duration> {
        let Some(Switch { clock, usual, .. }) = &self.switch else { return Some(Duration::ZERO) };
        // Before it has begun, what the one before took is all that is known.
        clock.left(now).filter(|left| !left.is_zero()).or(*usual)
    }
}

impl Ticket {
    /// Waits until it is first in line and a version answers.
    ///
    /// # Errors
    /// None comes any more.
    pub async fn turn(&self) -> Result<(), LineClosed> {
        loop {
            {
                let mut state = self.hold.state();
                if let Some(why) = state.closed {
                    return Err(why);
                }
                let now = Instant::now();
                // Whoever looks again takes it.
                if let Some(own) = state.line.get_mut(&self.place) {
                    own.due_since = None;
                }
                if state.first(now) == Some(self.place) {
                    return Ok(());
                }
            }
            // Woken or not, it looks again: the one in front may not take its turn.
            let _ = tokio::time::timeout(TURN_PATIENCE, self.woken.notified()).await;
        }
    }

    /// How it stands.
    #[must_use]
    pub fn news(&self) -> News {
        let state = self.hold.state();
        let position = state.line.range(..=self.place).count();
        News { waits: state.waits(), position, left: state.left(Instant::now()) }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.hold.state();
        let answers = state.line.remove(&self.place).map_or(0, |waiting| waiting.answers);
        state.waiting = state.waiting.saturating_sub(answers);
        if let Some(count) = state.clients.get_mut(&self.client) {
            *count = count.saturating_sub(answers);
            if *count == 0 {
                state.clients.remove(&self.client);
            }
        }
        state.wake();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn held(places: usize) -> Arc<Hold> {
        let hold = Arc::new(Hold::default());
        hold.begin_after(Some(Duration::from_secs(20)), places, None);
        hold
    }

    fn spec(parallel: u32, max_queue: usize) -> VersionSpec {
        let mut runtime = crate::version::RuntimeSettings { parallel, ..Default::default() };
        runtime.scheduling.max_queue = max_queue;
        let text = String::new;
        VersionSpec { name: "v1".to_owned(), digest: text(), model_path: "m.gguf".into(), served_name: text(), runtime }
    }

    fn peer(host: u8) -> Peer {
        Peer::of([10, 0, 0, host].into())
    }

    fn is_due(ticket: &Ticket) -> bool {
        pin!(ticket.turn()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[tokio::test]
    async fn they_go_one_after_the_other_by_priority_and_age() {
        let (hold, now) = (held(8), Instant::now());
        let enter =
            |priority, ms: u64| hold.enter(peer(1), priority, now + Duration::from_millis(ms), 1, false).unwrap();
        let (second, first) = (enter(Priority::Normal, 2), enter(Priority::Normal, 1));
        let (last, ahead) = (enter(Priority::Low, 0), enter(Priority::High, 9));
        assert_eq!([&ahead, &first, &second, &last].map(|ticket| ticket.news().position), [1, 2, 3, 4]);
        assert!(!is_due(&ahead), "no version answers yet");
        hold.end();
        assert!(is_due(&ahead) && !is_due(&first));
        drop(ahead);
        assert!(is_due(&first) && !is_due(&second));
        hold.begin_after(None, 8, None);
        assert!(!is_due(&first), "the next change has begun meanwhile");
        hold.end();
        drop(second);
        drop(first);
        assert!(is_due(&last) && hold.is_held() && !hold.is_switching());
        drop(last);
        assert!(!hold.is_held() && hold.state().clients.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_take_its_turn_holds_nobody_up() {
        let (hold, now) = (held(8), Instant::now());
        let enter = |ms: u64| hold.enter(peer(1), Priority::Normal, now + Duration::from_millis(ms), 1, false).unwrap();
        let (silent, second) = (enter(0), enter(1));
        assert!(silent.has_place && second.has_place);
        hold.end();
        assert!(!is_due(&second));
        // As if it had been told so long ago.
        let long_ago = Instant::now().checked_sub(TURN_PATIENCE).unwrap();
        hold.state().line.values_mut().next().unwrap().due_since = Some(long_ago);
        assert!(is_due(&second));
        drop(second);
        let late = enter(2);
        assert!(!late.has_place, "a version answers by now");
        assert!(is_due(&late));
        assert!(is_due(&silent) && !is_due(&late), "it has it again once it asks for it");
        drop((silent, late));
        assert!(!hold.is_held() && hold.waiting() == 0);
    }

    #[tokio::test]
    async fn a_full_line_is_shared_and_who_was_in_the_queue_has_a_place() {
        let (hold, now) = (held(4), Instant::now());
        let enter = |host, has_place| hold.enter(peer(host), Priority::Normal, now, 1, has_place);
        let _kept: Vec<_> = (0..4).map(|_| enter(1, false).unwrap()).collect();
        assert_eq!(enter(1, false).err(), Some(Full { waiting: 4, places: 4 }));
        let _returned = enter(1, true).unwrap();
        let all = hold.enter(peer(2), Priority::Normal, now, 3, false);
        assert!(all.is_err(), "three answers are more than its part");
        let _other: Vec<_> = (0..2).map(|_| enter(2, false).unwrap()).collect();
        assert!(enter(2, false).is_err(), "it has its part");
    }

    #[tokio::test]
    async fn the_first_load_is_waited_for_by_how_far_it_is_and_until_it_fails() {
        let (hold, now) = (Arc::new(Hold::default()), Instant::now());
        hold.begin_first(&spec(2, 3), now.checked_sub(Duration::from_secs(30)).unwrap());
        hold.read_first(0.5);
        assert!(hold.is_first() && hold.is_switching());
        assert_eq!((hold.first_share(), hold.places()), (Some(0.5), 5));
        // As long again as it has taken, in whole seconds.
        assert!((30..=32).contains(&hold.retry_after().as_secs()), "{:?}", hold.retry_after());
        let ticket = hold.enter(peer(1), Priority::Normal, now, 5, false).unwrap();
        assert_eq!(hold.enter(peer(1), Priority::Normal, now, 1, false).err(), Some(Full { waiting: 5, places: 5 }));
        let News { waits, position, left } = ticket.news();
        assert_eq!((waits, position), (Waits::Loading, 1));
        assert!((30..=31).contains(&left.unwrap().as_secs()), "{left:?}");
        hold.close(LineClosed::NoModel);
        hold.close(LineClosed::ServerEnds);
        assert_eq!(ticket.turn().await, Err(LineClosed::NoModel));
        drop(ticket);
        hold.end();
        assert!(!hold.is_first() && !hold.is_held());
        // One that is loaded later is not the first, whatever is told of its load.
        hold.begin_after(None, 4, None);
        hold.read_first(0.5);
        assert_eq!((hold.first_share(), hold.waits()), (None, Waits::ForModel));
    }

    #[tokio::test]
    async fn what_is_left_is_what_the_last_load_took_and_then_what_is_read() {
        let (hold, now) = (held(4), Instant::now());
        let ticket = hold.enter(peer(1), Priority::Normal, now, 1, false).unwrap();
        let left = Some(Duration::from_secs(20));
        assert_eq!(ticket.news(), News { waits: Waits::ForModel, position: 1, left });
        assert_eq!(hold.retry_after(), Duration::from_secs(20));
        hold.loads("v2", None, now.checked_sub(Duration::from_secs(10)).unwrap());
        hold.loads("v2", Some(0.5), now);
        let News { waits, left, .. } = ticket.news();
        assert_eq!((waits, left.unwrap().as_secs()), (Waits::Loading, 10));
        hold.end();
        assert_eq!(ticket.news().waits, Waits::Queued);
    }
}
