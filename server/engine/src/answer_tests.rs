#![allow(clippy::unwrap_used)]
//! Pieces of an answer add up to the whole, wherever it is cut, and it is read a bounded number of times.

use gantry_core::{AnswerOutput, GenerationEvent};
use gantry_llama::{ChatTemplate, TemplateSource};
use proptest::prelude::*;
use serde_json::json;

use super::*;

/// `Qwen`'s and Hermes' form.
const TAGS: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}{% if m.tool_calls %}{% for call in m.tool_calls %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// The same with a thought before the answer, which the prompt begins.
const THINKS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";

fn form(template: &str, with_tools: bool) -> AnswerForm {
    let template =
        ChatTemplate::parse(&TemplateSource { text: template.to_owned(), ..TemplateSource::default() }).unwrap();
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}});
    let mut chat = json!({"messages": [{"role": "user", "content": "Hi"}], "parsed": true, "parallel": true});
    if with_tools {
        chat["tools"] = json!([tool("write"), tool("look")]);
    }
    template.render(&chat.to_string()).unwrap().form.unwrap()
}

/// What pieces come to, with the ids of calls left out, and how many bytes were read for that.
fn read(form: &AnswerForm, pieces: &[&str]) -> (AnswerOutput, usize) {
    let mut reader = AnswerReader::new(form, false).unwrap();
    let mut told = Vec::new();
    for piece in pieces {
        reader.push(piece, &mut told);
    }
    reader.finish(false, &mut told);
    let mut output = AnswerOutput::default();
    for piece in told {
        output.push(match piece {
            Piece::Text(text) => GenerationEvent::Text { text, tokens: 1, logprobs: Vec::new() },
            Piece::Reasoning(text) => GenerationEvent::Reasoning { text, tokens: 1 },
            Piece::Call { index, delta } => GenerationEvent::ToolCall { index, delta, tokens: 1 },
        });
    }
    output.tool_calls.iter_mut().for_each(|call| call.id.clear());
    (output, reader.parsed_bytes)
}

fn pieces_of<'a>(text: &'a str, cuts: &[usize]) -> Vec<&'a str> {
    let mut at: Vec<usize> =
        cuts.iter().map(|cut| cut % (text.len() + 1)).filter(|&at| text.is_char_boundary(at)).collect();
    at.extend([0, text.len()]);
    at.sort_unstable();
    at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

fn call(name: &str, text: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {}}}\n</tool_call>", json!({ "text": text }))
}

/// Answers with tools, and what they come to: text, and the texts that tools are called with.
fn answers() -> Vec<(String, String, Vec<String>)> {
    let odd = "a < b, [c] {d} <b>é</b>\n```rust\nfn f() -> Vec<u8> { vec![] }\n``` <tool";
    vec![
        ("Plain words, and no more.".to_owned(), "Plain words, and no more.".to_owned(), vec![]),
        (odd.to_owned(), odd.to_owned(), vec![]),
        (call("look", "é\"\\ \n<tool_call>"), String::new(), vec!["é\"\\ \n<tool_call>".to_owned()]),
        (format!("I look.\n{}", call("look", "x")), "I look.\n".to_owned(), vec!["x".to_owned()]),
        (format!("{}\n{}", call("look", "1"), call("write", "2")), String::new(), vec!["1".to_owned(), "2".to_owned()]),
    ]
}

#[test]
fn answers_come_to_what_they_say() {
    let form = form(TAGS, true);
    for (answer, text, called) in answers() {
        let (whole, _) = read(&form, &[&answer]);
        assert_eq!(whole.text.trim_end(), text.trim_end(), "{answer}");
        let arguments: Vec<String> = whole
            .tool_calls
            .iter()
            .map(|call| {
                let arguments: serde_json::Value = serde_json::from_str(&call.arguments).unwrap();
                arguments["text"].as_str().unwrap().to_owned()
            })
            .collect();
        assert_eq!(arguments, called, "{answer}");
    }
}

#[test]
fn what_is_thought_is_told_from_what_is_said() {
    let form = form(THINKS, false);
    let (whole, _) = read(&form, &["Let me see: 2 < 3.\n</think>\n\nIt is <b>so</b>."]);
    assert_eq!((whole.reasoning.trim(), whole.text.as_str()), ("Let me see: 2 < 3.", "It is <b>so</b>."));
    let (cut, _) = read(&form, &["Let me see"]);
    assert_eq!((cut.reasoning.as_str(), cut.text.as_str()), ("Let me see", ""));
}

proptest! {
    #[test]
    fn pieces_add_up_to_the_whole_wherever_it_is_cut(
        which in 0_usize..5,
        cuts in proptest::collection::vec(any::<usize>(), 0..40),
        end in any::<usize>(),
    ) {
        let form = form(TAGS, true);
        let answer = answers().swap_remove(which).0;
        let end = (0..=end % (answer.len() + 1)).rev().find(|&at| answer.is_char_boundary(at)).unwrap();
        let cut_off = &answer[..end];
        prop_assert_eq!(read(&form, &pieces_of(cut_off, &cuts)).0, read(&form, &[cut_off]).0);
    }

    #[test]
    fn thoughts_add_up_to_the_whole_wherever_they_are_cut(cuts in proptest::collection::vec(any::<usize>(), 0..40)) {
        let form = form(THINKS, false);
        let answer = "Let me see: 2 < 3, or </thin.\n</think>\n\nIt is <b>so</b>, and\nthat is all.";
        prop_assert_eq!(read(&form, &pieces_of(answer, &cuts)).0, read(&form, &[answer]).0);
    }
}

/// However long it is, each byte of an answer is read some dozens of times, and plain words hardly ever.
#[test]
fn an_answer_is_read_a_bounded_number_of_times() {
    let form = form(TAGS, true);
    let words = "Plain words that go on and on. ".repeat(2000);
    let code = "if (a[i] < b) { x = <T>(y); }\n".repeat(2000);
    let long_call = call("write", &"some \"text\" and {more} ".repeat(2000));
    for (answer, most) in [(&words, 2), (&code, 3 * GROWTH_SHARE), (&long_call, 3 * GROWTH_SHARE)] {
        let pieces: Vec<&str> = pieces_of(answer, &(0..answer.len()).step_by(4).collect::<Vec<_>>());
        let begun = std::time::Instant::now();
        let (output, parsed_bytes) = read(&form, &pieces);
        let micros = begun.elapsed().as_micros() as f64 / pieces.len() as f64;
        println!("{} bytes in {} pieces: {micros:.1} us each, {parsed_bytes} bytes read", answer.len(), pieces.len());
        assert!(parsed_bytes <= most * answer.len(), "{parsed_bytes} of {}", answer.len());
        assert_eq!(output, read(&form, &[answer]).0);
    }
}

#[test]
fn what_is_of_no_form_is_told_as_it_stands() {
    let form = form(TAGS, true);
    for answer in
        ["<tool_call>\nnot JSON", "<tool_call>\n{\"name\": \"fly\", \"arguments\": {}}\n</tool_call>", "</tool_call>"]
    {
        let (whole, _) = read(&form, &[answer]);
        assert!(whole.tool_calls.is_empty(), "{whole:?}");
        let pieces: Vec<&str> = pieces_of(answer, &(0..answer.len()).collect::<Vec<_>>());
        assert_eq!(read(&form, &pieces).0.tool_calls, whole.tool_calls);
    }
}

#[test]
fn where_no_call_may_be_told_nothing_of_what_is_none_is_told_from_its_signs_on() {
    for answer in ["I fly.\n<tool_call>\nnot JSON</tool_call> so", "<tool_call>\n{\"name\": \"fly\""] {
        for places in [vec![], (0..answer.len()).collect::<Vec<_>>()] {
            let mut reader = AnswerReader::new(&form(TAGS, true), true).unwrap();
            let mut told = Vec::new();
            pieces_of(answer, &places).into_iter().for_each(|piece| reader.push(piece, &mut told));
            reader.finish(false, &mut told);
            let text: String = told
                .iter()
                .map(|piece| match piece {
                    Piece::Text(text) => text.as_str(),
                    other => panic!("{other:?}"),
                })
                .collect();
            assert!(!text.contains("tool_call") && !text.contains("fly\""), "{answer}: {text}");
        }
    }
}
