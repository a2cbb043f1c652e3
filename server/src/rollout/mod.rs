//! Carries out what a pod is to do with its versions.
//!
//! An [`Assignment`] says what is asked and how; what follows from that is decided in `gantry_rollout`, which is pure. The
//! [`Manager`], one task that owns the versions, does it: it starts gates and retirements as tasks of their own, takes their
//! outcomes as events, sets the router's pointer, and publishes what the pod says after each event. Absent: where an
//! assignment comes from and who reads what is published ([`crate::agent`]), and the gates themselves ([`crate::gates`]).

mod assignment;
mod manager;

pub use assignment::{Assignment, Settings};
pub use manager::{Manager, Published};
