//! What is asked: made from a seed, so that both servers get the same words and no two runs do.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::client::Ask;

/// The name of the model in every request.
pub const MODEL_NAME: &str = "bench";
/// Largest file of words, phrases or questions.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Words for models that come without a list of their own.
const PLAIN_WORDS: &str = "the of and to in is that it was for on are with as be at one have this from or had by hot \
    word but what some we can out other were all there when up use your how said an each she which do their time if \
    will way about many then them write would like so these her long make thing see him two has look more day could \
    go come did number sound no most people my over know water than call first who may down side been now find";

/// A kind of prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Prompts {
    /// Random words, of which the first `shared` are the same in every request of a run.
    Words {
        /// Words that all requests begin with.
        shared: usize,
        /// Words of each request's own.
        own: usize,
    },
    /// One of `count` texts of `words` words, and `own` words after it.
    Prefixes {
        /// How many texts there are.
        count: usize,
        /// Words of each.
        words: usize,
        /// Words of each request's own.
        own: usize,
    },
    /// A phrase that the model goes on repeating, `times` times.
    Phrase {
        /// How often.
        times: usize,
    },
    /// A question of the demo models, as a chat.
    Chat,
    /// The same in one of the forms that protocols have for it, whose answer ends where the model ends it.
    Form(Form),
}

/// A form of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// `/v1/chat/completions`.
    Chat,
    /// The same with four tools, of which the question needs one.
    Tools,
    /// The same, and the answer must be an object of a schema.
    Schema,
    /// `/v1/completions`.
    Completion,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
}

/// The words and questions there are.
#[derive(Debug, Clone)]
pub struct Material {
    words: Vec<String>,
    phrases: Vec<String>,
    chats: Vec<Value>,
    /// Questions with tools, each a request's own fields.
    tools: Vec<Value>,
}

impl Material {
    /// For the model in `model`: the lists beside it, as far as there are any, and the demo models' questions.
    ///
    /// # Errors
    /// When a file is there and cannot be read.
    pub fn read(model: &Path, questions: &Path) -> Result<Self> {
        let beside = |extension: &str| {
            let path = model.with_extension(extension);
            let text = if path.exists() { read_bounded(&path)? } else { String::new() };
            anyhow::Ok(text.lines().map(str::to_owned).collect::<Vec<_>>())
        };
        let mut words = beside("words")?;
        if words.is_empty() {
            words = PLAIN_WORDS.split_whitespace().map(str::to_owned).collect();
        }
        let chats = read_bounded(questions)?
            .lines()
            .map(|line| {
                let question: Value = serde_json::from_str(line)?;
                question.get("messages").cloned().context("a question has no messages")
            })
            .collect::<Result<Vec<_>>>()
            .with_context(|| questions.display().to_string())?;
        let with_tools = questions.with_file_name("eval-tools.jsonl");
        let tools = if with_tools.exists() { read_bounded(&with_tools)? } else { String::new() };
        let tools = tools.lines().map(serde_json::from_str).collect::<Result<_, _>>();
        let tools = tools.with_context(|| with_tools.display().to_string())?;
        Ok(Self { words, phrases: beside("phrases")?, chats, tools })
    }

    /// Request number `number` of the run `seed`.
    ///
    /// # Errors
    /// When the model has no material of this kind.
    pub fn ask(&self, prompts: Prompts, seed: u64, number: u64, max_tokens: u32) -> Result<Ask> {
        let own = Random::new(seed, number.wrapping_add(1));
        let prompt = match prompts {
            Prompts::Words { shared, own: count } => {
                self.words(Random::new(seed, u64::MAX), shared) + &self.words(own, count)
            }
            Prompts::Prefixes { count, words, own: own_words } => {
                let (prefix, mut own) = own.below(count);
                own = own.next();
                self.words(Random::new(seed, u64::MAX - prefix), words) + &self.words(own, own_words)
            }
            Prompts::Phrase { times } => {
                let phrase = pick(&self.phrases, number).context("this model has no phrases that it repeats")?;
                vec![phrase.as_str(); times].join(" ")
            }
            Prompts::Form(form) => return self.form(form, number, max_tokens),
            Prompts::Chat => {
                let messages = pick(&self.chats, number).context("there are no questions")?;
                return Ok(Ask { path: "/v1/chat/completions", body: body("messages", messages.clone(), max_tokens) });
            }
        };
        let prompt = Value::String(prompt.trim_start().to_owned());
        Ok(Ask { path: "/v1/completions", body: body("prompt", prompt, max_tokens) })
    }

    /// Question number `number` in a form.
    fn form(&self, form: Form, number: u64, max_tokens: u32) -> Result<Ask> {
        let messages = pick(&self.chats, number).context("there are no questions")?;
        let (path, fields) = match form {
            Form::Chat => ("/v1/chat/completions", json!({"messages": messages})),
            Form::Tools => {
                let question = pick(&self.tools, number).context("there are no questions with tools")?;
                let fields = json!({"messages": question["messages"], "tools": question["tools"]});
                ("/v1/chat/completions", fields)
            }
            Form::Schema => {
                let answer = json!({"type": "string", "maxLength": 80});
                let schema = json!({"type": "object", "properties": {"answer": answer}, "required": ["answer"]});
                let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
                ("/v1/chat/completions", json!({"messages": messages, "response_format": format}))
            }
            Form::Completion => {
                let last = messages.as_array().and_then(|messages| messages.last());
                let text = last.map(|message| message["content"].clone()).context("a question has no messages")?;
                ("/v1/completions", json!({"prompt": text}))
            }
            Form::Responses => ("/v1/responses", json!({"input": messages})),
            Form::Messages => {
                let is_system = |message: &&Value| message["role"] == "system";
                let all = messages.as_array().context("a question has no messages")?;
                let system = all.iter().find(is_system).map_or(Value::Null, |system| system["content"].clone());
                let rest: Vec<&Value> = all.iter().filter(|message| !is_system(message)).collect();
                ("/v1/messages", json!({"system": system, "messages": rest}))
            }
        };
        let common = json!({"model": MODEL_NAME, "stream": true, "temperature": 0});
        let limit = match form {
            Form::Responses => json!({"max_output_tokens": max_tokens}),
            Form::Messages => json!({"max_tokens": max_tokens}),
            _ => json!({"max_tokens": max_tokens, "stream_options": {"include_usage": true}}),
        };
        let all = [common, limit, fields].into_iter().filter_map(|fields| fields.as_object().cloned()).flatten();
        Ok(Ask { path, body: all.filter(|(_, value)| !value.is_null()).collect() })
    }

    /// `count` random words, with a space before each.
    fn words(&self, mut random: Random, count: usize) -> String {
        let mut text = String::new();
        for _ in 0..count {
            let (index, next) = random.below(self.words.len());
            random = next;
            text.push(' ');
            text.push_str(self.words.get(usize::try_from(index).unwrap_or(0)).map_or("", String::as_str));
        }
        text
    }
}

fn pick<T>(items: &[T], number: u64) -> Option<&T> {
    items.get(usize::try_from(number).ok()?.checked_rem(items.len())?)
}

fn body(key: &str, value: Value, max_tokens: u32) -> Map<String, Value> {
    let fields = json!({
        "model": MODEL_NAME, "stream": true, "stream_options": {"include_usage": true},
        "temperature": 0, "max_tokens": max_tokens, "ignore_eos": true,
    });
    let Value::Object(mut fields) = fields else { return Map::new() };
    fields.insert(key.to_owned(), value);
    fields
}

/// A file's text, unless it is larger than such files are.
pub(crate) fn read_bounded(path: &Path) -> Result<String> {
    let bytes = fs::metadata(path).with_context(|| path.display().to_string())?.len();
    ensure!(bytes <= MAX_FILE_BYTES, "{} has {bytes} bytes, more than {MAX_FILE_BYTES}", path.display());
    fs::read_to_string(path).with_context(|| path.display().to_string())
}

/// SplitMix64: small, and the same everywhere.
#[derive(Debug, Clone, Copy)]
struct Random(u64);

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream.wrapping_mul(0xd134_2543_de82_ef95)).next()
    }

    fn next(self) -> Self {
        Self(self.0.wrapping_add(0x9e37_79b9_7f4a_7c15))
    }

    /// A number below `bound`, and what comes after it.
    fn below(self, bound: usize) -> (u64, Self) {
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % (bound.max(1) as u64), self.next())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn material() -> Material {
        Material {
            words: PLAIN_WORDS.split_whitespace().map(str::to_owned).collect(),
            phrases: vec!["a b".to_owned()],
            chats: vec![json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}])],
            tools: vec![json!({"messages": [{"role": "user", "content": "Look!"}], "tools": [{"type": "function"}]})],
        }
    }

    fn prompt(prompts: Prompts, seed: u64, number: u64) -> String {
        let ask = material().ask(prompts, seed, number, 8).unwrap();
        ask.body["prompt"].as_str().unwrap().to_owned()
    }

    #[test]
    fn shared_words_come_first_and_own_words_differ() {
        let prompts = Prompts::Words { shared: 20, own: 10 };
        let (a, b) = (prompt(prompts, 1, 0), prompt(prompts, 1, 1));
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!((words(&a).len(), &words(&a)[..20]), (30, &words(&b)[..20]));
        assert_ne!(words(&a)[20..], words(&b)[20..]);
        assert_eq!(a, prompt(prompts, 1, 0), "the same seed gives the same words");
        assert_ne!(a, prompt(prompts, 2, 0), "another seed gives others");
    }

    #[test]
    fn prefixes_are_as_many_as_asked_for() {
        let prompts = Prompts::Prefixes { count: 4, words: 12, own: 3 };
        let prefixes: std::collections::BTreeSet<String> = (0..200)
            .map(|number| prompt(prompts, 5, number).split(' ').take(12).collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(prefixes.len(), 4);
    }

    #[test]
    fn chats_and_phrases_are_what_the_model_has() {
        assert_eq!(prompt(Prompts::Phrase { times: 3 }, 0, 9), "a b a b a b");
        let chat = material().ask(Prompts::Chat, 0, 3, 8).unwrap();
        assert_eq!((chat.path, &chat.body["messages"][1]["content"]), ("/v1/chat/completions", &json!("Hello!")));
        let none = Material { phrases: Vec::new(), ..material() };
        assert!(none.ask(Prompts::Phrase { times: 1 }, 0, 0, 8).is_err());
    }

    #[test]
    fn a_question_is_the_same_in_each_form() {
        let ask = |form| material().ask(Prompts::Form(form), 0, 5, 8).unwrap();
        assert_eq!(ask(Form::Completion).body["prompt"], "Hello!");
        assert_eq!(ask(Form::Responses).body["input"][1]["content"], "Hello!");
        assert_eq!(ask(Form::Responses).body["max_output_tokens"], 8);
        let messages = ask(Form::Messages);
        assert_eq!((messages.path, &messages.body["system"]), ("/v1/messages", &json!("Be brief.")));
        assert_eq!(messages.body["messages"], json!([{"role": "user", "content": "Hello!"}]));
        assert!(ask(Form::Tools).body["tools"].is_array() && ask(Form::Schema).body["response_format"].is_object());
        let none = Material { tools: Vec::new(), ..material() };
        assert!(none.ask(Prompts::Form(Form::Tools), 0, 0, 8).is_err());
    }
}
