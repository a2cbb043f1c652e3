//! A service as the API server has it, with what its spec asks of a version, or of its gates, that this release does not know. Where
//! CRDs are of a later release that is not carried out, and must be said. Other fields may have a default in those CRDs, so that
//! nobody has asked for them.

use std::borrow::Cow;

use gantry_crds::InferenceService;
use kube::{Resource, core::ObjectMeta};
use serde::{Deserialize, Deserializer};

use crate::limits::UNKNOWN_FIELDS_TOLD;

/// Notes the [unknown](gantry_crds::InferenceServiceSpec::unknown) fields of a service's spec while it is read.
#[derive(Clone, Debug)]
pub(super) struct Noting(pub InferenceService);

impl<'de> Deserialize<'de> for Noting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut unknown = Vec::new();
        let mut service: InferenceService = serde_ignored::deserialize(deserializer, |path| {
            // A field that may be absent is a step of its own in the path.
            let path = path.to_string().replace(".?", "");
            let path = path.strip_prefix("spec.");
            let path = path.filter(|path| is_asked_for(path) && unknown.len() < UNKNOWN_FIELDS_TOLD);
            unknown.extend(path.map(str::to_owned));
        })?;
        service.spec.unknown = unknown;
        Ok(Self(service))
    }
}

/// Whether nothing but a user sets a field of this path: such fields have no defaults.
fn is_asked_for(path: &str) -> bool {
    ["model.", "runtime.", "rollout.gates.", "rollout.canary.", "rollout.rollback.signals."]
        .iter()
        .any(|part| path.starts_with(part))
}

impl Resource for Noting {
    type DynamicType = <InferenceService as Resource>::DynamicType;
    type Scope = <InferenceService as Resource>::Scope;

    fn kind(kind: &Self::DynamicType) -> Cow<'_, str> {
        InferenceService::kind(kind)
    }

    fn group(kind: &Self::DynamicType) -> Cow<'_, str> {
        InferenceService::group(kind)
    }

    fn version(kind: &Self::DynamicType) -> Cow<'_, str> {
        InferenceService::version(kind)
    }

    fn plural(kind: &Self::DynamicType) -> Cow<'_, str> {
        InferenceService::plural(kind)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.meta_mut()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;
    use crate::validate::{ProblemKind, validate};

    fn read(gates: Value, scheduling: Value) -> InferenceService {
        let source = json!({"uri": "http://models/m.gguf", "sha256": "a".repeat(64)});
        let spec = json!({"model": {"servedName": "m", "source": source}, "scheduling": scheduling,
            "rollout": {"gates": gates}});
        let object = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"name": "chat", "new": 1}, "spec": spec, "status": {"later": {}}});
        serde_json::from_value::<Noting>(object).unwrap().0
    }

    #[test]
    fn a_gate_of_a_later_release_is_not_taken_for_carried_out() {
        let known = read(json!({"drift": {"maxKl": "0.1"}}), json!({"later": 1}));
        assert_eq!(known.spec.unknown, [""; 0]);
        validate(&known).unwrap();

        let later = read(json!({"drift": {"by": "Topic"}, "toxicity": {"most": "1%"}}), json!({}));
        assert_eq!(later.spec.unknown, ["rollout.gates.drift.by", "rollout.gates.toxicity"]);
        let problems = validate(&later).unwrap_err();
        assert_eq!(problems.0.iter().map(|problem| problem.kind).collect::<Vec<_>>(), [ProblemKind::NotSupported]);
        let told = problems.to_string();
        assert!(told.starts_with("spec") && told.contains("rollout.gates.drift.by, rollout.gates.toxicity"), "{told}");
    }
}
