#![allow(clippy::unwrap_used)]
//! What children look like, and what does not change them.

use gantry_crds::revision::version_name;
use serde_json::{Value, json};

use super::*;
use crate::validate::validate;

fn owner(patch: &Value) -> InferenceService {
    let mut object = json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "test", "uid": "the-uid"},
        "spec": {"replicas": 2, "model": {"servedName": "chat", "source": {"uri": "https://m/1.gguf", "sha256": "1".repeat(64)}}},
    });
    for (pointer, value) in patch.as_object().unwrap() {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        object.pointer_mut(parent).unwrap()[key] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn new_pods(image: &str) -> NewPods {
    NewPods { image: image.to_owned(), private_sources: true }
}

fn built(patch: &Value, image: &str, stored: Option<&StoredTemplate>) -> Children {
    built_for(patch, image, stored, None)
}

/// The same where the pods' account has this UID.
fn built_for(patch: &Value, image: &str, stored: Option<&StoredTemplate>, account_uid: Option<&str>) -> Children {
    let owner = owner(patch);
    let spec = validate(&owner).unwrap();
    let sides = sides(stored);
    let (new_pods, lent_secrets) = (new_pods(image), BTreeSet::new());
    build(&Inputs {
        owner: &owner,
        spec: &spec,
        versions: &[],
        lent_secrets: &lent_secrets,
        new_pods: &new_pods,
        sides: &sides,
        accounts: &BTreeSet::new(),
        account_uid,
        answers: true,
    })
}

/// One side that answers, with what was applied of it before.
fn sides(stored: Option<&StoredTemplate>) -> Sides {
    let blue = SideState { stored: stored.cloned(), ..SideState::default() };
    Sides { active: Side::Blue, is_labelled: true, other_replicas: 0, blue, green: SideState::default() }
}

fn stored(children: &Children) -> StoredTemplate {
    StoredTemplate::of(children.deployment.annotations()).unwrap()
}

fn pod(children: &Children) -> Value {
    serde_json::to_value(&children.deployment).unwrap()["spec"]["template"]["spec"].clone()
}

#[test]
fn pods_meet_the_restricted_standard() {
    let children = built(&json!({}), "server:1", None);
    let pod = pod(&children);
    let container = &pod["containers"][0];
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["runAsUser"], 65532);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(container["securityContext"]["capabilities"]["drop"], json!(["ALL"]));
    assert_eq!(container["args"], json!(["pod"]));
    assert_eq!(container["volumeMounts"][0]["mountPath"], "/var/cache/gantry");
    assert_eq!(pod["terminationGracePeriodSeconds"], 150);
    assert_eq!(pod["serviceAccountName"], "chat-gantry");
}

#[test]
fn a_part_of_a_second_of_drain_timeout_is_a_whole_one() {
    for (timeout, seconds) in [("500ms", 1), ("1500ms", 2), ("30s", 30)] {
        let pod = pod(&built(&json!({"/spec/rollout": {"drainTimeout": timeout}}), "server:1", None));
        let drain = json!({"name": "GANTRY_DRAIN_TIMEOUT", "value": seconds.to_string()});
        assert!(pod["containers"][0]["env"].as_array().unwrap().contains(&drain), "{timeout}: {pod}");
        assert_eq!(pod["terminationGracePeriodSeconds"], seconds + 30, "{timeout}");
    }
}

#[test]
fn the_template_holds_no_model() {
    let one = built(&json!({}), "server:1", None);
    let other = built(
        &json!({"/spec/model/source/sha256": "2".repeat(64), "/spec/model/servedName": "other", "/spec/runtime": {"parallel": 2}}),
        "server:1",
        Some(&stored(&one)),
    );
    assert_eq!(one.deployment, other.deployment);
    assert!(!serde_json::to_string(&one.deployment).unwrap().contains("1.gguf"));
}

#[test]
fn a_template_is_kept_until_its_inputs_change() {
    let old = built(&json!({}), "server:1", None);
    let upgraded = built(&json!({}), "server:2", Some(&stored(&old)));
    assert_eq!(old.deployment, upgraded.deployment);
    let changes = [
        json!({"/spec/resources": {"memory": "2Gi"}}),
        json!({"/spec/resources": {"gpu": {"count": 1}}}),
        json!({"/spec/rollout": {"drainTimeout": "30s"}}),
        json!({"/spec/cache": {"sizeLimit": "10Gi"}}),
        json!({"/metadata/annotations": {"gantry.dev/restart": "1"}}),
        json!({"/spec/api": {"keysSecretRef": {"name": "keys"}}}),
        json!({"/spec/api": {"corsOrigins": ["*"]}}),
        json!({"/spec/api": {"modelAliases": ["gpt-4o"]}}),
        json!({"/spec/api": {"anyModel": true}}),
        json!({"/spec/api": {"responseStore": {"pvc": {"claimName": "shared"}}}}),
        json!({"/spec/api": {"responseStore": {"s3": {"bucket": "responses"}, "ttl": "24h"}}}),
        json!({"/spec/pod": {"labels": {"team": "a"}}}),
        json!({"/spec/pod": {"tolerations": [{"operator": "Exists"}]}}),
    ];
    for change in changes {
        let changed = built(&change, "server:2", Some(&stored(&old)));
        assert_ne!(old.deployment.spec, changed.deployment.spec, "{change}");
        assert_eq!(pod(&changed)["containers"][0]["image"], "server:2");
    }
    let scaled = built(&json!({"/spec/replicas": 5}), "server:2", Some(&stored(&old)));
    assert_eq!(pod(&old), pod(&scaled));
}

#[test]
fn pods_are_replaced_when_their_account_is_made_anew_and_at_no_other_time() {
    let template = |children: &Children| children.deployment.spec.clone().unwrap().template;
    let again = |patch: Value, before: &Children, uid| built_for(&patch, "server:2", Some(&stored(before)), uid);
    let made = built(&json!({}), "server:1", None);
    // As an operator of before left it, too: which account pods had is not known, and is taken for the one that there is.
    let noted = again(json!({}), &made, Some("a"));
    assert_ne!(noted.deployment.metadata, made.deployment.metadata);
    assert_eq!(template(&noted), template(&made));
    assert_eq!(again(json!({}), &noted, Some("a")), noted);
    assert_eq!(again(json!({}), &noted, None), noted, "while it is away nothing is known");
    let anew = again(json!({}), &noted, Some("b"));
    let (mut before, mut after) = (template(&noted), template(&anew));
    let mut annotations = after.metadata.as_mut().unwrap().annotations.take().unwrap();
    assert_eq!(annotations.remove("gantry.dev/pod-account").as_deref(), Some("b"));
    assert_eq!(annotations, before.metadata.as_mut().unwrap().annotations.take().unwrap_or_default());
    assert_eq!(after, before, "and nothing else of it is another: not the image of this release");
    assert_eq!(again(json!({}), &anew, Some("b")), anew, "once");
    // A template of a later release keeps what this one does not know of it.
    let mut later = serde_json::to_value(&noted.deployment).unwrap();
    let mut known: Value =
        serde_json::from_str(noted.deployment.annotations()["gantry.dev/pod-template"].as_str()).unwrap();
    known["spec"]["fromLater"] = json!(1);
    later["metadata"]["annotations"]["gantry.dev/pod-template"] = known.to_string().into();
    let later: Deployment = serde_json::from_value(later).unwrap();
    let kept = built_for(&json!({}), "server:2", StoredTemplate::of(later.annotations()).as_ref(), Some("b"));
    assert!(kept.deployment.annotations()["gantry.dev/pod-template"].contains("fromLater"));
    // Pods of the user's own account have nothing of it.
    let own = json!({"/spec/pod": {"serviceAccountName": "mine"}});
    let mine = built_for(&own, "server:1", None, Some("a"));
    assert_eq!(template(&again(own, &mine, Some("b"))), template(&mine));
}

#[test]
fn pods_that_are_restarted_or_given_more_time_to_end_have_the_same_for_a_model() {
    let labels = |children: &Children| {
        children.deployment.spec.as_ref().unwrap().template.metadata.as_ref().unwrap().labels.clone().unwrap()
    };
    let pods =
        |patch: Value, stored: Option<&StoredTemplate>| TemplateId::of(&labels(&built(&patch, "server:1", stored)));
    let newest = |patch: Value, stored: Option<&StoredTemplate>| {
        TemplateId::newest(&validate(&owner(&patch)).unwrap().pod, Side::Blue, stored)
    };
    let before = built(&json!({}), "server:1", None);
    let kept = stored(&before);
    let old = pods(json!({}), None);
    for (what, patch, same) in [
        ("nothing", json!({}), true),
        ("a restart", json!({"/metadata/annotations": {"gantry.dev/restart": "now"}}), true),
        ("time to end", json!({"/spec/rollout": {"drainTimeout": "5m"}}), true),
        ("keys", json!({"/spec/api": {"keysSecretRef": {"name": "keys"}, "modelAliases": ["gpt-4o"]}}), true),
        ("memory", json!({"/spec/resources": {"memory": "2Gi"}}), false),
        ("a cache", json!({"/spec/cache": {"sizeLimit": "20Gi"}}), false),
        ("labels", json!({"/spec/pod": {"labels": {"team": "a"}, "priorityClassName": "high"}}), true),
        ("other nodes", json!({"/spec/pod": {"nodeSelector": {"gpu": "h100"}}}), false),
        ("a claim", json!({"/spec/pod": {"modelVolumes": [{"claimName": "models"}]}}), false),
    ] {
        let wanted = newest(patch.clone(), Some(&kept));
        assert_eq!(wanted.has_resources_of(&old), same, "{what}");
        assert_eq!(wanted, pods(patch.clone(), Some(&kept)), "{what}: it is known before there is any");
        let mut of_before = labels(&before);
        of_before.remove("gantry.dev/pod-resources").unwrap();
        let unlabelled = TemplateId::of(&of_before);
        assert_eq!(wanted.has_resources_of(&unlabelled), what == "nothing", "{what}: a pod of before");
    }
}

/// A text that means the same restarts nobody, and a release that knows more settings names the pods of a service without
/// them as before: the hash, once given out, is a promise.
#[test]
fn a_template_is_known_by_what_is_set_and_by_the_value_of_quantities() {
    let newest = |patch: Value| TemplateId::newest(&validate(&owner(&patch)).unwrap().pod, Side::Blue, None);
    let with = |memory: &str, cpu: &str, cache: &str| {
        newest(json!({
            "/spec/resources": {"memory": memory, "cpu": cpu},
            "/spec/cache": {"sizeLimit": cache},
        }))
    };
    let one = with("4Gi", "500m", "10Gi");
    for (memory, cpu, cache) in [("4096Mi", "0.5", "10Gi"), ("4294967296", "500m", "10240Mi"), ("4Gi", "0.500", "10Gi")]
    {
        assert_eq!(with(memory, cpu, cache), one, "{memory} {cpu} {cache}");
    }
    for (memory, cpu, cache) in [("4097Mi", "500m", "10Gi"), ("4Gi", "501m", "10Gi"), ("4Gi", "500m", "11Gi")] {
        assert_ne!(with(memory, cpu, cache), one, "{memory} {cpu} {cache}");
    }
    let pod = validate(&owner(&json!({"/spec/resources": {"memory": "4Gi", "cpu": "2"}}))).unwrap().pod;
    let set = json!({"cpu": "2.000", "memory": "4294967296.000"});
    assert_eq!(pod.resources_hash(), hash(&set), "what is not set is not in it");
}

/// What pods are known by, once given out, is a promise: a release that adds a field to the spec or the template, or whose
/// Kubernetes has one more, restarts no pod. Each line is what releases since then have given out.
#[test]
fn a_release_that_adds_a_field_restarts_nobody() {
    let full = json!({
        "nodeSelector": {"pool": "gpu", "arch": "amd64"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]},
        ]}}},
        "env": [{"name": "TZ", "value": "UTC"}],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/mnt/scratch"}],
        "modelVolumes": [{"claimName": "models"}],
        "serviceAccountName": "mine",
        "securityContext": {"supplementalGroups": [7]},
    });
    let all = json!({
        "/spec/resources": {"memory": "4Gi", "cpu": "2", "gpu": {"count": 1}}, "/spec/cache": {"sizeLimit": "10Gi"},
        "/spec/api": {"keysSecretRef": {"name": "keys"}, "modelAliases": ["b", "a"]}, "/spec/pod": full,
        "/metadata/annotations": {"gantry.dev/restart": "1"},
    });
    for (patch, template, resources) in [
        (json!({}), "6af5e500369d63fadd66c4c5e44cfcec", "44136fa355b3678a1146ad16f7e8649e"),
        (
            json!({"/spec/resources": {"memory": "4Gi", "cpu": "2"}}),
            "aa4fd5a4cef9e8efea27611523dd6c17",
            "a73973c7a0c749e46ae0aceb2e1c10a5",
        ),
        (all, "f984d19a3f1d1696debfe5d59e0f3914", "8ecff6cfba5bd377e5885682c7d46fc4"),
    ] {
        let pod = validate(&owner(&patch)).unwrap().pod;
        let known = built(&patch, "server:1", None).deployment.spec.unwrap().template.metadata.unwrap().labels.unwrap();
        let labels = (known["gantry.dev/pod-template"].as_str(), known["gantry.dev/pod-resources"].as_str());
        assert_eq!(labels, (template, resources), "{patch}");
        assert_eq!(pod.resources_hash(), resources);
    }
}

/// As a release wrote it that knew more of a template: what this one does not know of it is not what it goes by.
#[test]
fn a_stored_template_with_a_field_of_a_later_release_is_kept() {
    let old = built(&json!({}), "server:1", None);
    let mut json = serde_json::to_value(&old.deployment).unwrap();
    let mut template: Value = json["spec"]["template"].clone();
    template["spec"]["containers"][0]["fieldOfLater"] = json!({"a": 1});
    json["metadata"]["annotations"]["gantry.dev/pod-template"] = template.to_string().into();
    let later: Deployment = serde_json::from_value(json).unwrap();
    let kept = StoredTemplate::of(later.annotations()).unwrap();
    let built = built(&json!({}), "server:2", Some(&kept)).deployment;
    assert_eq!(built.spec, old.deployment.spec);
    assert_eq!(built.annotations()["gantry.dev/pod-template"], template.to_string(), "nor is it lost");
}

#[test]
fn a_pod_is_and_has_what_the_spec_says() {
    let affinity =
        json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}});
    let constraint = |selector: Value| {
        let mut constraint =
            json!({"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"});
        if !selector.is_null() {
            constraint["labelSelector"] = selector;
        }
        constraint
    };
    let of_others = json!({"matchLabels": {"app": "other"}});
    let children = built(
        &json!({"/spec/resources": {"memory": "1Gi"}, "/spec/pod": {
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": affinity,
            "topologySpreadConstraints": [constraint(Value::Null), constraint(of_others.clone())],
            "priorityClassName": "high", "runtimeClassName": "nvidia", "imagePullSecrets": [{"name": "registry"}],
            "labels": {"team": "a"}, "annotations": {"prometheus.io/scrape": "false"},
            "env": [
                {"name": "TZ", "value": "UTC"},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            ],
            "volumes": [
                {"name": "scratch", "emptyDir": {"sizeLimit": "2Gi"}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
                {"name": "store", "csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": true}},
                {"name": "own", "ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": {"a": "b"}},
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}}},
            ],
            "volumeMounts": [
                {"name": "scratch", "mountPath": "/mnt/scratch"},
                {"name": "store", "mountPath": "/mnt/secrets", "readOnly": true, "subPath": "a"},
            ],
            "modelVolumes": [{"claimName": "models"}, {"claimName": "drafts.v2"}],
            "securityContext": {"runAsUser": 1000, "fsGroup": 2000, "supplementalGroups": [3000], "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "Localhost", "localhostProfile": "profiles/gantry.json"}},
        }}),
        "server:1",
        None,
    );
    let template = serde_json::to_value(&children.deployment).unwrap()["spec"]["template"].clone();
    let labels = &template["metadata"]["labels"];
    assert_eq!((&labels["team"], &labels["gantry.dev/service"]), (&json!("a"), &json!("chat")));
    assert_eq!(template["metadata"]["annotations"], json!({"prometheus.io/scrape": "false"}));
    let pod = &template["spec"];
    assert_eq!(pod["nodeSelector"], json!({"pool": "gpu"}));
    assert_eq!(pod["tolerations"], json!([{"key": "gpu", "operator": "Exists"}]));
    assert_eq!(pod["affinity"], affinity);
    let own = json!({"matchLabels": {"app.kubernetes.io/name": "gantry-server", "gantry.dev/service": "chat", "gantry.dev/side": "blue"}});
    assert_eq!(pod["topologySpreadConstraints"], json!([constraint(own), constraint(of_others)]));
    assert_eq!((&pod["priorityClassName"], &pod["runtimeClassName"]), (&json!("high"), &json!("nvidia")));
    assert_eq!(pod["imagePullSecrets"], json!([{"name": "registry"}]));
    let seccomp = json!({"type": "Localhost", "localhostProfile": "profiles/gantry.json"});
    assert_eq!(
        pod["securityContext"],
        json!({"runAsNonRoot": true, "runAsUser": 1000, "runAsGroup": 65532, "fsGroup": 2000, "supplementalGroups": [3000],
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": seccomp})
    );
    let container = &pod["containers"][0];
    assert_eq!(container["securityContext"]["seccompProfile"], seccomp);
    assert_eq!(container["securityContext"]["runAsUser"], Value::Null, "as the pod says");
    let variables = container["env"].as_array().unwrap();
    assert_eq!(
        variables[variables.len() - 3..],
        [
            json!({"name": "TZ", "value": "UTC"}),
            json!({"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}),
            json!({"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}),
        ]
    );
    let claim = |name: &str| json!({"claimName": name, "readOnly": true});
    assert_eq!(
        pod["volumes"].as_array().unwrap()[2..],
        [
            json!({"name": "scratch", "emptyDir": {"sizeLimit": "2Gi"}}),
            json!({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}),
            json!({"name": "store", "csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": true}}),
            json!({"name": "own", "ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": {"a": "b"}},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}}}),
            json!({"name": "gantry-models-0", "persistentVolumeClaim": claim("models")}),
            json!({"name": "gantry-models-1", "persistentVolumeClaim": claim("drafts.v2")}),
        ]
    );
    assert_eq!(
        container["volumeMounts"].as_array().unwrap()[2..],
        [
            json!({"name": "scratch", "mountPath": "/mnt/scratch"}),
            json!({"name": "store", "mountPath": "/mnt/secrets", "readOnly": true, "subPath": "a"}),
            json!({"name": "gantry-models-0", "mountPath": "/var/lib/gantry/models/models", "readOnly": true}),
            json!({"name": "gantry-models-1", "mountPath": "/var/lib/gantry/models/drafts.v2", "readOnly": true}),
        ]
    );
    // The folder on the disk is room beside the models, the one in memory is not.
    assert_eq!(container["resources"]["requests"]["ephemeral-storage"], format!("{}Mi", 1024 + 256 + 2048));
}

#[test]
fn the_rights_follow_the_accounts_of_the_pods() {
    let accounts = |patch: Value, living: &[&str]| {
        let owner = owner(&patch);
        let spec = validate(&owner).unwrap();
        let children = build(&Inputs {
            owner: &owner,
            spec: &spec,
            versions: &[],
            new_pods: &new_pods("server:1"),
            lent_secrets: &BTreeSet::new(),
            sides: &sides(None),
            accounts: &living.iter().copied().collect(),
            account_uid: None,
            answers: true,
        });
        let binding = serde_json::to_value(&children.role_binding).unwrap();
        let subjects: Vec<_> = binding["subjects"].as_array().unwrap().clone();
        for subject in &subjects {
            assert_eq!((&subject["kind"], &subject["namespace"]), (&json!("ServiceAccount"), &json!("test")));
        }
        assert_eq!(binding["roleRef"]["name"], "chat-gantry");
        let names: Vec<_> = subjects.iter().map(|subject| subject["name"].as_str().unwrap().to_owned()).collect();
        (pod(&children)["serviceAccountName"].as_str().unwrap().to_owned(), names)
    };
    let mine = || json!({"/spec/pod": {"serviceAccountName": "mine"}});
    let named =
        |account: &str, subjects: &[&str]| (account.to_owned(), subjects.iter().map(|&name| name.to_owned()).collect());
    assert_eq!(accounts(json!({}), &["chat-gantry"]), named("chat-gantry", &["chat-gantry"]));
    assert_eq!(accounts(mine(), &["chat-gantry"]), named("mine", &["chat-gantry", "mine"]));
    // The way back: older pods go on reporting until they are replaced.
    assert_eq!(accounts(json!({}), &["chat-gantry", "mine"]), named("chat-gantry", &["chat-gantry", "mine"]));
}

#[test]
fn a_pod_has_what_the_api_asks_for_and_nobody_a_right_to_its_keys() {
    let api = json!({"/spec/api": {
        "keysSecretRef": {"name": "keys"}, "corsOrigins": ["http://localhost:3000", "https://chat.example.com"],
        "modelAliases": ["gpt-4o", "chat-large"], "anyModel": true,
    }});
    let children = built(&api, "server:1", None);
    let pod = pod(&children);
    let container = &pod["containers"][0];
    let arguments = json!([
        "pod",
        "--api-key-file=/etc/gantry/api-keys",
        "--cors-origins=http://localhost:3000,https://chat.example.com",
        "--alias=chat-large,gpt-4o",
        "--any-model",
    ]);
    assert_eq!(container["args"], arguments);
    let secret = json!({"secretName": "keys", "optional": false, "defaultMode": 0o440});
    assert_eq!(pod["volumes"][2], json!({"name": "api-keys", "secret": secret}));
    let mount = json!({"name": "api-keys", "mountPath": "/etc/gantry/api-keys", "readOnly": true});
    assert_eq!(container["volumeMounts"][2], mount);
    assert!(!serde_json::to_string(&children.role).unwrap().contains("secrets"));
    assert!(!container["env"].to_string().contains("keys"), "no variable has them");
}

#[test]
fn a_pod_keeps_responses_where_the_api_says() {
    let pod = |store: Value| pod(&built(&json!({"/spec/api": {"responseStore": store}}), "server:1", None));
    let own = |pod: &Value, of: &str| -> Vec<Value> {
        let all = pod["containers"][0]["env"].as_array().unwrap();
        all.iter().filter(|variable| variable["name"].as_str().unwrap().starts_with(of)).cloned().collect()
    };
    let bucket = pod(json!({"s3": {
        "bucket": "responses", "prefix": "gantry/chat", "endpoint": "http://minio.store:9000", "region": "eu-central-1",
        "secretRef": {"name": "store"},
    }, "ttl": "90m"}));
    let arguments = json!(["pod", "--response-store=s3://responses/gantry/chat", "--response-ttl=5400"]);
    assert_eq!(bucket["containers"][0]["args"], arguments);
    let of_secret = |key: &str, optional: bool| json!({"name": key, "valueFrom": {"secretKeyRef": {"name": "store", "key": key, "optional": optional}}});
    let variables = [
        json!({"name": "AWS_ENDPOINT", "value": "http://minio.store:9000"}),
        json!({"name": "AWS_ALLOW_HTTP", "value": "true"}),
        json!({"name": "AWS_REGION", "value": "eu-central-1"}),
        of_secret("AWS_ACCESS_KEY_ID", false),
        of_secret("AWS_SECRET_ACCESS_KEY", false),
        of_secret("AWS_SESSION_TOKEN", true),
    ];
    assert_eq!(own(&bucket, "AWS_"), variables);
    assert_eq!(bucket["volumes"].as_array().unwrap().len(), 2);

    let amazons = pod(json!({"s3": {"bucket": "responses"}}));
    assert_eq!(amazons["containers"][0]["args"], json!(["pod", "--response-store=s3://responses/"]));
    assert_eq!(own(&amazons, "AWS_"), [Value::Null; 0]);

    let claim = pod(json!({"pvc": {"claimName": "shared"}}));
    let arguments = json!(["pod", "--response-store=file:///var/lib/gantry/responses"]);
    assert_eq!(claim["containers"][0]["args"], arguments);
    assert_eq!(claim["volumes"][2], json!({"name": "responses", "persistentVolumeClaim": {"claimName": "shared"}}));
    let mount = json!({"name": "responses", "mountPath": "/var/lib/gantry/responses"});
    assert_eq!(claim["containers"][0]["volumeMounts"][2], mount);
}

/// Of what is not set nothing is in a template, nor in what it is known by: an upgrade restarts nobody.
#[test]
fn lists_of_the_api_are_sets_and_what_is_not_set_is_no_part_of_a_template() {
    let children = |api: Value| built(&json!({"/spec/api": api}), "server:1", None).deployment;
    let plain = built(&json!({}), "server:1", None).deployment;
    assert_eq!(children(json!({"corsOrigins": [], "modelAliases": [], "anyModel": false})), plain);
    let pod = validate(&owner(&json!({"/spec/api": {}}))).unwrap().pod;
    assert_eq!(pod.api.fields().count(), 0);
    assert_eq!(children(json!({"modelAliases": ["a", "b"]})), children(json!({"modelAliases": ["b", "a"]})));
    assert_ne!(children(json!({"modelAliases": ["a", "b"]})), children(json!({"modelAliases": ["a"]})));
    assert_ne!(children(json!({"modelAliases": ["a"]})), children(json!({"corsOrigins": ["a"]})));
    let kept = |ttl: &str| children(json!({"responseStore": {"pvc": {"claimName": "shared"}, "ttl": ttl}}));
    assert_eq!(kept("1h"), kept("60m"), "the same time, spelt otherwise");
    assert_ne!(kept("1h"), kept("2h"));
}

#[test]
fn probes_and_metrics_have_a_port_that_the_server_opens_and_the_policy_and_the_service_name() {
    let children = built(&json!({}), "server:1", None);
    let container = &pod(&children)["containers"][0];
    let ports = json!([
        {"name": "http", "containerPort": 8080, "protocol": "TCP"},
        {"name": "metrics", "containerPort": 8081, "protocol": "TCP"},
    ]);
    assert_eq!(container["ports"], ports);
    assert!(
        container["env"].as_array().unwrap().contains(&json!({"name": "GANTRY_HTTP_METRICS_PORT", "value": "8081"}))
    );
    for (probe, path) in [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")] {
        assert_eq!(container[probe]["httpGet"], json!({"path": path, "port": "metrics"}), "{probe}");
    }
    let policy = serde_json::to_value(&children.network_policy).unwrap();
    let allowed = json!([{"port": "http", "protocol": "TCP"}, {"port": "metrics", "protocol": "TCP"}]);
    assert_eq!(policy["spec"]["ingress"][0]["ports"], allowed);
    let service = serde_json::to_value(&children.service).unwrap();
    let offered = json!([
        {"name": "http", "port": 80, "protocol": "TCP", "targetPort": "http"},
        {"name": "metrics", "port": 8081, "protocol": "TCP", "targetPort": "metrics"},
    ]);
    assert_eq!(service["spec"]["ports"], offered);
}

#[test]
fn a_template_from_before_the_port_of_metrics_is_kept_with_the_probes_that_its_server_answers() {
    // As the release before applied it: one port, at which everything is probed.
    let mut json = serde_json::to_value(&built(&json!({}), "server:1", None).deployment).unwrap();
    let template = &mut json["spec"]["template"];
    let container = &mut template["spec"]["containers"][0];
    container["ports"].as_array_mut().unwrap().truncate(1);
    container["env"].as_array_mut().unwrap().retain(|variable| variable["name"] != "GANTRY_HTTP_METRICS_PORT");
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        container[probe]["httpGet"]["port"] = "http".into();
    }
    let template = template.to_string();
    json["metadata"]["annotations"]["gantry.dev/pod-template"] = template.into();
    let old: Deployment = serde_json::from_value(json).unwrap();
    let stored = StoredTemplate::of(old.annotations()).unwrap();

    let upgraded = built(&json!({}), "server:2", Some(&stored));
    assert_eq!(upgraded.deployment.spec, old.spec);
    // What goes round it names ports that such a pod has: http, and metrics where there is one.
    assert_eq!(upgraded.network_policy, built(&json!({}), "server:2", None).network_policy);
    let restarted = built(&json!({"/metadata/annotations": {"gantry.dev/restart": "1"}}), "server:2", Some(&stored));
    let container = &pod(&restarted)["containers"][0];
    assert_eq!(
        (&container["image"], &container["livenessProbe"]["httpGet"]["port"]),
        (&json!("server:2"), &json!("metrics"))
    );
}

#[test]
fn memory_is_request_and_limit_and_a_gpu_leaves_no_room_for_a_surge() {
    let children = built(
        &json!({"/spec/resources": {"cpu": "4", "memory": "24Gi", "gpu": {"resourceName": "nvidia.com/gpu", "count": 2}}}),
        "server:1",
        None,
    );
    let resources = &pod(&children)["containers"][0]["resources"];
    let disk = format!("{}Mi", (24 + 2 * 40) * 1024 + 256);
    assert_eq!(resources["requests"], json!({"cpu": "4", "memory": "24Gi", "ephemeral-storage": disk}));
    assert_eq!(resources["limits"], json!({"memory": "24Gi", "nvidia.com/gpu": "2", "ephemeral-storage": disk}));
    let strategy = |children: &Children| {
        serde_json::to_value(&children.deployment).unwrap()["spec"]["strategy"]["rollingUpdate"].clone()
    };
    assert_eq!(strategy(&children), json!({"maxSurge": 0, "maxUnavailable": 1}));
    assert_eq!(strategy(&built(&json!({}), "server:1", None)), json!({"maxSurge": 1, "maxUnavailable": 0}));
}

#[test]
fn a_cache_has_a_limit_that_the_node_keeps_room_for_and_the_server_knows() {
    for (change, limit, bytes, disk) in [
        (json!({}), "21474836480", 20_u64 << 30, "20736Mi"),
        (json!({"/spec/resources": {"memory": "24Gi"}}), "25769803776", 24 << 30, "24832Mi"),
        (json!({"/spec/resources": {"memory": "1500M"}}), "1500000000", 1_500_000_000, "1687Mi"),
        (json!({"/spec/resources": {"gpu": {"count": 1}}}), "42949672960", 40 << 30, "41216Mi"),
        (
            json!({"/spec/resources": {"memory": "8Gi"}, "/spec/cache": {"sizeLimit": "10Gi"}}),
            "10Gi",
            10 << 30,
            "10496Mi",
        ),
    ] {
        let pod = pod(&built(&change, "server:1", None));
        assert_eq!(pod["volumes"][0]["emptyDir"], json!({"sizeLimit": limit}), "{change}");
        let container = &pod["containers"][0];
        for side in ["requests", "limits"] {
            assert_eq!(container["resources"][side]["ephemeral-storage"], disk, "{change}");
        }
        let variable = json!({"name": "GANTRY_CACHE_BYTES", "value": bytes.to_string()});
        assert!(container["env"].as_array().unwrap().contains(&variable), "{change}");
    }
}

#[test]
fn pods_fetch_from_private_addresses_unless_the_installation_forbids_it() {
    let owner = owner(&json!({}));
    let spec = validate(&owner).unwrap();
    for (private_sources, says) in [(true, Value::Null), (false, json!("false"))] {
        let new_pods = NewPods { private_sources, ..new_pods("server:1") };
        let children = build(&Inputs {
            owner: &owner,
            spec: &spec,
            versions: &[],
            lent_secrets: &BTreeSet::new(),
            new_pods: &new_pods,
            sides: &sides(None),
            accounts: &BTreeSet::new(),
            account_uid: None,
            answers: true,
        });
        let env = pod(&children)["containers"][0]["env"].clone();
        let said = env.as_array().unwrap().iter().find(|variable| variable["name"] == "GANTRY_PRIVATE_SOURCES");
        assert_eq!(said.map_or(Value::Null, |variable| variable["value"].clone()), says);
    }
}

#[test]
fn the_number_of_pods_is_always_said_so_that_an_autoscaler_has_one_to_start_from() {
    for (spec, replicas) in [(json!({}), 2), (json!({"/spec/replicas": 0}), 0)] {
        assert_eq!(built(&spec, "server:1", None).deployment.spec.unwrap().replicas, Some(replicas), "{spec}");
    }
}

#[test]
fn agents_may_read_what_their_service_names_and_nothing_else() {
    let owner = owner(&json!({
        "/spec/model/source/secretRef": {"name": "new-token"},
        "/spec/model/source/ca": {"configMapRef": {"name": "authorities"}},
        "/spec/runtime": {"speculative": {"draft": {
            "uri": "https://models/d.gguf", "sha256": "d".repeat(64), "secretRef": {"name": "draft-token"},
        }}},
        "/spec/rollout": {"gates": {"prompts": {"configMapRef": {"name": "golden"}}}},
    }));
    let spec = validate(&owner).unwrap();
    let mut old_model = spec.wanted.model.clone();
    old_model.source.secret_ref = Some(gantry_crds::inference_service::LocalName { name: "old-token".to_owned() });
    let old = NamedVersion {
        name: version_name("chat", &old_model, &spec.wanted.runtime),
        model: old_model,
        runtime: spec.wanted.runtime.clone(),
    };
    let lent = |names: &[&str]| -> BTreeSet<String> { names.iter().map(|name| (*name).to_owned()).collect() };
    let children = |lent_secrets: &BTreeSet<String>| {
        build(&Inputs {
            owner: &owner,
            spec: &spec,
            versions: std::slice::from_ref(&old),
            lent_secrets,
            new_pods: &new_pods("server:1"),
            sides: &sides(None),
            accounts: &BTreeSet::new(),
            account_uid: None,
            answers: true,
        })
    };
    let all = lent(&["draft-token", "new-token", "old-token"]);
    assert_eq!(named_secrets(&spec, std::slice::from_ref(&old)), all);
    let role = children(&lent(&["draft-token", "new-token", "old-token", "of-nobody"])).role;
    assert_eq!(granted_secrets(&role), all);
    assert_eq!(
        serde_json::to_value(&role).unwrap()["rules"],
        json!([
            {"apiGroups": ["gantry.dev"], "resources": ["inferenceservices"], "resourceNames": ["chat"], "verbs": ["list", "watch"]},
            {"apiGroups": ["gantry.dev"], "resources": ["inferenceservices/status"], "resourceNames": ["chat"], "verbs": ["patch"]},
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["authorities", "golden"], "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["draft-token", "new-token", "old-token"], "verbs": ["get"]},
        ])
    );
    // Those that do not say for which hosts they are, nobody may read: an empty list of names would let all be read.
    for (lent_secrets, granted) in [(lent(&["old-token"]), lent(&["old-token"])), (lent(&["of-nobody"]), lent(&[]))] {
        let role = children(&lent_secrets).role;
        assert_eq!((granted_secrets(&role), role.rules.unwrap().len()), (granted.clone(), 3 + granted.len()));
    }
    let plain = built(&json!({}), "server:1", None);
    assert_eq!(plain.role.rules.unwrap().len(), 2);
}

#[test]
fn every_child_is_labelled_owned_and_hashed() {
    let children = built(&json!({}), "server:1", None);
    for meta in [
        &children.service_account.metadata,
        &children.role.metadata,
        &children.role_binding.metadata,
        &children.service.metadata,
        &children.pod_disruption_budget.metadata,
        &children.network_policy.metadata,
        &children.deployment.metadata,
    ] {
        assert_eq!(meta.labels.as_ref().unwrap()[SERVICE_LABEL], "chat");
        assert_eq!(meta.labels.as_ref().unwrap()[MANAGED_BY], OPERATOR);
        assert_eq!(meta.owner_references.as_ref().unwrap()[0].uid, "the-uid");
        assert_eq!(meta.annotations.as_ref().unwrap()[APPLIED_ANNOTATION].len(), 32);
    }
    assert_eq!(endpoint(&owner(&json!({}))), "http://chat.test.svc/v1");
}

#[test]
fn each_side_has_its_pods_and_the_service_leads_to_the_one_that_answers() {
    let (before, after) = (owner(&json!({})), owner(&json!({"/spec/resources": {"memory": "2Gi"}})));
    let (old, new) = (validate(&before).unwrap(), validate(&after).unwrap());
    let build_with = |owner: &InferenceService, spec: &ValidService, sides: &Sides| {
        build(&Inputs {
            owner,
            spec,
            versions: &[],
            lent_secrets: &BTreeSet::new(),
            new_pods: &new_pods("server:1"),
            sides,
            accounts: &BTreeSet::new(),
            account_uid: None,
            answers: true,
        })
    };
    let first = build_with(&before, &old, &sides(None));
    assert_eq!(first.other, None, "one set is enough");
    // While the other side prepares, the pods that answer stay as they are, whatever the spec says of pods by now.
    let blue = SideState { stored: Some(stored(&first)), selects_side: Some(true), is_kept: true };
    let mut preparing = Sides { other_replicas: 2, blue, ..sides(None) };
    let children = build_with(&after, &new, &preparing);
    let other = children.other.unwrap();
    let template = |deployment: &Deployment| deployment.spec.clone().unwrap().template;
    assert_eq!(template(&children.deployment), template(&first.deployment));
    assert_ne!(template(&other.deployment).spec, template(&first.deployment).spec);
    let memory = serde_json::to_value(&other.deployment).unwrap();
    let memory = &memory["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"];
    assert_eq!(memory, "2Gi", "the new ones have what the spec asks for");
    let side = |service: &Service| service.spec.clone().unwrap().selector.unwrap()[SIDE_LABEL].clone();
    assert_eq!((side(&children.service).as_str(), side(&other.preview).as_str()), ("blue", "green"));
    assert_eq!(other.deployment.metadata.name.as_deref(), Some("chat-green"));
    let paused = |deployment: &Deployment| deployment.spec.clone().unwrap().paused;
    assert_eq!((paused(&children.deployment), paused(&other.deployment)), (None, None));
    // After the switch it is the other way round. A change of the pods that one may go back to, begun before, takes none of them.
    preparing.active = Side::Green;
    let children = build_with(&after, &new, &preparing);
    let way_back = children.other.unwrap().deployment;
    assert_eq!((paused(&children.deployment), paused(&way_back)), (None, Some(true)));
    let surge = |deployment: &Deployment| deployment.spec.clone().unwrap().strategy.unwrap().rolling_update.unwrap();
    assert_eq!(surge(&way_back), surge(&children.deployment), "as many as while it answered");
    // The pods of a side that nobody needs any more go.
    preparing.other_replicas = 0;
    let children = build_with(&after, &new, &preparing);
    assert_eq!(side(&children.service), "green");
    assert_eq!(children.deployment.metadata.name.as_deref(), Some("chat-green"));
    assert_eq!(children.other.unwrap().deployment.spec.unwrap().replicas, Some(0));
    // A selector never changes: one that was made before there were sides goes on without.
    let blue = SideState { selects_side: Some(false), ..SideState::default() };
    let children = build_with(&before, &old, &Sides { blue, is_labelled: false, ..sides(None) });
    let selector = children.deployment.spec.unwrap().selector.match_labels.unwrap();
    assert!(!selector.contains_key(SIDE_LABEL));
    assert!(!children.service.spec.unwrap().selector.unwrap().contains_key(SIDE_LABEL), "its pods do not say it");
}
