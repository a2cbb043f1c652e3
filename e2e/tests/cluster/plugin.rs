//! `kubectl gantry`, by its functions: what its commands print and do.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_crds::status::GateName;
use gantry_e2e::{
    harness::{
        fixtures::{ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::{TestNamespace, with_temp_ns},
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
    },
    models::DemoModel,
};
use jiff::Timestamp;
use kube::ResourceExt;
use kubectl_gantry::{
    args::{Chat, Top, Wait},
    change,
    chat::chat,
    cluster::{Cluster, first},
    live,
    panel::{Outcome, list},
    top::top,
};

/// The plugin in the namespace of a test.
fn plugin(namespace: &TestNamespace) -> Cluster {
    Cluster { client: namespace.cluster.client.clone(), namespace: namespace.name.clone() }
}

async fn said(cluster: &Cluster, service: &str, message: &str) -> Result<String> {
    let (name, message) = (service.to_owned(), Some(message.to_owned()));
    let mut out = Vec::new();
    chat(cluster, &Chat { name, message, system: None, api_key: None }, &mut out).await?;
    Ok(String::from_utf8(out)?)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn people_watch_a_rollout_take_it_back_and_talk_to_the_model() -> Result<()> {
    with_temp_ns("plugin", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2, bad) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?, store.model(DemoModel::V3Bad)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let cluster = &plugin(namespace);
        let name =
            service.api.list(&kube::api::ListParams::default()).await?.items.first().context("no service")?.name_any();
        let name = name.as_str();
        ensure!(said(cluster, name, "Which version are you?").await?.contains("version one"));

        // What the rollout shows while it goes on, and its end.
        service.set_model(&v2).await?;
        let wait = Wait { name: name.to_owned(), timeout: ROLLOUT_TIMEOUT };
        let (rolling, ended) = tokio::join!(
            first(cluster.views(name), |view| {
                let panel = view.panel(Timestamp::now());
                panel.contains("candidate").then_some(panel)
            }),
            live::wait(cluster, &wait),
        );
        let rolling = rolling?;
        say(&rolling);
        ensure!(rolling.contains("Prepare") && rolling.contains("given up in"), "{rolling}");
        ended?;
        let view = cluster.view(name).await?;
        ensure!(view.outcome() == Outcome::Ready, "{}", view.explanation(Timestamp::now()));
        ensure!(said(cluster, name, "Which version are you?").await?.contains("version two"));

        // A bad one: waiting for it ends, with the gate and what to do.
        service.set_model(&bad).await?;
        let refused = first(cluster.views(name), |view| match view.outcome() {
            Outcome::Refused(why) => Some((why, view.explanation(Timestamp::now()))),
            _ => None,
        });
        let (why, explained) = tokio::time::timeout(ROLLOUT_TIMEOUT, refused).await??;
        say(&explained);
        ensure!(
            why.contains(GateName::Prompts.as_str()) && explained.contains("was refused by the gate Prompts"),
            "{why}"
        );
        say(change::retry(cluster, name).await?);
        service.await_rejected(&bad, GateName::Prompts, ROLLOUT_TIMEOUT).await?;

        // Back by revision, and by default to what answered before.
        say(change::rollback(cluster, name, Some(2)).await?);
        service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        say(change::rollback(cluster, name, None).await?);
        service.await_settled(&v1, ROLLOUT_TIMEOUT).await?;
        ensure!(said(cluster, name, "Which version are you?").await?.contains("version one"));

        let view = cluster.view(name).await?;
        say(view.history(Timestamp::now()));
        ensure!(view.history(Timestamp::now()).lines().count() == 4, "three versions and a heading");
        let figures = top(cluster, &Top { name: Some(name.to_owned()), all_namespaces: false }).await?;
        say(&figures);
        ensure!(figures.lines().count() > 1 && figures.contains("Mi"), "{figures}");
        ensure!(list(&cluster.list(false).await?).contains(name));
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_service_that_is_not_there_is_told_at_once() -> Result<()> {
    with_temp_ns("plugin-none", async |namespace| {
        let cluster = &plugin(namespace);
        let wait = Wait { name: "nothing".to_owned(), timeout: Duration::from_secs(60) };
        for error in [live::wait(cluster, &wait).await.err(), cluster.view("nothing").await.err()] {
            let error = error.context("it waits for what is not there")?.to_string();
            ensure!(error.contains("no InferenceService nothing") && error.contains("status -A"), "{error}");
        }
        Ok(())
    })
    .await
}
