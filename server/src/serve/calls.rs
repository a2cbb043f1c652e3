//! One connection of gRPC: HTTP/2 on a socket, with many calls, and what it is doing at each moment.
//!
//! It is one connection among the others ([`super::connection`]), with the same limits: one that has asked for nothing, or takes
//! nothing, makes room, a silent one ends, and one on which all has been answered ends with the server. Since hyper sees no more of a
//! client than that there is room for more, an answer is handed on in pieces, each once there is room for it: one whose next piece is
//! not asked for is not taken.
//!
//! As over HTTP/1.1 a stream's own channel ends it where its client takes too little. An answer that is there as a whole would be
//! held for as long as the client likes; so that ends the connection, as does any that is not taken at the end of the server.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{Request, Response};
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tower::Service;

use super::connection::{ConnectionPlace, prepare};
use super::table::Phase;
use crate::api::{App, Peer};
use crate::limits::{
    CALL_PIECE_BYTES, CALL_PING_LIMIT, CALL_PING_PERIOD, CALL_WINDOW_BYTES, HEADER_READ_LIMIT, MAX_CALL_HEAD_BYTES,
    MAX_CONNECTION_CALLS, SUPERVISOR_TICK,
};
use crate::output::Output;

/// Serves a connection to its end.
pub(super) async fn serve(
    stream: TcpStream,
    routes: axum::Router,
    place: Arc<ConnectionPlace>,
    app: Arc<App>,
    closing: CancellationToken,
) {
    if let Err(error) = prepare(&stream) {
        tracing::debug!(%error, "cannot set a connection's options");
    }
    let peer = stream.peer_addr().map(|address| Peer::of(address.ip())).unwrap_or_default();
    let calls = Calls::new(Arc::clone(&place));
    let service = service_fn(|request: Request<Incoming>| {
        let call = calls.begin();
        let mut request = request.map(|body| {
            let call = Arc::clone(&call);
            if body.is_end_stream() {
                call.received();
                return Body::empty();
            }
            Body::new(Sent { body, call: Some(call) })
        });
        request.extensions_mut().insert(peer);
        let answer = routes.clone().call(request);
        async move {
            let response: Response<Body> = answer.await?;
            Ok::<_, Infallible>(response.map(|body| Answer::new(body, call)))
        }
    });
    let mut server = http2::Builder::new(TokioExecutor::new());
    server
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_CONNECTION_CALLS)
        .max_header_list_size(MAX_CALL_HEAD_BYTES)
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .initial_connection_window_size(CALL_WINDOW_BYTES)
        .max_send_buf_size(CALL_PIECE_BYTES)
        .keep_alive_interval(CALL_PING_PERIOD)
        .keep_alive_timeout(CALL_PING_LIMIT);
    let mut serving = pin!(server.serve_connection(TokioIo::new(stream), service));
    let mut look = interval(SUPERVISOR_TICK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut ending = false;
    let served = loop {
        tokio::select! {
            biased;
            served = &mut serving => break served,
            // What is asked in the moment in which it is to leave is answered.
            () = place.leave(), if !ending => {
                if !place.is_busy() {
                    return;
                }
            }
            phase = place.over(&closing), if !ending => {
                if phase == Phase::Waiting {
                    return;
                }
            }
            _ = look.tick() => match calls.look(app.output(), app.ends_connections()) {
                Look::Leave => return,
                Look::End if !ending => {}
                Look::End | Look::GoOn => continue,
            }
        }
        ending = true;
        serving.as_mut().graceful_shutdown();
    };
    if let Err(error) = served {
        // A client that left, or spoke no HTTP/2.
        tracing::debug!(%error, "a connection of gRPC ended with an error");
    }
}

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    GoOn,
    /// It ends with the calls that are open.
    End,
    /// It ends at once.
    Leave,
}

/// The calls of a connection, by which it is known what that is doing.
struct Calls {
    place: Arc<ConnectionPlace>,
    began: Instant,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    next: u64,
    calls: HashMap<u64, Arc<State>>,
    has_begun: bool,
}

/// What a call is doing.
#[derive(Default)]
struct State {
    is_received: AtomicBool,
    /// Nobody but its client's connection knows what is taken of its answer.
    is_whole: AtomicBool,
    /// Since when a piece of its answer waits to be taken, in milliseconds of the connection's life; 0: none does.
    handed_ms: AtomicU64,
}

/// A call, which is over when dropped.
struct Call {
    calls: Arc<Calls>,
    id: u64,
    state: Arc<State>,
}

impl Calls {
    fn new(place: Arc<ConnectionPlace>) -> Arc<Self> {
        Arc::new(Self { place, began: Instant::now(), open: Mutex::default() })
    }

    fn begin(self: &Arc<Self>) -> Arc<Call> {
        let state = Arc::new(State::default());
        let mut open = self.open();
        let id = open.next;
        open.next += 1;
        open.has_begun = true;
        open.calls.insert(id, Arc::clone(&state));
        self.settle(&open);
        Arc::new(Call { calls: Arc::clone(self), id, state })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)
    }

    /// For how long a piece of a call's answer has waited to be taken.
    fn waits(&self, state: &State) -> Duration {
        match state.handed_ms.load(Ordering::Acquire) {
            0 => Duration::ZERO,
            since => Duration::from_millis(self.now_ms().saturating_sub(since)),
        }
    }

    /// Tells what the connection is doing. Under the lock, so that what is told last is so.
    fn settle(&self, open: &Open) {
        if !open.has_begun {
            return;
        }
        let phase = match () {
            () if open.calls.is_empty() => Phase::Idle,
            () if open.calls.values().all(|call| !call.is_received.load(Ordering::Acquire)) => Phase::Receiving,
            () if open.calls.values().all(|call| self.waits(call) >= SUPERVISOR_TICK) => Phase::Unread,
            () => Phase::Busy,
        };
        self.place.become_phase(phase);
    }

    /// Looks at it, time and again. `ends`: connections are to end with what is under way.
    fn look(&self, output: &Output, ends: bool) -> Look {
        let open = self.open();
        self.settle(&open);
        for call in open.calls.values() {
            let waits = self.waits(call);
            let patience = output.patience(self.place.patience(), (Instant::now() - waits).into_std());
            let is_whole = call.is_whole.load(Ordering::Acquire);
            if waits >= patience && !waits.is_zero() && (is_whole || output.hurries()) {
                output.note_end();
                return Look::Leave;
            }
        }
        match self.place.quiet_for() {
            Some((Phase::Waiting, silent)) if silent >= HEADER_READ_LIMIT => Look::Leave,
            Some((_, silent)) if silent >= HEADER_READ_LIMIT => Look::End,
            _ if ends && open.has_begun => Look::End,
            _ => Look::GoOn,
        }
    }
}

impl Call {
    fn received(&self) {
        self.state.is_received.store(true, Ordering::Release);
        self.calls.settle(&self.calls.open());
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut open = self.calls.open();
        open.calls.remove(&self.id);
        self.calls.settle(&open);
    }
}

/// A body that tells when it has come to its end, or nobody wants it any more.
struct Sent {
    body: Incoming,
    call: Option<Arc<Call>>,
}

impl Sent {
    fn received(&mut self) {
        if let Some(call) = self.call.take() {
            call.received();
        }
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.received();
    }
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(&frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.received();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer, a piece at a time.
struct Answer {
    body: Body,
    /// What has come of it and was not handed on.
    rest: Bytes,
    call: Arc<Call>,
}

impl Answer {
    fn new(body: Body, call: Arc<Call>) -> Self {
        call.state.is_whole.store(body.size_hint().exact().is_some(), Ordering::Release);
        Self { body, rest: Bytes::new(), call }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        // Whoever asks has room for it.
        self.call.state.handed_ms.store(0, Ordering::Release);
        while self.rest.is_empty() {
            match std::task::ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return Poll::Ready(other),
            }
        }
        let length = self.rest.len().min(CALL_PIECE_BYTES);
        let piece = self.rest.split_to(length);
        self.call.state.handed_ms.store(self.call.calls.now_ms(), Ordering::Release);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    // Without its length, which a deadline may cut.
    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use http_body_util::BodyExt;

    use super::super::connection::Connections;
    use super::super::table::Table;
    use super::*;
    use crate::api::AppSettings;
    use crate::front::FrontLimits;
    use crate::limits::{OUTPUT_BUDGET_BYTES, SLOW_CLIENT_CROWDED_LIMIT, SLOW_CLIENT_LIMIT};
    use crate::routing::Router;

    struct Opened {
        connections: Arc<Connections>,
        output: Arc<Output>,
        calls: Arc<Calls>,
    }

    impl Opened {
        fn new() -> Self {
            let output = Output::new(OUTPUT_BUDGET_BYTES);
            let (limits, settings) = (FrontLimits::default(), AppSettings::default());
            let app = App::new(Router::new(), Arc::clone(&output), limits, settings, None);
            let connections = Connections::new(Table::new(2, 0), SLOW_CLIENT_CROWDED_LIMIT, app.metrics());
            let calls = Calls::new(connections.open(Peer::default()));
            Self { connections, output, calls }
        }

        fn look(&self) -> Look {
            self.calls.look(&self.output, false)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_left_and_one_that_was_answered_is_ended() {
        let opened = Opened::new();
        assert_eq!(opened.look(), Look::GoOn);
        assert_eq!(opened.calls.look(&opened.output, true), Look::GoOn, "it is to be answered first");
        tokio::time::advance(HEADER_READ_LIMIT).await;
        assert_eq!(opened.look(), Look::Leave, "nothing was ever asked");

        let call = opened.calls.begin();
        assert!(!opened.calls.place.is_busy(), "its body has not come");
        call.received();
        assert!(opened.calls.place.is_busy());
        tokio::time::advance(HEADER_READ_LIMIT).await;
        assert_eq!(opened.look(), Look::GoOn);
        assert_eq!(opened.calls.look(&opened.output, true), Look::End, "with the call that is open");
        drop(call);
        assert_eq!(opened.calls.place.quiet_for(), Some((Phase::Idle, Duration::ZERO)));
        tokio::time::advance(HEADER_READ_LIMIT).await;
        assert_eq!(opened.look(), Look::End);
        drop(opened.calls);
        assert_eq!(opened.connections.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_goes_on_a_piece_at_a_time_and_a_whole_one_that_is_not_taken_ends_its_connection() {
        for is_whole in [true, false] {
            let opened = Opened::new();
            let call = opened.calls.begin();
            call.received();
            let bytes = vec![b'x'; 3 * CALL_PIECE_BYTES + 1];
            let streamed = |bytes| Body::from_stream(futures::stream::iter([Ok::<_, Infallible>(bytes)]));
            let mut answer = Answer::new(if is_whole { Body::from(bytes) } else { streamed(bytes) }, call);
            let piece = answer.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(piece.len(), CALL_PIECE_BYTES);
            assert!(opened.calls.place.is_busy());
            tokio::time::advance(SLOW_CLIENT_LIMIT / 2).await;
            assert_eq!(opened.look(), Look::GoOn);
            assert!(!opened.calls.place.is_busy(), "it may make room");
            // The client takes that one, and no more.
            answer.frame().await.unwrap().unwrap();
            assert_eq!(opened.look(), Look::GoOn);
            assert!(opened.calls.place.is_busy());
            tokio::time::advance(SLOW_CLIENT_LIMIT).await;
            assert_eq!(opened.look(), if is_whole { Look::Leave } else { Look::GoOn });
            assert_eq!(opened.output.ended(), u64::from(is_whole));
            // At the end of the server, streams are waited for no longer either.
            opened.output.hurry();
            assert_eq!(opened.look(), Look::Leave);
            let rest = answer.collect().await.unwrap().to_bytes();
            assert_eq!(rest.len(), CALL_PIECE_BYTES + 1);
        }
    }
}
