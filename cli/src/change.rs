//! What is changed of a service: annotations, and the spec for a rollback. The operator does the rest, as with any edit.

use anyhow::{Result, anyhow, bail};
use gantry_crds::{ModelVersion, RESTART_ANNOTATION, RETRY_ANNOTATION, status::VersionPhase};
use jiff::Timestamp;
use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, explained},
    panel::View,
};

/// Field manager of what this plugin writes.
const FIELD_MANAGER: &str = "kubectl-gantry";

/// Has the version tried again that was refused, taken back or aborted.
///
/// # Errors
/// When none was, and when the service cannot be written.
pub async fn retry(cluster: &Cluster, name: &str) -> Result<String> {
    let view = cluster.view(name).await?;
    if let Some(aborted) = view.service.spec.rollout.abort {
        set_rollout(cluster, name, json!({"abort": null})).await?;
        return Ok(format!("{aborted} may be rolled out again: kubectl gantry status {name} -w"));
    }
    let rejected = view.service.status.and_then(|status| status.rejected);
    let Some(rejected) = rejected else { bail!("{name} has no version that was refused or taken back") };
    annotate(cluster, name, RETRY_ANNOTATION).await?;
    Ok(format!("{} is tried again: kubectl gantry status {name} -w", rejected.version))
}

/// Has pods wait with the switch to what they prepare, or wait no longer.
///
/// # Errors
/// When the service cannot be written.
pub async fn pause(cluster: &Cluster, name: &str, paused: bool) -> Result<String> {
    cluster.view(name).await?;
    set_rollout(cluster, name, json!({"paused": paused})).await?;
    Ok(match paused {
        true => format!("{name} is paused: pods prepare new versions and do not switch to them"),
        false => format!("{name} goes on: kubectl gantry status {name} -w"),
    })
}

/// Goes on with the version that is rolled out.
///
/// # Errors
/// When none is, and when the service cannot be written.
pub async fn promote(cluster: &Cluster, name: &str) -> Result<String> {
    let version = rolled_out(cluster, name).await?;
    set_rollout(cluster, name, json!({"promote": version, "abort": null})).await?;
    Ok(format!("{version} is gone on with: kubectl gantry status {name} -w"))
}

/// Gives the version up that is rolled out.
///
/// # Errors
/// When none is, and when the service cannot be written.
pub async fn abort(cluster: &Cluster, name: &str) -> Result<String> {
    let version = rolled_out(cluster, name).await?;
    set_rollout(cluster, name, json!({"abort": version, "promote": null})).await?;
    Ok(format!(
        "{version} is given up, and not begun with while spec.rollout.abort names it: kubectl gantry status {name} -w"
    ))
}

async fn rolled_out(cluster: &Cluster, name: &str) -> Result<String> {
    let view = cluster.view(name).await?;
    let rollout = view.service.status.and_then(|status| status.rollout);
    rollout.map(|rollout| rollout.version).ok_or_else(|| anyhow!("{name} has no rollout in progress"))
}

async fn set_rollout(cluster: &Cluster, name: &str, rollout: Value) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"rollout": rollout}}));
    cluster.services().patch(name, &params(), &patch).await.map_err(explained)?;
    Ok(())
}

/// Has the pods replaced one after the other.
///
/// # Errors
/// When the service cannot be written.
pub async fn restart(cluster: &Cluster, name: &str) -> Result<String> {
    cluster.view(name).await?;
    annotate(cluster, name, RESTART_ANNOTATION).await?;
    Ok(format!("the pods of {name} are replaced one after the other: kubectl gantry status {name} -w"))
}

async fn annotate(cluster: &Cluster, name: &str, annotation: &str) -> Result<()> {
    let now = Timestamp::now().to_string();
    let patch = Patch::Merge(json!({"metadata": {"annotations": {annotation: now}}}));
    cluster.services().patch(name, &params(), &patch).await.map_err(explained)?;
    Ok(())
}

/// Sets model and settings of the spec to those of an earlier version.
///
/// # Errors
/// When there is no such version, and when the service cannot be written, or was by somebody else meanwhile.
pub async fn rollback(cluster: &Cluster, name: &str, revision: Option<i64>) -> Result<String> {
    let view = cluster.view(name).await?;
    let version = target(&view, revision)?;
    let patch: kube::core::params::Patch<Value> = Patch::Json(serde_json::from_value(rollback_patch(&view, version))?);
    if let Err(error) = cluster.services().patch(name, &params(), &patch).await {
        let read = view.service.metadata.generation;
        if cluster.view(name).await.is_ok_and(|now| now.service.metadata.generation != read) {
            bail!(
                "somebody else has changed the spec of {name} meanwhile: look at it (kubectl gantry status {name}) and try again"
            );
        }
        return Err(explained(error));
    }
    Ok(format!(
        "{name} asks for {} (revision {}) again: kubectl gantry status {name} -w",
        version.name_any(),
        version.spec.revision
    ))
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// The version to go back to.
fn target(view: &View, revision: Option<i64>) -> Result<&ModelVersion> {
    let name = view.service.name_any();
    let all = || view.versions.iter().map(|version| version.spec.revision.to_string()).collect::<Vec<_>>().join(", ");
    if let Some(revision) = revision {
        let found = view.versions.iter().find(|version| version.spec.revision == revision);
        return found.ok_or_else(|| anyhow!("{name} has no revision {revision}, but {}", all()));
    }
    let active = view.service.status.as_ref().and_then(|status| status.active_version.as_deref());
    let is_active = |version: &&ModelVersion| Some(version.name_any().as_str()) == active;
    let before = view.versions.iter().find(is_active).map_or(i64::MAX, |active| active.spec.revision);
    let was_good = |version: &&ModelVersion| {
        let phase = version.status.as_ref().and_then(|status| status.phase);
        version.spec.revision < before && matches!(phase, Some(VersionPhase::Superseded | VersionPhase::Baking))
    };
    view.versions.iter().rfind(was_good).ok_or_else(|| {
        anyhow!("{name} has no earlier version that answered; of its revisions ({}) give one with --to-revision", all())
    })
}

/// Replaces both fields whole, and only in the spec that was read: its generation, for a write of the status, which comes at
/// any time, makes another version of the object.
fn rollback_patch(view: &View, version: &ModelVersion) -> Value {
    json!([
        {"op": "test", "path": "/metadata/generation", "value": view.service.metadata.generation},
        {"op": "add", "path": "/spec/model", "value": version.spec.model},
        {"op": "add", "path": "/spec/runtime", "value": version.spec.runtime},
    ])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::panel::tests::view;

    fn of(json: Value) -> View {
        view(&json)
    }

    fn versions() -> Value {
        json!([
            {"revision": 1, "phase": "Superseded"},
            {"revision": 2, "phase": "Superseded"},
            {"revision": 3, "phase": "RolledBack"},
            {"revision": 4, "phase": "Active"},
            {"revision": 5, "phase": "Superseded"},
        ])
    }

    #[test]
    fn the_newest_good_version_before_the_active_one_is_gone_back_to() {
        let view = of(json!({"status": {"activeVersion": "chat-4"}, "versions": versions()}));
        assert_eq!(target(&view, None).unwrap().spec.revision, 2);
        assert_eq!(target(&view, Some(3)).unwrap().spec.revision, 3, "whoever names one means it");
        let error = target(&view, Some(9)).unwrap_err().to_string();
        assert_eq!(error, "chat has no revision 9, but 1, 2, 3, 4, 5");
    }

    #[test]
    fn without_an_earlier_version_there_is_nothing_to_go_back_to() {
        let view = of(json!({"status": {"activeVersion": "chat-1"}, "versions": [{"revision": 1, "phase": "Active"}]}));
        assert!(target(&view, None).unwrap_err().to_string().contains("no earlier version that answered"));
    }

    #[test]
    fn a_rollback_replaces_what_was_read_and_no_other() {
        let view = of(json!({"status": {}, "versions": versions()}));
        let patch = rollback_patch(&view, &view.versions[0]);
        assert_eq!(patch[0], json!({"op": "test", "path": "/metadata/generation", "value": 3}));
        assert_eq!(patch[1]["value"]["source"]["sha256"], json!(format!("{:064}", 1)));
        assert_eq!(patch.as_array().unwrap().len(), 3);
    }
}
