//! What is searched: a number of pods, what the models are like, and what the user may ask for.

use std::time::Duration;

use gantry_crds::{InferenceService, inference_service::RolloutStrategy, scalars::Percent, status::GateName};
use gantry_operator::validate::{CanaryStep, ValidService, validate};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::json;

use super::invariants::Broken;

/// What the user asks for: a model, and whether with other settings: the first bit is for a gate and the residence of the version
/// before, the second for pods with more memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Ask {
    pub(super) model: u8,
    pub(super) variant: u8,
}

impl Ask {
    pub(super) const fn of(model: u8) -> Self {
        Self { model, variant: 0 }
    }

    pub(super) fn is_large(self) -> bool {
        self.variant >= 2
    }

    fn spec(self) -> ValidService {
        let headroom = ["5%", "6%"][usize::from(self.variant % 2)];
        let keeps = self.variant.is_multiple_of(2);
        let rollout = json!({"gates": {"memory": {"headroom": headroom}}, "rollback": {"keepResident": keeps}});
        let digest = format!("{:x}", self.model).repeat(64);
        let source = json!({"uri": format!("https://models/{}.gguf", self.model), "sha256": digest});
        let model = json!({"servedName": "chat", "source": source});
        let spec = json!({"replicas": 2, "rollout": rollout, "model": model});
        let mut spec = validate(&InferenceService::new("chat", serde_json::from_value(spec).unwrap())).unwrap();
        if self.is_large() {
            spec.pod.memory = Some(Quantity("2Gi".to_owned()));
            spec.wanted.judged = format!("2Gi {}", spec.wanted.judged);
        }
        spec.history_limit = 1;
        spec
    }
}

/// What a model is like, in every pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nature {
    Good,
    /// This gate refuses it.
    Refused(GateName),
    /// It passes, and its workers die when it answers.
    Dies,
    /// It passes, and its figures pass a limit when it answers a share of the requests.
    Worse,
}

/// What does not change in one search.
pub(super) struct Scenario {
    pub(super) pods: i32,
    /// Of the models from 1 on.
    pub(super) natures: [Nature; 4],
    /// What the user may ask for; `None` is a spec that cannot be carried out.
    pub(super) asks: Vec<Option<Ask>>,
    pub(super) broken: Option<Broken>,
    /// A candidate gets a share of the requests first.
    pub(super) shares: bool,
    /// The strategy is HoldRequests.
    pub(super) holds: bool,
    /// Pods have memory for one model.
    pub(super) tight: bool,
    pub(super) specs: Vec<(Ask, ValidService)>,
    pub(super) names: Vec<String>,
    /// What pods with little and with much memory are called.
    pub(super) resources: [String; 2],
}

impl Scenario {
    pub(super) fn new(pods: i32, natures: [Nature; 4], asks: &[Option<Ask>]) -> Self {
        let models = 1..=u8::try_from(natures.len()).unwrap();
        let asked: Vec<_> =
            models.clone().flat_map(|model| (0..4).map(move |variant| Ask { model, variant })).collect();
        let judged = |mut spec: ValidService| {
            spec.wanted.judged = format!("{}+Secret:hf=0", spec.wanted.judged);
            spec
        };
        Self {
            pods,
            natures,
            asks: asks.to_vec(),
            broken: None,
            shares: false,
            holds: false,
            tight: false,
            names: models.map(|model| Ask::of(model).spec().wanted.name).collect(),
            resources: [0, 2].map(|variant| Ask { model: 1, variant }.spec().pod.resources_hash()),
            specs: asked.into_iter().map(|ask| (ask, judged(ask.spec()))).collect(),
        }
    }

    pub(super) fn breaking(self, broken: Broken) -> Self {
        Self { broken: Some(broken), ..self }
    }

    /// The same with a canary of two steps.
    pub(super) fn sharing(mut self) -> Self {
        let step = |percent: &str| {
            let share = Percent::from(percent);
            CanaryStep { parts: share.parts().unwrap(), share, bake: Duration::from_secs(300) }
        };
        self.specs.iter_mut().for_each(|(_, spec)| spec.canary = vec![step("5%"), step("25%")]);
        Self { shares: true, ..self }
    }

    /// The same with HoldRequests.
    pub(super) fn holding(mut self) -> Self {
        self.specs.iter_mut().for_each(|(_, spec)| spec.strategy = RolloutStrategy::HoldRequests);
        Self { holds: true, ..self }
    }

    /// The same with pods that have memory for one model, and Auto, which finds HoldRequests.
    pub(super) fn tight(self) -> Self {
        Self { holds: true, tight: true, ..self }
    }

    pub(super) fn spec(&self, ask: Ask) -> &ValidService {
        &self.specs.iter().find(|(one, _)| *one == ask).unwrap().1
    }

    pub(super) fn name(&self, model: u8) -> &str {
        &self.names[usize::from(model) - 1]
    }

    pub(super) fn model(&self, name: &str) -> u8 {
        u8::try_from(1 + self.names.iter().position(|one| one == name).unwrap()).unwrap()
    }

    pub(super) fn nature(&self, name: &str) -> Nature {
        self.natures[usize::from(self.model(name)) - 1]
    }
}
