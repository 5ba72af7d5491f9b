//! The encoder on the host device, beside a slow implementation over `Vec`s.

mod isolated;
mod naive;
mod tiny;

use std::future::pending;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use encoder::{
    Folder, Lane, Launches, LoadError, Model, ModelConfig as _, Routes, Service, Serving, Shape,
    router,
};
use gpu_await::half::f16;
use gpu_await::{Device, testing};
use naive::{Tiny, largest_difference};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Around the tiles of attention, and the extremes.
const LENGTHS: [usize; 14] = [1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 200, 320, 511, 512];

fn texts(lengths: &[usize]) -> Vec<Vec<u32>> {
    let id = |text: usize, at: usize| ((text * 31 + at * 17 + at * at) % naive::VOCABULARY) as u32;
    lengths
        .iter()
        .enumerate()
        .map(|(text, len)| (0..*len).map(|at| id(text, at)).collect())
        .collect()
}

fn slices(texts: &[Vec<u32>]) -> Vec<&[u32]> {
    texts.iter().map(|text| &text[..]).collect()
}

async fn model<T: Launches>(tiny: &Tiny) -> Result<Model<T>, Failed> {
    let folder = Arc::new(Folder::open(tiny.folder())?);
    Ok(Model::load(&Device::host(), &folder).await?)
}

async fn lane<T: Launches>(
    model: &Model<T>,
    tokens: usize,
    texts: usize,
) -> gpu_await::Result<Lane<T>> {
    model.lane(model.device().stream()?, tokens, texts).await
}

/// Differences from the slow implementation: of hidden states, of embeddings.
async fn differences<T: Launches>(tiny: &Tiny, texts: &[Vec<u32>]) -> Result<(f32, f32), Failed> {
    let mut lane = lane(&model::<T>(tiny).await?, 4096, texts.len()).await?;
    let (states, rows) =
        (lane.hidden_states(&slices(texts)).await?, lane.embed(&slices(texts)).await?);
    let (mut first, mut worst) = (0, (0.0f32, 0.0f32));
    for (number, text) in texts.iter().enumerate() {
        let (expected, embedding) = tiny.naive(text);
        for (layer, expected) in expected.iter().enumerate() {
            let found = &states[layer][first * naive::HIDDEN..][..expected.len()];
            worst.0 = worst.0.max(largest_difference(found, expected));
        }
        let row = &rows[number * naive::HIDDEN..][..naive::HIDDEN];
        worst.1 = worst.1.max(largest_difference(row, &embedding));
        first += text.len();
    }
    Ok(worst)
}

#[tokio::test]
async fn hidden_states_and_embeddings_f32() -> Result<(), Failed> {
    let tiny = Tiny::new("f32", "", "F32")?;
    let (states, embeddings) = differences::<f32>(&tiny, &texts(&LENGTHS)).await?;
    assert!(states < 1e-5 && embeddings < 1e-5, "{states} {embeddings}");
    Ok(())
}

#[tokio::test]
async fn half_precision_is_near() -> Result<(), Failed> {
    for dtype in ["F32", "F16"] {
        let tiny = Tiny::new(&format!("half-{dtype}"), "bert.", dtype)?;
        let (states, embeddings) = differences::<f16>(&tiny, &texts(&LENGTHS[..11])).await?;
        assert!(states < 2e-2 && embeddings < 1e-2, "{dtype}: {states} {embeddings}");
    }
    Ok(())
}

/// The same bits, whatever a text is packed with, and whether its graph is new or not.
#[tokio::test]
async fn packed_equals_one_at_a_time() -> Result<(), Failed> {
    let tiny = Tiny::new("packed", "", "F32")?;
    let model = model::<f32>(&tiny).await?;
    let mut packed = lane(&model, 4096, LENGTHS.len()).await?;
    let mut alone = lane(&model, 512, 1).await?;
    let texts = texts(&LENGTHS);
    for _ in 0..2 {
        let rows = packed.embed(&slices(&texts)).await?;
        for (text, row) in texts.iter().zip(rows.chunks(naive::HIDDEN)) {
            assert_eq!(alone.embed(&[text]).await?, row, "{} tokens", text.len());
        }
    }
    // Texts differ by far more than the bounds above.
    let rows = packed.embed(&slices(&texts)).await?;
    let (a, b) = (&rows[..naive::HIDDEN], &rows[naive::HIDDEN..2 * naive::HIDDEN]);
    assert!(largest_difference(a, b) > 0.1);
    Ok(())
}

#[test]
fn shapes_hold_what_they_are_for() {
    let all = Shape::all(2048, 64);
    for tokens in 1..=2048 {
        for texts in 1..=tokens.min(64) {
            assert!(all.contains(&Shape::holding(tokens, texts)), "{tokens} {texts}");
        }
    }
    assert!(all.len() < 100, "{}", all.len());
    for shape in all {
        let lengths = shape.filling();
        assert_eq!(Shape::holding(lengths.iter().sum(), lengths.len()), shape);
    }
}

/// What an error says when the bytes of a model were changed.
async fn refusal(tiny: &Tiny, change: impl FnOnce(&mut Vec<u8>)) -> Result<LoadError, Failed> {
    let path = tiny.folder().join("model.safetensors");
    let mut bytes = std::fs::read(&path)?;
    change(&mut bytes);
    // Another file: the old one may be mapped.
    std::fs::remove_file(&path)?;
    std::fs::write(&path, bytes)?;
    let loaded = match Folder::open(tiny.folder()) {
        Ok(folder) => Model::<f32>::load(&Device::host(), &Arc::new(folder)).await.map(drop),
        Err(error) => Err(error),
    };
    loaded.err().ok_or_else(|| "it was loaded".into())
}

/// Changes text of the header for other text of the same length.
fn swap(from: &'static str, to: &'static str) -> impl FnOnce(&mut Vec<u8>) {
    assert_eq!(from.len(), to.len());
    move |bytes| {
        let at = bytes
            .windows(from.len())
            .position(|part| part == from.as_bytes())
            .expect("it is there");
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
}

#[tokio::test]
async fn malformed_files_name_the_tensor() -> Result<(), Failed> {
    let tiny = |name: &str| Tiny::new(name, "", "F32");
    let error =
        refusal(&tiny("missing")?, swap("layer.1.output.dense.bias", "layer.1.output.dense.BIAS"))
            .await?;
    assert!(
        matches!(&error, LoadError::Missing { tensor, .. } if tensor.ends_with("1.output.dense.bias")),
        "{error}"
    );

    let error = refusal(&tiny("shape")?, swap("[96,64]", "[64,96]")).await?;
    assert!(
        matches!(&error, LoadError::Shape { expected, .. } if *expected == [96, 64]),
        "{error}"
    );
    assert!(error.to_string().contains("intermediate.dense.weight"), "{error}");

    let error = refusal(&tiny("dtype")?, swap(r#""dtype":"F32""#, r#""dtype":"I32""#)).await?;
    assert!(
        matches!(&error, LoadError::Dtype { found, .. } if found.to_string() == "I32"),
        "{error}"
    );

    for (name, change) in [("short", -4), ("behind", 4)] {
        let change = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().wrapping_add_signed(change), 0);
        let error = refusal(&tiny(name)?, change).await?;
        assert!(matches!(&error, LoadError::Header { .. }), "{error}");
        assert!(error.to_string().contains(&format!("-{name}/model.s")), "{error}");
    }
    // Of the first tensor: a hole behind it, or one that ends before it begins. Of the second: an overlap, a hole in front. Two of one name.
    for (name, from, to) in [
        ("fewer", "[0,256]", "[0,252]"),
        ("backwards", "[0,256]", "[9,  8]"),
        ("overlap", "[256,512]", "[252,512]"),
        ("hole", "[256,512]", "[260,512]"),
        (
            "twice",
            r#""encoder.layer.0.output.dense.bias""#,
            r#""encoder.layer.1.output.dense.bias""#,
        ),
    ] {
        let error = refusal(&tiny(name)?, swap(from, to)).await?;
        assert!(matches!(&error, LoadError::Header { .. }), "{name}: {error}");
    }
    for (name, len) in [("cut", 100), ("empty", 0), ("seven", 7), ("eight", 8)] {
        let error = refusal(&tiny(name)?, |bytes| bytes.truncate(len)).await?;
        assert!(matches!(&error, LoadError::Header { .. }), "{error}");
    }
    let error = refusal(&tiny("long")?, |bytes| bytes[..8].fill(0xFF)).await?;
    assert!(matches!(&error, LoadError::Header { .. }), "{error}");
    let error = refusal(&tiny("json")?, |bytes| bytes[8] = b'?').await?;
    assert!(matches!(&error, LoadError::Header { .. }), "{error}");
    Ok(())
}

#[test]
fn other_models_are_refused() {
    for (from, to, field) in [
        (r#""gelu""#, r#""relu""#, "hidden_act"),
        (r#""hidden_size":64"#, r#""hidden_size":65"#, "hidden_size"),
        (r#""num_attention_heads":4"#, r#""num_attention_heads":3"#, "num_attention_heads"),
        (r#""type_vocab_size":2"#, r#""type_vocab_size":0"#, "type_vocab_size"),
        (r#""layer_norm_eps":"#, r#""layer_norm_eps":-"#, "layer_norm_eps"),
        (r#""layer_norm_eps":"#, r#""layer_norm_eps":1e39,"was":"#, "layer_norm_eps"),
    ] {
        let json = naive::config().to_string().replace(from, to);
        let error = encoder::Config::parse(json.as_bytes()).expect_err(field);
        assert!(
            matches!(error, LoadError::Config { field: found, .. } if found == field),
            "{error}"
        );
    }
}

/// The status and the answer.
async fn post(address: SocketAddr, body: Value) -> Result<(u16, Value), Failed> {
    post_with(address, body, "").await
}

async fn post_with(
    address: SocketAddr,
    body: Value,
    headers: &str,
) -> Result<(u16, Value), Failed> {
    let body = body.to_string();
    let head = "POST /embed HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-type: application/json\r\n";
    exchange(address, &format!("{head}{headers}content-length: {}\r\n\r\n{body}", body.len())).await
}

/// All of an answer.
async fn get(address: SocketAddr, path: &str) -> Result<String, Failed> {
    let mut stream = TcpStream::connect(address).await?;
    let head = format!("GET {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// Sends, and reads until the server closes. The status is 0 if there is no answer.
async fn exchange(address: SocketAddr, request: &str) -> Result<(u16, Value), Failed> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    tokio::time::timeout(Duration::from_secs(60), stream.read_to_string(&mut answer)).await??;
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { return Ok((0, Value::Null)) };
    assert!(!head.contains(" 503 ") || head.contains("retry-after: "), "{head}");
    Ok((head[9..12].parse()?, serde_json::from_str(body).unwrap_or(Value::Null)))
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_answered_each_with_its_own() -> Result<(), Failed> {
    let tiny = Tiny::new("served", "", "F32")?;
    let model = model::<f32>(&tiny).await?;
    let service = Service::new(&model, 1024, serving()).await?;
    let address = serve(service).await?;

    let texts = texts(&[5, 1, 70, 128, 33, 512, 64, 2, 9, 200]);
    let mut asking = tokio::task::JoinSet::new();
    for (number, pair) in texts.chunks(2).enumerate() {
        let body = json!({ "ids": pair });
        asking.spawn(async move { Ok::<_, Failed>((number, post(address, body).await?)) });
    }
    let mut lane = lane(&model, 512, 1).await?;
    while let Some(asked) = asking.join_next().await {
        let (number, (status, answer)) = asked??;
        assert_eq!(status, 200, "{answer}");
        for (at, text) in texts[2 * number..2 * number + 2].iter().enumerate() {
            let found: Vec<f32> = serde_json::from_value(answer["embeddings"][at].clone())?;
            assert_eq!(found, lane.embed(&[text]).await?);
        }
    }
    for bad in [
        json!([]),
        json!([[]]),
        json!([[naive::VOCABULARY]]),
        json!([vec![0; 513]]),
        json!(vec![[0]; 65]),
    ] {
        let (status, answer) = post(address, json!({ "ids": bad })).await?;
        assert_eq!(status, 400, "{answer}");
    }
    for (timeout, expected) in [("0", 503), ("60000", 200), ("soon", 400)] {
        let headers = format!("x-timeout-ms: {timeout}\r\n");
        let (status, answer) = post_with(address, json!({ "ids": [[1]] }), &headers).await?;
        assert_eq!(status, expected, "{timeout}: {answer}");
    }
    // Half a second of work for every core, in a batch that starts at once.
    let many = json!({ "ids": [vec![1; 512], vec![2; 512]] });
    let (status, answer) = post_with(address, many, "x-timeout-ms: 1\r\n").await?;
    assert_eq!(status, 503, "{answer}");
    Ok(())
}

/// Neither numbers that are none nor an overflow become an embedding.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_finite_is_an_error() -> Result<(), Failed> {
    let tiny = Tiny::new("nan", "", "F32")?;
    let path = tiny.folder().join("model.safetensors");
    let mut bytes = std::fs::read(&path)?;
    // Of the last layer's product.
    let end = bytes.len();
    bytes[end - 64..].fill(0xFF);
    std::fs::write(&path, bytes)?;
    let address = serve(Service::new(&model::<f32>(&tiny).await?, 64, serving()).await?).await?;
    let (status, answer) = post(address, json!({ "ids": [[1, 2]] })).await?;
    assert_eq!(status, 500, "{answer}");
    assert_eq!(answer, json!({ "error": "not finite: weights or f16 range" }));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_client_gets_an_answer_or_is_left() -> Result<(), Failed> {
    let tiny = Tiny::new("clients", "", "F32")?;
    let service = Service::new(&model::<f32>(&tiny).await?, 64, serving()).await?;
    let address = serve(service.clone()).await?;
    let head = "POST /embed HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n";
    let health = "GET /healthz HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n";
    assert_eq!(exchange(address, health).await?, (200, json!({ "status": "ok" })));
    // Each error has one form.
    for (other, expected) in [("GET /embed", 405), ("GET /", 404), ("POST /embed", 415)] {
        let request = format!("{other} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n");
        let (status, answer) = exchange(address, &request).await?;
        assert_eq!(status, expected, "{answer}");
        assert!(answer["error"].is_string(), "{other}: {answer}");
    }
    // A body that does not come, and a head.
    let address = serve_with(service, Duration::from_millis(100)).await?;
    let (status, answer) = exchange(address, &format!("{head}content-length: 9\r\n\r\n[")).await?;
    assert_eq!(status, 408, "{answer}");
    assert_eq!(exchange(address, head).await?.0, 0);
    Ok(())
}

/// As when a worker is given up, whose requests have a handler.
#[tokio::test(flavor = "multi_thread")]
async fn requests_are_answered_when_the_model_ends() -> Result<(), Failed> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let (begun, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, opens) = (begun.clone(), gate.clone());
    let slow = axum::routing::get(async move || {
        begins.notify_one();
        opens.notified().await;
        "slow"
    });
    let routes = Arc::new(OnceLock::from(axum::Router::new().route("/", slow)));
    let (ends, ended) = tokio::sync::oneshot::channel();
    let model = async { Err(ended.await?) };
    // On a runtime that ends with it, as the program does.
    let served = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new()?;
        runtime.block_on(encoder::serve(listener, routes, Duration::from_secs(60), model))
    });
    let asked = tokio::spawn(get(address, "/"));
    begun.notified().await;
    ends.send(Failed::from("given up")).map_err(|_| "the server has ended")?;
    // Until nobody listens any more, others are accepted.
    while TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    gate.notify_one();
    assert!(asked.await?.is_ok_and(|answer| answer.ends_with("slow")));
    let served = served.join().map_err(|_| "it panicked")?;
    assert!(served.is_err_and(|error| error.to_string() == "given up"));
    Ok(())
}

#[tokio::test]
async fn a_lost_device_ends_the_service() -> Result<(), Failed> {
    let tiny = Tiny::new("lost", "", "F32")?;
    let (faults, handle) = testing::faults();
    let folder = Arc::new(Folder::open(tiny.folder())?);
    let model = Model::<f32>::load(&testing::host_with(faults), &folder).await?;
    let service = Service::new(&model, 64, serving()).await?;
    handle.lose_device("unplugged");
    let lost = tokio::time::timeout(Duration::from_secs(60), service.lost()).await?;
    assert!(lost.to_string().contains("unplugged"), "{lost}");
    Ok(())
}

/// Before there is a model an orchestrator sees that, and afterwards Prometheus sees what was done.
#[tokio::test(flavor = "multi_thread")]
async fn loading_and_metrics() -> Result<(), Failed> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let (address, routes) = (listener.local_addr()?, Routes::default());
    tokio::spawn(encoder::serve(listener, routes.clone(), Duration::from_secs(60), pending()));
    let get = async |path: &str| get(address, path).await;
    let answer = get("/healthz").await?;
    assert!(answer.contains(" 503 ") && answer.contains("the model is loading"), "{answer}");

    let tiny = Tiny::new("metrics", "", "F32")?;
    let service = Service::new(&model::<f32>(&tiny).await?, 64, serving()).await?;
    routes.set(router(service)).map_err(|_| "set twice")?;
    assert!(get("/healthz").await?.contains(" 200 "));
    assert_eq!(post(address, json!({ "ids": [[1, 2, 3], [4]] })).await?.0, 200);
    assert_eq!(post(address, json!({ "ids": [[]] })).await?.0, 400);
    // Other tests of this process count as well.
    let text = get("/metrics").await?;
    let value = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name}: {text}"))
    };
    for (name, least) in [
        ("model_requests_total{outcome=\"200\"}", 1.0),
        ("model_requests_total{outcome=\"400\"}", 1.0),
        ("model_request_seconds_bucket{le=\"+Inf\"}", 2.0),
        ("model_tokens_total", 4.0),
        ("model_waiting", 0.0),
    ] {
        assert!(value(name) >= least, "{name}: {text}");
    }
    Ok(())
}

fn serving() -> Serving {
    Serving {
        patience: 60_000,
        client_timeout: 60_000,
        lanes: 2,
        max_texts: 64,
        without_graphs: false,
        blocking: false,
        interactive: None,
        isolate: false,
        standby: false,
        gpu_limit_ms: 10_000,
    }
}

/// A server on a port of its own.
async fn serve(service: Service) -> std::io::Result<SocketAddr> {
    serve_with(service, Duration::from_secs(60)).await
}

async fn serve_with(service: Service, patience: Duration) -> std::io::Result<SocketAddr> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let routes = Arc::new(OnceLock::from(router(service)));
    tokio::spawn(encoder::serve(listener, routes, patience, pending()));
    Ok(address)
}

#[cfg(feature = "tokenizers")]
#[tokio::test(flavor = "multi_thread")]
async fn texts_become_ids() -> Result<(), Failed> {
    let tiny = Tiny::new("texts", "", "F32")?;
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "decoder": null,
        "normalizer": { "type": "Lowercase" }, "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": {
            "type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2],
        },
        "model": {
            "type": "WordLevel", "unk_token": "[UNK]",
            "vocab": { "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "good": 10, "morning": 11 },
        },
    });
    std::fs::write(tiny.folder().join("tokenizer.json"), tokenizer.to_string())?;
    let service = Service::new(&model::<f32>(&tiny).await?, 5, serving()).await?;
    let address = serve(service.clone()).await?;
    let (status, answer) = post(address, json!({ "texts": ["good"] })).await?;
    assert_eq!(status, 400, "{answer}");

    let service = service.with_tokenizer(tiny.folder())?;
    let address = serve(service).await?;
    let texts = json!({ "texts": ["Good morning you", "good good good good"] });
    let (status, by_text) = post(address, texts).await?;
    assert_eq!(status, 200, "{by_text}");
    // The second is cut to five tokens.
    let ids = json!({ "ids": [[2, 10, 11, 1, 3], [2, 10, 10, 10, 3]] });
    assert_eq!(by_text, post(address, ids).await?.1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_way_of_serving_has_the_same_answers() -> Result<(), Failed> {
    let tiny = Tiny::new("ways", "", "F32")?;
    let model = model::<f32>(&tiny).await?;
    // A core for each partition.
    let interactive = (model.device().multiprocessors() > 1).then_some(1);
    let ways = [
        serving(),
        Serving { without_graphs: true, ..serving() },
        Serving { max_texts: 1, blocking: true, ..serving() },
        Serving { interactive, ..serving() },
    ];
    let body = json!({ "ids": texts(&[5, 1, 70]) });
    let mut first = None;
    for way in ways {
        let shown = format!("{way:?}");
        let address = serve(Service::new(&model, 256, way).await?).await?;
        for headers in ["", "x-priority: interactive\r\n"] {
            let (status, answer) = post_with(address, body.clone(), headers).await?;
            assert_eq!(status, 200, "{shown}: {answer}");
            assert_eq!(first.get_or_insert_with(|| answer.clone()), &answer, "{shown}");
        }
    }
    Ok(())
}

/// A program, killed when this is dropped.
struct Program(Child);

impl Program {
    fn command(model: &Tiny, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_encoder"));
        command.args(arguments).args(["--device", "host", "--dtype", "f32"]);
        command.args(["--max-tokens", "1024", "--model"]).arg(model.folder());
        command
    }

    /// A server, and where it listens.
    fn serve(model: &Tiny, arguments: &[&str]) -> Result<(Program, SocketAddr), Failed> {
        Program::serve_with(model, arguments, |_| {})
    }

    fn serve_with(
        model: &Tiny,
        arguments: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Result<(Program, SocketAddr), Failed> {
        let mut server = Program::command(model, &["serve", "--addr", "127.0.0.1:0"]);
        server.args(["--patience", "60000"]).args(arguments);
        change(&mut server);
        let mut server = Program(server.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?);
        let mut line = String::new();
        BufReader::new(server.0.stdout.take().expect("it is piped")).read_line(&mut line)?;
        let address = line.trim().strip_prefix("listening on http://").ok_or("no address")?;
        Ok((server, address.parse()?))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).expect("it is a child");
    }
}

/// Other signs of half of the weights, in another file: the old one may be mapped.
fn change_weights(tiny: &Tiny) -> Result<(), Failed> {
    let path = tiny.folder().join("model.safetensors");
    let mut bytes = std::fs::read(&path)?;
    let weights = bytes.len() / 2;
    bytes[weights..].rchunks_exact_mut(4).for_each(|weight| weight[3] ^= 0x80);
    std::fs::remove_file(&path)?;
    Ok(std::fs::write(&path, bytes)?)
}

/// What clients of a server see, by name: of a server with one model, and clients that know the embeddings of another.
fn seen_by_clients(served: &Tiny, known: &Tiny) -> Result<impl Fn(&str) -> f64, Failed> {
    let (server, address) = Program::serve(served, &[])?;
    let (address, pid) = (address.to_string(), server.0.id().to_string());
    let clients = ["load", "--addr", &address, "--pid", &pid, "--texts", "40", "--clients", "4"];
    let mut clients = Program::command(known, &clients);
    clients.args(["--seconds", "3", "--leaving", "20", "--timeout", "60000"]);
    let output = clients.output()?;
    let text = String::from_utf8(output.stdout)?;
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(move |name: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(name)?.split(' ').nth(1));
        found.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name}: {text}"))
    })
}

#[test]
fn clients_know_their_answers() -> Result<(), Failed> {
    let tiny = Tiny::new("known", "", "F32")?;
    let seen = seen_by_clients(&tiny, &tiny)?;
    assert!(seen("requests.4") > 0.0 && seen("left.4") > 0.0);
    assert_eq!([seen("wrong.4"), seen("failed.4"), seen("growth.descriptors")], [0.0; 3]);

    let other = Tiny::new("other", "", "F32")?;
    change_weights(&other)?;
    let seen = seen_by_clients(&other, &tiny)?;
    assert!(seen("wrong.4") > 0.0);
    assert_eq!(seen("requests.4"), 0.0);
    Ok(())
}
