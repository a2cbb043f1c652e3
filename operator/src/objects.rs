//! Looks at the objects beside the spec that a version is judged by, the golden prompts and the credentials of its sources, and
//! at the ConfigMaps and Secrets that pods cannot be made without.
//!
//! Only their metadata is asked for, so no credential is ever read here; and each by its name and only while its version is
//! not served, or a pod has not been made: a watch would need the right to list every Secret of the cluster, with its content. A look that fails, or takes
//! long, shows nothing and holds nothing up: a service whose Secrets cannot be read may have to be rolled back.

use std::fmt::Debug;

use futures::future;
use gantry_crds::HOSTS_ANNOTATION;
use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{ConfigMap, Secret},
};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tracing::warn;

use crate::{
    decide::judged::{Seen, Sighting},
    limits::JUDGED_LOOK_TIMEOUT,
    validate::{NamedObject, ObjectKind},
};

/// Looks at each of `objects` in `namespace`.
pub async fn look_at(client: &Client, namespace: &str, objects: &[NamedObject]) -> Vec<Sighting> {
    let look = async |object: &NamedObject| {
        let look = async {
            match object.kind {
                ObjectKind::ConfigMap | ObjectKind::Authorities => {
                    seen::<ConfigMap>(client, namespace, &object.name).await
                }
                ObjectKind::Secret => seen::<Secret>(client, namespace, &object.name).await,
            }
        };
        // The pods, who have to read it, say why they cannot where their user looks.
        let told = |error: &dyn std::fmt::Display| {
            let (kind, name) = (object.kind.as_str(), &object.name);
            warn!(namespace, kind, name, %error, "whether an object has changed cannot be seen: it is taken to be as it was");
            Seen::Nothing
        };
        let seen = match timeout(JUDGED_LOOK_TIMEOUT, look).await {
            Ok(Ok(seen)) => seen,
            Ok(Err(error)) => told(&error),
            Err(elapsed) => told(&elapsed),
        };
        Sighting { object: object.clone(), seen }
    };
    future::join_all(objects.iter().map(look)).await
}

async fn seen<K>(client: &Client, namespace: &str, name: &str) -> Result<Seen, kube::Error>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let metadata = Api::<K>::namespaced(client.clone(), namespace).get_metadata_opt(name).await?;
    Ok(metadata.map_or(Seen::Absent, |object| Seen::There {
        uid: object.uid().unwrap_or_default(),
        resource_version: object.resource_version().unwrap_or_default(),
        names_hosts: object.annotations().contains_key(HOSTS_ANNOTATION),
    }))
}
