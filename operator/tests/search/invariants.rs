//! What must hold in every state that can be reached, by name, and the rules that are broken on purpose to show that the
//! search would find it.

/// What must hold in every state that can be reached, or from each of them on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Invariant {
    /// No step of the operator or of an agent takes the answer from a pod that gave one, unless the pod is replaced while
    /// others answer: with a good version there, zero pods answer only where pods or workers died.
    SomeoneAnswers,
    /// A version answers only after a pod has passed it through every gate as a candidate, and once it was made the active one.
    OnlyValidatedAnswer,
    /// A share of a pod's requests goes to a candidate only where that has passed in the pod and is asked for so, to none that was
    /// taken back, and shares only rise within a rollout.
    SharesAreProved,
    /// At rest, all pods answer with the active version and hold no other.
    PodsAgree,
    /// From every state, without further faults, the world comes to rest, with the version active that is asked for or the
    /// verdict that it deserves. Nothing is written any more then, and no agent asks for more and more.
    ItEnds,
    /// A pod tries one version at a time.
    OneCandidate,
    /// No agent unloads the version that it answers with, and the operator deletes none that the newest status names.
    NothingThatServesIsDeleted,
    /// What befalls one pod alone does not have a good version refused or taken back, in a fleet that can tell.
    OnePodIsNotTheFleet,
    /// The rules of each single write (`rules`).
    EveryWriteKeepsTheRules,
}

impl Invariant {
    pub(super) fn broken(self, how: impl Into<String>) -> Violation {
        Violation { invariant: self, how: how.into() }
    }
}

/// An invariant does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Violation {
    pub(super) invariant: Invariant,
    pub(super) how: String,
}

/// A rule that the search itself breaks, around the functions of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    /// An agent unloads what it has before it loads a candidate.
    UnloadsFirst,
    /// The operator takes every pod for prepared.
    TakesAllForPrepared,
    /// One agent does not switch.
    IgnoresSwitch,
    /// The operator's clock stands still.
    ClockStandsStill,
    /// An agent begins with the next candidate while the gates of the one before are at it.
    BeginsTwice,
    /// The operator deletes what is not asked for.
    DeletesTheRest,
    /// The operator hears only pods that refuse.
    HearsOnlyRefusals,
    /// The operator forgets the way back when it switches.
    ForgetsTheWayBack,
    /// One agent goes on with the share of a candidate that was taken back.
    KeepsTheShare,
    /// The operator quarantines whoever is there.
    QuarantinesAll,
    /// The operator has each step of a canary begin with the first share again.
    LetsSharesFall,
    /// The operator gives a share to a candidate that nobody has prepared.
    SharesAtOnce,
}

impl Broken {
    /// Every one, and the invariant that it breaks.
    pub(super) const ALL: [(Self, Invariant); 12] = [
        (Self::UnloadsFirst, Invariant::SomeoneAnswers),
        (Self::TakesAllForPrepared, Invariant::OnlyValidatedAnswer),
        (Self::IgnoresSwitch, Invariant::PodsAgree),
        (Self::ClockStandsStill, Invariant::ItEnds),
        (Self::BeginsTwice, Invariant::OneCandidate),
        (Self::DeletesTheRest, Invariant::NothingThatServesIsDeleted),
        (Self::HearsOnlyRefusals, Invariant::OnePodIsNotTheFleet),
        (Self::ForgetsTheWayBack, Invariant::EveryWriteKeepsTheRules),
        (Self::KeepsTheShare, Invariant::SharesAreProved),
        (Self::QuarantinesAll, Invariant::EveryWriteKeepsTheRules),
        (Self::LetsSharesFall, Invariant::EveryWriteKeepsTheRules),
        (Self::SharesAtOnce, Invariant::EveryWriteKeepsTheRules),
    ];

    /// Whether it is a rule of canaries.
    pub(super) fn is_of_canary(self) -> bool {
        matches!(self, Self::KeepsTheShare | Self::LetsSharesFall | Self::SharesAtOnce)
    }
}
