//! What a verdict rests on, as a text that two moments can be compared by: the latch holds while it is the same.
//!
//! ```text
//! 4f0c…e1+ConfigMap:golden=9b1d20c4a7+Secret:hf=absent/2026-11-26 within 900s
//! │       │                                            │           └ a verdict of the Deadline gate only
//! │       └ states of the objects that the spec names  └ value of the annotation gantry.dev/retry
//! └ hash of the fields that are judged by
//! ```
//!
//! Whatever a message advises to change is in it. Pure; who looks at the objects is [`crate::objects`].

use std::time::Duration;

use gantry_crds::status::{GateName, RejectedOutcome, RejectedStatus};

use super::RolloutState;
use crate::{
    build::hash,
    validate::{NamedObject, WantedVersion},
};

/// The state of an object that is not there.
const ABSENT: &str = "absent";
/// The state of an object that could not be looked at, and had not been before.
const UNSEEN: &str = "unseen";
/// Hexadecimal digits by which two states of an object are told apart.
const STATE_DIGITS: usize = 10;

/// An object as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    /// Which object.
    pub object: NamedObject,
    /// What was seen of it.
    pub seen: Seen,
}

/// What a look at an object showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// It is there.
    There {
        /// Its identity.
        uid: String,
        /// Its resource version.
        resource_version: String,
    },
    /// It is not there.
    Absent,
    /// The API server did not say: it is taken to be as it was seen last.
    Nothing,
}

impl WantedVersion {
    /// Adds what the version is judged by beside the spec. `before` says how it was seen last.
    pub fn judge_by(&mut self, seen: &[Sighting], before: &RolloutState) {
        let objects: String = seen.iter().map(|sighting| sighting.text(before)).collect();
        // Names of objects have no slash, and the hash has none.
        let (spec, token) =
            self.judged.split_once('/').map_or((&*self.judged, None), |(spec, token)| (spec, Some(token)));
        let token = token.map(|token| format!("/{token}")).unwrap_or_default();
        self.judged = format!("{spec}{objects}{token}");
    }
}

impl Sighting {
    fn text(&self, before: &RolloutState) -> String {
        let NamedObject { kind, name } = &self.object;
        let part = format!("+{}:{name}=", kind.as_str());
        let state = match &self.seen {
            Seen::There { uid, resource_version } => hash(&(uid, resource_version))[..STATE_DIGITS].to_owned(),
            Seen::Absent => ABSENT.to_owned(),
            Seen::Nothing => seen_last(before, &part).unwrap_or(UNSEEN).to_owned(),
        };
        format!("{part}{state}")
    }
}

/// The state of the object that `part` begins with, as the latch has it, which is the newest, or the attempt.
fn seen_last<'a>(state: &'a RolloutState, part: &str) -> Option<&'a str> {
    let rejected = state.rejected.as_ref().map(|rejected| rejected.judged.as_str());
    let attempt = state.rollout.as_ref().and_then(|rollout| rollout.judged.as_deref());
    rejected.into_iter().chain(attempt).find_map(|judged| {
        // A token may hold anything, and follows the first slash.
        let (_, state) = judged.split('/').next()?.split_once(part)?;
        state.split(['+', ' ']).next()
    })
}

/// Whether an attempt that began with `begun` may go on now that it is `now`. An object that was not there is waited for
/// by the pods: that it comes is no reason to begin again. Nor is that one goes: what was read of it was read. Nor is that
/// one is seen at last: pods have read it as it is, or wait for it.
#[must_use]
pub fn still_holds(begun: &str, now: &str) -> bool {
    let parts = |text: &str| -> Vec<String> {
        let (left, token) = text.split_once('/').unwrap_or((text, ""));
        left.split('+').chain([token]).map(str::to_owned).collect()
    };
    let (begun, now) = (parts(begun), parts(now));
    let same = |(begun, now): (&String, &String)| {
        let (object, other) = (begun.split_once('='), now.split_once('='));
        match (object, other) {
            (Some((object, before)), Some((other, after))) => {
                object == other
                    && (before == after || [before, after].iter().any(|state| [ABSENT, UNSEEN].contains(state)))
            }
            _ => begun == now,
        }
    };
    begun.len() == now.len() && begun.iter().zip(&now).all(same)
}

/// Whether nothing has changed that a verdict on this version rests on.
#[must_use]
pub fn stands(rejected: &RejectedStatus, wanted: &WantedVersion) -> bool {
    of_verdict(&wanted.judged, rejected.gate, rejected.outcome, wanted.progress_deadline) == rejected.judged
}

/// What an attempt that began with `begun` is judged by from now on, where it [`still_holds`]: an object that it waited for
/// and that is there by now is taken up as it is, so that pods are not judged by two states of it.
#[must_use]
pub fn taken_up(begun: &str, now: &str) -> String {
    let (left, token) = begun.split_once('/').map_or((begun, None), |(left, token)| (left, Some(token)));
    let seen = now.split_once('/').map_or(now, |(left, _)| left);
    let unread = |part: &str| part.split_once('=').is_some_and(|(_, state)| [ABSENT, UNSEEN].contains(&state));
    let parts = left.split('+').zip(seen.split('+')).map(|(before, after)| if unread(before) { after } else { before });
    let left = parts.collect::<Vec<_>>().join("+");
    token.map_or_else(|| left.clone(), |token| format!("{left}/{token}"))
}

/// What a verdict rests on that was reached with `judged`: one of the Deadline gate also on the time that there was.
#[must_use]
pub fn of_verdict(judged: &str, gate: GateName, outcome: RejectedOutcome, progress_deadline: Duration) -> String {
    match (gate, outcome) {
        (GateName::Deadline, RejectedOutcome::Rejected) => format!("{judged} within {}s", progress_deadline.as_secs()),
        _ => judged.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::validate::ObjectKind;

    fn there(version: &str) -> Seen {
        Seen::There { uid: "uid".to_owned(), resource_version: version.to_owned() }
    }

    fn judged(token: &str, prompts: Option<&str>, secret: Option<&str>) -> String {
        let mut wanted = super::super::tests::spec(1).wanted;
        wanted.judged = format!("hash{token}");
        let seen = |kind, name: &str, version: Option<&str>| Sighting {
            object: NamedObject { kind, name: name.to_owned() },
            seen: version.map_or(Seen::Absent, there),
        };
        let seen = [seen(ObjectKind::ConfigMap, "golden", prompts), seen(ObjectKind::Secret, "hf", secret)];
        wanted.judge_by(&seen, &RolloutState::default());
        wanted.judged
    }

    #[test]
    fn an_attempt_begins_again_when_what_it_read_has_changed() {
        let begun = judged("", Some("1"), None);
        assert!(begun.ends_with("+Secret:hf=absent"), "{begun}");
        for (now, holds, what) in [
            (judged("", Some("1"), None), true, "the same"),
            (judged("", Some("1"), Some("1")), true, "the secret that was waited for has come"),
            (judged("", None, None), true, "what was read is gone"),
            (judged("", Some("2"), None), false, "other prompts"),
            (judged("/again", Some("1"), None), false, "the user asks again"),
            (judged("/a=b+c", Some("1"), None), false, "a token may hold anything"),
        ] {
            assert_eq!(still_holds(&begun, &now), holds, "{what}: {begun} {now}");
        }
        let taken_up = taken_up(&begun, &judged("", None, Some("1")));
        assert_eq!(taken_up, judged("", Some("1"), Some("1")), "what came is taken up, what went was read");
        assert!(!still_holds(&taken_up, &judged("", Some("1"), Some("2"))), "and may not change after that");
        let odd = judged("/a=b+c", Some("1"), None);
        assert_eq!(super::taken_up(&odd, &odd), odd);
        assert!(still_holds(&odd, &odd) && !still_holds(&odd, &judged("/a=c+c", Some("1"), None)));
    }

    #[test]
    fn what_cannot_be_looked_at_is_as_it_was_seen_last() {
        let wanted = || {
            let mut wanted = super::super::tests::spec(1).wanted;
            wanted.judged = "hash/+Secret:hf=forged".to_owned();
            wanted
        };
        let secret =
            |seen| [Sighting { object: NamedObject { kind: ObjectKind::Secret, name: "hf".to_owned() }, seen }];
        let after = |seen, before: &RolloutState| {
            let mut wanted = wanted();
            wanted.judge_by(&secret(seen), before);
            wanted.judged
        };
        let nothing_known = RolloutState::default();
        let known = after(there("1"), &nothing_known);
        let mut scene = super::super::tests::Scene::serving();
        scene.spec = Some(super::super::tests::spec(2));
        scene.step();
        let mut attempt = scene.state.clone();
        attempt.rollout.as_mut().unwrap().judged = Some(known.clone());
        scene.now += 900;
        scene.step();
        let latched = RejectedStatus { judged: format!("{known} within 900s"), ..scene.state.rejected.unwrap() };
        let latched = RolloutState { rejected: Some(latched), ..RolloutState::default() };
        for before in [&latched, &attempt] {
            assert_eq!(after(Seen::Nothing, before), known);
            assert_ne!(after(Seen::Absent, before), known);
        }
        let unseen = after(Seen::Nothing, &nothing_known);
        assert!(
            still_holds(&unseen, &known) && still_holds(&known, &unseen),
            "it is no news that it is seen: {unseen}"
        );
        assert_eq!(super::taken_up(&unseen, &known), known);
    }
}
