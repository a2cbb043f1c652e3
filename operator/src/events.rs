//! Kubernetes Events, on transitions only: what `kubectl describe` shows of a rollout's history.
//!
//! An Event that cannot be written is logged and forgotten: the status holds all that matters. The same text again is counted
//! with the Event that is there; another one is an Event of its own, since a counted Event keeps its first text.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use gantry_crds::{InferenceService, ModelVersion, conditions::Reason, status::RolloutStatus};
use k8s_openapi::{api::core::v1::ObjectReference, apimachinery::pkg::apis::meta::v1::Condition};
use kube::{
    Client, Resource, ResourceExt,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tracing::warn;

use crate::{
    build::OPERATOR,
    decide::Transition,
    limits::{self, EVENT_TEXTS},
    status::PodsEvent,
};

/// Writes Events about services.
pub struct Events {
    client: Client,
    reporter: Reporter,
    /// One for each of the last texts: a recorder counts Events of one reason about one object together, whatever they say.
    recorders: Mutex<VecDeque<(String, Recorder)>>,
}

impl Events {
    /// Events reported by the operator in the pod `instance`.
    #[must_use]
    pub fn new(client: Client, instance: String) -> Self {
        let reporter = Reporter { controller: OPERATOR.to_owned(), instance: Some(instance) };
        Self { client, reporter, recorders: Mutex::default() }
    }

    /// Tells of a step of a rollout.
    pub async fn transition(&self, service: &InferenceService, transition: &Transition) {
        let (type_, reason, note) = describe(transition);
        let version = version_reference(service, transition.version());
        self.publish(service, type_, reason, "Rollout", note, Some(version)).await;
    }

    /// Tells that the spec cannot be carried out, or a child not be written, as its condition says.
    pub async fn refused(&self, service: &InferenceService, refused: Condition) {
        let of_child = [Reason::ApplyFailed, Reason::NameTaken].map(Reason::as_str);
        let action = if of_child.contains(&refused.reason.as_str()) { "Apply" } else { "Validate" };
        self.publish(service, EventType::Warning, &refused.reason, action, refused.message, None).await;
    }

    /// Tells that a pod is not there, and why, or that all are.
    pub async fn pods(&self, service: &InferenceService, event: PodsEvent) {
        let (type_, reason, note) = match event {
            PodsEvent::Trouble { reason, message } => (EventType::Warning, reason, message),
            PodsEvent::AllThere { message } => (EventType::Normal, "PodsReady".to_owned(), message),
        };
        self.publish(service, type_, &reason, "Pods", note, None).await;
    }

    /// Tells why pods cannot go on with a version. Once for each reason: they try again by themselves, again and again.
    pub async fn waits(&self, service: &InferenceService, rollout: &RolloutStatus) {
        let Some(reason) = rollout.wait_reason else { return };
        let note = format!("{}: {}", rollout.version, rollout.message.as_deref().unwrap_or("pods wait"));
        let version = version_reference(service, &rollout.version);
        self.publish(service, EventType::Warning, reason.as_str(), "Rollout", note, Some(version)).await;
    }

    /// The recorder of Events with this text.
    fn recorder(&self, note: &str) -> Recorder {
        let mut recorders = self.recorders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, recorder)) = recorders.iter().find(|(text, _)| text == note) {
            return recorder.clone();
        }
        if recorders.len() >= EVENT_TEXTS {
            recorders.pop_front();
        }
        let recorder = Recorder::new(self.client.clone(), self.reporter.clone());
        recorders.push_back((note.to_owned(), recorder.clone()));
        recorder
    }

    async fn publish(
        &self,
        service: &InferenceService,
        type_: EventType,
        reason: &str,
        action: &str,
        note: String,
        secondary: Option<ObjectReference>,
    ) {
        let note = limits::message(&note);
        let recorder = self.recorder(&note);
        let (reason, action) = (reason.to_owned(), action.to_owned());
        let event = Event { type_, reason, note: Some(note), action, secondary };
        if let Err(error) = recorder.publish(&event, &service.object_ref(&())).await {
            warn!(%error, event.reason, "an Event could not be written");
        }
    }
}

fn version_reference(service: &InferenceService, name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(ModelVersion::api_version(&()).into_owned()),
        kind: Some(ModelVersion::kind(&()).into_owned()),
        name: Some(name.to_owned()),
        namespace: service.namespace(),
        ..ObjectReference::default()
    }
}

/// Type, reason and note of the Event for a transition.
pub(crate) fn describe(transition: &Transition) -> (EventType, &'static str, String) {
    use EventType::{Normal, Warning};
    match transition {
        Transition::Started { version, instead_of: None } => {
            (Normal, "RolloutStarted", format!("pods prepare {version}"))
        }
        Transition::Started { version, instead_of: Some(old) } if old == version => {
            (Normal, "RolloutRestarted", format!("pods prepare {version} again: what it is judged by has changed"))
        }
        Transition::Started { version, instead_of: Some(old) } => {
            (Normal, "RolloutReplaced", format!("pods prepare {version} instead of {old}"))
        }
        Transition::Cancelled { version, why } => (Normal, "RolloutCancelled", format!("{version} is given up: {why}")),
        Transition::Canary { version, share, step, steps } => {
            (Normal, "RolloutCanary", format!("{share} of the requests go to {version} (step {step} of {steps})"))
        }
        Transition::Committed { version } => {
            (Normal, "RolloutCommitted", format!("enough pods have prepared {version}: all are told to switch"))
        }
        Transition::Baking { version } => (Normal, "RolloutBaking", format!("pods answer with {version}")),
        Transition::Settled { version } => (Normal, "RolloutDone", format!("{version} stays")),
        Transition::Rejected { version, message, .. } => {
            (Warning, "VersionRejected", format!("{version} was rejected: {message}"))
        }
        Transition::RollingBack { version, to, message } => {
            (Warning, "RollingBack", format!("pods switch back from {version} to {to}: {message}"))
        }
        Transition::RolledBack { version } => (Normal, "RolledBack", format!("{version} was taken back")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_enough_pods_do_is_not_said_of_all() {
        let version = "chat-1".to_owned();
        for transition in [Transition::Committed { version: version.clone() }, Transition::Baking { version }] {
            let (_, _, note) = describe(&transition);
            assert!(note.contains("chat-1") && !note.contains("every") && !note.contains("all pods"), "{note}");
        }
    }
}
