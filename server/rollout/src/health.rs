//! The life of a worker, and of the version that its workers make.

/// The life of a worker, or of a version: see [`WorkerHealth::of_version`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerHealth {
    /// It loads the model for the first time.
    Loading,
    /// It answers.
    Ready,
    /// It died and another one is on its way.
    Restarting {
        /// Crashes in the window, this one included.
        attempt: u32,
        /// What became of the last one.
        reason: String,
    },
    /// It crashed too often, or never loaded; it is still tried again from time to time.
    Failed {
        /// What became of the last one.
        reason: String,
    },
    /// Retired; final.
    Stopped,
}

impl WorkerHealth {
    /// The one table of what may follow what.
    #[must_use]
    pub fn may_become(&self, next: &Self) -> bool {
        match (self, next) {
            (Self::Stopped, _) | (_, Self::Loading) => false,
            (_, Self::Stopped) => true,
            (Self::Loading, next) => matches!(next, Self::Ready),
            (Self::Ready, next) => matches!(next, Self::Restarting { .. } | Self::Failed { .. }),
            (Self::Restarting { .. } | Self::Failed { .. }, _) => true,
        }
    }

    /// A label for metrics and logs.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Restarting { .. } => "restarting",
            Self::Failed { .. } => "failed",
            Self::Stopped => "stopped",
        }
    }

    /// The life of a version with these workers: that of the one that is nearest to answering. A version is `Ready`
    /// while one of its workers is, and `Stopped` when all are.
    #[must_use]
    pub fn of_version(workers: &[Self]) -> Self {
        workers.iter().min_by_key(|health| health.distance()).cloned().unwrap_or(Self::Stopped)
    }

    /// How far from answering.
    fn distance(&self) -> (u32, u32) {
        match self {
            Self::Ready => (0, 0),
            Self::Loading => (1, 0),
            Self::Restarting { attempt, .. } => (2, *attempt),
            Self::Failed { .. } => (3, 0),
            Self::Stopped => (4, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_as_well_as_its_best_worker() {
        let restarting = |attempt| WorkerHealth::Restarting { attempt, reason: format!("died {attempt}") };
        let failed = || WorkerHealth::Failed { reason: "no".to_owned() };
        for (workers, version) in [
            (vec![WorkerHealth::Ready, failed()], WorkerHealth::Ready),
            (vec![restarting(3), restarting(1), failed()], restarting(1)),
            (vec![failed(), WorkerHealth::Stopped], failed()),
            (vec![WorkerHealth::Stopped, WorkerHealth::Stopped], WorkerHealth::Stopped),
            (vec![WorkerHealth::Stopped, WorkerHealth::Ready], WorkerHealth::Ready),
            (vec![], WorkerHealth::Stopped),
        ] {
            assert_eq!(WorkerHealth::of_version(&workers), version, "{workers:?}");
        }
    }
}
