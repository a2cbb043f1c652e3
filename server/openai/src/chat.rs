//! `/v1/chat/completions`: from a body to what is asked, and from what comes of it to an answer or its chunks.

use bytes::{BufMut, BytesMut};
use gantry_core::{
    Answer, AnswerHead, AnswerOutput, ApiError, EncodeError, GenerationEvent, Prompt, StreamEncoder, TextEncoder,
    TextRequest, TokenLogprob, ToolCall, ToolCallDelta, Usage,
};

use crate::chunk::{ChunkHead, ChunkTemplate};
use crate::error::ErrorResponse;
use crate::logprobs::ChatLogprobs;
use crate::request::ValidChatRequest;
use crate::response::{
    self, AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, Delta, StopReason, ToolCallChunk,
};
use crate::sse::{SSE_DONE, write_sse_event};
use crate::told::{Called, Told, chat_logprobs, chat_usage_of, prompt_logprobs, reason_of};

/// Reads and checks a body.
///
/// # Errors
/// As [`ValidChatRequest::parse`].
pub fn decode_chat(body: &[u8]) -> Result<(TextRequest, ChatEncoder), ApiError> {
    let ValidChatRequest { chat, common } = ValidChatRequest::parse(body)?;
    let told = Told::of(&common);
    Ok((common.into_request(vec![Prompt::chat(chat)], "messages"), ChatEncoder(told)))
}

/// Writes the answers to a chat.
#[derive(Clone, Copy, Debug)]
pub struct ChatEncoder(Told);

impl TextEncoder for ChatEncoder {
    type Stream = ChatStream;

    fn whole(self, head: AnswerHead, answers: Vec<Answer>, usage: Usage) -> Result<Vec<u8>, EncodeError> {
        let Self(told) = self;
        // All have the same prompt.
        let prompt = told.prompt_logprobs.zip(answers.first());
        let prompt_logprobs = prompt.map(|(top, answer)| prompt_logprobs(&answer.output.prompt_tokens, top));
        let choice = |(index, answer): (u32, Answer)| ChatChoice {
            index,
            logprobs: told.logprobs.map(|_| chat_logprobs(&answer.output.logprobs)),
            finish_reason: reason_of(
                answer.reason,
                Called {
                    any: !answer.output.tool_calls.is_empty(),
                    is_cut: answer.output.call_is_open && answer.stop.is_some(),
                },
            ),
            stop_reason: StopReason::of(answer.stop.as_ref()),
            timings: told.timings(&answer.timings, &answer.usage),
            message: message_of(told, answer.output),
        };
        serde_json::to_vec(&ChatCompletion {
            id: id(&head),
            object: "chat.completion".to_owned(),
            created: head.created,
            model: head.model,
            system_fingerprint: head.version,
            choices: (0..).zip(answers).map(choice).collect(),
            usage: chat_usage_of(usage),
            prompt_logprobs,
        })
    }

    fn stream(self, head: AnswerHead, answers: usize) -> Result<ChatStream, EncodeError> {
        let Self(told) = self;
        let head = AnswerHead { id: id(&head), ..head };
        let template = ChunkTemplate::chat(ChunkHead::of(&head), told.include_usage)?;
        Ok(ChatStream { told, head, template, called: vec![Called::default(); answers] })
    }
}

fn message_of(told: Told, AnswerOutput { text, reasoning, tool_calls, .. }: AnswerOutput) -> AssistantMessage {
    let call = |ToolCall { id, name, arguments }| response::ToolCall {
        id,
        kind: "function".to_owned(),
        function: response::CalledFunction { name, arguments },
    };
    AssistantMessage {
        role: "assistant".to_owned(),
        content: (!text.is_empty() || tool_calls.is_empty()).then_some(text),
        refusal: None,
        reasoning_content: (told.reasoning && !reasoning.is_empty()).then_some(reasoning),
        tool_calls: (!tool_calls.is_empty()).then(|| tool_calls.into_iter().map(call).collect()),
    }
}

fn id(head: &AnswerHead) -> String {
    format!("chatcmpl-{}", head.id)
}

/// Writes the answers to a chat in chunks.
#[derive(Debug)]
pub struct ChatStream {
    told: Told,
    head: AnswerHead,
    template: ChunkTemplate,
    /// Of each answer, whether it calls tools.
    called: Vec<Called>,
}

impl ChatStream {
    fn chunk(&self, choices: Vec<ChatChunkChoice>, usage: Option<Option<response::Usage>>) -> ChatChunk {
        ChatChunk {
            id: self.head.id.clone(),
            object: "chat.completion.chunk".to_owned(),
            created: self.head.created,
            model: self.head.model.clone(),
            system_fingerprint: self.head.version.clone(),
            choices,
            usage,
        }
    }

    fn delta(&self, index: u32, delta: Delta, out: &mut BytesMut) -> Result<(), EncodeError> {
        let choice =
            ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: None, timings: None };
        write_sse_event(out.writer(), &self.chunk(vec![choice], self.told.no_usage_yet()))
    }

    fn text(&self, index: u32, text: &str, logprobs: &[TokenLogprob], out: &mut BytesMut) -> Result<(), EncodeError> {
        match self.told.logprobs {
            None => self.template.write(out.writer(), index, text, None::<&ChatLogprobs>),
            Some(_) => self.template.write(out.writer(), index, text, Some(&chat_logprobs(logprobs))),
        }
    }
}

impl StreamEncoder for ChatStream {
    fn open(&mut self, out: &mut BytesMut) -> Result<(), EncodeError> {
        for index in (0..).take(self.called.len()) {
            let role = Some("assistant".to_owned());
            self.delta(index, Delta { role, content: Some(String::new()), ..Delta::default() }, out)?;
        }
        Ok(())
    }

    fn event(&mut self, answer: usize, event: &GenerationEvent, out: &mut BytesMut) -> Result<(), EncodeError> {
        let index = response::wire_index(answer);
        match event {
            GenerationEvent::Text { text, logprobs, .. } => self.text(index, text, logprobs, out),
            GenerationEvent::Reasoning { .. } if !self.told.reasoning => Ok(()),
            GenerationEvent::Reasoning { text, .. } => {
                self.delta(index, Delta { reasoning_content: Some(text.clone()), ..Delta::default() }, out)
            }
            GenerationEvent::ToolCall { index: call, delta, .. } => {
                if let Some(called) = self.called.get_mut(answer) {
                    // Until it has ended it would be cut by what stops the answer.
                    *called = Called { any: true, is_cut: *delta != ToolCallDelta::Ended };
                }
                let Some(call) = ToolCallChunk::of(*call, delta) else { return Ok(()) };
                self.delta(index, Delta { tool_calls: Some(vec![call]), ..Delta::default() }, out)
            }
            GenerationEvent::Finished { reason, stop, usage, timings } => {
                let called = self.called.get(answer).copied().unwrap_or_default();
                let called = Called { is_cut: called.is_cut && stop.is_some(), ..called };
                let (delta, finish_reason) = (Delta::default(), Some(reason_of(*reason, called)));
                let timings = self.told.timings(timings, usage);
                let stop_reason = StopReason::of(stop.as_ref());
                let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason, stop_reason, timings };
                write_sse_event(out.writer(), &self.chunk(vec![choice], self.told.no_usage_yet()))
            }
            _ => Ok(()),
        }
    }

    fn close(&mut self, usage: Usage, out: &mut BytesMut) -> Result<(), EncodeError> {
        if self.told.include_usage {
            write_sse_event(out.writer(), &self.chunk(Vec::new(), Some(Some(chat_usage_of(usage)))))?;
        }
        out.put_slice(SSE_DONE.as_bytes());
        Ok(())
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        // An error object of strings can always be written.
        let _ = write_sse_event(out.writer(), &ErrorResponse::from(error));
    }
}
