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

use crate::{
    build::hash,
    validate::{NamedObject, WantedVersion},
};

/// The state of an object that is not there.
const ABSENT: &str = "absent";
/// Hexadecimal digits by which two states of an object are told apart.
const STATE_DIGITS: usize = 10;

/// An object as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    /// Which object.
    pub object: NamedObject,
    /// Its identity and resource version; `None` when it is not there.
    pub state: Option<(String, String)>,
}

impl WantedVersion {
    /// Adds what the version is judged by beside the spec.
    pub fn judge_by(&mut self, seen: &[Sighting]) {
        let objects: String = seen.iter().map(Sighting::text).collect();
        // Names of objects have no slash, and the hash has none.
        let (spec, token) =
            self.judged.split_once('/').map_or((&*self.judged, None), |(spec, token)| (spec, Some(token)));
        let token = token.map(|token| format!("/{token}")).unwrap_or_default();
        self.judged = format!("{spec}{objects}{token}");
    }
}

impl Sighting {
    fn text(&self) -> String {
        let NamedObject { kind, name } = &self.object;
        let state =
            self.state.as_ref().map_or_else(|| ABSENT.to_owned(), |state| hash(state)[..STATE_DIGITS].to_owned());
        format!("+{}:{name}={state}", kind.as_str())
    }
}

/// Whether an attempt that began with `begun` may go on now that it is `now`. An object that was not there is waited for
/// by the pods: that it comes is no reason to begin again. Nor is that one goes: what was read of it was read.
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
                object == other && (before == after || before == ABSENT || after == ABSENT)
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
    let absent = |part: &str| part.split_once('=').is_some_and(|(_, state)| state == ABSENT);
    let parts = left.split('+').zip(seen.split('+')).map(|(before, after)| if absent(before) { after } else { before });
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
    use super::*;
    use crate::validate::ObjectKind;

    fn judged(token: &str, prompts: Option<&str>, secret: Option<&str>) -> String {
        let mut wanted = super::super::tests::spec(1).wanted;
        wanted.judged = format!("hash{token}");
        let seen = |kind, name: &str, version: Option<&str>| Sighting {
            object: NamedObject { kind, name: name.to_owned() },
            state: version.map(|version| ("uid".to_owned(), version.to_owned())),
        };
        wanted.judge_by(&[seen(ObjectKind::ConfigMap, "golden", prompts), seen(ObjectKind::Secret, "hf", secret)]);
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
}
