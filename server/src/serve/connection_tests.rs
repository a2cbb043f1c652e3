#![allow(clippy::unwrap_used)]
//! Real connections on the loopback, against the app without a model.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};

use super::*;
use crate::api::{self, AppSettings};
use crate::front::FrontLimits;
use crate::limits::{OUTPUT_BUDGET_BYTES, SHED_MIN_AGE, SLOW_CLIENT_CROWDED_LIMIT, SLOW_CLIENT_END_LIMIT};
use crate::output::Output;
use crate::routing::Router;

/// Connections of one listener, each served by a task.
struct Served {
    listener: TcpListener,
    connections: Arc<Connections>,
    router: Arc<Router>,
    app: Arc<App>,
    closing: CancellationToken,
}

impl Served {
    async fn new(limit: usize) -> Self {
        let router = Router::new();
        let app = App::new(
            Arc::clone(&router),
            Output::new(OUTPUT_BUDGET_BYTES),
            FrontLimits::default(),
            AppSettings::default(),
            None,
        );
        let connections = Connections::new(Table::new(limit, 0), SLOW_CLIENT_CROWDED_LIMIT, app.metrics());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self { listener, connections, router, app, closing: CancellationToken::new() }
    }

    async fn connect(&self) -> TcpStream {
        self.connect_to(api::routes(&self.app)).await
    }

    async fn connect_to(&self, routes: axum::Router) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        // As small as may be: what the client's own system takes is as good as read.
        socket.set_recv_buffer_size(4096).unwrap();
        let client = socket.connect(self.listener.local_addr().unwrap());
        let (client, accepted) = tokio::join!(client, self.listener.accept());
        assert!(self.connections.room(Peer::default()).await);
        let place = self.connections.open(Peer::default());
        let (app, closing) = (Arc::clone(&self.app), self.closing.clone());
        tokio::spawn(serve(accepted.unwrap().0, routes, place, app, closing));
        client.unwrap()
    }

    /// Waits until so many are in the table.
    async fn until_open(&self, count: usize) {
        while self.connections.len() != count {
            tokio::task::yield_now().await;
        }
    }

    fn shed(&self) -> (u64, u64) {
        let text = self.app.metrics().encode().unwrap();
        let figure = |phase: &str| {
            let start = format!("gantry_connections_shed_total{{phase=\"{phase}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&start)).unwrap().parse().unwrap()
        };
        (figure("waiting"), figure("idle"))
    }
}

const HEALTH: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";

/// Asks, and reads the answer.
async fn ask(stream: &mut TcpStream) -> String {
    stream.write_all(HEALTH).await.unwrap();
    answer(stream).await
}

/// The next answer on a connection: its end is the end of its JSON.
async fn answer(stream: &mut TcpStream) -> String {
    let (mut text, mut block) = (String::new(), [0; 1024]);
    while !text.ends_with('}') {
        let read = stream.read(&mut block).await.unwrap();
        assert!(read > 0, "the connection ended after {text:?}");
        text.push_str(std::str::from_utf8(&block[..read]).unwrap());
    }
    text
}

/// Whether the other side closes, as it should within a moment.
async fn ends(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 1]).await, Ok(0) | Err(_))
}

#[tokio::test]
async fn connections_end_with_their_clients() {
    let served = Served::new(1).await;
    let client = served.connect().await;
    let socket = SockRef::from(&client);
    prepare(&client).unwrap();
    assert!(client.nodelay().unwrap() && socket.keepalive().unwrap());
    assert_eq!(socket.tcp_user_timeout().unwrap(), Some(CLIENT_STALL_LIMIT));
    drop(client);
    served.until_open(0).await;
}

/// What no client takes goes before what one asks for; who reads, however slowly, is left alone.
#[tokio::test]
async fn answers_that_are_not_read_make_room() {
    let served = Served::new(2).await;
    let long = axum::Router::new().route("/long", axum::routing::get(|| async { vec![b'x'; 8 << 20] }));
    let request = b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut unread = served.connect_to(long.clone()).await;
    unread.write_all(request).await.unwrap();
    let mut slow = served.connect_to(long).await;
    slow.write_all(request).await.unwrap();
    let read = tokio::spawn(async move {
        let (mut block, mut taken) = ([0; 1 << 14], 0);
        while let Ok(bytes @ 1..) = slow.read(&mut block).await {
            taken += bytes;
            sleep(Duration::from_millis(2)).await;
        }
        taken
    });
    let mut newcomer = served.connect().await;
    assert!(ask(&mut newcomer).await.contains("200 OK"));
    let mut rest = Vec::new();
    assert!(unread.read_to_end(&mut rest).await.is_err() || rest.len() < 8 << 20);
    assert!(read.await.unwrap() > 8 << 20, "with its head");
}

#[tokio::test]
async fn who_has_asked_nothing_makes_room_and_who_is_answered_does_not_notice() {
    let served = Served::new(4).await;
    let mut idle = served.connect().await;
    assert!(ask(&mut idle).await.contains("200 OK"));
    // A body that is on its way is a request.
    let mut busy = served.connect().await;
    let head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{\"prompt\":";
    busy.write_all(head).await.unwrap();
    let mut silent = served.connect().await;
    let mut partial = served.connect().await;
    partial.write_all(b"GET /healthz HT").await.unwrap();
    sleep(SHED_MIN_AGE).await;
    let mut newcomers = [served.connect().await, served.connect().await];
    assert!(ends(&mut silent).await && ends(&mut partial).await);
    assert_eq!(served.shed(), (2, 0));
    for stream in &mut newcomers {
        assert!(ask(stream).await.contains("200 OK"));
    }
    assert!(ask(&mut idle).await.contains("200 OK"));
    busy.write_all(b"\"x\"}      ").await.unwrap();
    assert!(answer(&mut busy).await.starts_with("HTTP/1.1 503"));
}

#[tokio::test]
async fn bodies_that_do_not_come_make_room_when_nobody_is_idle() {
    let served = Served::new(2).await;
    let head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{";
    let mut slow = [served.connect().await, served.connect().await];
    for (id, stream) in (0..).zip(&mut slow) {
        stream.write_all(head).await.unwrap();
        // One after the other, so that it is known whose body has been coming for longer.
        while served.connections.with(|table| table.quiet_since(id)).is_some() {
            tokio::task::yield_now().await;
        }
    }
    sleep(SHED_MIN_AGE).await;
    let mut newcomer = served.connect().await;
    assert!(ask(&mut newcomer).await.contains("200 OK"));
    assert!(ends(&mut slow[0]).await);
    slow[1].write_all(b"\"prompt\": \"x\"}     ").await.unwrap();
    assert!(answer(&mut slow[1]).await.starts_with("HTTP/1.1 503"));
}

#[tokio::test]
async fn who_is_idle_goes_when_nobody_is_silent() {
    let served = Served::new(2).await;
    let (mut first, mut second) = (served.connect().await, served.connect().await);
    for stream in [&mut first, &mut second] {
        assert!(ask(stream).await.contains("200 OK"));
    }
    // Asked on again, so the second has been idle for longer.
    assert!(ask(&mut first).await.contains("200 OK"));
    let mut newcomer = served.connect().await;
    assert!(ends(&mut second).await);
    assert!(ask(&mut newcomer).await.contains("200 OK"));
    assert!(ask(&mut first).await.contains("200 OK"));
    assert_eq!(served.shed(), (0, 1));
}

#[tokio::test]
async fn at_the_end_the_idle_and_the_unfinished_go_and_what_is_asked_is_answered_with_close() {
    let served = Served::new(8).await;
    let mut idle = served.connect().await;
    assert!(!ask(&mut idle).await.contains("connection: close"));
    let mut reused = served.connect().await;
    ask(&mut reused).await;
    let mut partial = served.connect().await;
    partial.write_all(b"GET /healthz HT").await.unwrap();
    let mut silent = served.connect().await;
    served.app.start_draining();
    // The first second: all are there, and the next answer is the last.
    assert!(ask(&mut reused).await.contains("connection: close"));
    assert!(ends(&mut reused).await);
    let closed = Instant::now();
    served.closing.cancel();
    // Who connected in the last moment has a request on its way, and that is answered.
    let mut late = served.connect().await;
    assert!(ask(&mut late).await.contains("connection: close"));
    for stream in [&mut idle, &mut partial, &mut silent, &mut late] {
        assert!(ends(stream).await);
    }
    served.until_open(0).await;
    assert!(closed.elapsed() < DRAIN_QUIET_LIMIT * 5, "{:?}", closed.elapsed());
}

#[tokio::test]
async fn while_pods_of_the_other_side_answer_each_connection_ends_with_its_next_answer() {
    let served = Served::new(2).await;
    let mut kept = served.connect().await;
    assert!(!ask(&mut kept).await.contains("connection: close"));
    served.router.set_stands_by(true);
    assert!(ask(&mut kept).await.contains("connection: close"));
    assert!(ends(&mut kept).await);
    served.router.set_stands_by(false);
    assert!(!ask(&mut served.connect().await).await.contains("connection: close"), "requests have come back");
}

#[tokio::test]
async fn a_head_that_is_too_long_is_refused() {
    let served = Served::new(1).await;
    let mut client = served.connect().await;
    let head = format!("GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: {}", "x".repeat(MAX_HEAD_BYTES));
    client.write_all(head.as_bytes()).await.unwrap();
    let mut text = vec![0; 64];
    let read = client.read(&mut text).await.unwrap();
    assert!(text[..read].starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&text[..read]));
    served.until_open(0).await;
}

#[test]
fn who_takes_a_whole_answer_in_sips_is_behind_after_a_while_and_who_takes_enough_never() {
    let (began, patience) = (Instant::now(), Duration::from_secs(10));
    let at = |seconds| began + Duration::from_secs(seconds);
    let taking = |bytes_per_second: usize| {
        let mut window = Window::new(began);
        (1..=100).find(|&second| {
            window.taken_bytes += bytes_per_second;
            window.is_behind(at(second), patience)
        })
    };
    assert_eq!(taking(0), Some(10));
    assert_eq!(taking(SLOW_CLIENT_MIN_BYTES_PER_SECOND - 1), Some(10));
    assert_eq!(taking(SLOW_CLIENT_MIN_BYTES_PER_SECOND), None);
    // The time gets short while it is taken.
    let mut window = Window::new(began);
    assert!(!window.is_behind(at(30), Duration::from_secs(60)) && window.is_behind(at(31), patience));
}

/// Routes with an answer that is whole and larger than sockets take, and one that never comes.
fn large_and_late() -> axum::Router {
    let large = axum::routing::any(|| async { vec![b'x'; 8 << 20] });
    axum::Router::new().route("/large", large).route("/late", axum::routing::get(std::future::pending::<()>))
}

/// How long a client that asks this and takes so many bytes a second is served, by a clock that goes on when nobody can; at most
/// until three times the limit.
async fn served_for(requests: &str, bytes_per_second: usize) -> Duration {
    served_by(&Served::new(2).await, requests, bytes_per_second).await
}

async fn served_by(served: &Served, requests: &str, bytes_per_second: usize) -> Duration {
    let mut client = served.connect_to(large_and_late()).await;
    client.write_all(requests.as_bytes()).await.unwrap();
    client.readable().await.unwrap();
    let began = Instant::now();
    let mut block = vec![0; bytes_per_second];
    while served.connections.len() > 0 && began.elapsed() < SLOW_CLIENT_LIMIT * 3 {
        client.read_exact(&mut block).await.unwrap();
        sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(served.app.output().ended(), u64::from(served.connections.len() == 0));
    began.elapsed()
}

const LARGE: &str = "GET /large HTTP/1.1\r\nHost: x\r\n\r\n";

#[tokio::test(start_paused = true)]
async fn a_whole_answer_that_is_taken_in_sips_ends_and_one_that_is_taken_goes_on() {
    let sips = served_for(LARGE, 16).await;
    assert!((SLOW_CLIENT_LIMIT..SLOW_CLIENT_LIMIT * 5 / 4).contains(&sips), "{sips:?}");
    assert!(served_for(LARGE, SLOW_CLIENT_MIN_BYTES_PER_SECOND * 8).await >= SLOW_CLIENT_LIMIT * 3);
}

#[tokio::test(start_paused = true)]
async fn at_the_end_unread_answers_have_ten_seconds_together_and_late_ones_a_moment() {
    let served = Served::new(1).await;
    served.app.start_draining();
    let first = served_by(&served, LARGE, 16).await;
    assert!((SLOW_CLIENT_CROWDED_LIMIT..SLOW_CLIENT_CROWDED_LIMIT * 5 / 4).contains(&first), "{first:?}");
    let served = Served::new(1).await;
    served.app.start_draining();
    sleep(SLOW_CLIENT_CROWDED_LIMIT).await;
    let late = served_by(&served, LARGE, 16).await;
    assert!((SLOW_CLIENT_END_LIMIT..SLOW_CLIENT_END_LIMIT * 2).contains(&late), "{late:?}");
}

#[tokio::test(start_paused = true)]
async fn a_request_behind_a_whole_answer_does_not_have_it_taken_in_sips() {
    // hyper reads on before it has flushed where what is left of a body comes to its end after the answer, which asks for none of
    // it: more than it reads at first, and no more than it reads then.
    let body = "x".repeat(12_000);
    let answered_early = format!("POST /large HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let behind = format!("{answered_early}GET /late HTTP/1.1\r\nHost: x\r\n\r\n");
    let sips = served_for(&behind, 16).await;
    assert!((SLOW_CLIENT_LIMIT..SLOW_CLIENT_LIMIT * 5 / 4).contains(&sips), "{sips:?}");
}
