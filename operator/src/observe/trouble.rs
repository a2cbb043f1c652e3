//! Why pods are not there: no node takes one, its image cannot be had, it was evicted, a quota refuses it.
//!
//! No count, no time and no name of a try is in the texts, so that a trouble that lasts is not written with each. Kubelet's
//! own texts alternate with every try: they stay where `kubectl describe pod` shows them, but for those about one volume
//! ([`crate::volumes`]). Of the scheduler's and the API
//! server's is told what no node has and what is refused ([`crate::text`]).

use gantry_crds::{conditions::Reason, status::WaitReason};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use kube::ResourceExt;

use crate::{
    build::SERVER_CONTAINER,
    limits::{CRASH_LOOP_RESTARTS, CREATING_TIMEOUT, REPORT_TIMEOUT},
    text::{of_refusal, of_scheduler},
    validate::{ObjectKind, PodObject},
};

/// Why a pod is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// In a word, as Kubernetes calls it.
    pub reason: Reason,
    /// Cause and next action, in a sentence.
    pub message: String,
}

impl Trouble {
    /// What keeps a pod that is neither over nor being ended from running.
    pub(super) fn of_living(pod: &Pod, scheduled: Option<&PodCondition>) -> Option<Self> {
        let name = pod.name_any();
        if let Some(scheduled) = scheduled.filter(|scheduled| scheduled.status == "False") {
            let message = of_scheduler(scheduled.message.as_deref().unwrap_or("no reason given"));
            let message = format!("pod {name} finds no node: {message}; {}", way_to_a_node(&message));
            return Some(Self { reason: Reason::Unschedulable, message });
        }
        let status = pod.status.as_ref()?;
        // What a policy of the cluster put before the server's container keeps it from being made. One that has ended well, or runs beside
        // the server, is ready, and no other one is.
        let before = status.init_container_statuses.iter().flatten().filter(|container| !container.ready);
        before
            .chain(status.container_statuses.iter().flatten())
            .find_map(|container| Self::of_container(&name, container))
    }

    fn of_container(pod: &str, container: &ContainerStatus) -> Option<Self> {
        let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
        let waits_with = waiting.and_then(|waiting| waiting.reason.as_deref());
        let ended = [&container.state, &container.last_state]
            .into_iter()
            .find_map(|state| state.as_ref()?.terminated.as_ref()?.reason.as_deref());
        let (reason, message) = match (waits_with, ended) {
            (Some("ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull"), _) => {
                let image = &container.image;
                let says = format!("cannot have its image {image}: `kubectl describe pod {pod}` says why");
                (Reason::ImagePullBackOff, says)
            }
            (_, Some("OOMKilled")) if !container.ready => {
                // Of the server's own the remedy is ours to name.
                let says = match container.name.as_str() {
                    SERVER_CONTAINER => {
                        "took more than its memory and was ended: raise spec.resources.memory".to_owned()
                    }
                    other => {
                        format!("had its container {other} ended, which took more than its memory: give that one more")
                    }
                };
                (Reason::OOMKilled, says)
            }
            // Kubelet says so between two tries alone, and what lasts is not over while the next one runs.
            (Some("CrashLoopBackOff"), _) => (Reason::CrashLoopBackOff, crashes(pod, &container.name)),
            (_, Some(_)) if !container.ready && container.restart_count >= CRASH_LOOP_RESTARTS => {
                (Reason::CrashLoopBackOff, crashes(pod, &container.name))
            }
            (Some("ContainerCreating" | "PodInitializing") | None, _) => return None,
            (Some(other), _) => {
                (Reason::CreateContainerError, format!("waits with {other}: `kubectl describe pod {pod}` says why"))
            }
        };
        Some(Self { reason, message: format!("pod {pod} {message}") })
    }

    /// Why a pod was ended that will not come back, or never began, where its node did it.
    pub(super) fn of_over(pod: &Pod) -> Option<Self> {
        let status = pod.status.as_ref().filter(|status| status.phase.as_deref() == Some("Failed"))?;
        let reason = status.reason.as_deref().filter(|reason| !reason.is_empty())?;
        let message = status.message.as_deref().unwrap_or("no reason given");
        // What follows are figures of that moment.
        let message = [". ", ", requested:"].iter().fold(message, |text, end| text.split(end).next().unwrap_or(text));
        let message = message.trim_end_matches(['.', ' ']);
        if reason == "Evicted" {
            let message = format!("pod {} was evicted: {message}", pod.name_any());
            return Some(Self { reason: Reason::Evicted, message });
        }
        // Its successor may fare alike, again and again, each with a name of its own.
        let message = format!(
            "a node would not run a pod, or ended it ({reason}): {message}; where that happens to its successors, too, put right \
             what it says, or keep pods off that node (kubectl cordon)"
        );
        Some(Self { reason: Reason::PodFailed, message })
    }

    /// The Deployment may not make pods: a quota, or an admission policy.
    pub(super) fn of_refusal(message: Option<&str>) -> Self {
        let message = of_refusal(message.unwrap_or("no reason given"));
        Self { reason: Reason::FailedCreate, message: format!("pods are refused: {message}") }
    }

    /// An object is not there without which a pod's container is not made.
    pub(super) fn of_absent_object(pod: &str, absent: &PodObject) -> Self {
        let PodObject { object, field } = absent;
        let reason = match object.kind {
            ObjectKind::ConfigMap | ObjectKind::Authorities => WaitReason::ConfigMapNotFound,
            ObjectKind::Secret => WaitReason::SecretNotFound,
        };
        let (kind, name) = (object.kind.as_str(), &object.name);
        let message = format!("pod {pod} waits for {kind} {name} ({field}), which is not there: create it");
        Self { reason: Reason::Waits(reason), message }
    }

    /// A volume keeps a pod's containers from being made, as the kubelet says.
    pub(super) fn of_volume(pod: &str, failure: &str) -> Self {
        let message = format!("pod {pod} waits for a volume: {failure}; put that right, and the pod goes on by itself");
        Self { reason: Reason::FailedMount, message }
    }

    /// A pod runs and nobody hears of it.
    fn of_no_report(pod: &str) -> Self {
        let seconds = REPORT_TIMEOUT.as_secs();
        let message = format!(
            "pod {pod} has run for more than {seconds} s, does not answer, and reports nothing: see `kubectl logs {pod} -c {SERVER_CONTAINER}`, and \
             whether its network lets it reach the API server"
        );
        Self { reason: Reason::NoReport, message }
    }

    /// A pod's containers could not be made for long: kubelet tells of images, volumes and networks in Events alone.
    fn of_creation(pod: &str) -> Self {
        let seconds = CREATING_TIMEOUT.as_secs();
        let message = format!(
            "pod {pod} has waited for more than {seconds} s for its image, its volumes, its network or its init containers: `kubectl describe pod {pod}` says for which"
        );
        Self { reason: Reason::ContainerCreating, message }
    }
}

fn crashes(pod: &str, container: &str) -> String {
    format!("ends again and again: see `kubectl logs {pod} -c {container} --previous`")
}

/// What helps a pod to a node, by what the scheduler says of those that there are.
fn way_to_a_node(message: &str) -> String {
    const DISK: &str = "ephemeral-storage";
    if message.contains("persistentvolumeclaim") && message.contains("not found") {
        return "create it, or correct the claimName".to_owned();
    }
    if message.contains("unbound immediate PersistentVolumeClaims") {
        return "see `kubectl get pvc`: the claim needs a volume, or a storage class that makes one".to_owned();
    }
    let lacking = || message.split("Insufficient ").skip(1);
    let mut ways = vec!["add such a node"];
    if lacking().any(|what| what.starts_with(DISK)) {
        ways.push("lower spec.cache.sizeLimit, which pods ask for as disk");
    }
    if lacking().any(|what| !what.starts_with(DISK)) {
        ways.push("lower spec.resources");
    }
    if ["taint", "affinity", "selector", "unschedulable"].iter().any(|what| message.contains(what)) {
        ways.push("let these pods onto one that there is (its taints, labels or a cordon keep them off)");
    }
    ways.join(", or ")
}

/// When a pod whose containers are still being made has waited for too long, if it is one.
pub(super) fn creation_limit(pod: &Pod) -> Option<Timestamp> {
    let status = pod.status.as_ref()?;
    // It says PodInitializing of those that others are run before.
    let creating = |container: &ContainerStatus| {
        let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
        let reason = waiting.and_then(|waiting| waiting.reason.as_deref());
        matches!(reason, Some("ContainerCreating" | "PodInitializing"))
    };
    let waits = status.container_statuses.as_ref().is_some_and(|all| all.iter().any(creating));
    let since = status.start_time.as_ref().filter(|_| waits)?.0;
    Some(since + SignedDuration::try_from(CREATING_TIMEOUT).unwrap_or(SignedDuration::MAX))
}

/// The trouble of a pod's creation, where `limit` is past.
pub(super) fn of_slow_creation(pod: &str, limit: Option<Timestamp>, now: Timestamp) -> Option<Trouble> {
    limit.filter(|limit| *limit <= now).map(|_| Trouble::of_creation(pod))
}

/// When a pod that runs, and is not ready, should have said why, if it is one.
pub(super) fn report_limit(pod: &Pod) -> Option<Timestamp> {
    let server = pod.status.as_ref()?.container_statuses.iter().flatten().find(|one| one.name == SERVER_CONTAINER)?;
    let running = server.state.as_ref().filter(|_| !server.ready)?.running.as_ref()?;
    Some(running.started_at.as_ref()?.0 + SignedDuration::try_from(REPORT_TIMEOUT).unwrap_or(SignedDuration::MAX))
}

/// The trouble of a pod's silence, where `limit` is past.
pub(super) fn of_silence(pod: &str, limit: Option<Timestamp>, now: Timestamp) -> Option<Trouble> {
    limit.filter(|limit| *limit <= now).map(|_| Trouble::of_no_report(pod))
}
