//! A chat template that is given in the place of the one in the model's file. Absent: what it does, which it is tried for when
//! the model is loaded.

use std::path::Path;

use gantry_engine::MAX_TEMPLATE_BYTES;

use super::check::Check;

/// The template of either flag; an empty text asks for the file's own.
pub(super) fn chat_template(check: &mut Check, text: Option<&str>, file: Option<&Path>) -> Option<String> {
    let text = text.filter(|text| !text.is_empty());
    let (flag, text) = match (text, file) {
        (Some(_), Some(_)) => {
            check.problem("--chat-template must be left out where --chat-template-file names one".to_owned());
            return None;
        }
        (Some(text), None) => ("chat-template", text.to_owned()),
        (None, Some(file)) => {
            ("chat-template-file", check.text_file("chat-template-file", file, MAX_TEMPLATE_BYTES, "a template")?)
        }
        (None, None) => return None,
    };
    if text.len() > MAX_TEMPLATE_BYTES {
        let bytes = text.len();
        check.problem(format!("--{flag} must be a template of at most {MAX_TEMPLATE_BYTES} bytes, and has {bytes}"));
    } else if !text.contains('{') {
        let names = "no template is known by a name";
        check.problem(format!("--{flag} must be the text of a Jinja template, and has no {{ in it; {names}"));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn given(text: Option<&str>, file: Option<&Path>) -> Result<Option<String>, String> {
        let mut check = Check::default();
        let template = chat_template(&mut check, text, file);
        check.finish(template).map_err(|problems| problems.to_string())
    }

    #[test]
    fn a_template_is_a_text_or_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let written = |name: &str, bytes: &[u8]| {
            let file = folder.path().join(name);
            std::fs::write(&file, bytes).unwrap();
            file
        };
        let text = "{{ messages[0].content }}\n";
        let file = written("good", text.as_bytes());
        assert_eq!(given(None, None), Ok(None));
        assert_eq!(given(Some(""), None), Ok(None), "as llama-server has it");
        assert_eq!(given(Some(text), None).as_ref().unwrap().as_deref(), Some(text));
        assert_eq!(given(None, Some(&file)).unwrap().as_deref(), Some(text), "to the last line's end");
        assert_eq!(given(Some(""), Some(&file)).unwrap().as_deref(), Some(text));

        let long = vec![b'{'; MAX_TEMPLATE_BYTES + 1];
        for (text, file, told) in [
            (Some("chatml"), None, "--chat-template must be the text of a Jinja template"),
            (Some(text), Some(file), "--chat-template must be left out"),
            (Some(std::str::from_utf8(&long).unwrap()), None, "at most 1048576 bytes, and has 1048577"),
            (None, Some(written("long", &long)), "at most 1048576 bytes"),
            (None, Some(written("binary", b"GGUF\xff{{")), "a readable file of text"),
            (None, Some(written("empty", b"")), "--chat-template-file must be the text of a Jinja template"),
            (None, Some(folder.path().to_owned()), "is a directory"),
            (None, Some(folder.path().join("missing")), "is not there"),
        ] {
            let problems = given(text, file.as_deref()).unwrap_err();
            assert!(problems.contains(told) && problems.lines().count() == 2, "{told}: {problems}");
        }
    }
}
