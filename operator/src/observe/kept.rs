//! An object as a store keeps it: compressed JSON, and by what it is found.

use std::{borrow::Cow, fmt::Debug, marker::PhantomData};

use gantry_crds::{InferenceService, SERVICE_LABEL};
use kube::{
    Resource, ResourceExt,
    runtime::reflector::{self, ObjectRef},
};
use lz4_flex::block::{compress_prepend_size, decompress_size_prepended};
use serde::{Serialize, de::DeserializeOwned};

/// What can be kept.
pub(super) trait Child:
    Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + Debug + Send + Sync + 'static
{
}

impl<K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + Debug + Send + Sync + 'static> Child for K {}

/// What tells whose it is.
pub(super) trait OfService {
    /// The service that it belongs to, or is.
    fn service(&self) -> Option<ObjectRef<InferenceService>>;
}

/// An object's JSON, compressed. The types of the API take several times as much, nearly all of it for fields that are absent: of a
/// Deployment 3 KiB are left of 20, and compressed half of that.
#[derive(Clone, Debug)]
pub(super) struct Kept<K> {
    name: Box<str>,
    namespace: Box<str>,
    service: Option<Box<str>>,
    lz4: Box<[u8]>,
    kind: PhantomData<fn() -> K>,
}

impl<K: Child> Kept<K> {
    pub(super) fn of(object: &K) -> Self {
        Self {
            name: object.name_any().into(),
            namespace: object.meta().namespace.as_deref().unwrap_or_default().into(),
            service: object.labels().get(SERVICE_LABEL).map(|name| name.as_str().into()),
            // What was read from JSON becomes JSON again.
            lz4: compress_prepend_size(&serde_json::to_vec(object).unwrap_or_default()).into(),
            kind: PhantomData,
        }
    }

    /// The object; `None` never, since it is read from what it wrote itself.
    pub(super) fn object(&self) -> Option<K> {
        serde_json::from_slice(&decompress_size_prepended(&self.lz4).ok()?).ok()
    }
}

impl<K> OfService for Kept<K> {
    fn service(&self) -> Option<ObjectRef<InferenceService>> {
        Some(ObjectRef::new(self.service.as_deref()?).within(&self.namespace))
    }
}

impl<K: Child> reflector::Lookup for Kept<K> {
    type DynamicType = ();

    fn kind((): &()) -> Cow<'_, str> {
        <K as Resource>::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        <K as Resource>::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        <K as Resource>::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        <K as Resource>::plural(&())
    }

    fn name(&self) -> Option<Cow<'_, str>> {
        Some(Cow::Borrowed(&*self.name))
    }

    fn namespace(&self) -> Option<Cow<'_, str>> {
        Some(Cow::Borrowed(&*self.namespace))
    }

    /// Keys of the store are kept as long as their objects, and need none.
    fn resource_version(&self) -> Option<Cow<'_, str>> {
        None
    }

    /// As above.
    fn uid(&self) -> Option<Cow<'_, str>> {
        None
    }
}
