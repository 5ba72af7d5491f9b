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
//! | `mapped` | takes a stream, copies the request into memory that the kernel uses in place, and awaits that |
//! | `batched` | asks a `Batcher`, whose batches take a stream and do what `await` does with all that came meanwhile, each in a task of its own (`in_place=1`: all in the worker's) |
//! | `blocking` | what people do, see below |
//! | `ready` | the best that can be made of that |
//!
//! `blocking` goes through `spawn_blocking` and the bare driver: it allocates, copies, launches,
//! copies, frees and calls `cuStreamSynchronize`, on a stream that no other request has meanwhile, in
//! one of tokio's 512 threads. For `ready` the device memory is there already, and no more than 64
//! requests (`in_flight=K`) come to those threads at once. The others have at most 64
//! requests or batches in flight (`in_flight=K`) on 8 streams (`streams=K`). Host memory is pinned
//! and ready everywhere. The driver waits as it does unless told otherwise.
//!
//! `server.C.*` is for C connections (`connections=C`: for these alone; `way=K`: one of the ways, from 0). Each way has 0.6 s, behind 0.2 s to warm up, three times in
//! turn; a figure is the median of the three rounds. A latency is counted if its request began within
//! that time, however long it took; a rate counts what ended within it.
//!
//! Then `server.cancel.*`: 64 connections that ask for `await`, alone (`undisturbed`) and beside
//! 1,000 requests whose connection is dropped at a random moment (`disturbed`). `abandoned` is how
//! many of these were in the middle of their handler, `left` what the device still has when everything
//! has settled: operations in flight, lent bytes, allocations, places in the pool.

#[path = "http.rs"]
mod http;
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
use gpu_await::{Batch, BatchWorker, Batcher, Device, StreamPool, kernels};
use http::{
    Client, FreeMapped, LEN, Phase, WARM_UP, WINDOW, floats, halves, listen, median, more_files,
    percentile_of, pin, runtime_on,
};
use measure::{print, rounds, window};
use parking_lot::Mutex;
use raw::{Memory, Raw, Seat};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

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
    let mut ways = vec!["none", "await", "mapped", "batched"];
    if raw.is_some() {
        ways.extend(["blocking", "ready"]);
    }
    if let Some(way) = measure::number("way") {
        ways = vec![ways[way]];
    }
    let only = measure::number("connections");
    for connections in CONNECTIONS.into_iter().filter(|count| only.is_none_or(|c| c == *count)) {
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
        if let [_, awaiting, mapped, batched, blocking, ready] = &phases[..] {
            for (way, ours) in [("await", awaiting), ("mapped", mapped), ("batched", batched)] {
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
    mapped: FreeMapped,
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
        let mapped = FreeMapped::new(&device);
        let mut app =
            App { device, scale, pool, batcher, mapped, seats, computes: true, abandoned };
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
        http::doubled(&stream, &self.scale, values).await
    }

    async fn scale_in_place(&self, values: &[u8]) -> gpu_await::Result<Bytes> {
        let stream = self.pool.acquire().await?;
        let launch = |mapped: &mut _| self.scale.launch(&stream, 2.0, mapped).queued();
        self.mapped.answer(values, launch).await
    }
}

/// Doubles the floats of all requests of a batch with one upload, one launch and one download.
fn batcher(pool: &StreamPool, scale: &kernels::scale) -> (Batcher<Bytes, Bytes>, BatchWorker) {
    let scale = scale.clone();
    let builder = Batcher::builder().max_len(64).max_in_flight(4).max_waiting(2 * CONNECTIONS[2]);
    let builder = match measure::number("in_place") {
        Some(_) => builder,
        None => builder.spawn(|batch| drop(tokio::spawn(batch))),
    };
    builder.pool(pool).build(move |stream, requests: Batch<Bytes>| {
        let scale = scale.clone();
        async move {
            let mut pinned = stream.pinned::<f32>(LEN * requests.len())?;
            for (row, request) in pinned.as_chunks_mut::<LEN>().0.iter_mut().zip(&*requests) {
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
        .route("/mapped", post(mapped))
        .route("/batched", post(batched))
        .route("/blocking", post(blocking))
        .route("/ready", post(ready))
        .with_state(app);
    listen(router).await
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

async fn mapped(State(app): State<Arc<App>>, body: Bytes) -> Result<Bytes, StatusCode> {
    app.scale_in_place(&body).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
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
            let answer = seat.scale(&[2.0], &body, memory);
            self.free.lock().push(seat);
            answer
        });
        blocking.await.expect("no panic").into()
    }
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
