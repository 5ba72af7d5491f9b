//! A device that is slow, stalls or is lost under the service: each test is it, in a process of its own, on a host device that fails.
#![forbid(unsafe_code)]
#![cfg(unix)]

use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use clap::Parser;
use gpu_await::{Device, Result, testing};
use http_body_util::Full;
use hyper::Request;
use service::{Options, Stop};
use tokio::task::JoinHandle;

use crate::child;
use crate::under_test::{JSON, Reply, SOON, Server, eventually, post, send};

type Ended = std::result::Result<Stop, Box<dyn std::error::Error + Send + Sync>>;

/// Starts the service in this process.
fn start(
    open: impl FnOnce() -> Result<Device> + Send + 'static,
    args: &[&str],
) -> (SocketAddr, JoinHandle<Ended>) {
    // Free until a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let addr = free.expect("a port");
    let listen = addr.to_string();
    let options = Options::parse_from([&["server", "--listen", &listen], args].concat());
    let (log, _) = tracing_appender::non_blocking(std::io::sink());
    (addr, tokio::spawn(service::run(options, open, log.error_counter())))
}

async fn request(addr: SocketAddr, request: Request<Full<hyper::body::Bytes>>) -> Reply {
    eventually("it listens", async || tokio::net::TcpStream::connect(addr).await.is_ok()).await;
    send(&mut Server::client_of(addr).await, request).await
}

async fn get(addr: SocketAddr, path: &str) -> Reply {
    request(addr, Request::get(path).body(Full::default()).expect("a request")).await
}

fn signal_this_process() {
    let kill = format!("kill -TERM {}", std::process::id());
    assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_device_turns_readiness_off_and_ends_the_process_with_3() {
    if !child::is_alone(concat!(
        module_path!(),
        "::a_lost_device_turns_readiness_off_and_ends_the_process_with_3"
    )) {
        return;
    }
    let (faults, handle) = testing::faults();
    let (addr, ended) = start(move || Ok(testing::host_with(faults)), &["--lame-duck-ms", "1000"]);
    assert_eq!(get(addr, "/readyz").await.text(), "ready");
    handle.lose_device("a test loses it");
    eventually("not ready", async || get(addr, "/readyz").await.status == 503).await;
    let answer = request(addr, post("/embed", JSON, r#"{"tokens": [1]}"#)).await;
    assert_eq!((answer.status.as_u16(), answer.error().as_str()), (503, "device_lost"));
    // This process will not have it again.
    assert_eq!(answer.header("retry-after"), "");
    let ended = tokio::time::timeout(SOON, ended).await.expect("it ends").expect("no panic");
    assert_eq!(service::exit_code(&ended), 3, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_ends_a_slow_start() {
    if !child::is_alone(concat!(module_path!(), "::a_signal_ends_a_slow_start")) {
        return;
    }
    let (opens, opening) = mpsc::channel();
    let (_held, never) = mpsc::channel::<()>();
    let open = move || {
        opens.send(()).expect("somebody listens");
        never.recv().ok();
        Ok(Device::host())
    };
    let (_, ended) = start(open, &[]);
    tokio::task::block_in_place(|| opening.recv_timeout(SOON)).expect("it opens the device");
    signal_this_process();
    let ended = tokio::time::timeout(SOON, ended).await.expect("it ends").expect("no panic");
    assert_eq!(service::exit_code(&ended), 0, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_stalls_is_ill() {
    if !child::is_alone(concat!(module_path!(), "::a_device_that_stalls_is_ill")) {
        return;
    }
    let (device, stepper) = testing::manual();
    let stalls = Arc::new(AtomicBool::new(false));
    let is_stalled = stalls.clone();
    std::thread::spawn(move || {
        loop {
            if !is_stalled.load(Ordering::SeqCst) {
                stepper.run_until_idle();
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    let (addr, _) = start(move || Ok(device), &["--health-timeout-ms", "100"]);
    assert_eq!(get(addr, "/healthz").await.text(), "ok");
    stalls.store(true, Ordering::SeqCst);
    eventually("it is ill", async || get(addr, "/healthz").await.status == 503).await;
    assert_eq!(get(addr, "/healthz").await.error(), "unhealthy");
    let ready = get(addr, "/readyz").await;
    assert_eq!((ready.status.as_u16(), ready.error().as_str()), (503, "not_ready"));
    stalls.store(false, Ordering::SeqCst);
    eventually("it is well", async || get(addr, "/healthz").await.status == 200).await;
}
