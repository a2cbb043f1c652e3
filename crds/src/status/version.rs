//! The status of a ModelVersion.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::{FitStatus, GateResult, GgufStatus, Progress};
use crate::open::open_enum;

/// What is known of a version.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelVersionStatus {
    /// How far it came: for display, derived from the conditions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<VersionPhase>,
    /// What it is to its service now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<VersionRole>,
    /// Digest of its file, `sha256:<hex>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// What the file's header says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gguf: Option<GgufStatus>,
    /// Memory: the pod with the least room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<FitStatus>,
    /// Of the download, of loading, and of the golden prompts: the pod that is furthest behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// What the gates said: the worst over the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gates: Vec<GateResult>,
    /// Passed gates of those asked for, e.g. `5/5`, or the figure of the one that refused it, e.g. `3% of 20 prompts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate_summary: Option<String>,
    /// Why it is where it is, in a word: of one that was refused the gate, e.g. `PromptsFailed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The same in a sentence, with what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Fetched, Verified, Fits, Validated, Serving.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
}

open_enum!(
    /// How far a version came.
    VersionPhase {
        /// Stamped; no pod has begun.
        Pending,
        /// Pods fetch it.
        Fetching,
        /// Pods check and load it.
        Validating,
        /// Every pod can switch to it.
        Prepared,
        /// It answers a share of the requests.
        Canary,
        /// Pods switch to it.
        Promoting,
        /// It answers, and the previous one stays loaded.
        Baking,
        /// It answers.
        Active,
        /// Another one answers.
        Superseded,
        /// A gate refused it; it never answered.
        Rejected,
        /// It answered, and was taken back.
        RolledBack,
    }
);

open_enum!(
    /// What a version is to its service.
    VersionRole {
        /// It answers.
        Active,
        /// It is being validated.
        Candidate,
        /// It answered before and is kept loaded.
        Previous,
        /// It is kept as history.
        History,
    }
);
