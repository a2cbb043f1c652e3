//! Who goes first: the priority of a request, and among those of one priority whose turn it is.
//!
//! Whoever submits requests of several clients gives each a start tag, as start-time fair queueing does (Goyal, Vin and Cheng,
//! 1996): of the requests of one priority the one with the lowest tag goes first, wherever they wait. Requests of one client
//! have tags that never fall, so those keep their order. Absent: how tags are found, which is whose clients they are.

use serde::{Deserialize, Serialize};

/// Who is served first. Within one priority clients have their [`Turn`]s and each client's requests the order of submission,
/// and waiting raises a request in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Priority {
    /// After everyone else; the first to be preempted.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Before everyone else; the last that is still served when memory is short.
    High,
}

impl Priority {
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();
    /// The highest first.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// The word for it, as protocols, labels and logs have it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }

    /// Which one a word is for.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.as_str() == word)
    }

    /// Its place among them, the lowest first.
    #[must_use]
    pub const fn rank(self) -> usize {
        self as usize
    }
}

/// See the module. `Default` is for those who serve one client: all its requests are in the order of submission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Turn {
    /// Names the client.
    pub client: u64,
    /// What the client has asked for before it, in some measure of work that is the same for all.
    pub start_tag: u64,
}
