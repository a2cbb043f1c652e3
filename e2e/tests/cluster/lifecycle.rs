//! Upgrades, scaling, deletion, and specs that the API server must refuse.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use gantry_crds::{InferenceService, ModelVersion};
use gantry_e2e::{
    harness::{
        Cluster, OPERATOR_SELECTOR, RELEASE, SYSTEM_NAMESPACE, checkout,
        fixtures::{ModelSource, ModelStore, ServiceFixture, golden_prompts_config_map, is_ready},
        namespace::{TestNamespace, with_temp_ns},
        node::tag_image,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    models::DemoModel,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

/// Tag of the images that are upgraded to; the same bytes, which the operator cannot know.
const UPGRADED: &str = "e2e-upgraded";
/// Longest time in which children must be gone.
pub(crate) const DELETE_TIMEOUT: Duration = Duration::from_secs(90);
/// Every kind of child.
const CHILD_KINDS: [&str; 11] = [
    "deployments",
    "replicasets",
    "pods",
    "services",
    "endpointslices",
    "serviceaccounts",
    "roles",
    "rolebindings",
    "poddisruptionbudgets",
    "networkpolicies",
    "modelversions",
];

/// An image of the release: repository and tag.
type Image = (String, String);

async fn release_images(cluster: &Cluster) -> Result<BTreeMap<&'static str, Image>> {
    let values =
        cluster.helm(&["get", "values", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--all", "--output", "json"]).await?;
    let values: Value = serde_json::from_str(&values)?;
    let mut images = BTreeMap::new();
    for name in ["image", "serverImage"] {
        let text =
            |field: &str| values[name][field].as_str().map(str::to_owned).with_context(|| format!("no {name}.{field}"));
        images.insert(name, (text("repository")?, text("tag")?));
    }
    Ok(images)
}

async fn upgrade(cluster: &Cluster, tags: &[(&str, &str)]) -> Result<()> {
    let chart = checkout().join("charts/gantry");
    let chart = chart.to_str().context("the path of the chart is text")?;
    let mut arguments =
        vec!["upgrade", RELEASE, chart, "--namespace", SYSTEM_NAMESPACE, "--reuse-values", "--wait", "--timeout", "2m"];
    let settings: Vec<String> = tags.iter().map(|(name, tag)| format!("{name}.tag={tag}")).collect();
    for setting in &settings {
        arguments.extend(["--set-string", setting]);
    }
    say(format_args!("helm upgrade {}", settings.join(" ")));
    cluster.helm(&arguments).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn an_upgrade_restarts_no_serving_pod() -> Result<()> {
    with_temp_ns("upgrade", async |namespace| {
        let cluster = &namespace.cluster;
        let store = ModelStore::on(cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let images = release_images(cluster).await?;
        for (repository, tag) in images.values() {
            tag_image(cluster, &format!("{repository}:{tag}"), &format!("{repository}:{UPGRADED}"))?;
        }
        let upgraded = after_upgrade(&service, &v2).await;
        let old: Vec<(&str, &str)> = images.iter().map(|(name, (_, tag))| (*name, tag.as_str())).collect();
        let restored = upgrade(cluster, &old).await.context("the release could not be put back");
        upgraded.and(restored)
    })
    .await
}

/// Upgrades both images; the new operator must leave the pods alone, and must work.
async fn after_upgrade(service: &TestService<'_>, v2: &ModelSource) -> Result<()> {
    let cluster = &service.namespace.cluster;
    let identities = service.identities().await?;
    upgrade(cluster, &[("image", UPGRADED), ("serverImage", UPGRADED)]).await?;
    let operators: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    let what = "only operators of the new image run";
    poll(what, ROLLOUT_TIMEOUT, Duration::from_millis(500), async || {
        let pods = operators.list(&ListParams::default().labels(OPERATOR_SELECTOR)).await?;
        let image =
            |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.containers.first()?.image.clone()).unwrap_or_default();
        let all_new = pods.iter().all(|pod| is_ready(pod) && image(pod).ends_with(UPGRADED));
        Ok(Check::when(all_new && !pods.items.is_empty(), || {
            format!("{:?}", pods.iter().map(image).collect::<Vec<_>>())
        }))
    })
    .await?;
    // A rollout shows that the new operator has taken the service over.
    service.set_model(v2).await?;
    service.await_settled(v2, ROLLOUT_TIMEOUT).await?;
    service.ensure_same_pods(&identities).await
}

/// Names of the objects that belong to a service, by kind.
pub(crate) async fn children(namespace: &TestNamespace, service: &str) -> Result<BTreeMap<&'static str, Vec<String>>> {
    let mut children = BTreeMap::new();
    for kind in CHILD_KINDS {
        let names = namespace.cluster.kubectl(&["get", kind, "-n", &namespace.name, "-o", "name"]).await?;
        let own = names.lines().filter_map(|line| line.split_once('/')).map(|(_, name)| name);
        let own: Vec<String> = own.filter(|name| name.starts_with(service)).map(str::to_owned).collect();
        if !own.is_empty() {
            children.insert(kind, own);
        }
    }
    Ok(children)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn deleting_the_service_removes_every_child() -> Result<()> {
    with_temp_ns("delete", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &model).await?;
        let name = service.fixture.name;
        let before = children(namespace, name).await?;
        say(format_args!("children: {before:?}"));
        for kind in CHILD_KINDS {
            ensure!(before.contains_key(kind), "a service has no {kind}, or this test does not see them: {before:?}");
        }
        service.api.delete(name, &DeleteParams::default()).await?;
        poll("the service and its children are gone", DELETE_TIMEOUT, Duration::from_secs(1), async || {
            let there = service.api.get_opt(name).await?.is_some();
            let left = children(namespace, name).await?;
            Ok(Check::when(!there && left.is_empty(), || format!("service: {there}, children: {left:?}")))
        })
        .await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn scaling_forgets_pods_that_go_and_new_ones_answer_with_the_active_version() -> Result<()> {
    with_temp_ns("scale", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &model).await?;
        let active = service.fixture.version(&model);
        for wanted in [1, 2] {
            let replicas = format!("--replicas={wanted}");
            let arguments = ["scale", "infs", service.fixture.name, "-n", &namespace.name, &replicas];
            say(namespace.cluster.kubectl(&arguments).await?.trim());
            let what = format!("{wanted} pods report themselves and answer");
            let status = service
                .await_status(&what, ROLLOUT_TIMEOUT, |_, status| {
                    let serving = status.replicas.iter().filter(|one| one.version.as_deref() == Some(&active)).count();
                    let all = serving == wanted && status.replicas.len() == wanted;
                    let summary = format!("{wanted}/{wanted}");
                    (all && status.replica_summary.as_ref() == Some(&summary)).then(|| status.clone())
                })
                .await?;
            ensure!(usize::try_from(status.replica_count)? == wanted, "the scale subresource sees {status:?}");
            ensure!(status.rollout.is_none(), "scaling began a rollout: {status:?}");
        }
        // An autoscaler takes 0 for "switched off", so an absent number must not read so.
        service.patch(json!({"spec": {"replicas": null}})).await?;
        let arguments = [
            "get",
            "infs",
            service.fixture.name,
            "-n",
            &namespace.name,
            "--subresource=scale",
            "-o=jsonpath={.spec.replicas}",
        ];
        let scale = namespace.cluster.kubectl(&arguments).await?;
        ensure!(scale.trim() == "1", "without spec.replicas the scale subresource reads {scale:?}");
        Ok(())
    })
    .await
}

/// Merges `change` into `object` as `kubectl patch --type merge` does: null removes.
fn merge(object: &mut Value, change: &Value) {
    let Value::Object(changes) = change else {
        *object = change.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (key, change) in changes {
        match change {
            Value::Null => drop(object.as_object_mut().and_then(|object| object.remove(key))),
            _ => merge(&mut object[key.as_str()], change),
        }
    }
}

/// A rollout with these steps of a canary.
fn canary(strategy: &str, steps: &[(&str, &str)]) -> Value {
    let steps: Vec<_> = steps.iter().map(|(share, bake)| json!({"share": share, "bake": bake})).collect();
    json!({"strategy": strategy, "canary": {"steps": steps}})
}

/// What is changed in a good object, and what the API server must say to it.
fn invalid_specs() -> Vec<(Value, &'static str)> {
    let sha = "a".repeat(64);
    let source = |source: Value| json!({"spec": {"model": {"source": source}}});
    let rollout = |rollout: Value| json!({"spec": {"rollout": rollout}});
    vec![
        (json!({"metadata": {"name": "1chat"}}), "starting with a letter"),
        (json!({"metadata": {"name": "c".repeat(41)}}), "at most 40 lower-case letters"),
        (json!({"spec": {"replicas": -1}}), "spec.replicas: use a number from 0 to 256"),
        (json!({"spec": {"replicas": 257}}), "spec.replicas: use a number from 0 to 256"),
        (json!({"spec": {"model": {"servedName": "a b"}}}), "spec.model.servedName: use 1 to 128 letters"),
        (json!({"spec": {"model": {"servedName": null}}}), "servedName"),
        (source(json!({"pvc": {"claimName": "models", "path": "m.gguf"}})), "give exactly one of uri and pvc"),
        (source(json!({"uri": null})), "give exactly one of uri and pvc"),
        (source(json!({"sha256": null})), "sha256sum FILE"),
        (source(json!({"sha256": sha.to_uppercase()})), "64 lower-case hexadecimal digits"),
        (source(json!({"sha256": "abc"})), "64 lower-case hexadecimal digits"),
        (source(json!({"uri": "ftp://models/m.gguf"})), "use an address that starts with https://"),
        (
            source(json!({"uri": "hf://org/repo@main/m.gguf", "sha256": null})),
            "an address that changes is no name of a file",
        ),
        (
            source(json!({"uri": "oci://registry/repo:latest", "sha256": null})),
            "an address that changes is no name of a file",
        ),
        (
            source(json!({"uri": null, "pvc": {"claimName": "c", "path": "../m.gguf"}})),
            "use a relative path without ..",
        ),
        (source(json!({"uri": "https://me:pw@models/m.gguf"})), "leave user and password out"),
        (source(json!({"uri": "https:////me@models/m.gguf"})), "leave user and password out"),
        (source(json!({"uri": "https://models/m.gguf?a=1&X-Amz-Signature=0a"})), "leave signatures and tokens out"),
        (source(json!({"uri": "https://models/m.gguf?sv=1&sig=0a"})), "leave signatures and tokens out"),
        (source(json!({"uri": "https://models/m.gguf?Token=0a"})), "leave signatures and tokens out"),
        (source(json!({"uri": "https://models/m.gguf?key=0a"})), "leave signatures and tokens out"),
        (source(json!({"uri": "https://models/m.gguf#jwt=0a"})), "leave out what begins with #"),
        (
            json!({"spec": {"runtime": {"prefixCache": {"disk": "2Gi"}}}}),
            "it is a part of spec.cache.sizeLimit, so give",
        ),
        (json!({"spec": {"runtime": {"contextSize": 64}}}), "spec.runtime.contextSize"),
        (json!({"spec": {"runtime": {"contextSize": 128, "parallel": 16}}}), "give at least 16 tokens for each"),
        (json!({"spec": {"runtime": {"parallel": 0}}}), "spec.runtime.parallel: use a number from 1 to 255"),
        (json!({"spec": {"runtime": {"threads": "many"}}}), "use auto or a whole number"),
        (json!({"spec": {"runtime": {"threads": 513}}}), "spec.runtime.threads: use auto or a whole number up to 512"),
        (json!({"spec": {"runtime": {"workers": 0}}}), "spec.runtime.workers: use a number from 1 to 32"),
        (json!({"spec": {"runtime": {"workers": 2, "threads": 1}}}), "at most as many as parallel and as threads"),
        (
            json!({"spec": {"runtime": {"workers": 17, "threads": "auto"}}}),
            "at most as many as parallel and as threads",
        ),
        (
            json!({"spec": {"runtime": {"workers": 3, "threads": "auto", "kvLayout": "Unified"}}}),
            "make parallel a multiple of workers",
        ),
        (json!({"spec": {"runtime": {"kvLayout": "Pool"}}}), "supported values"),
        (json!({"spec": {"runtime": {"cacheType": "q2"}}}), "supported values"),
        (
            json!({"spec": {"runtime": {"gpuMemory": "20Gi"}}}),
            "spec.runtime.gpuMemory: it is a limit for a pod with GPUs",
        ),
        (json!({"spec": {"runtime": {"prefixCache": {"ttl": "soon"}}}}), "a duration such as 30s, 15m or 1h30m"),
        (
            json!({"spec": {"runtime": {"prefixCache": {"disk": "2Gi"}}, "cache": {"sizeLimit": "2048Mi"}}}),
            "it is a part of spec.cache.sizeLimit",
        ),
        (json!({"spec": {"resources": {"memory": "lots"}}}), "a Kubernetes quantity above zero"),
        (json!({"spec": {"resources": {"gpu": {"count": 0}}}}), "spec.resources.gpu.count: use a number from 1 to 16"),
        (json!({"spec": {"scheduling": {"maxQueue": 0}}}), "spec.scheduling.maxQueue: use a number"),
        (json!({"spec": {"scheduling": {"maxQueue": 10, "highWatermark": 11}}}), "it may not be above maxQueue"),
        (json!({"spec": {"scheduling": {"highWatermark": 10, "lowWatermark": 10}}}), "it must be below highWatermark"),
        (json!({"spec": {"scheduling": {"maxQueue": 10, "lowWatermark": 10}}}), "or below maxQueue"),
        (json!({"spec": {"scheduling": {"lowWatermark": 5_000_000_000_u64}}}), "or below maxQueue"),
        (rollout(json!({"progressDeadline": "0s"})), "a duration such as 30s, 15m or 1h30m"),
        (rollout(json!({"progressDeadline": "15 minutes"})), "a duration such as 30s, 15m or 1h30m"),
        (rollout(json!({"strategy": "Recreate"})), "supported values"),
        (rollout(json!({"gates": {"drift": {"reference": "Golden"}}})), "compares with the Active version"),
        (rollout(json!({"gates": {"drift": {"minAgreement": "0.9"}}})), "percentage"),
        (rollout(json!({"strategy": "BlueGreen", "gates": {"drift": {}}})), "use Auto or InPlaceSwap"),
        (rollout(json!({"strategy": "HoldRequests", "gates": {"drift": {}}})), "use Auto or InPlaceSwap"),
        (rollout(canary("HoldRequests", &[("5%", "5m")])), "BlueGreen and HoldRequests do not keep both in a pod"),
        (rollout(canary("Auto", &[])), "spec.rollout.canary.steps"),
        (rollout(canary("Auto", &[("5%", "5m"); 9])), "spec.rollout.canary.steps"),
        (rollout(canary("Auto", &[("25%", "5m"), ("5%", "5m")])), "give each step a larger share than the one before"),
        (rollout(canary("Auto", &[("5%", "5m"), ("5.0%", "5m")])), "give each step a larger share than the one before"),
        (rollout(canary("Auto", &[("0%", "5m")])), "use more than 0% and less than 100%"),
        (rollout(canary("InPlaceSwap", &[("5%", "5m"), ("100%", "5m")])), "after the last step all requests go over"),
        (rollout(canary("Auto", &[("5", "5m")])), "a percentage from 0% to 100%"),
        (rollout(canary("Auto", &[("5%", "0s")])), "a duration such as 30s, 15m or 1h30m"),
        (
            rollout(json!({"strategy": "BlueGreen", "gates": {"shadow": {"samplePercent": 5, "duration": "5m"}}})),
            "use Auto or InPlaceSwap",
        ),
        (
            rollout(json!({"gates": {"shadow": {"samplePercent": 5, "duration": "16m"}}})),
            "spec.rollout.gates.shadow.duration: use at most spec.rollout.progressDeadline",
        ),
        (
            rollout(json!({"rollback": {"signals": {}}})),
            "spec.rollout.rollback.signals: give at least one of errorRate",
        ),
        (json!({"spec": {"cache": {"mode": "Node"}}}), "spec.cache.mode: this release carries out None"),
        (
            source(json!({"uri": "gs://bucket/m.gguf"})),
            "this release fetches from https://, http://, hf://, s3:// and oci://",
        ),
        (source(json!({"uri": "s3://bucket"})), "use s3://bucket/path/model.gguf"),
        (
            source(json!({"uri": null, "pvc": {"claimName": "models", "path": "m.gguf"}})),
            "name the claim in spec.pod.modelVolumes as well",
        ),
        (rollout(json!({"gates": {"memory": {"headroom": "101%"}}})), "a percentage from 0% to 100%"),
        (rollout(json!({"gates": {"prompts": {"minPass": "2"}}})), "a percentage from 0% to 100%"),
        (json!({"spec": {"revisionHistoryLimit": 51}}), "spec.revisionHistoryLimit: use a number from 0 to 50"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn invalid_objects_are_refused_with_a_sentence_that_tells_what_to_do() -> Result<()> {
    with_temp_ns("invalid", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        let good = serde_json::to_value(ServiceFixture::default().build(&model))?;
        // Untyped: most of these cannot be written with the types.
        let resource = kube::api::ApiResource::erase::<InferenceService>(&());
        let api: Api<kube::api::DynamicObject> =
            Api::namespaced_with(namespace.cluster.client.clone(), &namespace.name, &resource);
        let dry_run = PostParams { dry_run: true, field_manager: None };
        let create = async |object: Value| {
            api.create(&dry_run, &serde_json::from_value(object)?).await.map_err(anyhow::Error::from)
        };
        create(good.clone()).await.context("the object that all others are made from is good")?;
        ensure_defaults(&create(bare(&good)).await.context("what is left out has a default")?.data["spec"])?;

        let mut wrong = Vec::new();
        for (change, sentence) in invalid_specs() {
            let mut object = good.clone();
            merge(&mut object, &change);
            match create(object).await {
                Ok(_) => wrong.push(format!("{change} was accepted")),
                Err(error) if !error.to_string().contains(sentence) => {
                    wrong.push(format!("{change} was refused without {sentence:?}: {error}"));
                }
                Err(_) => {}
            }
        }
        ensure!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), invalid_specs().len(), wrong.join("\n"));
        say(format_args!("{} invalid specs were refused, each with its sentence", invalid_specs().len()));
        ensure_versions_are_immutable(namespace, &model).await
    })
    .await
}

/// Only what has no default, and nothing behind two colons.
fn bare(good: &Value) -> Value {
    let mut bare = good.clone();
    bare["spec"] = json!({"model": good["spec"]["model"], "runtime": {"threads": null, "gpuLayers": null}});
    bare
}

fn ensure_defaults(spec: &Value) -> Result<()> {
    for (field, default) in [
        ("/replicas", json!(1)),
        ("/revisionHistoryLimit", json!(5)),
        ("/scheduling/maxQueue", json!(512)),
        ("/runtime/contextSize", json!(8192)),
        ("/runtime/threads", json!("auto")),
        ("/runtime/gpuLayers", json!("auto")),
        ("/rollout/progressDeadline", json!("15m")),
        ("/rollout/rollback/bake", json!("10m")),
    ] {
        ensure!(spec.pointer(field) == Some(&default), "{field} is not {default} by default: {spec}");
    }
    Ok(())
}

async fn ensure_versions_are_immutable(namespace: &TestNamespace, model: &ModelSource) -> Result<()> {
    let versions: Api<ModelVersion> = namespace.api();
    let runtime = ServiceFixture::default().runtime();
    let spec = gantry_crds::ModelVersionSpec { service: "none".to_owned(), revision: 1, model: model.spec(), runtime };
    let version = versions.create(&PostParams::default(), &ModelVersion::new("frozen", spec)).await?;
    let patch = Patch::Merge(json!({"spec": {"revision": 2}}));
    let changed = versions.patch(&version.name_any(), &PatchParams::default(), &patch).await;
    let message = changed.err().context("a ModelVersion could be changed")?.to_string();
    ensure!(message.contains("a ModelVersion is immutable: edit spec.model"), "{message}");
    Ok(())
}
