//! The forms of a report: a table for people, an object for programs.

use std::fmt::Write as _;

use gantry_crds::status::{GateResult, GateVerdict};
use serde_json::json;

use super::Outcome;

/// Version of the object's form: it grows when a field goes or changes its meaning, not when one is added.
const JSON_VERSION: u32 = 1;

impl Outcome {
    pub(super) fn text(&self, colour: bool) -> String {
        let reference = self.reference.as_deref().unwrap_or("none");
        let mut text =
            format!("candidate  {}\nreference  {}\n\n", self.candidate.escape_debug(), reference.escape_debug());
        for gate in &self.gates {
            text.push_str(&row(gate, colour));
        }
        let verdict = match &self.refusal {
            None => "every gate that was asked let it through".to_owned(),
            Some(refusal) => format!("{} refused it", refusal.gate.as_str()),
        };
        text + &format!("\n{verdict}\n")
    }

    pub(super) fn json(&self) -> String {
        let object = json!({
            "formatVersion": JSON_VERSION,
            "tool": {"name": env!("CARGO_PKG_NAME"), "version": env!("CARGO_PKG_VERSION")},
            "candidate": self.candidate,
            "reference": self.reference,
            "passed": self.refusal.is_none(),
            "gates": self.gates,
            "gguf": self.status.gguf,
            "fit": self.status.fit,
        });
        format!("{object:#}\n")
    }
}

/// A gate with its verdict, its figure, and below that what it says.
fn row(gate: &GateResult, colour: bool) -> String {
    let (verdict, code) = match gate.verdict {
        GateVerdict::Pass => ("ok", "32"),
        GateVerdict::Fail => ("FAIL", "1;31"),
        _ => ("--", "2"),
    };
    let mut shown = format!("{verdict:<4}");
    if colour {
        shown = format!("\x1b[{code}m{shown}\x1b[0m");
    }
    let told: Vec<&str> = gate.value.iter().chain(&gate.message).map(String::as_str).collect();
    let mut text = String::new();
    // A string takes whatever is written into it.
    let _ = writeln!(text, "  {shown} {:<11} {}", gate.name.as_str(), told.join(&format!("\n{:19}", "")));
    text
}
