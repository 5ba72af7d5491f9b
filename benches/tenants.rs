//! What does an HTTP service wait for beside a batch tenant on the same GPU?
//!
//! An axum server on half of the cores, and 64 keep-alive connections from the other half: 256 floats there, doubled by a kernel, and back,
//! on a stream of a `StreamPool`. The tenant launches kernels whose blocks run for 2 ms and fill the multiprocessors of its stream, a few
//! launches ahead.
//!
//! | phase | the streams of the service | the tenant |
//! |---|---|---|
//! | `alone` | in a partition of 16 multiprocessors | none |
//! | `partition` | in that partition | in a partition of the rest |
//! | `priority` | anywhere, with the highest priority | anywhere, with the lowest |
//!
//! Each has 0.6 s, behind 0.2 s to warm up, three times in turn; a figure is the median of the three rounds.

#[path = "hog.rs"]
mod hog;
#[path = "http.rs"]
mod http;
#[path = "measure.rs"]
mod measure;

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use gpu_await::{Device, Partition, StreamPool, kernels};
use hog::{Hog, spin};
use http::{
    Client, Phase, floats, halves, listen, median, more_files, percentile_of, pin, runtime_on,
};
use measure::{print, rounds};
use tokio::runtime::Runtime;

const CONNECTIONS: usize = 64;
const STREAMS: usize = 8;
const PHASES: [&str; 3] = ["alone", "partition", "priority"];

/// The service: a pool in its partition, and one of high priority.
struct Service {
    scale: kernels::scale,
    inside: StreamPool,
    first: StreamPool,
}

impl Service {
    fn new(runtime: &Runtime, device: &Device, partition: &Partition) -> Service {
        let pool = || StreamPool::builder().max_in_flight(CONNECTIONS);
        Service {
            scale: runtime.block_on(kernels::scale::load(device)).expect("loads"),
            inside: pool().streams_in(partition, STREAMS).build().expect("a pool"),
            first: pool().high_priority_streams(device, STREAMS).build().expect("a pool"),
        }
    }

    async fn answer(&self, phase: &str, values: &[u8]) -> gpu_await::Result<Bytes> {
        let pool = if phase == "priority" { &self.first } else { &self.inside };
        let stream = pool.acquire().await?;
        http::doubled(&stream, &self.scale, values).await
    }
}

async fn answer(
    State(service): State<Arc<Service>>,
    Path(phase): Path<String>,
    body: Bytes,
) -> Result<Bytes, StatusCode> {
    let answer = service.answer(&phase, &body).await;
    answer.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

fn main() {
    more_files();
    let (server, clients) = halves();
    // What this thread starts, such as the driver's threads and ours, stays where it is.
    pin(&server);
    let device = measure::device();
    let (serving, asking) = (runtime_on(server), runtime_on(clients));
    let spin = serving.block_on(spin::load(&device)).expect("loads");
    let all = device.multiprocessors();
    let reserved = |multiprocessors| serving.block_on(device.reserve_partition(multiprocessors));
    let small = reserved(16.min(all / 2).max(1)).expect("multiprocessors");
    let rest = reserved(all - small.multiprocessors()).ok();
    let service = Arc::new(Service::new(&serving, &device, &small));
    let computes = serving.block_on(service.answer("alone", &floats(1.0))).expect("an answer");
    let computes = computes == floats(2.0);
    assert!(computes || measure::is_smoke(), "the device computes something else");
    let router = Router::new().route("/{phase}", post(answer)).with_state(service);
    let address = serving.block_on(listen(router));
    let mut clients = asking.block_on(Client::connect(address, CONNECTIONS, computes));
    let mut phases: [Vec<Phase>; 3] = Default::default();
    for _ in 0..rounds(3, 1) {
        for (name, phases) in PHASES.into_iter().zip(&mut phases) {
            let tenant = match (name, &rest) {
                ("partition", Some(rest)) => Some(rest.stream()),
                ("priority", _) => {
                    let lowest = device.priority_range().0;
                    Some(device.stream_builder().priority(lowest).build())
                }
                _ => None,
            };
            let tenant =
                tenant.map(|stream| Hog::start(&serving, &spin, vec![stream.expect("made")]));
            phases.push(Phase::run(&asking, &mut clients, name));
            if let Some(tenant) = tenant {
                tenant.stop(&serving, &device);
            }
        }
    }
    for (name, phases) in PHASES.into_iter().zip(&phases) {
        print(&format!("tenants.{name}.requests_per_s"), median(phases, Phase::rate), "count");
        for (p, percentile) in [("p50", 0.5), ("p99", 0.99)] {
            print(&format!("tenants.{name}.{p}_us"), percentile_of(phases, percentile), "us");
        }
    }
    let [alone, partition, priority] = phases.map(|phases| percentile_of(&phases, 0.99));
    print("tenants.partition.p99_over_alone", partition / alone, "ratio");
    print("tenants.priority.p99_over_partition", priority / partition, "ratio");
}
