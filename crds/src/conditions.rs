//! Condition types and reasons as enums, and how a condition is set without touching what did not change.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::status::WaitReason;

macro_rules! text_enum {
    (
        $(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident),+ $(,)? }
        $($(#[$others_doc:meta])* $others:ident($of:ident))?
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant,)+ $($(#[$others_doc])* $others($of))? }

        impl $name {
            /// The name as it stands in YAML.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($variant),)+
                    $(Self::$others(other) => <$of>::as_str(other),)?
                }
            }
        }
    };
}

text_enum!(
    /// Conditions of both kinds.
    ConditionType {
        /// The service answers.
        Available,
        /// It answers with what the spec asks for.
        UpToDate,
        /// Both.
        Ready,
        /// The operator is working towards the spec (kstatus).
        Reconciling,
        /// The operator cannot get there without the user (kstatus).
        Stalled,
        /// Every pod that there should be answers.
        PodsReady,
        /// Everything in the spec is carried out by this release.
        Supported,
        /// Pods have the version's file.
        Fetched,
        /// Its digest and header are right.
        Verified,
        /// It fits into memory.
        Fits,
        /// It passed every gate, in enough pods.
        Validated,
        /// It answers requests.
        Serving,
    }
);

text_enum!(
    /// Reasons of conditions.
    Reason {
        /// Everything is as asked.
        AsRequested,
        /// Pods answer.
        PodsReady,
        /// No pod answers.
        NoPodReady,
        /// No version has passed its gates yet.
        NoActiveVersion,
        /// A rollout is in progress.
        RollingOut,
        /// Waits for pods.
        WaitingForPods,
        /// A gate refused the version.
        GateFailed,
        /// The version was taken back.
        RolledBack,
        /// The time was up.
        DeadlineExceeded,
        /// The spec asks for something that this release does not carry out.
        NotSupported,
        /// The spec holds a value that cannot be used.
        InvalidSpec,
        /// Not known yet.
        Pending,
        /// It passed.
        Passed,
        /// Another version is served.
        Superseded,
        /// A child could not be written.
        ApplyFailed,
        /// A child could not be written since an object of its name belongs to somebody else.
        NameTaken,
        /// No node takes a pod.
        Unschedulable,
        /// A pod's image cannot be had.
        ImagePullBackOff,
        /// A pod took more than its memory.
        OOMKilled,
        /// A pod's node ended it.
        Evicted,
        /// A pod's node would not run it, or ended it, for another reason.
        PodFailed,
        /// A pod ends again and again.
        CrashLoopBackOff,
        /// A pod's worker died too often.
        WorkerFailed,
        /// A pod's container cannot be made.
        CreateContainerError,
        /// A pod waits for its volumes, its network or its init containers.
        ContainerCreating,
        /// A pod runs, does not answer, and reports nothing.
        NoReport,
        /// A volume of a pod cannot be attached or mounted.
        FailedMount,
        /// Pods are refused, by a quota or a policy.
        FailedCreate,
        /// The account of a pod was deleted and made anew: it has no token any more.
        AccountReplaced,
        /// The object is being deleted.
        Deleting,
        /// The spec says that pods are not to switch.
        Paused,
        /// The spec says that the version is not to be rolled out.
        Aborted,
    }
    /// Pods cannot go on, and say why.
    Waits(WaitReason)
);

impl From<WaitReason> for Reason {
    fn from(reason: WaitReason) -> Self {
        match reason {
            WaitReason::Unknown(_) => Self::WaitingForPods,
            WaitReason::GateFailed => Self::GateFailed,
            known => Self::Waits(known),
        }
    }
}

/// What a condition says, before it meets the one that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewCondition {
    /// Type.
    pub type_: ConditionType,
    /// `None` is Unknown.
    pub status: Option<bool>,
    /// Reason.
    pub reason: Reason,
    /// Cause and next action, in a sentence.
    pub message: String,
}

/// Sets `new` in `conditions`: the transition time moves only with the status, so that a settled object never changes.
pub fn set_condition(conditions: &mut Vec<Condition>, new: NewCondition, generation: Option<i64>, now: &Time) {
    let status = match new.status {
        Some(true) => "True",
        Some(false) => "False",
        None => "Unknown",
    };
    let type_ = new.type_.as_str();
    let old = conditions.iter_mut().find(|condition| condition.type_ == type_);
    let last_transition_time = match &old {
        Some(old) if old.status == status => old.last_transition_time.clone(),
        _ => now.clone(),
    };
    let condition = Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: new.reason.as_str().to_owned(),
        message: new.message,
        observed_generation: generation,
        last_transition_time,
    };
    match old {
        Some(old) => *old = condition,
        None => conditions.push(condition),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn time(text: &str) -> Time {
        serde_json::from_value(serde_json::json!(text)).unwrap()
    }

    #[test]
    fn the_transition_time_moves_only_with_the_status() {
        let (first, later) = (time("2026-01-01T00:00:00Z"), time("2026-01-01T00:01:00Z"));
        let new = |status, message: &str| NewCondition {
            type_: ConditionType::Ready,
            status: Some(status),
            reason: Reason::AsRequested,
            message: message.to_owned(),
        };
        let mut conditions = Vec::new();
        set_condition(&mut conditions, new(true, "a"), Some(1), &first);
        set_condition(&mut conditions, new(true, "b"), Some(2), &later);
        assert_eq!(conditions.len(), 1);
        assert_eq!((conditions[0].last_transition_time.clone(), conditions[0].message.as_str()), (first, "b"));
        set_condition(&mut conditions, new(false, "c"), Some(2), &later);
        assert_eq!(conditions[0].last_transition_time, later);
    }

    #[test]
    fn what_pods_wait_for_is_a_reason_by_the_same_name() {
        for known in WaitReason::ALL {
            assert_eq!(Reason::from(*known).as_str(), known.as_str());
        }
        assert_eq!(Reason::from(WaitReason::Unknown("Sulking")), Reason::WaitingForPods);
    }
}
