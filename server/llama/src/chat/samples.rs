//! Chats of the simplest kinds: what a template must know what to do with before anyone is answered with it.

use serde::Serialize;

/// One of them, in the API's JSON.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SampleChat {
    /// Its kind, in words.
    #[serde(skip)]
    pub kind: &'static str,
    /// The messages, the last of which is a user's that says [`SAMPLE_WORD`].
    pub messages: &'static str,
    /// The tools that are offered with it, to templates that look at tools; empty: none.
    pub tools: &'static str,
}

/// What the user says last in each, and no template says by itself.
pub const SAMPLE_WORD: &str = "marzipan";

/// A tool that is offered.
pub(super) const SAMPLE_TOOLS: &str = r#"[{"type":"function","function":{"name":"look","description":"Looks.","parameters":{"type":"object","properties":{"where":{"type":"string","description":"Where."}},"required":["where"]}}}]"#;

/// What a call in [`CALLS_AND_RESULTS`] is called with.
pub(super) const CALLED_WORD: &str = "nougat";
/// What its tool returns there.
pub(super) const RETURNED_WORD: &str = "praline";
/// Chats in which a tool was called, in ways of which a template that takes calls takes one, and whether its result is among what is
/// said. Ids have the nine letters and digits that Mistral's wants.
pub(super) const CALLS_AND_RESULTS: [(&str, bool); 3] = [
    (
        r#"[{"role":"user","content":"marzipan"},{"role":"assistant","content":"","tool_calls":[{"id":"call00001","type":"function","function":{"name":"look","arguments":"{\"where\":\"nougat\"}"}}]},{"role":"tool","content":"praline","tool_call_id":"call00001"}]"#,
        true,
    ),
    (
        r#"[{"role":"user","content":"marzipan"},{"role":"assistant","content":"","tool_calls":[{"id":"call00001","type":"function","function":{"name":"look","arguments":"{\"where\":\"nougat\"}"}}]},{"role":"tool","content":"praline","tool_call_id":"call00001"},{"role":"assistant","content":"Hi."},{"role":"user","content":"marzipan"}]"#,
        true,
    ),
    (
        r#"[{"role":"user","content":"marzipan"},{"role":"assistant","content":"","tool_calls":[{"id":"call00001","type":"function","function":{"name":"look","arguments":"{\"where\":\"nougat\"}"}}]},{"role":"user","content":"marzipan"}]"#,
        false,
    ),
];

/// In the order in which what fails is most telling.
pub const SAMPLE_CHATS: [SampleChat; 4] = [
    SampleChat { kind: "a turn", messages: r#"[{"role":"user","content":"marzipan"}]"#, tools: "" },
    SampleChat {
        kind: "a system text",
        messages: r#"[{"role":"system","content":"Be brief."},{"role":"user","content":"marzipan"}]"#,
        tools: "",
    },
    SampleChat {
        kind: "three turns",
        messages: r#"[{"role":"user","content":"Hello"},{"role":"assistant","content":"Hi."},{"role":"user","content":"marzipan"}]"#,
        tools: "",
    },
    SampleChat { kind: "tools", messages: r#"[{"role":"user","content":"marzipan"}]"#, tools: SAMPLE_TOOLS },
];

/// Whether a prompt has what the user says last, in any case, and whatever a template put between its letters.
#[must_use]
pub fn says_sample_word(prompt: &str) -> bool {
    says(prompt, SAMPLE_WORD)
}

/// Whether it has this word, in the same way.
pub(super) fn says(prompt: &str, word: &str) -> bool {
    let letters: String = prompt.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect();
    letters.contains(word)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn each_sample_ends_with_what_is_looked_for() {
        for sample in SAMPLE_CHATS {
            let messages: Vec<serde_json::Value> = serde_json::from_str(sample.messages).unwrap();
            assert_eq!(messages.last().unwrap()["content"], SAMPLE_WORD, "{}", sample.kind);
            assert!(sample.tools.is_empty() || serde_json::from_str::<Vec<serde_json::Value>>(sample.tools).is_ok());
        }
    }

    #[test]
    fn a_call_and_its_result_say_what_is_looked_for() {
        for (messages, has_result) in CALLS_AND_RESULTS {
            let messages: Vec<serde_json::Value> = serde_json::from_str(messages).unwrap();
            let arguments = messages[1].pointer("/tool_calls/0/function/arguments").unwrap().as_str().unwrap();
            assert_eq!(serde_json::from_str::<serde_json::Value>(arguments).unwrap()["where"], CALLED_WORD);
            assert_eq!(messages[2]["content"] == RETURNED_WORD, has_result);
        }
    }

    #[test]
    fn the_word_is_found_however_it_is_written() {
        for prompt in ["<s>marzipan</s>", "MARZIPAN", "m a r z i p a n", "\"marz\\nipan\""] {
            assert_eq!(says_sample_word(prompt), !prompt.contains('\\'), "{prompt}");
        }
        assert!(!says_sample_word("marzip"));
    }
}
