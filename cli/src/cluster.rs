//! The cluster: how it is reached, and what is read of it.

use std::{collections::BTreeMap, pin::pin};

use anyhow::{Context as _, Result, anyhow};
use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use gantry_crds::{InferenceService, ModelVersion, SERVICE_LABEL};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Config,
    api::ListParams,
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event, watcher},
    },
};

use crate::{args::Target, panel::View};

/// A connection to a cluster, in a namespace of it.
#[derive(Clone)]
pub struct Cluster {
    /// The client.
    pub client: Client,
    /// The namespace.
    pub namespace: String,
}

impl Cluster {
    /// Finds the cluster as kubectl does.
    ///
    /// # Errors
    /// When there is no kubeconfig, or none that can be used.
    pub async fn connect(target: &Target) -> Result<Self> {
        let options = KubeConfigOptions { context: target.context.clone(), ..KubeConfigOptions::default() };
        let config = match (&target.kubeconfig, &target.context) {
            (Some(path), _) => {
                let kubeconfig =
                    Kubeconfig::read_from(path).with_context(|| format!("cannot read {}", path.display()))?;
                Config::from_custom_kubeconfig(kubeconfig, &options).await?
            }
            (None, Some(_)) => Config::from_kubeconfig(&options).await?,
            (None, None) => Config::infer().await.context("no cluster: give --kubeconfig, or set KUBECONFIG")?,
        };
        let namespace = target.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        Ok(Self { client: Client::try_from(config)?, namespace })
    }

    /// Services of the namespace.
    #[must_use]
    pub fn services(&self) -> Api<InferenceService> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn versions(&self) -> Api<ModelVersion> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// All services, of the namespace or of all.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub async fn list(&self, all_namespaces: bool) -> Result<Vec<InferenceService>> {
        let api = if all_namespaces { Api::all(self.client.clone()) } else { self.services() };
        Ok(api.list(&ListParams::default()).await.map_err(explained)?.items)
    }

    /// A service with its versions.
    ///
    /// # Errors
    /// When there is none of that name, or it cannot be read.
    pub async fn view(&self, name: &str) -> Result<View> {
        let service = self.services().get_opt(name).await.map_err(explained)?.ok_or_else(|| self.not_there(name))?;
        let labels = ListParams::default().labels(&format!("{SERVICE_LABEL}={name}"));
        let mut versions = self.versions().list(&labels).await.map_err(explained)?.items;
        versions.sort_by_key(|version| version.spec.revision);
        Ok(View { service, versions })
    }

    /// The service and its versions each time that either changes, from what they are now on.
    ///
    /// # Errors
    /// When they may not be watched, and when the service is not there or is deleted. Connections that break are made again.
    pub fn views(&self, name: &str) -> impl Stream<Item = Result<View>> + use<> {
        enum Seen {
            Service(Box<Event<InferenceService>>),
            Version(Box<Event<ModelVersion>>),
        }
        let one = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let its = watcher::Config::default().labels(&format!("{SERVICE_LABEL}={name}"));
        let services = watcher(self.services(), one).default_backoff().map_ok(|event| Seen::Service(Box::new(event)));
        let versions = watcher(self.versions(), its).default_backoff().map_ok(|event| Seen::Version(Box::new(event)));
        let not_there = self.not_there(name).to_string();
        let mut service = None;
        let mut kept = BTreeMap::new();
        let mut listed = (false, false);
        stream::select(services, versions).filter_map(move |seen| {
            let seen = match seen {
                Ok(seen) => seen,
                Err(error) => return std::future::ready(refused(&error).map(Err)),
            };
            match seen {
                Seen::Service(event) => match *event {
                    Event::Init => service = None,
                    Event::Apply(new) | Event::InitApply(new) => service = Some(new),
                    Event::Delete(_) => return std::future::ready(Some(Err(anyhow!("it was deleted")))),
                    Event::InitDone => listed.0 = true,
                },
                Seen::Version(event) => match *event {
                    Event::Init => kept.clear(),
                    Event::Apply(new) | Event::InitApply(new) => _ = kept.insert(new.spec.revision, new),
                    Event::Delete(old) => _ = kept.remove(&old.spec.revision),
                    Event::InitDone => listed.1 = true,
                },
            }
            std::future::ready(match (&service, listed) {
                (Some(service), (true, true)) => {
                    Some(Ok(View { service: service.clone(), versions: kept.values().cloned().collect() }))
                }
                (None, (true, _)) => Some(Err(anyhow!("{not_there}"))),
                _ => None,
            })
        })
    }

    /// Pods that answer, of a service or of all.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub async fn ready_pods(&self, service: Option<&str>, all_namespaces: bool) -> Result<Vec<Pod>> {
        let api: Api<Pod> = if all_namespaces { Api::all(self.client.clone()) } else { self.pods(&self.namespace) };
        let labels = service.map_or_else(|| SERVICE_LABEL.to_owned(), |name| format!("{SERVICE_LABEL}={name}"));
        let pods = api.list(&ListParams::default().labels(&labels)).await.map_err(explained)?.items;
        Ok(pods.into_iter().filter(is_ready).collect())
    }

    /// Pods of a namespace.
    #[must_use]
    pub fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn not_there(&self, name: &str) -> anyhow::Error {
        anyhow!(
            "no InferenceService {name} in the namespace {}: kubectl gantry status -A lists all that there are",
            self.namespace
        )
    }
}

/// The first view for which `wanted` says something, or what `wanted` was told when the stream ended.
///
/// # Errors
/// Those of the stream.
pub async fn first<T>(
    views: impl Stream<Item = Result<View>>,
    mut wanted: impl FnMut(&View) -> Option<T>,
) -> Result<T> {
    let mut views = pin!(views);
    while let Some(view) = views.next().await {
        if let Some(found) = wanted(&view?) {
            return Ok(found);
        }
    }
    Err(anyhow!("the API server tells no more of it"))
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.is_some_and(|all| all.iter().any(|one| one.type_ == "Ready" && one.status == "True"));
    ready && pod.metadata.deletion_timestamp.is_none()
}

/// An error that does not go away by waiting: the watcher tries everything else again.
fn refused(error: &watcher::Error) -> Option<anyhow::Error> {
    let (watcher::Error::InitialListFailed(kube::Error::Api(status))
    | watcher::Error::WatchStartFailed(kube::Error::Api(status))) = error
    else {
        return None;
    };
    matches!(status.code, 401 | 403 | 404).then(|| explained(kube::Error::Api(status.clone())))
}

/// The API server's words, with what to do where it is known.
pub fn explained(error: kube::Error) -> anyhow::Error {
    match &error {
        kube::Error::Api(status) if status.code == 404 => {
            anyhow!("this cluster has no Gantry: install its chart ({})", status.message)
        }
        kube::Error::Api(status) => anyhow!("the API server refuses: {}", status.message),
        _ => anyhow!(error).context("the API server cannot be asked"),
    }
}
