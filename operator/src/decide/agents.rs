//! What agents can do, against what a rollout needs of them.
//!
//! Pods keep the image that they were made with, so that their agents may be of an earlier release than the spec. One that
//! does not know a gate leaves it out and says that the version is prepared; what it says so is not taken for a verdict.

use gantry_crds::status::{AgentStatus, GateName, RolloutStatus};

use super::{CountedPod, World, canary, is_prepared};
use crate::validate::{RESTART_ANNOTATION, ValidService};

/// The gates that the spec asks for, those that it cannot do without included.
fn required(spec: &ValidService) -> Vec<GateName> {
    use GateName::{Digest, Fetch, Format, Load, Memory, Prompts, Template};
    let mut gates = vec![Fetch, Digest, Format, Memory, Template, Load];
    gates.extend(spec.prompts_config_map.as_ref().map(|_| Prompts));
    gates.extend(&spec.compares);
    gates
}

/// Whether the pod has prepared the version, by an agent that could judge it.
pub(super) fn has_prepared(world: &World, pod: &CountedPod, now: &RolloutStatus) -> bool {
    is_prepared(pod, now) && lacks(world, pod, now).is_none()
}

/// Whether the pod's agent knows how the candidate is to replace what answers; else what it says of the candidate is about another way.
pub(super) fn knows_strategy(pod: &CountedPod, now: &RolloutStatus) -> bool {
    let silent = AgentStatus::of_silent();
    let agent = pod.report.and_then(|report| report.agent.as_ref()).unwrap_or(&silent);
    agent.strategies.contains(&now.strategy())
}

/// What the pod's agent cannot do of what the rollout needs, and what to do about it.
pub(super) fn lacks(world: &World, pod: &CountedPod, now: &RolloutStatus) -> Option<String> {
    let report = pod.report?;
    let silent = AgentStatus::of_silent();
    let agent = report.agent.as_ref().unwrap_or(&silent);
    let spec = world.spec?;
    let gate = required(spec).into_iter().find(|gate| !agent.gates.contains(gate));
    let signal = || spec.signals.iter().find(|signal| !agent.signals.iter().any(|known| known == *signal));
    let what = match (gate, agent.strategies.contains(&now.strategy())) {
        (Some(gate), _) => format!("gate {}", gate.as_str()),
        (None, false) => format!("strategy {}", now.strategy().as_str()),
        // It would not be watched by that.
        (None, true) => match signal() {
            Some(signal) => format!("signal {signal}"),
            None if canary::comes(world, spec, now) && !agent.canary => {
                "share of requests (spec.rollout.canary)".to_owned()
            }
            None => return None,
        },
    };
    Some(format!(
        "the agent of {} does not know the {what}: replace the pods by ones of this release's image (annotate the service \
         with {RESTART_ANNOTATION}=<any new value>)",
        pod.name
    ))
}
