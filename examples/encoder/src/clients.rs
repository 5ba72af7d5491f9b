//! Clients that ask a server and check its answers.
//!
//! Each has a connection, and asks again when it is answered. The embeddings of all texts are computed before the first request, so that each
//! answer is compared with the one it should be. What a client sees is counted once:
//!
//! | what it sees | counted as |
//! |---|---|
//! | 200 and the text's embedding | answered, with the time from its first byte sent to its last byte read |
//! | 200 and anything else | wrong |
//! | 503 | refused: its time was up, or too many requests wait |
//! | another status, a connection that breaks | failed |
//! | it closes the connection itself, anywhere between the request's first byte and its answer | left |
//!
//! A server of another make is asked in the same way: `POST /embed`, `{"ids": [[..]]}`; the answer is raw `f32` in little-endian order.
#![forbid(unsafe_code)]

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use encoder::{Failed, Launches, Model};
use gpu_await::Device;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Of two embeddings, which have the length 1. f16 differs from f32 by a tenth of it; the output has the distance of the nearest texts.
const SAME: f32 = 0.02;
const SEED: u64 = 1;
/// Of each number of clients: requests that end earlier are not counted.
const WARM_UP: Duration = Duration::from_secs(1);
/// Of a client that was refused, or could not connect: asking again at once would measure refusals.
const PAUSE: Duration = Duration::from_millis(10);

/// What to ask for.
#[derive(clap::Args)]
pub(crate) struct Traffic {
    /// The server
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    addr: String,
    /// How many at once: numbers, of which each gets its time
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "64")]
    clients: Vec<usize>,
    /// For each number of clients
    #[arg(long, default_value = "20")]
    seconds: u64,
    /// Different texts: half of them queries of about 12 tokens, half passages of about 150, up to 512
    #[arg(long, default_value = "1000")]
    texts: usize,
    /// Requests whose client closes its connection before it is answered
    #[arg(long, value_name = "PERCENT", default_value = "0")]
    leaving: u32,
    /// Every other request gives up to so much time, at random
    #[arg(long, value_name = "MS")]
    timeout: Option<u64>,
    /// Queries alone, as interactive requests
    #[arg(long)]
    interactive: bool,
    /// The server's process, whose memory, descriptors and threads are watched
    #[arg(long)]
    pid: Option<u32>,
}

/// A request, cut where headers can be put in, and its answer.
struct Question {
    head: String,
    body: String,
    embedding: Vec<f32>,
}

#[derive(Default)]
struct Seen {
    answered_us: Vec<u32>,
    wrong: u64,
    refused: u64,
    failed: u64,
    left: u64,
}

/// Asks, and prints `name value unit` lines.
pub(crate) async fn run<T: Launches>(traffic: Traffic, model: Model<T>) -> Result<(), Failed> {
    let device = &model.device().clone();
    // Closed by the server, before what it has is looked at.
    let health = "GET /healthz HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n";
    let is_loading = async || -> Result<bool, Failed> {
        let (mut stream, mut answer) = (TcpStream::connect(&traffic.addr).await?, Vec::new());
        stream.write_all(health.as_bytes()).await?;
        // One that does not answer has no such path, and is ready.
        timeout(Duration::from_secs(1), stream.read_to_end(&mut answer)).await.ok();
        Ok(answer.starts_with(b"HTTP/1.1 503"))
    };
    while is_loading().await? {
        sleep(PAUSE).await;
    }
    let questions = Arc::new(questions(&traffic, &model).await?);
    drop(model);
    let traffic = Arc::new(traffic);
    let watch = |what: &str| usage(&traffic, device, what);
    let (before, mut best) = (watch("before")?, None);
    for &clients in &traffic.clients {
        let start = Instant::now() + WARM_UP;
        let end = start + Duration::from_secs(traffic.seconds);
        let mut tasks = JoinSet::new();
        for number in 0..clients {
            let (traffic, questions) = (traffic.clone(), questions.clone());
            tasks.spawn(async move { client(&traffic, &questions, number, start, end).await });
        }
        sleep_until(start).await;
        let first = watch(&format!("first, with {clients} clients"))?;
        sleep_until(end).await;
        let last = watch(&format!("last, with {clients} clients"))?;
        let mut all = Seen::default();
        while let Some(seen) = tasks.join_next().await {
            let seen = seen?;
            all.answered_us.extend(seen.answered_us);
            all.wrong += seen.wrong;
            all.refused += seen.refused;
            all.failed += seen.failed;
            all.left += seen.left;
        }
        let times = &mut all.answered_us;
        times.sort_unstable();
        let rate = times.len() as f64 / (end - start).as_secs_f64();
        println!("requests.{clients} {rate:.0} requests/s");
        for (name, part) in [("p50", 0.5), ("p99", 0.99)] {
            let at = times.get((times.len() as f64 * part) as usize);
            println!("{name}.{clients} {:.2} ms", at.map_or(f64::NAN, |us| f64::from(*us) / 1e3));
        }
        let counts = [("wrong", all.wrong), ("refused", all.refused), ("failed", all.failed)];
        for (name, count) in counts.into_iter().chain([("left", all.left)]) {
            println!("{name}.{clients} {count} requests");
        }
        let late = times.get(times.len() * 99 / 100);
        if late.is_some_and(|us| *us <= 20_000) && best.is_none_or(|best| best < rate) {
            best = Some(rate);
        }
        // Descriptors grow with connections.
        for (at, (name, unit)) in FIGURES[..3].iter().enumerate() {
            if let (Some(first), Some(last)) = (first, last) {
                println!("growth.{name}.{clients} {:.1} {unit}", last[at] - first[at]);
            }
        }
    }
    println!("within_20_ms {:.0} requests/s", best.unwrap_or(0.0));
    // Connections that clients closed are closed by the server.
    sleep(Duration::from_secs(2)).await;
    if let (Some(before), Some(after)) = (before, watch("after")?) {
        println!("growth.descriptors {} descriptors", after[3] - before[3]);
    }
    Ok(())
}

async fn questions<T: Launches>(
    traffic: &Traffic,
    model: &Model<T>,
) -> Result<Vec<Question>, Failed> {
    let mut random = Random(SEED);
    let most = model.config().max_position_embeddings.min(512);
    let vocabulary = model.config().vocab_size;
    let mut lane = model.lane(model.device().stream()?, most, 1).await?;
    let mut questions = Vec::new();
    for number in 0..traffic.texts {
        let is_query = traffic.interactive || number % 2 == 0;
        let (median, spread) = if is_query { (12.0, 0.5) } else { (150.0, 0.7) };
        let len = (f64::exp(random.normal() * spread) * median) as usize;
        let ids: Vec<u32> =
            (0..len.clamp(1, most)).map(|_| random.below(vocabulary) as u32).collect();
        let embedding = lane.embed(&[&ids]).await?.to_vec();
        let body = serde_json::json!({ "ids": [ids] }).to_string();
        let head = format!(
            "POST /embed HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\naccept: application/octet-stream\r\ncontent-length: {}\r\n",
            traffic.addr,
            body.len()
        );
        questions.push(Question { head, body, embedding });
    }
    let (mut nearest, some) = (f32::INFINITY, &questions[..questions.len().min(1000)]);
    for (number, question) in some.iter().enumerate() {
        let others = some[..number].iter();
        let each = others.map(|other| distance(&other.embedding, &question.embedding));
        nearest = each.fold(nearest, f32::min);
    }
    println!("# embeddings of different texts are {nearest:.3} apart, or more");
    Ok(questions)
}

async fn client(
    traffic: &Traffic,
    questions: &[Question],
    number: usize,
    start: Instant,
    end: Instant,
) -> Seen {
    let mut random = Random(SEED ^ ((number as u64 + 1) << 32));
    let (mut seen, mut connection) = (Seen::default(), None);
    while Instant::now() < end {
        let question = &questions[random.below(questions.len())];
        let mut request = question.head.clone();
        if traffic.interactive {
            request += "x-priority: interactive\r\n";
        }
        if let Some(most) = traffic.timeout.filter(|_| random.below(2) == 0) {
            request += &format!("x-timeout-ms: {}\r\n", random.below(most as usize + 1));
        }
        request = request + "\r\n" + &question.body;
        let open = match connection.take() {
            Some(open) => Ok(open),
            None => Connection::open(&traffic.addr).await,
        };
        let Ok(mut open) = open else {
            seen.failed += 1;
            sleep(PAUSE).await;
            continue;
        };
        if random.below(100) < traffic.leaving as usize {
            let part = &request.as_bytes()[..random.below(request.len() + 1)];
            // All of it in half of the cases: so that a text is left that waits, or is computed.
            let part = if random.below(2) == 0 { request.as_bytes() } else { part };
            seen.failed += u64::from(open.stream.write_all(part).await.is_err());
            sleep(Duration::from_micros(random.below(4000) as u64)).await;
            seen.left += 1;
            continue;
        }
        let asked = Instant::now();
        let answer = open.ask(&request).await;
        let (now, took) = (Instant::now(), asked.elapsed());
        match answer {
            Ok((200, body)) => {
                let row: Vec<f32> =
                    body.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
                let is_right = row.len() == question.embedding.len()
                    && distance(&row, &question.embedding) < SAME;
                if !is_right {
                    seen.wrong += 1;
                } else if now >= start && now < end {
                    seen.answered_us.push(took.as_micros() as u32);
                }
            }
            Ok((503, _)) => {
                seen.refused += 1;
                sleep(PAUSE).await;
            }
            Ok(_) | Err(_) => seen.failed += 1,
        }
        connection = answer.is_ok().then_some(open);
    }
    seen
}

/// Of HTTP/1.1, kept alive. An answer has a `content-length`.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    async fn open(addr: &str) -> std::io::Result<Connection> {
        let stream = TcpStream::connect(addr).await?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, buffer: Vec::new() })
    }

    /// The status and the body.
    async fn ask(&mut self, request: &str) -> Result<(u16, &[u8]), Failed> {
        self.stream.write_all(request.as_bytes()).await?;
        self.buffer.clear();
        let mut ends = None;
        loop {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err("the connection was closed".into());
            }
            if ends.is_none()
                && let Some(end) = self.buffer.windows(4).position(|at| at == b"\r\n\r\n")
            {
                let head = str::from_utf8(&self.buffer[..end])?.to_ascii_lowercase();
                let status: u16 = head.get(9..12).ok_or("no status")?.parse()?;
                let len = head.split("content-length:").nth(1).and_then(|rest| rest.lines().next());
                let len: usize = len.ok_or("no content-length")?.trim().parse()?;
                ends = Some((status, end + 4, end + 4 + len));
            }
            if let Some((status, start, end)) = ends
                && self.buffer.len() >= end
            {
                return Ok((status, &self.buffer[start..end]));
            }
        }
    }
}

/// What the server's process has, and the device, with whatever else is on it.
const FIGURES: [(&str, &str); 4] = [
    ("memory", "MB"),
    ("device_memory", "MB"),
    ("threads", "threads"),
    ("descriptors", "descriptors"),
];

/// Those figures; none where no process is to be watched.
fn usage(traffic: &Traffic, device: &Device, when: &str) -> Result<Option<[f64; 4]>, Failed> {
    let Some(pid) = traffic.pid else { return Ok(None) };
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let number = |name: &str| -> Result<f64, Failed> {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        Ok(line.and_then(|line| line.split_whitespace().next()).ok_or("no number")?.parse()?)
    };
    let memory = device.memory()?;
    let device_mb = (memory.total_bytes - memory.free_bytes) as f64 / 1e6;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as f64;
    let usage = [number("VmRSS:")? / 1024.0, device_mb, number("Threads:")?, descriptors];
    println!("# {when}: {usage:.1?} of {FIGURES:?}");
    Ok(Some(usage))
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt()
}

/// Splitmix64: what the seeds give is the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Nearly normal: of twelve numbers the sum.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next() as f64 / u64::MAX as f64).sum::<f64>() - 6.0
    }
}
