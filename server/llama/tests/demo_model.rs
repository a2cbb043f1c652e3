//! The safe API on a real model: what must come out, and that nothing reachable from here ends the process.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use gantry_llama::{
    Batch, BatchError, ChatError, ChatTemplate, Context, ContextError, ContextParams, DecodeError, Model, ModelError,
    ModelParams, Token, TokenizeError,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models/demo-draft.q8_0.gguf")
}

fn load(path: &Path) -> Result<Arc<Model>, ModelError> {
    Model::load(path, &ModelParams::default(), &mut |_| true)
}

fn model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| load(&path()).unwrap())
}

fn template() -> &'static ChatTemplate {
    static TEMPLATE: OnceLock<ChatTemplate> = OnceLock::new();
    TEMPLATE.get_or_init(|| ChatTemplate::new(model()).unwrap().unwrap())
}

fn params() -> ContextParams {
    ContextParams { n_ctx: 1024, n_batch: 64, sequences: 4, ..ContextParams::default() }
}

fn context(params: &ContextParams) -> Context {
    Context::new(model(), params).unwrap()
}

/// Appends tokens to a sequence and gives the logits after the last of them.
fn run(context: &mut Context, sequence: u32, tokens: &[Token]) -> Vec<f32> {
    let mut batch = Batch::new();
    let from = context.sequence_len(sequence);
    for (position, (i, &token)) in (from..).zip(tokens.iter().enumerate()) {
        batch.add(token, position, sequence, i + 1 == tokens.len());
    }
    context.decode(&mut batch).unwrap();
    context.logits(tokens.len() - 1).unwrap().to_vec()
}

#[test]
fn a_loaded_model_does_not_need_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    std::fs::copy(path(), &file).unwrap();
    let loaded = load(&file).unwrap();
    // Who reads a page of a mapped file behind its end is killed.
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(0).unwrap();
    let mut context = Context::new(&loaded, &params()).unwrap();
    let tokens: Vec<Token> = (1..20).collect();
    assert_eq!(run(&mut context, 0, &tokens), run(&mut self::context(&params()), 0, &tokens));
}

#[test]
fn the_model_says_what_it_is() {
    let model = model();
    assert_eq!((model.vocab_size(), model.n_ctx_train(), model.parameters()), (2048, 2048, 557_696));
    assert!(!model.has_experts());
    assert!(model.description().contains("llama"), "{}", model.description());
    assert!(model.size_bytes() > 500_000 && model.has_chat_template());
    assert_eq!(model.bos(), Some(0));
    let ends: Vec<Token> = (0..2048).filter(|&t| model.is_eog(t)).collect();
    assert!(ends.contains(&2), "{ends:?}");
    assert!(!model.is_eog(-1) && !model.is_eog(2048) && !model.is_eog(i32::MIN));
}

#[test]
fn special_tokens_are_parsed_only_when_asked() {
    let model = model();
    let parsed = model.tokenize("<|im_end|>", true, true).unwrap();
    assert_eq!(parsed, [2]);
    assert!(model.tokenize("<|im_end|>", true, false).unwrap().len() > 1);
    assert!(model.tokenize("", true, true).unwrap().is_empty());
    let mut piece = Vec::new();
    model.token_to_piece(2, false, &mut piece).unwrap();
    assert!(piece.is_empty());
    model.token_to_piece(2, true, &mut piece).unwrap();
    assert_eq!(piece, b"<|im_end|>");
    for bad in [-1, 2048, i32::MAX, i32::MIN] {
        assert_eq!(model.token_to_piece(bad, true, &mut piece), Err(TokenizeError::NoSuchToken(bad)));
    }
    assert_eq!(piece, b"<|im_end|>");
}

#[test]
fn a_context_out_of_range_is_refused() {
    let refused = |params: ContextParams| Context::new(model(), &params).map(|_| ()).unwrap_err();
    for bad in [
        ContextParams { sequences: 0, ..params() },
        ContextParams { sequences: 257, n_batch: 512, ..params() },
        ContextParams { sequences: 65, ..params() },
        ContextParams { n_ctx: 0, ..params() },
        ContextParams { n_ctx: u32::MAX, ..params() },
        ContextParams { threads: 0, ..params() },
    ] {
        assert!(matches!(refused(bad.clone()), ContextError::Params(_)), "{bad:?}");
    }
    let most = context(&ContextParams { sequences: 256, n_batch: 256, n_ctx: 256 * 256, ..params() });
    assert_eq!((most.sequences(), most.n_ctx_per_sequence()), (256, 256));
}

#[test]
fn a_refused_batch_leaves_the_context_as_it_was() {
    let mut context = context(&params());
    run(&mut context, 1, &[5, 6, 7]);
    let refused = |context: &mut Context, entries: &[(Token, u32, u32)]| {
        let mut batch = Batch::new();
        entries.iter().for_each(|&(token, position, sequence)| batch.add(token, position, sequence, false));
        match context.decode(&mut batch).unwrap_err() {
            DecodeError::Batch(error) => error,
            error => panic!("{error}"),
        }
    };
    assert_eq!(refused(&mut context, &[]), BatchError::Empty);
    assert!(matches!(refused(&mut context, &[(1, 0, 4)]), BatchError::Sequence { .. }));
    assert!(matches!(refused(&mut context, &[(2048, 3, 1)]), BatchError::Token { .. }));
    assert!(matches!(refused(&mut context, &[(1, 2, 1)]), BatchError::Position { expected: 3, .. }));
    assert!(matches!(refused(&mut context, &[(1, 4, 1)]), BatchError::Position { expected: 3, .. }));
    let long: Vec<_> = (0..65).map(|i| (1, i, 0)).collect();
    assert!(matches!(refused(&mut context, &long), BatchError::TooManyTokens { .. }));
    assert_eq!((context.sequence_len(0), context.sequence_len(1), context.sequence_len(9)), (0, 3, 0));
}

#[test]
fn a_sequence_holds_its_share_and_no_more() {
    let mut context = context(&params());
    assert_eq!(context.n_ctx_per_sequence(), 256);
    for _ in 0..4 {
        run(&mut context, 2, &[9; 64]);
    }
    let mut batch = Batch::new();
    batch.add(9, 256, 2, true);
    let refused = context.decode(&mut batch).unwrap_err();
    assert!(matches!(refused, DecodeError::Batch(BatchError::PastContext { limit: 256, .. })), "{refused}");
    assert_eq!(context.remove(2, 0), Ok(true));
    assert_eq!(context.sequence_len(2), 0);
    run(&mut context, 2, &[9]);
}

#[test]
fn logits_are_there_only_where_asked() {
    let mut context = context(&params());
    assert!(context.logits(0).is_none());
    run(&mut context, 0, &[5, 6, 7]);
    assert!(context.logits(0).is_none() && context.logits(1).is_none() && context.logits(3).is_none());
    assert_eq!(context.logits(2).unwrap().len(), 2048);
    // A batch that failed has none.
    assert!(context.decode(&mut Batch::new()).is_err());
    context.clear();
    assert_eq!(context.sequence_len(0), 0);
}

#[test]
fn copies_and_cuts_give_the_same_logits() {
    let tokens: Vec<Token> = (10..40).collect();
    for kv_unified in [false, true] {
        let mut context = context(&ContextParams { kv_unified, ..params() });
        let want = run(&mut context, 0, &tokens);
        run(&mut context, 1, &tokens[..29]);
        assert_eq!(run(&mut context, 1, &tokens[29..]), {
            context.remove(0, 29).unwrap();
            run(&mut context, 0, &tokens[29..])
        });
        context.remove(0, 29).unwrap();
        assert_eq!(context.sequence_len(0), 29);
        context.copy(0, 2, None).unwrap();
        assert_eq!(run(&mut context, 2, &tokens[29..]), run(&mut context, 0, &tokens[29..]));
        context.copy(0, 3, Some(10)).unwrap();
        assert_eq!(context.sequence_len(3), 10);
        let again = run(&mut context, 3, &tokens[10..]);
        assert!(want.iter().zip(&again).all(|(a, b)| (a - b).abs() < 0.1));
        for (from, to) in [(0, 0), (0, 4), (4, 0), (u32::MAX, 0)] {
            assert!(context.copy(from, to, None).is_err(), "{from} to {to}");
        }
        assert!(context.copy(0, 1, Some(1000)).is_err());
        assert!(context.remove(4, 0).is_err());
    }
}

#[test]
fn contexts_on_one_model_run_in_parallel() {
    let tokens: Vec<Token> = (100..150).collect();
    let want = run(&mut context(&params()), 0, &tokens);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..3 {
                    assert_eq!(run(&mut context(&params()), 0, &tokens), want);
                }
            });
        }
    });
}

#[test]
fn a_chat_is_rendered_by_the_models_own_template() {
    let chat = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße \u{0} <|im_end|>"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]);
    let rendered = template().render(&chat.to_string()).unwrap();
    assert!(rendered.prompt.starts_with("<|im_start|>system\nBe brief.<|im_end|>\n"), "{}", rendered.prompt);
    assert!(rendered.prompt.contains("Grüße \u{0} <|im_end|>"), "{}", rendered.prompt);
    assert!(rendered.prompt.contains("<tool_response>\n2\n</tool_response>"), "{}", rendered.prompt);
    assert!(rendered.prompt.ends_with("<|im_start|>assistant\n"), "{}", rendered.prompt);
}

/// Writes the model with `from` replaced by `to`, of the same length.
fn patched(from: &[u8], to: &[u8]) -> tempfile::NamedTempFile {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(path()).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    file
}

#[test]
fn a_template_that_cannot_be_parsed_says_why() {
    let file = patched(b"{%- for message in messages -%}", b"{%- for message of messages -%}");
    let broken = ChatTemplate::new(&load(file.path()).unwrap()).unwrap_err();
    assert!(matches!(&broken, ChatError::Template(reason) if reason.contains("Expected 'in'")), "{broken}");
}

#[test]
fn a_template_that_raises_is_an_error_of_the_request() {
    let file = patched(b"{{- '<|im_start|>user\\n' + message.content", b"{{- raise_exception('no users, please!!!')");
    let refusing = ChatTemplate::new(&load(file.path()).unwrap()).unwrap().unwrap();
    let refused = refusing.render(r#"[{"role":"user","content":"hi"}]"#).unwrap_err();
    assert!(matches!(&refused, ChatError::TemplateRefused(reason) if reason.contains("no users, please")), "{refused}");
}

#[test]
fn files_that_are_no_models_are_refused_with_a_reason() {
    let refused = |bytes: &[u8]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        match load(file.path()).unwrap_err() {
            ModelError::Refused(reason) => reason,
            error => panic!("{error}"),
        }
    };
    let whole = std::fs::read(path()).unwrap();
    for (bytes, word) in [(&b""[..], "magic"), (b"GGML and more", "magic"), (&whole[..whole.len() / 2], "bounds")] {
        let reason = refused(bytes);
        assert!(reason.contains(word), "{reason}");
    }
    assert!(matches!(load(Path::new("a\0b")), Err(ModelError::Path(_))));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        prop_oneof!["user", "assistant", "system", "tool", "function", "text", "media_marker"].prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let key = prop_oneof![
            "role|content|tool_calls|type|text|function|name|arguments|id|tool_call_id|reasoning_content",
            "[a-z]{1,3}"
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..5).prop_map(|pairs| pairs.into_iter().collect()),
        ]
    })
}

/// Mostly well formed, so that the deeper checks are reached.
fn any_message() -> impl Strategy<Value = Value> {
    let text = || prop_oneof![3 => ".{0,20}".prop_map(Value::from), 1 => any_json()];
    let part = prop_oneof![text().prop_map(|t| json!({"type": "text", "text": t})), any_json()];
    let content = prop_oneof![2 => text(), 1 => prop::collection::vec(part, 0..3).prop_map(Value::from)];
    let call = (text(), text()).prop_map(
        |(name, arguments)| json!({"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}),
    );
    let calls = prop::collection::vec(prop_oneof![call, any_json()], 0..3);
    (
        prop_oneof!["user", "assistant", "system", "tool", "[a-z]{0,9}"],
        content,
        prop::option::weighted(0.3, calls),
        any_json(),
    )
        .prop_map(|(role, content, calls, extra)| {
            let mut message = json!({"role": role, "content": content, "name": extra});
            if let Some(calls) = calls {
                message["tool_calls"] = Value::from(calls);
            }
            message
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// llama.cpp's JSON asserts where it could throw; an assertion would end this process.
    #[test]
    fn no_messages_end_the_process(messages in prop::collection::vec(prop_oneof![5 => any_message(), 1 => any_json()], 0..4)) {
        let _ = template().render(&Value::from(messages).to_string());
    }

    #[test]
    fn text_survives_its_tokens(text in "\\PC{0,80}") {
        let tokens = model().tokenize(&text, true, false).unwrap();
        let mut bytes = Vec::new();
        for token in tokens {
            model().token_to_piece(token, false, &mut bytes).unwrap();
        }
        prop_assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }

    #[test]
    fn any_text_is_tokenised(text in any::<String>()) {
        let tokens = model().tokenize(&text, true, true).unwrap();
        prop_assert!(tokens.iter().all(|&token| model().contains(token)));
    }
}
