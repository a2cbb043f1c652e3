//! How much a pod may write about itself.
//!
//! Every agent of a service and the operator read the entries of all its pods, and one object holds them. So the API server takes an
//! entry with these limits alone, whoever wrote it, and an agent cuts what it has to say to them ([`as_written`]). They are wider than
//! what agents of any release write by themselves, since one whose entry is refused says nothing at all.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::Value;

use super::ReplicaStatus;

/// The longest message, in characters.
pub const MAX_REPORT_MESSAGE_CHARS: u32 = 2048;
/// The longest other text, in characters: names and figures.
pub const MAX_REPORT_TEXT_CHARS: u32 = 512;
/// The most entries of a list.
pub const MAX_REPORT_ENTRIES: u32 = 32;

/// Characters that the text in a field of this name may have.
fn max_chars(field: &str) -> u32 {
    if field == "message" { MAX_REPORT_MESSAGE_CHARS } else { MAX_REPORT_TEXT_CHARS }
}

/// The schema of all entries, with a limit on each list and text in them.
pub(super) fn entries(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = Vec::<ReplicaStatus>::json_schema(generator).to_value();
    if let Some(entry) = schema.get_mut("items") {
        bound("", entry);
    }
    Schema::try_from(schema).unwrap_or_default()
}

fn bound(field: &str, schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else { return };
    let is = |wanted: &str| match object.get("type") {
        Some(Value::String(one)) => one == wanted,
        Some(Value::Array(all)) => all.iter().any(|one| one == wanted),
        _ => false,
    };
    let limit = match (is("array"), is("string")) {
        (true, _) => Some(("maxItems", MAX_REPORT_ENTRIES)),
        (false, true) => Some(("maxLength", max_chars(field))),
        (false, false) => None,
    };
    if let Some((keyword, limit)) = limit {
        object.entry(keyword).or_insert_with(|| limit.into());
    }
    for (keyword, inner) in object {
        match (keyword.as_str(), inner) {
            ("properties", Value::Object(fields)) => fields.iter_mut().for_each(|(field, inner)| bound(field, inner)),
            ("anyOf" | "oneOf" | "allOf", Value::Array(all)) => all.iter_mut().for_each(|inner| bound(field, inner)),
            ("items", inner) => bound(field, inner),
            _ => {}
        }
    }
}

/// The entry as an agent writes it: what is longer than the API server takes ends with an ellipsis.
#[must_use]
pub fn as_written(entry: &ReplicaStatus) -> Value {
    let mut value = serde_json::to_value(entry).unwrap_or_default();
    cut("", &mut value);
    value
}

fn cut(field: &str, value: &mut Value) {
    match value {
        Value::String(text) => shorten(text, max_chars(field)),
        Value::Array(all) => {
            all.truncate(MAX_REPORT_ENTRIES as usize);
            all.iter_mut().for_each(|inner| cut(field, inner));
        }
        Value::Object(fields) => fields.iter_mut().for_each(|(field, inner)| cut(field, inner)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Cuts a text to so many characters, the ellipsis that says so included.
fn shorten(text: &mut String, chars: u32) {
    let chars = chars as usize;
    // Where it is not longer in bytes it is not so in characters.
    if text.len() <= chars || text.char_indices().nth(chars).is_none() {
        return;
    }
    let end = text.char_indices().nth(chars - 1).map_or(text.len(), |(end, _)| end);
    text.truncate(end);
    text.push('…');
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn schema() -> Value {
        let crd = serde_json::to_value(<crate::InferenceService as kube::CustomResourceExt>::crd()).unwrap();
        crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["replicas"]
            .clone()
    }

    /// What of a schema has no limit, and what of a value is past one.
    fn beyond(path: &str, schema: &Value, value: Option<&Value>) -> Vec<String> {
        let mut found = Vec::new();
        let (limit, length) = match schema["type"].as_str().unwrap_or_default() {
            "array" => ("maxItems", value.and_then(Value::as_array).map(Vec::len)),
            "string" => ("maxLength", value.and_then(Value::as_str).map(|text| text.chars().count())),
            _ => ("type", None),
        };
        let max = schema[limit].as_u64();
        if schema.get(limit).is_none() || length.zip(max).is_some_and(|(length, max)| length as u64 > max) {
            found.push(format!("{path}: {limit} {max:?}, {length:?}"));
        }
        for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
            found.extend(beyond(&format!("{path}.{name}"), inner, value.and_then(|value| value.get(name))));
        }
        if let Some(inner) = schema.get("items") {
            let items = value.and_then(Value::as_array);
            found.extend(beyond(&format!("{path}[]"), inner, None));
            found.extend(items.into_iter().flatten().flat_map(|item| beyond(&format!("{path}[]"), inner, Some(item))));
        }
        found
    }

    #[test]
    fn the_api_server_takes_no_text_and_no_list_without_end_of_a_pod() {
        let schema = schema();
        assert_eq!((&schema["maxItems"], &schema["x-kubernetes-list-type"]), (&json!(512), &json!("map")));
        let entry = &schema["items"]["properties"];
        assert_eq!(entry["message"]["maxLength"], MAX_REPORT_MESSAGE_CHARS);
        assert_eq!(entry["candidate"]["properties"]["gates"]["maxItems"], MAX_REPORT_ENTRIES);
        assert_eq!(beyond("replicas", &schema, None), [] as [String; 0]);
    }

    #[test]
    fn an_agent_cuts_what_it_writes_to_what_is_taken() {
        let long = "ä".repeat(5000);
        let gate = json!({"name": "Load", "verdict": "Fail", "value": long, "message": long});
        let entry = json!({"pod": "p", "health": "Failed", "message": long, "reportedAt": "2026-01-01T00:00:00Z",
            "candidate": {"version": "v", "phase": "Failed", "message": long, "gates": vec![gate; 100]},
            "canary": {"version": "v", "share": "5%", "breach": {"signal": long, "value": "", "limit": long, "samples": 1}},
            "agent": {"gates": [], "strategies": [], "signals": vec![long; 100]}});
        let entry: ReplicaStatus = serde_json::from_value(entry).unwrap();
        let written = as_written(&entry);
        assert_eq!(beyond("replicas", &schema(), Some(&json!([written]))), [] as [String; 0]);
        let message = written["message"].as_str().unwrap();
        assert!(message.ends_with("ä…") && message.chars().count() == MAX_REPORT_MESSAGE_CHARS as usize, "{message}");
        let back: ReplicaStatus = serde_json::from_value(written).unwrap();
        assert_eq!(back.candidate.unwrap().gates.len(), MAX_REPORT_ENTRIES as usize);
        // What was written before there were limits is read, and what fits is left as it is.
        assert!(beyond("replicas", &schema(), Some(&json!([serde_json::to_value(&entry).unwrap()]))).len() > 4);
        let fits =
            ReplicaStatus { message: Some("ä".repeat(2048)), candidate: None, canary: None, agent: None, ..entry };
        assert_eq!(as_written(&fits), serde_json::to_value(&fits).unwrap());
    }
}
