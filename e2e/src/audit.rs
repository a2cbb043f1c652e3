//! The API server's audit log against what RBAC grants: what was refused, and which permissions nobody used.
//!
//! Pure but for [`read`]. The log has a line for each request of a service account (level Metadata).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

use anyhow::{Context, Result};
use jiff::Timestamp;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde::Deserialize;

/// Prefix of the user names of service accounts; `NAMESPACE:NAME` follows.
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";
/// Annotation with RBAC's decision.
const DECISION: &str = "authorization.k8s.io/decision";
/// Most refusals that are kept; one is a failure already.
const MAX_REFUSALS: usize = 100;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    user: User,
    verb: String,
    #[serde(rename = "requestURI")]
    request_uri: String,
    object_ref: Option<ObjectRef>,
    response_status: Option<ResponseStatus>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    stage_timestamp: Timestamp,
}

#[derive(Deserialize)]
struct User {
    username: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ObjectRef {
    api_group: String,
    resource: String,
    subresource: String,
    name: String,
}

#[derive(Deserialize)]
struct ResponseStatus {
    #[serde(default)]
    code: u16,
}

/// What RBAC decides about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permission {
    /// API group; empty is the core group.
    pub group: String,
    /// Resource, with its subresource after a slash.
    pub resource: String,
    /// Verb.
    pub verb: String,
    /// Name of the object, where the permission is limited to one.
    pub name: Option<String>,
}

impl std::fmt::Display for Permission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { group, resource, verb, name } = self;
        let group = if group.is_empty() { "core" } else { group };
        write!(f, "{verb} {resource} ({group})")?;
        name.as_ref().map_or(Ok(()), |name| write!(f, " named {name}"))
    }
}

/// What one kind of service account did.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Usage {
    /// What was asked for and allowed, each with the name of its object.
    used: BTreeSet<Permission>,
    /// What RBAC refused.
    pub refusals: Vec<String>,
}

impl Usage {
    /// Whether `permission` was used.
    #[must_use]
    pub fn has_used(&self, permission: &Permission) -> bool {
        self.used.iter().any(|used| {
            let same = (&used.group, &used.resource, &used.verb)
                == (&permission.group, &permission.resource, &permission.verb);
            same && permission.name.as_ref().is_none_or(|name| used.name.as_ref() == Some(name))
        })
    }

    fn take(&mut self, line: &Line, is_told: impl Fn(Timestamp) -> bool) {
        let (object, code) = (line.object_ref.as_ref(), line.response_status.as_ref().map_or(0, |status| status.code));
        if line.annotations.get(DECISION).is_some_and(|decision| decision == "forbid") {
            if is_told(line.stage_timestamp) && self.refusals.len() < MAX_REFUSALS {
                let Line { user, verb, request_uri, stage_timestamp, .. } = line;
                self.refusals.push(format!("{stage_timestamp} {}: {verb} {request_uri}", user.username));
            }
            return;
        }
        let Some(ObjectRef { api_group, resource, subresource, name }) = object else { return };
        let resource = if subresource.is_empty() { resource.clone() } else { format!("{resource}/{subresource}") };
        let name = (!name.is_empty()).then(|| name.clone());
        let permission = Permission { group: api_group.clone(), resource, verb: line.verb.clone(), name };
        // A server-side apply of a new object is a patch in the log, and is checked for `create` besides.
        if line.verb == "patch" && code == 201 {
            self.used.insert(Permission { verb: "create".to_owned(), ..permission.clone() });
        }
        self.used.insert(permission);
    }
}

/// Reads the log at `path`: the usage of every kind of service account that `kind` gives a name, from its namespace and
/// name. Of refusals only those are told that `is_told` says so of, by the kind and the time.
///
/// # Errors
/// When the log cannot be read.
pub fn read(
    path: &Path,
    is_told: impl Fn(&str, Timestamp) -> bool,
    kind: impl Fn(&str, &str) -> Option<&'static str>,
) -> Result<BTreeMap<&'static str, Usage>> {
    let log = File::open(path).with_context(|| format!("the audit log {} cannot be read", path.display()))?;
    let mut usages = BTreeMap::new();
    for line in BufReader::new(log).lines() {
        // The last line may be half written.
        if let Ok(line) = serde_json::from_str::<Line>(&line?) {
            take(&mut usages, &line, &is_told, &kind);
        }
    }
    Ok(usages)
}

fn take(
    usages: &mut BTreeMap<&'static str, Usage>,
    line: &Line,
    is_told: impl Fn(&str, Timestamp) -> bool,
    kind: impl Fn(&str, &str) -> Option<&'static str>,
) {
    let account = line.user.username.strip_prefix(SERVICE_ACCOUNT).and_then(|account| account.split_once(':'));
    if let Some(kind) = account.and_then(|(namespace, name)| kind(namespace, name)) {
        usages.entry(kind).or_default().take(line, |at| is_told(kind, at));
    }
}

/// Every single permission that `rules` grant.
#[must_use]
pub fn permissions<'a>(rules: impl IntoIterator<Item = &'a PolicyRule>) -> BTreeSet<Permission> {
    let mut permissions = BTreeSet::new();
    for rule in rules {
        let names = match rule.resource_names.as_deref().unwrap_or_default() {
            [] => vec![None],
            names => names.iter().cloned().map(Some).collect(),
        };
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                for verb in &rule.verbs {
                    permissions.extend(names.iter().map(|name| Permission {
                        group: group.clone(),
                        resource: resource.clone(),
                        verb: verb.clone(),
                        name: name.clone(),
                    }));
                }
            }
        }
    }
    permissions
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    fn usage(lines: &[Value]) -> Usage {
        let mut usages = BTreeMap::new();
        for line in lines {
            let line = serde_json::from_value(line.clone()).unwrap();
            let from: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
            take(
                &mut usages,
                &line,
                |kind, at| kind == "operator" && at >= from,
                |_, name| (name == "op").then_some("operator"),
            );
        }
        usages.remove("operator").unwrap_or_default()
    }

    fn line(user: &str, verb: &str, resource: &str, name: &str, code: u16, decision: &str, day: u8) -> Value {
        json!({
            "user": {"username": format!("system:serviceaccount:ns:{user}")}, "verb": verb, "requestURI": "/x",
            "objectRef": {"resource": resource, "name": name}, "responseStatus": {"code": code},
            "annotations": {DECISION: decision}, "stageTimestamp": format!("2026-01-{day:02}T00:00:00.000000Z"),
        })
    }

    fn permission(verb: &str, resource: &str, name: Option<&str>) -> Permission {
        Permission {
            group: String::new(),
            resource: resource.to_owned(),
            verb: verb.to_owned(),
            name: name.map(str::to_owned),
        }
    }

    #[test]
    fn what_was_allowed_is_used_and_what_was_not_is_a_refusal() {
        let usage = usage(&[
            line("op", "get", "pods", "a", 200, "allow", 3),
            line("op", "patch", "services", "s", 201, "allow", 3),
            line("op", "delete", "pods", "a", 403, "forbid", 3),
            line("op", "list", "pods", "", 403, "forbid", 1),
            line("other", "watch", "pods", "", 403, "forbid", 3),
        ]);
        assert!(
            usage.has_used(&permission("get", "pods", None)) && usage.has_used(&permission("get", "pods", Some("a")))
        );
        assert!(usage.has_used(&permission("create", "services", None)), "an apply that created");
        for (verb, name) in [("get", Some("b")), ("delete", None), ("list", None), ("watch", None)] {
            assert!(!usage.has_used(&permission(verb, "pods", name)), "{verb} {name:?}");
        }
        assert_eq!(usage.refusals, ["2026-01-03T00:00:00Z system:serviceaccount:ns:op: delete /x"]);
    }

    #[test]
    fn rules_are_every_combination() {
        let rule = PolicyRule {
            api_groups: Some(vec![String::new()]),
            resources: Some(vec!["pods".to_owned(), "secrets".to_owned()]),
            verbs: vec!["get".to_owned(), "list".to_owned()],
            resource_names: Some(vec!["a".to_owned()]),
            ..PolicyRule::default()
        };
        let expected = [("get", "pods"), ("get", "secrets"), ("list", "pods"), ("list", "secrets")];
        assert_eq!(permissions([&rule]), expected.map(|(verb, resource)| permission(verb, resource, Some("a"))).into());
    }
}
