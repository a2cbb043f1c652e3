//! What `check` is asked: two models, the gates, the golden prompts, and how the models are run.
//!
//! The gates are read by the type of the CRD. A field that this release does not know is refused by its path, and what the operator
//! would refuse is refused by the same code ([`GatesSpec::problems`]), which takes some spellings of numbers that the API server's
//! rules do not. It is serde's reader of YAML that fills the CRD's types, and not the one of files of settings
//! ([`super::file`]). Absent: what the gates find ([`crate::check`]).

use std::path::{Path, PathBuf};

use gantry_crds::inference_service::{
    CacheType as SpecCacheType, EmbeddingsSpec, GatesSpec, PoolingKind, RuntimeSpec, default_min_pass,
};
use gantry_crds::runtime::{MAX_CONTEXT_SIZE, MAX_PARALLEL, MIN_CONTEXT_SIZE};
use gantry_crds::scalars::AutoOr;
use gantry_engine::{CacheType, Pooling};
use granit_parser::{Event, Parser};
use serde::de::DeserializeOwned;

use super::args::{CacheArgs, CheckArgs};
use super::check::{Check, Problems};
use super::shown::{shown_name, shown_path};
use super::{
    Environment, MAX_GATES_DEPTH, MAX_GATES_FILE_BYTES, MAX_GATES_UNKNOWN_FIELDS, MAX_MEMORY_LIMIT_MIB,
    MAX_PROMPTS_FILE_BYTES, MIN_MEMORY_LIMIT_MIB, MIN_REQUEST_TOKENS, RemoteModels, template,
};
use crate::gates::{prompts, runtime_settings};
use crate::limits::MAX_WORKERS;
use crate::processors::Processors;
use crate::version::Scheduling;

/// The gates that are asked where no file says which: those that compare, with their own limits.
const DEFAULT_GATES: &str = "{drift: {}, performance: {}}";

/// What `check` needs.
#[derive(Clone, Debug)]
pub struct CheckSettings {
    /// The model that is judged.
    pub candidate: NamedModel,
    /// The model that it is compared with.
    pub reference: Option<NamedModel>,
    /// The gates.
    pub gates: GatesSpec,
    /// The golden prompts, where the gates ask for them.
    pub prompts: Option<prompts::Job>,
    /// How both models are run.
    pub runtime: RuntimeSpec,
    /// Bytes of memory of the pod that it is judged for; `None`: as many as there are here.
    pub memory_limit_bytes: Option<u64>,
    /// Where ggml's backends are, where it is not left to the program.
    pub backend_dir: Option<PathBuf>,
}

/// A model that a flag names.
#[derive(Clone, Debug)]
pub struct NamedModel {
    /// As it was named, an address as it may be shown.
    pub named: PathBuf,
    /// Its file on this machine, unless it is named by an address.
    pub path: PathBuf,
    /// What is to be brought.
    pub remote: RemoteModels,
}

impl NamedModel {
    fn of(check: &mut Check, cache: &CacheArgs, flag: &str, named: PathBuf) -> Self {
        let mut path = named.clone();
        let remote = cache.models(check, Some(Environment::OWN), (flag, &mut path), None);
        // Without what is secret in an address.
        let named = remote.model.as_ref().map_or(named, |model| PathBuf::from(model.source.to_string()));
        Self { named, path, remote }
    }
}

impl CheckArgs {
    /// Checks all flags, and reads the files of gates and prompts.
    ///
    /// # Errors
    /// Lists every mistake.
    pub fn settings(&self) -> Result<CheckSettings, Problems> {
        let mut check = Check::default();
        self.backends.check(&mut check);
        let candidate = self.file.clone().or_else(|| self.model.clone()).unwrap_or_default();
        let candidate = NamedModel::of(&mut check, &self.cache, "model", candidate);
        // The digest is the candidate's.
        let cache = CacheArgs { sha256: None, ..self.cache.clone() };
        let reference = self.reference.clone().map(|named| NamedModel::of(&mut check, &cache, "reference", named));
        let gates = match &self.gates {
            Some(file) => gates_of(&mut check, file),
            None => parsed(DEFAULT_GATES).map(|(gates, _)| gates).unwrap_or_default(),
        };
        let prompts = self.golden_prompts(&mut check, &gates);
        if let (Some(file), None) = (&self.gates, &reference) {
            let compares = [("drift", gates.drift.is_some()), ("performance", gates.performance.is_some())];
            let asked: Vec<_> = compares.iter().filter(|(_, is_asked)| *is_asked).map(|(gate, _)| *gate).collect();
            if !asked.is_empty() {
                check.problem(format!(
                    "--reference must name the model that answers now: {} asks for {}, which compare the candidate with it; for \
                     a first model leave them out of the file",
                    shown_path(file),
                    asked.join(" and ")
                ));
            }
        }
        let memory_limit =
            check.automatic("memory-limit", &self.memory_limit, MIN_MEMORY_LIMIT_MIB, MAX_MEMORY_LIMIT_MIB);
        let runtime = self.runtime(&mut check);
        check.finish(CheckSettings {
            candidate,
            reference,
            gates,
            prompts,
            runtime,
            memory_limit_bytes: memory_limit.map(|mib| u64::from(mib) << 20),
            backend_dir: self.backends.backend_dir.clone(),
        })
    }

    fn runtime(&self, check: &mut Check) -> RuntimeSpec {
        let automatic = |number: Option<u32>| number.map_or(AutoOr::Auto, AutoOr::Value);
        let runtime = RuntimeSpec {
            context_size: check.number("ctx-size", &self.ctx_size, MIN_CONTEXT_SIZE, MAX_CONTEXT_SIZE),
            parallel: check.number("parallel", &self.parallel, 1, MAX_PARALLEL),
            threads: automatic(check.automatic("threads", &self.threads, 1, gantry_engine::MAX_THREADS)),
            workers: check.automatic("workers", &self.workers, 1, MAX_WORKERS),
            cache_type: match check.cache_type("cache-type-k", &self.cache_type_k) {
                CacheType::F16 => SpecCacheType::F16,
                CacheType::Q8_0 => SpecCacheType::Q8_0,
                CacheType::Q4_0 => SpecCacheType::Q4_0,
            },
            gpu_layers: automatic(check.gpu_layers("n-gpu-layers", &self.n_gpu_layers)),
            chat_template: template::chat_template(check, None, self.chat_template_file.as_deref()),
            embeddings: self.embeddings.then(|| EmbeddingsSpec {
                pooling: self.pooling.map(|pooling| match pooling {
                    Pooling::Mean => PoolingKind::Mean,
                    Pooling::Cls => PoolingKind::Cls,
                    Pooling::Last => PoolingKind::Last,
                    Pooling::Rank => PoolingKind::Rank,
                }),
                ..EmbeddingsSpec::default()
            }),
            ..RuntimeSpec::default()
        };
        // As the API server has it.
        let least = runtime.parallel.saturating_mul(MIN_REQUEST_TOKENS);
        if runtime.context_size < least {
            check.problem(format!(
                "--ctx-size must be at least {least}, {MIN_REQUEST_TOKENS} tokens for each of --parallel {}, and is {}",
                runtime.parallel, runtime.context_size
            ));
        }
        let settings = runtime_settings(&runtime, Scheduling::default(), false);
        if check.found_none()
            && let Err(error) = settings.shares(Processors::here(), 0)
        {
            check.problem(format!("--{} {}", error.param.replace('_', "-"), error.message));
        }
        runtime
    }

    /// The golden prompts, which the gates ask for if there is a file of gates.
    fn golden_prompts(&self, check: &mut Check, gates: &GatesSpec) -> Option<prompts::Job> {
        let min_pass = match (&self.gates, &gates.prompts) {
            (None, _) => default_min_pass(),
            (Some(_), Some(gate)) => gate.min_pass.clone(),
            (Some(gates), None) => {
                if self.prompts.is_some() && check.found_none() {
                    check.problem(format!(
                        "--prompts must be left out, or {} must ask for golden prompts: prompts: {{configMapRef: {{name: NAME}}}}",
                        shown_path(gates)
                    ));
                }
                return None;
            }
        };
        let Some(file) = &self.prompts else {
            if let (Some(gates), Some(gate)) = (&self.gates, &gates.prompts) {
                let name = &gate.config_map_ref.name;
                check.problem(format!(
                    "--prompts must name a file with what ConfigMap {name} has at prompts.jsonl: {} asks for golden prompts",
                    shown_path(gates)
                ));
            }
            return None;
        };
        let text = check.text_file("prompts", file, MAX_PROMPTS_FILE_BYTES, "a file of golden prompts")?;
        if let Err(error) = prompts::parse(&text) {
            check.problem(format!("--prompts {} cannot be used: {error}", shown_path(file)));
        }
        Some(prompts::Job { min_pass, origin: file.display().to_string(), text })
    }
}

/// The gates of a file. What is wrong with them is told.
fn gates_of(check: &mut Check, file: &Path) -> GatesSpec {
    let Some(text) = check.text_file("gates", file, MAX_GATES_FILE_BYTES, "a file of gates") else {
        return GatesSpec::default();
    };
    let shown_file = shown_path(file);
    let (gates, unknown) = match parsed::<GatesSpec>(&text) {
        Ok(parsed) => parsed,
        Err(error) => {
            check.problem(format!("--gates {shown_file} cannot be read: {error}"));
            return GatesSpec::default();
        }
    };
    for path in unknown.iter().take(MAX_GATES_UNKNOWN_FIELDS) {
        let path = shown_name(path);
        check.problem(format!(
            "--gates {shown_file}: {path} is no field of spec.rollout.gates; the file is what stands below that: memory, prompts, drift, \
             performance, shadow"
        ));
    }
    if let more @ 1.. = unknown.len().saturating_sub(MAX_GATES_UNKNOWN_FIELDS) {
        check.problem(format!("--gates {shown_file}: {more} more of its fields are none, and are not told"));
    }
    for problem in gates.problems() {
        check.problem(format!("--gates {shown_file}: {problem}"));
    }
    gates
}

/// Refuses a text with more levels than are of use before it is read whole, which takes time with their square.
fn bounded(text: &str) -> Result<(), String> {
    let mut depth = 0_usize;
    for next in Parser::new_from_str(text) {
        let (event, span) = next.map_err(|error| error.to_string())?;
        match event {
            Event::SequenceStart(..) | Event::MappingStart(..) => depth += 1,
            Event::SequenceEnd | Event::MappingEnd => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_GATES_DEPTH {
            let line = span.start.line();
            return Err(format!("line {line}: it is nested deeper than {MAX_GATES_DEPTH} levels, which no gate is"));
        }
    }
    Ok(())
}

/// A value in YAML, which JSON is, too, and the paths of the fields in it that this release does not know.
fn parsed<T: DeserializeOwned + Default>(text: &str) -> Result<(T, Vec<String>), String> {
    bounded(text)?;
    // As a whole first, which finds keys that stand twice.
    let value: serde_yaml::Value = serde_yaml::from_str(text).map_err(|error| error.to_string())?;
    if value.is_null() {
        return Err(
            "it says nothing, so that no gate would be asked: {} says so, and without the file there are defaults"
                .to_owned(),
        );
    }
    let (mut unknown, mut track) = (Vec::new(), serde_path_to_error::Track::new());
    let reader = serde_path_to_error::Deserializer::new(value, &mut track);
    // A field that may be absent is a step of its own in the path.
    let read = serde_ignored::deserialize(reader, |path| unknown.push(path.to_string().replace(".?", "")));
    match read {
        Ok(read) => Ok((read, unknown)),
        Err(error) => Err(format!("{}: {error}", track.path())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::{Duration, Instant};

    use super::*;

    fn told(text: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gates.yaml");
        std::fs::write(&file, text).unwrap();
        let mut check = Check::default();
        gates_of(&mut check, &file);
        check.finish(()).err().map(|problems| problems.0).unwrap_or_default()
    }

    #[test]
    fn gates_are_read_as_a_service_has_them() {
        for right in [
            "{}",
            "drift: {}",
            "memory: {headroom: 10%}\ndrift: {minAgreement: 95%, maxKl: \"0.1\"}",
            "{\n\t\"drift\": {}\n}",
        ] {
            assert_eq!(told(right), Vec::<String>::new(), "{right}");
        }
        let (gates, _) =
            parsed::<GatesSpec>(r#"{"prompts": {"configMapRef": {"name": "golden"}, "minPass": "90%"}}"#).unwrap();
        assert_eq!(gates.prompts.unwrap().min_pass.ratio().unwrap(), 0.9);
        let (gates, unknown) = parsed::<GatesSpec>(DEFAULT_GATES).unwrap();
        assert!(gates.drift.is_some() && gates.performance.is_some() && unknown.is_empty());
    }

    #[test]
    fn what_no_service_could_follow_is_refused_by_its_path() {
        for (wrong, says) in [
            ("drift: {minAgrement: 95%}", "drift.minAgrement is no field"),
            ("drfit: {}", "drfit is no field"),
            ("gates: {drift: {}}", "gates is no field of spec.rollout.gates; the file is what stands below that"),
            ("drift: {maxKl: 0.1}", "drift.maxKl: invalid type: floating point"),
            ("drift: {reference: Golden}", "spec.rollout.gates.drift.reference is not supported yet: use Active"),
            ("drift: {minAgreement: \"2\"}", "spec.rollout.gates.drift.minAgreement: \"2\" is not a percentage"),
            ("drift: {}\ndrift: {}", "duplicate"),
            ("", "it says nothing, so that no gate would be asked"),
            ("null\n", "it says nothing, so that no gate would be asked"),
            ("[{headroom: 5%}]", "invalid type: sequence"),
            ("drift: [Active, 95%]", "drift: invalid type: sequence"),
            ("prompts: {configMapRef: [golden]}", "prompts.configMapRef: invalid type: sequence"),
            ("drift: [", "cannot be read"),
            ("memory: {headroom: 200%}", "spec.rollout.gates.memory.headroom"),
            (
                "performance: {minDecodeRatio: fast}",
                "spec.rollout.gates.performance.minDecodeRatio: \"fast\" is not a decimal number",
            ),
            (
                "shadow: {samplePercent: 0, duration: 5m}",
                "spec.rollout.gates.shadow.samplePercent: use a number from 1 to 100",
            ),
            ("shadow: {samplePercent: 5, duration: long}", "spec.rollout.gates.shadow.duration: "),
            ("prompts: {configMapRef: {name: A_B}}", "\"A_B\" is no name of an object"),
            ("prompts: {}", "prompts: missing field `configMapRef`"),
            ("\"\\e[31mred\\n\": 1", r"\u{1b}[31mred\n is no field"),
            (&format!("drift: {{minAgreement: {}}}", "9".repeat(60_000)), "drift.minAgreement: "),
            (&"[".repeat(60_000), "cannot be read: "),
            (&format!("drift:{}", " {a:".repeat(15_000)), "line 1: it is nested deeper than 16 levels"),
        ] {
            let began = Instant::now();
            let problems = told(wrong);
            assert!(began.elapsed() < Duration::from_secs(1), "{wrong:.200} took {:?}", began.elapsed());
            assert!(problems.len() == 1 && problems[0].contains(says), "{wrong:.200}: {problems:?}");
        }
        let many: String = (0..6900).map(|n| format!("k{n}: 1\n")).collect();
        let problems = told(&many);
        assert_eq!(problems.len(), MAX_GATES_UNKNOWN_FIELDS + 1);
        assert!(problems[MAX_GATES_UNKNOWN_FIELDS].ends_with("6836 more of its fields are none, and are not told"));
    }
}
