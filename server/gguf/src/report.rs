//! A valid header as a table for people: what the model is, what was checked, what memory it takes.
//!
//! Used by `gantry-server validate`. The alternate form (`{:#}`) has the colours of a terminal; widths of terminals are absent.

use std::fmt;

use serde::Serialize;

use crate::Header;
use crate::bytes::{human_bytes, human_count};
use crate::error::printable;
use crate::finding::{Finding, Severity};
use crate::fit::{Fit, FitInput, MemoryEstimate, estimate, verdict};
use crate::shapes::ShapeCoverage;
use crate::summary::Summary;

/// What became of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// Nothing is wrong.
    Passed,
    /// The file is not to be served.
    Failed,
    /// It was not looked at.
    LeftOut,
    /// It is odd and may do no harm.
    Noted,
}

/// One thing that was looked at, or was not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What became of it.
    pub verdict: Verdict,
    /// The part of the file, or of what was done with it.
    pub part: &'static str,
    /// What was found, or why nothing was.
    pub text: String,
    /// What was found, where that is something wrong or odd.
    #[serde(skip)]
    pub finding: Option<Finding>,
}

impl Check {
    /// A check and what became of it.
    #[must_use]
    pub fn new(verdict: Verdict, part: &'static str, text: impl Into<String>) -> Self {
        Self { verdict, part, text: text.into(), finding: None }
    }

    /// A check that found this.
    #[must_use]
    pub fn of(finding: &Finding) -> Self {
        let verdict = if finding.severity == Severity::Error { Verdict::Failed } else { Verdict::Noted };
        Self { finding: Some(finding.clone()), ..Self::new(verdict, finding.part, finding.message.as_str()) }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verdict, colour) = match self.verdict {
            Verdict::Passed => ("ok", "32"),
            Verdict::Failed => ("FAIL", "1;31"),
            Verdict::LeftOut => ("--", "2"),
            Verdict::Noted => ("note", "33"),
        };
        let has_colour = f.alternate();
        let paint = |text: String, colour: &str| {
            if has_colour { format!("\x1b[{colour}m{text}\x1b[0m") } else { text }
        };
        write!(f, "  {} {:<11} {}", paint(format!("{verdict:<4}"), colour), self.part, self.text)?;
        let Some(Finding { code, found, expected, .. }) = &self.finding else { return Ok(()) };
        // Below the sentence, so that it does not have to be taken apart.
        write!(f, "\n{:19}{}", "", paint(format!("[{code}] found {found}; expected {expected}"), "2"))
    }
}

/// Everything that is to be shown.
#[derive(Debug, Clone)]
pub struct Report {
    title: String,
    summary: Summary,
    checks: Vec<Check>,
    input: FitInput,
    memory: MemoryEstimate,
    fit: Option<Fit>,
}

impl Report {
    /// Reports on `header` under the settings `input`; `title` is the file's name.
    #[must_use]
    pub fn new(title: impl Into<String>, header: &Header, input: FitInput) -> Self {
        let summary = header.summary().clone();
        let memory = estimate(&summary, &input);
        Self { title: title.into(), checks: checks(header), summary, input, memory, fit: None }
    }

    /// Adds what else was looked at.
    #[must_use]
    pub fn with_check(mut self, check: Check) -> Self {
        self.checks.push(check);
        self
    }

    /// Whether a check failed.
    #[must_use]
    pub fn failed(&self) -> Option<&Check> {
        self.checks.iter().find(|check| check.verdict == Verdict::Failed)
    }

    /// Adds the verdict for `available` bytes of memory, of which `headroom_ratio` stays free.
    #[must_use]
    pub fn with_available(mut self, available: u64, headroom_ratio: f64) -> Self {
        self.fit = Some(verdict(self.memory.total_bytes, available, headroom_ratio));
        self
    }

    /// What the model is.
    #[must_use]
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// What was looked at, and was not.
    #[must_use]
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// The predicted memory.
    #[must_use]
    pub fn memory(&self) -> &MemoryEstimate {
        &self.memory
    }

    /// The verdict, if [`Report::with_available`] asked for one.
    #[must_use]
    pub fn fit(&self) -> Option<&Fit> {
        self.fit.as_ref()
    }
}

fn checks(header: &Header) -> Vec<Check> {
    let summary = header.summary();
    let shapes = match summary.shape_coverage {
        ShapeCoverage::Full => format!("every matrix of all {} layers agrees with the hyperparameters", summary.layers),
        ShapeCoverage::Outline => {
            format!("embedding, output and all {} layers are there; the worker checks the rest at load", summary.layers)
        }
    };
    let tables =
        format!("{} tensors in order, without gap or overlap, aligned to {}", summary.tensors, header.alignment());
    let length = match summary.parts {
        0 | 1 => format!("the tensors end where the file does, at {} bytes", summary.file_bytes),
        parts => format!("{parts} parts of one model, whose tensors end where they do, {} bytes", summary.file_bytes),
    };
    let keys = format!("{} keys, none twice, header of {}", header.metadata().len(), human_bytes(summary.header_bytes));
    let tokens =
        format!("{} tokens, none twice; types, scores, special tokens and merges fit them", summary.vocabulary);
    let passed = [
        ("format", format!("GGUF version {}, little-endian", header.version())),
        ("metadata", keys),
        ("tokenizer", tokens),
        ("layout", tables),
        ("length", length),
        ("shapes", shapes),
    ];
    let passed = passed.into_iter().map(|(part, text)| Check::new(Verdict::Passed, part, text));
    passed.chain(header.notes().iter().map(Check::of)).collect()
}

/// How many bits a weight takes, over all tensors.
fn bits(summary: &Summary) -> String {
    // Two decimals are shown, for which the mantissa's 53 bits are more than enough.
    let bits = summary.tensor_bytes as f64 * 8.0 / summary.parameters.max(1) as f64;
    format!(", {bits:.2} bits per weight")
}

impl Report {
    fn model_lines(&self) -> Vec<(&'static str, String)> {
        let s = &self.summary;
        let name = s.name.as_deref().map_or_else(|| "(unnamed)".to_owned(), printable);
        let version = s.version.as_deref().map(|version| format!(", version {}", printable(version)));
        let heads = format!("{} heads, {} KV heads of {} + {}", s.heads, s.kv_heads, s.head_dim_k, s.head_dim_v);
        let experts =
            if s.experts > 0 { format!(", {} of {} experts", s.experts_used, s.experts) } else { String::new() };
        let types: Vec<_> = s.types.iter().map(|(kind, bytes)| format!("{kind} {}", human_bytes(*bytes))).collect();
        vec![
            ("model", format!("{name}{}", version.unwrap_or_default())),
            ("architecture", format!("{}, {} parameters", s.architecture, human_count(s.parameters))),
            ("quantization", format!("{} ({}){}", s.quantization, types.join(", "), bits(s))),
            (
                "layers",
                format!(
                    "{} of width {}, {heads}, feed-forward {}{experts}",
                    s.layers, s.embedding_length, s.feed_forward_length
                ),
            ),
            ("context", format!("{} tokens trained", s.context_length)),
            (
                "chat template",
                match (s.encoder, s.chat_template) {
                    (true, _) => "none is needed: it is an encoder, which gives vectors of texts (/v1/embeddings)",
                    (false, true) => "in the file",
                    (false, false) => "none: only completions are possible",
                }
                .into(),
            ),
            ("size", format!("{} file, {} tensors", human_bytes(s.file_bytes), human_bytes(s.tensor_bytes))),
        ]
    }

    fn memory_lines(&self) -> Vec<(&'static str, String)> {
        let (m, i) = (&self.memory, &self.input);
        let sequences = i.parallel.max(1);
        let mut lines = vec![
            ("weights", human_bytes(m.weights_bytes)),
            (
                "KV cache",
                if self.summary.encoder {
                    String::from("none")
                } else {
                    format!(
                        "{} ({} cells: {sequences} x {}, {}/{})",
                        human_bytes(m.kv_cache_bytes),
                        m.cells,
                        m.cells / u64::from(sequences),
                        i.type_k,
                        i.type_v
                    )
                },
            ),
            ("compute", format!("{} (ubatch {})", human_bytes(m.compute_bytes), i.n_ubatch.min(i.n_batch))),
            ("overhead", human_bytes(m.overhead_bytes)),
        ];
        if i.pooled_tokens > 0 {
            lines.push(("embeddings", format!("{} (ubatch {})", human_bytes(m.pooled_bytes), i.pooled_tokens)));
        }
        lines.push(("total", human_bytes(m.total_bytes)));
        if m.device_bytes > 0 {
            lines.push(("on the GPU", format!("{} ({} layers)", human_bytes(m.device_bytes), i.gpu_layers)));
        }
        if let Some(fit) = &self.fit {
            lines.push(("verdict", format!("{}: {}", if fit.fits { "fits" } else { "does not fit" }, fit.message)));
        }
        lines
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", printable(&self.title))?;
        for (name, text) in self.model_lines() {
            writeln!(f, "  {name:<14} {text}")?;
        }
        writeln!(f, "\nchecks")?;
        for check in &self.checks {
            if f.alternate() { writeln!(f, "{check:#}")? } else { writeln!(f, "{check}")? }
        }
        writeln!(f, "\nmemory")?;
        for (name, text) in self.memory_lines() {
            writeln!(f, "  {name:<14} {text}")?;
        }
        Ok(())
    }
}
