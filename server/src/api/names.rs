//! By which names clients may ask for the model that is served.

use gantry_core::{ApiError, ErrorCode, ErrorKind};

use crate::config::STANDALONE_VERSION;
use crate::version::VersionSpec;

/// The names beside the one that a version is served by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelNames {
    /// Further names.
    pub aliases: Vec<String>,
    /// Whether any other name will do: for clients that name a model of another provider, and cannot be told.
    pub any: bool,
}

impl ModelNames {
    /// Those that are listed, the first of which stands in answers.
    pub(super) fn listed<'a>(&'a self, spec: &'a VersionSpec) -> impl Iterator<Item = &'a str> {
        let aliases = self.aliases.iter().filter(|alias| **alias != spec.served_name);
        std::iter::once(spec.served_name.as_str()).chain(aliases.map(String::as_str))
    }

    /// Whether this is one of a version's names.
    pub(super) fn has(&self, name: &str, spec: &VersionSpec) -> bool {
        // Without Kubernetes no version has a name that a client could know.
        let is_version = spec.name != STANDALONE_VERSION && spec.name == name;
        is_version || self.listed(spec).any(|listed| listed == name)
    }

    /// Refuses a request for another model; `None` asks for whichever is served.
    pub(super) fn check(&self, asked: Option<&str>, spec: &VersionSpec) -> Result<(), ApiError> {
        match asked {
            Some(model) if !self.any && !self.has(model, spec) => Err(self.not_served(model, Some(spec))),
            _ => Ok(()),
        }
    }

    /// Says that a model is not served, and what is.
    pub(super) fn not_served(&self, model: &str, spec: Option<&VersionSpec>) -> ApiError {
        let there = match spec {
            Some(spec) => format!("there is {}, which", self.listed(spec).collect::<Vec<_>>().join(", ")),
            None => "nothing is loaded yet that".to_owned(),
        };
        let message = format!("The model {model:?} is not served here; {there} GET /v1/models lists.");
        let error = ApiError::new(404, ErrorKind::NotFoundError, ErrorCode::ModelNotFound, message);
        ApiError { param: Some("model".into()), ..error }
    }
}
