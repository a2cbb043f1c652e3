//! What a pod's agent decides about the versions that the pod holds, without a clock, a process or a connection.
//!
//! [`Desired`] says what the status of the service asks of a pod, [`plan`] what to do next, and [`Versions`] where each version
//! is in its life ([`Phase`]) and what follows from what becomes of it; its [`Snapshot`] and [`report::entry`] are what the
//! pod says about that, [`report::Cadence`] when. The agent of `gantry-server` carries this out beside clocks and processes,
//! and the operator's tests search it together with the operator's own decisions, so that no rule is written twice.
//! Absent: how a version passes its gates, what its workers do, and any decision about the fleet.

mod desired;
mod health;
mod hold;
pub mod limits;
pub mod line;
mod phase;
pub mod plan;
pub mod report;
mod share;
mod snapshot;
mod told;
mod versions;

pub use desired::{Candidate, Desired};
pub use health::WorkerHealth;
pub use line::{Lines, Refusal};
pub use phase::{Next, Phase, Step, next};
pub use share::{Canary, Conversation, Share};
pub use snapshot::Snapshot;
pub use told::Told;
pub use versions::{Entry, Outcome, Versions};
