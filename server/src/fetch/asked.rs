//! What is asked, and for whom: what to do about a refusal depends on both.

/// What kind of place it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Here,
    Web,
    HuggingFace,
    Bucket,
    Registry,
}

/// Who named the address, and reads what is wrong with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AskedBy {
    /// Whoever wrote an InferenceService.
    #[default]
    Spec,
    /// Whoever started `serve` or `validate`.
    CommandLine,
}

/// A place, and who named it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) place: Place,
    pub(super) by: AskedBy,
}

impl AskedBy {
    pub(super) fn its_address(self) -> &'static str {
        match self {
            Self::Spec => "its uri in the spec",
            Self::CommandLine => "its address",
        }
    }

    /// Who connects to it.
    pub(super) fn fetching(self) -> &'static str {
        match self {
            Self::Spec => "the pods",
            Self::CommandLine => "this machine",
        }
    }

    /// Where a bucket's region is named.
    pub(super) fn region(self) -> &'static str {
        match self {
            Self::Spec => "region beside its uri in the spec",
            Self::CommandLine => "AWS_REGION",
        }
    }

    /// Where another host than the store's own is named.
    pub(super) fn endpoint(self) -> &'static str {
        match self {
            Self::Spec => "endpoint beside its uri in the spec",
            Self::CommandLine => "AWS_ENDPOINT_URL",
        }
    }

    /// What to do about a cache that is too small.
    pub(super) fn larger_cache(self) -> &'static str {
        match self {
            Self::Spec => "raise spec.cache.sizeLimit (it is as much as spec.resources.memory if left out)",
            Self::CommandLine => "raise --cache-size",
        }
    }
}

impl Asked {
    /// What to do where credentials are missing, or do not suffice.
    pub(super) fn credentials(self) -> &'static str {
        match (self.by, self.place) {
            (AskedBy::Spec, Place::Here | Place::Web) => {
                "give credentials with secretRef (key token) beside its uri in the spec, or check that they allow this file"
            }
            (AskedBy::Spec, Place::HuggingFace) => {
                "give a token with secretRef (key token) beside its uri in the spec; of a gated model, first accept the \
                 terms on its page, with the token's account"
            }
            (AskedBy::Spec, Place::Bucket) => {
                "give a key with secretRef (keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) beside its uri in the spec, \
                 or check that it allows this object, and that bucket, region and endpoint are right"
            }
            (AskedBy::Spec, Place::Registry) => {
                "give a login with secretRef (keys username and password, or a Secret of the type \
                 kubernetes.io/dockerconfigjson) beside its uri in the spec, or check that it allows this repository"
            }
            (AskedBy::CommandLine, Place::Here | Place::Web) => {
                "no credentials are sent there; use an address that everybody may read, or a signed one, or download the file"
            }
            (AskedBy::CommandLine, Place::HuggingFace) => {
                "check owner and repository; a private or gated model needs a token in HF_TOKEN (or `hf auth login`), and of a \
                 gated one the terms accepted on its page, with the token's account"
            }
            (AskedBy::CommandLine, Place::Bucket) => {
                "give a key with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or check that it allows this object, and that \
                 bucket, AWS_REGION and AWS_ENDPOINT_URL are right"
            }
            (AskedBy::CommandLine, Place::Registry) => {
                "log in with `docker login` or `oras login`, without a credential helper, or check the name of the repository"
            }
        }
    }
}
