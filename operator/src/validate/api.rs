//! `spec.api`, as pods are built from it.

use std::time::Duration;

use gantry_crds::api::{ApiSpec, ResponseStoreSpec};

use super::{Collector, NamedObject, ObjectKind, PodObject};

/// Whom a pod answers, and by which names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ApiSettings {
    /// Secret with the keys that clients must show.
    pub keys_secret: Option<String>,
    /// Origins whose pages may ask, in the order of their letters.
    pub cors_origins: Vec<String>,
    /// Names of the model beside its own, in the order of their letters.
    pub model_aliases: Vec<String>,
    /// Whether any other name will do.
    pub any_model: bool,
    /// Where responses are kept, if they are.
    pub responses: Option<ResponseStore>,
}

/// Where responses are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseStore {
    /// Where.
    pub place: StorePlace,
    /// For how long, where the spec says so.
    pub time_to_live: Option<Duration>,
}

/// A place for responses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StorePlace {
    /// A bucket of S3.
    S3 {
        /// As the server names it: `s3://BUCKET/PREFIX`.
        url: String,
        /// Where it is, unless it is Amazon's.
        endpoint: Option<String>,
        /// Its region.
        region: Option<String>,
        /// Secret with the credentials.
        secret: Option<String>,
    },
    /// A PersistentVolumeClaim, by its name.
    Claim(String),
}

impl Collector {
    /// What a spec asks for. Lists are sets: the same in another order is no change.
    pub(super) fn api(&mut self, spec: &ApiSpec) -> ApiSettings {
        let sorted = |list: &[String]| {
            let mut list = list.to_vec();
            list.sort();
            list.dedup();
            list
        };
        ApiSettings {
            keys_secret: spec.keys_secret_ref.as_ref().map(|secret| secret.name.clone()),
            cors_origins: sorted(&spec.cors_origins),
            model_aliases: sorted(&spec.model_aliases),
            any_model: spec.any_model,
            responses: spec.response_store.as_ref().and_then(|store| self.responses(store)),
        }
    }

    fn responses(&mut self, spec: &ResponseStoreSpec) -> Option<ResponseStore> {
        let ttl = spec.ttl.as_ref();
        let time_to_live = ttl.map(|ttl| self.parsed("spec.api.responseStore.ttl", ttl.to_std()));
        let place = match (&spec.s3, &spec.pvc) {
            (Some(s3), None) => StorePlace::S3 {
                url: format!("s3://{}/{}", s3.bucket, s3.prefix.as_deref().unwrap_or_default()),
                endpoint: s3.endpoint.clone(),
                region: s3.region.clone(),
                secret: s3.secret_ref.as_ref().map(|secret| secret.name.clone()),
            },
            (None, Some(claim)) => StorePlace::Claim(claim.claim_name.clone()),
            _ => {
                self.invalid("spec.api.responseStore", "give exactly one of s3 and pvc");
                return None;
            }
        };
        Some(ResponseStore { place, time_to_live })
    }
}

impl ApiSettings {
    /// What is set, by name: pods are known by it. What is not set is not in it, so that a release that adds a field restarts no
    /// pod of a service that does not use it.
    pub(crate) fn fields(&self) -> impl Iterator<Item = (&'static str, String)> {
        let list = |values: &[String]| (!values.is_empty()).then(|| values.join(","));
        let fields = [
            ("apiKeysSecret", self.keys_secret.clone()),
            ("corsOrigins", list(&self.cors_origins)),
            ("modelAliases", list(&self.model_aliases)),
            ("anyModel", self.any_model.then(|| "true".to_owned())),
        ];
        let store = self.responses.as_ref().map(ResponseStore::fields).into_iter().flatten();
        fields.into_iter().chain(store).filter_map(|(name, value)| Some((name, value?)))
    }

    /// The Secrets that its pods are made with.
    #[must_use]
    pub fn secrets(&self) -> Vec<PodObject> {
        let secret = |name, field| PodObject { object: NamedObject { kind: ObjectKind::Secret, name }, field };
        let keys = self.keys_secret.clone().map(|name| secret(name, "spec.api.keysSecretRef"));
        let store = self.responses.as_ref().and_then(|store| match &store.place {
            StorePlace::S3 { secret, .. } => secret.clone(),
            StorePlace::Claim(_) => None,
        });
        let store = store.map(|name| secret(name, "spec.api.responseStore.s3.secretRef"));
        keys.into_iter().chain(store).collect()
    }
}

impl ResponseStore {
    fn fields(&self) -> [(&'static str, Option<String>); 6] {
        let (url, endpoint, region, secret, claim) = match &self.place {
            StorePlace::S3 { url, endpoint, region, secret } => (Some(url), endpoint, region, secret, None),
            StorePlace::Claim(claim) => (None, &None, &None, &None, Some(claim)),
        };
        [
            ("responseStore", url.cloned()),
            ("responseStoreEndpoint", endpoint.clone()),
            ("responseStoreRegion", region.clone()),
            ("responseStoreSecret", secret.clone()),
            ("responseStoreClaim", claim.cloned()),
            ("responseTtlNanos", self.time_to_live.map(|ttl| ttl.as_nanos().to_string())),
        ]
    }
}
