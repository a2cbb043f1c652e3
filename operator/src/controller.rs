//! One reconcile: observe → validate → decide → build → act → status, for one service at a time.
//!
//! When a rollout begins, children go first, then the versions that the status will name, then the status itself: an agent
//! that is told about a version finds the rights to fetch it. Every other step of a rollout goes before the children, so
//! that pods are told to switch back whatever else cannot be written, and no request goes before the write that tells them
//! but looks that have a time limit and may fail. Events and metrics follow what was written. A reconcile that fails is repeated
//! with a back-off; one that lost a race is repeated with the newer object.

use std::{
    collections::{BTreeSet, HashMap},
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{FutureExt, StreamExt, future};
use gantry_crds::{
    InferenceService, InferenceServiceStatus, ModelVersion, ModelVersionStatus, OLD_FINALIZER,
    conditions::Reason,
    status::{ReplicaHealth, ReplicaStatus, RolloutStatus, RolloutStep, StrategyName, WaitReason},
};
use jiff::Timestamp;
use kube::{
    Client, Resource, ResourceExt,
    runtime::{
        Config, applier,
        controller::{Action, Error as ControllerError},
        reflector::ObjectRef,
    },
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::{
    act::{self, Actor, Unwritten},
    build::{self, Inputs, NewPods, Sides},
    decide::{
        CountedPod, Plan, RolloutState, SidesSeen, Transition, World, decide,
        judged::{Seen, Sighting},
    },
    events::{Events, describe},
    http::Role,
    limits::{
        self, CHILDREN_LIST_PATIENCE, CONFLICT_RETRY, JUDGED_POLL, MESSAGE_PODS_MAX, RECONCILE_CONCURRENCY,
        RESYNC_PERIOD, RETRY_MAX, RETRY_MIN, STORE_LAG_MAX,
    },
    metrics::{Metrics, ReconcileOutcome},
    objects::look_at,
    observe::{Observed, Stores, WatchesEnded},
    status::{self, ServiceInputs, VersionInputs, differs, pods_events, refusal_event, service_status, version_status},
    validate::{NamedObject, ObjectKind, Problems, ValidService, validate},
    volumes,
};

/// What a reconcile needs besides its service.
pub struct Context {
    client: Client,
    stores: Stores,
    /// Until when passes wait for all children to be listed.
    listed_by: Instant,
    new_pods: NewPods,
    events: Events,
    metrics: Arc<Metrics>,
    memory: Mutex<HashMap<ObjectRef<InferenceService>, Memory>>,
}

/// What is remembered of a service between two reconciles. Losing it costs a request or two, and nothing else.
#[derive(Debug, Default)]
struct Memory {
    /// Failures in a row.
    failures: u32,
    /// Writes in a row that were decided from an object that is not the newest.
    conflicts: u32,
    /// When time alone would change the decision of the pass that failed.
    wake_at: Option<Timestamp>,
    /// Resource version of the operator's own last write of the status, and when that was.
    written: Option<(u64, Instant)>,
    /// When it was last looked whether Secrets that agents may read still say for which hosts they are.
    looked: Option<Instant>,
    /// The statuses of versions that the store may not have yet, with the same of each.
    versions: HashMap<String, (u64, Instant, ModelVersionStatus)>,
}

impl Context {
    /// A context that writes with `client` and sees what is in `stores`.
    #[must_use]
    pub fn new(client: Client, stores: Stores, new_pods: NewPods, instance: String, metrics: Arc<Metrics>) -> Self {
        let events = Events::new(client.clone(), instance);
        let listed_by = Instant::now() + CHILDREN_LIST_PATIENCE;
        Self { client, stores, listed_by, new_pods, events, metrics, memory: Mutex::default() }
    }

    fn remember<T>(&self, service: &InferenceService, change: impl FnOnce(&mut Memory) -> T) -> T {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        change(memory.entry(ObjectRef::from_obj(service)).or_default())
    }

    /// Notes how a wake ended: of a service that is not there any more nothing is remembered.
    fn ended<T, Q>(&self, result: &Result<T, ControllerError<Error, Q>>) {
        if let Err(ControllerError::ObjectNotFound(gone)) = result {
            let service = ObjectRef::new(&gone.name).within(gone.namespace.as_deref().unwrap_or_default());
            self.metrics.forget(&service);
            self.memory.lock().unwrap_or_else(PoisonError::into_inner).remove(&service);
        }
    }

    /// What is remembered, if anything: a look makes no entry, or each service that is gone would leave one.
    fn recall<T>(&self, service: &InferenceService, look: impl FnOnce(&mut Memory) -> T) -> Option<T> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.get_mut(&ObjectRef::from_obj(service)).map(look)
    }

    /// Time to wait after another failure in a row.
    fn back_off(&self, service: &InferenceService) -> Duration {
        self.remember(service, |memory| {
            let wait = RETRY_MIN.saturating_mul(1 << memory.failures.min(16)).min(RETRY_MAX);
            memory.failures = memory.failures.saturating_add(1);
            wait
        })
    }

    /// Time to wait after a pass that failed: a deadline is kept however many failed before.
    fn next_try(&self, service: &InferenceService) -> Duration {
        let due = self.recall(service, |memory| memory.wake_at.take()).flatten().map(wait_until);
        let wait = self.back_off(service);
        due.map_or(wait, |due| due.min(wait))
    }

    /// Time to wait after another race that was lost in a row. The event with the newer object wakes the service before; it does
    /// not come for one that cannot be read, whose older self would ask the API server five times a second.
    fn after_conflict(&self, service: &InferenceService) -> Duration {
        self.remember(service, |memory| {
            let wait = CONFLICT_RETRY.saturating_mul(1 << memory.conflicts.min(16)).min(RETRY_MAX);
            memory.conflicts = memory.conflicts.saturating_add(1);
            wait
        })
    }

    /// Whether the store is still behind the operator's own last write: what it holds would be decided on twice. For a
    /// while only: a cluster that was restored from a backup counts its resource versions from an earlier one on.
    fn is_behind(&self, service: &InferenceService) -> bool {
        let seen = service.resource_version().and_then(|version| version.parse::<u64>().ok());
        let written = self.recall(service, |memory| memory.written).flatten();
        match (seen, written) {
            (Some(seen), Some((written, at))) => seen < written && at.elapsed() < STORE_LAG_MAX,
            _ => false,
        }
    }

    /// The version as the operator wrote it last: what its status keeps, the pods may not say again, and a store that is behind
    /// has not.
    fn newest(&self, service: &InferenceService, version: &ModelVersion) -> ModelVersion {
        let name = version.name_any();
        let seen = version.resource_version().and_then(|version| version.parse::<u64>().ok());
        let own = self.recall(service, |memory| {
            let behind = memory.versions.get(&name).is_some_and(|(written, at, _)| {
                seen.is_some_and(|seen| seen < *written) && at.elapsed() < STORE_LAG_MAX
            });
            if behind { memory.versions.get(&name).cloned() } else { memory.versions.remove(&name).and(None) }
        });
        let status = own.flatten().map(|(_, _, status)| status).or_else(|| version.status.clone());
        ModelVersion { status, ..version.clone() }
    }

    /// Whether it is time to look again at what is granted; a first time begins with it, so that not all are asked at the start.
    fn is_time_to_look(&self, service: &InferenceService) -> bool {
        self.remember(service, |memory| {
            let due = memory.looked.map(|at| at.elapsed() >= RESYNC_PERIOD);
            if due != Some(false) {
                memory.looked = Some(Instant::now());
            }
            due == Some(true)
        })
    }

    /// Notes that a reconcile came to its end.
    fn succeeded(&self, service: &InferenceService) {
        self.recall(service, |memory| (memory.failures, memory.conflicts) = (0, 0));
    }
}

/// Why a reconcile did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A request was not carried out.
    #[error(transparent)]
    Act(#[from] act::Error),
    /// The operator is being stopped.
    #[error(transparent)]
    WatchesEnded(#[from] WatchesEnded),
}

/// What the controller runs with.
pub struct Settings {
    /// Client for watches, whose answers may take minutes.
    pub watch_client: Client,
    /// Client for all other requests.
    pub client: Client,
    /// What new serving pods get.
    pub new_pods: NewPods,
    /// Name of this operator's pod.
    pub instance: String,
    /// Metrics.
    pub metrics: Arc<Metrics>,
}

/// Reconciles all services until `stop`, then finishes what is running.
pub async fn run(settings: Settings, role: &watch::Sender<Role>, stop: CancellationToken) {
    let (stores, wakes) = Stores::watch(&settings.watch_client);
    settings.metrics.watch(stores.services());
    let context =
        Arc::new(Context::new(settings.client, stores, settings.new_pods, settings.instance, settings.metrics));
    let filled = async {
        if context.stores.ready(context.listed_by).await.is_ok() {
            role.send_replace(Role::Leading);
        }
    };
    // Without a further wake the queue ends, and with it this stream once the running reconciles have.
    let queue = wakes.map(Ok::<_, Infallible>).take_until(stop.cancelled_owned());
    let reconciles = applier(
        |service, context| reconcile(service, context).boxed(),
        error_policy,
        Arc::clone(&context),
        context.stores.services(),
        queue,
        Config::default().concurrency(RECONCILE_CONCURRENCY),
    )
    // What a reconcile ran into was logged and counted there.
    .for_each(|result| {
        context.ended(&result);
        future::ready(())
    });
    tokio::join!(filled, reconciles);
}

/// Brings one service one step on.
///
/// # Errors
/// When a request was not carried out; [`error_policy`] says when to try again.
pub async fn reconcile(service: Arc<InferenceService>, context: Arc<Context>) -> Result<Action, Error> {
    context.stores.ready(context.listed_by).await?;
    if context.is_behind(&service) {
        // Its watch event is on its way and wakes this service again; the time is for the case that it is lost.
        return Ok(Action::requeue(RETRY_MIN));
    }
    let started = Instant::now();
    let observed = context.stores.observe(&service);
    let result = step(&service, observed, &context, whole_seconds(Timestamp::now())).await;
    let outcome = match &result {
        Ok(_) => ReconcileOutcome::Done,
        Err(error) if error.is_stale() || error.is_gone() || error.is_of_ending_namespace() => ReconcileOutcome::Stale,
        Err(error) if error.is_refusal() => ReconcileOutcome::Refused,
        Err(_) => ReconcileOutcome::Failed,
    };
    context.metrics.reconciled(outcome, started.elapsed());
    if result.is_ok() {
        context.succeeded(&service);
    }
    result.map_err(Error::from)
}

/// When a service whose reconcile failed is tried again.
pub fn error_policy(service: Arc<InferenceService>, error: &Error, context: Arc<Context>) -> Action {
    match error {
        Error::Act(error) if error.is_stale() => Action::requeue(context.after_conflict(&service)),
        Error::Act(error) if error.is_gone() => Action::requeue(RETRY_MIN),
        Error::Act(error) if error.is_of_ending_namespace() => Action::requeue(RETRY_MAX),
        Error::WatchesEnded(_) => Action::await_change(),
        Error::Act(_) => {
            let wait = context.next_try(&service);
            error!(service = %ObjectRef::from_obj(&*service), %error, wait_seconds = wait.as_secs(), "a reconcile failed");
            Action::requeue(wait)
        }
    }
}

/// The API keeps times in whole seconds; what is compared with them must be as coarse.
fn whole_seconds(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

/// One reconcile of a service as observed.
pub(crate) async fn step(
    service: &InferenceService,
    mut observed: Observed,
    context: &Context,
    now: Timestamp,
) -> Result<Action, act::Error> {
    let actor = Actor::new(&context.client, service);
    let mut finalizer = Ok(());
    if service.finalizers().iter().any(|finalizer| finalizer == OLD_FINALIZER) {
        finalizer = actor.remove_old_finalizer().await;
        if finalizer.is_ok() {
            // The write wakes this service again, with the object that the next writes need.
            return Ok(Action::await_change());
        }
    }
    if service.meta().deletion_timestamp.is_some() {
        // Garbage collection ends what belongs to it, by the owner references; what it has ended must not be made anew.
        return finalizer.map(|()| Action::await_change());
    }

    let no_status = InferenceServiceStatus::default();
    let status = service.status.as_ref().unwrap_or(&no_status);
    let mut spec = validate(service);
    let state = RolloutState::from(status);
    let stamped = observed.stamped();
    if let Ok(valid) = &mut spec {
        valid.wanted.named_as(&state, &stamped);
    }
    let (poll, seen) = judge_by_objects(&mut spec, &state, service, context).await;
    let absent = look_for_objects(spec.as_ref().ok(), &mut observed, service, context).await;
    let (lent_secrets, unlent) = lent_secrets(spec.as_ref().ok(), &state, seen, &observed, service, context).await;
    let unmounted = look_for_volumes(&mut observed, service, context, now).await;
    observed.have_lost_account();
    observed.are_heard_of(service.status.as_ref());
    let poll = poll.into_iter().chain(absent).chain(unlent).chain(unmounted).min();
    let observed = &observed;
    let (side, other_side) = (state.active_side, state.active_side.other());
    // A spec that cannot be carried out changes nothing, and so not the number of pods either.
    let target_replicas = match &spec {
        Ok(valid) => valid.replicas,
        Err(_) => observed.scaled_to(side).unwrap_or(service.spec.replicas),
    };
    let sides = Sides::of(observed, &state, spec.as_ref().ok(), target_replicas);
    let template = |side| spec.as_ref().ok().map(|spec| sides.template(side, &spec.pod));
    let pods = observed.counted(status, side, template(side).as_ref());
    let other_pods = observed.counted(status, other_side, template(other_side).as_ref());
    let missing_pod = observed.trouble(side, false, now).map(|trouble| trouble.message);
    let missing_other = observed.trouble(other_side, true, now);
    // Its pods may be missing for that.
    let unwritten = status::Unwritten::told(status).map(|unwritten| unwritten.message);
    let world = World {
        now,
        spec: spec.as_ref().ok(),
        state: &state,
        pods: &pods,
        target_replicas,
        stamped: &stamped,
        missing_pod: missing_pod.as_deref(),
        sides: SidesSeen {
            other_pods: &other_pods,
            missing_pod: missing_other.as_ref().map(|trouble| trouble.message.as_str()).or(unwritten.as_deref()),
            has_no_node: missing_other
                .as_ref()
                .is_some_and(|trouble| matches!(trouble.reason, Reason::Unschedulable | Reason::FailedCreate)),
            is_flipped: observed.points_to(side),
            is_labelled: sides.is_labelled,
            judges_are_other: false,
        },
    };

    let plan = decide(&world);
    let (spec, state, lent_secrets) = (spec.as_ref(), &state, &lent_secrets);
    let (pods, other_pods) = (pods.as_slice(), other_pods.as_slice());
    let pass = Pass { service, observed, context, actor, spec, state, pods, other_pods, lent_secrets, now };
    let mut errors = pass.carry_out(&plan, target_replicas).await?;
    errors.extend(finalizer.err());
    // A pass that could not write a child is tried again; what was decided does not wait for that.
    let Some(error) = worst(errors) else {
        let wake_at = plan.wake_at.into_iter().chain(observed.next_trouble(now)).min();
        return Ok(wake(wake_at, poll));
    };
    context.remember(service, |memory| memory.wake_at = plan.wake_at);
    Err(error)
}

/// The error to act upon: one that passes is tried again soon, a refusal stays until somebody acts.
fn worst(errors: Vec<act::Error>) -> Option<act::Error> {
    let (refused, passing): (Vec<_>, Vec<_>) = errors.into_iter().partition(act::Error::is_refusal);
    passing.into_iter().chain(refused).next()
}

/// One pass over a service: what was observed and validated of it.
struct Pass<'a> {
    service: &'a InferenceService,
    observed: &'a Observed,
    context: &'a Context,
    actor: Actor<'a>,
    spec: Result<&'a ValidService, &'a Problems>,
    state: &'a RolloutState,
    pods: &'a [CountedPod<'a>],
    other_pods: &'a [CountedPod<'a>],
    lent_secrets: &'a BTreeSet<String>,
    now: Timestamp,
}

impl Pass<'_> {
    /// Writes what was decided. Gives what could not be written beside the status: none of it holds back the rest.
    ///
    /// A rollout that begins waits for the identity of its pods, since agents need the rights to fetch what it names, and for
    /// its version. Every other step goes before them: pods switch back whether or not a budget can be written.
    async fn carry_out(&self, plan: &Plan, target_replicas: i32) -> Result<Vec<act::Error>, act::Error> {
        let begins = matches!(plan.transition, Some(Transition::Started { .. }));
        let goes_on = plan.transition.is_some() && !begins;
        if goes_on {
            self.write_status(&plan.state, target_replicas, self.refused_before()).await?;
            self.tell(plan).await;
        }
        let applied = self.apply_children(plan, target_replicas).await;
        let Unwritten { identity: mut needed, others: mut errors } = applied;
        // The service goes with its namespace. Until then each child that goes wakes it, and of thousands nothing else is worth a
        // request: others wait for their turn.
        if let Some(error) = needed.pop_if(|error| error.is_of_ending_namespace()) {
            return Err(error);
        }
        if let Some(error) = errors.pop_if(|error| error.is_of_ending_namespace()) {
            return Err(error);
        }
        if !begins || needed.is_empty() {
            needed.extend(self.actor.stamp(&plan.stamp).await.err());
        }
        let begun = begins && needed.is_empty();
        let next = if begins && !begun { self.state } else { &plan.state };
        errors.extend(needed);
        if !goes_on {
            self.write_status(next, target_replicas, refusals(&errors)).await?;
        }
        if begun {
            self.tell(plan).await;
        }
        errors.extend(self.write_version_statuses(next).await);
        errors.extend(self.actor.delete_versions(&plan.delete).await.err());
        let no_status = InferenceServiceStatus::default();
        let status = self.service.status.as_ref().unwrap_or(&no_status);
        errors.extend(self.actor.forget_pods(&self.observed.gone_pods(status)).await.err());
        Ok(errors)
    }

    /// Writes the statuses of versions that differ. Gives why some could not be written.
    async fn write_version_statuses(&self, next: &RolloutState) -> Vec<act::Error> {
        // Only pods of the newest template judge.
        let is_of_sides = |rollout: &RolloutStatus| {
            rollout.step == RolloutStep::Prepare && rollout.strategy() == StrategyName::BlueGreen
        };
        // Those of the side on which it is prepared.
        let is_of_sides = next.rollout.as_ref().is_some_and(is_of_sides);
        let judging = if is_of_sides { self.other_pods } else { self.pods };
        let side = if is_of_sides { next.active_side.other() } else { next.active_side };
        let missing = self.observed.trouble(side, is_of_sides, self.now).map(|trouble| trouble.reason);
        let newest: Vec<_> = judging.iter().filter(|pod| !pod.outdated).copied().collect();
        let (before, pods, now) = (self.state, newest.as_slice(), self.now);
        let any_runs = !judging.is_empty();
        let exists = |name: &String| self.observed.versions.iter().any(|version| version.name_any() == *name);
        self.context.recall(self.service, |memory| memory.versions.retain(|name, _| exists(name)));
        let mut errors = Vec::new();
        for version in self.observed.versions.iter().filter(|version| version.meta().deletion_timestamp.is_none()) {
            let version = &self.context.newest(self.service, version);
            let status = version_status(&VersionInputs { version, before, state: next, pods, any_runs, missing, now });
            if version.status.as_ref() == Some(&status) {
                continue;
            }
            let name = version.name_any();
            match self.actor.write_version_status(&name, &status).await {
                Err(error) => errors.push(error),
                Ok(written) => {
                    let Some(written) = written.and_then(|written| written.parse().ok()) else { continue };
                    let own = (written, Instant::now(), status);
                    self.context.remember(self.service, |memory| memory.versions.insert(name, own));
                }
            }
        }
        errors
    }

    async fn write_status(
        &self,
        state: &RolloutState,
        target_replicas: i32,
        unwritten: Option<status::Unwritten>,
    ) -> Result<(), act::Error> {
        let (service, spec, observed, now) = (self.service, self.spec, self.observed, self.now);
        let status = service_status(&ServiceInputs { service, spec, state, observed, target_replicas, unwritten, now });
        if differs(service.status.as_ref(), &status) {
            let written = self.actor.write_status(&status).await?;
            let written = written.and_then(|version| version.parse().ok());
            self.context.remember(service, |memory| memory.written = written.map(|version| (version, Instant::now())));
            self.context.metrics.steps(service, self.state.rollout.as_ref(), state.rollout.as_ref(), now);
            if let Some(refused) = refusal_event(service.status.as_ref(), &status) {
                self.context.events.refused(service, refused).await;
            }
            for event in pods_events(service.status.as_ref(), &status) {
                self.context.events.pods(service, event).await;
            }
            if let Some(rollout) = &state.rollout
                && waits_anew(self.state.rollout.as_ref(), rollout)
            {
                self.context.events.waits(service, rollout).await;
            }
        }
        Ok(())
    }

    /// Why children could not be written in the pass before, as the status says it.
    fn refused_before(&self) -> Option<status::Unwritten> {
        self.service.status.as_ref().and_then(status::Unwritten::told)
    }

    /// Logs and counts the step that was written, and makes it an Event.
    async fn tell(&self, plan: &Plan) {
        let Some(transition) = &plan.transition else { return };
        let (_, reason, note) = describe(transition);
        info!(service = %ObjectRef::from_obj(self.service), version = transition.version(), reason, "{note}");
        self.context.metrics.transition(self.service, transition);
        self.context.events.transition(self.service, transition).await;
    }

    async fn apply_children(&self, plan: &Plan, target_replicas: i32) -> Unwritten {
        let sides = Sides::of(self.observed, &plan.state, self.spec.ok(), target_replicas);
        let Ok(spec) = self.spec else {
            // It changes nothing at all, but does not keep requests from the side that they are to go back to.
            let service = build::endpoint_service(self.service, &sides);
            return self.actor.apply_service(self.observed, &service).await;
        };
        let children = build::build(&Inputs {
            owner: self.service,
            spec,
            versions: &plan.state.versions,
            lent_secrets: self.lent_secrets,
            new_pods: &self.context.new_pods,
            sides: &sides,
            accounts: &self.observed.accounts(),
            account_uid: self.observed.account_uid(self.service),
            answers: answers(self.pods),
        });
        self.actor.apply_children(self.observed, sides.active, &children).await
    }
}

/// A refusal stays until somebody acts, so it is said in the status; any other failure passes. What goes first is whose name is taken:
/// of a long message the end is cut.
fn refusals(errors: &[act::Error]) -> Option<status::Unwritten> {
    let mut refused: Vec<_> = errors.iter().filter(|error| error.is_refusal()).collect();
    refused.sort_by_key(|error| !error.is_of_taken_name());
    let is_name_taken = refused.first()?.is_of_taken_name();
    let messages: Vec<_> = refused.iter().map(|error| limits::message(&error.to_string())).collect();
    Some(status::Unwritten { is_name_taken, message: messages.join("; ") })
}

/// Adds to the spec the states of the objects that its version is judged by, as far as they can be seen. They are of no
/// interest once it is served; until then this gives the time after which to look again, and what was seen.
async fn judge_by_objects(
    spec: &mut Result<ValidService, Problems>,
    state: &RolloutState,
    service: &InferenceService,
    context: &Context,
) -> (Option<Duration>, Vec<Sighting>) {
    let unseen = (None, Vec::new());
    let Ok(ValidService { wanted, replicas, .. }) = spec else { return unseen };
    let is_latched = state.rejected.as_ref().is_some_and(|rejected| rejected.version == wanted.name);
    // Without pods nothing is judged: thousands of such services would be looked at for nothing.
    let is_judged = is_latched || state.rollout.is_some() || *replicas > 0;
    if wanted.objects.is_empty() || state.active.as_ref() == Some(&wanted.name) || !is_judged {
        return unseen;
    }
    let seen = look_at(&context.client, &service.namespace().unwrap_or_default(), &wanted.objects).await;
    wanted.judge_by(&seen, state);
    (Some(JUDGED_POLL), seen)
}

/// Which of the Secrets that versions name say for which hosts they are: those of which that was `seen`, and others that agents
/// may read already, which are looked at with a resync alone. What is neither is looked at, and looked at again after a time while
/// it does not say so: its owner may.
async fn lent_secrets(
    spec: Option<&ValidService>,
    state: &RolloutState,
    seen: Vec<Sighting>,
    observed: &Observed,
    service: &InferenceService,
    context: &Context,
) -> (BTreeSet<String>, Option<Duration>) {
    let Some(spec) = spec else { return (BTreeSet::new(), None) };
    let named = build::named_secrets(spec, &state.versions);
    let mut lent = observed.role.as_ref().map(build::granted_secrets).unwrap_or_default();
    let any_lent = spec.replicas > 0 && !named.is_disjoint(&lent);
    let again = any_lent && context.is_time_to_look(service);
    let is_known =
        |name: &String| (lent.contains(name) && !again) || seen.iter().any(|sighting| sighting.is_of_secret(name));
    // Without pods nobody reads them.
    let unknown = named.iter().filter(|name| spec.replicas > 0 && !is_known(name));
    let unknown: Vec<_> = unknown.map(|name| NamedObject { kind: ObjectKind::Secret, name: name.clone() }).collect();
    let looked = look_at(&context.client, &service.namespace().unwrap_or_default(), &unknown).await;
    for Sighting { object, seen } in seen.into_iter().chain(looked) {
        match seen {
            Seen::There { names_hosts: true, .. } => drop(lent.insert(object.name)),
            Seen::There { names_hosts: false, .. } | Seen::Absent => drop(lent.remove(&object.name)),
            Seen::Nothing => {}
        }
    }
    let waits = spec.replicas > 0 && !named.is_subset(&lent);
    (lent, waits.then_some(JUDGED_POLL))
}

/// Looks for volumes that keep pods from being made. Gives the time after which to look again, since no watch tells of it.
async fn look_for_volumes(
    observed: &mut Observed,
    service: &InferenceService,
    context: &Context,
    now: Timestamp,
) -> Option<Duration> {
    if !observed.any_waits_for_container() {
        return None;
    }
    let pods: Vec<_> = observed.waiting_long(now).take(MESSAGE_PODS_MAX).map(str::to_owned).collect();
    let failures = volumes::failures(&context.client, &service.namespace().unwrap_or_default(), pods, now).await;
    observed.lack_volumes(&failures);
    Some(JUDGED_POLL)
}

/// Looks for the objects that pods are made with while the container of one has not been made, and notes the first that is not
/// there. Then this gives the time after which to look again.
async fn look_for_objects(
    spec: Option<&ValidService>,
    observed: &mut Observed,
    service: &InferenceService,
    context: &Context,
) -> Option<Duration> {
    let needed = spec?.pod.objects();
    if needed.is_empty() || !observed.any_waits_for_container() {
        return None;
    }
    let objects: Vec<_> = needed.iter().map(|one| one.object.clone()).collect();
    let seen = look_at(&context.client, &service.namespace().unwrap_or_default(), &objects).await;
    let (absent, _) = needed.iter().zip(seen).find(|(_, sighting)| sighting.seen == Seen::Absent)?;
    observed.lacks(absent);
    Some(JUDGED_POLL)
}

/// Whether pods wait for something else than was told last. What was told stands in the status, so no restart tells it again. That
/// another version ends its last requests first is how rollouts go, and nothing to warn of.
fn waits_anew(told: Option<&RolloutStatus>, now: &RolloutStatus) -> bool {
    let told = told.filter(|told| told.attempt == now.attempt).and_then(|told| told.wait_reason);
    now.wait_reason.is_some_and(|reason| reason != WaitReason::NoRoom) && now.wait_reason != told
}

/// Whether any pod has a version that answers, or that did until its worker died and will again. One whose worker failed for
/// good may go before its successor comes, which may find no room else.
fn answers(pods: &[CountedPod]) -> bool {
    let has_version = |report: &ReplicaStatus| report.version.is_some() && report.health != ReplicaHealth::Failed;
    pods.iter().any(|pod| pod.ready || pod.report.is_some_and(has_version))
}

/// Sleeps until the next deadline or look, or until something happens, and not for ever: a wake that was lost is made up
/// for.
fn wake(at: Option<Timestamp>, poll: Option<Duration>) -> Action {
    Action::requeue(at.map(wait_until).into_iter().chain(poll).min().unwrap_or(RESYNC_PERIOD))
}

fn wait_until(wake_at: Timestamp) -> Duration {
    let wait = Duration::try_from(wake_at.duration_since(Timestamp::now())).unwrap_or(Duration::ZERO);
    wait.max(CONFLICT_RETRY)
}

#[cfg(test)]
mod tests;
