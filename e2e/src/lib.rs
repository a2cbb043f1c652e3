//! End-to-end harness for Gantry: a load generator that checks every answer, a model store with faults, and what tests
//! on a real cluster need.
//!
//! Three layers. [`sse`], [`answer`], [`models`] and [`faults`] are pure: what a response must look like, what the demo
//! models answer, how a model file is damaged. [`load`] and [`store`] are the two programs of the `gantry-e2e` binary
//! and work without Kubernetes. [`harness`] talks to a cluster. The tests in `tests/cluster` are only about what must
//! be true; how it is found out stands here.
//!
//! Absent: mocks. Whatever a test needs to see fail is made to fail in the real part.

pub mod answer;
pub mod audit;
pub mod faults;
pub mod harness;
pub mod load;
pub mod models;
pub mod sse;
pub mod stats;
pub mod store;

/// Chooses the cryptography of TLS for the process; calling it again does nothing.
pub fn install_crypto_provider() {
    // An error means that one is installed already, which is what is wanted.
    drop(rustls::crypto::ring::default_provider().install_default());
}
