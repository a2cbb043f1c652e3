//! What tells one conversation from others: by it a canary chooses who is answered by the candidate, so that a conversation is
//! answered by one version from its first turn on, in whichever pod.
//!
//! The header `x-gantry-session`, else what the protocol's body calls a conversation or its user, else how it began: a chat by its
//! messages up to and including the first one of the user's, which each of its requests repeats, and any other prompt as a whole.
//! Nothing of it is kept but a digest, and that only for as long as its request waits to be taken.

use std::sync::OnceLock;

use axum::http::HeaderMap;
use gantry_core::{Infill, Part, Prompt, Role, TextInput};
use gantry_rollout::Conversation;

/// The header that names a conversation, or whoever is to be answered by the same version all along.
const SESSION_HEADER: &str = "x-gantry-session";

/// The conversation that the headers of a request name.
pub(super) fn session(headers: &HeaderMap) -> Option<Conversation> {
    let name = headers.get(SESSION_HEADER).map(|name| name.as_bytes().trim_ascii())?;
    (!name.is_empty()).then(|| named(b"session", name))
}

/// The conversation of a request for text, worked out when it is asked for.
pub(super) struct Talk {
    /// What the body calls it.
    name: Option<String>,
    known: OnceLock<Conversation>,
}

impl Talk {
    pub(super) fn new(session: Option<Conversation>, name: Option<String>) -> Self {
        Self { name, known: session.map(OnceLock::from).unwrap_or_default() }
    }

    /// `prompt`: the first one that it asks of.
    pub(super) fn conversation(&self, prompt: Option<&Prompt>) -> &Conversation {
        self.known.get_or_init(|| match (&self.name, prompt) {
            (Some(name), _) => named(b"name", name.as_bytes()),
            (None, Some(prompt)) => begun(prompt),
            (None, None) => Conversation::of([]),
        })
    }
}

fn named(kind: &'static [u8], name: &[u8]) -> Conversation {
    Conversation::of([kind, name])
}

/// The conversation that begins so.
fn begun(prompt: &Prompt) -> Conversation {
    match prompt {
        Prompt::Chat(chat) => {
            let first = chat.messages.iter().position(|message| message.role == Role::User);
            let opening = &chat.messages[..first.map_or(chat.messages.len(), |first| first + 1)];
            let said = opening.iter().flat_map(|message| {
                let parts = message.content.iter().map(|(Part::Text(text) | Part::Refusal(text))| text.as_bytes());
                std::iter::once(message.role.as_str().as_bytes()).chain(parts)
            });
            Conversation::of(std::iter::once(&b"chat"[..]).chain(said))
        }
        Prompt::Text(text) | Prompt::Markup(text) => named(b"text", text.as_bytes()),
        Prompt::Tokens(tokens) => named(b"tokens", &bytes_of(tokens)),
        Prompt::Infill(infill) => {
            let Infill { prefix, begun, suffix, .. } = &**infill;
            let prefix = match prefix {
                TextInput::Text(text) => text.clone().into_bytes(),
                TextInput::Tokens(tokens) => bytes_of(tokens),
            };
            Conversation::of([b"infill", &prefix[..], begun.as_bytes(), suffix.as_bytes()])
        }
    }
}

fn bytes_of(tokens: &[i32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::http::HeaderValue;
    use gantry_core::Message;

    use super::*;

    fn chat(messages: &[(Role, &str)]) -> Prompt {
        Prompt::chat(messages.iter().map(|(role, text)| Message::text(*role, *text)).collect::<Vec<_>>())
    }

    fn of(name: Option<&str>, prompt: &Prompt) -> Conversation {
        *Talk::new(None, name.map(str::to_owned)).conversation(Some(prompt))
    }

    #[test]
    fn a_chat_is_known_by_how_it_began_for_as_long_as_it_goes_on() {
        use Role::{Assistant, System, User};
        let first = of(None, &chat(&[(System, "Be brief."), (User, "Hello")]));
        let later = chat(&[(System, "Be brief."), (User, "Hello"), (Assistant, "Hi."), (User, "Why?")]);
        assert_eq!(of(None, &later), first);
        for other in [
            chat(&[(System, "Be brief."), (User, "Hello!")]),
            chat(&[(System, "Be long."), (User, "Hello")]),
            chat(&[(User, "Hello")]),
            chat(&[(User, "Be brief."), (User, "Hello")]),
            Prompt::Text("Hello".to_owned()),
        ] {
            assert_ne!(of(None, &other), first, "{other:?}");
        }
        // One in which no user has spoken yet is known by all of it.
        assert_ne!(of(None, &chat(&[(System, "a")])), of(None, &chat(&[(System, "b")])));
    }

    #[test]
    fn a_name_goes_before_that_and_the_header_before_the_name() {
        use Role::User;
        let (one, other) = (chat(&[(User, "one")]), chat(&[(User, "other")]));
        assert_eq!(of(Some("u-7"), &one), of(Some("u-7"), &other));
        assert_ne!(of(Some("u-7"), &one), of(Some("u-8"), &one));
        let headers = |value: &'static [u8]| {
            HeaderMap::from_iter([("x-gantry-session".parse().unwrap(), HeaderValue::from_bytes(value).unwrap())])
        };
        let session = session(&headers(b"s-1")).unwrap();
        assert_eq!(*Talk::new(Some(session), Some("u-7".to_owned())).conversation(Some(&one)), session);
        assert_eq!(super::session(&headers(b" s-1 ")), Some(session), "spaces at its ends are no part of it");
        assert_eq!((super::session(&headers(b"  ")), super::session(&HeaderMap::new())), (None, None));
        assert!(super::session(&headers(b"\xff\xfe")).is_some(), "it need not be text");
        assert_ne!(named(b"session", b"x"), named(b"name", b"x"));
    }
}
