//! `--isolate`: a worker's process ends in every way, and the server goes on.
//!
//! The requests that end it are those of `--drill` (`src/drill.rs`).
#![forbid(unsafe_code)]
#![cfg(target_os = "linux")]

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::JoinHandle;

use crate::http::{Product, Random, begin, check_embedding, embed_bytes, rest_of, works};
use crate::under_test::{JSON, RAW, Reply, SOON, Server, eventually};

/// As long as the tests wait for an answer: what a busy machine takes for a restart or a product is not what is tested.
const PATIENT: [&str; 6] =
    ["--isolate", "--drill", "--request-timeout-ms", "14000", "--gpu-limit-ms", "14000"];
/// For tests of the limit, which is reached twice until an answer is there.
const LIMITED: [&str; 6] =
    ["--isolate", "--drill", "--request-timeout-ms", "14000", "--gpu-limit-ms", "4000"];
const ABORTS: u32 = 0;
const PANICS: u32 = 1;
const FAULTS: u32 = 2;
const NEVER_ENDS: u32 = 3;
const IS_SLOW: u32 = 4;

async fn drill(server: &Server, fails: u32) -> Reply {
    server.post("/embed", JSON, json!({ "tokens": [4095, 4095, fails] }).to_string()).await
}

/// The process of the worker, once it serves.
async fn worker(server: &Server) -> u32 {
    eventually("it serves", async || server.get("/readyz").await.status == 200).await;
    server.metric("server_worker_pid").await as u32
}

fn signal(name: &str, process: u32) {
    let kill = format!("kill -{name} {process}");
    assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success());
}

/// Whether there is such a process, and it has not ended.
fn lives(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.starts_with(" Z"))
}

/// Sixteen clients that check every answer until they are told to stop.
struct Clients {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<()>>,
}

impl Clients {
    fn start(server: &Arc<Server>) -> Clients {
        let (stop, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let client = |seed: u64| {
            let (server, stop, answers) = (server.clone(), stop.clone(), answers.clone());
            tokio::spawn(async move {
                let mut random = Random(seed + 1);
                while !stop.load(Ordering::Relaxed) {
                    if seed.is_multiple_of(2) {
                        let tokens = random.tokens(64);
                        let body = json!({ "tokens": tokens }).to_string();
                        check_embedding(&server.post("/embed", JSON, body).await, &tokens);
                    } else {
                        let product = Product::new([8, 16, 8], &mut random);
                        let reply = server.post(&product.path(), RAW, product.raw()).await;
                        product.check_raw(&reply);
                    }
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        Clients { tasks: (0..16).map(client).collect(), stop, answers }
    }

    /// Waits until they had so many more answers.
    async fn have(&self, more: u64) {
        let wanted = self.answers.load(Ordering::Relaxed) + more;
        eventually("answers", async || self.answers.load(Ordering::Relaxed) >= wanted).await;
    }

    async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("right answers, all of them");
        }
    }
}

#[tokio::test]
async fn answers_are_those_of_one_process() {
    let (one, isolated) = (Server::start(&PATIENT[2..4]), Server::start(&PATIENT));
    // The first ones come before the worker serves.
    works(&isolated).await;
    let mut random = Random(5);
    // The last one is too large in one of the forms.
    for (shape, statuses) in [
        ([3, 5, 2], [200, 200]),
        ([17, 16, 33], [200, 200]),
        ([1024, 1, 3], [200, 200]),
        ([1024, 1024, 1], [200, 413]),
    ] {
        let product = Product::new(shape, &mut random);
        let raw = one.post(&product.path(), RAW, product.raw()).await;
        let json = one.post("/matmul", JSON, product.json()).await;
        assert_eq!([raw.status, json.status].map(|status| status.as_u16()), statuses);
        let same = isolated.post(&product.path(), RAW, product.raw()).await;
        assert!((raw.status, raw.body) == (same.status, same.body), "{shape:?}");
        let same = isolated.post("/matmul", JSON, product.json()).await;
        assert!((json.status, json.body) == (same.status, same.body), "{shape:?}");
    }
    let body = json!({ "tokens": [7, 7, 4095] }).to_string();
    let embedding = one.post("/embed", JSON, body.clone()).await.body;
    assert_eq!(isolated.post("/embed", JSON, body).await.body, embedding);
    // Invalid ones do not reach the worker.
    assert_eq!(isolated.post("/embed", JSON, r#"{"tokens": [4096]}"#).await.error(), "invalid");
    let health = isolated.get("/healthz").await.text();
    assert!(health.starts_with("serving for "), "{health}");
    for (name, calls) in [("server_queue_seconds_count", 11.0), ("server_worker_deaths_total", 0.0)]
    {
        assert_eq!(isolated.metric(name).await, calls, "{name}");
    }
    // The front makes no call of CUDA.
    let maps = std::fs::read_to_string(isolated.proc("maps")).expect("a Linux");
    assert!(!maps.contains("libcuda"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_kills_is_told_and_others_are_answered() {
    let server = Arc::new(Server::start(&PATIENT));
    let clients = Clients::start(&server);
    clients.have(64).await;
    for (fails, why) in [(ABORTS, "signal 6"), (FAULTS, "its device faulted")] {
        is_guilty(&server, fails, why).await;
        clients.have(64).await;
    }
    // A panic ends the request alone.
    let (process, panics) = (worker(&server).await, drill(&server, PANICS).await);
    assert_eq!((panics.status.as_u16(), panics.error().as_str()), (500, "internal"));
    clients.have(64).await;
    assert_eq!(worker(&server).await, process);
    clients.stop().await;
    assert!(server.get("/healthz").await.text().starts_with("serving for "));
    assert_eq!(server.get("/readyz").await.text(), "ready");
}

/// Asks for that twice: it is told why the process died, and is refused from then on.
async fn is_guilty(server: &Server, fails: u32, why: &str) {
    let deaths = server.metric("server_worker_deaths_total").await;
    for why in [why, "is refused for another"] {
        let told = drill(server, fails).await;
        assert_eq!((told.status.as_u16(), told.error().as_str()), (500, "guilty"), "{told:?}");
        assert!(told.text().contains(why), "{told:?}");
    }
    let after = server.metric("server_worker_deaths_total").await;
    assert!(after > deaths, "{after} deaths");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_never_ends_is_ended_and_told() {
    let server = Arc::new(Server::start(&LIMITED));
    let clients = Clients::start(&server);
    clients.have(64).await;
    is_guilty(&server, NEVER_ENDS, "a call took longer than 4s").await;
    clients.have(64).await;
    clients.stop().await;
    assert_eq!(server.get("/readyz").await.text(), "ready");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_is_no_reason_to_end_the_worker() {
    // One at a time, each of them within the limit, and not all of them together.
    let server = Arc::new(Server::start(&[&LIMITED[..], &["--max-in-flight", "1"]].concat()));
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let server = server.clone();
            tokio::spawn(async move {
                check_embedding(&drill(&server, IS_SLOW).await, &[4095, 4095, IS_SLOW]);
            })
        })
        .collect();
    for call in calls {
        call.await.expect("a right answer");
    }
    assert_eq!(server.metric("server_worker_deaths_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_loses_no_request() {
    let server = Arc::new(Server::start(&PATIENT));
    let clients = Clients::start(&server);
    for deaths in 1..=3 {
        clients.have(64).await;
        let process = worker(&server).await;
        signal("KILL", process);
        clients.have(64).await;
        assert_ne!(worker(&server).await, process);
        assert_eq!(server.metric("server_worker_deaths_total").await, f64::from(deaths));
    }
    clients.stop().await;
}

#[tokio::test]
async fn the_end_of_the_server_ends_its_worker() {
    let mut server = Server::start(&PATIENT);
    let process = worker(&server).await;
    let request = embed_bytes(&[1, 2, 3]);
    let (most, last) = request.split_at(request.len() - 1);
    let mut in_flight = begin(&server, most).await;
    eventually("in flight", async || server.metric("server_in_flight").await == 1.0).await;
    server.signal("TERM");
    eventually("not ready", async || server.get("/readyz").await.status == 503).await;
    tokio::io::AsyncWriteExt::write_all(&mut in_flight, last).await.expect("it listens");
    let answer = rest_of(in_flight).await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("embedding"), "{answer}");
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
    assert!(!lives(process));

    // However it ends.
    let mut server = Server::start(&PATIENT);
    let process = worker(&server).await;
    server.signal("KILL");
    server.ended().await;
    eventually("it is gone", async || !lives(process)).await;
}

#[tokio::test]
async fn a_worker_that_is_given_up_ends_the_server() {
    let mut server = Server::start(&["--isolate", "--lame-duck-ms", "1000"]);
    let end = Instant::now() + 2 * SOON;
    let mut killed = 0;
    // The first death ends it, if that is in the start; else the eleventh that is early.
    let told = loop {
        let health = server.get("/healthz").await;
        if health.status != 200 {
            break health;
        }
        let known = ["starting for ", "serving for ", "restarting for "];
        assert!(known.iter().any(|known| health.text().starts_with(known)), "{health:?}");
        let process = server.metric("server_worker_pid").await as u32;
        if process != 0 && process != killed && lives(process) {
            signal("ABRT", process);
            killed = process;
        }
        assert!(Instant::now() < end, "it is not given up");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!(told.error(), "unhealthy");
    assert!(told.text().contains("given up"), "{told:?}");
    let refused = server.post("/embed", JSON, r#"{"tokens": [1]}"#).await;
    assert_eq!((refused.status.as_u16(), refused.error().as_str()), (503, "given_up"));
    assert_eq!(server.ended().await.code(), Some(3), "{}", server.log());
}

#[test]
fn devices_that_there_are_not_are_told() {
    for (device, told) in
        [("cuda:4000", "no GPU 4000: there are "), ("gpu", "GPU_AWAIT_DEVICE is `gpu`")]
    {
        let mut command = crate::under_test::command(&["--isolate", "--listen", "127.0.0.1:0"]);
        let output = command.env("GPU_AWAIT_DEVICE", device).output().expect("it runs");
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && log.contains(told), "{log}");
    }
}
