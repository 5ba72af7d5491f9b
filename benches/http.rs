//! What benches of HTTP servers share: clients on cores of their own, and what their requests took.
#![allow(dead_code, reason = "each bench uses a part of it")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::serve::ListenerExt;
use gpu_await::{Device, Mapped, Stream, kernels};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};

use super::measure::{Sorted, us, window};

pub(crate) const LEN: usize = 256;
pub(crate) const WINDOW: Duration = Duration::from_millis(600);
pub(crate) const WARM_UP: Duration = Duration::from_millis(200);

/// Memory that kernels use in place, which no request has.
#[derive(Clone)]
pub(crate) struct FreeMapped {
    device: Device,
    free: Arc<Mutex<Vec<Mapped<f32>>>>,
}

impl FreeMapped {
    pub(crate) fn new(device: &Device) -> Self {
        FreeMapped { device: device.clone(), free: Arc::default() }
    }

    /// Answers a request by what `launch` does to its values.
    pub(crate) async fn answer(
        &self,
        request: &[u8],
        launch: impl FnOnce(&mut Mapped<f32>) -> gpu_await::Result<()>,
    ) -> gpu_await::Result<Bytes> {
        let kept = self.free.lock().pop();
        let mut mapped = match kept {
            Some(mapped) => mapped,
            None => self.device.pinned(LEN)?.into_mapped(),
        };
        bytemuck::cast_slice_mut(mapped.host().await?).copy_from_slice(request);
        launch(&mut mapped)?;
        let answer = Bytes::copy_from_slice(bytemuck::cast_slice(mapped.host().await?));
        self.free.lock().push(mapped);
        Ok(answer)
    }
}

/// Answers a request: up, doubled, and down.
pub(crate) async fn doubled(
    stream: &Stream,
    scale: &kernels::scale,
    values: &[u8],
) -> gpu_await::Result<Bytes> {
    // A body is aligned to nothing.
    let mut pinned = stream.pinned::<f32>(values.len() / 4)?;
    bytemuck::cast_slice_mut(&mut pinned).copy_from_slice(values);
    let mut x = stream.upload(pinned).queued()?;
    scale.launch(stream, 2.0, &mut x).queued()?;
    let x = stream.download(&x).await?;
    Ok(Bytes::copy_from_slice(bytemuck::cast_slice(&x)))
}

/// Serves from now on, at the address that it returns.
pub(crate) async fn listen(router: Router) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).expect("a socket"));
    tokio::spawn(axum::serve(listener, router).into_future());
    address
}

/// A connection, and what it asks.
pub(crate) struct Client {
    sender: SendRequest<Full<Bytes>>,
    body: Bytes,
    doubled: Bytes,
    checks: bool,
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr, count: usize, checks: bool) -> Vec<Client> {
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

    pub(crate) async fn ask(&mut self, way: &str) {
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
pub(crate) struct Phase {
    pub(crate) latencies: Sorted,
    ended: u64,
}

impl Phase {
    pub(crate) fn run(asking: &Runtime, clients: &mut Vec<Client>, way: &'static str) -> Phase {
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

    pub(crate) fn rate(&self) -> f64 {
        self.ended as f64 / window(WINDOW).as_secs_f64()
    }
}

pub(crate) fn median(phases: &[Phase], of: impl Fn(&Phase) -> f64) -> f64 {
    Sorted::new(phases.iter().map(of).collect()).p50()
}

pub(crate) fn percentile_of(phases: &[Phase], percentile: f64) -> f64 {
    median(phases, |phase| phase.latencies.percentile(percentile))
}

/// `LEN` floats: `first`, and each as much more.
pub(crate) fn floats(first: f32) -> Bytes {
    let floats: Vec<f32> = (0..LEN).map(|i| first * (1 + i) as f32).collect();
    Bytes::copy_from_slice(bytemuck::cast_slice(&floats))
}

/// The cores that this process may use: the server's, the clients'. The same one, if it is the only.
pub(crate) fn halves() -> (Vec<usize>, Vec<usize>) {
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
pub(crate) fn pin(cores: &[usize]) {
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
pub(crate) fn runtime_on(cores: Vec<usize>) -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(cores.len()).on_thread_start(move || pin(&cores));
    if let Some(polls) = crate::measure::number("global_queue_interval") {
        builder.global_queue_interval(polls as u32);
    }
    builder.enable_all().build().expect("a runtime")
}

/// A thousand connections have two ends each in this process, and 1,024 files is what many systems
/// give at first.
pub(crate) fn more_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is live and of the type that the call fills.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is live; no more than the maximum is asked for.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert!(limit.rlim_max >= 4096, "no more than {} files may be open", limit.rlim_max);
}
