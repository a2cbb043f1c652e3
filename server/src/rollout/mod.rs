//! The versions that this pod holds, and the way from one to the next.
//!
//! [`Desired`] says what is asked, [`plan`](plan::plan) (pure) what to do next, and the [`Manager`], one task that owns
//! every version's [`Phase`], does it: it starts gates and retirements as tasks of their own, takes their outcomes as
//! events, sets the router's pointer, and publishes a [`Snapshot`] after each event. Absent: where `Desired` comes from
//! and who reads the snapshot ([`crate::agent`]), and the gates themselves ([`crate::gates`]).

mod desired;
mod manager;
mod phase;
pub mod plan;
mod snapshot;
mod told;

pub use desired::{Candidate, Desired, Settings};
pub use manager::Manager;
pub use phase::{Next, Phase, Step, next};
pub use snapshot::Snapshot;
