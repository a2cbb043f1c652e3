//! `/v1/completions`: from a body to what is asked, and from what comes of it to an answer or its chunks.

use bytes::{BufMut, BytesMut};
use gantry_core::{
    Answer, AnswerHead, AnswerOutput, ApiError, EncodeError, GenerationEvent, PromptToken, StreamEncoder, TextEncoder,
    TextRequest, TokenLogprob, Usage,
};

use crate::chunk::{ChunkHead, ChunkTemplate};
use crate::error::ErrorResponse;
use crate::logprobs::{TextLogprobs, TextOffset};
use crate::request::ValidCompletionRequest;
use crate::response::{self, StopReason, TextChoice, TextCompletion};
use crate::sse::{SSE_DONE, write_sse_event};
use crate::told::{Called, Told, prompt_logprobs, reason_of, text_logprobs, usage_of};

/// Reads and checks a body.
///
/// # Errors
/// As [`ValidCompletionRequest::parse`].
pub fn decode_completion(body: &[u8]) -> Result<(TextRequest, CompletionEncoder), ApiError> {
    let ValidCompletionRequest { prompts, common } = ValidCompletionRequest::parse(body)?;
    let told = Told::of(&common);
    Ok((common.into_request(prompts, "prompt"), CompletionEncoder(told)))
}

/// Writes the answers to texts.
#[derive(Clone, Copy, Debug)]
pub struct CompletionEncoder(Told);

impl TextEncoder for CompletionEncoder {
    type Stream = CompletionStream;

    fn whole(self, head: AnswerHead, answers: Vec<Answer>, usage: Usage) -> Result<Vec<u8>, EncodeError> {
        let Self(told) = self;
        let choice = |(index, answer): (u32, Answer)| TextChoice {
            index,
            logprobs: told.logprobs.map(|n| logprobs_of(told, &answer.output, n)),
            prompt_logprobs: told.prompt_logprobs.map(|n| prompt_logprobs(&answer.output.prompt_tokens, n)),
            finish_reason: Some(reason_of(answer.reason, Called::default())),
            stop_reason: StopReason::of(answer.stop.as_ref()),
            timings: told.timings(&answer.timings, &answer.usage),
            text: answer.output.prompt + &answer.output.text,
        };
        let choices = (0..).zip(answers).map(choice).collect();
        serde_json::to_vec(&completion(&with_id(head), choices, Some(Some(usage_of(usage)))))
    }

    fn stream(self, head: AnswerHead, answers: usize) -> Result<CompletionStream, EncodeError> {
        let (Self(told), head) = (self, with_id(head));
        let template = ChunkTemplate::text(ChunkHead::of(&head), told.include_usage)?;
        Ok(CompletionStream { told, head, template, offsets: vec![TextOffset::default(); answers] })
    }
}

/// What is told of a whole text; of its prompt, too, where that is a part of it.
fn logprobs_of(told: Told, output: &AnswerOutput, top: u32) -> TextLogprobs {
    let prompt = if told.echo { output.prompt_tokens.as_slice() } else { &[] };
    text_logprobs(prompt, &output.logprobs, top, &mut TextOffset::default())
}

fn with_id(head: AnswerHead) -> AnswerHead {
    AnswerHead { id: format!("cmpl-{}", head.id), ..head }
}

fn completion(head: &AnswerHead, choices: Vec<TextChoice>, usage: Option<Option<response::Usage>>) -> TextCompletion {
    TextCompletion {
        id: head.id.clone(),
        object: "text_completion".to_owned(),
        created: head.created,
        model: head.model.clone(),
        system_fingerprint: head.version.clone(),
        choices,
        usage,
    }
}

/// Writes the answers to texts in chunks.
#[derive(Debug)]
pub struct CompletionStream {
    told: Told,
    head: AnswerHead,
    template: ChunkTemplate,
    /// How far each answer has come.
    offsets: Vec<TextOffset>,
}

impl CompletionStream {
    fn text(
        &mut self,
        answer: usize,
        text: &str,
        prompt: &[PromptToken],
        logprobs: &[TokenLogprob],
        out: &mut BytesMut,
    ) -> Result<(), EncodeError> {
        let index = response::wire_index(answer);
        match (self.told.logprobs, self.offsets.get_mut(answer)) {
            (Some(n), Some(offset)) => {
                self.template.write(out.writer(), index, text, Some(&text_logprobs(prompt, logprobs, n, offset)))
            }
            _ => self.template.write(out.writer(), index, text, None::<&TextLogprobs>),
        }
    }
}

impl StreamEncoder for CompletionStream {
    fn open(&mut self, _: &mut BytesMut) -> Result<(), EncodeError> {
        Ok(())
    }

    fn event(&mut self, answer: usize, event: &GenerationEvent, out: &mut BytesMut) -> Result<(), EncodeError> {
        match event {
            GenerationEvent::Echo { text, tokens } => self.text(answer, text, tokens, &[], out),
            GenerationEvent::Text { text, logprobs, .. } => self.text(answer, text, &[], logprobs, out),
            GenerationEvent::Finished { reason, stop, usage, timings } => {
                let (index, finish_reason) =
                    (response::wire_index(answer), Some(reason_of(*reason, Called::default())));
                let timings = self.told.timings(timings, usage);
                let choice = TextChoice {
                    index,
                    text: String::new(),
                    logprobs: None,
                    prompt_logprobs: None,
                    finish_reason,
                    stop_reason: StopReason::of(stop.as_ref()),
                    timings,
                };
                write_sse_event(out.writer(), &completion(&self.head, vec![choice], self.told.no_usage_yet()))
            }
            _ => Ok(()),
        }
    }

    fn close(&mut self, usage: Usage, out: &mut BytesMut) -> Result<(), EncodeError> {
        if self.told.include_usage {
            write_sse_event(out.writer(), &completion(&self.head, Vec::new(), Some(Some(usage_of(usage)))))?;
        }
        out.put_slice(SSE_DONE.as_bytes());
        Ok(())
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        // An error object of strings can always be written.
        let _ = write_sse_event(out.writer(), &ErrorResponse::from(error));
    }
}
