//! What a verdict rests on, as a text that two moments can be compared by: the latch holds while it is the same.
//!
//! ```text
//! 4f0c…e1+ConfigMap:golden=9b1d20c4a7+Secret:hf=absent/2026-11-26 within 900s as 03b1e2d9aa by pods of 3
//! │       │                                            │           └ a verdict of the Deadline gate only; a hash of spec.pod, and the
//! │       │                                            │             annotation gantry.dev/restart, where they are set
//! │       └ states of the objects that the spec names  └ value of the annotation gantry.dev/retry
//! └ hash of the fields that are judged by
//! ```
//!
//! Whatever a message advises to change is in it, and of the objects none that it could not be about: a Secret that is
//! renewed every hour would lift the rejection of a model that has no room, every hour. Pure; who looks at the objects is [`crate::objects`].

use std::time::Duration;

use gantry_crds::status::{GateName, RejectedStatus};

use super::RolloutState;
use crate::{
    build::hash,
    validate::{NamedObject, ObjectKind, WantedVersion},
};

/// The state of an object that is not there.
const ABSENT: &str = "absent";
/// The state of an object that could not be looked at, and had not been before.
const UNSEEN: &str = "unseen";
/// Hexadecimal digits by which two states of an object, or of the pods, are told apart.
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
        /// Whether it says for which hosts it may be used, as a Secret must.
        names_hosts: bool,
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
    /// Whether it is of the Secret of this name.
    #[must_use]
    pub fn is_of_secret(&self, name: &str) -> bool {
        self.object.kind == ObjectKind::Secret && self.object.name == name
    }

    fn text(&self, before: &RolloutState) -> String {
        let NamedObject { kind, name } = &self.object;
        let part = format!("+{}:{name}=", kind.judged_as());
        let state = match &self.seen {
            Seen::There { uid, resource_version, .. } => hash(&(uid, resource_version))[..STATE_DIGITS].to_owned(),
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

/// What an attempt began with against what there is now.
#[derive(Debug, PartialEq, Eq)]
pub enum Comparison {
    /// It goes on, and is judged by this from now on.
    Holds {
        /// As it began, with objects that it waited for as they are now: no two pods are judged by two states of one.
        judged: String,
    },
    /// Objects that were read are others by now.
    OtherObjects,
    /// The user asks for something else, or once more.
    OtherSpec,
}

/// Compares what an attempt `begun` with what there is `now`. An object that was not there is waited for by the pods: that it
/// comes is no reason to begin again. Nor is that one goes: what was read of it was read. Nor is that one is seen at last:
/// pods have read it as it is, or wait for it.
#[must_use]
pub fn compare(begun: &str, now: &str) -> Comparison {
    let (before, after) = (Parts::of(begun), Parts::of(now));
    let names = |parts: &Parts| parts.objects.iter().map(|(object, _)| (*object).to_owned()).collect::<Vec<_>>();
    if (before.spec, before.token) != (after.spec, after.token) || names(&before) != names(&after) {
        return Comparison::OtherSpec;
    }
    let mut judged = before.spec.to_owned();
    for ((object, was), (_, is)) in before.objects.iter().zip(&after.objects) {
        let unread = |state: &str| [ABSENT, UNSEEN].contains(&state);
        if was != is && !unread(was) && !unread(is) {
            return Comparison::OtherObjects;
        }
        judged.push_str(&format!("+{object}={}", if unread(was) { is } else { was }));
    }
    Comparison::Holds { judged: judged + before.token }
}

/// The text, taken apart.
struct Parts<'a> {
    spec: &'a str,
    /// Kind and name of each object, and its state.
    objects: Vec<(&'a str, &'a str)>,
    /// With the slash; empty without one.
    token: &'a str,
}

impl<'a> Parts<'a> {
    fn of(text: &'a str) -> Self {
        // A token may hold anything, and names and states hold none of these.
        let (left, token) = text.split_at(text.find('/').unwrap_or(text.len()));
        let mut parts = left.split('+');
        let spec = parts.next().unwrap_or_default();
        Self { spec, objects: parts.filter_map(|part| part.split_once('=')).collect(), token }
    }
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy)]
pub struct Verdict {
    /// The gate.
    pub gate: GateName,
    /// Pods waited for something when the time was up.
    pub waits: bool,
    /// The objects changed faster than pods prepared: it rests on none of them, or their next change would lift it, and so
    /// on for ever.
    pub unsteady: bool,
}

impl Verdict {
    /// Whether it may be about the content of such an object.
    fn rests_on(&self, object: &str) -> bool {
        use GateName::{
            Deadline, Digest, Drift, Fetch, Format, Health, Load, Memory, Performance, Prompts, Shadow, Template,
        };
        let is = |kind: ObjectKind| object.split(':').next() == Some(kind.judged_as());
        if self.unsteady {
            return false;
        }
        match self.gate {
            // Without a token, what comes may be a page that asks for one; authorities may be none, or those of another host.
            Fetch | Digest | Format => is(ObjectKind::Secret) || is(ObjectKind::Authorities),
            // It is compared on the golden prompts, too.
            Prompts | Drift => is(ObjectKind::ConfigMap),
            Deadline => self.waits,
            Memory | Template | Load | Performance | Shadow | Health => false,
            GateName::Unknown(_) => true,
        }
    }
}

/// What a verdict rests on that was reached with `judged`: one of the Deadline gate also on the time that there was, and on
/// the pods that had it, since one may be advised to replace them, or to let them onto other nodes.
#[must_use]
pub fn of_verdict(judged: &str, verdict: &Verdict, wanted: Option<&WantedVersion>) -> String {
    text_of(judged, |object| verdict.rests_on(object), verdict.gate, wanted)
}

/// Whether nothing has changed that a verdict on this version rests on.
#[must_use]
pub fn stands(rejected: &RejectedStatus, wanted: &WantedVersion) -> bool {
    let rests_on = Parts::of(&rejected.judged).objects;
    let rests_on = |object: &str| rests_on.iter().any(|(one, _)| *one == object);
    text_of(&wanted.judged, rests_on, rejected.gate, Some(wanted)) == rejected.judged
}

fn text_of(judged: &str, rests_on: impl Fn(&str) -> bool, gate: GateName, wanted: Option<&WantedVersion>) -> String {
    let Parts { spec, objects, token } = Parts::of(judged);
    let objects =
        objects.iter().filter(|(object, _)| rests_on(object)).map(|(object, state)| format!("+{object}={state}"));
    let mut text = [spec.to_owned()].into_iter().chain(objects).collect::<String>() + token;
    if let Some(wanted) = wanted.filter(|_| gate == GateName::Memory) {
        text.push_str(&format!(" by {:?}", wanted.strategy));
    }
    if gate == GateName::Deadline {
        let deadline = wanted.map_or(Duration::ZERO, |wanted| wanted.progress_deadline);
        text.push_str(&format!(" within {deadline:?}"));
        if let Some(pod) = wanted.and_then(|wanted| wanted.pod.as_ref()) {
            text.push_str(&format!(" as {}", &pod[..STATE_DIGITS]));
        }
        if let Some(restart) = wanted.and_then(|wanted| wanted.restart.as_ref()) {
            text.push_str(&format!(" by pods of {restart}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn there(version: &str) -> Seen {
        Seen::There { uid: "uid".to_owned(), resource_version: version.to_owned(), names_hosts: true }
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

    /// The same with the authorities of a source in a ConfigMap.
    fn judged_with_ca(token: &str, [prompts, secret, ca]: [&str; 3]) -> String {
        let mut wanted = super::super::tests::spec(1).wanted;
        wanted.judged = judged(token, Some(prompts), Some(secret));
        let object = NamedObject { kind: ObjectKind::Authorities, name: "golden".to_owned() };
        wanted.judge_by(&[Sighting { object, seen: there(ca) }], &RolloutState::default());
        wanted.judged
    }

    #[test]
    fn an_attempt_begins_again_when_what_it_read_has_changed() {
        let begun = judged("", Some("1"), None);
        assert!(begun.ends_with("+Secret:hf=absent"), "{begun}");
        let odd = judged("/a=b+c", Some("1"), None);
        let holds = |judged: &str| Comparison::Holds { judged: judged.to_owned() };
        let with_secret = judged("", Some("1"), Some("1"));
        for (begun, now, what, wanted) in [
            (&begun, judged("", Some("1"), None), "the same", holds(&begun)),
            (&begun, with_secret.clone(), "the secret that was waited for has come", holds(&with_secret)),
            (&begun, judged("", None, None), "what was read is gone", holds(&begun)),
            (&begun, judged("", None, Some("1")), "one came and one went", holds(&with_secret)),
            (&begun, judged("", Some("2"), None), "other prompts", Comparison::OtherObjects),
            (&with_secret, judged("", Some("1"), Some("2")), "another secret", Comparison::OtherObjects),
            (&begun, judged("/again", Some("1"), None), "the user asks again", Comparison::OtherSpec),
            (&begun, judged("/again", Some("2"), None), "and the prompts are others", Comparison::OtherSpec),
            (&begun, odd.clone(), "a token may hold anything", Comparison::OtherSpec),
            (&odd, odd.clone(), "and is kept", holds(&odd)),
            (&odd, judged("/a=c+c", Some("1"), None), "and compared", Comparison::OtherSpec),
        ] {
            assert_eq!(compare(begun, &now), wanted, "{what}: {begun} {now}");
        }
    }

    #[test]
    fn a_verdict_rests_on_what_it_may_be_about() {
        use GateName::{Deadline, Digest, Drift, Fetch, Format, Health, Load, Memory, Prompts, Unknown};
        let judged = |objects| judged_with_ca("/a=b+c/d", objects);
        let before = judged(["1", "1", "1"]);
        let (prompts, secret, ca) = (judged(["2", "1", "1"]), judged(["1", "2", "1"]), judged(["1", "1", "2"]));
        for (gate, waits, of_prompts, of_source) in [
            (Fetch, false, false, true),
            (Digest, false, false, true),
            (Format, false, false, true),
            (Prompts, false, true, false),
            (Drift, false, true, false),
            (Memory, true, false, false),
            (Load, false, false, false),
            (Health, false, false, false),
            (Deadline, false, false, false),
            (Deadline, true, true, true),
            (Unknown("Toxicity"), false, true, true),
        ] {
            let mut wanted = super::super::tests::spec(1).wanted;
            wanted.judged.clone_from(&before);
            let verdict = Verdict { gate, waits, unsteady: false };
            let mut scene = super::super::tests::Scene::refusing();
            let mut rejected = scene.state.rejected.take().unwrap();
            (rejected.gate, rejected.judged) = (gate, of_verdict(&before, &verdict, Some(&wanted)));
            assert!(stands(&rejected, &wanted), "{gate:?} {waits}: {}", rejected.judged);
            let other_token = judged_with_ca("", ["1", "1", "1"]);
            for (now, lifts) in [(&prompts, of_prompts), (&secret, of_source), (&ca, of_source), (&other_token, true)] {
                wanted.judged.clone_from(now);
                assert_eq!(!stands(&rejected, &wanted), lifts, "{gate:?} {waits}: {} {now}", rejected.judged);
            }
            // A latch of an operator of before rests on all objects.
            rejected.judged.clone_from(&before);
            wanted.judged.clone_from(&secret);
            assert!(!stands(&rejected, &wanted));
        }
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
        for (begun, now) in [(&unseen, &known), (&known, &unseen)] {
            assert_eq!(
                compare(begun, now),
                Comparison::Holds { judged: known.clone() },
                "it is no news that it is seen"
            );
        }
    }

    #[test]
    fn a_verdict_of_memory_rests_on_the_strategy_and_no_other_does() {
        let wanted = super::super::tests::spec(1).wanted;
        let mut other = super::super::tests::spec(1).wanted;
        other.strategy = gantry_crds::inference_service::RolloutStrategy::HoldRequests;
        for (gate, lifts) in [(GateName::Memory, true), (GateName::Prompts, false), (GateName::Deadline, false)] {
            let verdict = Verdict { gate, waits: false, unsteady: false };
            let mut rejected = super::super::tests::Scene::refusing().state.rejected.take().unwrap();
            (rejected.gate, rejected.judged) = (gate, of_verdict(&wanted.judged, &verdict, Some(&wanted)));
            assert!(stands(&rejected, &wanted), "{gate:?}");
            assert_eq!(!stands(&rejected, &other), lifts, "{gate:?}: {}", rejected.judged);
        }
    }
}
