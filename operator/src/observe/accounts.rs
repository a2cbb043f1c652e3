//! The account of a service's pods, and pods whose tokens are of one that is gone.
//!
//! A token is bound to an account as it was made, by its UID: one of the same name that is made anew takes none of the tokens of the one
//! before, and the kubelet renews none of them. Pods with such go on answering, and hear and report nothing any more. So they are
//! replaced: `build` notes with a Deployment of which account its pods are. Absent: accounts of the user's own, which are not watched.

use gantry_crds::{InferenceService, conditions::Reason};
use jiff::{SignedDuration, Timestamp};
use kube::{Resource, ResourceExt};

use super::{Observed, Trouble};
use crate::limits::CLOCK_SKEW;

impl Observed {
    /// UID of the account that the operator made for the pods of a service, as far as it is known.
    #[must_use]
    pub fn account_uid(&self, owner: &InferenceService) -> Option<&str> {
        let account = self.service_account.as_ref()?;
        let is_owned = |uid: &str| owner.meta().uid.as_deref() == Some(uid);
        let is_own = account.owner_references().iter().any(|one| one.controller == Some(true) && is_owned(&one.uid));
        account.meta().uid.as_deref().filter(|_| is_own)
    }

    /// Takes it that pods are not heard of any more which are older than their account.
    pub fn have_lost_account(&mut self) {
        let Some(account) = &self.service_account else { return };
        let (name, skew) = (account.name_any(), SignedDuration::try_from(CLOCK_SKEW).unwrap_or(SignedDuration::MAX));
        let Some(made) = account.creation_timestamp().and_then(|at| at.0.checked_sub(skew).ok()) else { return };
        let is_older = |at: Timestamp| at < made;
        for pod in self.pods.iter_mut().filter(|pod| pod.counted && pod.trouble.is_none()) {
            if pod.account.as_deref() == Some(&name) && pod.made.is_some_and(is_older) {
                pod.trouble = Some(Trouble::of_account(&pod.name, &name));
            }
        }
    }
}

impl Trouble {
    /// A pod's account is not the one any more that its token is of.
    fn of_account(pod: &str, account: &str) -> Self {
        let message = format!(
            "pod {pod} is not heard of any more: its ServiceAccount {account} was deleted and made anew, and what it has is a token of \
             the one before; it is replaced by itself"
        );
        Self { reason: Reason::AccountReplaced, message }
    }
}
