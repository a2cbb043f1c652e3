//! Gantry's inference server: one front process that speaks HTTP, and one worker process for each model it holds.
//!
//! A request's way: [`api`] checks its shape (`gantry-openai`), [`routing`] names the version that answers it,
//! [`version`] admits it and hands it over the worker's socket ([`protocol`]) to the child process ([`worker`]), whose
//! engine decodes; the events come back the same way and leave as JSON or server-sent events.
//!
//! llama.cpp ends its process on a failed assertion, so nothing in the front ever calls it: only [`worker`] builds an
//! engine. Absent here: what a model is and how it is decoded (`gantry-engine`), and what the fleet does
//! (`gantry-operator`).

pub mod agent;
pub mod api;
pub mod check;
pub mod config;
pub mod console;
pub mod descriptors;
pub mod fetch;
pub mod front;
pub mod gates;
pub mod hold;
mod journal;
pub mod keys;
pub mod limits;
pub mod metrics;
pub mod output;
pub mod peer;
pub mod processors;
pub mod protocol;
pub mod pull;
pub mod response_store;
pub mod rollout;
pub mod routing;
pub mod serve;
pub mod telemetry;
mod throttle;
pub mod validate;
pub mod version;
pub mod vital;
pub mod worker;
