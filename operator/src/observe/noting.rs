//! A service as the API server has it, with the fields of its spec that this release does not know: where CRDs are of a later
//! release, what is not known is not carried out, and that must be said.

use std::borrow::Cow;

use gantry_crds::InferenceService;
use kube::{Resource, core::ObjectMeta};
use serde::{Deserialize, Deserializer};

/// Notes the [unknown](gantry_crds::InferenceServiceSpec::unknown) fields of a service's spec while it is read.
#[derive(Clone, Debug)]
pub(super) struct Noting(pub InferenceService);

impl<'de> Deserialize<'de> for Noting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut unknown = Vec::new();
        let mut service: InferenceService = serde_ignored::deserialize(deserializer, |path| {
            // A field that may be absent is a step of its own in the path.
            let path = path.to_string().replace(".?", "");
            unknown.extend(path.strip_prefix("spec.").map(str::to_owned));
        })?;
        service.spec.unknown = unknown;
        Ok(Self(service))
    }
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

    fn read(gates: Value) -> InferenceService {
        let source = json!({"uri": "http://models/m.gguf", "sha256": "a".repeat(64)});
        let spec = json!({"model": {"servedName": "m", "source": source}, "rollout": {"gates": gates}});
        let object = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"name": "chat", "new": 1}, "spec": spec, "status": {"later": {}}});
        serde_json::from_value::<Noting>(object).unwrap().0
    }

    #[test]
    fn a_gate_of_a_later_release_is_not_taken_for_carried_out() {
        let known = read(json!({"drift": {"maxKl": "0.1"}}));
        assert_eq!(known.spec.unknown, [""; 0]);
        validate(&known).unwrap();

        let later = read(json!({"drift": {"by": "Topic"}, "toxicity": {"most": "1%"}}));
        assert_eq!(later.spec.unknown, ["rollout.gates.drift.by", "rollout.gates.toxicity"]);
        let problems = validate(&later).unwrap_err();
        assert_eq!(problems.0.iter().map(|problem| problem.kind).collect::<Vec<_>>(), [ProblemKind::NotSupported]);
        let told = problems.to_string();
        assert!(told.starts_with("spec") && told.contains("rollout.gates.drift.by, rollout.gates.toxicity"), "{told}");
    }
}
