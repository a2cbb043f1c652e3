//! What comes of a call, whole and piece by piece.

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use bytes::BytesMut;
use gantry_core::{
    Answer, AnswerHead, ApiError, EncodeError, PooledEncoder, PooledOutput, PooledSize, TextEncoder, Usage,
};
use prost::Message;

use super::{frame, proto};
use crate::answer::{Chatted, Counted, Ended, Generated, TextOf, id};
use crate::stream::{Event, TokenStream, Wire};

/// How a call ended, told by who writes its events to who writes its trailers.
#[derive(Clone, Debug, Default)]
pub struct CallEnd(Arc<OnceLock<ApiError>>);

impl CallEnd {
    /// What it failed with; `None` where it has done well so far.
    #[must_use]
    pub fn failure(&self) -> Option<&ApiError> {
        self.0.get()
    }
}

/// The message that an answer's text is part of.
pub trait MessageOf: TextOf {
    /// The frame of the whole answer.
    fn message(head: AnswerHead, texts: Vec<(String, proto::FinishReason)>, usage: proto::Usage) -> Vec<u8>;
}

impl MessageOf for Generated {
    fn message(head: AnswerHead, texts: Vec<(String, proto::FinishReason)>, usage: proto::Usage) -> Vec<u8> {
        let choice = |(index, (text, reason)): (u32, (String, proto::FinishReason))| proto::GenerateChoice {
            text,
            index,
            finish_reason: reason.into(),
        };
        framed(&proto::GenerateResponse {
            id: id(&head),
            object: Self::OBJECT.to_owned(),
            created: head.created,
            model: head.model,
            choices: (0..).zip(texts).map(choice).collect(),
            usage: Some(usage),
        })
    }
}

impl MessageOf for Chatted {
    fn message(head: AnswerHead, texts: Vec<(String, proto::FinishReason)>, usage: proto::Usage) -> Vec<u8> {
        let role = proto::chat_message::Role::Assistant;
        let choice = |(index, (content, reason)): (u32, (String, proto::FinishReason))| proto::ChatChoice {
            index,
            message: Some(proto::ChatMessage { role: role.into(), content }),
            finish_reason: reason.into(),
        };
        framed(&proto::ChatResponse {
            id: id(&head),
            object: Self::OBJECT.to_owned(),
            created: head.created,
            model: head.model,
            choices: (0..).zip(texts).map(choice).collect(),
            usage: Some(usage),
        })
    }
}

fn framed(message: &impl Message) -> Vec<u8> {
    let mut out = BytesMut::new();
    frame::put(message, &mut out);
    out.into()
}

impl From<Ended> for proto::FinishReason {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Stop => Self::Stop,
            Ended::Length => Self::Length,
            Ended::StopSequence => Self::StopSequence,
        }
    }
}

impl From<Counted> for proto::Usage {
    fn from(Counted { prompt_tokens, completion_tokens, total_tokens }: Counted) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens }
    }
}

/// Writes an answer whose text is part of this.
#[derive(Clone, Debug)]
pub struct CallEncoder<T> {
    end: CallEnd,
    text_of: PhantomData<T>,
}

impl<T> CallEncoder<T> {
    pub(super) fn new(end: &CallEnd) -> Self {
        Self { end: end.clone(), text_of: PhantomData }
    }
}

impl<T: MessageOf> TextEncoder for CallEncoder<T> {
    type Stream = TokenStream<CallEnd>;

    fn whole(self, head: AnswerHead, answers: Vec<Answer>, usage: Usage) -> Result<Vec<u8>, EncodeError> {
        let text = |answer: Answer| (answer.output.text, Ended::of(answer.reason, answer.stop.as_ref()).into());
        Ok(T::message(head, answers.into_iter().map(text).collect(), Counted::from(usage).into()))
    }

    fn stream(self, _: AnswerHead, _: usize) -> Result<Self::Stream, EncodeError> {
        Ok(TokenStream::of(self.end))
    }
}

impl Wire for CallEnd {
    // Between two frames there is nothing; that a silent stream is alive is told by HTTP/2.
    const TAKES_COMMENTS: bool = false;

    fn write(&self, event: &Event<'_>, out: &mut BytesMut) -> Result<(), EncodeError> {
        use proto::stream_event::Event as Told;
        let told = match *event {
            Event::Token { token, index, logprob } => {
                Told::Token(proto::Token { token: token.to_owned(), index, logprob })
            }
            Event::Done { finish_reason, usage } => Told::Done(proto::Done {
                finish_reason: proto::FinishReason::from(finish_reason).into(),
                usage: Some(usage.into()),
            }),
            Event::Error { message, code } => {
                Told::Error(proto::Error { message: message.to_owned(), code: code.to_owned() })
            }
        };
        frame::put(&proto::StreamEvent { event: Some(told) }, out);
        Ok(())
    }

    fn failed(&self, error: &ApiError) {
        // It fails once.
        let _ = self.0.set(error.clone());
    }
}

/// Writes the vectors of so many texts.
#[derive(Clone, Copy, Debug)]
pub struct CallEmbeddings {
    /// How many.
    pub count: usize,
}

impl PooledEncoder for CallEmbeddings {
    fn check(&self, _: u32, _: bool) -> Result<(), ApiError> {
        Ok(())
    }

    fn size(&self, width: u32) -> PooledSize {
        PooledSize::Numbers(self.count.saturating_mul(width as usize))
    }

    fn whole(self, head: AnswerHead, output: PooledOutput) -> Result<Vec<u8>, EncodeError> {
        let object = "embedding";
        let data = (0..).zip(output.vectors).map(|(index, embedding)| proto::Embedding {
            object: object.to_owned(),
            embedding,
            index,
        });
        let usage = Usage { prompt_tokens: output.prompt_tokens, ..Usage::default() };
        Ok(framed(&proto::EmbeddingsResponse {
            object: "list".to_owned(),
            data: data.collect(),
            model: head.model,
            usage: Some(Counted::from(usage).into()),
        }))
    }
}
