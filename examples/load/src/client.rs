//! A connection that asks, and when.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{sleep, sleep_until, timeout};

use crate::arguments::Arguments;
use crate::requests::{Random, Request, Verdict};
use crate::tally::Tally;

/// A request that takes longer hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);
/// A connection is dropped up to so many milliseconds after its request.
const DROPPED_AFTER_MS: u64 = 20;

/// When requests are due.
pub(crate) struct Schedule {
    start: Instant,
    end: Instant,
    /// Between requests, in an open loop.
    every: Option<Duration>,
    next: AtomicU64,
}

impl Schedule {
    pub(crate) fn new(length: Duration, rate: Option<f64>) -> Schedule {
        let start = Instant::now();
        let every = rate.map(|rate| Duration::from_secs_f64(1.0 / rate));
        Schedule { start, end: start + length, every, next: AtomicU64::new(0) }
    }

    /// Waits until the next request is due; from when its latency counts. `None` at the end.
    async fn next(&self) -> Option<Instant> {
        if Instant::now() >= self.end {
            return None;
        }
        let Some(every) = self.every else { return Some(Instant::now()) };
        let due = self.due(self.next.fetch_add(1, Ordering::Relaxed), every);
        if due >= self.end {
            return None;
        }
        // Up to a millisecond late, which counts.
        sleep_until(due.into()).await;
        Some(due)
    }

    fn due(&self, number: u64, every: Duration) -> Instant {
        self.start + Duration::from_secs_f64(number as f64 * every.as_secs_f64())
    }

    /// How many requests were due before the end and found no connection.
    pub(crate) fn unsent(&self) -> u64 {
        let Some(every) = self.every else { return 0 };
        let length = (self.end - self.start).as_secs_f64();
        ((length / every.as_secs_f64()) as u64).saturating_sub(self.next.load(Ordering::Relaxed))
    }
}

pub(crate) struct Client {
    address: SocketAddr,
    mixed: bool,
    random: Random,
    tally: Arc<Tally>,
    connection: Option<Connection>,
}

/// Closed when dropped.
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    task: JoinHandle<()>,
    /// What was asked last, for messages.
    last: &'static str,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Client {
    pub(crate) fn new(arguments: &Arguments, number: u64, tally: Arc<Tally>) -> Client {
        let random = Random::new(arguments.seed.wrapping_mul(10_000).wrapping_add(number + 1));
        let Arguments { address, mixed, .. } = *arguments;
        Client { address, mixed, random, tally, connection: None }
    }

    /// Asks until the end of the schedule. Ends early when the server cannot be reached.
    pub(crate) async fn run(mut self, schedule: Arc<Schedule>) {
        while let Some(due) = schedule.next().await {
            let dice = if self.mixed { self.random.below(20) } else { 20 };
            let request = match dice {
                0..2 => Request::odd(&mut self.random),
                _ => Request::good(&mut self.random),
            };
            let sent = match dice {
                2 => self.abandon(request).await,
                _ => self.ask(request, due).await,
            };
            if let Err(error) = sent {
                self.tally.unexpected(format!("no connection: {error}"));
                return;
            }
        }
    }

    async fn ask(&mut self, request: Request, due: Instant) -> std::io::Result<()> {
        // A connection that the server closed while nobody asked is nobody's fault: once more.
        for again in [true, false] {
            let (route, connection) = (request.route, self.connection().await?);
            let answer = timeout(LIMIT, connection.ask(&request)).await;
            let last = connection.last;
            match answer {
                Ok(Ok(verdict)) => self.tally.answered(route, due.elapsed(), verdict),
                Ok(Err(error)) => {
                    self.connection = None;
                    if again && error.is_canceled() {
                        continue;
                    }
                    let verdict = match request.may_be_cut_off() {
                        true => Verdict::Right,
                        false => {
                            Verdict::Unexpected(format!("{} (after {last}): {error}", request.what))
                        }
                    };
                    self.tally.answered(route, due.elapsed(), verdict);
                }
                Err(_) => {
                    self.connection = None;
                    self.tally.hang(format!("{}: no answer after {LIMIT:?}", request.what));
                }
            }
            break;
        }
        if request.may_be_cut_off() {
            self.connection = None;
        }
        Ok(())
    }

    /// Asks, and closes the connection a moment later.
    async fn abandon(&mut self, request: Request) -> std::io::Result<()> {
        let moment = Duration::from_millis(self.random.below(DROPPED_AFTER_MS));
        let connection = self.connection().await?;
        // An answer that came first is right or wrong like any other.
        let answer = timeout(moment, connection.ask(&request)).await;
        self.connection = None;
        match answer {
            Ok(Ok(Verdict::Wrong(why))) => self.tally.wrong(why),
            Ok(Ok(Verdict::Unexpected(why))) => self.tally.unexpected(why),
            _ => {}
        }
        self.tally.abandoned();
        Ok(())
    }

    async fn connection(&mut self) -> std::io::Result<&mut Connection> {
        let open = self.connection.take().filter(|connection| !connection.sender.is_closed());
        let connection = match open {
            Some(connection) => connection,
            None => Connection::open(self.address).await?,
        };
        Ok(self.connection.insert(connection))
    }
}

impl Connection {
    async fn open(address: SocketAddr) -> std::io::Result<Connection> {
        let stream = timeout(LIMIT, TcpStream::connect(address)).await??;
        stream.set_nodelay(true)?;
        let (sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        let task = tokio::spawn(async move { drop(connection.await) });
        Ok(Connection { sender, task, last: "new" })
    }

    async fn ask(&mut self, request: &Request) -> hyper::Result<Verdict> {
        let mut built = hyper::Request::builder()
            .method(&request.method)
            .uri(&request.path)
            .header("host", "localhost");
        if !request.content_type.is_empty() {
            built = built.header("content-type", request.content_type);
        }
        let built = built.body(Full::new(request.body.clone())).expect("a request of ours");
        self.sender.ready().await?;
        let answer = self.sender.send_request(built).await?;
        let (head, body) = answer.into_parts();
        let body = body.collect().await?.to_bytes();
        self.last = request.what;
        Ok(request.judge(head.status.as_u16(), &head.headers, &body))
    }
}

/// Sends half of a body and no more: the server must not wait for ever. Ends with its answer.
pub(crate) async fn slow(address: SocketAddr, tally: &Tally) {
    let half = "POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                content-length: 100\r\n\r\n{\"tokens\": [1";
    let asked = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(half.as_bytes()).await?;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    // Not at once with all the others.
    sleep(Duration::from_millis(200)).await;
    match timeout(2 * LIMIT, asked).await {
        Ok(Ok(answer)) if &answer == b"HTTP/1.1 408" => {}
        Ok(Ok(answer)) => {
            let answer = String::from_utf8_lossy(&answer).into_owned();
            tally.unexpected(format!("half a body: `{answer}` instead of 408"));
        }
        Ok(Err(error)) => tally.unexpected(format!("half a body: {error} instead of 408")),
        Err(_) => tally.hang("half a body: no answer".to_owned()),
    }
}
