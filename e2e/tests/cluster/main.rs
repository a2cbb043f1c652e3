//! What must be true of Gantry on a real cluster. `make test` runs these with a cluster; without one they are ignored.
//!
//! One test at a time (`--test-threads=1`): they share one machine, and some of them stop what all of them need. Each has
//! a namespace of its own. They run in the order of their names, and `z_audit` judges what all others have done.
#![allow(clippy::unwrap_used)]

mod access;
mod answers;
mod blue_green;
mod canary;
mod children;
mod deletion;
mod evictions;
mod faults;
mod fleet;
mod guards;
mod hold;
mod latch;
mod lifecycle;
mod monitoring;
mod plugin;
mod rejections;
mod responses;
mod swap;
mod troubles;
mod y_scale;
mod z_audit;
