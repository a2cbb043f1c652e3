//! The forms of a report: text for people, an object for programs, SARIF 2.1.0 for code scanning.
//!
//! A code's sentences in the rules of SARIF are those of [`Code`]. Absent: what was found.

use std::fmt::Write as _;
use std::path::Path;

use gantry_gguf::{Code, Finding, Severity};
use serde_json::{Value, json};

use super::Outcome;

/// Version of the object's form: it grows when a field goes or changes its meaning, not when one is added.
const JSON_VERSION: u32 = 1;
const SARIF_SCHEMA: &str = "https://json.schemastore.org/sarif-2.1.0.json";
/// Where the codes are told of.
const RULES_PAGE: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/validate.md");

impl Outcome {
    pub(super) fn text(&self, colour: bool) -> String {
        let mut text = match &self.report {
            Some(report) if colour => format!("{report:#}"),
            Some(report) => report.to_string(),
            None => {
                let mut text = format!("{}\n\nchecks\n", self.title.escape_debug());
                for check in &self.checks {
                    // A string takes whatever is written into it.
                    let _ = if colour { writeln!(text, "{check:#}") } else { writeln!(text, "{check}") };
                }
                text
            }
        };
        if self.findings.left_out > 0 {
            let _ = writeln!(text, "\nand {} findings more, which are not shown", self.findings.left_out);
        }
        text
    }

    pub(super) fn json(&self, file: &Path) -> String {
        let report = self.report.as_ref();
        let object = json!({
            "formatVersion": JSON_VERSION,
            "tool": {"name": env!("CARGO_PKG_NAME"), "version": env!("CARGO_PKG_VERSION")},
            "file": file.to_string_lossy(),
            "accepted": self.findings.first_error().is_none(),
            "findings": self.findings.list,
            "findingsLeftOut": self.findings.left_out,
            "checks": report.map_or(&*self.checks, |report| report.checks()),
            "summary": report.map(|report| report.summary()),
            "memory": report.map(|report| report.memory()),
        });
        format!("{object:#}\n")
    }

    pub(super) fn sarif(&self, file: &Path) -> String {
        let rules: Vec<Value> = Code::ALL.iter().map(|&code| rule(code)).collect();
        let results: Vec<Value> = self.findings.list.iter().map(|finding| result(file, finding)).collect();
        let left_out = self.findings.left_out;
        let notifications = if left_out == 0 {
            json!([])
        } else {
            json!([{"level": "warning", "message": {"text": format!("{left_out} findings more were left out")}}])
        };
        let log = json!({
            "$schema": SARIF_SCHEMA,
            "version": "2.1.0",
            "runs": [{
                "tool": {"driver": {
                    "name": env!("CARGO_PKG_NAME"),
                    "semanticVersion": env!("CARGO_PKG_VERSION"),
                    "informationUri": env!("CARGO_PKG_REPOSITORY"),
                    "rules": rules,
                }},
                "invocations": [{"executionSuccessful": true, "toolExecutionNotifications": notifications}],
                "artifacts": [{"location": {"uri": uri(file)}, "roles": ["analysisTarget"]}],
                "results": results,
            }],
        });
        format!("{log:#}\n")
    }
}

fn level(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

fn rule(code: Code) -> Value {
    let (id, what, advice) = (code.as_str(), code.what(), code.advice());
    // Pascal case, as the standard wants it.
    let name: String = id.split('-').map(|word| word[..1].to_ascii_uppercase() + &word[1..]).collect();
    json!({
        "id": id,
        "name": name,
        "shortDescription": {"text": what},
        "fullDescription": {"text": format!("{what} {advice}")},
        "help": {"text": advice, "markdown": format!("{advice} See [`{id}`]({RULES_PAGE}).")},
        "helpUri": RULES_PAGE,
        "defaultConfiguration": {"level": level(code.severity())},
        "properties": {"tags": ["gguf"], "precision": "very-high", "problem.severity": level(code.severity())},
    })
}

fn result(file: &Path, finding: &Finding) -> Value {
    let Finding { code, severity, offset, subject, found, expected, advice, .. } = finding;
    let artifact = finding.file.as_ref().map_or_else(|| uri(file), |name| uri(&file.with_file_name(name)));
    // A file of weights has no lines, and viewers that show lines alone take none without one.
    let mut region = json!({"startLine": 1});
    if let Some(offset) = offset {
        region["byteOffset"] = json!(offset);
        region["byteLength"] = json!(0);
    }
    let mut location = json!({"physicalLocation": {"artifactLocation": {"uri": artifact}, "region": region}});
    if let Some(subject) = subject {
        location["logicalLocations"] = json!([{"name": subject, "kind": "element"}]);
    }
    // What is the same finding in the next version of the file: its place may have moved.
    let fingerprint = format!("{code}:{}", subject.as_deref().unwrap_or(found));
    json!({
        "ruleId": code.as_str(),
        "ruleIndex": Code::ALL.iter().position(|other| other == code),
        "level": level(*severity),
        "message": {"text": finding.message},
        "locations": [location],
        "partialFingerprints": {"primaryLocationLineHash": fingerprint},
        "properties": {"found": found, "expected": expected, "advice": advice},
    })
}

/// The address of a file: relative as it was given, so that a viewer finds it in its repository.
fn uri(file: &Path) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    if let Some(address) = file.to_str().filter(|text| text.contains("://")) {
        return address.replace(' ', "%20");
    }
    let mut uri = String::from(if file.is_absolute() { "file://" } else { "" });
    let path = file.as_os_str().as_bytes();
    for &byte in path.strip_prefix(b"./").unwrap_or(path) {
        let is_plain = byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
        // A string takes whatever is written into it.
        let _ = if is_plain { write!(uri, "{}", char::from(byte)) } else { write!(uri, "%{byte:02X}") };
    }
    uri
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_a_file_has_no_character_that_an_address_may_not_have() {
        for (path, address) in [
            ("m.gguf", "m.gguf"),
            ("./models/m 1.gguf", "models/m%201.gguf"),
            ("/a/ü#?.gguf", "file:///a/%C3%BC%23%3F.gguf"),
            ("a:b.gguf", "a%3Ab.gguf"),
            ("hf://o/r@v1/m 1.gguf", "hf://o/r@v1/m%201.gguf"),
        ] {
            assert_eq!(uri(Path::new(path)), address);
        }
    }
}
