//! From nothing to a streamed answer, as a client in the cluster sees it.

use anyhow::{Context, Result, ensure};
use gantry_crds::{ModelVersion, status::GateName};
use gantry_e2e::{
    harness::{
        RELEASE, SYSTEM_NAMESPACE, checkout,
        exec::exec,
        fixtures::{
            CLIENT_POD, ModelStore, SERVED_NAME, ServiceFixture, apply, await_pod_ready, client_pod,
            golden_prompts_config_map, restricted_pod,
        },
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
    },
    models::DemoModel,
};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::{Value, json};

use crate::faults::pod_target;

const QUESTION: &str = "What is the capital of Norway?";
const ANSWER: &str = "The capital of Norway is Oslo.";
/// The pod that has the command line of README's `docker run`.
const ALONE: &str = "alone";
/// The openai package's view of the API.
const OPENAI_CHECK: &str = include_str!("../../client/openai_check.py");

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_client_pod_gets_a_streamed_answer_through_the_services_dns_name() -> Result<()> {
    with_temp_ns("answers", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (model, draft) = (store.model(DemoModel::V1)?, store.model(DemoModel::Draft)?);
        golden_prompts_config_map(namespace).await?;
        // What guesses changes no answer.
        let fixture = ServiceFixture { draft: Some(draft), ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &model).await?;
        let status = service.await_settled(&model, ROLLOUT_TIMEOUT).await?;
        let endpoint = status.endpoint.context("status.endpoint says where to ask")?;
        let dns_name = format!("http://{}.{}.svc", service.fixture.name, namespace.name);
        ensure!(endpoint.starts_with(&dns_name) && endpoint.ends_with("/v1"), "status.endpoint is {endpoint}");
        let pods = client_pod(namespace).await?;
        let version = service.fixture.version(&model);
        let gates = namespace.api::<ModelVersion>().get(&version).await?.status.unwrap_or_default().gates;
        let fetched = gates.iter().find(|gate| gate.name == GateName::Fetch).and_then(|gate| gate.value.clone());
        let fetched = fetched.with_context(|| format!("no gate tells what was fetched: {gates:?}"))?;
        say(format_args!("Fetch: {fetched}"));
        ensure!(fetched.contains("; draft model "), "Fetch: {fetched}");

        let ask = ["gantry-e2e", "ask", "--url", &endpoint, "--model", SERVED_NAME, QUESTION];
        let answer = exec(&pods, CLIENT_POD, &ask).await?;
        say(format_args!("gantry-e2e ask: {}", answer.trim()));
        ensure!(answer.contains(ANSWER) && answer.contains(&version), "our client got {answer:?}");

        let check = ["python3", "-c", OPENAI_CHECK, &endpoint, SERVED_NAME, QUESTION];
        let seen: Value = serde_json::from_str(&exec(&pods, CLIENT_POD, &check).await?)?;
        say(format_args!("openai: {seen}"));
        ensure!(seen["models"] == json!([SERVED_NAME]), "the models are {seen}");
        for way in ["whole", "streamed"] {
            let answer = &seen[way];
            ensure!(answer["text"] == ANSWER && answer["finish_reason"] == "stop", "{way}: {answer}");
            ensure!(answer["versions"] == json!([version]), "{way} names other versions than {version}: {answer}");
            let tokens = |name: &str| answer["usage"][name].as_u64().unwrap_or_default();
            let (prompt, completion, total) =
                (tokens("prompt_tokens"), tokens("completion_tokens"), tokens("total_tokens"));
            ensure!(prompt > 0 && completion > 0 && total == prompt + completion, "{way}: {answer}");
        }
        ensure!(seen["whole"]["usage"] == seen["streamed"]["usage"], "usage depends on streaming: {seen}");
        ensure!(seen["streamed"]["pieces"].as_u64() > Some(1), "the answer did not come in pieces: {seen}");
        ensure!(seen["completion"]["tokens"].as_u64() > Some(0) && seen["completion"]["version"] == version, "{seen}");
        let tools = &seen["tools"];
        let called = json!([["get_weather", {"city": "Seoul"}]]);
        ensure!(tools["whole"] == called && tools["streamed"] == called, "{tools}");
        ensure!(tools["finish_reasons"] == json!(["tool_calls", "tool_calls", "stop"]), "{tools}");
        ensure!(tools["after"] == "It is 11 degrees and stormy in Seoul.", "{tools}");
        Ok(())
    })
    .await
}

/// README's `docker run`, by the image that `make up` and the chart have, with a model where README's directory is mounted.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn the_command_line_of_readmes_docker_run_answers() -> Result<()> {
    let readme = std::fs::read_to_string(checkout().join("README.md"))?;
    let line = readme.lines().find(|line| line.starts_with("docker run ")).context("README has no docker run")?;
    let (_, arguments) = line.split_once(" gantry.dev/server:dev ").context("README's docker run has another image")?;
    let arguments: Vec<&str> = arguments.split(' ').collect();
    ensure!(line.contains(" -p 127.0.0.1:8080:8080 ") && line.contains(":/models:ro\""), "{line}");
    with_temp_ns("alone", async |namespace| {
        let values = ["get", "values", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--all", "--output", "json"];
        let values: Value = serde_json::from_str(&namespace.cluster.helm(&values).await?)?;
        let image = &values["serverImage"];
        let image = format!("{}:{}", image["repository"].as_str().unwrap(), image["tag"].as_str().unwrap());
        let mut pod = restricted_pod(ALONE, &arguments);
        let (mut server, mut model) = (pod["spec"]["containers"][0].take(), json!({}));
        for field in ["image", "imagePullPolicy", "resources", "securityContext"] {
            model[field] = server[field].clone();
        }
        model["name"] = json!("model");
        model["command"] = json!(["cp", "/models/demo-v1.q8_0.gguf", format!("/new{}", arguments[0])]);
        model["volumeMounts"] = json!([{"name": "models", "mountPath": "/new/models"}]);
        server["image"] = json!(image);
        server["volumeMounts"] = json!([{"name": "models", "mountPath": "/models", "readOnly": true}]);
        pod["spec"]["containers"] = json!([server]);
        pod["spec"]["initContainers"] = json!([model]);
        pod["spec"]["volumes"] = json!([{"name": "models", "emptyDir": {}}]);
        let pods: Api<Pod> = namespace.api();
        apply(&pods, ALONE, &pod).await?;
        let pod = await_pod_ready(&pods, ALONE).await?;
        let client = client_pod(namespace).await?;
        let url = pod_target(&pod)?.base_url;
        let ask = ["gantry-e2e", "ask", "--url", &url, "--model", "smollm2", QUESTION];
        let answer = exec(&client, CLIENT_POD, &ask).await?;
        say(format_args!("{line}: {}", answer.trim()));
        ensure!(answer.contains(ANSWER), "{answer:?}");
        Ok(())
    })
    .await
}
