//! The program `server` as a process, and a client of it.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// For what should take a moment; a machine that is busy with other tests may take some.
pub(crate) const SOON: Duration = Duration::from_secs(15);
pub(crate) const JSON: &str = "application/json";
pub(crate) const RAW: &str = "application/octet-stream";

/// A running server; killed when dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) addr: SocketAddr,
    /// Of health, if it has a listener of its own.
    pub(crate) health: Option<SocketAddr>,
    log: Arc<Mutex<String>>,
    /// Copies its stderr into `log`, until that is closed.
    copying: Option<JoinHandle<()>>,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// What builds and starts the server with these arguments.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut path = PathBuf::from(env!("CARGO_BIN_EXE_server"));
    if !path.exists() {
        // Packed tests run on another machine than the one that built them, beside the program.
        let this = std::env::current_exe().expect("this binary has a path");
        path = this.with_file_name("server");
    }
    assert!(path.exists(), "there is no {}", path.display());
    let device = std::env::var("GPU_AWAIT_TEST_DEVICE").unwrap_or_else(|_| "host".to_owned());
    let mut command = Command::new(path);
    command.args(args);
    if !args.contains(&"--lame-duck-ms") {
        command.args(["--lame-duck-ms", "200"]);
    }
    command.env("GPU_AWAIT_DEVICE", device).env("RUST_LOG", "info");
    // What the allocator has back goes to the system at once, however many threads were busy: what is resident is what is in use.
    command.env("MALLOC_ARENA_MAX", "2");
    command.env("MALLOC_TRIM_THRESHOLD_", "131072").env("MALLOC_MMAP_THRESHOLD_", "131072");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

impl Server {
    /// Starts one on a free port, and waits until it listens.
    pub(crate) fn start(args: &[&str]) -> Server {
        let all = [&["--listen", "127.0.0.1:0"], args].concat();
        Server::run(&mut command(&all), args).logged()
    }

    fn logged(self) -> Server {
        let mut server = self;
        let (stderr, copy) = (server.child.stderr.take().expect("piped"), server.log.clone());
        server.copying = Some(std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut log = copy.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        }));
        server
    }

    /// Starts one that writes all that it can to a log that nobody reads.
    pub(crate) fn start_unread(args: &[&str]) -> Server {
        let all = [&["--listen", "127.0.0.1:0"], args].concat();
        Server::run(command(&all).env("RUST_LOG", "trace"), args)
    }

    fn run(command: &mut Command, args: &[&str]) -> Server {
        let mut child = command.spawn().expect("the server starts");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut address = |before: &str| -> SocketAddr {
            let mut line = String::new();
            stdout.read_line(&mut line).expect("a line");
            let addr = line.trim().strip_prefix(before).unwrap_or_else(|| {
                panic!("it said `{line}` and {}", text_of(child.stderr.take().expect("piped")));
            });
            addr.parse().expect("an address")
        };
        let addr = address("listening on http://");
        let health = args.contains(&"--health-listen").then(|| address("health on http://"));
        Server { child, addr, health, log: Arc::default(), copying: None }
    }

    /// Its memory, in MiB.
    pub(crate) fn resident_mib(&self) -> u64 {
        self.mib_of("VmRSS:")
    }

    /// A file of its in `/proc`.
    pub(crate) fn proc(&self, file: &str) -> PathBuf {
        format!("/proc/{}/{file}", self.child.id()).into()
    }

    fn mib_of(&self, what: &str) -> u64 {
        let status = std::fs::read_to_string(self.proc("status")).expect("a Linux");
        let line = status.lines().find_map(|line| line.strip_prefix(what)).expect("a line");
        let kib = line.trim().strip_suffix(" kB").expect("a unit");
        kib.parse::<u64>().expect("a number") / 1024
    }

    /// What it wrote to stderr so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// A connection of its own.
    pub(crate) async fn client(&self) -> SendRequest<Full<Bytes>> {
        Server::client_of(self.addr).await
    }

    pub(crate) async fn client_of(addr: SocketAddr) -> SendRequest<Full<Bytes>> {
        let socket = TcpStream::connect(addr).await.expect("it accepts");
        let (sender, connection) = http1::handshake(TokioIo::new(socket)).await.expect("HTTP/1");
        tokio::spawn(async move { connection.await.ok() });
        sender
    }

    /// Asks the listener of health, if there is one.
    pub(crate) async fn get(&self, path: &str) -> Reply {
        let request = Request::get(path).body(Full::default()).expect("a request");
        send(&mut Server::client_of(self.health.unwrap_or(self.addr)).await, request).await
    }

    pub(crate) async fn post(
        &self,
        path: &str,
        content_type: &str,
        body: impl Into<Bytes>,
    ) -> Reply {
        self.request(post(path, content_type, body)).await
    }

    pub(crate) async fn request(&self, request: Request<Full<Bytes>>) -> Reply {
        send(&mut self.client().await, request).await
    }

    /// The value of a metric, named with its labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        value(&self.get("/metrics").await.text(), name)
    }

    /// Sends a signal by its name.
    pub(crate) fn signal(&self, name: &str) {
        // Every shell has it built in.
        let kill = format!("kill -{name} {}", self.child.id());
        let sent = Command::new("sh").args(["-c", &kill]).status();
        assert!(sent.expect("a shell").success());
    }

    /// Waits for its end; `log` has its last line then.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let end = Instant::now() + SOON;
        loop {
            if let Some(status) = self.child.try_wait().expect("its state") {
                // What it wrote last may still be in the pipe.
                if let Some(copying) = self.copying.take() {
                    copying.join().expect("it copies");
                }
                return status;
            }
            assert!(Instant::now() < end, "it does not end:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.child.kill().ok();
            self.child.wait().ok();
        }
        if std::thread::panicking() {
            // What the last lines say is about the failure.
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            eprintln!("the server's log:\n{}", lines[lines.len().saturating_sub(20)..].join("\n"));
        }
    }
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).expect("text")
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    /// The kind of an error that is told as all of them are: with a sentence.
    pub(crate) fn error(&self) -> String {
        let error = &self.json()["error"];
        assert!(error["message"].as_str().is_some_and(|text| text.len() > 10), "{self:?}");
        error["kind"].as_str().expect("a kind").to_owned()
    }
}

pub(crate) fn post(path: &str, content_type: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let request = Request::post(path).header(CONTENT_TYPE, content_type);
    request.body(Full::new(body.into())).expect("a request")
}

/// Sends a request on a connection and reads the answer.
pub(crate) async fn send(
    client: &mut SendRequest<Full<Bytes>>,
    mut request: Request<Full<Bytes>>,
) -> Reply {
    request.headers_mut().insert(HOST, "localhost".parse().expect("a host"));
    let exchange = async {
        client.ready().await.expect("a connection");
        let (head, body) = client.send_request(request).await.expect("an answer").into_parts();
        let body = body.collect().await.expect("a whole answer").to_bytes();
        Reply { status: head.status, headers: head.headers, body }
    };
    tokio::time::timeout(SOON, exchange).await.expect("it answers")
}

/// The value of a metric of these.
pub(crate) fn value(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or("0").parse().expect("a number")
}

/// Asks again and again until it is so.
pub(crate) async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !is_so().await {
        assert!(Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The rest of what a program that ended said.
pub(crate) fn text_of(mut from: impl Read) -> String {
    let mut text = String::new();
    from.read_to_string(&mut text).expect("text");
    text
}
