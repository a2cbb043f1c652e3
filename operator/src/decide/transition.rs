//! The steps that a rollout makes, for Events, metrics and the log.

use gantry_crds::{scalars::Percent, status::GateName};

/// A step of a rollout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transition {
    /// Pods are asked to prepare a version.
    Started {
        /// The version.
        version: String,
        /// The candidate that was given up for it.
        instead_of: Option<String>,
    },
    /// The candidate is no longer wanted.
    Cancelled {
        /// The candidate.
        version: String,
        /// Why.
        why: &'static str,
    },
    /// Another share of the requests goes to the candidate.
    Canary {
        /// The candidate.
        version: String,
        /// Its share from now on.
        share: Percent,
        /// Which step this is, from 1 on.
        step: i32,
        /// How many there are.
        steps: i32,
    },
    /// The pods are prepared and switch.
    Committed {
        /// The version they switch to.
        version: String,
    },
    /// The pods have switched.
    Baking {
        /// The version that is watched.
        version: String,
    },
    /// The rollout is done.
    Settled {
        /// The version that stays.
        version: String,
    },
    /// A version was refused before it answered.
    Rejected {
        /// The version.
        version: String,
        /// The gate that refused it.
        gate: GateName,
        /// Why, and what to do.
        message: String,
    },
    /// Pods switch back.
    RollingBack {
        /// The version that is taken back.
        version: String,
        /// The version they switch back to.
        to: String,
        /// Why.
        message: String,
    },
    /// All pods have switched back.
    RolledBack {
        /// The version that was taken back.
        version: String,
    },
}

impl Transition {
    /// The version that it is about.
    #[must_use]
    pub fn version(&self) -> &str {
        match self {
            Self::Started { version, .. }
            | Self::Cancelled { version, .. }
            | Self::Canary { version, .. }
            | Self::Committed { version }
            | Self::Baking { version }
            | Self::Settled { version }
            | Self::Rejected { version, .. }
            | Self::RollingBack { version, .. }
            | Self::RolledBack { version } => version,
        }
    }
}
