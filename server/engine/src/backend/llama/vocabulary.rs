//! The vocabulary and the template of a model.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use gantry_core::{Chat, Part, Role, Tool, ToolCall, ToolChoice, messages_json};
use gantry_llama::{
    AnswerForm, ChatError, ChatPrompt, InfillTokens, Lead, Model, ShownCalls, SpecialTokens, TokenTexts, TokenizeError,
};
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::call_schema::bindable;
use crate::backend::{CallRules, Closing, Pace, Reads, RenderedAnswer, RenderedChat, Token, Vocabulary};
use crate::error::{RequestError, of_chat};
use crate::template::Renderer;

/// The vocabulary and the template of a model.
pub(crate) struct LlamaVocabulary {
    model: Arc<Model>,
    template: Option<Renderer>,
    end_tokens: Vec<Token>,
    longest_token: usize,
    texts: OnceLock<Arc<TokenTexts>>,
    answer_texts: Mutex<Option<(Vec<Token>, Arc<TokenTexts>)>>,
}

/// A chat as [`gantry_llama::ChatTemplate::render`] takes it.
fn chat_json(chat: &Chat, reads: Reads, reads_answer: bool, reads_calls: bool) -> Result<String, RequestError> {
    let internal = |error: serde_json::Error| RequestError::Internal(error.to_string());
    let messages = messages_json(&chat.messages).map_err(internal)?;
    let mut fields = Map::new();
    if !chat.tools.is_empty() {
        let tools: Vec<Value> = chat.tools.iter().map(tool_json).collect::<Result<_, _>>()?;
        if reads_answer {
            let callable = chat.tools.iter().zip(&tools).filter(|(tool, _)| reads_calls && is_callable(chat, tool));
            fields.insert("callable".to_owned(), callable.map(|(_, shown)| bindable_tool(shown)).collect());
        }
        fields.insert("tools".to_owned(), tools.into());
        fields.insert("required".to_owned(), (chat.tool_choice == ToolChoice::Required).into());
        fields.insert("parallel".to_owned(), chat.parallel_tool_calls.into());
    }
    if let Some(thinking) = chat.thinking {
        fields.insert("thinking".to_owned(), thinking.into());
    }
    if !chat.template_variables.is_empty() {
        let variable = |(name, value): &(String, String)| Ok((name.clone(), json_of("chat_template_kwargs", value)?));
        let variables: Map<String, Value> =
            chat.template_variables.iter().map(variable).collect::<Result<_, RequestError>>()?;
        fields.insert("variables".to_owned(), variables.into());
    }
    if reads_answer {
        fields.insert("parsed".to_owned(), true.into());
        fields.insert("bound".to_owned(), (reads == Reads::Bound).into());
    }
    if chat.continue_final_message {
        fields.insert("continued".to_owned(), true.into());
    }
    if fields.is_empty() {
        return Ok(messages);
    }
    // The messages are text already, and may be megabytes of it.
    let rest = Value::Object(fields).to_string();
    Ok(format!("{{\"messages\":{messages},{}", &rest[1..]))
}

fn is_callable(chat: &Chat, tool: &Tool) -> bool {
    chat.allowed_tools.is_empty() || chat.allowed_tools.contains(&tool.name)
}

/// A tool as calls are bound by it.
fn bindable_tool(shown: &Value) -> Value {
    let mut tool = shown.clone();
    if let Some(parameters) = tool.pointer_mut("/function/parameters") {
        *parameters = bindable(parameters);
    }
    tool
}

fn tool_json(tool: &Tool) -> Result<Value, RequestError> {
    let mut function = Map::new();
    function.insert("name".to_owned(), tool.name.clone().into());
    // llama.cpp wants both.
    function.insert("description".to_owned(), tool.description.clone().unwrap_or_default().into());
    let parameters = match &tool.parameters {
        Some(schema) => json_of("tools", schema)?,
        None => json!({"type": "object", "properties": {}}),
    };
    function.insert("parameters".to_owned(), parameters);
    Ok(json!({"type": "function", "function": function}))
}

fn json_of(param: &str, text: &str) -> Result<Value, RequestError> {
    serde_json::from_str(text)
        .map_err(|error| RequestError::invalid(param, "invalid_json", format!("{param}: {error}")))
}

/// The chat as its template shows all of it: earlier calls for which it has no place, though it shows tools, stand in what the assistant
/// says, as llama.cpp has long written them.
///
/// # Errors
/// The template shows no tools and leaves calls out, or leaves out what they returned: the model would go on with another chat than was
/// asked.
fn with_calls_told(chat: &Chat, knows_tools: bool, shown: ShownCalls) -> Result<Cow<'_, Chat>, RequestError> {
    let refused = |index: usize, field: &str, what: String| {
        let message = format!(
            "{what}: this model's chat template has no place for that, so that it would not be told. Say it in the `content` of a \
             user's or an assistant's message instead, or have the model served with a template that shows it (--chat-template-file; \
             in pods spec.runtime.chatTemplate)"
        );
        Err(RequestError::invalid(&format!("messages[{index}].{field}"), "tools_not_supported", message))
    };
    for (i, message) in chat.messages.iter().enumerate() {
        if let Some(ToolCall { id, name, .. }) = message.tool_calls.first().filter(|_| !shown.calls && !knows_tools) {
            return refused(i, "tool_calls", format!("the assistant called the tool {name:?} (call {id:?})"));
        }
        if message.role == Role::Tool && !shown.results {
            let id = message.tool_call_id.as_deref().unwrap_or_default();
            return refused(i, "content", format!("a tool returned something (to the call {id:?})"));
        }
    }
    if shown.calls || chat.messages.iter().all(|message| message.tool_calls.is_empty()) {
        return Ok(Cow::Borrowed(chat));
    }
    let mut told = chat.clone();
    for message in told.messages.iter_mut().filter(|message| !message.tool_calls.is_empty()) {
        let calls: Vec<_> = std::mem::take(&mut message.tool_calls).iter().map(call_text).collect();
        message.content.push(Part::Text(format!("{{\"tool_calls\":[{}]}}", calls.join(","))));
    }
    Ok(Cow::Owned(told))
}

/// The first call that was called with what is no JSON, as one that was cut off: some templates cannot show such.
fn no_json_arguments(chat: &Chat) -> Option<RequestError> {
    let mut calls = chat.messages.iter().enumerate().flat_map(|(i, message)| {
        message.tool_calls.iter().enumerate().map(move |(j, call)| (format!("messages[{i}].tool_calls[{j}]"), call))
    });
    calls.find_map(|(place, call)| {
        let error = serde_json::from_str::<IgnoredAny>(call.arguments_told()).err()?;
        let param = format!("{place}.function.arguments");
        let message = format!(
            "{param} is no JSON ({error}), and this model's chat template cannot show such a call: give the text of a JSON object, as \
             \"{{}}\", or leave the call and its answer out"
        );
        Some(RequestError::invalid(&param, "invalid_json", message))
    })
}

/// A call as JSON. What it was called with stands as it came where that is JSON, and is never made a tree: it may be megabytes.
fn call_text(call: &ToolCall) -> String {
    let quoted = |text: &str| Value::from(text).to_string();
    let arguments = call.arguments_told();
    let is_json = serde_json::from_str::<IgnoredAny>(arguments).is_ok();
    let arguments = if is_json { Cow::Borrowed(arguments) } else { Cow::Owned(quoted(arguments)) };
    format!("{{\"name\":{},\"arguments\":{arguments},\"id\":{}}}", quoted(&call.name), quoted(&call.id))
}

/// Why a text that came as `param` became no tokens.
fn not_tokenised(param: &str, error: &TokenizeError) -> RequestError {
    match error {
        TokenizeError::RunTooLong { .. } | TokenizeError::RunWork { .. } => {
            RequestError::invalid(param, "prompt_run_too_long", error.to_string())
        }
        TokenizeError::NoStack(_) => RequestError::Overloaded(error.to_string()),
        _ => RequestError::invalid(param, "invalid_prompt", error.to_string()),
    }
}

impl LlamaVocabulary {
    pub(super) fn new(model: Arc<Model>, template: Option<Renderer>) -> Self {
        let tokens = || (0..).take(model.vocab_size() as usize);
        let end_tokens = tokens().filter(|&token| model.is_eog(token)).collect();
        let mut text = Vec::new();
        let length = |token| {
            text.clear();
            // One that llama.cpp cannot name has no text.
            model.token_to_piece(token, true, &mut text).map_or(0, |()| text.len())
        };
        let longest_token = tokens().map(length).max().unwrap_or(0);
        Self { model, template, end_tokens, longest_token, texts: OnceLock::new(), answer_texts: Mutex::default() }
    }

    fn answer_of(&self, form: AnswerForm, lead: Lead, chat: &Chat, reads: Reads) -> RenderedAnswer {
        let token_of = |text: &String| match self.model.tokenize(text, false, true).ok()?.as_slice() {
            [token] => Some(*token),
            _ => None,
        };
        let markup: Vec<Token> = form.markup.iter().filter_map(token_of).collect();
        let calls = match chat.tool_choice {
            ToolChoice::Required => {
                let calls = form.required_calls().map(CallRules::Calls);
                calls.or_else(|| form.required_grammar().map(CallRules::Required))
            }
            ToolChoice::Auto => {
                let is_strict = chat.tools.iter().any(|tool| tool.strict && is_callable(chat, tool));
                // Beside a form, what is no call is of that.
                let whole = form.whole_grammar().filter(|_| reads != Reads::Bound);
                let whole = whole.map(|grammar| CallRules::Whole { grammar, is_strict });
                whole.or_else(|| form.call_grammar().map(|grammar| CallRules::Allowed { grammar, is_strict }))
            }
            ToolChoice::None => None,
        };
        let thinking_budget = chat.thinking_budget.filter(|_| form.thought.is_some());
        let closing = form.thought.as_ref().filter(|_| thinking_budget.is_some());
        let closing = closing.and_then(|thought| {
            // White space behind it is for what is bound there to allow.
            let is_bound = reads == Reads::Bound || chat.tool_choice == ToolChoice::Required;
            let text = if is_bound { thought.closing.trim_end() } else { thought.closing.as_str() };
            let tokens = self.model.tokenize(text, false, true).ok()?;
            Some(Closing { text: text.to_owned(), tokens })
        });
        RenderedAnswer {
            form,
            markup,
            calls: calls.unwrap_or(CallRules::Free),
            thinking_budget,
            closing: closing.unwrap_or_default(),
            lead,
            drops_calls: chat.tool_choice == ToolChoice::None,
        }
    }

    fn append(&self, token: Token, special: bool, out: &mut Vec<u8>) {
        // Tokens are of the vocabulary, so this fails only where llama.cpp cannot name a token: it has no text.
        if let Err(e) = self.model.token_to_piece(token, special, out) {
            tracing::warn!(token, error = %e, "a token has no text");
        }
    }
}

impl Vocabulary for LlamaVocabulary {
    fn size(&self) -> u32 {
        self.model.vocab_size()
    }

    fn longest_token(&self) -> usize {
        self.longest_token
    }

    fn tokenize(&self, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        self.model.tokenize_with(text, true, specials).map_err(|e| not_tokenised("prompt", &e))
    }

    fn tokenize_bare(&self, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        self.model.tokenize_with(text, false, specials).map_err(|e| not_tokenised("prompt", &e))
    }

    fn infill_tokens(&self) -> Option<InfillTokens> {
        self.model.infill_tokens()
    }

    fn pair(&self, query: &str, document: &str) -> Result<Vec<Token>, RequestError> {
        self.model.rerank_tokens(query, document).map_err(|e| not_tokenised("documents", &e))
    }

    fn render(&self, chat: &Chat, reads: Reads, pace: Pace) -> Result<Option<RenderedChat>, RequestError> {
        let template = self.template.as_ref().ok_or_else(|| {
            RequestError::invalid("messages", "no_chat_template", "this model's file has no chat template, so it takes no chats; send the text that it is to go on with as `prompt` to POST /v1/completions, or have the server given a template (--chat-template-file; in pods spec.runtime.chatTemplate)")
        })?;
        if !chat.tools.is_empty() && chat.tool_choice != ToolChoice::None && !template.knows_tools() {
            let message = "tools: this model's chat template has no place for tools, so that it would not be told of any; leave `tools` out, and calls among the messages, or have it served with a template that shows them (--chat-template-file; in pods spec.runtime.chatTemplate)";
            return Err(RequestError::invalid("tools", "tools_not_supported", message));
        }
        let told = with_calls_told(chat, template.knows_tools(), template.shown_calls(!chat.tools.is_empty()))?;
        let chat = told.as_ref();
        // The parsers read whole turns, and of one that is continued the beginning is not in the answer.
        let reads_calls = !chat.tools.is_empty() && (reads == Reads::All || chat.tool_choice != ToolChoice::None);
        let reads_answer =
            reads != Reads::Nothing && !chat.continue_final_message && (reads_calls || template.thinks());
        let asked = chat_json(chat, reads, reads_answer, reads_calls)?;
        let Some(rendered) = template.prompt(&self.model, &asked, pace).map_err(|error| {
            // A limit, and what a template refuses by its own words, have other causes.
            let of_arguments = matches!(error, ChatError::Template(_)).then(|| no_json_arguments(chat)).flatten();
            of_arguments.unwrap_or_else(|| of_chat(&error))
        })?
        else {
            return Ok(None);
        };
        // Where it is not known what stands before what is said, all of the answer is of the form, and told as it stands.
        let answer = rendered.form.and_then(|form| {
            let lead = if reads == Reads::Bound { form.lead() } else { None };
            let is_read = reads == Reads::All || chat.tool_choice == ToolChoice::Required || lead.is_some();
            let lead = lead.or_else(|| form.told_lead().cloned()).unwrap_or_default();
            is_read.then(|| Box::new(self.answer_of(form, lead, chat, reads)))
        });
        let calls = answer.as_ref().map_or(&CallRules::Free, |answer| &answer.calls);
        let may_call = reads_calls && chat.tool_choice == ToolChoice::Auto;
        if reads == Reads::Bound && may_call && *calls == CallRules::Free {
            let message = "tools: how this model's chat template has tools called is not understood, so that an answer cannot be either a call or of a form; leave `tools` out, or say `tool_choice: none`";
            return Err(RequestError::invalid("tools", "tools_not_supported", message));
        }
        if reads_answer
            && chat.tool_choice == ToolChoice::Required
            && !matches!(calls, CallRules::Required(_) | CallRules::Calls(_))
        {
            let message = "tool_choice: how this model's chat template has tools called is not understood, so that no call can be required; say auto";
            return Err(RequestError::invalid("tool_choice", "tools_not_supported", message));
        }
        let ChatPrompt { prompt, text_at, additional_stops: stops, .. } = rendered;
        Ok(Some(RenderedChat { prompt, text_at, stops, answer }))
    }

    fn piece(&self, token: Token, out: &mut Vec<u8>) {
        self.append(token, false, out);
    }

    fn shown_piece(&self, token: Token, out: &mut Vec<u8>) {
        self.append(token, true, out);
    }

    fn texts(&self) -> &Arc<TokenTexts> {
        self.texts.get_or_init(|| Arc::new(TokenTexts::of(&self.model, &[])))
    }

    /// There is one markup for a template, so that it is made once.
    fn texts_with(&self, markup: &[Token]) -> Arc<TokenTexts> {
        let mut made = self.answer_texts.lock().unwrap_or_else(PoisonError::into_inner);
        match &*made {
            Some((of, texts)) if of == markup => Arc::clone(texts),
            _ => {
                let texts = Arc::new(TokenTexts::of(&self.model, markup));
                *made = Some((markup.to_vec(), Arc::clone(&texts)));
                texts
            }
        }
    }

    fn end_tokens(&self) -> &[Token] {
        &self.end_tokens
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use gantry_core::Message;

    use super::*;

    fn called() -> Chat {
        let call = |id: &str, arguments: &str| ToolCall {
            id: id.to_owned(),
            name: "look".to_owned(),
            arguments: arguments.to_owned(),
        };
        let calls = Message {
            tool_calls: vec![call("c1", r#"{"n":12345678901234567890123}"#), call("c2", "no \"JSON\"")],
            ..Message::text(Role::Assistant, "I look.")
        };
        let result = Message { tool_call_id: Some("c1".to_owned()), ..Message::text(Role::Tool, "Nothing.") };
        Chat { messages: vec![Message::text(Role::User, "Look."), calls, result], ..Chat::default() }
    }

    #[test]
    fn calls_that_a_template_leaves_out_stand_in_what_is_said_where_it_shows_tools() {
        let chat = called();
        let all = ShownCalls { calls: true, results: true };
        assert_eq!(*with_calls_told(&chat, true, all).unwrap(), chat);
        assert_eq!(*with_calls_told(&chat, false, all).unwrap(), chat);
        let told = with_calls_told(&chat, true, ShownCalls { calls: false, results: true }).unwrap().into_owned();
        assert_eq!(told.messages[1].tool_calls, []);
        let said = told.messages[1].said();
        let (said, calls) = said.split_once('\n').unwrap();
        let expected = r#"{"tool_calls":[{"name":"look","arguments":{"n":12345678901234567890123},"id":"c1"},{"name":"look","arguments":"no \"JSON\"","id":"c2"}]}"#;
        assert_eq!((said, calls), ("I look.", expected));
        assert_eq!((&told.messages[0], &told.messages[2]), (&chat.messages[0], &chat.messages[2]));

        for (knows_tools, shown, param) in [
            (false, ShownCalls { calls: false, results: true }, "messages[1].tool_calls"),
            (true, ShownCalls { calls: true, results: false }, "messages[2].content"),
            (true, ShownCalls { calls: false, results: false }, "messages[2].content"),
        ] {
            match with_calls_told(&chat, knows_tools, shown).unwrap_err() {
                RequestError::InvalidRequest { param: told, .. } => assert_eq!(told.as_deref(), Some(param)),
                other => panic!("{other:?}"),
            }
        }
    }
}
