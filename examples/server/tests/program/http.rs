//! The program `server`, as its clients see it: a process that speaks HTTP.
//!
//! Each test starts one, on the device that `GPU_AWAIT_TEST_DEVICE` names or on the host device.
//! Long, because what one request must not do to another is seen in one place.
#![forbid(unsafe_code)]
#![cfg(unix)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::{Request, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::under_test::{JSON, RAW, Reply, SOON, Server, eventually, post, send, value};

const WIDTH: usize = 64;

// ---- what is right ----------------------------------------------------------------------------

pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % end
    }

    fn numbers(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.below(2001) as f32 / 100.0 - 10.0).collect()
    }

    pub(crate) fn tokens(&mut self, len: u64) -> Vec<u32> {
        (0..len).map(|_| self.below(4096) as u32).collect()
    }
}

pub(crate) struct Product {
    shape: [usize; 3],
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Product {
    pub(crate) fn new(shape: [usize; 3], random: &mut Random) -> Product {
        let [m, k, n] = shape;
        Product { shape, a: random.numbers(m * k), b: random.numbers(k * n) }
    }

    /// In ascending `k`, fused: what the kernel promises, bit for bit.
    fn right(&self) -> Vec<f32> {
        let [m, k, n] = self.shape;
        let dot = |i: usize, j: usize| {
            (0..k).fold(0.0f32, |sum, l| self.a[i * k + l].mul_add(self.b[l * n + j], sum))
        };
        (0..m * n).map(|at| dot(at / n, at % n)).collect()
    }

    pub(crate) fn json(&self) -> String {
        let [_, k, n] = self.shape;
        let rows = |values: &[f32], columns| -> Vec<Vec<f32>> {
            values.chunks(columns).map(<[f32]>::to_vec).collect()
        };
        json!({ "a": rows(&self.a, k), "b": rows(&self.b, n) }).to_string()
    }

    pub(crate) fn path(&self) -> String {
        let [m, k, n] = self.shape;
        format!("/matmul?m={m}&k={k}&n={n}")
    }

    pub(crate) fn raw(&self) -> Vec<u8> {
        self.a.iter().chain(&self.b).flat_map(|value| value.to_le_bytes()).collect()
    }

    pub(crate) fn check_raw(&self, reply: &Reply) {
        assert_eq!(reply.status, StatusCode::OK, "{reply:?}");
        assert_eq!(reply.header("content-type"), RAW);
        let right: Vec<u8> = self.right().iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(reply.body[..] == right, "{:?} is wrong", self.shape);
    }

    fn check_json(&self, reply: &Reply) {
        assert_eq!(reply.status, StatusCode::OK, "{reply:?}");
        assert_eq!(reply.header("content-type"), JSON);
        let c: Vec<Vec<f32>> = serde_json::from_value(reply.json()["c"].clone()).expect("rows");
        assert!(c.iter().all(|row| row.len() == self.shape[2]));
        assert_eq!(c.concat(), self.right(), "{:?}", self.shape);
    }
}

/// By the formula, in `f64`.
fn embedding(tokens: &[u32]) -> Vec<f64> {
    let value = |i: u32, j: u32| f64::from(((i * 31 + j * 17 + i * j) % 101) as f32 / 101.0 - 0.5);
    let mean = |j| tokens.iter().map(|i| value(*i, j)).sum::<f64>() / tokens.len() as f64;
    let means: Vec<f64> = (0..WIDTH as u32).map(mean).collect();
    let norm = means.iter().map(|mean| mean * mean).sum::<f64>().sqrt();
    means.iter().map(|mean| mean / norm).collect()
}

pub(crate) fn check_embedding(reply: &Reply, tokens: &[u32]) {
    assert_eq!(reply.status, StatusCode::OK, "{reply:?}");
    let found: Vec<f64> =
        serde_json::from_value(reply.json()["embedding"].clone()).expect("numbers");
    assert_eq!(found.len(), WIDTH);
    for (found, right) in found.iter().zip(embedding(tokens)) {
        assert!((found - right).abs() < 1e-4, "{found} is not {right}");
    }
}

/// A good request of each kind.
pub(crate) async fn works(server: &Server) {
    let product = Product::new([3, 4, 5], &mut Random(7));
    product.check_json(&server.post("/matmul", JSON, product.json()).await);
    product.check_raw(&server.post(&product.path(), RAW, product.raw()).await);
    let tokens = [1, 2, 4095];
    let reply = server.post("/embed", JSON, json!({ "tokens": tokens }).to_string()).await;
    check_embedding(&reply, &tokens);
}

/// Buffers that stay alive: those of the health check come and go, so the least of several looks.
async fn allocations(server: &Server) -> f64 {
    let mut least = f64::INFINITY;
    for _ in 0..20 {
        least = least.min(server.metric("server_device_allocations").await);
    }
    least
}

/// Nothing is held for requests that are over.
async fn settles(server: &Server, allocations: f64) {
    let end = Instant::now() + SOON;
    loop {
        let metrics = server.get("/metrics").await.text();
        let zeros = [
            "server_in_flight",
            "server_pool_in_flight",
            "server_pool_waiting",
            "server_embed_waiting",
            "server_body_bytes",
            "server_device_operations_in_flight",
            "server_device_lent_bytes",
            "server_device_pending_bytes",
            "server_device_pinned_used_bytes",
        ];
        if zeros.iter().all(|name| metrics.contains(&format!("\n{name} 0\n")))
            && value(&metrics, "server_device_allocations") == allocations
        {
            return;
        }
        assert!(Instant::now() < end, "it does not settle:\n{metrics}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn products_are_right_in_both_forms() {
    let server = Server::start(&[]);
    let mut random = Random(1);
    for shape in [[1, 1, 1], [3, 5, 2], [1, 1024, 1], [17, 16, 33], [64, 48, 80], [1024, 1, 3]] {
        let product = Product::new(shape, &mut random);
        product.check_json(&server.post("/matmul", JSON, product.json()).await);
        product.check_raw(&server.post(&product.path(), RAW, product.raw()).await);
    }
}

#[tokio::test]
async fn a_large_product_is_right() {
    let server = Server::start(&[]);
    let product = Product::new([1024, 8, 1024], &mut Random(2));
    product.check_raw(&server.post(&product.path(), RAW, product.raw()).await);
    product.check_json(&server.post("/matmul", JSON, product.json()).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_are_right_and_gathered_into_batches() {
    let server = Arc::new(Server::start(&[]));
    let calls: Vec<_> = (0..200)
        .map(|seed| {
            let server = server.clone();
            tokio::spawn(async move {
                let mut random = Random(seed + 1);
                let len = 1 + random.below(512);
                let tokens = random.tokens(len);
                let body = json!({ "tokens": tokens }).to_string();
                check_embedding(&server.post("/embed", JSON, body).await, &tokens);
            })
        })
        .collect();
    for call in calls {
        call.await.expect("each got its own");
    }
    assert_eq!(server.metric("server_batch_requests_sum").await, 200.0);
    assert!(server.metric("server_batch_requests_count").await < 200.0);
}

// ---- what is wrong ----------------------------------------------------------------------------

#[tokio::test]
async fn bad_input_is_told_what_is_wrong_and_harms_nobody() {
    let server = Server::start(&[]);
    works(&server).await;
    let allocations = allocations(&server).await;
    let raw = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| v.to_le_bytes()).collect() };
    let json = |text: &str| text.as_bytes().to_vec();
    let long_row = format!(r#"{{"a": [{:?}], "b": [[1]]}}"#, vec![1; 1025]);
    let many_rows = format!(r#"{{"a": {:?}, "b": [[1]]}}"#, vec![[1]; 1025]);
    let many_tokens = format!(r#"{{"tokens": {:?}}}"#, vec![1; 513]);
    let cases: Vec<(u16, &str, &str, Vec<u8>)> = vec![
        // No JSON, or not that JSON.
        (400, "/matmul", JSON, json("")),
        (400, "/matmul", JSON, json("{")),
        (400, "/matmul", JSON, vec![0xff, 0xfe]),
        (400, "/matmul", JSON, json("[1, 2]")),
        (400, "/matmul", JSON, json(r#"{"a": [[1]]}"#)),
        (400, "/matmul", JSON, json(r#"{"a": [[1]], "b": [[1]], "c": 1}"#)),
        (400, "/matmul", JSON, json(r#"{"a": [["1"]], "b": [[1]]}"#)),
        (400, "/matmul", JSON, json(r#"{"a": [1], "b": [[1]]}"#)),
        (400, "/matmul", JSON, json(r#"{"a": [[NaN]], "b": [[1]]}"#)),
        (400, "/matmul", JSON, json(r#"{"a": [[null]], "b": [[1]]}"#)),
        (400, "/matmul", JSON, "[".repeat(100_000).into_bytes()),
        // Another shape, or out of range.
        (400, "/matmul", JSON, json(r#"{"a": [], "b": [[1]]}"#)),
        (400, "/matmul", JSON, json(r#"{"a": [[]], "b": [[1]]}"#)),
        (400, "/matmul", JSON, json(r#"{"a": [[1, 2], [3]], "b": [[1], [2]]}"#)),
        (400, "/matmul", JSON, json(r#"{"a": [[1, 2]], "b": [[1]]}"#)),
        (400, "/matmul", JSON, json(&long_row)),
        (400, "/matmul", JSON, json(&many_rows)),
        (400, "/matmul", JSON, json(r#"{"a": [[1e39]], "b": [[1]]}"#)),
        // Raw.
        (400, "/matmul", RAW, raw(&[1.0, 2.0])),
        (400, "/matmul?m=1&k=1", RAW, raw(&[1.0, 2.0])),
        (400, "/matmul?m=-1&k=1&n=1", RAW, raw(&[1.0, 2.0])),
        (400, "/matmul?m=0&k=1&n=1", RAW, raw(&[1.0])),
        (400, "/matmul?m=1&k=1&n=1025", RAW, raw(&[1.0; 1026])),
        (400, "/matmul?m=99999999999999999999&k=1&n=1", RAW, raw(&[1.0])),
        (400, "/matmul?m=1&k=1&n=1", RAW, raw(&[1.0])),
        (400, "/matmul?m=1&k=1&n=1", RAW, raw(&[1.0, 2.0, 3.0])),
        (400, "/matmul?m=1&k=1&n=1", RAW, vec![0; 7]),
        (400, "/matmul?m=1&k=1&n=1", RAW, raw(&[f32::NAN, 1.0])),
        (400, "/matmul?m=1&k=1&n=1", RAW, raw(&[1.0, f32::NEG_INFINITY])),
        // Tokens.
        (400, "/embed", JSON, json(r#"{"tokens": []}"#)),
        (400, "/embed", JSON, json(r#"{"tokens": [4096]}"#)),
        (400, "/embed", JSON, json(r#"{"tokens": [-1]}"#)),
        (400, "/embed", JSON, json(r#"{"tokens": [1.5]}"#)),
        (400, "/embed", JSON, json(r#"{"tokens": "1"}"#)),
        (400, "/embed", JSON, json(r#"{"tokens": [4294967296]}"#)),
        (400, "/embed", JSON, json(&many_tokens)),
        // Content types and sizes.
        (415, "/matmul", "text/plain", json("1")),
        (415, "/matmul", "", json(r#"{"a": [[1]], "b": [[1]]}"#)),
        (415, "/embed", RAW, json(r#"{"tokens": [1]}"#)),
        (413, "/matmul", JSON, vec![b' '; (16 << 20) + 1]),
        (413, "/embed", JSON, vec![b' '; 20 << 20]),
        // Paths.
        (404, "/", JSON, json("")),
        (404, "/matmul/", JSON, json("")),
        (404, "/../etc/passwd", JSON, json("")),
    ];
    for (status, path, content_type, body) in cases {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        let reply = server.post(path, content_type, body).await;
        assert_eq!(reply.status, status, "{path} {content_type} {shown}: {reply:?}");
        let kind = reply.error();
        assert_ne!(kind, "internal", "{path} {shown}");
        let one = server.post("/matmul", JSON, r#"{"a": [[2]], "b": [[3]]}"#).await;
        assert_eq!(one.json(), json!({ "c": [[6.0]] }), "behind {path} {shown}");
    }
    settles(&server, allocations).await;
}

#[tokio::test]
async fn compressed_bodies_are_refused() {
    let server = Server::start(&[]);
    for (path, content_type) in [("/embed", JSON), ("/matmul", JSON), ("/matmul?m=1", RAW)] {
        let mut request = post(path, content_type, "no gzip");
        request.headers_mut().insert("content-encoding", "gzip".parse().expect("a value"));
        let reply = server.request(request).await;
        assert_eq!((reply.status.as_u16(), reply.error().as_str()), (415, "content_encoding"));
    }
}

#[tokio::test]
async fn a_method_that_a_path_does_not_take_is_told_which_it_takes() {
    let server = Server::start(&[]);
    for (path, allowed) in [("/matmul", "POST"), ("/embed", "POST")] {
        let reply = server.get(path).await;
        assert_eq!((reply.status.as_u16(), reply.error().as_str()), (405, "method"));
        assert_eq!(reply.header("allow"), allowed);
    }
    let reply = server.get("/no/such/path").await;
    assert_eq!((reply.status.as_u16(), reply.error().as_str()), (404, "not_found"));
}

#[tokio::test]
async fn results_that_are_not_finite_are_422_in_json_and_themselves_in_raw_form() {
    let server = Server::start(&[]);
    let reply = server.post("/matmul", JSON, r#"{"a": [[1e38]], "b": [[1e38]]}"#).await;
    assert_eq!((reply.status.as_u16(), reply.error().as_str()), (422, "not_finite"));
    let body = [1e38f32.to_le_bytes(), 1e38f32.to_le_bytes()].concat();
    let reply = server.post("/matmul?m=1&k=1&n=1", RAW, body).await;
    assert_eq!(reply.body[..], f32::INFINITY.to_le_bytes());
}

#[tokio::test]
async fn a_body_without_a_length_is_limited_as_well() {
    let server = Server::start(&[]);
    let mut socket = TcpStream::connect(server.addr).await.expect("it accepts");
    let head = "POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                transfer-encoding: chunked\r\n\r\n";
    socket.write_all(head.as_bytes()).await.expect("the head");
    let chunk = [b"100000\r\n".to_vec(), vec![b' '; 1 << 20], b"\r\n".to_vec()].concat();
    for _ in 0..24 {
        socket.write_all(&chunk).await.expect("a chunk: it reads on to be able to answer");
    }
    let mut answer = [0; 12];
    socket.read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 413");
    works(&server).await;
}

// ---- slow clients, and clients that leave -----------------------------------------------------

/// Sends so much of a request, and leaves the connection open.
pub(crate) async fn begin(server: &Server, part: &[u8]) -> TcpStream {
    let mut socket = TcpStream::connect(server.addr).await.expect("it accepts");
    socket.write_all(part).await.expect("a part");
    socket
}

pub(crate) fn embed_bytes(tokens: &[u32]) -> Vec<u8> {
    let body = json!({ "tokens": tokens }).to_string();
    let len = body.len();
    format!(
        "POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {len}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Everything until the server closes the connection.
pub(crate) async fn rest_of(mut socket: TcpStream) -> String {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(SOON, socket.read_to_end(&mut answer)).await;
    read.expect("it closes the connection").ok();
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_body_that_comes_too_slowly_is_408_and_a_head_is_hung_up_on() {
    let server = Server::start(&[
        "--body-timeout-ms",
        "200",
        "--idle-timeout-ms",
        "200",
        "--write-timeout-ms",
        "200",
        "--request-timeout-ms",
        "2000",
    ]);
    let request = embed_bytes(&[1, 2, 3]);
    let body = begin(&server, &request[..request.len() - 1]).await;
    let head = begin(&server, &request[..20]).await;
    let nothing = begin(&server, &[]).await;
    works(&server).await;
    let answer = rest_of(body).await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("slow_body"), "{answer}");
    assert_eq!((rest_of(head).await, rest_of(nothing).await), (String::new(), String::new()));
    works(&server).await;
}

#[tokio::test]
async fn a_connection_beyond_the_limit_waits_for_another_to_end() {
    let server = Server::start(&["--max-connections", "1"]);
    let mut first = server.client().await;
    let ready = || Request::get("/healthz").body(Full::default()).expect("a request");
    assert_eq!(send(&mut first, ready()).await.text(), "ok");
    let mut second = server.client().await;
    let mut waits = Box::pin(send(&mut second, ready()));
    // The first is served while the second is not.
    for _ in 0..20 {
        assert_eq!(send(&mut first, ready()).await.text(), "ok");
        assert!(futures::poll!(&mut waits).is_pending());
    }
    drop(first);
    assert_eq!(waits.await.text(), "ok");
}

#[tokio::test]
async fn clients_that_leave_at_any_byte_leak_nothing() {
    let server = Server::start(&[]);
    works(&server).await;
    let allocations = allocations(&server).await;
    let request = embed_bytes(&[5; 10]);
    for part in 0..=request.len() {
        drop(begin(&server, &request[..part]).await);
    }
    settles(&server, allocations).await;
    works(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_cancelled_requests_leak_nothing_and_disturb_nobody() {
    const CANCELLED: u64 = 1000;
    let server = Arc::new(Server::start(&[]));
    works(&server).await;
    let allocations = allocations(&server).await;
    let (next, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));

    let leavers: Vec<_> = (0..8)
        .map(|_| {
            let (server, next) = (server.clone(), next.clone());
            tokio::spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= CANCELLED {
                        return;
                    }
                    leave_early(&server, &mut Random(0x5eed + number * 7919)).await;
                }
            })
        })
        .collect();
    let good: Vec<_> = (0..2)
        .map(|seed| {
            let (server, over) = (server.clone(), over.clone());
            tokio::spawn(async move {
                let (mut client, mut random) = (server.client().await, Random(seed + 99));
                let mut answered = 0;
                while !over.load(Ordering::Relaxed) {
                    let product = Product::new([9, 20, 7], &mut random);
                    let request = post(&product.path(), RAW, product.raw());
                    product.check_raw(&send(&mut client, request).await);
                    let tokens = random.tokens(20);
                    let request = post("/embed", JSON, json!({ "tokens": tokens }).to_string());
                    check_embedding(&send(&mut client, request).await, &tokens);
                    answered += 1;
                }
                answered
            })
        })
        .collect();
    for task in leavers {
        task.await.expect("they only leave");
    }
    over.store(true, Ordering::Relaxed);
    for task in good {
        assert!(task.await.expect("every answer was right") > 0);
    }
    settles(&server, allocations).await;
    let text = server.get("/metrics").await.text();
    assert!(text.contains(r#"status="gone""#), "nobody left in the middle:\n{text}");
    works(&server).await;
}

/// Sends a request, or a part of one, and hangs up after a while.
async fn leave_early(server: &Server, random: &mut Random) {
    let request = if random.below(2) == 0 {
        let len = 1 + random.below(512);
        embed_bytes(&random.tokens(len))
    } else {
        let extent = 1 + random.below(48) as usize;
        let product = Product::new([extent; 3], random);
        let (path, body) = (product.path(), product.raw());
        let len = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {RAW}\r\ncontent-length: {len}\r\n\r\n"
        );
        [head.into_bytes(), body].concat()
    };
    let part = match random.below(3) {
        0 => random.below(request.len() as u64) as usize,
        _ => request.len(),
    };
    let socket = begin(server, &request[..part]).await;
    // It is the moment that is random here: nothing waits for this to be long enough.
    tokio::time::sleep(Duration::from_micros(random.below(4000))).await;
    drop(socket);
}

// ---- overload ---------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overload_is_429_and_passes() {
    let server = Arc::new(Server::start(&["--max-in-flight", "1", "--max-waiting", "2"]));
    works(&server).await;
    let allocations = allocations(&server).await;
    let product = Arc::new(Product::new([96, 96, 96], &mut Random(3)));
    let mut seen = [0, 0];
    // Until it has happened: forty at once find more than three permits taken.
    for _ in 0..5 {
        let calls: Vec<_> = (0..40)
            .map(|_| {
                let (server, product) = (server.clone(), product.clone());
                tokio::spawn(async move {
                    let reply = server.post(&product.path(), RAW, product.raw()).await;
                    match reply.status {
                        StatusCode::TOO_MANY_REQUESTS => {
                            assert_eq!(reply.error(), "overloaded");
                            assert_eq!(reply.header("retry-after"), "1");
                            1
                        }
                        _ => {
                            product.check_raw(&reply);
                            0
                        }
                    }
                })
            })
            .collect();
        for call in calls {
            seen[call.await.expect("a result, or 429")] += 1;
        }
        assert!(seen[0] > 0, "not one result");
        if seen[1] > 0 {
            break;
        }
    }
    assert!(seen[1] > 0, "not one was refused");
    settles(&server, allocations).await;
    works(&server).await;
    assert_eq!(server.metric("server_pool_refused_total").await, seen[1] as f64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_without_a_result_in_time_is_503_and_the_device_goes_on() {
    // A timer's least, one request at a time, and many of them: some are too late on any device.
    let limits = ["--request-timeout-ms", "1", "--max-in-flight", "1"];
    let server = Arc::new(Server::start(&limits));
    let allocations = allocations(&server).await;
    let product = Arc::new(Product::new([512, 16, 512], &mut Random(4)));
    let (mut late, mut refused) = (0, 0u32);
    for _ in 0..5 {
        let calls: Vec<_> = (0..20)
            .map(|_| {
                let (server, product) = (server.clone(), product.clone());
                tokio::spawn(async move {
                    let reply = server.post(&product.path(), RAW, product.raw()).await;
                    if reply.status == StatusCode::OK {
                        product.check_raw(&reply);
                        return (0, 0);
                    }
                    // More than it can do: another time it can.
                    assert_eq!(reply.header("retry-after"), "1", "{reply:?}");
                    // Told when its time is up, or at once that it will be.
                    let told = (reply.status.as_u16(), reply.error());
                    let told = (told.0, told.1.as_str());
                    assert!([(503, "timed_out"), (429, "overloaded")].contains(&told), "{reply:?}");
                    if reply.status == StatusCode::SERVICE_UNAVAILABLE { (1, 0) } else { (0, 1) }
                })
            })
            .collect();
        for call in calls {
            let told = call.await.expect("a result, or 503");
            (late, refused) = (late + told.0, refused + told.1);
        }
        if late > 0 {
            break;
        }
    }
    assert!(late > 0, "none was too late");
    // Each 429 is counted.
    let metrics = server.get("/metrics").await.text();
    let mut counted = 0.0;
    for name in ["body_refused", "pool_refused", "pool_expired"] {
        let name = format!("server_{name}_total");
        assert!(metrics.contains(&format!("\n{name} ")), "no {name}");
        counted += server.metric(&name).await;
    }
    assert!(f64::from(refused) <= counted, "{refused} answers, {counted} counted");
    settles(&server, allocations).await;
    assert!(server.metric("server_queue_seconds_count").await > 0.0, "it was on the device");
    assert_eq!(server.get("/readyz").await.text(), "ready");
}

// ---- the end ----------------------------------------------------------------------------------

/// Waits until nobody can connect.
async fn refuses(server: &Server) {
    eventually("no new connections", async || TcpStream::connect(server.addr).await.is_err()).await;
}

#[tokio::test]
async fn sigterm_answers_what_is_in_flight_and_exits_with_0() {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start(&[]);
        let request = embed_bytes(&[1, 2, 3]);
        let (most, last) = request.split_at(request.len() - 1);
        let mut in_flight = begin(&server, most).await;
        // A request in flight, and two idle connections: one was used, one was not.
        eventually("in flight", async || server.metric("server_in_flight").await == 1.0).await;
        let mut used = server.client().await;
        let ready = Request::get("/readyz").body(Full::default()).expect("a request");
        assert_eq!(send(&mut used, ready).await.text(), "ready");
        let unused = begin(&server, &[]).await;

        server.signal(signal);
        refuses(&server).await;
        assert_eq!(rest_of(unused).await, "");
        eventually("the idle connection ends", async || used.is_closed()).await;
        in_flight.write_all(last).await.expect("it listens");
        let answer = rest_of(in_flight).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("embedding"), "{answer}");
        assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
    }
}

#[tokio::test]
async fn a_request_that_never_ends_does_not_hold_the_end_up_for_ever() {
    let mut server = Server::start(&["--drain-timeout-ms", "100", "--body-timeout-ms", "60000"]);
    let request = embed_bytes(&[1, 2, 3]);
    let stuck = begin(&server, &request[..request.len() - 1]).await;
    eventually("in flight", async || server.metric("server_in_flight").await == 1.0).await;
    server.signal("TERM");
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
    drop(stuck);
}

#[test]
fn arguments_that_it_does_not_know_are_told_and_exit_with_2() {
    for (args, told) in [
        (&["--frobnicate", "1"][..], "--frobnicate"),
        (&["--listen"], "value is required"),
        (&["--listen", "nowhere"], "nowhere"),
        (&["--streams", "0"], "not in 1..=128"),
        (&["--streams", "100000000"], "not in 1..=128"),
        (&["--max-connections", "18446744073709551615"], "not in 1..="),
        (&["--request-timeout-ms", "0"], "not in 1..="),
        (&["--body-timeout-ms", "18446744073709551615"], "not in 1..="),
        (&["--buffer-budget-mib", "1"], "not in 64..="),
    ] {
        let output = crate::under_test::command(args).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(told) && text.contains("--help"), "{text}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn an_address_that_is_taken_is_told_and_exits_with_1() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = taken.local_addr().expect("its address").to_string();
    let output = crate::under_test::command(&["--listen", &addr]).output().expect("it runs");
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("server: ") && text.contains(&addr), "{text}");
}

// ---- what it tells of itself ------------------------------------------------------------------

#[tokio::test]
async fn metrics_count_what_was_done() {
    let server = Server::start(&[]);
    works(&server).await;
    assert_eq!(server.post("/embed", JSON, "{}").await.status, 400);
    assert_eq!(server.get("/nothing/here").await.status, 404);
    let text = server.get("/metrics").await.text();
    for line in [
        r#"server_requests_total{route="/matmul",status="200"} 2"#,
        r#"server_requests_total{route="/embed",status="200"} 1"#,
        r#"server_requests_total{route="/embed",status="400"} 1"#,
        r#"server_requests_total{route="other",status="404"} 1"#,
        "server_queue_seconds_count 3",
        r#"server_gpu_seconds_count{route="/matmul"} 2"#,
        r#"server_gpu_seconds_count{route="/embed"} 1"#,
        "server_batch_requests_count 1",
        "server_in_flight 0",
        "server_pool_waiting 0",
    ] {
        assert!(text.lines().any(|found| found == line), "no `{line}` in\n{text}");
    }
    for name in ["server_device_pinned_bytes", "server_device_allocated_bytes"] {
        assert!(server.metric(name).await > 0.0, "{name}");
    }
}

#[tokio::test]
async fn the_dashboard_names_what_there_is() {
    let server = Server::start(&[]);
    works(&server).await;
    let text = server.get("/metrics").await.text();
    let dashboard: Value =
        serde_json::from_str(include_str!("../../dashboard.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let mut named = 0;
    for target in targets {
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        let words = target["expr"].as_str().expect("an expression").split(|c| !is_name(c));
        for name in words.filter(|word| word.starts_with("server_")) {
            let is_there = |line: &str| {
                line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
            };
            assert!(text.lines().any(is_there), "no {name} in\n{text}");
            named += 1;
        }
    }
    assert!(named > 20, "{named} names");
    // Each has a line that says what it is.
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().expect("a name");
        assert!(text.contains(&format!("# HELP {name} ")), "nothing tells what {name} is");
    }
}

#[tokio::test]
async fn each_request_is_one_line_of_the_log_with_its_id_and_times() {
    let server = Server::start(&[]);
    let mut request = post("/matmul", JSON, r#"{"a": [[2]], "b": [[3]]}"#);
    request.headers_mut().insert("x-request-id", "from-the-client".parse().expect("a value"));
    let reply = server.request(request).await;
    assert_eq!(reply.header("x-request-id"), "from-the-client");
    let ours = server.post("/embed", JSON, "{}").await;
    assert!(ours.header("x-request-id").parse::<u64>().is_ok());
    let is_there = async || server.log().lines().filter(|line| line.contains("done")).count() == 2;
    eventually("two lines", is_there).await;
    let log = server.log();
    let line = log.lines().find(|line| line.contains("from-the-client")).expect("a line");
    for part in ["route=\"/matmul\"", "status=200", "queue_us=", "gpu_us=", "total_us="] {
        assert!(line.contains(part), "no {part} in {line}");
    }
}

#[tokio::test]
async fn it_says_that_it_lives_and_is_ready() {
    let server = Server::start(&[]);
    assert_eq!(server.get("/healthz").await.text(), "ok");
    assert_eq!(server.get("/readyz").await.text(), "ready");
}
