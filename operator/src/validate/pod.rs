//! `spec.pod`, as pods are built from it: what would take a pod away from its service, hide what it needs, or make it more than
//! the Pod Security Standard `restricted` allows is refused here as well.

use gantry_crds::{
    inference_service::{OBJECT_NAME_RULE, is_object_name},
    pod::{
        MAX_POD_SPEC_BYTES, OWN_FOLDERS, OWN_KEYS, OWN_LABELS, OWN_VARIABLES, OWN_VOLUME_NAMES, OWN_VOLUMES, PodSpec,
        STORE_VARIABLES,
    },
};

use super::{ApiSettings, Collector, NamedObject, ObjectKind, PodObject, StorePlace};

const ENV: &str = "spec.pod.env";
const VOLUMES: &str = "spec.pod.volumes";
const MOUNTS: &str = "spec.pod.volumeMounts";

impl Collector {
    /// What a spec asks for, beside what `api` has pods made with.
    pub(super) fn pod(&mut self, spec: &PodSpec, api: &ApiSettings) -> PodSpec {
        let bytes = spec.canonical().map_or(0, |text| text.len());
        if bytes > MAX_POD_SPEC_BYTES {
            self.invalid(
                "spec.pod",
                format!("it has {bytes} bytes as JSON, and at most {MAX_POD_SPEC_BYTES} are taken: put long values into a ConfigMap"),
            );
        }
        let of_gantry = |key: &&String| key.starts_with(OWN_KEYS);
        if let Some(key) = spec.labels.keys().find(|key| of_gantry(key) || OWN_LABELS.contains(&key.as_str())) {
            self.invalid("spec.pod.labels", format!("pods are selected by {key}: use another key"));
        }
        if let Some(key) = spec.annotations.keys().find(of_gantry) {
            self.invalid("spec.pod.annotations", format!("{key} is Gantry's: use a key that is not of {OWN_KEYS}"));
        }
        self.variables(spec, api);
        self.volumes(spec);
        let names = [
            ("spec.pod.priorityClassName", &spec.priority_class_name),
            ("spec.pod.runtimeClassName", &spec.runtime_class_name),
            ("spec.pod.serviceAccountName", &spec.service_account_name),
        ];
        for (field, name) in names {
            if let Some(name) = name {
                self.object_name(field, name);
            }
        }
        if spec.security_context.as_ref().and_then(|security| security.run_as_user).is_some_and(|user| user < 1) {
            self.invalid(
                "spec.pod.securityContext.runAsUser",
                "the server does not run as root: use a number from 1 on",
            );
        }
        spec.clone()
    }

    fn variables(&mut self, spec: &PodSpec, api: &ApiSettings) {
        let of_store = matches!(&api.responses, Some(store) if matches!(store.place, StorePlace::S3 { .. }));
        for (i, variable) in spec.env.iter().enumerate() {
            let name = variable.name.as_str();
            if name.starts_with(OWN_VARIABLES) {
                self.invalid(ENV, format!("{name} is the operator's: use the field of the spec that it comes from"));
            } else if of_store && STORE_VARIABLES.contains(&name) {
                self.invalid(ENV, format!("{name} comes from spec.api.responseStore.s3: leave it out"));
            } else if spec.env.iter().take(i).any(|before| before.name == name) {
                self.invalid(ENV, format!("{name} is there twice: give it once"));
            }
        }
    }

    fn volumes(&mut self, spec: &PodSpec) {
        for (i, volume) in spec.volumes.iter().enumerate() {
            let name = volume.name.as_str();
            if OWN_VOLUME_NAMES.contains(&name) || name.starts_with(OWN_VOLUMES) {
                self.invalid(VOLUMES, format!("{name} is the name of a volume of the server's own: use another"));
            } else if spec.volumes.iter().take(i).any(|before| before.name == name) {
                self.invalid(VOLUMES, format!("{name} is there twice: give it once"));
            }
        }
        for mount in &spec.volume_mounts {
            let path = mount.mount_path.as_str();
            if !spec.volumes.iter().any(|volume| volume.name == mount.name) {
                self.invalid(MOUNTS, format!("{} is no volume of {VOLUMES}: add it, or correct the name", mount.name));
            } else if !is_plain(path) {
                self.invalid(MOUNTS, format!("{path:?} is no absolute path without . and ..: correct mountPath"));
            } else if let Some(own) = OWN_FOLDERS.into_iter().find(|own| hides(path, own)) {
                self.invalid(
                    MOUNTS,
                    format!("a mount at {path} would hide what the server has in {own}: use another folder"),
                );
            }
        }
        for volume in &spec.model_volumes {
            if !is_object_name(&volume.claim_name) {
                let advice = format!("{:?} is no name of a claim: use {OBJECT_NAME_RULE}", volume.claim_name);
                self.invalid("spec.pod.modelVolumes", advice);
            }
        }
    }
}

/// Whether a path is absolute and has no names that stand for others.
fn is_plain(path: &str) -> bool {
    let mut names = path.split('/');
    names.next() == Some("") && path.len() > 1 && names.all(|name| !name.is_empty() && !name.starts_with('.'))
}

/// Whether what is mounted at `path` would be over, in or above `own`.
fn hides(path: &str, own: &str) -> bool {
    let within = |inner: &str, outer: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    within(path, own) || within(own, path)
}

/// The objects without which a pod's container is not made, as far as they are not optional.
pub(super) fn objects(spec: &PodSpec) -> Vec<PodObject> {
    let object = |kind, name: &str, field| PodObject { object: NamedObject { kind, name: name.to_owned() }, field };
    let needed = |optional: Option<bool>| optional != Some(true);
    let mut objects = Vec::new();
    for source in spec.env.iter().filter_map(|variable| variable.value_from.as_ref()) {
        let secret = source.secret_key_ref.as_ref().filter(|key| needed(key.optional));
        let config_map = source.config_map_key_ref.as_ref().filter(|key| needed(key.optional));
        objects.extend(secret.map(|key| object(ObjectKind::Secret, &key.name, ENV)));
        objects.extend(config_map.map(|key| object(ObjectKind::ConfigMap, &key.name, ENV)));
    }
    for volume in &spec.volumes {
        let secret = volume.secret.as_ref().filter(|secret| needed(secret.optional));
        objects
            .extend(secret.and_then(|secret| Some(object(ObjectKind::Secret, secret.secret_name.as_ref()?, VOLUMES))));
        let config_map = volume.config_map.as_ref().filter(|config_map| needed(config_map.optional));
        objects.extend(config_map.map(|config_map| object(ObjectKind::ConfigMap, &config_map.name, VOLUMES)));
        for part in volume.projected.iter().filter_map(|projected| projected.sources.as_ref()).flatten() {
            let secret = part.secret.as_ref().filter(|secret| needed(secret.optional));
            let config_map = part.config_map.as_ref().filter(|config_map| needed(config_map.optional));
            objects.extend(secret.map(|secret| object(ObjectKind::Secret, &secret.name, VOLUMES)));
            objects.extend(config_map.map(|config_map| object(ObjectKind::ConfigMap, &config_map.name, VOLUMES)));
        }
    }
    objects
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use gantry_crds::InferenceService;
    use serde_json::{Value, json};

    use super::*;
    use crate::validate::{PodSettings, validate};

    fn service(pod: Value, api: Value) -> InferenceService {
        let source = json!({"uri": "https://models/a.gguf", "sha256": "a".repeat(64)});
        let spec = json!({"model": {"servedName": "chat", "source": source}, "pod": pod, "api": api});
        InferenceService::new("chat", serde_json::from_value(spec).unwrap())
    }

    fn settings(pod: Value) -> PodSettings {
        validate(&service(pod, json!({}))).unwrap().pod
    }

    #[test]
    fn what_would_break_a_pod_is_refused_by_its_field() {
        let volume = |name: &str| json!([{"name": name, "emptyDir": {}}]);
        let mount = |path: &str| json!({"volumes": volume("v"), "volumeMounts": [{"name": "v", "mountPath": path}]});
        let mut cases = vec![
            (json!({"labels": {"app.kubernetes.io/name": "mine"}}), "spec.pod.labels"),
            (json!({"labels": {"gantry.dev/service": "other"}}), "spec.pod.labels"),
            (json!({"annotations": {"gantry.dev/restart": "now"}}), "spec.pod.annotations"),
            (json!({"env": [{"name": "GANTRY_SERVICE", "value": "other"}]}), ENV),
            (json!({"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}), ENV),
            (json!({"volumes": volume("cache")}), VOLUMES),
            (json!({"volumes": volume("gantry-models")}), VOLUMES),
            (json!({"volumeMounts": [{"name": "none", "mountPath": "/mnt/x"}]}), MOUNTS),
            (json!({"serviceAccountName": "No_Name"}), "spec.pod.serviceAccountName"),
            (json!({"priorityClassName": "a/b"}), "spec.pod.priorityClassName"),
            (json!({"runtimeClassName": ""}), "spec.pod.runtimeClassName"),
            (json!({"modelVolumes": [{"claimName": "../x"}]}), "spec.pod.modelVolumes"),
            (json!({"securityContext": {"runAsUser": 0}}), "spec.pod.securityContext.runAsUser"),
            (json!({"annotations": {"long": "x".repeat(MAX_POD_SPEC_BYTES)}}), "spec.pod"),
        ];
        for path in [
            "/",
            "/tmp",
            "/tmp/x",
            "/etc",
            "/usr/share/x",
            "/var/lib/gantry/models",
            "/var",
            "/mnt/../tmp",
            "mnt",
            "//tmp",
            "/mnt/",
        ] {
            cases.push((mount(path), MOUNTS));
        }
        for (pod, field) in cases {
            let problems = validate(&service(pod.clone(), json!({}))).unwrap_err();
            assert_eq!((problems.0.len(), problems.0[0].field), (1, field), "{pod}: {problems}");
            assert!(problems.any_invalid(), "{pod}");
        }
        for path in ["/mnt/x", "/tmpx", "/etc/pki", "/var/lib/other", "/usrlocal", "/models"] {
            assert!(validate(&service(mount(path), json!({}))).is_ok(), "{path}");
        }
    }

    #[test]
    fn variables_of_a_store_are_refused_where_there_is_one() {
        let pod = json!({"env": [{"name": "AWS_REGION", "value": "eu-central-1"}]});
        let store = |store: Value| json!({"responseStore": store});
        assert!(validate(&service(pod.clone(), store(json!({"pvc": {"claimName": "shared"}})))).is_ok());
        let problems = validate(&service(pod, store(json!({"s3": {"bucket": "responses"}})))).unwrap_err().to_string();
        assert!(problems.starts_with("spec.pod.env: AWS_REGION comes from spec.api.responseStore.s3"), "{problems}");
    }

    #[test]
    fn pods_are_made_with_the_objects_that_are_not_optional() {
        let key = |name: &str, optional: bool| json!({"name": name, "key": "k", "optional": optional});
        let pod = settings(json!({
            "env": [
                {"name": "A", "valueFrom": {"secretKeyRef": key("s1", false)}},
                {"name": "B", "valueFrom": {"configMapKeyRef": key("c1", false)}},
                {"name": "C", "valueFrom": {"secretKeyRef": key("s2", true)}},
            ],
            "volumes": [
                {"name": "a", "secret": {"secretName": "s3"}},
                {"name": "b", "configMap": {"name": "c2", "optional": true}},
                {"name": "c", "projected": {"sources": [{"secret": {"name": "s4"}}, {"configMap": {"name": "c3"}}]}},
            ],
        }));
        let objects: Vec<_> =
            pod.objects().into_iter().map(|one| (one.object.kind.as_str(), one.object.name)).collect();
        let named = |kind: &'static str, name: &str| (kind, name.to_owned());
        let wanted = [
            named("Secret", "s1"),
            named("ConfigMap", "c1"),
            named("Secret", "s3"),
            named("Secret", "s4"),
            named("ConfigMap", "c3"),
        ];
        assert_eq!(objects, wanted);
    }
}
