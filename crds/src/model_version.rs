//! An immutable model as it was asked for: stamped by the operator, never edited.

// Each printed column names its type, which the lint takes for one attribute that is given twice.
#![allow(clippy::duplicated_attributes)]

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::{
    inference_service::{ModelSpec, RuntimeSpec},
    status::ModelVersionStatus,
};

/// One distinct model of a service: what is loaded, and the settings that need a reload.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "gantry.dev",
    version = "v1alpha1",
    kind = "ModelVersion",
    plural = "modelversions",
    shortname = "mv",
    category = "gantry",
    namespaced,
    derive = "PartialEq",
    doc = "ModelVersion is one model of an InferenceService as it was asked for, stamped by the operator. Its status says how far its rollout came, and why.",
    status = "ModelVersionStatus",
    printcolumn(
        name = "Service",
        type_ = "string",
        priority = 1,
        json_path = ".spec.service",
        description = "InferenceService it belongs to"
    ),
    printcolumn(
        name = "Rev",
        type_ = "integer",
        json_path = ".spec.revision",
        description = "Counts the versions of the service"
    ),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase", description = "How far it came"),
    printcolumn(
        name = "Role",
        type_ = "string",
        json_path = ".status.role",
        description = "What it is to its service now"
    ),
    printcolumn(
        name = "Quant",
        type_ = "string",
        priority = 1,
        json_path = ".status.gguf.quantization",
        description = "Quantisation of the file"
    ),
    printcolumn(name = "Size", type_ = "string", json_path = ".status.gguf.size", description = "Size of the file"),
    printcolumn(
        name = "Progress",
        type_ = "string",
        json_path = ".status.progress.summary",
        description = "How far the pod is that is furthest behind"
    ),
    printcolumn(
        name = "Gates",
        type_ = "string",
        json_path = ".status.gateSummary",
        description = "What the gates said"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.reason",
        description = "Why it is where it is, in a word"
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        priority = 1,
        json_path = ".status.message",
        description = "The same in a sentence, with what to do"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf").message("a ModelVersion is immutable: edit spec.model of its InferenceService, and Gantry stamps a new one"))]
pub struct ModelVersionSpec {
    /// InferenceService it belongs to.
    #[schemars(length(max = 253))]
    pub service: String,
    /// Counts the service's versions from 1.
    pub revision: i64,
    /// The model.
    pub model: ModelSpec,
    /// The settings it is loaded with.
    pub runtime: RuntimeSpec,
}
