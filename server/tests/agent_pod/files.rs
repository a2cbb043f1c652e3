//! A file server that can be told to misbehave: one file at every path, ranges, entity tags, and a queue of faults of
//! which each request takes one.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// How one request is treated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// As it should be.
    None,
    /// The connection is cut after so many bytes of the body.
    Cut(usize),
    /// The whole file, whatever range was asked for.
    IgnoreRange,
    /// The range as asked for, though the file is another one than `If-Range` says.
    IgnoreIfRange,
    /// The range is answered from so many bytes further on.
    Shift(usize),
    /// A status without a body.
    Status(u16),
    /// A redirect.
    Redirect(String),
    /// The head of an answer, and then nothing.
    Stall,
    /// The whole file, of which nobody says how long it is.
    UnsaidLength,
    /// So many bytes of it, of which nobody says that they are not all.
    UnsaidCut(usize),
    /// The same, and it goes on for ever.
    Endless,
    /// The file, of which a byte comes now and then.
    Trickle,
    /// The first half of it as a part, whatever range was asked for.
    Half,
    /// So many bytes of the body, and then nothing over a connection that stays.
    Silent(usize),
}

/// What a request asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    pub path: String,
    pub range: Option<String>,
    pub if_range: Option<String>,
}

#[derive(Default)]
struct State {
    content: Vec<u8>,
    etag: Option<String>,
    faults: VecDeque<Fault>,
    /// What every request gets once the queue is empty.
    then: Option<Fault>,
    asked: Vec<Asked>,
    sent_bytes: usize,
}

/// The server; it ends with the runtime.
#[derive(Clone)]
pub struct FileServer {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl FileServer {
    pub async fn start(content: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let state = State { content, etag: Some("\"1\"".into()), ..State::default() };
        let server = Self { address: listener.local_addr().unwrap(), state: Arc::new(Mutex::new(state)) };
        let accepting = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = accepting.clone();
                tokio::spawn(async move {
                    // A client that goes away in the middle is what some tests are about.
                    let _ = server.answer(stream).await;
                });
            }
        });
        server
    }

    pub fn url(&self) -> String {
        format!("http://{}/model.gguf", self.address)
    }

    pub fn faults(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state.lock().unwrap().faults.extend(faults);
    }

    pub fn always(&self, fault: Option<Fault>) {
        self.state.lock().unwrap().then = fault;
    }

    pub fn replace(&self, content: Vec<u8>, etag: Option<&str>) {
        let mut state = self.state.lock().unwrap();
        state.content = content;
        state.etag = etag.map(str::to_owned);
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.state.lock().unwrap().asked.clone()
    }

    pub fn sent_bytes(&self) -> usize {
        self.state.lock().unwrap().sent_bytes
    }

    async fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let asked = parse(&String::from_utf8_lossy(&head));
        let (fault, content, etag) = {
            let mut state = self.state.lock().unwrap();
            state.asked.push(asked.clone());
            let fault = state.faults.pop_front().or_else(|| state.then.clone()).unwrap_or(Fault::None);
            (fault, state.content.clone(), state.etag.clone())
        };
        let (head, body) = respond(&asked, &fault, &content, etag.as_deref());
        stream.write_all(head.as_bytes()).await?;
        if fault == Fault::Stall {
            stream.flush().await?;
            std::future::pending::<()>().await;
        }
        if fault == Fault::Trickle {
            for byte in &body {
                stream.write_all(&[*byte]).await?;
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
        let body = match fault {
            Fault::Trickle => &[],
            Fault::Cut(bytes) | Fault::UnsaidCut(bytes) | Fault::Silent(bytes) => &body[..bytes.min(body.len())],
            _ => &body[..],
        };
        stream.write_all(body).await?;
        self.state.lock().unwrap().sent_bytes += body.len();
        if matches!(fault, Fault::Silent(_)) {
            stream.flush().await?;
            std::future::pending::<()>().await;
        }
        if fault == Fault::Endless {
            loop {
                let more = [0; 64 * 1024];
                stream.write_all(&more).await?;
                self.state.lock().unwrap().sent_bytes += more.len();
            }
        }
        stream.shutdown().await
    }
}

fn parse(head: &str) -> Asked {
    let header = |name: &str| {
        head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        })
    };
    let path = head.split_whitespace().nth(1).unwrap_or_default().to_owned();
    Asked { path, range: header("range"), if_range: header("if-range") }
}

fn respond(asked: &Asked, fault: &Fault, content: &[u8], etag: Option<&str>) -> (String, Vec<u8>) {
    let tag = etag.map(|etag| format!("etag: {etag}\r\n")).unwrap_or_default();
    let simple = |status: &str, headers: &str| {
        (format!("HTTP/1.1 {status}\r\n{headers}content-length: 0\r\nconnection: close\r\n\r\n"), Vec::new())
    };
    match fault {
        Fault::Status(code) => return simple(&format!("{code} Fault"), ""),
        Fault::UnsaidLength | Fault::UnsaidCut(_) | Fault::Endless => {
            return ("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n".to_owned(), content.to_vec());
        }
        Fault::Redirect(to) => return simple("302 Found", &format!("location: {to}\r\n")),
        Fault::Half => {
            let (half, all) = (content.len() / 2, content.len());
            let range = format!("{tag}content-range: bytes 0-{}/{all}\r\ncontent-length: {half}\r\n", half - 1);
            let head = format!("HTTP/1.1 206 Partial Content\r\n{range}connection: close\r\n\r\n");
            return (head, content[..half].to_vec());
        }
        _ => {}
    }
    let same_file = asked.if_range.is_none() || asked.if_range.as_deref() == etag || *fault == Fault::IgnoreIfRange;
    let range = asked.range.as_deref().filter(|_| *fault != Fault::IgnoreRange && same_file);
    let Some(range) = range.and_then(|range| range.strip_prefix("bytes=")) else {
        let head = format!("HTTP/1.1 200 OK\r\n{tag}content-length: {}\r\nconnection: close\r\n\r\n", content.len());
        return (head, content.to_vec());
    };
    let (first, last) = range.split_once('-').unwrap();
    let mut first: usize = first.parse().unwrap();
    if let Fault::Shift(bytes) = fault {
        first += bytes;
    }
    if first >= content.len() {
        return simple("416 Range Not Satisfiable", &format!("content-range: bytes */{}\r\n", content.len()));
    }
    let last = last.parse().unwrap_or(usize::MAX).min(content.len() - 1);
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\n{tag}content-range: bytes {first}-{last}/{}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        content.len(),
        last + 1 - first
    );
    (head, content[first..=last].to_vec())
}
