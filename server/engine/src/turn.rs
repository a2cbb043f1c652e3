//! Whose a request is, and when its turn is among those of others.
//!
//! Whoever submits requests of several clients gives each a start tag, as start-time fair queueing does (Goyal, Vin and Cheng,
//! 1996): of the requests of one priority the one with the lowest tag goes first, wherever they wait. Requests of one client
//! have tags that never fall, so those keep their order. Absent: how tags are found, which is whose clients they are.

use serde::{Deserialize, Serialize};

/// See the module. `Default` is for those who serve one client: all its requests are in the order of submission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Turn {
    /// Names the client.
    pub client: u64,
    /// What the client has asked for before it, in some measure of work that is the same for all.
    pub start_tag: u64,
}
