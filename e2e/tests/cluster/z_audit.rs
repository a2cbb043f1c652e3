//! What all tests together have shown about privileges: nothing was refused, nothing is granted in vain.

use anyhow::{Context, Result, ensure};
use gantry_e2e::{
    audit::{self, Permission, Usage},
    harness::{
        Cluster, OPERATOR_SELECTOR, SYSTEM_NAMESPACE,
        fixtures::{ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::{PREFIX, TestNamespace, first_test_at, with_temp_ns},
        say,
        service::TestService,
        state_dir,
    },
    models::DemoModel,
};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Pod, PodSpec},
    rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, Subject},
};
use kube::{
    Api,
    api::{ListParams, ObjectMeta, PostParams},
};

use crate::{deletion::is_uninstalled, guards::UNLENT_SECRET};

const OPERATOR: &str = "operator";
const AGENT: &str = "agent";

/// A permission that no test uses, and why it is granted all the same.
struct Unused {
    account: &'static str,
    resource: &'static str,
    verbs: &'static [&'static str],
    reason: &'static str,
}

const UNUSED: &[Unused] = &[Unused {
    account: OPERATOR,
    resource: "inferenceservices/finalizers",
    verbs: &["update"],
    reason: "asked for by OwnerReferencesPermissionEnforcement, which is on in OpenShift and off here",
}];

/// The rules bound to a service account, in cluster roles and in the roles of `namespace`.
async fn rules_of(cluster: &Cluster, namespace: &str, account: &str) -> Result<Vec<PolicyRule>> {
    let (client, all) = (cluster.client.clone(), ListParams::default());
    let is_bound = |subjects: &Option<Vec<Subject>>| {
        subjects.iter().flatten().any(|subject| {
            subject.kind == "ServiceAccount"
                && subject.name == account
                && subject.namespace.as_deref() == Some(namespace)
        })
    };
    let mut rules = Vec::new();
    let cluster_roles: Api<ClusterRole> = Api::all(client.clone());
    for binding in Api::<ClusterRoleBinding>::all(client.clone()).list(&all).await? {
        if is_bound(&binding.subjects) {
            rules.extend(cluster_roles.get(&binding.role_ref.name).await?.rules.unwrap_or_default());
        }
    }
    let roles: Api<Role> = Api::namespaced(client.clone(), namespace);
    for binding in Api::<RoleBinding>::namespaced(client, namespace).list(&all).await? {
        if is_bound(&binding.subjects) {
            ensure!(binding.role_ref.kind == "Role", "{account} is bound to a cluster role in {namespace}");
            rules.extend(roles.get(&binding.role_ref.name).await?.rules.unwrap_or_default());
        }
    }
    ensure!(!rules.is_empty(), "nothing is bound to the service account {account} of {namespace}");
    Ok(rules)
}

/// The permissions that were not used and have no reason, and the reasons for permissions that were used.
fn judge(account: &str, rules: &[PolicyRule], usage: &Usage) -> Vec<String> {
    let reason = |permission: &Permission| {
        let excuses = |unused: &&Unused| {
            unused.account == account
                && unused.resource == permission.resource
                && unused.verbs.contains(&permission.verb.as_str())
        };
        UNUSED.iter().find(excuses).map(|unused| unused.reason)
    };
    let mut complaints = Vec::new();
    for permission in audit::permissions(rules) {
        match (usage.has_used(&permission), reason(&permission)) {
            (false, None) => complaints.push(format!("{account} may {permission}, and no test uses it")),
            (false, Some(reason)) => say(format_args!("{account} may {permission}, unused: {reason}")),
            (true, Some(_)) => complaints.push(format!("{account} uses {permission}: drop the reason why it does not")),
            (true, None) => {}
        }
    }
    complaints
}

fn deployment_pod_spec(deployment: Deployment) -> Result<PodSpec> {
    deployment.spec.and_then(|spec| spec.template.spec).context("the Deployment has no pod template")
}

/// The API server admits the operator's pods, too, under `restricted`; those of services it has admitted all along.
async fn ensure_operator_is_restricted(namespace: &TestNamespace) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(namespace.cluster.client.clone(), SYSTEM_NAMESPACE);
    let operators = deployments.list(&ListParams::default().labels(OPERATOR_SELECTOR)).await?;
    let operator = operators.items.into_iter().next().context("the operator has no Deployment")?;
    let spec = PodSpec { service_account_name: None, service_account: None, ..deployment_pod_spec(operator)? };
    let metadata = ObjectMeta { name: Some("operator".to_owned()), ..ObjectMeta::default() };
    let pod = Pod { metadata, spec: Some(spec), status: None };
    let dry_run = PostParams { dry_run: true, field_manager: None };
    namespace.api::<Pod>().create(&dry_run, &pod).await.context("the operator's pods are not restricted")?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn nothing_was_refused_and_nothing_is_granted_in_vain() -> Result<()> {
    with_temp_ns("audit", async |namespace| {
        let cluster = &namespace.cluster;
        cluster.ensure_own()?;
        ensure_operator_is_restricted(namespace).await?;
        let model = ModelStore::on(cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &model).await?;
        let account =
            |spec: Option<PodSpec>| spec.and_then(|spec| spec.service_account_name).context("a pod without identity");

        let pod = service.pods().await?.into_iter().next().context("the service has no pod")?;
        let agent_account = account(pod.spec)?;
        let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
        let operators = deployments.list(&ListParams::default().labels(OPERATOR_SELECTOR)).await?;
        let operator = operators.items.into_iter().next().context("the operator has no Deployment")?;
        let operator_account = account(Some(deployment_pod_spec(operator)?))?;

        let log = state_dir().join("logs/audit.log");
        // The chart's roles go before the operator's pods do.
        let is_told = |kind: &str, at| at >= first_test_at() && (kind != OPERATOR || !is_uninstalled(at));
        let usages = audit::read(&log, is_told, |of, name| match of {
            SYSTEM_NAMESPACE if name == operator_account => Some(OPERATOR),
            _ if of.starts_with(PREFIX) && name == agent_account => Some(AGENT),
            _ => None,
        })?;
        let mut complaints = Vec::new();
        for (kind, of, account) in
            [(OPERATOR, SYSTEM_NAMESPACE, &operator_account), (AGENT, &namespace.name, &agent_account)]
        {
            let usage = usages.get(kind).with_context(|| format!("the audit log knows nothing of {account}"))?;
            // What is not to be read is asked for, or nobody could be told why it is not.
            let is_meant = |refusal: &&String| refusal.ends_with(&format!("/secrets/{UNLENT_SECRET}"));
            let refusals = usage.refusals.iter().filter(|refusal| !is_meant(refusal));
            complaints.extend(refusals.map(|refusal| format!("RBAC refused: {refusal}")));
            complaints.extend(judge(kind, &rules_of(cluster, of, account).await?, usage));
        }
        ensure!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
        Ok(())
    })
    .await
}
