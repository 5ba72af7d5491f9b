//! A GPU service that goes on when the GPU faults: an HTTP server whose requests are computed in a worker, one of which faults.
//!
//!     cargo run -p gpu-await-worker --example 17_worker             # shows itself: asks, faults, asks again
//!     cargo run -p gpu-await-worker --example 17_worker -- 8080     # serves http://127.0.0.1:8080/double/21, /fault, /endless, /healthz, /stats
//!
//! It takes the first GPU, or the host device where there is none. The front process opens no device: what `/fault` ends is the worker's
//! process. The next one maps the weights where the last one left them, on the GPU, and answers.

use std::time::{Duration, Instant};

use gpu_await::{Frozen, Grid, LaunchConfig, Stream, kernel};
use gpu_await_worker::{Error, Failure, Host, Payloads, Service, Worker, gpus, init, kept};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

const WEIGHTS: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(1);

kernel! {
    /// `y = weights * x`, element by element.
    unsafe fn scale(x: f32, weights: &[f32], y: &mut [f32]) where weights.len() == y.len();
    launch = LaunchConfig::for_elements(y.len());
    ptx = include_str!("17_worker.ptx");
    host = twin::scale;
}

kernel! {
    /// Writes where there is no memory, or never ends.
    unsafe fn faulty(endless: u32, y: &mut [f32]);
    launch = LaunchConfig::new(1, 1);
    ptx = include_str!("17_worker.ptx");
    host = twin::faulty;
}

mod twin {
    use super::Grid;

    pub(super) fn scale(_: &Grid, x: f32, weights: &[f32], y: &mut [f32]) {
        y.iter_mut().zip(weights).for_each(|(y, weight)| *y = weight * x);
    }

    pub(super) fn faulty(_: &Grid, endless: u32, _: &mut [f32]) {
        if endless != 0 {
            std::thread::sleep(std::time::Duration::MAX);
        }
        panic!("an illegal address");
    }
}

/// What runs in the worker's process.
struct Model {
    stream: Stream,
    weights: Frozen<f32>,
    scale: scale,
    faulty: faulty,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum Ask {
    Double(f32),
    Fault,
    Endless,
}

impl Service for Model {
    type Config = ();
    type Request = Ask;
    type Response = f32;

    async fn start((): (), host: &Host) -> Result<Self, Failure> {
        // Loaded by the first process alone.
        let weights = host.keep("weights", WEIGHTS, async |weights| {
            println!("loading weights");
            let (device, loaded) = (weights.device().clone(), vec![2.0f32; WEIGHTS]);
            let loaded = device.upload(loaded).queued()?;
            device.copy(&loaded, weights.memory()).await?;
            Ok(())
        });
        let device = host.device();
        Ok(Model {
            weights: weights.await?,
            stream: device.stream()?,
            scale: scale::load(device).await?,
            faulty: faulty::load(device).await?,
        })
    }

    async fn call(&self, ask: Ask, _: &mut Payloads) -> Result<f32, Failure> {
        let mut y = self.stream.zeros::<f32>(WEIGHTS).queued()?;
        match ask {
            Ask::Double(x) => self.scale.launch(&self.stream, x, &self.weights, &mut y).queued()?,
            Ask::Fault => self.faulty.launch(&self.stream, 0, &mut y).queued()?,
            Ask::Endless => self.faulty.launch(&self.stream, 1, &mut y).queued()?,
        }
        Ok(self.stream.download(&y.slice(WEIGHTS - 1..)?).await?[0])
    }
}

/// The first statement: in a worker's process `init` serves, and never returns.
fn main() {
    init::<Model>();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(front()).expect("the server runs");
}

async fn front() -> Result<(), Box<dyn std::error::Error>> {
    let mut builder = Worker::<Model>::builder(());
    if let Some(gpu) = gpus()?.first() {
        println!("on {} ({})", gpu.name, gpu.uuid);
        builder = builder.gpu(gpu.uuid.clone());
    }
    let worker = builder.spawn().await?;
    let port = std::env::args().nth(1).map_or(Ok(0), |port| port.parse::<u16>())?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}");
    let server = tokio::spawn(serve(listener, worker.clone()));
    if port != 0 {
        return Ok(server.await??);
    }
    let paths =
        ["/double/21", "/fault", "/healthz", "/double/21", "/endless", "/double/21", "/stats"];
    for path in paths {
        let begun = Instant::now();
        let answer = get(&address.to_string(), path).await?;
        println!("{path:<11} {:>5} ms  {answer}", begun.elapsed().as_millis());
    }
    for kept in kept() {
        println!("kept all the while: {}, {} elements", kept.name, kept.info.len);
    }
    worker.close(LIMIT).await;
    Ok(())
}

async fn serve(listener: TcpListener, worker: Worker<Model>) -> std::io::Result<()> {
    loop {
        let (connection, _) = listener.accept().await?;
        tokio::spawn(answer(connection, worker.clone()));
    }
}

/// One request a connection: enough to show what happens to it.
async fn answer(connection: TcpStream, worker: Worker<Model>) -> std::io::Result<()> {
    let mut connection = BufReader::new(connection);
    let mut line = String::new();
    connection.read_line(&mut line).await?;
    let path = line.split(' ').nth(1).unwrap_or("/");
    if path == "/healthz" {
        // Not while the next process starts: a load balancer asks another server meanwhile.
        let health = worker.health();
        let status = if health.is_serving() { "200 OK" } else { "503 Unavailable" };
        return reply(connection, status, &health.to_string()).await;
    }
    // A doubling may run again; what a client sends to break it may not.
    let call = match path.strip_prefix("/double/").map(str::parse) {
        Some(Ok(x)) => worker.call(Ask::Double(x)).idempotent(),
        _ if path == "/fault" => worker.call(Ask::Fault),
        _ if path == "/endless" => worker.call(Ask::Endless),
        _ => return reply(connection, "200 OK", &stats(&worker)).await,
    };
    match call.within(LIMIT).deadline(20 * LIMIT).await {
        Ok(y) => reply(connection, "200 OK", &y.to_string()).await,
        Err(Error::Lost(lost)) => reply(connection, "500 Worker Lost", &lost.to_string()).await,
        Err(error) => reply(connection, "503 Unavailable", &error.to_string()).await,
    }
}

fn stats(worker: &Worker<Model>) -> String {
    let stats = worker.stats();
    format!("{} answered, {} deaths, {:?}", stats.answered, stats.deaths, stats.last_start)
}

async fn reply(mut to: BufReader<TcpStream>, status: &str, body: &str) -> std::io::Result<()> {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    to.write_all((head + body).as_bytes()).await?;
    to.shutdown().await
}

async fn get(address: &str, path: &str) -> std::io::Result<String> {
    let mut connection = TcpStream::connect(address).await?;
    connection.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await?;
    let mut text = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut connection, &mut text).await?;
    Ok(text.split_once("\r\n\r\n").map_or(text.clone(), |(_, body)| body.to_owned()))
}
