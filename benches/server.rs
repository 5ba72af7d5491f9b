//! What does a GPU call cost inside an HTTP server, beside none and beside what people do today?
//!
//! An axum server on half of the cores, with all of its threads, and hyper clients on the other half,
//! so that neither takes time from the other. Keep-alive connections over loopback send one request
//! after the other: 256 floats there, doubled, and back. The same connections ask for each way in
//! turn:
//!
//! | way | the handler |
//! |---|---|
//! | `none` | answers with what it got |
//! | `await` | takes a stream of a `StreamPool`, uploads, launches, awaits the download |
//! | `batched` | asks a `Batcher`, whose batches do the same with all that came meanwhile |
//! | `blocking` | what people do, see below |
//! | `ready` | the best that can be made of that |
//!
//! `blocking` goes through `spawn_blocking` and the bare driver: it allocates, copies, launches,
//! copies, frees and calls `cuStreamSynchronize`, on a stream that no other request has meanwhile, in
//! one of tokio's 512 threads. For `ready` the device memory is there already, and no more than 64
//! requests (`in_flight=K`) come to those threads at once. `await` and `batched` have at most 64
//! requests or batches in flight (`in_flight=K`) on 8 streams (`streams=K`). Host memory is pinned
//! and ready everywhere. The driver waits as it does unless told otherwise.
//!
//! `server.C.*` is for C connections. Each way has 0.6 s, behind 0.2 s to warm up, three times in
//! turn; a figure is the median of the three rounds. A latency is counted if its request began within
//! that time, however long it took; a rate counts what ended within it.
//!
//! Then `server.cancel.*`: 64 connections that ask for `await`, alone (`undisturbed`) and beside
//! 1,000 requests whose connection is dropped at a random moment (`disturbed`). `abandoned` is how
//! many of these were in the middle of their handler, `left` what the device still has when everything
//! has settled: operations in flight, lent bytes, allocations, places in the pool.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::serve::ListenerExt;
use gpu_await::{BatchWorker, Batcher, Device, StreamPool, kernels};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use measure::{Sorted, print, rounds, us, window};
use parking_lot::Mutex;
use raw::{Memory, Raw, Seat};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;

const LEN: usize = 256;
const WINDOW: Duration = Duration::from_millis(600);
const WARM_UP: Duration = Duration::from_millis(200);
const CONNECTIONS: [usize; 3] = [1, 64, 1024];
const CANCELS: usize = 1000;
const SEED: u64 = 0x5EED;
/// Until everything has settled.
const LIMIT: Duration = Duration::from_secs(10);

fn main() {
    more_files();
    let in_flight = measure::number("in_flight").unwrap_or(64).max(1);
    let streams = measure::number("streams").unwrap_or(8).max(1);
    let (server, clients) = halves();
    // What this thread starts, such as the driver's threads and ours, stays where it is.
    pin(&server);
    let raw = measure::on_cuda().then(Raw::load);
    let device = measure::device();
    let (serving, asking) = (runtime_on(server), runtime_on(clients.clone()));
    let app = App::new(&serving, &device, raw, in_flight, streams);
    let address = serving.block_on(serve(app.clone()));
    let mut ways = vec!["none", "await", "batched"];
    if raw.is_some() {
        ways.extend(["blocking", "ready"]);
    }
    for connections in CONNECTIONS {
        let mut clients = asking.block_on(Client::connect(address, connections, app.computes));
        let mut phases: Vec<Vec<Phase>> = ways.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds(3, 1) {
            for (way, phases) in ways.iter().zip(&mut phases) {
                phases.push(Phase::run(&asking, &mut clients, way));
            }
        }
        for (way, phases) in ways.iter().zip(&phases) {
            let name = format!("server.{connections}.{way}");
            print(&format!("{name}.requests_per_s"), median(phases, Phase::rate), "count");
            for (p, percentile) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
                print(&format!("{name}.{p}_us"), percentile_of(phases, percentile), "us");
            }
        }
        if let [_, awaiting, batched, blocking, ready] = &phases[..] {
            for (way, ours) in [("await", awaiting), ("batched", batched)] {
                for (what, theirs) in [("blocking", blocking), ("ready", ready)] {
                    let name = format!("server.{connections}.{way}");
                    let throughput = median(ours, Phase::rate) / median(theirs, Phase::rate);
                    print(&format!("{name}.throughput_over_{what}"), throughput, "ratio");
                    let p99 = percentile_of(ours, 0.99) / percentile_of(theirs, 0.99);
                    print(&format!("{name}.p99_over_{what}"), p99, "ratio");
                }
            }
        }
    }
    cancels(&app, address, &asking, &clients);
}

// ---- the server -----------------------------------------------------------------------------

#[derive(Clone)]
struct App {
    device: Device,
    scale: kernels::scale,
    pool: StreamPool,
    batcher: Batcher<Bytes, Bytes>,
    seats: Option<Seats>,
    /// Whether answers are what the kernel says: a stand-in driver computes nothing.
    computes: bool,
    /// Handlers that were dropped before their end.
    abandoned: Arc<AtomicU64>,
}

/// What `blocking` and `ready` have instead of a pool of streams.
#[derive(Clone)]
struct Seats {
    raw: &'static Raw,
    free: Arc<Mutex<Vec<Seat>>>,
    /// For `ready`.
    permits: Arc<Semaphore>,
}

impl App {
    fn new(
        runtime: &Runtime,
        device: &Device,
        raw: Option<&'static Raw>,
        in_flight: usize,
        streams: usize,
    ) -> Arc<App> {
        let seats = raw.map(|raw| Seats {
            raw,
            free: Arc::default(),
            permits: Arc::new(Semaphore::new(in_flight)),
        });
        let pool = StreamPool::builder().streams(device, streams).max_in_flight(in_flight);
        let pool = pool.max_waiting(2 * CONNECTIONS[2]).build().expect("a pool");
        let scale = runtime.block_on(kernels::scale::load(device)).expect("loads");
        let (batcher, worker) = batcher(&pool, &scale);
        runtime.spawn(worker);
        let (device, abandoned) = (device.clone(), Arc::default());
        let mut app = App { device, scale, pool, batcher, seats, computes: true, abandoned };
        let answer = runtime.block_on(app.scale(&floats(1.0))).expect("a round trip");
        app.computes = answer == floats(2.0);
        assert!(app.computes || measure::is_smoke(), "the device computes something else");
        if !app.computes {
            eprintln!("# the driver computes nothing: answers are not checked");
        }
        Arc::new(app)
    }

    async fn scale(&self, values: &[u8]) -> gpu_await::Result<Bytes> {
        let stream = self.pool.acquire().await?;
        // A body is aligned to nothing.
        let mut pinned = stream.pinned::<f32>(values.len() / 4)?;
        bytemuck::cast_slice_mut(&mut pinned).copy_from_slice(values);
        let mut x = stream.upload(pinned).queued()?;
        self.scale.launch(&stream, 2.0, &mut x).queued()?;
        let x = stream.download(&x).await?;
        Ok(Bytes::copy_from_slice(bytemuck::cast_slice(&x)))
    }
}

/// Doubles the floats of all requests of a batch with one upload, one launch and one download.
fn batcher(pool: &StreamPool, scale: &kernels::scale) -> (Batcher<Bytes, Bytes>, BatchWorker) {
    let (pool, scale) = (pool.clone(), scale.clone());
    let builder = Batcher::builder().max_len(64).max_in_flight(4).max_waiting(2 * CONNECTIONS[2]);
    builder.build(move |requests: Vec<Bytes>| {
        let (pool, scale) = (pool.clone(), scale.clone());
        async move {
            let stream = pool.acquire().await?;
            let mut pinned = stream.pinned::<f32>(LEN * requests.len())?;
            for (row, request) in pinned.as_chunks_mut::<LEN>().0.iter_mut().zip(&requests) {
                bytemuck::cast_slice_mut(row).copy_from_slice(request);
            }
            let mut x = stream.upload(pinned).queued()?;
            scale.launch(&stream, 2.0, &mut x).queued()?;
            let x = stream.download(&x).await?;
            let rows = x.as_chunks::<LEN>().0.iter();
            Ok(rows.map(|row| Ok(Bytes::copy_from_slice(bytemuck::cast_slice(row)))).collect())
        }
    })
}

/// Serves from now on, at the address that it returns.
async fn serve(app: Arc<App>) -> SocketAddr {
    let router = Router::new()
        .route("/none", post(async |body: Bytes| body))
        .route("/await", post(awaiting))
        .route("/batched", post(batched))
        .route("/blocking", post(blocking))
        .route("/ready", post(ready))
        .with_state(app);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).expect("a socket"));
    tokio::spawn(axum::serve(listener, router).into_future());
    address
}

async fn awaiting(State(app): State<Arc<App>>, body: Bytes) -> Result<Bytes, StatusCode> {
    let begun = Begun(&app.abandoned);
    let answer = app.scale(&body).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR);
    std::mem::forget(begun);
    answer
}

/// A handler that has not ended; counted if it never does.
struct Begun<'a>(&'a AtomicU64);

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

async fn batched(State(app): State<Arc<App>>, body: Bytes) -> Result<Bytes, StatusCode> {
    app.batcher.call(body).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

async fn blocking(State(app): State<Arc<App>>, body: Bytes) -> Result<Bytes, StatusCode> {
    let seats = app.seats.clone().ok_or(StatusCode::NOT_FOUND)?;
    Ok(seats.scale(body, Memory::Fresh).await)
}

async fn ready(State(app): State<Arc<App>>, body: Bytes) -> Result<Bytes, StatusCode> {
    let seats = app.seats.clone().ok_or(StatusCode::NOT_FOUND)?;
    let permit = seats.permits.clone().acquire_owned().await.expect("never closed");
    let answer = seats.scale(body, Memory::Ready).await;
    drop(permit);
    Ok(answer)
}

impl Seats {
    async fn scale(self, body: Bytes, memory: Memory) -> Bytes {
        let blocking = tokio::task::spawn_blocking(move || {
            let free = self.free.lock().pop();
            let mut seat = free.unwrap_or_else(|| Seat::new(self.raw, LEN));
            let answer = seat.scale(2.0, &body, memory);
            self.free.lock().push(seat);
            answer
        });
        blocking.await.expect("no panic").into()
    }
}

// ---- the clients ----------------------------------------------------------------------------

/// A connection, and what it asks.
struct Client {
    sender: SendRequest<Full<Bytes>>,
    body: Bytes,
    doubled: Bytes,
    checks: bool,
}

impl Client {
    async fn connect(address: SocketAddr, count: usize, checks: bool) -> Vec<Client> {
        let mut clients = Vec::new();
        for number in 0..count {
            let stream = TcpStream::connect(address).await.expect("connects");
            stream.set_nodelay(true).expect("a socket");
            let (sender, connection) = handshake(TokioIo::new(stream)).await.expect("HTTP");
            tokio::spawn(connection);
            let first = (1 + number) as f32;
            let (body, doubled) = (floats(first), floats(2.0 * first));
            clients.push(Client { sender, body, doubled, checks });
        }
        clients
    }

    async fn ask(&mut self, way: &str) {
        let request = Request::post(format!("/{way}")).header("host", "loopback");
        let request = request.body(Full::new(self.body.clone())).expect("a request");
        self.sender.ready().await.expect("the connection lasts");
        let answer = self.sender.send_request(request).await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK, "{way}");
        let answer = answer.into_body().collect().await.expect("a body").to_bytes();
        let expected = if way == "none" { &self.body } else { &self.doubled };
        // Comparing a kibibyte costs nothing beside the rest: every answer is a sample.
        assert!(!self.checks || answer == expected, "{way} gave another answer");
    }
}

/// What one way was asked by all connections.
struct Phase {
    latencies: Sorted,
    ended: u64,
}

impl Phase {
    fn run(asking: &Runtime, clients: &mut Vec<Client>, way: &'static str) -> Phase {
        let begin = Instant::now() + window(WARM_UP);
        let end = begin + window(WINDOW);
        let asked = clients.drain(..).map(|mut client| {
            asking.spawn(async move {
                let (mut latencies, mut ended) = (Vec::new(), 0);
                loop {
                    let start = Instant::now();
                    client.ask(way).await;
                    let now = Instant::now();
                    if start >= begin {
                        latencies.push(us(now - start));
                    }
                    ended += u64::from(now >= begin && now < end);
                    // One at least, however short the window of a smoke test.
                    if now >= end && !latencies.is_empty() {
                        return (client, latencies, ended);
                    }
                }
            })
        });
        let (mut latencies, mut ended) = (Vec::new(), 0);
        for asked in asked.collect::<Vec<_>>() {
            let (client, its_latencies, its_ended) = asking.block_on(asked).expect("no panic");
            clients.push(client);
            latencies.extend(its_latencies);
            ended += its_ended;
        }
        // Of a smoke test that got no answer in time.
        Phase { latencies: Sorted::new(latencies), ended: ended.max(1) }
    }

    fn rate(&self) -> f64 {
        self.ended as f64 / window(WINDOW).as_secs_f64()
    }
}

fn median(phases: &[Phase], of: impl Fn(&Phase) -> f64) -> f64 {
    Sorted::new(phases.iter().map(of).collect()).p50()
}

fn percentile_of(phases: &[Phase], percentile: f64) -> f64 {
    median(phases, |phase| phase.latencies.percentile(percentile))
}

// ---- cancellation ---------------------------------------------------------------------------

fn cancels(app: &App, address: SocketAddr, asking: &Runtime, cores: &[usize]) {
    let mut clients = asking.block_on(Client::connect(address, 64, app.computes));
    let (mut undisturbed, mut disturbed) = (Vec::new(), Vec::new());
    for round in 0..rounds(3, 1) as u64 {
        let phase = Phase::run(asking, &mut clients, "await");
        let usual = phase.latencies.p50();
        undisturbed.push(phase);
        let cores = cores.to_vec();
        let canceller = std::thread::spawn(move || {
            pin(&cores);
            cancel(address, usual, SEED + round);
        });
        disturbed.push(Phase::run(asking, &mut clients, "await"));
        canceller.join().expect("no panic");
    }
    let (undisturbed, disturbed) =
        (percentile_of(&undisturbed, 0.99), percentile_of(&disturbed, 0.99));
    print("server.cancel.undisturbed_p99_us", undisturbed, "us");
    print("server.cancel.disturbed_p99_us", disturbed, "us");
    print("server.cancel.p99_ratio", disturbed / undisturbed, "ratio");
    let end = Instant::now() + LIMIT;
    while left(app) > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    let abandoned = app.abandoned.load(Ordering::Relaxed);
    print("server.cancel.abandoned", abandoned as f64, "count");
    print("server.cancel.left", left(app) as f64, "count");
}

/// Sends requests whose connections are dropped up to twice the usual time later. On a thread of its
/// own: tokio's timers count milliseconds.
fn cancel(address: SocketAddr, usual_us: f64, seed: u64) {
    let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let (first, every) = (Instant::now() + window(WARM_UP), WINDOW / CANCELS as u32);
    let body = floats(1.0);
    let head = format!("POST /await HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
    let request = [head.as_bytes(), &body].concat();
    let mut open = Vec::new();
    for number in 0..rounds(CANCELS, CANCELS / 50) as u32 {
        let due = first + number * every;
        while Instant::now() < due {
            drop_due(&mut open);
        }
        let mut connection = std::net::TcpStream::connect(address).expect("connects");
        connection.write_all(&request).expect("sends");
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let part = (random >> 11) as f64 / (1u64 << 53) as f64;
        open.push((
            Instant::now() + Duration::from_secs_f64(2.0 * usual_us * part / 1e6),
            connection,
        ));
    }
    while !open.is_empty() {
        drop_due(&mut open);
    }
}

/// Drops the connections whose time has come, and rests for a moment.
fn drop_due(open: &mut Vec<(Instant, std::net::TcpStream)>) {
    let now = Instant::now();
    open.retain(|(until, _)| *until > now);
    std::thread::sleep(Duration::from_micros(10));
}

fn left(app: &App) -> u64 {
    let stats = app.device.stats();
    stats.in_flight + stats.lent_bytes + stats.allocations + app.pool.stats().in_flight as u64
}

// ---- what both sides need -------------------------------------------------------------------

/// `LEN` floats: `first`, and each as much more.
fn floats(first: f32) -> Bytes {
    let floats: Vec<f32> = (0..LEN).map(|i| first * (1 + i) as f32).collect();
    Bytes::copy_from_slice(bytemuck::cast_slice(&floats))
}

/// The cores that this process may use: the server's, the clients'. The same one, if it is the only.
fn halves() -> (Vec<usize>, Vec<usize>) {
    // SAFETY: all zeros is a valid set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is live and as long as said.
    let code = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
    assert_eq!(code, 0, "the cores of this process");
    // SAFETY: within the set.
    let mine = |core: &usize| unsafe { libc::CPU_ISSET(*core, &set) };
    let mut cores: Vec<usize> = (0..libc::CPU_SETSIZE as usize).filter(mine).collect();
    let clients = cores.split_off(cores.len().div_ceil(2));
    if clients.is_empty() { (cores.clone(), cores) } else { (cores, clients) }
}

/// Keeps the calling thread, and those that it starts, on some cores.
fn pin(cores: &[usize]) {
    // SAFETY: all zeros is a valid set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for core in cores {
        // SAFETY: `halves` found it in a set of this size.
        unsafe { libc::CPU_SET(*core, &mut set) };
    }
    // SAFETY: `set` is live and as long as said.
    let code = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    assert_eq!(code, 0, "these are cores of this process");
}

/// A runtime with a worker on each of some cores, and its blocking threads there as well.
fn runtime_on(cores: Vec<usize>) -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(cores.len()).on_thread_start(move || pin(&cores));
    builder.enable_all().build().expect("a runtime")
}

/// A thousand connections have two ends each in this process, and 1,024 files is what many systems
/// give at first.
fn more_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is live and of the type that the call fills.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is live; no more than the maximum is asked for.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert!(limit.rlim_max >= 4096, "no more than {} files may be open", limit.rlim_max);
}
