//! An immutable model as it was asked for: stamped by the operator, never edited.

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
    printcolumn(name = "Service", type_ = "string", json_path = ".spec.service"),
    printcolumn(name = "Rev", type_ = "integer", json_path = ".spec.revision"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Role", type_ = "string", json_path = ".status.role"),
    printcolumn(name = "Quant", type_ = "string", json_path = ".status.gguf.quantization"),
    printcolumn(name = "Size", type_ = "string", json_path = ".status.gguf.size"),
    printcolumn(name = "Progress", type_ = "string", json_path = ".status.progress.summary"),
    printcolumn(name = "Gates", type_ = "string", json_path = ".status.gateSummary"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.reason"),
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
