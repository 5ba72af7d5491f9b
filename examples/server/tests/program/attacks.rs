//! What clients, operators and a slow device can do to the program `server`, and what it must not cost the others.
//!
//! Each test starts one, on the device that `GPU_AWAIT_TEST_DEVICE` names or on the host device.
#![forbid(unsafe_code)]
#![cfg(unix)]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http2::{self, SendRequest};
use hyper::{Request, StatusCode, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use crate::under_test::{JSON, RAW, SOON, Server, eventually, post, send};

const MIB: usize = 1 << 20;
const EMBED: &str = r#"{"tokens": [1, 2, 3]}"#;

/// Types of HTTP/2 frames, and their flags.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// `POST` with this head and a part of its body.
fn head(path: &str, content_type: &str, length: usize) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {content_type}\r\n\
         content-length: {length}\r\n\r\n"
    )
    .into_bytes()
}

async fn begin(addr: SocketAddr, part: &[u8]) -> TcpStream {
    let mut socket = TcpStream::connect(addr).await.expect("it accepts");
    socket.write_all(part).await.expect("a part");
    socket
}

/// Everything until the server closes the connection.
async fn rest_of(mut socket: TcpStream) -> String {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(SOON, socket.read_to_end(&mut answer)).await;
    read.expect("it closes the connection").ok();
    String::from_utf8_lossy(&answer).into_owned()
}

async fn embeds(server: &Server) {
    let reply = server.post("/embed", JSON, EMBED).await;
    assert_eq!(reply.status, StatusCode::OK, "{reply:?}");
}

// ---- memory -----------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_bodies_stay_in_the_budget() {
    const CLIENTS: usize = 100;
    let budget = ["--buffer-budget-mib", "64", "--request-timeout-ms", "3000"];
    let server = Server::start(&[&budget[..], &["--body-timeout-ms", "60000"]].concat());
    embeds(&server).await;
    let before = server.resident_mib();
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let addr = server.addr;
        clients.spawn(async move {
            let mut socket = begin(addr, &head("/matmul?m=1&k=1&n=1", RAW, 16 * MIB)).await;
            let (mut answer, part) = ([0; 12], vec![0; MIB]);
            let (mut read, mut write) = socket.split();
            let all_but_one = async {
                for _ in 0..15 {
                    write.write_all(&part).await?;
                }
                write.write_all(&part[1..]).await?;
                std::future::pending::<std::io::Result<()>>().await
            };
            tokio::select! {
                // Closed while it still sends.
                Err(_) = all_but_one => {}
                _ = read.read_exact(&mut answer) => {}
            }
            answer
        });
    }
    // One body of 16 MiB fits; requests that wait for room time out.
    let refused = clients.join_next().await.expect("one ends").expect("it does not panic");
    assert_eq!(&refused[9..12], b"429", "{}", String::from_utf8_lossy(&refused));
    assert!(server.metric("server_body_bytes").await <= (24 * MIB) as f64);
    let grown = server.resident_mib() - before;
    println!("{CLIENTS} unfinished bodies of 16 MiB: {grown} MiB more");
    assert!(grown <= 64, "{grown} MiB");
    // Small ones have a part of their own.
    embeds(&server).await;
    clients.shutdown().await;
    eventually("memory is free", async || server.metric("server_body_bytes").await == 0.0).await;
    let body = vec![0; 4 * (1024 * 1024 + 1024)];
    assert_eq!(server.post("/matmul?m=1024&k=1024&n=1", RAW, body).await.status, 200);
}

#[tokio::test]
async fn error_texts_are_short() {
    let server = Server::start(&[]);
    let long = "\u{7f}".repeat(4 * MIB);
    for (path, body) in [
        ("/embed", format!(r#"{{"tokens": "{long}"}}"#)),
        ("/embed", format!(r#"{{"tokens": ["{long}"]}}"#)),
        ("/embed", format!(r#"{{"{long}": 1}}"#)),
        ("/embed", format!(r#""{long}""#)),
        ("/embed", long.clone()),
        ("/matmul", format!(r#"{{"a": "{long}", "b": [[1]]}}"#)),
        ("/matmul", format!(r#"{{"a": ["{long}"], "b": [[1]]}}"#)),
        ("/matmul", format!(r#"{{"a": [["{long}"]], "b": [[1]]}}"#)),
        ("/matmul", "[1]".to_owned()),
        ("/matmul", r#"{"a": {}, "b": true}"#.to_owned()),
    ] {
        let (shown, len) = (body[..body.len().min(20)].to_owned(), body.len());
        let reply = server.post(path, JSON, body).await;
        assert_eq!(reply.status, 400, "{shown}");
        let text = reply.text();
        println!("{len} bytes of garbage: an answer of {}", text.len());
        assert!(text.len() < 2000, "{shown}: {} bytes", text.len());
        for internal in ["Wire", "struct", "serde", "hyper", "axum", "::"] {
            assert!(!text.contains(internal), "{shown}: {text}");
        }
    }
}

// ---- clients that do not read -----------------------------------------------------------------

/// Asks for 4 MiB, with the smallest of buffers.
async fn ask_and_do_not_read(addr: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a buffer");
    let mut socket = socket.connect(addr).await.expect("it accepts");
    let body = vec![0; 4 * 2048];
    let request = [head("/matmul?m=1024&k=1&n=1024", RAW, body.len()), body].concat();
    socket.write_all(&request).await.expect("a request");
    socket
}

#[tokio::test]
async fn clients_that_do_not_read_are_closed() {
    let limits = ["--max-connections", "64", "--write-timeout-ms", "300"];
    let server = Server::start(&[&limits[..], &["--health-listen", "127.0.0.1:0"]].concat());
    let mut sockets = Vec::new();
    for _ in 0..64 {
        sockets.push(ask_and_do_not_read(server.addr).await);
    }
    // Health does not share the connections of the service.
    assert_eq!(server.get("/healthz").await.text(), "ok");
    let start = Instant::now();
    embeds(&server).await;
    println!("served {:?} after 64 clients that do not read", start.elapsed());
    eventually("memory is free", async || server.metric("server_answer_bytes").await == 0.0).await;
}

async fn http2(
    addr: SocketAddr,
    window: u32,
) -> (SendRequest<Full<Bytes>>, JoinHandle<hyper::Result<()>>) {
    let socket = TcpStream::connect(addr).await.expect("it accepts");
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(window)
        .handshake(TokioIo::new(socket))
        .await
        .expect("HTTP/2");
    (sender, tokio::spawn(connection))
}

#[tokio::test]
async fn an_http2_answer_that_is_left_is_closed() {
    let limits = ["--body-timeout-ms", "200", "--write-timeout-ms", "200"];
    let server = Server::start(&[&limits[..], &["--request-timeout-ms", "2000"]].concat());
    let large = post("http://x/matmul?m=1024&k=1&n=1024", RAW, vec![0; 4 * 2048]);
    let small = post("http://x/embed", JSON, EMBED);
    for request in [large, small] {
        // As much as the client lets the server send.
        let (mut client, connection) = http2(server.addr, 16).await;
        let answer = client.send_request(request).await.expect("a head");
        assert_eq!(answer.status(), StatusCode::OK);
        assert!(server.metric("server_answer_bytes").await > 0.0);
        let ended = tokio::time::timeout(SOON, connection).await;
        ended.expect("it is closed").expect("it does not panic").ok();
        eventually("memory is free", async || server.metric("server_answer_bytes").await == 0.0)
            .await;
        drop(answer);
    }
}

// ---- the log ----------------------------------------------------------------------------------

#[tokio::test]
async fn a_log_that_nobody_reads_freezes_nothing() {
    let mut server = Server::start_unread(&[]);
    let mut client = server.client().await;
    // Until the pipe is full, and the queue in front of it.
    eventually("lines are dropped", async || {
        for _ in 0..500 {
            assert_eq!(send(&mut client, post("/embed", JSON, EMBED)).await.status, 200);
        }
        server.metric("server_log_lines_dropped_total").await > 0.0
    })
    .await;
    for _ in 0..100 {
        assert_eq!(send(&mut client, post("/embed", JSON, EMBED)).await.status, 200);
    }
    assert_eq!(server.get("/healthz").await.text(), "ok");
    server.signal("TERM");
    assert_eq!(server.ended().await.code(), Some(0));
}

// ---- HTTP/2, heads and idle connections --------------------------------------------------------

/// All of them connect while the server accepts none of them.
#[tokio::test]
async fn bursts_of_connections_are_queued() {
    let server = Server::start(&["--max-connections", "1"]);
    let mut first = server.client().await;
    assert_eq!(send(&mut first, post("/embed", JSON, EMBED)).await.status, StatusCode::OK);
    let mut burst: JoinSet<_> = (0..512).map(|_| TcpStream::connect(server.addr)).collect();
    let connected = async {
        let mut sockets = Vec::new();
        while let Some(socket) = burst.join_next().await {
            sockets.push(socket.expect("no panic").expect("it is queued"));
        }
        sockets
    };
    let sockets = tokio::time::timeout(SOON, connected).await.expect("all are queued");
    drop((first, sockets));
    embeds(&server).await;
}

/// A client may open as many streams as it likes until it has read the server's SETTINGS; most take 100 for granted.
#[tokio::test]
async fn http2_requests_before_its_settings() {
    const REQUESTS: u32 = 100;
    let server = Server::start(&[]);
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    };
    // POST, http, and as literals: the path, the authority, the content type.
    let head = b"\x83\x86\x04\x07/matmul\x01\x01x\x0f\x10\x10application/json";
    let heads = (0..REQUESTS).flat_map(|n| frame(HEADERS, END_HEADERS, 2 * n + 1, head));
    // All heads are in front of all bodies: the requests are open at once.
    let body = br#"{"a": [[2]], "b": [[3]]}"#;
    let bodies = (0..REQUESTS).flat_map(|n| frame(DATA, END_STREAM, 2 * n + 1, body));
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    sent.extend(frame(SETTINGS, 0, 0, &[]).into_iter().chain(heads).chain(bodies));
    let mut socket = begin(server.addr, &sent).await;

    let mut answered = 0;
    let answers = async {
        while answered < REQUESTS {
            let mut head = [0; 9];
            socket.read_exact(&mut head).await.expect("a frame");
            let [a, b, c, kind, _, stream @ ..] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            socket.read_exact(&mut payload).await.expect("its payload");
            let stream = u32::from_be_bytes(stream);
            assert_ne!(kind, RST_STREAM, "stream {stream} was reset: {payload:?}");
            if kind == HEADERS {
                assert_eq!(payload[0], 0x88, "the status of stream {stream} is not 200");
                answered += 1;
            }
        }
    };
    tokio::time::timeout(SOON, answers).await.expect("it answers all");
}

#[tokio::test]
async fn http2_is_served_and_ends_in_order() {
    let mut server = Server::start(&[]);
    let (client, connection) = http2(server.addr, 65_535).await;
    let calls: Vec<_> = (1..40)
        .map(|tokens| {
            let mut client = client.clone();
            tokio::spawn(async move {
                let body = json!({ "tokens": vec![7; tokens] }).to_string();
                let request = post("http://x/embed", JSON, body);
                let answer = client.send_request(request).await.expect("an answer");
                assert_eq!((answer.status(), answer.version()), (StatusCode::OK, Version::HTTP_2));
                let body = answer.into_body().collect().await.expect("a body").to_bytes();
                assert!(body.starts_with(b"{\"embedding\":["), "{body:?}");
            })
        })
        .collect();
    for call in calls {
        call.await.expect("a right answer");
    }
    server.signal("TERM");
    let ended =
        tokio::time::timeout(SOON, connection).await.expect("the server closes the connection");
    ended.expect("it does not panic").expect("in order");
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
}

#[tokio::test]
async fn slow_heads_and_idle_connections_are_closed() {
    let limits = ["--idle-timeout-ms", "300", "--request-timeout-ms", "100"];
    let server = Server::start(&[&limits[..], &["--write-timeout-ms", "100"]].concat());
    let mut slow =
        begin(server.addr, b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\nGET /readyz HT").await;
    let mut answer = [0; 15];
    slow.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
    let mut used = server.client().await;
    let ready = Request::get("/readyz").body(Full::default()).expect("a request");
    assert_eq!(send(&mut used, ready).await.text(), "ready");
    let (idle, connection) = http2(server.addr, 65_535).await;
    let ready = Request::get("http://x/readyz").body(Full::default()).expect("a request");
    assert_eq!(idle.clone().send_request(ready).await.expect("an answer").status(), 200);
    assert!(rest_of(slow).await.ends_with("ready"));
    eventually("the idle connection ends", async || used.is_closed()).await;
    let ended = tokio::time::timeout(SOON, connection).await;
    ended.expect("the server closes the connection").expect("it does not panic").ok();
}

/// What no handler sees is counted, too: answers of the HTTP library, and connections that wait.
#[tokio::test]
async fn connections_are_counted() {
    let server = Server::start(&["--max-connections", "2", "--health-listen", "127.0.0.1:0"]);
    let malformed = rest_of(begin(server.addr, b"no HTTP\r\n\r\n").await).await;
    assert!(malformed.starts_with("HTTP/1.1 400 "), "{malformed}");
    let long = [b"GET /embed HTTP/1.1\r\nx: ", &[b'x'; 100 << 10][..], b"\r\n\r\n"].concat();
    let mut too_large = begin(server.addr, &long).await;
    let mut answer = [0; 12];
    too_large.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 431");
    for end in ["malformed", "head_too_large"] {
        let name = format!("server_connections_ended_total{{end=\"{end}\"}}");
        eventually(end, async || server.metric(&name).await == 1.0).await;
    }
    let full = server.metric("server_connections_full_total").await;
    let _three = [
        begin(server.addr, b"").await,
        begin(server.addr, b"").await,
        begin(server.addr, b"").await,
    ];
    eventually("one waits", async || server.metric("server_connections_full_total").await > full)
        .await;
}

// ---- health -----------------------------------------------------------------------------------

#[tokio::test]
async fn health_has_a_listener_of_its_own() {
    let server = Server::start(&["--health-listen", "127.0.0.1:0", "--max-connections", "1"]);
    let mut taken = server.client().await;
    let health = Request::get("/healthz").body(Full::default()).expect("a request");
    let reply = send(&mut taken, health).await;
    assert_eq!((reply.status.as_u16(), reply.error().as_str()), (404, "not_found"));
    for (path, text) in [("/healthz", "ok"), ("/readyz", "ready")] {
        assert_eq!(server.get(path).await.text(), text);
    }
    assert!(server.get("/metrics").await.text().contains("\nserver_healthy 1\n"));
    assert_eq!(server.get("/embed").await.error(), "not_found");
}

// ---- the end ----------------------------------------------------------------------------------

#[tokio::test]
async fn not_ready_before_the_listener_closes() {
    let mut server = Server::start(&["--lame-duck-ms", "60000"]);
    assert_eq!(server.get("/readyz").await.text(), "ready");
    server.signal("TERM");
    let begun = Instant::now();
    eventually("not ready", async || server.get("/readyz").await.status == 503).await;
    let healthy = server.get("/healthz").await;
    // Its clients go before it stops.
    assert_eq!(
        (healthy.text().as_str(), &healthy.headers["connection"]),
        ("ok", &"close".parse().unwrap())
    );
    embeds(&server).await;
    // Long behind the first one: it is another.
    while begun.elapsed() < Duration::from_millis(400) {
        embeds(&server).await;
    }
    server.signal("TERM");
    assert_eq!(server.ended().await.code(), Some(1), "{}", server.log());
}

/// The server is suspended while the requests arrive, and gets SIGTERM before it resumes. Requests on keep-alive connections, on accepted
/// connections that were silent so far, and on connections in the listen queue all get an answer.
#[tokio::test]
async fn requests_that_have_come_are_answered() {
    const OF_EACH: usize = 100;
    // As long as it takes to answer them on busy cores.
    let mut server = Server::start(&["--lame-duck-ms", "5000"]);
    let request = [&head("/embed", JSON, EMBED.len())[..], EMBED.as_bytes()].concat();
    let open = || std::fs::read_dir(server.proc("fd")).expect("a Linux").count();
    let mut connections = Vec::new();
    for _ in 0..OF_EACH {
        let mut connection = begin(server.addr, &request).await;
        let mut answer = Vec::new();
        while !answer.ends_with(b"}") {
            let read = tokio::time::timeout(SOON, connection.read_buf(&mut answer)).await;
            assert!(read.expect("it answers").expect("it answers") > 0);
        }
        connections.push(connection);
    }
    let before = open();
    for _ in 0..OF_EACH {
        connections.push(begin(server.addr, b"").await);
    }
    eventually("they are accepted", async || open() >= before + OF_EACH).await;
    server.signal("STOP");
    for _ in 0..OF_EACH {
        connections.push(begin(server.addr, b"").await);
    }
    for connection in &mut connections {
        connection.write_all(&request).await.expect("room in the socket");
    }
    server.signal("TERM");
    server.signal("CONT");
    for (at, connection) in connections.into_iter().enumerate() {
        let answer = rest_of(connection).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with('}'), "{at}: {answer}");
    }
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
}

#[tokio::test]
async fn the_lame_duck_period_ends() {
    let mut server = Server::start(&["--lame-duck-ms", "200"]);
    server.signal("TERM");
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
    let log = server.log();
    let at = |part: &str| log.find(part).unwrap_or_else(|| panic!("no {part} in {log}"));
    assert!(at("not ready any more") < at("no new connections"), "{log}");
}

/// `timeout(1)` sends one to its child and one to its group.
#[tokio::test]
async fn two_signals_at_once_are_one() {
    let mut server = Server::start(&["--lame-duck-ms", "500"]);
    server.signal("TERM");
    server.signal("INT");
    server.signal("TERM");
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    let long = ["--drain-timeout-ms", "60000", "--body-timeout-ms", "60000"];
    let mut server = Server::start(&[&long[..], &["--lame-duck-ms", "400"]].concat());
    let request = head("/embed", JSON, EMBED.len());
    let _stuck = begin(server.addr, &request).await;
    eventually("in flight", async || server.metric("server_in_flight").await == 1.0).await;
    server.signal("TERM");
    eventually("it stops", async || server.log().contains("no new connections")).await;
    let start = Instant::now();
    server.signal("INT");
    assert_eq!(server.ended().await.code(), Some(1), "{}", server.log());
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(server.log().contains("server: a second signal"), "{}", server.log());
}
