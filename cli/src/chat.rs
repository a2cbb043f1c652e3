//! A chat with the model of a service.

use std::io::{IsTerminal as _, Write};

use anyhow::{Result, bail};
use console::style;
use futures::TryStreamExt as _;
use http::{Request, header};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use tokio_util::{
    codec::{FramedRead, LinesCodec},
    io::StreamReader,
};

use crate::{args::Chat, cluster::Cluster, pod, text::plain};

/// Most bytes of a line of a stream.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Asks what was given, or line after line of standard input until its end, and writes the answers to `out`.
///
/// # Errors
/// When no pod answers, and what the model's server says of a request that it refuses.
pub async fn chat(cluster: &Cluster, arguments: &Chat, out: &mut impl Write) -> Result<()> {
    cluster.view(&arguments.name).await?;
    let mut messages = Vec::new();
    if let Some(system) = &arguments.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    if let Some(message) = &arguments.message {
        return ask(cluster, arguments, &mut messages, message, out).await;
    }
    let is_terminal = std::io::stdin().is_terminal();
    loop {
        if is_terminal {
            write!(out, "{} ", style(">").cyan())?;
            out.flush()?;
        }
        // A read of a terminal cannot be cancelled: the process ends in the middle of it.
        let Some(line) = spawn_blocking(|| std::io::stdin().lines().next().transpose()).await?? else { return Ok(()) };
        if line.trim().is_empty() {
            continue;
        }
        match ask(cluster, arguments, &mut messages, &line, out).await {
            Ok(()) => {}
            // Whoever sits there asks again, without what was refused.
            Err(error) if is_terminal => {
                messages.pop();
                eprintln!("{} {error:#}", style("error:").red());
            }
            Err(error) => return Err(error),
        }
    }
}

/// Sends the messages with one more, prints the answer as it comes, and keeps it.
async fn ask(
    cluster: &Cluster,
    arguments: &Chat,
    messages: &mut Vec<Value>,
    message: &str,
    out: &mut impl Write,
) -> Result<()> {
    messages.push(json!({"role": "user", "content": message}));
    let body = json!({"messages": messages, "stream": true}).to_string();
    let mut request = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
    if let Some(key) = &arguments.api_key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let ready = cluster.ready_pods(Some(&arguments.name), false).await?;
    let pod = pod::any(&ready, &arguments.name)?;
    let answer = pod::send(&cluster.pods(&cluster.namespace), &pod, pod::SERVING_PORT, request.body(body)?).await?;
    let status = answer.status();
    if !status.is_success() {
        bail!("{}", refusal(status, &pod::whole(answer).await?));
    }
    let bytes = answer.into_body().into_data_stream().map_err(std::io::Error::other);
    let mut lines = FramedRead::new(StreamReader::new(bytes), LinesCodec::new_with_max_length(LINE_BYTES_MAX));
    let mut said = String::new();
    while let Some(line) = lines.try_next().await? {
        match event(&line) {
            Some(Ok(Piece::Thought(text))) => write!(out, "{}", style(plain(&text)).dim())?,
            Some(Ok(Piece::Text(text))) => {
                write!(out, "{}", plain(&text))?;
                said.push_str(&text);
            }
            Some(Err(error)) => {
                writeln!(out)?;
                bail!("{error}");
            }
            None => continue,
        }
        out.flush()?;
    }
    writeln!(out)?;
    messages.push(json!({"role": "assistant", "content": said}));
    Ok(())
}

/// What a line of the stream brings.
#[derive(Debug, PartialEq, Eq)]
enum Piece {
    /// Of the answer.
    Text(String),
    /// Of what the model thinks before, which it is not told again.
    Thought(String),
}

/// What a line of the stream brings, or the error that it tells.
fn event(line: &str) -> Option<Result<Piece, String>> {
    let data: Value = serde_json::from_str(line.strip_prefix("data:")?.trim()).ok()?;
    if let Some(message) = data["error"]["message"].as_str() {
        return Some(Err(plain(message)));
    }
    let delta = &data["choices"][0]["delta"];
    let text = delta["content"].as_str().map(|text| Piece::Text(text.to_owned()));
    text.or_else(|| Some(Piece::Thought(delta["reasoning_content"].as_str()?.to_owned()))).map(Ok)
}

fn refusal(status: http::StatusCode, body: &str) -> String {
    let json: Value = serde_json::from_str(body).unwrap_or_default();
    let message = json["error"]["message"].as_str().unwrap_or(body);
    match status {
        http::StatusCode::UNAUTHORIZED => format!("{}: give a key with --api-key or GANTRY_API_KEY", plain(message)),
        _ => plain(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_read_line_by_line() {
        let text = event(r#"data: {"choices": [{"delta": {"content": "Iron"}}]}"#);
        assert_eq!(text, Some(Ok(Piece::Text("Iron".to_owned()))));
        let thought = event(r#"data: {"choices": [{"delta": {"reasoning_content": "Hm"}}]}"#);
        assert_eq!(thought, Some(Ok(Piece::Thought("Hm".to_owned()))));
        assert_eq!(event("data: [DONE]"), None);
        assert_eq!(event(""), None);
        let error = event(r#"data: {"error": {"message": "out of time"}}"#);
        assert_eq!(error, Some(Err("out of time".to_owned())));
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let body = r#"{"error": {"message": "wrong key"}}"#;
        assert_eq!(
            refusal(http::StatusCode::UNAUTHORIZED, body),
            "wrong key: give a key with --api-key or GANTRY_API_KEY"
        );
        assert_eq!(refusal(http::StatusCode::BAD_GATEWAY, "not JSON"), "not JSON");
    }
}
