//! `serve --isolate`: the worker's process ends in several ways, and the server goes on.

use std::io::Read as _;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tokio::time::{Instant, sleep};

use super::*;

const KILLS: usize = 3;
const A_WHILE: Duration = Duration::from_secs(60);

impl Program {
    /// The worker's process, once there is one.
    async fn worker(&self) -> Result<u32, Failed> {
        let front = self.0.id();
        let is_worker = |pid: u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // Behind the name: its state, and its parent.
            let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
            let is_alive = fields.next()? != "Z";
            (is_alive && fields.next()?.parse() == Ok(front)).then_some(pid)
        };
        until(async || {
            let all = std::fs::read_dir("/proc").ok()?.flatten();
            all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find_map(is_worker)
        })
        .await
    }

    /// How it ended, and what it wrote.
    async fn ended(mut self) -> Result<(ExitStatus, String), Failed> {
        let status = until(async || self.0.try_wait().ok()?).await?;
        let mut log = String::new();
        self.0.stderr.take().ok_or("it is piped")?.read_to_string(&mut log)?;
        Ok((status, log))
    }
}

/// What there is once it is there.
async fn until<T>(mut look: impl AsyncFnMut() -> Option<T>) -> Result<T, Failed> {
    let start = Instant::now();
    while start.elapsed() < A_WHILE {
        match look().await {
            Some(found) => return Ok(found),
            None => sleep(Duration::from_millis(2)).await,
        }
    }
    Err("it did not come".into())
}

async fn until_it_says(address: SocketAddr, path: &str, what: &str) -> Result<(), Failed> {
    until(async || get(address, path).await.ok()?.contains(what).then_some(())).await
}

fn signal(name: &str, pid: u32) -> Result<(), Failed> {
    let sent = Command::new("kill").args([name, &pid.to_string()]).status()?;
    sent.success().then_some(()).ok_or_else(|| "no such process".into())
}

/// The embedding of each text, computed here.
async fn known(tiny: &Tiny, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, Failed> {
    let (mut lane, mut known) = (lane(&model::<f32>(tiny).await?, 512, 1).await?, Vec::new());
    for text in texts {
        known.push(lane.embed(&[text]).await?.to_vec());
    }
    Ok(known)
}

fn embeddings((status, mut answer): (u16, Value)) -> Result<Vec<Vec<f32>>, Failed> {
    assert_eq!(status, 200, "{answer}");
    Ok(serde_json::from_value(answer["embeddings"].take())?)
}

/// Each with the embeddings that this process computes; and those behind a death with the weights and the config that were loaded in front of it.
#[tokio::test(flavor = "multi_thread")]
async fn kills_lose_no_answer() -> Result<(), Failed> {
    let tiny = Tiny::new("killed", "", "F32")?;
    let texts = texts(&(1..=48).collect::<Vec<_>>());
    let known = known(&tiny, &texts).await?;
    let (server, address) = Program::serve(&tiny, &["--isolate"])?;
    until_it_says(address, "/healthz", " 200 ").await?;
    change_weights(&tiny)?;
    let config = tiny.folder().join("config.json");
    let mut other: Value = serde_json::from_slice(&std::fs::read(&config)?)?;
    other["layer_norm_eps"] = json!(0.5);
    std::fs::write(config, other.to_string())?;

    let all = Arc::new((texts, known, AtomicUsize::new(0), AtomicUsize::new(0)));
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..8 {
        let all = all.clone();
        clients.spawn(async move {
            let (texts, known, answered, kills) = &*all;
            let headers = ["", "x-priority: interactive\r\n"][client % 2];
            for round in 0.. {
                if round > 40 && kills.load(Ordering::SeqCst) == KILLS {
                    break;
                }
                let at = (client * 5 + round * 7) % (texts.len() - 1);
                let body = json!({ "ids": texts[at..at + 2] });
                let answer = post_with(address, body, headers).await?;
                assert_eq!(embeddings(answer)?, known[at..at + 2]);
                answered.fetch_add(1, Ordering::SeqCst);
            }
            Ok::<_, Failed>(())
        });
    }
    let (_, _, answered, kills) = &*all;
    let mut killed = Vec::new();
    for _ in 0..KILLS {
        let worker = until(async || {
            // One that was killed may still be there.
            server.worker().await.ok().filter(|worker| !killed.contains(worker))
        })
        .await?;
        let before = answered.load(Ordering::SeqCst);
        until(async || (answered.load(Ordering::SeqCst) > before + 24).then_some(())).await?;
        signal("-KILL", worker)?;
        killed.push(worker);
        kills.fetch_add(1, Ordering::SeqCst);
    }
    while let Some(client) = clients.join_next().await {
        client??;
    }
    let deaths = format!("model_worker_deaths_total {KILLS}\n");
    assert!(get(address, "/metrics").await?.contains(&deaths));
    Ok(())
}

/// A process that is stopped has a request when the server is asked to end.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_for_the_process() -> Result<(), Failed> {
    let tiny = Tiny::new("drained", "", "F32")?;
    let texts = texts(&[7]);
    let known = known(&tiny, &texts).await?;
    let (server, address) = Program::serve(&tiny, &["--isolate"])?;
    until_it_says(address, "/healthz", " 200 ").await?;
    let worker = server.worker().await?;
    signal("-STOP", worker)?;
    until_it_says(address, "/healthz", "stopped").await?;
    assert!(get(address, "/healthz").await?.contains(" 503 "));
    let asked = tokio::spawn(post(address, json!({ "ids": texts })));
    until_it_says(address, "/metrics", "model_waiting 1").await?;
    signal("-TERM", server.0.id())?;
    // Nobody listens any more.
    until(async || TcpStream::connect(address).await.is_err().then_some(())).await?;
    signal("-CONT", worker)?;
    assert_eq!(embeddings(asked.await??)?, known);
    let (status, log) = server.ended().await?;
    assert!(status.success() && log.contains("ending: 1 connections"), "{log}");
    assert!(!std::fs::exists(format!("/proc/{worker}"))?, "it was waited for");
    Ok(())
}

/// Their connections may not be accepted yet, nor their heads read.
#[tokio::test(flavor = "multi_thread")]
async fn requests_that_came_before_the_signal_are_answered() -> Result<(), Failed> {
    let tiny = Tiny::new("asked", "", "F32")?;
    let (server, address) = Program::serve(&tiny, &[])?;
    until_it_says(address, "/healthz", " 200 ").await?;
    let request = "POST /embed HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{\"ids\":[[5]]}";
    let mut asked = Vec::new();
    signal("-STOP", server.0.id())?;
    for _ in 0..32 {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        asked.push(stream);
    }
    signal("-TERM", server.0.id())?;
    signal("-CONT", server.0.id())?;
    for mut stream in asked {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    assert!(server.ended().await?.0.success());
    Ok(())
}

/// Its text is being computed: nothing is written to it, nor read from it.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_is_noticed() -> Result<(), Failed> {
    let tiny = Tiny::new("left", "", "F32")?;
    let (server, address) = Program::serve(&tiny, &["--isolate"])?;
    until_it_says(address, "/healthz", " 200 ").await?;
    let worker = server.worker().await?;
    signal("-STOP", worker)?;
    let request = "POST /embed HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{\"ids\":[[5]]}";
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    until_it_says(address, "/metrics", "model_waiting 1").await?;
    drop(stream);
    until_it_says(address, "/metrics", "outcome=\"left\"} 1\n").await?;
    signal("-CONT", worker)
}

/// Its reader is gone: the server drains as ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_nobody_reads_ends_nothing() -> Result<(), Failed> {
    let tiny = Tiny::new("unread", "", "F32")?;
    let (mut server, address) = Program::serve(&tiny, &[])?;
    drop(server.0.stderr.take());
    until_it_says(address, "/healthz", " 200 ").await?;
    signal("-TERM", server.0.id())?;
    let status = until(async || server.0.try_wait().ok()?).await?;
    assert!(status.success(), "{status}");
    Ok(())
}

/// Alone in its process, it has more than its time: it is not computed again, whatever its client's patience.
#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_ends_processes_is_refused() -> Result<(), Failed> {
    let tiny = Tiny::new("guilty", "", "F32")?;
    let (server, address) = Program::serve(&tiny, &["--isolate", "--gpu-limit-ms", "5"])?;
    until_it_says(address, "/healthz", " 200 ").await?;
    let text = json!({ "ids": [vec![1; 512]] });
    let (status, answer) = post(address, text.clone()).await?;
    assert_eq!(status, 500, "{answer}");
    until_it_says(address, "/healthz", " 200 ").await?;
    let worker = server.worker().await?;
    let (status, answer) = post_with(address, text, "x-timeout-ms: 50000\r\n").await?;
    assert_eq!(status, 500, "{answer}");
    assert!(answer["error"].as_str().is_some_and(|why| why.contains("is refused")), "{answer}");
    assert_eq!(server.worker().await?, worker);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_no_process_has_ends_the_server() -> Result<(), Failed> {
    let tiny = Tiny::new("given-up", "", "F32")?;
    let error = refusal(&tiny, swap("layer.1.output.dense.bias", "layer.1.output.dense.BIAS"));
    let error = error.await?.to_string();
    let (server, _) = Program::serve(&tiny, &["--isolate"])?;
    let (status, log) = server.ended().await?;
    assert!(status.code() == Some(1) && log.contains(&error), "{log}");
    Ok(())
}

/// Its config is a pipe that nobody writes.
fn blocked(name: &str) -> Result<(Tiny, Vec<u8>), Failed> {
    let tiny = Tiny::new(name, "", "F32")?;
    let path = tiny.folder().join("config.json");
    let config = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    assert!(Command::new("mkfifo").arg(&path).status()?.success());
    Ok((tiny, config))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_blocks_is_loading() -> Result<(), Failed> {
    for way in [&[][..], &["--isolate"]] {
        let (tiny, _) = blocked("blocked")?;
        let (server, address) = Program::serve(&tiny, way)?;
        until_it_says(address, "/healthz", "the model is loading").await?;
        signal("-TERM", server.0.id())?;
        let (status, log) = server.ended().await?;
        assert!(status.success(), "{way:?}: {log}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_outside_of_handlers_are_counted() -> Result<(), Failed> {
    let (tiny, config) = blocked("counted")?;
    let (_server, address) = Program::serve(&tiny, &["--client-timeout", "500"])?;
    assert_eq!(post(address, json!({ "ids": [[5]] })).await?.0, 503);
    std::fs::write(tiny.folder().join("config.json"), config)?;
    until_it_says(address, "/healthz", " 200 ").await?;
    let head = "HTTP/1.1\r\nhost: here\r\nconnection: close";
    let ask = async |what: &str, rest: &str| {
        exchange(address, &format!("{what} {head}\r\n{rest}")).await.map(|(status, _)| status)
    };
    assert_eq!(ask("GET /", "\r\n").await?, 404);
    assert_eq!(ask("GET /embed", "\r\n").await?, 405);
    // Of what is announced nothing comes.
    assert_eq!(ask("POST /embed", "content-length: 2097153\r\n\r\n").await?, 413);
    assert_eq!(ask("POST /embed", "content-length: 2097152\r\n\r\n").await?, 408);
    let mut stream = TcpStream::connect(address).await?;
    let broken_off = format!("POST /embed {head}\r\ncontent-length: 9\r\n\r\n[");
    stream.write_all(broken_off.as_bytes()).await?;
    stream.shutdown().await?;
    until_it_says(address, "/metrics", "outcome=\"400\"} 1\n").await?;
    let metrics = get(address, "/metrics").await?;
    let mut counted: Vec<_> =
        metrics.lines().filter_map(|line| line.strip_prefix("model_requests_total")).collect();
    counted.sort_unstable();
    let expected = [400, 404, 405, 408, 413, 503].map(|it| format!("{{outcome=\"{it}\"}} 1"));
    assert_eq!(counted, expected);
    Ok(())
}

/// The log says that requests fail, and that they do no more.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_thread_fails_its_request() -> Result<(), Failed> {
    for way in [&[][..], &["--isolate"]] {
        let tiny = Tiny::new("threads", "", "F32")?;
        let (server, address) = Program::serve_with(&tiny, way, |command| {
            // More than the C library keeps of threads that have ended.
            command.env("RUST_MIN_STACK", "67108864");
        })?;
        until_it_says(address, "/healthz", " 200 ").await?;
        let pid = if way.is_empty() { server.0.id() } else { server.worker().await? };
        // Threads of the start have ended, whose memory would be free.
        let mut same = (0, 0);
        until(async || {
            let size = size_kb(pid).ok()?;
            same = if same.0 == size { (size, same.1 + 1) } else { (size, 0) };
            (same.1 == 200).then_some(())
        })
        .await?;
        // Less than a stack.
        limit_memory(pid, &(((same.0 << 10) + (16 << 20)).to_string()))?;
        for _ in 0..2 {
            let (status, answer) = post(address, json!({ "ids": [[5]] })).await?;
            assert_eq!(status, 503, "{answer}");
        }
        limit_memory(pid, "unlimited")?;
        // Until then a good answer may be one between two failures.
        sleep(Duration::from_millis(1100)).await;
        embeddings(post(address, json!({ "ids": [[5]] })).await?)?;
        signal("-TERM", server.0.id())?;
        let (status, log) = server.ended().await?;
        assert!(status.success(), "{log}");
        for line in ["WARN encoder::metrics: requests fail: the system refuses", "answered again"] {
            assert_eq!(log.matches(line).count(), 1, "{log}");
        }
    }
    Ok(())
}

fn size_kb(pid: u32) -> Result<u64, Failed> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.strip_suffix(" kB"));
    Ok(size.ok_or("it has a size")?.trim().parse()?)
}

fn limit_memory(pid: u32, most: &str) -> Result<(), Failed> {
    let limit = ["--pid", &pid.to_string(), &format!("--as={most}:")];
    assert!(Command::new("prlimit").args(limit).status()?.success());
    Ok(())
}

/// With the cause, and no panic's status.
#[tokio::test]
async fn refusals_at_the_start_end_with_1() -> Result<(), Failed> {
    let tiny = Tiny::new("refusals", "", "F32")?;
    for (limit, stack, cause) in
        [("8", "", "Too many open files"), ("100", "70368744177664", "WouldBlock")]
    {
        let serve = Program::command(&tiny, &["serve", "--addr", "127.0.0.1:0"]);
        let mut limited = Command::new("sh");
        limited.args(["-c", "ulimit -n $0; exec \"$@\"", limit]).arg(serve.get_program());
        let output = limited.args(serve.get_args()).env("RUST_MIN_STACK", stack).output()?;
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && log.contains(cause), "{log}");
    }
    Ok(())
}
