//! Trying a template in this process; in one of its own the server's tests do it.
#![allow(clippy::unwrap_used)]

use gantry_llama::TemplateLimit;

use super::*;

fn try_out(template: &str) -> Result<TemplateReport, ChatError> {
    let source = TemplateSource { text: template.to_owned(), ..TemplateSource::default() };
    let config = EngineConfig::new("unused.gguf");
    match Trial::begin(&config, source).unwrap().end() {
        Ok((_, report)) => Ok(report),
        Err(LoadError::Template(error)) => Err(error),
        Err(error) => panic!("{error}"),
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
fn a_template_that_takes_too_much_ends_here_as_well() {
    for (template, limit) in [
        ("{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}", TemplateLimit::Time),
        ("{% for i in range(100000000) %}x{% endfor %}", TemplateLimit::Memory),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", TemplateLimit::Memory),
    ] {
        let error = try_out(template).unwrap_err();
        assert!(matches!(error, ChatError::TemplateLimit { limit: found, at: Some(_) } if found == limit), "{error}");
    }
}
