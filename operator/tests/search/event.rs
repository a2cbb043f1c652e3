//! What can happen.

use gantry_crds::status::GateName;

use super::scenario::Ask;

/// What happens next. Pods are meant by their place, versions by their model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Event {
    /// The node of a pod is back.
    NodeBack(u8),
    /// Versions can be loaded in a pod again.
    Sound(u8),
    /// The workers of a version answer again.
    WorkerBack(u8, u8),
    /// The watch brings the newest object.
    See(u8),
    /// The gates of a version end as they must.
    GatesEnd(u8, u8),
    /// A version is unloaded.
    Retired(u8, u8),
    /// The agent writes its entry.
    Write(u8),
    /// The workers of a version die whose nature that is.
    Dies(u8),
    /// The figures of a candidate whose nature that is pass a limit.
    Worse(u8),
    /// The Deployment's controller makes or replaces a pod.
    Deployment,
    /// A pass of the operator.
    Operator,
    /// What an agent waits for is due.
    Wait(u8),
    /// The next deadline of the operator has come.
    Time,
    /// The user asks for something else.
    Edit(Option<Ask>),
    /// The user asks for so many pods.
    Scale(i32),
    /// The Secret that versions are judged by gets another content.
    SecretChanges,
    // What follows are faults.
    /// The next deadline comes although others still have something to do.
    Slow,
    /// The watch brings what stood in the object before the last change.
    SeeLate(u8),
    /// A gate refuses a version in this pod alone, this once.
    GateRefuses(u8, u8, GateName),
    /// The gates of a candidate begin to wait in this pod alone, for what never comes.
    GatesWait(u8, u8),
    /// The workers of a version fail in this pod.
    WorkerFails(u8, u8),
    /// The figures of a candidate pass a limit in this pod alone.
    Breaches(u8),
    /// The container begins anew: before or after each write, since these are events of their own.
    Restarts(u8),
    PodDies(u8),
    NodeLost(u8),
    Trouble(u8),
    /// The operator dies after so many writes of its pass.
    Crash(u8),
    /// A pass of the operator from the object, and the versions, as they were before the last change.
    StaleObject,
    /// A pass from pods as they were before the last change.
    StalePods,
}

impl Event {
    pub(super) fn is_fault(self) -> bool {
        use Event::{
            Breaches, Crash, GateRefuses, GatesWait, NodeLost, PodDies, Restarts, SeeLate, Slow, StaleObject,
            StalePods, Trouble, WorkerFails,
        };
        matches!(
            self,
            Slow | SeeLate(_)
                | GateRefuses(..)
                | GatesWait(..)
                | WorkerFails(..)
                | Breaches(_)
                | Restarts(_)
                | PodDies(_)
                | NodeLost(_)
                | Trouble(_)
                | Crash(_)
                | StaleObject
                | StalePods
        )
    }

    pub(super) fn is_users(self) -> bool {
        matches!(self, Self::Edit(_) | Self::Scale(_) | Self::SecretChanges)
    }

    /// Whether it may end answers, as the operator and agents may not.
    pub(super) fn may_silence(self) -> bool {
        self.is_fault() || matches!(self, Self::Dies(_) | Self::Scale(_) | Self::Deployment)
    }
}
