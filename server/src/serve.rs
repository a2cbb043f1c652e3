//! The HTTP server around [`crate::api`]: it accepts within a limit of connections, and ends without losing a request.
//!
//! HTTP/1.1 and gRPC have a port each, and the same places for connections ([`connection`], [`calls`]). Where there are as many
//! connections as may be, one that asks for nothing makes room ([`table`]). Probes and metrics may have a listener of their own,
//! with places of its own, so that no crowd on the other keeps a probe from being answered.
//!
//! The end, on SIGTERM: `/readyz` says no and every answer says `Connection: close`, while connections are still accepted,
//! since those who route requests here learn of it a little later; once none has come for a moment the port closes, connections on which
//! nothing is asked close, requests in flight end within the drain timeout, and what is left is cut off. SIGINT leaves the
//! moment out, and a second signal the waiting, which the exit code tells. Absent: loading models.

mod calls;
mod connection;
mod table;

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use self::connection::Connections;
pub use self::table::Phase;
use self::table::Table;
use crate::api::{self, App, Origins, Peer};
use crate::descriptors;
use crate::limits::{
    ACCEPT_RETRY, LAST_EVENTS_LIMIT, LISTEN_BACKLOG, MAX_PROBE_CONNECTIONS, OTHERS_CONNECTIONS_DIVISOR,
    SLOW_CLIENT_CROWDED_LIMIT, SLOW_PROBE_LIMIT, UNREADY_BEFORE_CLOSE, UNREADY_BEFORE_CLOSE_MAX,
};

/// What is added to the number of a signal that ends a process, as shells do.
pub const EXIT_SIGNAL_BASE: u8 = 128;

/// Where the server is reached.
pub struct Ports {
    /// Everything is answered here.
    pub requests: TcpListener,
    /// Probes and metrics are answered here too, whatever goes on there.
    pub probes: Option<TcpListener>,
    /// Calls of gRPC are answered here, where they are.
    pub calls: Option<TcpListener>,
    /// The pages that may ask.
    pub origins: Origins,
}

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

/// An address that is listened on, as somebody on this machine types it: its own where it stands for all.
#[must_use]
pub fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    address
}

/// What keeps a port from being opened, and what to do; `flag` names the port.
#[must_use]
pub fn why_not_listening(error: &io::Error, flag: &str) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("another process listens there; end it, or choose another port with {flag} (0: any free one)")
        }
        io::ErrorKind::AddrNotAvailable => String::from(
            "no interface of this machine has that address; give --host one of its own, or 0.0.0.0 for all",
        ),
        io::ErrorKind::PermissionDenied => {
            format!("this user may not open that port; choose one from 1024 on with {flag}")
        }
        _ => format!("{error}; --host and {flag} say where"),
    }
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted server must not wait for the last one's connections to be forgotten.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(LISTEN_BACKLOG)
}

/// How a server ended.
pub struct Ended {
    /// The signal that had those requests cut off that were left; `None`: all had ended, or the time for that was over.
    pub cut_off_by: Option<u8>,
    connections: TaskTracker,
    background: TaskTracker,
}

impl Ended {
    /// Waits until those that were cut off have been told so, once their requests have failed; at most [`LAST_EVENTS_LIMIT`], since
    /// a client may read nothing.
    pub async fn told(&self) {
        // What is left after that is closed with the process.
        let ended = async { (self.connections.wait().await, self.background.wait().await) };
        drop(timeout(LAST_EVENTS_LIMIT, ended).await);
    }
}

/// Waits for a signal to end, before anything is served: gives its number.
///
/// # Errors
/// Signals cannot be received.
pub async fn told_to_end() -> io::Result<u8> {
    Ok(Signals::new()?.next().await.number())
}

/// Serves until a signal or `stop`, then drains.
///
/// # Errors
/// Signals cannot be received.
pub async fn run(ports: Ports, app: Arc<App>, stop: CancellationToken, drain_timeout: Duration) -> io::Result<Ended> {
    let mut signals = Signals::new()?;
    // It answers until nobody is left who could ask.
    let _probes = ports.probes.map(|listener| {
        // Whoever probes may share an address with others.
        let table = Table::new(MAX_PROBE_CONNECTIONS, 0);
        let port = Port::new(api::probe_routes(&app), table, SLOW_PROBE_LIMIT, &app);
        AbortOnDropHandle::new(tokio::spawn(async move { port.accept(&listener).await }))
    });
    let parts = app.limits().connections_and_calls(ports.calls.is_some());
    let connections = descriptors::connections().min(parts.connections);
    let routes = ports.origins.around(api::routes(&app));
    let table = Table::new(connections, connections / OTHERS_CONNECTIONS_DIVISOR);
    let mut port = Port::new(routes, table, SLOW_CLIENT_CROWDED_LIMIT, &app).counted();
    port.calls = ports.calls.is_some().then(|| api::call_routes(&app, parts.calls));
    // It was not told to end: why is said by whoever ended it.
    let is_told;
    let mut cut_off_by = None;
    {
        let mut accepting = pin!(async {
            let calls = async {
                match &ports.calls {
                    Some(listener) => port.accept_as(listener, Wire::Calls).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                never = port.accept(&ports.requests) => never,
                never = calls => never,
            }
        });
        let moment = tokio::select! {
            never = &mut accepting => match never {},
            () = stop.cancelled() => Duration::ZERO,
            signal = signals.next() => signal.moment(),
        };
        is_told = !stop.is_cancelled();
        if is_told {
            tracing::info!("shutting down: no longer ready");
        }
        app.start_draining();
        tokio::select! {
            never = &mut accepting => match never {},
            () = port.left_alone_for(moment, UNREADY_BEFORE_CLOSE_MAX.min(drain_timeout.max(moment))) => {}
            signal = signals.next() => cut_off_by = Some(signal.number()),
        }
    }
    port.take_backlog(ports.requests, Wire::Requests)?;
    if let Some(listener) = ports.calls {
        port.take_backlog(listener, Wire::Calls)?;
    }
    port.closing.cancel();
    let (connections, background) = (&port.tasks, app.background());
    connections.close();
    if is_told || !connections.is_empty() || !background.is_empty() {
        tracing::info!(
            connections = connections.len(),
            background = background.len(),
            "shutting down: requests in flight have {} s to end; a second signal cuts requests off",
            drain_timeout.as_secs()
        );
    }
    tokio::select! {
        () = std::future::ready(()), if cut_off_by.is_some() => {}
        // Whoever is connected may ask for more of those.
        () = async { connections.wait().await; background.wait().await } => {
            if is_told {
                tracing::info!("shutting down: every request has ended");
            }
        }
        () = sleep(drain_timeout) => {
            tracing::warn!(connections = connections.len(), "shutting down: the drain timeout is over");
        }
        signal = signals.next() => {
            tracing::warn!(connections = connections.len(), "shutting down: told to hurry");
            cut_off_by = Some(signal.number());
        }
    }
    let background = background.clone();
    Ok(Ended { cut_off_by, connections: port.tasks, background })
}

/// A signal that ends the server.
#[derive(Clone, Copy)]
enum Told {
    Terminate,
    Interrupt,
}

impl Told {
    /// How long nobody must have connected before the port closes after it.
    fn moment(self) -> Duration {
        match self {
            Self::Terminate => UNREADY_BEFORE_CLOSE,
            Self::Interrupt => Duration::ZERO,
        }
    }

    /// As POSIX numbers it.
    fn number(self) -> u8 {
        match self {
            Self::Interrupt => 2,
            Self::Terminate => 15,
        }
    }
}

/// Those that have come.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::Terminate,
            _ = self.interrupt.recv() => Told::Interrupt,
        }
    }
}

/// How a connection is spoken on.
#[derive(Clone, Copy)]
enum Wire {
    /// HTTP/1.1.
    Requests,
    /// gRPC, on HTTP/2.
    Calls,
}

/// What is served at a listener, or at two whose connections are counted together, and its connections.
struct Port {
    routes: axum::Router,
    /// What calls of gRPC are answered by, where they are.
    calls: Option<axum::Router>,
    connections: Arc<Connections>,
    tasks: TaskTracker,
    closing: CancellationToken,
    app: Arc<App>,
    counted: bool,
}

impl Port {
    fn new(routes: axum::Router, table: Table, crowded_limit: Duration, app: &Arc<App>) -> Self {
        Self {
            routes,
            calls: None,
            connections: Connections::new(table, crowded_limit, app.metrics()),
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
            app: Arc::clone(app),
            counted: false,
        }
    }

    /// With its connections in the metrics.
    fn counted(self) -> Self {
        Self { counted: true, ..self }
    }

    async fn accept(&self, listener: &TcpListener) -> Infallible {
        self.accept_as(listener, Wire::Requests).await
    }

    async fn accept_as(&self, listener: &TcpListener, wire: Wire) -> Infallible {
        loop {
            match listener.accept().await {
                Ok((stream, address)) => {
                    let peer = Peer::of(address.ip());
                    // One that is refused is closed: who waited here would have everybody behind it wait.
                    if self.connections.room(peer).await {
                        self.serve(stream, peer, wire);
                    }
                }
                Err(error) => {
                    // Out of file descriptors, say: one that asks for nothing gives its own back.
                    tracing::warn!(%error, "cannot accept a connection");
                    self.connections.shed();
                    sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    /// Waits until nobody has connected for `quiet` from now on; at most so long.
    async fn left_alone_for(&self, quiet: Duration, most: Duration) {
        let began = Instant::now();
        let mut until = began + quiet;
        while Instant::now() < until {
            sleep_until(until).await;
            let last_opened = self.connections.last_opened().unwrap_or(began);
            until = (last_opened + quiet).min(began + most);
        }
    }

    /// Closes the port. Who connected before that is answered.
    fn take_backlog(&self, listener: TcpListener, wire: Wire) -> io::Result<()> {
        // As a plain socket, which is asked by a call each time: the runtime may not have heard of the last ones yet.
        let listener = listener.into_std()?;
        for _ in 0..=LISTEN_BACKLOG {
            let Ok((stream, address)) = listener.accept() else { break };
            stream.set_nonblocking(true)?;
            self.serve(TcpStream::from_std(stream)?, Peer::of(address.ip()), wire);
        }
        Ok(())
    }

    fn serve(&self, stream: TcpStream, peer: Peer, wire: Wire) {
        let place = self.connections.open(peer);
        let calls = self.calls.clone().filter(|_| matches!(wire, Wire::Calls));
        let routes = self.routes.clone();
        let (app, closing) = (Arc::clone(&self.app), self.closing.clone());
        let counted = self.counted.then(|| self.app.metrics().connection());
        self.tasks.spawn(async move {
            let _counted = counted;
            match calls {
                Some(calls) => calls::serve(stream, calls, place, app, closing).await,
                None => connection::serve(stream, routes, place, app, closing).await,
            }
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_url_can_be_typed_whatever_is_listened_on() {
        for (listens, typed) in
            [("0.0.0.0:80", "127.0.0.1:80"), ("[::]:80", "[::1]:80"), ("192.0.2.1:80", "192.0.2.1:80")]
        {
            assert_eq!(reachable(listens.parse().unwrap()).to_string(), typed);
        }
    }

    #[test]
    fn a_port_that_cannot_be_had_is_told_with_the_flag_that_chooses_another() {
        for (kind, says) in [
            (io::ErrorKind::AddrInUse, "another process listens there"),
            (io::ErrorKind::AddrInUse, "--metrics-port (0: any"),
            (io::ErrorKind::AddrNotAvailable, "give --host one of its own"),
            (io::ErrorKind::PermissionDenied, "one from 1024 on with --metrics-port"),
            (io::ErrorKind::NotFound, "no such host; --host and --metrics-port say where"),
        ] {
            let why = why_not_listening(&io::Error::new(kind, "no such host"), "--metrics-port");
            assert!(why.contains(says), "{kind}: {why}");
        }
    }
}
