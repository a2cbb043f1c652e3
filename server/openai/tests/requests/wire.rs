//! Requests as a client writes them: what a decoder has to read back.

use gantry_core::{
    Chat, Constraint, GenerationParams, Message, Part, Prompt, TextInput, Tool, ToolChoice, messages_json,
};
use gantry_openai::{Common, ValidChatRequest, ValidCompletionRequest, ValidEmbeddingsRequest, ValidRerankRequest};
use serde_json::{Map, Value, json};

pub fn chat(request: &ValidChatRequest) -> Value {
    let mut object = common(&request.common);
    // A template reads what a client writes, but for refusals, which are texts there.
    assert!(request.chat.messages.iter().all(|m: &Message| m.content.iter().all(|part| matches!(part, Part::Text(_)))));
    let messages = messages_json(&request.chat.messages).unwrap();
    object.insert("messages".to_owned(), serde_json::from_str(&messages).unwrap());
    let Chat { tools, tool_choice, parallel_tool_calls, thinking, thinking_budget, .. } = &request.chat;
    let choice = match tool_choice {
        ToolChoice::Auto => "auto",
        ToolChoice::None => "none",
        ToolChoice::Required => "required",
    };
    for (name, value) in [
        ("tools", tools.iter().map(tool).collect()),
        ("tool_choice", json!(choice)),
        ("parallel_tool_calls", json!(parallel_tool_calls)),
        ("enable_thinking", json!(thinking)),
        ("thinking_budget_tokens", json!(thinking_budget)),
        ("include_reasoning", json!(request.common.reasoning)),
    ] {
        object.insert(name.to_owned(), value);
    }
    object.insert("logprobs".to_owned(), json!(request.common.params.logprobs.is_some()));
    object.insert("top_logprobs".to_owned(), json!(request.common.params.logprobs));
    Value::Object(object)
}

fn tool(tool: &Tool) -> Value {
    let Tool { name, description, parameters, strict } = tool;
    let parameters: Option<Value> = parameters.as_ref().map(|schema| serde_json::from_str(schema).unwrap());
    let function = json!({"name": name, "description": description, "parameters": parameters, "strict": strict});
    json!({"type": "function", "function": function})
}

pub fn completion(request: &ValidCompletionRequest) -> Value {
    let mut object = common(&request.common);
    let prompt = |prompt: &Prompt| match prompt {
        Prompt::Text(text) | Prompt::Markup(text) => json!(text),
        Prompt::Tokens(tokens) => json!(tokens),
        Prompt::Infill(infill) => match &infill.prefix {
            TextInput::Text(text) => json!(text),
            TextInput::Tokens(tokens) => json!(tokens),
        },
        Prompt::Chat(_) => panic!("a chat is no text"),
    };
    let suffix = request.prompts.iter().find_map(|prompt| match prompt {
        Prompt::Infill(infill) => Some(infill.suffix.clone()),
        _ => None,
    });
    object.insert("suffix".to_owned(), json!(suffix));
    let parse_special = request.prompts.iter().any(|prompt| matches!(prompt, Prompt::Markup(_)));
    object.insert("prompt".to_owned(), request.prompts.iter().map(prompt).collect());
    object.insert("parse_special".to_owned(), json!(parse_special));
    object.insert("logprobs".to_owned(), json!(request.common.params.logprobs));
    Value::Object(object)
}

pub fn embeddings(request: &ValidEmbeddingsRequest) -> Value {
    let input = |input: &TextInput| match input {
        TextInput::Text(text) => json!(text),
        TextInput::Tokens(tokens) => json!(tokens),
    };
    let is_float = request.encoding == gantry_openai::EncodingFormat::Float;
    json!({
        "model": request.model,
        "input": request.inputs.iter().map(input).collect::<Vec<_>>(),
        "encoding_format": if is_float { "float" } else { "base64" },
        "dimensions": request.dimensions,
        "priority": request.priority.as_str(),
    })
}

pub fn rerank(request: &ValidRerankRequest) -> Value {
    json!({
        "model": request.model,
        "query": request.query,
        "documents": request.documents,
        "top_n": request.top_n,
        "return_documents": request.return_documents,
        "priority": request.priority.as_str(),
    })
}

fn common(common: &Common) -> Map<String, Value> {
    let mut object = Map::new();
    sampling(&common.params, &mut object);
    constraint(&common.params, &mut object);
    let stream_options = common.streaming.enabled.then(|| json!({"include_usage": common.streaming.include_usage}));
    for (name, value) in [
        ("model", json!(common.model)),
        ("n", json!(common.choices)),
        ("priority", json!(common.params.priority.as_str())),
        ("stream", json!(common.streaming.enabled)),
        ("stream_options", json!(stream_options)),
        ("timings", json!(common.timings)),
    ] {
        object.insert(name.to_owned(), value);
    }
    object
}

fn constraint(params: &GenerationParams, object: &mut Map<String, Value>) {
    let (name, value) = match &params.constraint {
        None => return,
        Some(Constraint::JsonSchema { schema, strict }) => {
            let schema: Value = serde_json::from_str(schema).unwrap();
            let named = json!({"name": "answer", "strict": strict, "schema": schema});
            ("response_format", json!({"type": "json_schema", "json_schema": named}))
        }
        Some(Constraint::Gbnf(grammar)) => ("grammar", json!(grammar)),
        Some(Constraint::Regex(regex)) => ("guided_regex", json!(regex)),
    };
    object.insert(name.to_owned(), value);
}

fn sampling(params: &GenerationParams, object: &mut Map<String, Value>) {
    let biases = params.logit_bias.iter().map(|&(token, bias)| match bias.is_finite() {
        true => json!([token, bias]),
        false => json!([token, false]),
    });
    for (name, value) in [
        ("max_tokens", json!(params.max_tokens)),
        // Where nothing is said, texts have a bound.
        ("n_predict", if params.max_tokens.is_none() { json!(-1) } else { Value::Null }),
        ("temperature", json!(params.temperature)),
        ("top_p", json!(params.top_p)),
        ("top_k", json!(params.top_k)),
        ("min_p", json!(params.min_p)),
        ("typical_p", json!(params.typical_p)),
        ("xtc_probability", json!(params.xtc_probability)),
        ("xtc_threshold", json!(params.xtc_threshold)),
        ("repeat_penalty", json!(params.repeat_penalty)),
        ("repeat_last_n", json!(params.repeat_last_n)),
        ("frequency_penalty", json!(params.frequency_penalty)),
        ("presence_penalty", json!(params.presence_penalty)),
        ("dry_multiplier", json!(params.dry.multiplier)),
        ("dry_base", json!(params.dry.base)),
        ("dry_allowed_length", json!(params.dry.allowed_length)),
        (
            "dry_penalty_last_n",
            if params.dry.penalty_last_n == 0 { json!(-1) } else { json!(params.dry.penalty_last_n) },
        ),
        ("dry_sequence_breakers", json!(params.dry.sequence_breakers)),
        ("logit_bias", biases.collect()),
        ("seed", json!(params.seed)),
        ("stop", json!(params.stop)),
        ("ignore_eos", json!(params.ignore_eos)),
    ] {
        object.insert(name.to_owned(), value);
    }
}
