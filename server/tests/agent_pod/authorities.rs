//! A source whose certificate is of an authority that only the spec knows.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use gantry_server::fetch::{Cache, FetchError, FetchProgress, Fetcher, Source};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fetch::{HERE, digest};
use crate::pod::{ONE, Pod, demo, gate};

/// An authority of these tests alone, and a certificate of it for localhost: both are valid until 2126, and the key guards
/// nothing.
const CA: &str = include_str!("tls/ca.pem");
const CERTIFICATE: &str = include_str!("tls/server.pem");
const KEY: &str = include_str!("tls/server.key");

/// Serves `content` over https://localhost, a connection at a time.
fn serve(content: Vec<u8>) -> SocketAddr {
    let certificates = vec![CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(KEY.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(certificates, key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let session = ServerConnection::new(Arc::clone(&config)).unwrap();
            let mut stream = StreamOwned::new(session, connection.unwrap());
            let mut head = Vec::new();
            let mut buffer = [0; 4096];
            // A client that does not believe the certificate hangs up, as does one that wants the beginning alone.
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read(&mut buffer) {
                    Ok(n) if n > 0 => head.extend_from_slice(&buffer[..n]),
                    _ => break,
                }
            }
            if head.starts_with(b"GET ") {
                let length = content.len();
                let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
                let _ = stream.write_all(answer.as_bytes()).and_then(|()| stream.write_all(&content));
                stream.conn.send_close_notify();
                let _ = stream.flush();
            }
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_comes_from_a_host_of_an_authority_that_the_spec_names() {
    let mut pod = Pod::fresh();
    let content = demo("demo-v1.q8_0.gguf");
    let port = serve(content.clone()).port();
    let ca = json!({"configMapRef": {"name": "authorities"}});
    let source =
        json!({"uri": format!("https://localhost:{port}/m.gguf"), "sha256": digest(&content).to_string(), "ca": ca});
    let version = json!({
        "name": "v1",
        "model": {"servedName": "chat", "source": source},
        "runtime": {"contextSize": 1024, "parallel": 2, "cacheType": "f16", "gpuLayers": "auto", "threads": 1},
    });
    pod.prepare(&version);
    let waits = |reason: &'static str| move |entry: &Value| entry["candidate"]["waitReason"] == reason;
    pod.api.entry("it waits for the ConfigMap", waits("ConfigMapNotFound")).await;
    pod.api.put_config_map("authorities", json!({"ca.crt": "none"}));
    let entry = pod.api.entry("it tells what is wrong with it", waits("ConfigMapInvalid")).await;
    assert!(entry["candidate"]["message"].as_str().unwrap().contains("has no certificate as PEM"), "{entry:#}");
    pod.api.put_config_map("authorities", json!({"ca.crt": CA}));
    let entry = pod.api.entry("prepared", |entry| entry["prepared"] == "v1").await;
    assert_eq!(gate(&entry, "Fetch")["verdict"], "Pass", "{entry:#}");
    pod.roll_out(&version).await;
    assert_eq!(pod.answer().await, ONE);
    pod.end().await;
}

#[tokio::test]
async fn authorities_are_those_of_the_source_that_names_them_and_of_no_other() {
    let content = [b"GGUF".as_slice(), &[7; 1000]].concat();
    let port = serve(content.clone()).port();
    let folder = tempfile::tempdir().unwrap();
    let fetcher = Fetcher::new(Cache::open(folder.path()).unwrap(), HERE).unwrap();
    let source = || Source::parse(&format!("https://localhost:{port}/m.gguf"), None).unwrap();
    let fetch = async |source: Source| {
        let (progress, _) = watch::channel(FetchProgress::default());
        fetcher.fetch(&source, digest(&content), &progress, &CancellationToken::new()).await
    };
    let with_ca = fetcher.peek(&source().with_ca(CA), 4).await;
    assert!(with_ca.unwrap().is_none(), "it is believed, and serves no parts");
    let told = fetcher.peek(&source(), 4).await.unwrap_err().to_string();
    assert!(told.contains("its certificate is not believed") && told.contains("as ca beside its uri"), "{told}");
    let nonsense = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let error = fetch(source().with_ca(nonsense)).await.unwrap_err();
    assert!(matches!(&error, FetchError::Permanent(told) if told.contains("of its ca cannot be used")), "{error}");
    assert!(std::fs::read(fetch(source().with_ca(CA)).await.unwrap().path()).unwrap() == content);
}
