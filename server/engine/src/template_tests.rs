//! Trying a template in this process; in one of its own the server's tests do it.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use gantry_llama::{ModelParams, TemplateLimit};

use super::*;

fn try_out(template: &str) -> Result<TemplateReport, ChatError> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models/demo-draft.q8_0.gguf");
    let model = Model::load(&path, &ModelParams::default(), &mut |_| true).unwrap();
    let source = TemplateSource { text: template.to_owned(), ..TemplateSource::default() };
    let config = EngineConfig::new("unused.gguf");
    match Tryout::begin(&config, model, source).unwrap().end() {
        Ok((_, (report, _))) => Ok(report),
        Err(LoadError::Template(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_template_that_does_not_parse_is_told_with_its_line() {
    for (template, line) in [
        ("{% for m in messages %}\n{{ m.content }}\n{% endfo %}", "line 3, `{% endfo %}`: Unknown statement: endfo"),
        ("one\n{{ messages[0].content / }}", "line 2, `{{ messages[0].content / }}`: Unexpected token"),
        ("one\n{% for m of messages %}{% endfor %}", "line 2, `{% for m of messages %}{% endfor %}`: Expected 'in'"),
        ("one\n{{ (messages }}", "line 2, `{{ (messages }}`: parser: Parser Error: Expected"),
        ("one\n{{ 99999999999999999999 }}", "line 2, `{{ 99999999999999999999 }}`: the number is too large"),
    ] {
        let error = try_out(template).unwrap_err().to_string();
        assert!(error.contains(line), "{error}");
    }
}

#[test]
fn a_template_is_tried_with_all_it_knows() {
    let report = try_out("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").unwrap();
    assert_eq!(report.renders, ["a turn", "a system text", "three turns"]);
    let report = try_out("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}").unwrap();
    assert_eq!(report.renders, ["a turn", "a system text", "three turns", "tools"]);
    assert!(report.refuses.is_empty());
}

#[test]
fn a_turn_must_be_rendered_and_the_rest_may_be_refused_but_not_fail() {
    let turn = "{% if messages|length == 1 and messages[0].role == 'user' %}{{ messages[0].content }}{% else %}\n";
    let refused = try_out(&format!("{turn}{{{{ raise_exception('no') }}}}{{% endif %}}")).unwrap();
    // A system text that is refused is put before the first turn instead.
    assert_eq!(refused.renders, ["a turn", "a system text"]);
    assert_eq!(refused.refuses, ["three turns"]);
    let failed = try_out(&format!("{turn}{{{{ messages.nope() }}}}{{% endif %}}")).unwrap_err();
    assert!(
        matches!(&failed, ChatError::Template(text) if text.starts_with("line 2, `{{ messages.nope()")),
        "{failed}"
    );
    let none = try_out("{{ raise_exception('nobody') }}").unwrap_err();
    assert!(matches!(&none, ChatError::TemplateRefused(text) if text.ends_with("nobody")), "{none}");
}

#[test]
fn a_template_must_say_what_the_user_says() {
    let report = try_out("{% for m in messages %}{{ m.content|upper|replace('Z', ' - Z - ') }}{% endfor %}").unwrap();
    assert_eq!(report.renders, ["a turn", "a system text", "three turns"]);
    assert!(report.shortest_tokens > 4, "{}", report.shortest_tokens);
    for (template, kind) in [
        ("<|im_start|>user\nHello<|im_end|>", "a turn"),
        ("{{ messages|length }}{{ messages[0].content|length }}", "a turn"),
        ("{{ messages[0].content }}", "a system text"),
    ] {
        let error = try_out(template).unwrap_err();
        let told = format!("of {kind} it makes a prompt without what the user says last");
        assert!(matches!(&error, ChatError::Template(text) if text.contains(&told)), "{template}: {error}");
    }
}

#[test]
fn a_template_that_takes_too_much_ends_here_as_well() {
    for (template, limit) in [
        ("{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}", TemplateLimit::Time),
        ("{% for i in range(100000000) %}x{% endfor %}", TemplateLimit::Memory),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", TemplateLimit::Depth),
    ] {
        let error = try_out(template).unwrap_err();
        assert!(matches!(error, ChatError::TemplateLimit { limit: found, at: Some(_) } if found == limit), "{error}");
    }
}
