//! The life of a version in a pod, as one table.

/// Where a version is. One that is not there has no phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// It passes the gates; its worker, if there is one yet, answers nobody.
    Preparing,
    /// All that can be known of it before it is loaded is right; nothing of it is loaded.
    Checked,
    /// It is loaded, and the golden prompts are asked again for a new attempt.
    Checking,
    /// Its gates are being called off.
    Cancelling,
    /// It is loaded and can be switched to.
    Ready,
    /// It does not fit beside what is loaded now.
    Waiting,
    /// A gate refused it; nothing of it is loaded.
    Refused,
    /// Its last requests end, then its worker.
    Retiring,
}

impl Phase {
    /// The word for it in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Checked => "checked",
            Self::Checking => "checking",
            Self::Cancelling => "cancelling",
            Self::Ready => "ready",
            Self::Waiting => "waiting",
            Self::Refused => "refused",
            Self::Retiring => "retiring",
        }
    }
}

/// What happens to a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The gates begin.
    Prepare,
    /// The gates are called off.
    Cancel,
    /// It passed those gates that need nothing of it loaded.
    Checked,
    /// It passed.
    Passed,
    /// A gate refused it.
    Refused,
    /// The memory gate refused it, and room is expected.
    NoRoom,
    /// The gates are off.
    Cancelled,
    /// Its worker failed for good before it ever answered.
    WorkerFailed,
    /// It is unloaded.
    Retire,
    /// It is unloaded now.
    Retired,
    /// Nobody asks for it any more.
    Forget,
}

impl Step {
    /// The words for it in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Cancel => "cancel",
            Self::Checked => "checked",
            Self::Passed => "passed",
            Self::Refused => "refused",
            Self::NoRoom => "no room",
            Self::Cancelled => "cancelled",
            Self::WorkerFailed => "worker failed",
            Self::Retire => "retire",
            Self::Retired => "retired",
            Self::Forget => "forget",
        }
    }
}

/// What a step leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another phase.
    Phase(Phase),
    /// The version is not there any more.
    Gone,
}

/// The transitions; `None` is one that must not be.
#[must_use]
pub fn next(phase: Option<Phase>, step: Step) -> Option<Next> {
    use Next::{Gone, Phase as To};
    use Phase::{Cancelling, Checked, Checking, Preparing, Ready, Refused, Retiring, Waiting};
    Some(match (phase, step) {
        (None | Some(Checked | Waiting | Refused), Step::Prepare) => To(Preparing),
        (Some(Ready), Step::Prepare) => To(Checking),
        (Some(Preparing | Checking), Step::Cancel) => To(Cancelling),
        (Some(Preparing | Checking | Cancelling), Step::Passed) => To(Ready),
        (Some(Preparing), Step::Checked) => To(Checked),
        (Some(Preparing), Step::Refused) => To(Refused),
        (Some(Preparing), Step::NoRoom) => To(Waiting),
        // It stays loaded: it may be the way back of another version.
        (Some(Checking), Step::Refused) => To(Ready),
        (Some(Cancelling), Step::Checked | Step::Refused | Step::NoRoom | Step::Cancelled) => Gone,
        (Some(Ready), Step::WorkerFailed) => To(Refused),
        (Some(Ready), Step::Retire) => To(Retiring),
        (Some(Retiring), Step::Retired) => Gone,
        (Some(Checked | Waiting | Refused), Step::Forget) => Gone,
        _ => return None,
    })
}
