//! What of the status makes a difference, as numbers, and the status of an earlier moment.

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
};

use gantry_crds::status::ReplicaStatus;
use gantry_operator::decide::RolloutState;
use jiff::{SignedDuration, Timestamp};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// The same with all its times moved back.
pub(super) fn earlier<T: Serialize + DeserializeOwned>(value: &T, by: SignedDuration) -> T {
    let mut json = serde_json::to_value(value).unwrap();
    every_text(&mut json, &mut |text| {
        if let Ok(at) = text.parse::<Timestamp>() {
            *text = (at - by).to_string();
        }
    });
    serde_json::from_value(json).unwrap()
}

fn every_text(value: &mut Value, change: &mut impl FnMut(&mut String)) {
    match value {
        Value::String(text) => change(text),
        Value::Array(list) => list.iter_mut().for_each(|one| every_text(one, change)),
        Value::Object(fields) => fields.values_mut().for_each(|one| every_text(one, change)),
        _ => {}
    }
}

/// What is for people, or the same for all.
const WORDS: [&str; 7] = ["message", "plan", "summary", "value", "reportedAt", "agent", "state"];

/// A hash of all that is in it but words.
fn hash_of<T: Serialize>(value: &T, without: &[&str]) -> u64 {
    fn drop_fields(value: &mut Value, without: &[&str]) {
        match value {
            Value::Array(list) => list.iter_mut().for_each(|one| drop_fields(one, without)),
            Value::Object(fields) => {
                fields.retain(|name, _| !WORDS.contains(&name.as_str()) && !without.contains(&name.as_str()));
                fields.values_mut().for_each(|one| drop_fields(one, without));
            }
            _ => {}
        }
    }
    let mut json = serde_json::to_value(value).unwrap();
    drop_fields(&mut json, without);
    let mut hasher = DefaultHasher::new();
    json.to_string().hash(&mut hasher);
    hasher.finish()
}

pub(super) fn hash_of_report(report: &ReplicaStatus) -> u64 {
    hash_of(report, &["pod"])
}

pub(super) fn hash_of_state(state: &RolloutState) -> u64 {
    let RolloutState {
        active,
        candidate,
        previous,
        active_side,
        rollout,
        rejected,
        versions,
        attempts,
        goes_over_by,
        ..
    } = state;
    let mut hasher = DefaultHasher::new();
    (active, candidate, previous, active_side, attempts, goes_over_by).hash(&mut hasher);
    versions.iter().for_each(|version| version.name.hash(&mut hasher));
    // How far each pod is goes with the pod, as does whether it is quarantined, and when a version was refused is for people.
    (hash_of(rollout, &["pods", "turn"]), hash_of(rejected, &["at"])).hash(&mut hasher);
    hasher.finish()
}
