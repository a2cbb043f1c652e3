//! Bodies of answers: with trailers at their end, within a deadline, and with what they hold until they are taken.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use gantry_generate::grpc::CallEnd;
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use super::{late, trailers};

type Polled<E> = Poll<Option<Result<Frame<Bytes>, E>>>;

/// A body with how its call ended after it.
pub(super) struct Trailed {
    body: Body,
    /// `None` once it was told.
    end: Option<CallEnd>,
}

impl Trailed {
    pub(super) fn new(body: Body, end: CallEnd) -> Self {
        Self { body, end: Some(end) }
    }
}

impl HttpBody for Trailed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled<axum::Error> {
        if self.end.is_none() {
            return Poll::Ready(None);
        }
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(None) => {
                let end = self.end.take();
                let failure = end.as_ref().and_then(CallEnd::failure);
                Poll::Ready(Some(Ok(Frame::trailers(trailers(failure.map(|error| (error, None)))))))
            }
            other => other,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.end.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A body that is given up where it takes longer than it may.
pub(super) struct Timed {
    /// `None` once it is given up.
    body: Option<Body>,
    until: Option<Pin<Box<Sleep>>>,
}

impl Timed {
    pub(super) fn new(body: Body, until: Option<Instant>) -> Self {
        Self { body: Some(body), until: until.map(|until| Box::pin(sleep_until(until))) }
    }
}

impl HttpBody for Timed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled<axum::Error> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = Pin::new(body).poll_frame(cx);
        if frame.is_pending() && self.until.as_mut().is_some_and(|until| until.as_mut().poll(cx).is_ready()) {
            // What it computes ends with it.
            self.body = None;
            return Poll::Ready(Some(Ok(Frame::trailers(trailers(Some((&late(), None)))))));
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

/// A body, and what is held as long as it is there.
pub(super) struct Guarded<T> {
    body: Body,
    _guard: T,
}

impl<T> Guarded<T> {
    pub(super) fn new(body: Body, guard: T) -> Self {
        Self { body, _guard: guard }
    }
}

impl<T: Send + Unpin + 'static> HttpBody for Guarded<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled<axum::Error> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A body that comes to its end at the latest then, whatever else would come of it.
pub(super) struct Ending {
    body: Body,
    until: Pin<Box<Sleep>>,
    is_over: bool,
}

impl Ending {
    pub(super) fn new(body: Body, until: Instant) -> Self {
        Self { body, until: Box::pin(sleep_until(until)), is_over: false }
    }
}

impl HttpBody for Ending {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled<Infallible> {
        if self.is_over || self.until.as_mut().poll(cx).is_ready() {
            self.is_over = true;
            return Poll::Ready(None);
        }
        match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => Poll::Ready(Some(Ok(frame))),
            // A client that has gone asks no more.
            Poll::Ready(None | Some(Err(_))) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use futures::StreamExt;
    use gantry_core::{ApiError, StreamEncoder};
    use http_body_util::BodyExt;

    use super::*;

    async fn frames(body: impl HttpBody<Data = Bytes, Error = axum::Error>) -> (Vec<u8>, String) {
        let whole = body.collect().await.unwrap();
        let status = whole.trailers().unwrap()["grpc-status"].to_str().unwrap().to_owned();
        (whole.to_bytes().to_vec(), status)
    }

    #[tokio::test]
    async fn an_answer_ends_in_the_status_of_what_it_failed_with() {
        let end = CallEnd::default();
        assert_eq!(frames(Trailed::new(Body::from("x"), end.clone())).await, (b"x".to_vec(), "0".to_owned()));
        let request = [0, 0, 0, 0, 3, 0x0a, 1, b'a'];
        let (_, encoder) = gantry_generate::grpc::decode_generate(&request, true, &end).unwrap();
        let head =
            gantry_core::AnswerHead { id: String::new(), created: 0, model: String::new(), version: String::new() };
        let mut stream = gantry_core::TextEncoder::stream(encoder, head, 1).unwrap();
        let mut out = bytes::BytesMut::new();
        stream.fail(&ApiError::wrong_value("prompt", "is odd"), &mut out);
        assert_eq!(frames(Trailed::new(Body::from(out.freeze()), end)).await.1, "3");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_is_given_up_at_its_deadline_and_not_before() {
        let until = Instant::now() + Duration::from_secs(5);
        let endless = futures::stream::iter([Ok::<_, Infallible>("a")]).chain(futures::stream::pending());
        let (told, status) = frames(Timed::new(Body::from_stream(endless), Some(until))).await;
        assert_eq!((told, status), (b"a".to_vec(), "4".to_owned()));
        assert_eq!(Instant::now(), until);
    }
}
