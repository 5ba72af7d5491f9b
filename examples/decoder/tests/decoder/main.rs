//! The decoder on the host device, beside a slow implementation over `Vec`s.

mod naive;
#[path = "../../../encoder/tests/encoder/tiny.rs"]
mod tiny;

use std::future::pending;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use decoder::{
    Broken, Decoder, Folder, Launches, Limits, LoadError, Model, Refused, Request, Row, Sampling,
    Step, Steps, router,
};
use gpu_await::half::f16;
use gpu_await::{Device, testing};
use naive::{Tiny, VOCABULARY, largest};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

type Failed = Box<dyn std::error::Error + Send + Sync>;

const LIMITS: Limits = Limits { streams: 6, prompt_tokens: 256, blocks: 40, waiting: 20 };
const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, seed: 0 };

async fn model<T: Launches>(tiny: &Tiny) -> Result<Model<T>, Failed> {
    let folder = Arc::new(Folder::open(tiny.folder())?);
    Ok(Model::load(&Device::host(), &folder).await?)
}

fn prompt(number: usize, len: usize) -> Vec<u32> {
    (0..len).map(|at| ((number * 31 + at * 17 + at * at) % VOCABULARY) as u32).collect()
}

fn greedy(ids: Vec<u32>, new: usize) -> Request {
    Request { ids, new, stop: None, sampling: GREEDY }
}

/// A decoder whose worker runs until the runtime ends.
async fn serving(model: &Model<f32>, limits: Limits) -> Result<Decoder, Failed> {
    let (decoder, worker) = Decoder::new(model, limits, false).await?;
    tokio::spawn(worker);
    Ok(decoder)
}

async fn all(decoder: &Decoder, request: Request) -> Result<Vec<u32>, Failed> {
    let (mut tokens, mut ids) = (decoder.generate(request)?, Vec::new());
    while let Some(token) = tokens.next().await {
        ids.push(token?);
    }
    Ok(ids)
}

/// Largest differences of logits from the slow implementation, in a step of prompts and in steps behind it. Blocks are in no order.
async fn difference<T: Launches>(tiny: &Tiny, lengths: &[usize]) -> Result<f32, Failed> {
    let model = model::<T>(tiny).await?;
    let mut steps = Steps::new(&model, &LIMITS).await?;
    let mut sequences: Vec<_> =
        lengths.iter().enumerate().map(|(number, len)| prompt(number, *len)).collect();
    let blocks = |number: usize| (0..6).map(|at| (39 - number - 6 * at) as u32).collect();
    let (mut worst, mut is_first) = (0.0f32, true);
    for _ in 0..20 {
        let rows = sequences.iter().enumerate().map(|(number, ids)| Row {
            request: number as u64,
            slot: 5 - number as u32,
            prompt: if is_first { ids.clone() } else { Vec::new() },
            position: if is_first { 0 } else { ids.len() as u32 - 1 },
            blocks: blocks(number),
            sampling: GREEDY,
        });
        steps.launch(Step { rows: rows.collect() }).await?;
        let logits = steps.logits(lengths.len()).await?;
        let (_, tokens) = steps.collect().await?.ok_or("nothing is in flight")?;
        for ((ids, logits), token) in sequences.iter_mut().zip(logits).zip(tokens) {
            let expected = tiny.logits(ids);
            let differences = expected.iter().zip(&logits).map(|(x, y)| (x - y).abs());
            worst = differences.fold(worst, |worst, x| if x.is_nan() { x } else { worst.max(x) });
            assert_eq!(token, largest(&logits));
            ids.push(token);
        }
        is_first = false;
    }
    Ok(worst)
}

#[tokio::test]
async fn logits_of_each_step_f32() -> Result<(), Failed> {
    let tiny = Tiny::new("f32", "transformer.", "F32")?;
    // Products of few rows have a kernel of their own.
    for lengths in [&[1, 15, 16, 17, 64, 76][..], &[5, 48], &[33]] {
        let worst = difference::<f32>(&tiny, lengths).await?;
        assert!(worst < 1e-4, "{lengths:?}: {worst}");
    }
    Ok(())
}

#[tokio::test]
async fn half_precision_is_near() -> Result<(), Failed> {
    for dtype in ["F32", "F16"] {
        let tiny = Tiny::new(&format!("half-{dtype}"), "", dtype)?;
        for lengths in [&[5, 33, 65][..], &[40]] {
            let worst = difference::<f16>(&tiny, lengths).await?;
            assert!(worst < 0.1, "{dtype}: {worst}");
        }
    }
    Ok(())
}

/// Requests of all lengths enter while others run, more of them than there are slots; each gets the tokens that it gets alone.
#[tokio::test(flavor = "multi_thread")]
async fn joining_and_leaving() -> Result<(), Failed> {
    let tiny = Tiny::new("joining", "", "F32")?;
    let decoder = serving(&model(&tiny).await?, LIMITS).await?;
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..20 {
        let (decoder, ids, new) = (decoder.clone(), prompt(number, 1 + number * 5), 1 + number % 9);
        clients.spawn(async move {
            for _ in 0..number {
                tokio::task::yield_now().await;
            }
            Ok::<_, Failed>((number, all(&decoder, greedy(ids, new)).await?))
        });
    }
    while let Some(client) = clients.join_next().await {
        let (number, tokens) = client??;
        let expected = tiny.greedy(&prompt(number, 1 + number * 5), 1 + number % 9);
        assert_eq!(tokens, expected, "request {number}");
    }
    assert_eq!(decoder.free_blocks(), LIMITS.blocks);
    // To the last position, and no further.
    let tokens = all(&decoder, greedy(prompt(3, 100), naive::POSITIONS - 99)).await?;
    assert_eq!(tokens, tiny.greedy(&prompt(3, 100), naive::POSITIONS - 99));
    Ok(())
}

/// Blocks are free as soon as the tokens are dropped, at whatever moment; nothing that still runs with them reaches who gets them next.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_come_back_whenever_a_client_leaves() -> Result<(), Failed> {
    let tiny = Tiny::new("leaving", "", "F32")?;
    let decoder = serving(&model(&tiny).await?, LIMITS).await?;
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..8usize {
        let decoder = decoder.clone();
        clients.spawn(async move {
            let mut whole = Vec::new();
            for round in 0..12 {
                let number = client * 12 + round;
                let (ids, new) = (prompt(number, 1 + number % 70), 1 + number % 23);
                let leaves_behind = (number * 7919 % 11).min(new);
                let mut tokens = decoder.generate(greedy(ids, new))?;
                let mut found = Vec::new();
                while found.len() < leaves_behind || number.is_multiple_of(3) {
                    let Some(token) = tokens.next().await else { break };
                    found.push(token?);
                }
                whole.push((number, new, found));
            }
            Ok::<_, Failed>(whole)
        });
    }
    while let Some(client) = clients.join_next().await {
        for (number, new, found) in client?? {
            let expected = tiny.greedy(&prompt(number, 1 + number % 70), found.len());
            assert_eq!(found, expected, "request {number}");
            assert!(!number.is_multiple_of(3) || found.len() == new, "request {number}");
        }
    }
    assert_eq!(decoder.free_blocks(), LIMITS.blocks);

    // At once: nothing ran in between on this thread.
    let mut tokens = decoder.generate(greedy(prompt(1, 40), 60))?;
    tokens.next().await.ok_or("no token")??;
    assert!(decoder.free_blocks() < LIMITS.blocks);
    drop(tokens);
    assert_eq!(decoder.free_blocks(), LIMITS.blocks);
    Ok(())
}

#[tokio::test]
async fn sampled_tokens_follow_the_seed() -> Result<(), Failed> {
    let tiny = Tiny::new("sampled", "", "F32")?;
    let decoder = serving(&model(&tiny).await?, LIMITS).await?;
    let with = |temperature, top_k, seed| Request {
        sampling: Sampling { temperature, top_k, seed },
        ..greedy(prompt(1, 9), 40)
    };
    let first = all(&decoder, with(2.0, 0, 1)).await?;
    // Beside others, the same.
    let other = decoder.generate(with(2.0, 0, 3))?;
    assert_eq!(all(&decoder, with(2.0, 0, 1)).await?, first);
    drop(other);
    assert_ne!(all(&decoder, with(2.0, 0, 2)).await?, first);
    // One of one is the most likely; so is any, when it is cold.
    let most_likely = tiny.greedy(&prompt(1, 9), 40);
    assert_eq!(all(&decoder, with(2.0, 1, 1)).await?, most_likely);
    assert_eq!(all(&decoder, with(1e-4, 0, 1)).await?, most_likely);

    // Of the first token, shares are those of the softmax over the three most likely ones.
    let mut logits: Vec<_> = tiny.logits(&prompt(1, 9)).into_iter().zip(0..).collect();
    logits.sort_by(|a, b| b.0.total_cmp(&a.0));
    let weights: Vec<f32> =
        logits[..3].iter().map(|(x, _)| ((x - logits[0].0) / 4.0).exp()).collect();
    let (rounds, mut counts) = (3000, [0; 3]);
    for seed in 0..rounds {
        let request = Request { new: 1, ..with(4.0, 3, seed << 20) };
        let token = all(&decoder, request).await?[0];
        let place = logits[..3].iter().position(|(_, id)| *id == token);
        counts[place.ok_or("not of the three most likely")?] += 1;
    }
    for (count, weight) in counts.iter().zip(&weights) {
        let (found, expected) =
            (*count as f32 / rounds as f32, weight / weights.iter().sum::<f32>());
        assert!((found - expected).abs() < 0.05, "{counts:?} {weights:?}");
    }
    Ok(())
}

/// Where a logit is not a number no token is the most likely one.
#[tokio::test]
async fn what_is_not_finite_ends_the_request() -> Result<(), Failed> {
    let tiny = Tiny::new("nan", "", "F32")?;
    let path = tiny.folder().join("model.safetensors");
    let mut bytes = std::fs::read(&path)?;
    // The last tensor has an embedding for each token.
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::INFINITY.to_le_bytes());
    std::fs::write(&path, bytes)?;
    let decoder = serving(&model(&tiny).await?, LIMITS).await?;
    for temperature in [0.0, 1.0] {
        let sampling = Sampling { temperature, top_k: 3, seed: 1 };
        let mut tokens = decoder.generate(Request { sampling, ..greedy(prompt(1, 9), 40) })?;
        assert!(matches!(tokens.next().await, Some(Err(Broken::NotFinite))));
        assert!(tokens.next().await.is_none());
        assert_eq!(decoder.free_blocks(), LIMITS.blocks);
    }
    Ok(())
}

#[tokio::test]
async fn a_stop_token_is_the_last() -> Result<(), Failed> {
    let tiny = Tiny::new("stop", "", "F32")?;
    let decoder = serving(&model(&tiny).await?, LIMITS).await?;
    let expected = tiny.greedy(&prompt(4, 12), 30);
    let stop = expected[7];
    let end = expected.iter().position(|token| *token == stop).ok_or("it is there")?;
    let request = Request { stop: Some(stop), ..greedy(prompt(4, 12), 30) };
    assert_eq!(all(&decoder, request).await?, expected[..=end]);
    assert_eq!(decoder.free_blocks(), LIMITS.blocks);
    Ok(())
}

#[tokio::test]
async fn what_can_never_run_is_refused() -> Result<(), Failed> {
    let tiny = Tiny::new("refused", "", "F32")?;
    let model = model::<f32>(&tiny).await?;
    let (decoder, worker) = Decoder::new(&model, Limits { blocks: 4, ..LIMITS }, false).await?;
    let refused = |request| decoder.generate(request).err();
    assert!(matches!(refused(greedy(vec![], 1)), Some(Refused::Prompt { found: 0, most: 128 })));
    assert!(matches!(refused(greedy(vec![0; 129], 1)), Some(Refused::Prompt { .. })));
    assert!(matches!(refused(greedy(vec![0; 100], 30)), Some(Refused::New { most: 29, .. })));
    assert!(matches!(refused(greedy(vec![0], 0)), Some(Refused::New { .. })));
    assert!(matches!(refused(greedy(vec![50], 1)), Some(Refused::Id { found: 50, .. })));
    assert!(matches!(refused(greedy(vec![0; 60], 6)), Some(Refused::Blocks { needed: 5, .. })));
    for temperature in [f32::NAN, f32::INFINITY, -1.0, 1e-5, 1e-45] {
        let sampling = Sampling { temperature, ..GREEDY };
        let request = Request { sampling, ..greedy(vec![0], 1) };
        assert!(matches!(refused(request), Some(Refused::Temperature { .. })), "{temperature}");
    }

    // Nobody starts them.
    let limits = Limits { waiting: 1, ..LIMITS };
    let (busy, _worker) = Decoder::new(&model, limits, false).await?;
    let _waits = busy.generate(greedy(vec![0], 1))?;
    let refused_now = busy.generate(greedy(vec![0], 1)).err();
    assert!(matches!(refused_now, Some(Refused::Waiting { waiting: 1 })));

    // A worker that is dropped leaves nobody waiting.
    let mut tokens = decoder.generate(greedy(vec![0; 60], 5))?;
    drop(worker);
    assert!(tokens.next().await.ok_or("no answer")?.is_err());
    assert!(tokens.next().await.is_none());
    assert!(matches!(refused(greedy(vec![0], 1)), Some(Refused::Ended)));
    Ok(())
}

#[tokio::test]
async fn malformed_files_name_the_tensor() -> Result<(), Failed> {
    let refusal = async |name: &str, from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let tiny = Tiny::new(name, "", "F32")?;
        let path = tiny.folder().join("model.safetensors");
        let mut bytes = std::fs::read(&path)?;
        let found = bytes.windows(from.len()).position(|part| part == from.as_bytes());
        let at = found.ok_or("it is not there")?;
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, bytes)?;
        let folder = Arc::new(Folder::open(tiny.folder())?);
        let loaded = Model::<f32>::load(&Device::host(), &folder).await;
        loaded.err().ok_or_else(|| Failed::from("it was loaded"))
    };
    let error = refusal("missing", "h.1.mlp.c_fc.bias", "h.1.mlp.c_fc.BIAS").await?;
    assert!(error.to_string().contains("`transformer.h.1.mlp.c_fc.bias`"), "{error}");
    let error = refusal("shape", "[64,192]", "[192,64]").await?;
    assert!(matches!(&error, LoadError::Shape { expected, .. } if *expected == [64, 192]));
    assert!(error.to_string().contains("attn.c_attn.weight"), "{error}");
    let error = refusal("dtype", r#""dtype":"F32""#, r#""dtype":"I32""#).await?;
    assert!(
        matches!(&error, LoadError::Dtype { found, .. } if found.to_string() == "I32"),
        "{error}"
    );
    Ok(())
}

#[test]
fn other_models_are_refused() {
    for (from, to, field) in [
        (r#""gelu_new""#, r#""relu""#, "activation_function"),
        (r#""n_embd":64"#, r#""n_embd":65"#, "n_embd"),
        (r#""n_head":4"#, r#""n_head":3"#, "n_head"),
        (r#""n_positions":128"#, r#""n_positions":32"#, "n_positions"),
        (r#""n_inner":null"#, r#""n_inner":0"#, "n_inner"),
        (r#""n_layer":2"#, r#""n_layer":0"#, "n_layer"),
        (r#""layer_norm_epsilon":"#, r#""layer_norm_epsilon":-"#, "layer_norm_epsilon"),
    ] {
        let json = naive::config().to_string().replace(from, to);
        let parsed = <decoder::Config as decoder::ModelConfig>::parse(json.as_bytes());
        let error = parsed.expect_err(field);
        assert!(
            matches!(error, LoadError::Config { field: found, .. } if found == field),
            "{error}"
        );
    }
}

/// All of an answer.
async fn ask(address: SocketAddr, path: &str, body: &str) -> Result<String, Failed> {
    let head = "HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-type: application/json\r\n";
    let request = format!("{path} {head}content-length: {}\r\n\r\n{body}", body.len());
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_come_as_lines() -> Result<(), Failed> {
    let tiny = Tiny::new("lines", "", "F32")?;
    let decoder = serving(&model(&tiny).await?, LIMITS).await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let routes = Arc::new(OnceLock::from(router(decoder)));
    let patience = Duration::from_secs(60);
    tokio::spawn(encoder::serve(listener, routes, patience, pending()));
    let post = async |body: &str| ask(address, "POST /generate", body).await;
    let answer = post(r#"{"ids": [3, 14, 15], "new": 5}"#).await?;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let mut rest = answer.as_str();
    for token in tiny.greedy(&[3, 14, 15], 5) {
        // In chunks of one line or more.
        let line = format!("\n{token}\n");
        let at = rest.find(&line).ok_or_else(|| format!("no {token} in {answer}"))?;
        rest = &rest[at + line.len() - 1..];
    }
    for (wrong, status) in [(r#"{"ids": [3], "new": 1000}"#, 400), (r#"{"ids": [3]}"#, 422)] {
        let answer = post(wrong).await?;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
        assert!(answer.contains(r#"{"error":""#), "{answer}");
    }
    let metrics = ask(address, "GET /metrics", "").await?;
    for line in [
        "model_tokens_total 5",
        "model_requests_total{outcome=\"200\"} 1",
        "model_requests_total{outcome=\"400\"} 1",
        "model_requests_total{outcome=\"422\"} 1",
        "model_request_seconds_count 3",
        "model_waiting 0",
        "model_blocks_used 0",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
    Ok(())
}

/// Its worker is idle.
#[tokio::test]
async fn a_lost_device_ends_the_worker() -> Result<(), Failed> {
    let tiny = Tiny::new("lost", "", "F32")?;
    let (faults, handle) = testing::faults();
    let folder = Arc::new(Folder::open(tiny.folder())?);
    let model = Model::<f32>::load(&testing::host_with(faults), &folder).await?;
    let (decoder, worker) = Decoder::new(&model, LIMITS, false).await?;
    handle.lose_device("unplugged");
    let lost = tokio::time::timeout(Duration::from_secs(60), worker).await?.err();
    assert!(lost.is_some_and(|lost| lost.to_string().contains("unplugged")));
    assert!(!decoder.is_serving());
    Ok(())
}

/// A server, killed when this is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).expect("it is a child");
    }
}

/// One for the graphs of a new shape.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_thread_fails_its_requests() -> Result<(), Failed> {
    let tiny = Tiny::new("threads", "", "F32")?;
    let mut server = Command::new(env!("CARGO_BIN_EXE_decoder"));
    server.args(["--device", "host", "--dtype", "f32", "--model"]).arg(tiny.folder());
    // More than the C library keeps of threads that have ended.
    server.args(["serve", "--addr", "127.0.0.1:0"]).env("RUST_MIN_STACK", "67108864");
    let mut server = Server(server.stdout(Stdio::piped()).spawn()?);
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().ok_or("it is piped")?).read_line(&mut line)?;
    let address = line.trim().strip_prefix("listening on http://").ok_or("no address")?.parse()?;
    while !ask(address, "GET /healthz", "").await?.contains(" 200 ") {
        tokio::task::yield_now().await;
    }
    let pid = server.0.id().to_string();
    let limit = |most: String| {
        let limit = ["--pid", &pid, &format!("--as={most}:")];
        assert!(Command::new("prlimit").args(limit).status()?.success());
        Ok::<_, Failed>(())
    };
    let mut refused = None;
    // Where a thread of the start ends late, the first ones get theirs.
    for len in (2..100).step_by(16) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let size =
            status.lines().find_map(|line| line.strip_prefix("VmSize:")?.strip_suffix(" kB"));
        let size: u64 = size.ok_or("it has a size")?.trim().parse()?;
        limit(((size << 10) + (16 << 20)).to_string())?;
        let request = json!({ "ids": vec![3; len], "new": 3 }).to_string();
        if ask(address, "POST /generate", &request).await?.contains("refuses a thread") {
            refused = Some((len, request));
            break;
        }
    }
    limit("unlimited".into())?;
    let (len, request) = refused.ok_or("no thread was refused")?;
    let answer = ask(address, "POST /generate", &request).await?;
    for token in tiny.greedy(&vec![3; len], 3) {
        assert!(answer.contains(&format!("\n{token}\n")), "{answer}");
    }
    Ok(())
}
