//! Is an HTTP request of ten small kernels cheaper when they are replayed as a graph?
//!
//! A server and clients as in `server.rs`: 256 floats there, ten kernels, and back. The kernels' factors differ from request to
//! request. The same connections ask for each way in turn:
//!
//! | way | the handler |
//! |---|---|
//! | `batch` | takes a stream of a `StreamPool`: upload, ten launches and download in one batch |
//! | `replay` | the same as a replayed batch, with a `Region` for each stream |
//! | `mapped_graph` | copies the request into memory that the kernels use in place, and launches a `Graph` of the ten |
//! | `raw` | the best of what people do: `spawn_blocking`, the bare driver's calls, memory kept ready, `cuStreamSynchronize` |
//!
//! At most 64 requests are on the device at once (`in_flight=K`), on 8 streams (`streams=K`). `server_ten_kernels.C.*` is for C
//! connections; the windows and rounds are those of `server.rs`. `WAY.ratio` is requests a second over those of `batch`.

#[path = "http.rs"]
mod http;
#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use gpu_await::{
    Device, Graph, InOut, Mapped, PooledStream, Queue, Region, Result, StreamPool, Writable,
    kernels,
};
use http::{
    Client, FreeMapped, LEN, Phase, halves, listen, median, more_files, percentile_of, pin,
    runtime_on,
};
use measure::{print, rounds};
use parking_lot::Mutex;
use raw::{Memory, Raw, Seat};
use tokio::sync::Semaphore;

const CONNECTIONS: [usize; 2] = [64, 1024];
const KERNELS: usize = 10;

struct App {
    pool: StreamPool,
    scale: kernels::scale,
    graph: Graph<(InOut<f32>, f32)>,
    /// By the stream's number.
    regions: Mutex<HashMap<u64, Arc<Mutex<Region>>>>,
    mapped: FreeMapped,
    raw: Option<&'static Raw>,
    seats: Arc<Mutex<Vec<Seat>>>,
    permits: Arc<Semaphore>,
    requests: AtomicU32,
}

/// Their product is 2.
fn factors(first: f32) -> [f32; KERNELS] {
    let (a, b) = (first, 1.0 / first);
    [a, b, a, b, a, b, a, b, 1.0, 2.0]
}

fn ten(
    scale: &kernels::scale,
    q: &Queue<'_>,
    first: f32,
    x: &mut impl Writable<f32>,
) -> Result<()> {
    factors(first).into_iter().try_for_each(|factor| scale.launch(q, factor, x))
}

impl App {
    fn new(device: &Device, raw: Option<&'static Raw>, in_flight: usize, streams: usize) -> App {
        let scale = kernels::scale::load_blocking(device).expect("the kernel");
        let pool = StreamPool::builder().streams(device, streams).max_in_flight(in_flight);
        App {
            pool: pool.max_waiting(2 * CONNECTIONS[1]).build().expect("a pool"),
            graph: device
                .graph(scale.clone(), |q, scale, (mut x, first)| ten(scale, q, first, &mut x)),
            scale,
            regions: Mutex::default(),
            mapped: FreeMapped::new(device),
            raw,
            seats: Arc::default(),
            permits: Arc::new(Semaphore::new(in_flight)),
            requests: AtomicU32::new(0),
        }
    }

    /// A power of two, another one from request to request.
    fn first(&self) -> f32 {
        (1 << (self.requests.fetch_add(1, Ordering::Relaxed) % 16)) as f32
    }

    fn region(&self, stream: &PooledStream) -> Arc<Mutex<Region>> {
        self.regions.lock().entry(stream.id()).or_default().clone()
    }

    async fn batch(&self, body: &[u8]) -> Result<Bytes> {
        let stream = self.pool.acquire().await?;
        let mut pinned = stream.pinned::<f32>(LEN)?;
        bytemuck::cast_slice_mut(&mut pinned).copy_from_slice(body);
        let answer = stream.batch(|q| {
            let mut x = q.upload(pinned)?;
            ten(&self.scale, q, self.first(), &mut x)?;
            q.download(&x)
        });
        Ok(Bytes::copy_from_slice(bytemuck::cast_slice(&answer.await?)))
    }

    async fn replay(&self, body: &[u8]) -> Result<Bytes> {
        let stream = self.pool.acquire().await?;
        let mut pinned = stream.pinned::<f32>(LEN)?;
        bytemuck::cast_slice_mut(&mut pinned).copy_from_slice(body);
        let answer = stream.replay(&mut self.region(&stream).lock(), |q| {
            let mut x = q.upload(pinned)?;
            ten(&self.scale, q, self.first(), &mut x)?;
            q.download(&x)
        });
        Ok(Bytes::copy_from_slice(bytemuck::cast_slice(&answer.await?)))
    }

    async fn mapped_graph(&self, body: &[u8]) -> Result<Bytes> {
        let stream = self.pool.acquire().await?;
        let launch =
            |mapped: &mut Mapped<f32>| self.graph.launch(&stream, (mapped, self.first())).queued();
        self.mapped.answer(body, launch).await
    }

    async fn raw(&self, body: Bytes) -> Option<Bytes> {
        let (raw, seats, factors) = (self.raw?, self.seats.clone(), factors(self.first()));
        let permit = self.permits.clone().acquire_owned().await.expect("never closed");
        let answer = tokio::task::spawn_blocking(move || {
            let free = seats.lock().pop();
            let mut seat = free.unwrap_or_else(|| Seat::new(raw, LEN));
            let answer = seat.scale(&factors, &body, Memory::Ready);
            seats.lock().push(seat);
            drop(permit);
            answer
        });
        Some(answer.await.expect("no panic").into())
    }
}

fn answered(answer: Result<Bytes>) -> std::result::Result<Bytes, StatusCode> {
    answer.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

fn routes(app: Arc<App>) -> Router {
    type Shared = State<Arc<App>>;
    Router::new()
        .route("/batch", post(async |app: Shared, body: Bytes| answered(app.batch(&body).await)))
        .route("/replay", post(async |app: Shared, body: Bytes| answered(app.replay(&body).await)))
        .route(
            "/mapped_graph",
            post(async |app: Shared, body: Bytes| answered(app.mapped_graph(&body).await)),
        )
        .route(
            "/raw",
            post(async |app: Shared, body: Bytes| app.raw(body).await.ok_or(StatusCode::NOT_FOUND)),
        )
        .with_state(app)
}

fn main() {
    more_files();
    let in_flight = measure::number("in_flight").unwrap_or(64).max(1);
    let streams = measure::number("streams").unwrap_or(8).max(1);
    let (server, clients) = halves();
    pin(&server);
    let raw = measure::on_cuda().then(Raw::load);
    let app = Arc::new(App::new(&measure::device(), raw, in_flight, streams));
    let (serving, asking) = (runtime_on(server), runtime_on(clients));
    let [body, doubled] = [1.0, 2.0].map(http::floats);
    let computes = serving.block_on(app.batch(&body)).expect("an answer") == doubled;
    assert!(computes || measure::is_smoke(), "the device computes something else");
    if !computes {
        eprintln!("# the driver computes nothing: answers are not checked");
    }
    let address = serving.block_on(listen(routes(app)));
    let mut ways = vec!["batch", "replay", "mapped_graph"];
    ways.extend(raw.map(|_| "raw"));
    for connections in CONNECTIONS {
        let mut clients = asking.block_on(Client::connect(address, connections, computes));
        let mut phases: Vec<Vec<Phase>> = ways.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds(3, 1) {
            for (way, phases) in ways.iter().zip(&mut phases) {
                phases.push(Phase::run(&asking, &mut clients, way));
            }
        }
        let batch = median(&phases[0], Phase::rate);
        for (way, phases) in ways.iter().zip(&phases) {
            let name = format!("server_ten_kernels.{connections}.{way}");
            let rate = median(phases, Phase::rate);
            print(&format!("{name}.requests_per_s"), rate, "count");
            print(&format!("{name}.p50_us"), percentile_of(phases, 0.5), "us");
            print(&format!("{name}.p99_us"), percentile_of(phases, 0.99), "us");
            if *way != "batch" {
                print(&format!("{name}.ratio"), rate / batch, "ratio");
            }
        }
    }
}
