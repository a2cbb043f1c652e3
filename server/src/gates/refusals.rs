//! What a gate says of an error that it met: which gate it is, a figure for the table, and what to do. Absent: what a gate finds
//! by itself.

use gantry_crds::status::GateName;
use gantry_gguf::{Defect, GgufError};

use super::report::Refusal;
use crate::fetch::FetchError;
use crate::version::LoadError;

/// Digits of a digest that a figure shows: enough to see which file it is.
const DIGEST_DIGITS_SHOWN: usize = 12;

pub(super) fn fetch_refusal(error: &FetchError) -> Refusal {
    match error {
        FetchError::WrongDigest { found, .. } => {
            // The message has all of it; this stands in a column of a table.
            let found = &found.to_string()[..DIGEST_DIGITS_SHOWN];
            Refusal::new(GateName::Digest, error.to_string()).with_value(format!("found {found}..."))
        }
        FetchError::NotGguf(_) => Refusal::new(GateName::Format, error.to_string()).with_value("no GGUF"),
        error => Refusal::new(GateName::Fetch, error.to_string()),
    }
}

pub(super) fn format_refusal(error: &GgufError) -> Refusal {
    if let GgufError::Malformed { defect: Defect::BadMagic { .. }, .. } = error {
        // What it is instead is for who may read it.
        return fetch_refusal(&FetchError::NotGguf("the file".to_owned()));
    }
    let value = match error {
        GgufError::Part { number, count, .. } => format!("part {number} of {count}"),
        GgufError::Malformed { defect: Defect::DataTruncated { expected, found, .. }, .. }
        | GgufError::Malformed { defect: Defect::TrailingBytes { expected, found }, .. }
        | GgufError::Malformed {
            defect: Defect::HeaderTruncated { needed: expected, file_bytes: found, .. }, ..
        } => {
            format!("{found} bytes, {expected} expected")
        }
        GgufError::Malformed { offset, .. } => format!("byte {offset}"),
        GgufError::Io { .. } | GgufError::NeedMoreBytes { .. } => "unreadable".to_owned(),
    };
    Refusal::new(GateName::Format, error.to_string()).with_value(value)
}

pub(super) fn load_refusal(error: &LoadError, gives_template: bool) -> Refusal {
    let (value, what) = match error {
        LoadError::Template(_) => {
            let message = if gives_template {
                format!("{error}: spec.runtime.chatTemplate")
            } else {
                format!("{error}, serve a file with another one, or give one as spec.runtime.chatTemplate")
            };
            return Refusal::new(GateName::Template, message).with_value("cannot render");
        }
        LoadError::Settings(_) => ("bad settings", "correct spec.runtime"),
        LoadError::Spawn(_) => ("no worker", "the pod may be out of processes or memory; look at its log"),
        LoadError::Model(_) => ("refused by llama.cpp", "check the file, and that this release knows its architecture"),
        LoadError::Numbers(_) => return Refusal::new(GateName::Load, error.to_string()).with_value("computes NaN"),
        LoadError::Useless(_) => return Refusal::new(GateName::Load, error.to_string()).with_value("answers nobody"),
        LoadError::Backend(_) => ("no backend", "see docs/operations.md, Processors and GPUs"),
        LoadError::Memory(_) => (
            "more memory than predicted",
            "the file may not be what its header says; where it is, lower spec.runtime.contextSize or parallel, or raise \
             spec.resources.memory and spec.rollout.gates.memory.headroom",
        ),
        LoadError::WorkerDied(_) => ("worker died", "check the file, spec.runtime, and the pod's memory"),
    };
    Refusal::new(GateName::Load, format!("{error}; {what}")).with_value(value)
}
