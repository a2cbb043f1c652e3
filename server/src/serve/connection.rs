//! One connection: HTTP/1.1 on a socket, and what it is doing at each moment.
//!
//! hyper does not say whether a connection is silent, asks for something or is idle, so it is seen from outside: bytes that
//! are read, a request that is handed on, the end of its body, an answer whose body has been taken, and the flush after it. By that it is known
//! who may be made to leave, and at the end of the server who is waited for.
//!
//! Of an answer that hyper has as a whole nobody else knows what its client takes. So here it has the least rate that
//! [streams have](crate::output) while they are written, or who reads a byte a second would hold its memory for hours.

use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{HeaderValue, Request, Response, header};
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tower::Service;

use super::table::{Id, Phase, Room, Table};
use crate::api::{App, Peer};
use crate::limits::{
    CLIENT_STALL_LIMIT, DRAIN_QUIET_LIMIT, HEADER_READ_LIMIT, MAX_HEAD_BYTES, SEND_BUFFER_BYTES, SLOW_CLIENT_LIMIT,
    SLOW_CLIENT_MIN_BYTES_PER_SECOND, SUPERVISOR_TICK,
};
use crate::metrics::Metrics;
use crate::output::Output;

/// All connections of one listener.
pub(super) struct Connections {
    table: Mutex<Table>,
    /// One has ended, or waits for a request.
    changed: Notify,
    /// [`SLOW_CLIENT_LIMIT`] while there are as many as may be.
    crowded_limit: Duration,
    metrics: Arc<Metrics>,
}

impl Connections {
    pub(super) fn new(table: Table, crowded_limit: Duration, metrics: &Arc<Metrics>) -> Arc<Self> {
        let (table, metrics) = (Mutex::new(table), Arc::clone(metrics));
        Arc::new(Self { table, changed: Notify::new(), crowded_limit, metrics })
    }

    /// How long a client may take too little of an answer.
    fn patience(&self) -> Duration {
        if self.with(|table| table.is_full()) { self.crowded_limit } else { SLOW_CLIENT_LIMIT }
    }

    /// Waits until there is room for one more of this address. False: it has as many as one may have.
    pub(super) async fn room(&self, peer: Peer) -> bool {
        loop {
            let mut changed = pin!(self.changed.notified());
            // From here on nothing that changes goes unnoticed.
            changed.as_mut().enable();
            let wait = match self.with(|table| table.make_room(peer, Instant::now())) {
                Room::None(wait) => wait,
                Room::Refused => {
                    self.metrics.connection_refused();
                    return false;
                }
                room => {
                    self.dismiss(room);
                    return true;
                }
            };
            tokio::select! {
                () = changed => {}
                () = sleep(wait.unwrap_or(CLIENT_STALL_LIMIT)) => {}
            }
        }
    }

    /// Has one leave that nothing is asked on, if there is one.
    pub(super) fn shed(&self) {
        self.dismiss(self.with(|table| table.shed(Instant::now())));
    }

    fn dismiss(&self, room: Room) {
        if let Room::Made(phase, leave) = room {
            self.metrics.connection_shed(phase);
            leave.notify_one();
        }
    }

    pub(super) fn open(self: &Arc<Self>, peer: Peer) -> Arc<ConnectionPlace> {
        let (id, leave) = self.with(|table| table.open(peer, Instant::now()));
        let state = AtomicU8::new(State::Waiting as u8);
        let has_whole_answer = AtomicBool::new(false);
        let connections = Arc::clone(self);
        Arc::new(ConnectionPlace { connections, id, leave, state, has_whole_answer, quiet: Notify::new() })
    }

    /// When the last one came.
    pub(super) fn last_opened(&self) -> Option<Instant> {
        self.with(|table| table.last_opened())
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.with(|table| table.len())
    }

    fn with<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        change(&mut self.table.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What the connection itself knows of its phase, so that it asks for the table's lock only when that changes.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum State {
    Waiting,
    Receiving,
    Busy,
    /// hyper has the whole answer and is sending it.
    Ending,
    /// The same, and the client takes nothing.
    Unread,
    Idle,
}

/// A connection's place among the others, given back when dropped.
pub(super) struct ConnectionPlace {
    connections: Arc<Connections>,
    id: Id,
    leave: Arc<Notify>,
    state: AtomicU8,
    /// hyper has an answer as a whole that it has not flushed yet, whatever was asked since.
    has_whole_answer: AtomicBool,
    /// Nothing is asked on it any more.
    quiet: Notify,
}

impl ConnectionPlace {
    fn change(&self, from: State, to: State) {
        if self.state.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        let phase = match to {
            State::Waiting => Phase::Waiting,
            State::Receiving => Phase::Receiving,
            State::Busy => Phase::Busy,
            State::Unread => Phase::Unread,
            State::Idle => Phase::Idle,
            // It is busy still, or again.
            State::Ending if from == State::Unread => Phase::Busy,
            State::Ending => return,
        };
        self.connections.with(|table| table.change(self.id, phase, Instant::now()));
        if phase != Phase::Busy {
            self.connections.changed.notify_waiters();
        }
        if matches!(phase, Phase::Waiting | Phase::Idle) {
            self.quiet.notify_one();
        }
    }

    /// It is so now, whatever it was before. For who tells of all changes, one after the other.
    pub(super) fn become_phase(&self, phase: Phase) {
        let to = match phase {
            Phase::Waiting => State::Waiting,
            Phase::Receiving => State::Receiving,
            Phase::Busy => State::Busy,
            Phase::Unread => State::Unread,
            Phase::Idle => State::Idle,
        };
        let states = [State::Waiting, State::Receiving, State::Busy, State::Unread, State::Idle];
        for from in states.into_iter().filter(|from| *from != to) {
            self.change(from, to);
        }
    }

    /// Waits until it is told to leave.
    pub(super) async fn leave(&self) {
        self.leave.notified().await;
    }

    /// How long nothing has been asked on it, and whether anything ever was; `None` while something is.
    pub(super) fn quiet_for(&self) -> Option<(Phase, Duration)> {
        let (phase, since) = self.connections.with(|table| table.quiet_since(self.id))?;
        Some((phase, since.elapsed()))
    }

    /// How long a client may take too little of an answer.
    pub(super) fn patience(&self) -> Duration {
        self.connections.patience()
    }

    pub(super) fn is_busy(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        state == State::Busy as u8 || state == State::Ending as u8
    }

    /// Waits until the server closes and nothing has been asked for [`DRAIN_QUIET_LIMIT`].
    pub(super) async fn over(&self, closing: &CancellationToken) -> Phase {
        closing.cancelled().await;
        loop {
            match self.connections.with(|table| table.quiet_since(self.id)) {
                None => self.quiet.notified().await,
                Some((phase, since)) if since.elapsed() >= DRAIN_QUIET_LIMIT => return phase,
                Some((_, since)) => sleep_until(since + DRAIN_QUIET_LIMIT).await,
            }
        }
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.connections.with(|table| table.close(self.id));
        self.connections.changed.notify_waiters();
    }
}

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
    let output = Arc::clone(app.output());
    let peer = stream.peer_addr().map(|address| Peer::of(address.ip())).unwrap_or_default();
    let service = service_fn(|request: Request<Incoming>| {
        for before in [State::Waiting, State::Idle, State::Ending, State::Unread] {
            place.change(before, State::Receiving);
        }
        let answering = Answering(Arc::clone(&place));
        let mut request = request.map(|body| {
            let receiving = Receiving(Arc::clone(&place));
            // One without a body is whole with its head.
            if body.is_end_stream() { Body::empty() } else { Body::new(Sent { body, receiving: Some(receiving) }) }
        });
        request.extensions_mut().insert(peer);
        let answer = routes.clone().call(request);
        let app = Arc::clone(&app);
        async move {
            let mut response: Response<Body> = answer.await?;
            if app.ends_connections() {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response.map(|body| Answer { body, _answering: answering }))
        }
    });
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER_READ_LIMIT).max_buf_size(MAX_HEAD_BYTES);
    let stream = TokioIo::new(Watched { stream, place: Arc::clone(&place), output, sending: None });
    let mut serving = pin!(server.serve_connection(stream, service));
    let mut ending = false;
    let served = loop {
        tokio::select! {
            biased;
            served = &mut serving => break served,
            // What is asked in the moment in which it is to leave is answered.
            () = place.leave.notified(), if !ending => {
                if !place.is_busy() {
                    return;
                }
            }
            phase = place.over(&closing), if !ending => {
                // A part of a head may stay one for ever.
                if phase == Phase::Waiting {
                    return;
                }
            }
        }
        ending = true;
        serving.as_mut().graceful_shutdown();
    };
    if let Err(error) = served {
        // A client that left, or spoke no HTTP.
        tracing::debug!(%error, "a connection ended with an error");
    }
}

/// Each token is a small write that must not wait for the last one's acknowledgement. And who takes nothing, or has gone
/// without a word, must not keep its place, its answer and its share of memory.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_user_timeout(Some(CLIENT_STALL_LIMIT))?;
    // It would grow to megabytes for each client that reads nothing.
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket
        .set_tcp_keepalive(&TcpKeepalive::new().with_time(CLIENT_STALL_LIMIT / 2).with_interval(CLIENT_STALL_LIMIT / 4))
}

/// A request whose body is not there to its end.
struct Receiving(Arc<ConnectionPlace>);

impl Drop for Receiving {
    fn drop(&mut self) {
        self.0.change(State::Receiving, State::Busy);
    }
}

/// A body that tells when it has come to its end, or nobody wants it any more.
struct Sent {
    body: Incoming,
    receiving: Option<Receiving>,
}

impl HttpBody for Sent {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(&frame, Poll::Ready(None)) || self.body.is_end_stream() {
            self.receiving = None;
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

/// A request that is being answered.
struct Answering(Arc<ConnectionPlace>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.has_whole_answer.store(true, Ordering::Release);
        // An answer may go out before a body has come that it does not need.
        for before in [State::Receiving, State::Busy] {
            self.0.change(before, State::Ending);
        }
    }
}

/// A body that tells when hyper has all of it.
struct Answer {
    body: Body,
    _answering: Answering,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What a client takes of an answer, since its socket took no more for the first time.
#[derive(Clone, Copy)]
struct Window {
    since: Instant,
    taken_bytes: usize,
}

impl Window {
    fn new(now: Instant) -> Self {
        Self { since: now, taken_bytes: 0 }
    }

    /// Whether too little was taken for so long; where it was enough the next window begins.
    fn is_behind(&mut self, now: Instant, patience: Duration) -> bool {
        if now.saturating_duration_since(self.since) < patience {
            return false;
        }
        let least_bytes = SLOW_CLIENT_MIN_BYTES_PER_SECOND.saturating_mul(patience.as_secs() as usize);
        let is_behind = self.taken_bytes < least_bytes;
        *self = Self::new(now);
        is_behind
    }
}

/// A window, and when it is looked at.
struct Sending {
    window: Window,
    look: Pin<Box<Sleep>>,
}

/// A socket whose reads, writes and flushes tell what its connection is doing.
struct Watched {
    stream: TcpStream,
    place: Arc<ConnectionPlace>,
    output: Arc<Output>,
    /// While the socket has not taken all that hyper has.
    sending: Option<Sending>,
}

impl Watched {
    /// Notes what the socket took, and fails where its client has taken too little for too long, of a whole answer or at the end
    /// of the server.
    fn watch(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(taken) = &written {
            if let (Ok(bytes), Some(sending)) = (taken, &mut self.sending) {
                sending.window.taken_bytes += bytes;
                self.place.change(State::Unread, State::Ending);
            }
            return written;
        }
        self.place.change(State::Ending, State::Unread);
        let begin = || Sending { window: Window::new(Instant::now()), look: Box::pin(sleep(SUPERVISOR_TICK)) };
        let sending = self.sending.get_or_insert_with(begin);
        while sending.look.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            let limit = self.place.connections.patience();
            let patience = self.output.patience(limit, sending.window.since.into_std());
            let is_behind = sending.window.is_behind(now, patience);
            // Of a stream its channel knows more, but at the end of the server only this connection is left of it.
            let is_whole = self.place.has_whole_answer.load(Ordering::Acquire);
            if is_behind && (is_whole || self.output.hurries()) {
                self.output.note_end();
                let slowness = "the client took too little of an answer for too long";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, slowness)));
            }
            sending.look.as_mut().reset(now + SUPERVISOR_TICK);
        }
        Poll::Pending
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.place.change(State::Idle, State::Waiting);
        }
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper flushes when nothing is left in its own buffer.
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        if flushed.is_ready() {
            self.sending = None;
            self.place.has_whole_answer.store(false, Ordering::Release);
            for before in [State::Ending, State::Unread] {
                self.place.change(before, State::Idle);
            }
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
