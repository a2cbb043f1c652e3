//! The model's chat template, rendered by llama.cpp's own `common_chat_*` within limits.
//!
//! Flow: messages (an `OpenAI` array, as JSON) are checked for shape and depth, then rendered in C++ behind a try/catch;
//! the prompt comes back with the stop strings that the template's format adds. A template is a program that somebody else
//! wrote: its time, memory and depth are bounded ([`limits`]), wherever it allocates, and what it does without that ends
//! only with the process ([`end_after_cpu`]), so that a template of which nothing is known is for a process of its own.
//! Absent: that process; what a model answers is read by [`parser`].

mod fault;
pub mod limits;
mod parser;
mod samples;

use std::ptr::NonNull;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{ChatError, TemplateLimit};
use crate::guard;
use crate::limits::{MAX_JSON_NESTING, MAX_WRITTEN_JSON_VALUES};
use crate::model::Model;
use crate::shim::{self, RawChatTemplate, RawTemplateLimits, RawText};
use limits::{
    MAX_TEMPLATE_BYTES, MAX_TEMPLATE_EXPRESSION_PARTS, MAX_TEMPLATE_NESTING, TEMPLATE_CPU_MS, TEMPLATE_MEMORY_BYTES,
    TEMPLATE_MEMORY_PER_INPUT_BYTE, TRY_CALLS_CPU_MS,
};
pub use parser::{AnswerForm, AnswerParser, CallGrammar, Lead, ParsedAnswer, ParsedCall, ThoughtForm, ThoughtStage};
use samples::{CALLED_WORD, CALLS_AND_RESULTS, RETURNED_WORD, SAMPLE_TOOLS, says};
pub use samples::{SAMPLE_CHATS, SAMPLE_WORD, SampleChat, says_sample_word};

/// What a template is made of: all that is needed to render without the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateSource {
    /// The template, as `tokenizer.chat_template` has it, or as it was given in its place.
    pub text: String,
    /// The text of the token that begins a text; empty where there is none.
    pub bos: String,
    /// The text of the token that ends one.
    pub eos: String,
    /// Whether that is put before every prompt anyhow, so that the template's own is dropped.
    pub add_bos: bool,
    /// The same at its end.
    pub add_eos: bool,
}

impl TemplateSource {
    /// The template that was given for a model, else what its file says; `None` when there is neither. One that is empty is one,
    /// and none that renders.
    ///
    /// # Errors
    /// When the vocabulary cannot name its own tokens.
    pub fn of(model: &Model) -> Result<Option<Self>, ChatError> {
        // SAFETY: the model is alive, and the shim catches exceptions.
        let answer = unsafe { shim::gantry_chat_template_source(model.raw()) };
        let answer = answer.into_result().map_err(ChatError::Template)?;
        let source: Self = serde_json::from_str(&answer).map_err(|e| ChatError::Template(e.to_string()))?;
        match model.given_template() {
            Some(text) => Ok(Some(Self { text: text.to_owned(), ..source })),
            None => Ok(model.template(None).map(|_| source)),
        }
    }
}

/// What of earlier calls of tools reaches the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownCalls {
    /// The calls of an assistant's turn.
    pub calls: bool,
    /// The messages that tell what tools returned.
    pub results: bool,
}

/// What a template is parsed from.
#[derive(Serialize)]
struct Parsed<'a> {
    #[serde(flatten)]
    source: &'a TemplateSource,
    samples: [SampleChat; SAMPLE_CHATS.len()],
}

/// A parsed template. Rendering does not change it, so threads may share one.
#[derive(Debug)]
pub struct ChatTemplate {
    ptr: NonNull<RawChatTemplate>,
    text: String,
    /// While no tools are offered, and while some are.
    shown_calls: [ShownCalls; 2],
}

// SAFETY: owned, bound to no thread.
unsafe impl Send for ChatTemplate {}
// SAFETY: rendering takes the parsed program const and keeps its state in a context of its own for each call.
unsafe impl Sync for ChatTemplate {}

impl Drop for ChatTemplate {
    fn drop(&mut self) {
        // SAFETY: owned and not used again.
        unsafe { shim::gantry_chat_template_free(self.ptr.as_ptr()) };
    }
}

/// A rendered chat.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ChatPrompt {
    /// The text to tokenise, special tokens parsed but for those that one of `text_at` lies within.
    pub prompt: String,
    /// Places in the prompt where text of messages would be read as special tokens, in bytes and ascending; see
    /// [`Model::chat_prompt`].
    #[serde(skip)]
    pub text_at: Vec<usize>,
    /// Strings that end an answer in this template's format, besides the model's own end tokens.
    #[serde(rename = "stops")]
    pub additional_stops: Vec<String>,
    /// What answers look like; `None` where nobody asked, or nothing is known of it.
    #[serde(default)]
    pub form: Option<AnswerForm>,
}

impl ChatPrompt {
    /// Reads what [`ChatTemplate::render_json`] answered.
    ///
    /// # Errors
    /// When it is something else.
    pub fn from_json(rendered: &str) -> Result<Self, ChatError> {
        serde_json::from_str(rendered)
            .map_err(|e| ChatError::Template(format!("the rendered prompt is unreadable: {e}")))
    }
}

impl ChatTemplate {
    /// Parses the model's template; `None` when there is none.
    ///
    /// # Errors
    /// As [`ChatTemplate::parse`].
    pub fn new(model: &Model) -> Result<Option<Self>, ChatError> {
        TemplateSource::of(model)?.as_ref().map(Self::parse).transpose()
    }

    /// Parses a template and looks at what it does with chats of many kinds.
    ///
    /// # Errors
    /// When it cannot be parsed, or takes more than [`limits`] allow of one that is as simple as can be.
    pub fn parse(source: &TemplateSource) -> Result<Self, ChatError> {
        Self::parse_within(source, u64::MAX)
    }

    /// The same with so much memory, where that is less than [`limits`] allow.
    ///
    /// # Errors
    /// As [`ChatTemplate::parse`].
    pub fn parse_within(source: &TemplateSource, most_bytes: u64) -> Result<Self, ChatError> {
        let bytes = source.text.len();
        if source.text.is_empty() {
            let what = "it is empty; a file without the key says that its model is for texts alone";
            return Err(ChatError::Template(what.to_owned()));
        }
        if bytes > MAX_TEMPLATE_BYTES {
            return Err(ChatError::Template(format!("it has {bytes} bytes, and {MAX_TEMPLATE_BYTES} are allowed")));
        }
        let parsed = Parsed { source, samples: SAMPLE_CHATS };
        let json = serde_json::to_string(&parsed).map_err(|e| ChatError::Template(e.to_string()))?;
        let mut reason = RawText::empty();
        let limits = limits_for(json.len(), most_bytes);
        // SAFETY: the text has the length given and the limits live; `reason` is filled by the callee, which catches
        // exceptions.
        let ptr = unsafe {
            shim::gantry_common_log_off();
            shim::gantry_chat_template_new(json.as_ptr().cast(), json.len(), &raw const limits, &raw mut reason)
        };
        let reason = reason.into_result();
        match NonNull::new(ptr) {
            Some(ptr) => {
                let shown_calls = [ShownCalls { calls: true, results: true }; 2];
                let mut made = Self { ptr, text: source.text.clone(), shown_calls };
                made.shown_calls = [made.try_calls("[]", most_bytes), made.try_calls(SAMPLE_TOOLS, most_bytes)];
                Ok(made)
            }
            None => Err(fault::error(&reason.err().unwrap_or_default(), &source.text)),
        }
    }

    /// Whether the template looks at tools.
    #[must_use]
    pub fn knows_tools(&self) -> bool {
        // SAFETY: the template is alive.
        unsafe { shim::gantry_chat_template_knows_tools(self.ptr.as_ptr()) }
    }

    /// What it shows of earlier calls of tools, while some are offered or while none is.
    #[must_use]
    pub fn shown_calls(&self, are_offered: bool) -> ShownCalls {
        self.shown_calls[usize::from(are_offered)]
    }

    /// Looks for calls and results in what it makes of chats that have some, while these `tools` are offered. Where it refuses all of these, it says so to whoever
    /// asks, and nothing is lost in silence.
    fn try_calls(&self, tools: &str, most_bytes: u64) -> ShownCalls {
        let mut prompts = Vec::new();
        for (messages, has_result) in CALLS_AND_RESULTS {
            let asked = format!("{{\"messages\":{messages},\"tools\":{tools},\"callable\":[]}}");
            let rendered = self.render_json(&asked, TRY_CALLS_CPU_MS, most_bytes);
            match rendered.and_then(|rendered| ChatPrompt::from_json(&rendered)) {
                Ok(chat) => prompts.push((chat.prompt, has_result)),
                // Each further one would take as much.
                Err(ChatError::TemplateLimit { .. }) => break,
                Err(_) => {}
            }
        }
        let with_result = || prompts.iter().filter(|(_, has_result)| *has_result);
        ShownCalls {
            calls: prompts.is_empty() || prompts.iter().any(|(prompt, _)| says(prompt, CALLED_WORD)),
            results: with_result().next().is_none() || with_result().any(|(prompt, _)| says(prompt, RETURNED_WORD)),
        }
    }

    /// Whether what a model thinks has a place of its own in answers.
    #[must_use]
    pub fn thinks(&self) -> bool {
        // SAFETY: the template is alive.
        unsafe { shim::gantry_chat_template_thinks(self.ptr.as_ptr()) }
    }

    /// Renders a chat with the assistant's turn opened: an array of messages as `OpenAI` has them, or an object of `messages` with
    /// any of `tools`, `callable` (those of them that may be called, as calls are bound by them), `required` (one must be),
    /// `parallel` (several may be), `thinking` (it may), `variables` (further ones of the template), `parsed` (tell
    /// [`ChatPrompt::form`]), `bound` (what answers say is of a form) and `continued`: the prompt ends with the text of the last message, and no turn is opened.
    ///
    /// # Errors
    /// When the messages are not an array of messages with roles, or the template refuses them.
    pub fn render(&self, chat_json: &str) -> Result<ChatPrompt, ChatError> {
        ChatPrompt::from_json(&self.render_json(chat_json, TEMPLATE_CPU_MS, u64::MAX)?)
    }

    /// The same with at most so much computing and, where that is less than [`limits`] allow, so much memory, as text for
    /// [`ChatPrompt::from_json`]: for who passes it on.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_json(&self, chat_json: &str, cpu_ms: u64, most_bytes: u64) -> Result<String, ChatError> {
        check_chat(chat_json)?;
        let limits = RawTemplateLimits { cpu_ms, ..limits_for(chat_json.len(), most_bytes) };
        // SAFETY: the template and the limits are alive, the texts have the lengths given, and the shim catches exceptions.
        let answer = unsafe {
            shim::gantry_chat_template_apply(
                self.ptr.as_ptr(),
                chat_json.as_ptr().cast(),
                chat_json.len(),
                &raw const limits,
            )
        };
        answer.into_result().map_err(|reason| fault::error(&reason, &self.text))
    }
}

/// Ends this process once it has computed for so long, counted from now, or (`None`) not any more: for one that renders a
/// template, and may do so without end.
pub fn end_after_cpu(limit: Option<Duration>) {
    // Less than a millisecond would mean never.
    let ms = limit.map_or(0, |limit| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).max(1));
    // SAFETY: sets a timer of the process.
    unsafe { shim::gantry_end_after_cpu_ms(ms) };
}

/// Has this process end with a status that [`limit_of_exit`] understands, where a template passes a limit in code that may
/// not say so.
pub fn exit_on_limits() {
    // SAFETY: sets a handler of the process, which only ends it.
    unsafe { shim::gantry_exit_on_terminate() };
}

/// The limit at which such a process ended.
#[must_use]
pub fn limit_of_exit(code: i32) -> Option<TemplateLimit> {
    match code - shim::EXIT_LIMIT {
        1 => Some(TemplateLimit::Time),
        // Of no known limit: what else ends it so is memory that the system refuses.
        0 | 2 => Some(TemplateLimit::Memory),
        3 => Some(TemplateLimit::Depth),
        _ => None,
    }
}

fn limits_for(input_bytes: usize, most_bytes: u64) -> RawTemplateLimits {
    let input_bytes = u64::try_from(input_bytes).unwrap_or(u64::MAX);
    RawTemplateLimits {
        cpu_ms: TEMPLATE_CPU_MS,
        memory_bytes: TEMPLATE_MEMORY_BYTES
            .saturating_add(input_bytes.saturating_mul(TEMPLATE_MEMORY_PER_INPUT_BYTE))
            .min(most_bytes),
        nesting: MAX_TEMPLATE_NESTING,
        expression_parts: MAX_TEMPLATE_EXPRESSION_PARTS,
    }
}

/// Refuses what the C++ side would meet with a deep recursion or an answer that names no message.
fn check_chat(chat_json: &str) -> Result<(), ChatError> {
    // serde_json bounds the depth; C++'s parser does not.
    let chat: Value = serde_json::from_str(chat_json).map_err(|e| ChatError::Messages(format!("not JSON: {e}")))?;
    let messages = chat.get("messages").unwrap_or(&chat);
    let messages = messages.as_array().ok_or_else(|| ChatError::Messages(String::from("not an array")))?;
    if messages.is_empty() {
        return Err(ChatError::Messages(String::from("at least one message is needed")));
    }
    for (i, message) in messages.iter().enumerate() {
        let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
        if role.is_empty() {
            return Err(ChatError::Messages(format!("message {i} has no role")));
        }
        if message.get("content").is_none() && message.get("tool_calls").is_none() {
            return Err(ChatError::Messages(format!("message {i} has neither content nor tool_calls")));
        }
        if role.contains(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '_' | '-')) {
            return Err(ChatError::Messages(format!("message {i} has a role that is no word")));
        }
    }
    check_written_json(&chat).map_err(ChatError::Messages)
}

/// Refuses texts of a chat that are read as JSON and gone through value by value, by this side or by C++'s, where they are too deep
/// or have too many: arguments of calls, and what tools returned.
pub(crate) fn check_written_json(chat: &Value) -> Result<(), String> {
    let messages = chat.get("messages").unwrap_or(chat).as_array();
    let mut values = 0;
    for (i, message) in messages.into_iter().flatten().enumerate() {
        let mut check = |what: &str, text: Option<&Value>| {
            let text = text.and_then(Value::as_str).filter(|text| guard::begins_json(text));
            let shape = text.map(guard::json_shape).unwrap_or_default();
            values += shape.values;
            if shape.depth > MAX_JSON_NESTING {
                return Err(format!("message {i} has {what} nested more than {MAX_JSON_NESTING} levels deep"));
            }
            if values > MAX_WRITTEN_JSON_VALUES {
                return Err(format!(
                    "message {i} has {what} of too many values: tools' results and arguments of calls may have \
                     {MAX_WRITTEN_JSON_VALUES} together"
                ));
            }
            Ok(())
        };
        for call in message.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            check("a tool call with arguments", call.pointer("/function/arguments"))?;
        }
        if message.get("role").and_then(Value::as_str) == Some("tool") {
            check("a result", message.get("content"))?;
            for part in message.get("content").and_then(Value::as_array).into_iter().flatten() {
                check("a result", part.get("text"))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    /// The turns of `SmolLM2`'s template, which writes whatever role a message has.
    const TURNS: &str =
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}";
    /// Those of Gemma 3's, which wants a user's and a model's by turns.
    const BY_TURNS: &str = "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('by turns') }}{% endif %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}";

    #[test]
    fn what_a_template_shows_of_earlier_calls_is_what_appears_in_its_prompts() {
        let calls = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}{% endfor %}";
        let loud = calls
            .replace("m.content", "m.content | upper")
            .replace("c.function.arguments", "c.function.arguments | tojson | upper");
        let users = calls.replace("{{ m.content }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}");
        let looked_at = "{% for m in messages %}{% if m.tool_calls %}{% endif %}{{ m.content }}{% endfor %}";
        let refused = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}{{ m.content }}{% endfor %}";
        for (what, template, calls, results) in [
            ("turns of any role", TURNS, false, true),
            ("calls of no turn, results refused", BY_TURNS, false, true),
            ("both", calls, true, true),
            ("both in other letters", &loud, true, true),
            ("calls alone", &users, true, false),
            ("calls that are looked at and not written", looked_at, false, true),
            ("calls that it refuses itself", refused, true, true),
        ] {
            let source = TemplateSource { text: template.to_owned(), ..TemplateSource::default() };
            let template = ChatTemplate::parse(&source).unwrap_or_else(|error| panic!("{what}: {error}"));
            for are_offered in [false, true] {
                assert_eq!(template.shown_calls(are_offered), ShownCalls { calls, results }, "{what}");
            }
        }
        let source = TemplateSource {
            text: format!("{{% if tools %}}{calls}{{% else %}}{TURNS}{{% endif %}}"),
            ..TemplateSource::default()
        };
        let template = ChatTemplate::parse(&source).unwrap();
        let [without, with] = [false, true].map(|are_offered| template.shown_calls(are_offered).calls);
        assert_eq!((without, with), (false, true), "calls while tools are offered");
    }

    #[test]
    fn a_template_that_takes_too_much_memory_to_be_read_is_told_by_its_line() {
        // Signs take most where the text is taken apart, and what an expression is made of where it is read.
        for (what, line) in
            [("signs", "{% if a %}{% endif %}\n"), ("expressions", "{{ a.b.c.d.e.f.g.h + i.j.k.l.m.n }}\n")]
        {
            let text = |lines: usize| line.repeat(lines) + "{{ messages[-1].content }}";
            let parsed = |lines: usize, bytes: u64| {
                let source = TemplateSource { text: text(lines), ..TemplateSource::default() };
                ChatTemplate::parse_within(&source, bytes).map(drop)
            };
            assert_eq!(parsed(10, 3 << 20), Ok(()), "{what}");
            let mut last = 0;
            for bytes in [2 << 20, 4 << 20] {
                let told = parsed(6_000, bytes).unwrap_err();
                let ChatError::TemplateLimit { limit: TemplateLimit::Memory, at: Some(at) } = &told else {
                    panic!("{what}: {told}")
                };
                let number: usize = at.strip_prefix("at line ").unwrap().split(',').next().unwrap().parse().unwrap();
                assert!(at.ends_with(&format!("`{}`", line.trim_end())), "{what}: {at}");
                // With more memory it comes further.
                assert!(number > last.max(100) && number < 6_000, "{what}: {at}");
                last = number;
            }
        }
    }

    #[test]
    fn messages_without_shape_are_refused() {
        assert_eq!(check_chat(r#"[{"role":"user","content":"hi"}]"#), Ok(()));
        assert_eq!(check_chat(r#"[{"role":"assistant","tool_calls":[]}]"#), Ok(()));
        let deep = format!("[{}{}]", "[".repeat(100_000), "]".repeat(100_000));
        for bad in [
            "",
            "{}",
            "[]",
            "[1]",
            r#"[{"content":"x"}]"#,
            r#"[{"role":7,"content":"x"}]"#,
            r#"[{"role":"user"}]"#,
            r#"[{"role":"<|im_end|>","content":"x"}]"#,
            &deep,
        ] {
            assert!(matches!(check_chat(bad), Err(ChatError::Messages(_))), "{}", &bad[..bad.len().min(40)]);
        }
    }

    #[test]
    fn what_tools_returned_has_no_more_values_than_may_be_gone_through() {
        let list = |values: usize| format!(r#"["\n"{}]"#, ",[0]".repeat(values / 2));
        let chat = |values: usize| json!([{"role": "user", "content": list(1_000_000)}, {"role": "tool", "content": list(values)}]);
        assert_eq!(check_written_json(&chat(MAX_WRITTEN_JSON_VALUES - 2)), Ok(()));
        let told = check_written_json(&chat(MAX_WRITTEN_JSON_VALUES + 2)).unwrap_err();
        assert!(told.starts_with("message 1 has a result of too many values"), "{told}");
        let half = json!({"role": "assistant", "tool_calls": [{"function": {"arguments": list(MAX_WRITTEN_JSON_VALUES / 2)}}]});
        assert!(check_written_json(&json!({"messages": [half, half, half]})).is_err(), "they count together");
    }

    #[test]
    fn json_within_messages_is_as_deep_as_json_may_be() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        type Make = fn(&str) -> serde_json::Value;
        let cases: [(Make, usize); 4] = [
            (|text: &str| json!({"role": "tool", "content": text}), MAX_JSON_NESTING),
            (|text: &str| json!({"role": "tool", "content": [{"type": "text", "text": text}]}), MAX_JSON_NESTING),
            (
                |text: &str| json!({"role": "assistant", "tool_calls": [{"function": {"arguments": text}}]}),
                MAX_JSON_NESTING,
            ),
            // What a person writes is never read as JSON.
            (|text: &str| json!({"role": "user", "content": text}), 1_000_000),
        ];
        for (message, deepest) in cases {
            assert!(check_chat(&json!([message(&nested(deepest))]).to_string()).is_ok());
            if deepest == MAX_JSON_NESTING {
                let refused = check_chat(&json!([message(&nested(deepest + 1))]).to_string());
                assert!(matches!(refused, Err(ChatError::Messages(_))), "{refused:?}");
            }
        }
    }
}
