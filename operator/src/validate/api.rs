//! `spec.api`, as pods are built from it.

use gantry_crds::inference_service::ApiSpec;

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
}

/// A Secret without which a pod's container cannot be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSecret {
    /// Its name.
    pub name: String,
    /// The field that names it.
    pub field: &'static str,
}

impl ApiSettings {
    /// Those of a spec. Lists are sets: the same in another order is no change.
    pub(super) fn of(spec: &ApiSpec) -> Self {
        let sorted = |list: &[String]| {
            let mut list = list.to_vec();
            list.sort();
            list.dedup();
            list
        };
        Self {
            keys_secret: spec.keys_secret_ref.as_ref().map(|secret| secret.name.clone()),
            cors_origins: sorted(&spec.cors_origins),
            model_aliases: sorted(&spec.model_aliases),
            any_model: spec.any_model,
        }
    }

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
        fields.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }

    /// The Secrets that its pods are made with.
    #[must_use]
    pub fn secrets(&self) -> Vec<PodSecret> {
        let keys = self.keys_secret.clone().map(|name| PodSecret { name, field: "spec.api.keysSecretRef" });
        keys.into_iter().collect()
    }
}
