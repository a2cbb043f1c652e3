//! Leader election through one Lease: of all operators, the holder acts and the others stand by.
//!
//! As in client-go, a lease counts as expired when its holder has not changed it for its duration as seen from here: no two
//! clocks are compared. The holder gives up well before that ([`RENEW_DEADLINE`] < [`LEASE_DURATION`]), and the process
//! ends at once when it does, so that two never act. Every write carries the resource version that was read. A restarted
//! container has its predecessor's pod name and goes on at once: the kubelet starts it only after that one died.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

/// Time after which a lease that is not renewed may be taken.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Time after which a holder that could not renew gives up, at the end of its next attempt at the latest.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(9);
/// Time between two renewals, and between two looks at somebody else's lease.
pub const RENEW_PERIOD: Duration = Duration::from_secs(2);
/// Longest answer to a request about the lease.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);
/// A holder is gone before its lease may be taken, even when its last attempt began just before the deadline.
const _: () =
    assert!(RENEW_DEADLINE.as_secs() + RENEW_PERIOD.as_secs() + REQUEST_TIMEOUT.as_secs() <= LEASE_DURATION.as_secs());
/// What a released lease lasts: its successor need not wait.
const RELEASED_SECONDS: i32 = 1;

/// One operator's part in the election.
pub struct Elector {
    api: Api<Lease>,
    name: String,
    identity: String,
    seen: Option<Seen>,
}

/// Somebody else's lease, and since when it has not changed.
struct Seen {
    resource_version: Option<String>,
    since: Instant,
}

/// The lease as it is held: its last form and the time before the request that renewed it.
#[derive(Debug)]
pub struct Held {
    lease: Lease,
    renewed: Instant,
}

/// Why the lease is no longer held.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// Another operator has it.
    #[error("the lease {lease} is held by {holder:?} now")]
    Taken {
        /// The lease.
        lease: String,
        /// Its holder.
        holder: String,
    },
    /// It could not be renewed in time.
    #[error("the lease {0} could not be renewed for {deadline}s", deadline = RENEW_DEADLINE.as_secs())]
    Expired(String),
}

/// What to do about a lease as it was read.
#[derive(Debug, PartialEq)]
enum Claim {
    Create(Box<Lease>),
    Replace(Box<Lease>),
    Wait,
}

impl Elector {
    /// Takes part in the election for the lease `name` in `namespace` as `identity`.
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: String, identity: String) -> Self {
        Self { api: Api::namespaced(client, namespace), name, identity, seen: None }
    }

    /// Waits until the lease is held. `reached` is called once the API server has answered.
    pub async fn acquire(&mut self, reached: impl Fn()) -> Held {
        loop {
            match timeout(REQUEST_TIMEOUT, self.try_acquire(Instant::now())).await {
                Ok(Ok(Some(held))) => {
                    info!(lease = self.name, identity = self.identity, "holds the lease");
                    return held;
                }
                Ok(Ok(None)) => reached(),
                Ok(Err(error)) => warn!(lease = self.name, %error, "the lease could not be read or taken"),
                Err(_) => warn!(lease = self.name, "no answer about the lease in {}s", REQUEST_TIMEOUT.as_secs()),
            }
            sleep(RENEW_PERIOD).await;
        }
    }

    /// One attempt: `None` when somebody else holds the lease, or took it meanwhile.
    async fn try_acquire(&mut self, now: Instant) -> Result<Option<Held>, kube::Error> {
        let observed = self.api.get_opt(&self.name).await?;
        let parameters = PostParams::default();
        let written = match self.claim(observed, now) {
            Claim::Wait => return Ok(None),
            Claim::Create(lease) => self.api.create(&parameters, &lease).await,
            Claim::Replace(lease) => self.api.replace(&self.name, &parameters, &lease).await,
        };
        match written {
            Ok(lease) => Ok(Some(Held { lease, renewed: now })),
            Err(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn claim(&mut self, observed: Option<Lease>, now: Instant) -> Claim {
        let Some(mut lease) = observed else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let mut lease = Lease { metadata, spec: None };
            self.take(&mut lease);
            return Claim::Create(Box::new(lease));
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let version = lease.metadata.resource_version.clone();
        let since = match &self.seen {
            Some(seen) if seen.resource_version == version => seen.since,
            _ => now,
        };
        self.seen = Some(Seen { resource_version: version, since });
        let seconds = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
        let expired = now.duration_since(since) >= Duration::from_secs(seconds);
        if holder.is_empty() || holder == self.identity || expired {
            self.take(&mut lease);
            return Claim::Replace(Box::new(lease));
        }
        Claim::Wait
    }

    fn take(&self, lease: &mut Lease) {
        let now = Timestamp::now();
        let old = lease.spec.take().unwrap_or_default();
        let mine = old.holder_identity.as_deref() == Some(self.identity.as_str());
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(LEASE_DURATION.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: if mine { old.acquire_time } else { Some(MicroTime(now)) },
            renew_time: Some(MicroTime(now)),
            lease_transitions: Some(old.lease_transitions.unwrap_or(0).saturating_add(i32::from(!mine))),
            ..old
        });
    }

    /// Renews the lease until it is lost, which is all this returns with.
    pub async fn hold(&self, held: &mut Held) -> Lost {
        loop {
            sleep(RENEW_PERIOD).await;
            let started = Instant::now();
            match timeout(REQUEST_TIMEOUT, self.renew(&held.lease)).await {
                Ok(Ok(Ok(lease))) => *held = Held { lease, renewed: started },
                Ok(Ok(Err(lost))) => return lost,
                Ok(Err(error)) => warn!(lease = self.name, %error, "the lease could not be renewed"),
                Err(_) => warn!(lease = self.name, "no answer about the lease in {}s", REQUEST_TIMEOUT.as_secs()),
            }
            if held.renewed.elapsed() >= RENEW_DEADLINE {
                return Lost::Expired(self.name.clone());
            }
        }
    }

    async fn renew(&self, lease: &Lease) -> Result<Result<Lease, Lost>, kube::Error> {
        let mut renewed = lease.clone();
        self.take(&mut renewed);
        match self.api.replace(&self.name, &PostParams::default(), &renewed).await {
            Ok(lease) => Ok(Ok(lease)),
            // Somebody wrote it, maybe this very operator with an answer that was lost.
            Err(kube::Error::Api(status)) if status.is_conflict() => {
                let mut newest = self.api.get(&self.name).await?;
                let holder = newest.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
                if holder != self.identity {
                    return Ok(Err(Lost::Taken { lease: self.name.clone(), holder }));
                }
                self.take(&mut newest);
                self.api.replace(&self.name, &PostParams::default(), &newest).await.map(Ok)
            }
            Err(error) => Err(error),
        }
    }

    /// Gives the lease to whoever stands by. Failing that, it expires by itself.
    pub async fn release(&self, held: Held) {
        let mut lease = held.lease;
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(RELEASED_SECONDS);
            spec.renew_time = Some(MicroTime(Timestamp::now()));
        }
        match timeout(REQUEST_TIMEOUT, self.api.replace(&self.name, &PostParams::default(), &lease)).await {
            Ok(Ok(_)) => info!(lease = self.name, "released the lease"),
            Ok(Err(error)) => warn!(lease = self.name, %error, "the lease could not be released and will expire"),
            Err(_) => warn!(lease = self.name, "the lease could not be released and will expire"),
        }
    }
}

#[cfg(test)]
mod tests;
