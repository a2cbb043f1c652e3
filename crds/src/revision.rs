//! Which models are the same: names of ModelVersions and the hash that a rejection is latched to.
//!
//! A version is known by what it loads (the digest where there is one, else the pinned address), the name it serves
//! under and the settings that need a reload. The same file from another address is the same version, and so are the same
//! settings in other words ([`canonical`](crate::canonical)).

use sha2::{Digest, Sha256 as Hasher};

use crate::inference_service::{InferenceServiceSpec, ModelSpec, RuntimeSpec, SourceSpec};

/// Hexadecimal digits of the hash in a version's name: 40 bits keep fifty versions of a service apart.
const NAME_HASH_DIGITS: usize = 10;

/// Name of the ModelVersion for `model` under `runtime`, e.g. `chat-5f9c01ab23`.
#[must_use]
pub fn version_name(service: &str, model: &ModelSpec, runtime: &RuntimeSpec) -> String {
    let hash = hash(&identity(model, runtime));
    format!("{service}-{}", &hash[..NAME_HASH_DIGITS])
}

/// Whether both are one version, whatever release named them and however they were spelled.
#[must_use]
pub fn is_same(one: (&ModelSpec, &RuntimeSpec), other: (&ModelSpec, &RuntimeSpec)) -> bool {
    identity(one.0, one.1) == identity(other.0, other.1)
}

/// What a version is known by.
fn identity<'a>(model: &'a ModelSpec, runtime: &RuntimeSpec) -> (String, &'a str, RuntimeSpec) {
    let file = match &model.source.sha256 {
        Some(digest) => format!("sha256:{digest}"),
        None => format!("{:?} {:?}", model.source.uri, model.source.pvc),
    };
    let mut runtime = runtime.canonical();
    if let Some(draft) = runtime.speculative.as_mut().and_then(|speculative| speculative.draft.as_mut())
        && draft.sha256.is_some()
    {
        *draft = SourceSpec { sha256: draft.sha256.clone(), ..SourceSpec::default() };
    }
    (file, &model.served_name, runtime)
}

/// The fields that a version is judged by: what a gate advises to change is one of them, or a part of one.
pub const JUDGED_FIELDS: [&str; 12] = [
    "spec.model",
    "spec.runtime",
    "spec.rollout.gates",
    "spec.resources",
    "spec.cache",
    "spec.scheduling",
    "spec.pod.affinity.nodeAffinity",
    "spec.pod.env",
    "spec.pod.modelVolumes",
    "spec.pod.nodeSelector",
    "spec.pod.runtimeClassName",
    "spec.pod.securityContext",
];

/// Hash of [`JUDGED_FIELDS`] in their canonical spelling: while it stays the same, a rejection stands.
#[must_use]
pub fn judged_by(spec: &InferenceServiceSpec) -> String {
    let InferenceServiceSpec { model, runtime, rollout, resources, cache, scheduling, pod, .. } = spec;
    let (runtime, gates) = (runtime.canonical(), rollout.gates.canonical());
    let judged = hash(&(model, runtime, gates, resources.canonical(), cache.canonical(), scheduling.canonical()));
    // A service without it is judged by the same as before there was any.
    let judged = pod.for_a_model().map_or(judged.clone(), |pod| hash(&(&judged[..32], pod)));
    judged[..32].to_owned()
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
        inference_service::{EmbeddingsSpec, KvLayout, PrefixCacheSpec, SpeculativeSpec},
        scalars::{PositiveQuantity, Sha256},
    };

    fn model(uri: &str, digest: &str) -> ModelSpec {
        ModelSpec {
            served_name: "chat".to_owned(),
            source: SourceSpec {
                uri: Some(uri.to_owned()),
                sha256: Some(Sha256(digest.repeat(64))),
                ..SourceSpec::default()
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
        let infill = RuntimeSpec { spm_infill: Some(true), ..RuntimeSpec::default() };
        let embeddings = RuntimeSpec { embeddings: Some(EmbeddingsSpec::default()), ..RuntimeSpec::default() };
        for other in [workers, layout, kept, steps, template, infill, embeddings] {
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
            (
                "spec.pod.affinity.nodeAffinity",
                serde_json::json!({"preferredDuringSchedulingIgnoredDuringExecution": []}),
            ),
            ("spec.pod.env", serde_json::json!([{"name": "CUDA_VISIBLE_DEVICES", "value": "1"}])),
            ("spec.pod.modelVolumes", serde_json::json!([{"claimName": "models"}])),
            ("spec.pod.nodeSelector", serde_json::json!({"gpu": "h100"})),
            ("spec.pod.runtimeClassName", "nvidia".into()),
            ("spec.pod.securityContext.supplementalGroups", serde_json::json!([7])),
        ];
        for (field, (changed, value)) in JUDGED_FIELDS.into_iter().zip(changes) {
            let changed: &str = changed;
            assert!(changed.starts_with(field), "{changed} {field}");
            assert_ne!(judged(changed, value), before, "{changed}");
        }
        assert_eq!(judged("spec.replicas", 2.into()), before, "scaling is no new judgement");
        let api = serde_json::json!({"keysSecretRef": {"name": "keys"}, "modelAliases": ["gpt-4o"], "anyModel": true});
        assert_eq!(judged("spec.api", api), before, "who may ask is no matter of a model's");
        assert_eq!(judged("spec.pod.labels", serde_json::json!({"team": "a"})), before, "nor how pods are called");
        for (field, one, other) in [
            ("spec.resources.memory", "1Gi", "1024Mi"),
            ("spec.cache.sizeLimit", "20Gi", "21474836480"),
            ("spec.scheduling.queueTimeout", "90s", "1m30s"),
            ("spec.rollout.gates.memory.headroom", "7%", "7.0%"),
            ("spec.runtime.gpuMemory", "1.5Gi", "1536Mi"),
        ] {
            assert_eq!(judged(field, one.into()), judged(field, other.into()), "{field}");
            assert_ne!(judged(field, one.into()), before, "{field}");
        }
    }

    #[test]
    fn another_spelling_is_no_other_version() {
        let model = model("https://a/m.gguf", "a");
        let runtime = |memory: &str| RuntimeSpec { gpu_memory: Some(memory.into()), ..RuntimeSpec::default() };
        let (one, same, other) = (runtime("1Gi"), runtime("1024Mi"), runtime("1G"));
        assert_eq!(version_name("chat", &model, &one), version_name("chat", &model, &same));
        assert!(is_same((&model, &one), (&model, &same)) && !is_same((&model, &one), (&model, &other)));
        let moved = ModelSpec { source: SourceSpec { uri: None, ..model.source.clone() }, ..model.clone() };
        assert!(is_same((&model, &one), (&moved, &one)), "the file is known by its digest");
        let renamed = ModelSpec { served_name: "other".to_owned(), ..model.clone() };
        assert!(!is_same((&model, &one), (&renamed, &one)));
    }

    /// An operator that knows more settings must not take every service for changed.
    #[test]
    fn settings_that_are_left_out_change_no_name() {
        assert_eq!(version_name("chat", &model("https://a/m.gguf", "a"), &RuntimeSpec::default()), "chat-17b05364b8");
    }

    /// An older agent, and an older operator, take a field that they do not know for one that somebody set. So what is added here is
    /// optional, and not there unless it is set: no default in the CRD, and nothing that is written for it.
    #[test]
    fn what_is_added_to_versions_and_gates_has_no_default() {
        fn collect(path: &str, schema: &serde_json::Value, found: &mut Vec<String>) {
            if schema.get("default").is_some() {
                found.push(path.to_owned());
            }
            for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
                collect(&format!("{path}.{name}"), inner, found);
            }
        }
        let crd = serde_json::to_value(<crate::InferenceService as kube::CustomResourceExt>::crd()).unwrap();
        let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
        let mut found = Vec::new();
        collect("model", &spec["model"], &mut found);
        collect("runtime", &spec["runtime"], &mut found);
        for (gate, schema) in spec["rollout"]["properties"]["gates"]["properties"].as_object().unwrap() {
            collect(gate, schema, &mut found);
        }
        let rollout = &spec["rollout"]["properties"];
        collect("canary", &rollout["canary"], &mut found);
        collect("signals", &rollout["rollback"]["properties"]["signals"], &mut found);
        found.sort_unstable();
        assert_eq!(found, DEFAULTS_FOR_EVER);
        let keys = |value: serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let mut written = keys(serde_json::to_value(RuntimeSpec::default()).unwrap());
        written.sort_unstable();
        assert_eq!(written, ["cacheType", "contextSize", "gpuLayers", "parallel", "threads"]);
    }

    const DEFAULTS_FOR_EVER: [&str; 14] = [
        "drift.reference",
        "memory",
        "memory.headroom",
        "prompts.minPass",
        "runtime",
        "runtime.cacheType",
        "runtime.contextSize",
        "runtime.gpuLayers",
        "runtime.gpuSplit.mainGpu",
        "runtime.gpuSplit.mode",
        "runtime.parallel",
        "runtime.speculative.maxTokens",
        "runtime.speculative.promptLookup",
        "runtime.threads",
    ];
}
