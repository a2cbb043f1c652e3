//! The HTTP server around [`crate::api`]: it accepts within a limit of connections, and ends without losing a request.
//!
//! The end, on SIGTERM: `/readyz` says no, while connections are still accepted for a moment, since those who route
//! requests here learn of it a little later; then the port closes, requests in flight end within the drain timeout,
//! and what is left is cut off. SIGINT leaves the moment out, and a second signal the waiting. Absent: loading models.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::{self, App};
use crate::limits::{
    ACCEPT_RETRY, CLIENT_STALL_LIMIT, HEADER_READ_LIMIT, LISTEN_BACKLOG, MAX_CONNECTIONS, UNREADY_BEFORE_CLOSE,
};

/// Opens the port; 0 lets the system choose one.
///
/// # Errors
/// The host is unknown, or the port cannot be had.
pub async fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in lookup_host((host, port)).await? {
        match listen_on(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted server must not wait for the last one's connections to be forgotten.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(LISTEN_BACKLOG)
}

/// Serves until a signal or `stop`, then drains.
///
/// # Errors
/// Signals cannot be received.
pub async fn run(
    listener: TcpListener,
    app: Arc<App>,
    stop: CancellationToken,
    drain_timeout: Duration,
) -> io::Result<()> {
    let mut signals = Signals::new()?;
    let closing = CancellationToken::new();
    let connections = TaskTracker::new();
    {
        let mut accepting = pin!(accept(listener, &app, &closing, &connections));
        let moment = tokio::select! {
            never = &mut accepting => match never {},
            () = stop.cancelled() => Duration::ZERO,
            moment = signals.next() => moment,
        };
        tracing::info!("shutting down: no longer ready");
        app.start_draining();
        tokio::select! {
            never = &mut accepting => match never {},
            () = sleep(moment) => {}
            _ = signals.next() => {}
        }
        // Dropping it closes the port.
    }
    closing.cancel();
    connections.close();
    tracing::info!(connections = connections.len(), "shutting down: draining");
    tokio::select! {
        () = connections.wait() => tracing::info!("shutting down: every request has ended"),
        () = sleep(drain_timeout) => {
            tracing::warn!(connections = connections.len(), "shutting down: the drain timeout is over");
        }
        _ = signals.next() => tracing::warn!(connections = connections.len(), "shutting down: told to hurry"),
    }
    Ok(())
}

/// The signals that end the server, each with how long to go on accepting after it.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> Duration {
        tokio::select! {
            _ = self.terminate.recv() => UNREADY_BEFORE_CLOSE,
            _ = self.interrupt.recv() => Duration::ZERO,
        }
    }
}

async fn accept(
    listener: TcpListener,
    app: &Arc<App>,
    closing: &CancellationToken,
    connections: &TaskTracker,
) -> std::convert::Infallible {
    let routes = api::routes(app);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            // The semaphore is never closed.
            std::future::pending::<()>().await;
            continue;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let connection = connection(stream, routes.clone(), closing.clone(), place, Arc::clone(app));
                connections.spawn(connection);
            }
            Err(error) => {
                // Out of file descriptors, say, which passes as connections end.
                tracing::warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    routes: axum::Router,
    closing: CancellationToken,
    _place: OwnedSemaphorePermit,
    app: Arc<App>,
) {
    let _counted = app.metrics().connection();
    if let Err(error) = prepare(&stream) {
        tracing::debug!(%error, "cannot set a connection's options");
    }
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER_READ_LIMIT);
    let mut serving = pin!(server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes)));
    let served = tokio::select! {
        served = &mut serving => served,
        () = closing.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = served {
        // A client that left, or spoke no HTTP.
        tracing::debug!(%error, "a connection ended with an error");
    }
}

/// Each token is a small write that must not wait for the last one's acknowledgement. And who takes nothing, or has gone
/// without a word, must not keep its place, its answer and its share of memory.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_user_timeout(Some(CLIENT_STALL_LIMIT))?;
    socket
        .set_tcp_keepalive(&TcpKeepalive::new().with_time(CLIENT_STALL_LIMIT / 2).with_interval(CLIENT_STALL_LIMIT / 4))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn connections_end_with_their_clients() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        prepare(&stream).unwrap();
        let socket = SockRef::from(&stream);
        assert!(stream.nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(CLIENT_STALL_LIMIT));
    }
}
