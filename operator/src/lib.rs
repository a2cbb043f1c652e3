//! Gantry's operator: keeps every InferenceService as its spec asks, and carries out its rollouts.
//!
//! ```text
//! watches ─▶ observe ─▶ validate ─▶ decide (pure) ─▶ build (pure) ─▶ act ─▶ status
//!            stores      Valid*      Plan             Children        writes that differ only
//! ```
//!
//! `controller` reads as that sequence. Absent on purpose: any change of the user's spec, any restart of a pod for a new
//! model or for a new operator, any state that is not in the API: a killed operator goes on where the objects say it was.
//!
//! # What the operator may do, and why
//!
//! Cluster-wide (a ClusterRole), because services may be in any namespace:
//!
//! | group | resource | verbs | why |
//! |---|---|---|---|
//! | gantry.dev | inferenceservices | list, watch, patch | the watch, which is handed on to agents; patch takes off a finalizer of releases before |
//! | gantry.dev | inferenceservices/finalizers | update | owner references with `blockOwnerDeletion` |
//! | gantry.dev | inferenceservices/status | patch | the status by server-side apply; entries of gone pods; handed on to agents |
//! | gantry.dev | modelversions | list, watch, create, delete | stamps versions, removes those beyond the history limit |
//! | gantry.dev | modelversions/status | patch | their status |
//! | apps | deployments | get, list, watch, create, patch | the pods; a server-side apply that creates needs create |
//! | core | services, serviceaccounts | get, list, watch, create, patch | children |
//! | core | pods | get, list, watch | readiness, counts, and whether a reporter is gone |
//! | rbac.authorization.k8s.io | roles, rolebindings | get, list, watch, create, patch | the agents' rights |
//! | policy | poddisruptionbudgets | get, list, watch, create, patch | child |
//! | networking.k8s.io | networkpolicies | get, list, watch, create, patch | child |
//! | core | configmaps | get | never read: may be handed on to the agents of a service, by name (golden prompts) |
//! | core | secrets | get | never read: may be handed on to the agents of a service, by name (credentials of a source) |
//! | events.k8s.io | events | create, patch | transitions |
//!
//! In its own namespace (a Role): coordination.k8s.io leases: create; get and update on its own lease by name.
//!
//! Granting `get` on one Secret needs either that right or `escalate` and `bind` on roles. The right itself is the smaller
//! one: with `escalate` and `bind` the operator could give itself every right in every namespace, reading Secrets included.

pub mod act;
pub mod build;
pub mod controller;
pub mod decide;
pub mod events;
pub mod http;
pub mod lease;
pub mod limits;
pub mod metrics;
pub mod objects;
pub mod observe;
pub mod status;
mod text;
pub mod validate;
mod volumes;

#[cfg(test)]
mod testing;
