//! Which models are the same: names of ModelVersions and the hash that a rejection is latched to.
//!
//! A version is known by what it loads (the digest where there is one, else the pinned address), the name it serves
//! under and the settings that need a reload. The same file from another address is the same version.

use sha2::{Digest, Sha256 as Hasher};

use crate::inference_service::{InferenceServiceSpec, ModelSpec, RuntimeSpec, SourceSpec};

/// Hexadecimal digits of the hash in a version's name: 40 bits keep fifty versions of a service apart.
const NAME_HASH_DIGITS: usize = 10;

/// Name of the ModelVersion for `model` under `runtime`, e.g. `chat-5f9c01ab23`.
#[must_use]
pub fn version_name(service: &str, model: &ModelSpec, runtime: &RuntimeSpec) -> String {
    let identity = match &model.source.sha256 {
        Some(digest) => format!("sha256:{digest}"),
        None => format!("{:?} {:?}", model.source.uri, model.source.pvc),
    };
    let mut runtime = runtime.clone();
    if let Some(draft) = runtime.speculative.as_mut().and_then(|speculative| speculative.draft.as_mut())
        && draft.sha256.is_some()
    {
        *draft = SourceSpec { uri: None, pvc: None, sha256: draft.sha256.clone(), secret_ref: None };
    }
    let hash = hash(&(identity, &model.served_name, runtime));
    format!("{service}-{}", &hash[..NAME_HASH_DIGITS])
}

/// The fields that a version is judged by: what a gate advises to change is one of them, or a part of one.
pub const JUDGED_FIELDS: [&str; 6] =
    ["spec.model", "spec.runtime", "spec.rollout.gates", "spec.resources", "spec.cache", "spec.scheduling"];

/// Hash of [`JUDGED_FIELDS`]: while it stays the same, a rejection stands.
#[must_use]
pub fn judged_by(spec: &InferenceServiceSpec) -> String {
    let InferenceServiceSpec { model, runtime, rollout, resources, cache, scheduling, .. } = spec;
    hash(&(model, runtime, &rollout.gates, resources, cache, scheduling))[..32].to_owned()
}

fn hash(value: &impl serde::Serialize) -> String {
    // These types serialise without failing: no maps with other keys than strings, no foreign code.
    hex::encode(Hasher::digest(serde_json::to_vec(value).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{
        inference_service::{KvLayout, PrefixCacheSpec, SpeculativeSpec},
        scalars::{PositiveQuantity, Sha256},
    };

    fn model(uri: &str, digest: &str) -> ModelSpec {
        ModelSpec {
            served_name: "chat".to_owned(),
            source: SourceSpec {
                uri: Some(uri.to_owned()),
                pvc: None,
                sha256: Some(Sha256(digest.repeat(64))),
                secret_ref: None,
            },
        }
    }

    #[test]
    fn a_version_is_known_by_its_digest_and_settings() {
        let runtime = RuntimeSpec::default();
        let name = version_name("chat", &model("https://a/m.gguf", "a"), &runtime);
        assert!(name.starts_with("chat-") && name.len() == "chat-".len() + NAME_HASH_DIGITS);
        assert_eq!(name, version_name("chat", &model("https://b/m.gguf", "a"), &runtime));
        assert_ne!(name, version_name("chat", &model("https://a/m.gguf", "b"), &runtime));
        let other = RuntimeSpec { parallel: 4, ..runtime };
        assert_ne!(name, version_name("chat", &model("https://a/m.gguf", "a"), &other));
        let workers = RuntimeSpec { workers: Some(2), ..RuntimeSpec::default() };
        let layout = RuntimeSpec { kv_layout: Some(KvLayout::Unified), ..RuntimeSpec::default() };
        let disk = Some(PositiveQuantity::from("1Gi"));
        let prefix_cache = Some(PrefixCacheSpec { disk, ..PrefixCacheSpec::default() });
        let kept = RuntimeSpec { prefix_cache, ..RuntimeSpec::default() };
        let steps = RuntimeSpec { step_ms_target: Some(50), ..RuntimeSpec::default() };
        let chat_template = Some("{{ messages[0].content }}".to_owned());
        let template = RuntimeSpec { chat_template, ..RuntimeSpec::default() };
        for other in [workers, layout, kept, steps, template] {
            assert_ne!(name, version_name("chat", &model("https://a/m.gguf", "a"), &other));
        }
    }

    #[test]
    fn a_draft_model_is_known_by_its_digest_too() {
        let name = |uri: &str, digest: &str| {
            let draft = Some(model(uri, digest).source);
            let speculative = Some(SpeculativeSpec { draft, prompt_lookup: false, max_tokens: 8 });
            let runtime = RuntimeSpec { speculative, ..RuntimeSpec::default() };
            version_name("chat", &model("https://a/m.gguf", "a"), &runtime)
        };
        assert_eq!(name("https://a/d.gguf", "b"), name("https://b/d.gguf", "b"));
        assert_ne!(name("https://a/d.gguf", "b"), name("https://a/d.gguf", "c"));
    }

    #[test]
    fn every_field_that_a_gate_may_advise_to_change_is_judged_by() {
        let spec = serde_json::json!({"replicas": 1, "model": {"servedName": "m", "source": {"uri": "https://h/m.gguf", "sha256": "a".repeat(64)}}});
        let judged = |field: &str, value: serde_json::Value| {
            let mut spec = spec.clone();
            let mut parent = &mut spec;
            for key in field.trim_start_matches("spec.").split('.') {
                parent = &mut parent[key];
            }
            *parent = value;
            judged_by(&serde_json::from_value(spec).unwrap())
        };
        let before = judged_by(&serde_json::from_value(spec.clone()).unwrap());
        let changes = [
            ("spec.model.source.uri", "https://h/n.gguf".into()),
            ("spec.runtime.contextSize", 512.into()),
            ("spec.rollout.gates.memory.headroom", "1%".into()),
            ("spec.resources.memory", "2Gi".into()),
            ("spec.cache.sizeLimit", "2Gi".into()),
            ("spec.scheduling.maxQueue", 7.into()),
        ];
        for (field, (changed, value)) in JUDGED_FIELDS.into_iter().zip(changes) {
            let changed: &str = changed;
            assert!(changed.starts_with(field), "{changed} {field}");
            assert_ne!(judged(changed, value), before, "{changed}");
        }
        assert_eq!(judged("spec.replicas", 2.into()), before, "scaling is no new judgement");
        let api = serde_json::json!({"keysSecretRef": {"name": "keys"}, "modelAliases": ["gpt-4o"], "anyModel": true});
        assert_eq!(judged("spec.api", api), before, "who may ask is no matter of a model's");
    }

    /// An operator that knows more settings must not take every service for changed.
    #[test]
    fn settings_that_are_left_out_change_no_name() {
        assert_eq!(version_name("chat", &model("https://a/m.gguf", "a"), &RuntimeSpec::default()), "chat-17b05364b8");
    }
}
