//! Which version answers: one pointer, swapped whole.
//!
//! A request reads this pointer once, at submission, and keeps that [`Version`] to its last token, so no answer
//! mixes two models. While a candidate answers a share of the requests, it is the conversation that says whose a request is. The pointer is written only by whoever changes models: the agent in a pod, [`crate::serve`]
//! elsewhere. Absent: loading, validating and retiring; a router holds versions, it does not make or end them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use arc_swap::ArcSwap;
use gantry_crds::status::ModelState;
use gantry_rollout::{Conversation, Share};
use tokio::sync::watch;

use crate::hold::Hold;
use crate::version::{Version, VersionSpec};

/// What is in force: set as one, so no reader sees half of a change.
#[derive(Clone, Default)]
pub struct Routing {
    /// The version that gets every new request that goes to no other one; `None` before the first one is ready.
    pub active: Option<Arc<Version>>,
    /// The candidate that a share of the new requests goes to.
    pub canary: Option<(Arc<Version>, Share)>,
    /// The version before it, resident while a way back is wanted.
    pub previous: Option<Arc<Version>>,
}

/// The pointer to what is in force.
pub struct Router {
    routing: ArcSwap<Routing>,
    swaps: AtomicU64,
    stands_by: AtomicBool,
    yields: AtomicBool,
    quarantined: AtomicBool,
    is_ending: AtomicBool,
    state: watch::Sender<Option<ModelState>>,
    hold: Arc<Hold>,
    first: OnceLock<VersionSpec>,
}

impl Router {
    /// A router with no version.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            routing: ArcSwap::from_pointee(Routing::default()),
            swaps: AtomicU64::new(0),
            stands_by: AtomicBool::new(false),
            yields: AtomicBool::new(false),
            quarantined: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            state: watch::Sender::new(None),
            hold: Arc::default(),
            first: OnceLock::new(),
        })
    }

    /// The candidate that a request of this conversation is bound to, if it is submitted now and is of those that the candidate
    /// answers. While its workers answer nobody, none is.
    #[must_use]
    pub fn canary_of<'a>(&self, conversation: impl FnOnce() -> &'a Conversation) -> Option<Arc<Version>> {
        let routing = self.routing.load();
        let (version, share) = routing.canary.as_ref().filter(|(version, _)| version.is_up())?;
        share.takes(&version.spec().name, conversation()).then(|| Arc::clone(version))
    }

    /// The version that a request submitted now is bound to, unless it goes to a [candidate](Self::canary_of).
    #[must_use]
    pub fn active(&self) -> Option<Arc<Version>> {
        self.routing.load().active.clone()
    }

    /// Both, as of one moment.
    #[must_use]
    pub fn routing(&self) -> Routing {
        Routing::clone(&self.routing.load())
    }

    /// Has requests wait from now on for the next version that is set, since this one is unloaded.
    pub fn hold(&self, from: &Version) {
        self.hold.begin(from);
        self.routing.store(Arc::default());
    }

    /// Has requests wait for the first version, which is loaded from now on.
    pub fn hold_for_first(&self, spec: &VersionSpec) {
        self.first.get_or_init(|| spec.clone());
        self.hold.begin_first(spec, Instant::now());
    }

    /// What the first version will be, while it is loaded.
    #[must_use]
    pub fn first(&self) -> Option<&VersionSpec> {
        self.first.get().filter(|_| self.hold.is_first())
    }

    /// Where requests wait.
    #[must_use]
    pub fn held(&self) -> &Arc<Hold> {
        &self.hold
    }

    /// Puts `routing` in force for every request submitted from now on.
    pub fn set(&self, routing: Routing) {
        let active = routing.active.as_ref().map(Arc::as_ptr);
        let before = self.routing.swap(Arc::new(routing));
        if active.is_some() {
            self.hold.end();
        }
        if active.is_some() && active != before.active.as_ref().map(Arc::as_ptr) {
            self.swaps.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Says whether other pods answer the service's requests now, so that who is still connected here is to connect anew.
    pub fn set_stands_by(&self, stands_by: bool) {
        self.stands_by.store(stands_by, Ordering::Relaxed);
    }

    /// Whether other pods answer the service's requests now.
    #[must_use]
    pub fn stands_by(&self) -> bool {
        self.stands_by.load(Ordering::Relaxed)
    }

    /// Says whether other pods answer requests while this one holds them.
    pub fn set_yields(&self, yields: bool) {
        self.yields.store(yields, Ordering::Relaxed);
    }

    /// Whether requests wait here while other pods answer them.
    #[must_use]
    pub fn yields(&self) -> bool {
        self.yields.load(Ordering::Relaxed) && self.hold.is_switching()
    }

    /// Says whether what this pod answers with was refused or taken back, and other pods answer with none such.
    pub fn set_quarantined(&self, quarantined: bool) {
        self.quarantined.store(quarantined, Ordering::Relaxed);
    }

    /// Whether requests are to go to other pods, since what this one answers with was refused or taken back.
    #[must_use]
    pub fn is_quarantined(&self) -> bool {
        self.quarantined.load(Ordering::Relaxed)
    }

    /// Says that the process is about to end, and only lets requests end that it has.
    pub fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    /// Whether the process is about to end.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Says where the agent is with the model that it answers with.
    pub fn set_state(&self, state: ModelState) {
        self.state.send_replace(Some(state));
    }

    /// Where the agent is with the model that it answers with, if there is an agent.
    #[must_use]
    pub fn state(&self) -> Option<ModelState> {
        *self.state.borrow()
    }

    /// Whether requests wait for a version, and neither the next one nor the one before could be loaded.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.hold.is_switching() && self.state() == Some(ModelState::Error)
    }

    /// How often another version became active, the first one included.
    #[must_use]
    pub fn swaps(&self) -> u64 {
        self.swaps.load(Ordering::Relaxed)
    }
}
