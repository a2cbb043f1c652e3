//! Looks at the objects beside the spec that a version is judged by: the golden prompts and the credentials of its sources.
//!
//! Only their metadata is asked for, so no credential is ever read here; and each by its name and only while its version is
//! not served: a watch would need the right to list every Secret of the cluster, with its content.

use std::fmt::Debug;

use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{ConfigMap, Secret},
};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tracing::warn;

use crate::{
    act::Error,
    decide::judged::Sighting,
    validate::{NamedObject, ObjectKind},
};

/// Looks at each of `objects` in `namespace`.
///
/// # Errors
/// When the API server cannot be reached.
pub async fn look_at(client: &Client, namespace: &str, objects: &[NamedObject]) -> Result<Vec<Sighting>, Error> {
    let mut seen = Vec::new();
    for object in objects {
        let state = match object.kind {
            ObjectKind::ConfigMap => state::<ConfigMap>(client, namespace, &object.name).await,
            ObjectKind::Secret => state::<Secret>(client, namespace, &object.name).await,
        };
        let state = match state {
            Ok(state) => state,
            Err(error) => {
                let what = format!("looking at {} {}", object.kind.as_str(), object.name);
                let error = Error::Api { what, source: error };
                if !error.is_refusal() {
                    return Err(error);
                }
                // The pods, who have to read it, say so where their user looks.
                warn!(namespace, %error, "whether it changes cannot be seen");
                None
            }
        };
        seen.push(Sighting { object: object.clone(), state });
    }
    Ok(seen)
}

async fn state<K>(client: &Client, namespace: &str, name: &str) -> Result<Option<(String, String)>, kube::Error>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let metadata = Api::<K>::namespaced(client.clone(), namespace).get_metadata_opt(name).await?;
    Ok(metadata.map(|object| (object.uid().unwrap_or_default(), object.resource_version().unwrap_or_default())))
}
