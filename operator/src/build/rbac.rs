//! The identity of a service's pods: its agents read their own service, its prompts and those of its credentials that say for
//! which hosts they are, and write their own status. Nothing else, and nothing of other services: `resourceNames` says so.

use std::collections::BTreeSet;

use gantry_crds::{
    GROUP, InferenceService,
    inference_service::{LocalName, SourceSpec},
    status::NamedVersion,
};
use k8s_openapi::api::{
    core::v1::ServiceAccount,
    rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject},
};
use kube::ResourceExt;

use super::{Inputs, account, identity_name, metadata};
use crate::validate::ValidService;

/// The pods' ServiceAccount.
pub fn service_account(owner: &InferenceService) -> ServiceAccount {
    ServiceAccount { metadata: metadata(owner, identity_name(owner)), ..ServiceAccount::default() }
}

/// What the agents may do.
pub fn role(inputs: &Inputs) -> Role {
    let service = inputs.owner.name_any();
    let mut rules = vec![
        rule(GROUP, "inferenceservices", &["list", "watch"], [service.clone()]),
        rule(GROUP, "inferenceservices/status", &["patch"], [service]),
    ];
    let (spec, versions) = (inputs.spec, inputs.versions);
    let of_sources = named_by_sources(spec, versions, |source| source.ca.as_ref().map(|ca| &ca.config_map_ref));
    let config_maps: BTreeSet<_> = inputs.spec.prompts_config_map.iter().cloned().chain(of_sources).collect();
    // An empty list of names would allow all of them: no names, no rule.
    let mut secrets = named_secrets(inputs.spec, inputs.versions);
    secrets.retain(|name| inputs.lent_secrets.contains(name));
    for (resource, names) in [("configmaps", config_maps), ("secrets", secrets)] {
        if !names.is_empty() {
            rules.push(rule("", resource, &["get"], names));
        }
    }
    Role { metadata: metadata(inputs.owner, identity_name(inputs.owner)), rules: Some(rules) }
}

/// Secrets of all versions that pods may have to fetch.
pub fn named_secrets(spec: &ValidService, versions: &[NamedVersion]) -> BTreeSet<String> {
    named_by_sources(spec, versions, |source| source.secret_ref.as_ref())
}

/// Objects of all versions that pods may have to fetch, that wanted among them.
fn named_by_sources(
    spec: &ValidService,
    versions: &[NamedVersion],
    named: fn(&SourceSpec) -> Option<&LocalName>,
) -> BTreeSet<String> {
    let wanted = &spec.wanted;
    let versions = versions.iter().map(|version| (&version.model, &version.runtime));
    let sources = versions.chain([(&wanted.model, &wanted.runtime)]).flat_map(|(model, runtime)| {
        let draft = runtime.speculative.as_ref().and_then(|speculative| speculative.draft.as_ref());
        std::iter::once(&model.source).chain(draft)
    });
    sources.filter_map(named).map(|object| object.name.clone()).collect()
}

/// Secrets that a Role lets agents read.
pub fn granted_secrets(role: &Role) -> BTreeSet<String> {
    let is_of_secrets = |rule: &&PolicyRule| rule.resources.iter().flatten().any(|resource| resource == "secrets");
    let rules = role.rules.iter().flatten().filter(is_of_secrets);
    rules.flat_map(|rule| rule.resource_names.iter().flatten().cloned()).collect()
}

fn rule(group: &str, resource: &str, verbs: &[&str], names: impl IntoIterator<Item = String>) -> PolicyRule {
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(vec![resource.to_owned()]),
        resource_names: Some(names.into_iter().collect()),
        verbs: verbs.iter().map(|verb| (*verb).to_owned()).collect(),
        ..PolicyRule::default()
    }
}

/// Gives the Role to the accounts of the pods: of those to come, and of those that there are, which go on reporting until they are
/// replaced. Whoever can make a pod of a service's labels can have its account bound, and could mount what the Role lets it read.
pub fn role_binding(inputs: &Inputs) -> RoleBinding {
    let (owner, name) = (inputs.owner, identity_name(inputs.owner));
    let wanted = account(inputs);
    let accounts: BTreeSet<_> = inputs.accounts.iter().copied().chain([&*wanted, &name]).collect();
    let subject = |account: &str| Subject {
        kind: "ServiceAccount".to_owned(),
        name: account.to_owned(),
        namespace: owner.namespace(),
        ..Subject::default()
    };
    RoleBinding {
        metadata: metadata(owner, name.clone()),
        role_ref: RoleRef {
            api_group: "rbac.authorization.k8s.io".to_owned(),
            kind: "Role".to_owned(),
            name: name.clone(),
        },
        subjects: Some(accounts.into_iter().map(subject).collect()),
    }
}
