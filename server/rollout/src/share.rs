//! Who is answered by a candidate: a share of the conversations, the same ones in every pod and for as long as the share does not fall.
//!
//! A conversation is known by a digest of what its requests have in common. Hashed with the version's name it has a place among all,
//! and those whose place is within the share are answered by that version: who is within 5% is within 25%, and with another version
//! they are others, so that not always the same users try what is new.

use gantry_crds::scalars::Percent;
use sha2::{Digest as _, Sha256};

/// A share of all conversations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Share(u32);

/// What the requests of one conversation have in common, as a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conversation([u8; 32]);

/// A version that a share of the requests goes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Canary {
    /// Its name.
    pub version: String,
    /// Which share.
    pub share: Share,
}

impl Share {
    /// The share; `None` where the text is none.
    #[must_use]
    pub fn of(percent: &Percent) -> Option<Self> {
        percent.parts().ok().map(Self)
    }

    /// The share as a number from 0 to 1.
    #[must_use]
    pub fn ratio(self) -> f64 {
        f64::from(self.0) / f64::from(Percent::WHOLE)
    }

    /// The share as the status has it, e.g. `5%`.
    #[must_use]
    pub fn percent(self) -> Percent {
        Percent(format!("{}%", f64::from(self.0) * 100.0 / f64::from(Percent::WHOLE)))
    }

    /// Whether requests of the conversation are answered by this version, where it has this share.
    #[must_use]
    pub fn takes(self, version: &str, conversation: &Conversation) -> bool {
        let hash = Sha256::new().chain_update(version).chain_update([0]).chain_update(conversation.0).finalize();
        let place = hash.iter().take(8).fold(0_u64, |place, byte| (place << 8) | u64::from(*byte));
        // Of so many parts of a whole it is in this one.
        let part = (u128::from(place) * u128::from(Percent::WHOLE)) >> 64;
        part < u128::from(self.0)
    }
}

impl Conversation {
    /// The conversation that these parts are a key of. Where one part ends and the next one begins makes a difference.
    #[must_use]
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        Self(digest.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn share(percent: &str) -> Share {
        Share::of(&percent.into()).unwrap()
    }

    fn conversations(count: u32) -> Vec<Conversation> {
        (0..count).map(|number| Conversation::of([&number.to_le_bytes()[..]])).collect()
    }

    #[test]
    fn a_share_is_told_as_it_was_asked_for() {
        for percent in ["5%", "0.5%", "33.333333%", "0.000001%", "100%", "99.999999%"] {
            assert_eq!(share(percent).percent().0, percent);
        }
        assert_eq!(share("5.0%"), share("5%"));
        assert_eq!(Share::of(&"five".into()), None);
    }

    #[test]
    fn none_are_nobody_and_the_whole_is_everybody() {
        for conversation in conversations(1_000) {
            assert!(!share("0%").takes("v2", &conversation) && share("100%").takes("v2", &conversation));
        }
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        let of = |parts: &[&str]| Conversation::of(parts.iter().map(|part| part.as_bytes()));
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
        assert_ne!(of(&["abc"]), of(&["abc", ""]));
        assert_eq!(of(&["ab", "c"]), of(&["ab", "c"]));
    }

    proptest! {
        /// Within five standard deviations.
        #[test]
        fn a_share_of_the_conversations_is_taken(version in "[a-z]{1,8}-[0-9a-f]{10}", percent in 1_u32..100) {
            let share = share(&format!("{percent}%"));
            let all = conversations(4_000);
            let taken = all.iter().filter(|conversation| share.takes(&version, conversation)).count() as f64;
            let (wanted, ratio) = (4_000.0 * share.ratio(), share.ratio());
            let deviation = (wanted * (1.0 - ratio)).sqrt();
            prop_assert!((taken - wanted).abs() <= 5.0 * deviation, "{taken} of {wanted}");
        }

        #[test]
        fn who_is_within_a_share_is_within_every_larger_one(key in ".{0,40}", less in 0_u32..=100, more in 0_u32..=100) {
            let (less, more) = (less.min(more), less.max(more));
            let conversation = Conversation::of([key.as_bytes()]);
            let takes = |percent: u32| share(&format!("{percent}%")).takes("chat-1", &conversation);
            prop_assert!(!takes(less) || takes(more));
        }
    }

    /// Of those that one version takes, another takes no more than of all.
    #[test]
    fn other_versions_take_others() {
        let (all, half) = (conversations(4_000), share("50%"));
        let both = all.iter().filter(|one| half.takes("chat-1", one) && half.takes("chat-2", one)).count();
        assert!((900..1_100).contains(&both), "{both} of 1000");
    }
}
