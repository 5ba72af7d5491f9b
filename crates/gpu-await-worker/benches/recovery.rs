//! How long after a death is the next right answer there?
//!
//! A fault of the device, somebody's `kill -9`, and a kernel that never ends with a limit of a second; memory is kept meanwhile (16 GiB on a
//! GPU), and never filled again. Each is broken down: until it is known, from there to the answer of the next call, and of that what the
//! worker's own figures say: killed to reaped, reaped to started, started to hello, hello to serving. Medians, of 20 rounds or of `rounds=N`.
//!
//! Then the same of a worker with a standby, without those steps: from the kill, or the call that faults, to the next right answer.
//!
//! Then the same of a worker whose processes write memory (4 GiB on a GPU), with a standby and without, of a process that dies as it writes: until
//! the next one, which waits for the first to be gone, was told so, has written all of it and answered.
//!
//! Then calls that meet what an answered one left on the device: how many of them are found guilty, which is none, and how many of those that may
//! run again are answered, which are all.
//!
//! Then a group of two, on two GPUs where there are two, 64 callers, one of the two killed, and none of its
//! processes starts again: how many of the idempotent calls are answered, and how long they take, over the half second from the first kill on and before it.
//!
//! Then a process that is replaced as it serves, 100 times or `replacements=N`: how long the small calls of two clients take meanwhile, over the
//! same calls of the same clients without a replacement; and how many calls fail, which is none.

#[path = "service.rs"]
mod service;

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpu_await_worker::{Error, Group, Guilt, Worker, gpus, kept};
use service::{Ask, Bench, Half, ONCE, WRITES, builder, is_smoke, on_gpu, print, quantile};

fn main() {
    gpu_await_worker::init::<Bench>();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(recoveries());
}

async fn recoveries() {
    let bytes = if on_gpu() && !is_smoke() { 16 << 30 } else { 16 << 20 };
    let begun = Instant::now();
    let worker = builder(bytes).spawn().await.expect("it starts");
    print("recovery.first_start_ms", begun.elapsed().as_secs_f64() * 1e3, "ms");
    let digest = kept()[0].info.digest;
    let x = vec![1.0f32; 256];
    let right = vec![2.0f32; 256];
    let given = std::env::args().find_map(|given| given.strip_prefix("rounds=")?.parse().ok());
    let rounds = given.unwrap_or(if is_smoke() { 1 } else { 20 });
    for (name, rounds) in [("fault", rounds), ("kill", rounds), ("endless", rounds.min(5))] {
        let mut steps: [Vec<f64>; 7] = Default::default();
        for _ in 0..rounds {
            assert_eq!(worker.call(Ask::Small(x.clone())).await.expect("it serves"), right);
            let begun = Instant::now();
            let limit = Duration::from_secs(1);
            let call = match name {
                "fault" => worker.call(Ask::Fault).send(),
                "endless" => worker.call(Ask::Endless).within(limit).send(),
                _ => {
                    let pid = worker.stats().process.expect("it serves").to_string();
                    let call = worker.call(Ask::Endless).send();
                    Command::new("kill").args(["-9", &pid]).status().expect("kill runs");
                    call
                }
            };
            call.await.expect_err("its process dies");
            let known = begun.elapsed();
            let again = worker.call(Ask::Small(x.clone())).await.expect("the next one serves");
            assert_eq!(again, right);
            let answered = begun.elapsed();
            let start = worker.stats().last_start.expect("it started");
            let times = [
                answered,
                known,
                answered - known,
                start.killed_to_reaped,
                start.reaped_to_started,
                start.started_to_hello,
                start.hello_to_serving,
            ];
            for (step, time) in steps.iter_mut().zip(times) {
                step.push(time.as_secs_f64() * 1e3);
            }
        }
        let names = ["answered", "known", "rest", "reaped", "started", "hello", "serving"];
        for (step, values) in names.iter().zip(&mut steps) {
            print(&format!("recovery.{name}.{step}_ms"), quantile(values, 0.5), "ms");
        }
    }
    worker.clone().close(Duration::from_secs(10)).await;
    with_standby(bytes, rounds, &x, &right).await;
    for standby in [false, true] {
        with_keep_mut(standby, rounds).await;
    }
    left(rounds).await;
    replaced(bytes).await;
    with_group().await;
    let kept = kept();
    let weights = kept.iter().find(|kept| kept.name == "weights").expect("they are kept");
    assert_eq!(weights.info.digest, digest, "it was filled once");
    let stats = worker.stats();
    print("recovery.deaths", stats.deaths as f64, "deaths");
    print("recovery.stale_messages", stats.stale_messages as f64, "messages");
}

async fn with_standby(bytes: usize, rounds: usize, x: &[f32], right: &[f32]) {
    let worker = builder(bytes).standby(true).spawn().await.expect("it starts");
    for name in ["fault", "kill"] {
        let (mut known, mut answered, mut taken, mut standby) = (vec![], vec![], vec![], vec![]);
        for _ in 0..rounds {
            let begun = Instant::now();
            while worker.stats().standby.is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            standby.push(begun.elapsed().as_secs_f64() * 1e3);
            assert_eq!(worker.call(Ask::Small(x.to_vec())).await.expect("it serves"), right);
            let takeovers = worker.stats().takeovers;
            let begun = Instant::now();
            let call = if name == "fault" {
                worker.call(Ask::Fault).send()
            } else {
                let pid = worker.stats().process.expect("it serves").to_string();
                let call = worker.call(Ask::Endless).send();
                Command::new("kill").args(["-9", &pid]).status().expect("kill runs");
                call
            };
            // What the next caller sees: not the end of the call that died, which comes when its process is gone.
            while worker.stats().takeovers == takeovers {
                tokio::task::yield_now().await;
            }
            taken.push(begun.elapsed().as_secs_f64() * 1e3);
            let next = worker.call(Ask::Small(x.to_vec())).await.expect("the standby serves");
            assert_eq!(next, right);
            answered.push(begun.elapsed().as_secs_f64() * 1e3);
            call.await.expect_err("its process dies");
            known.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        for (step, mut values) in [
            ("taken_over", taken),
            ("answered", answered),
            ("known", known),
            ("next_standby", standby),
        ] {
            print(&format!("recovery.standby.{name}.{step}_ms"), quantile(&mut values, 0.5), "ms");
        }
    }
    print("recovery.standby.deaths", worker.stats().deaths as f64, "deaths");
}

async fn with_keep_mut(standby: bool, rounds: usize) {
    let bytes = if on_gpu() && !is_smoke() { 4usize << 30 } else { 16 << 20 };
    let worker = builder(0).standby(standby).env(WRITES, bytes.to_string());
    let worker = worker.spawn().await.expect("it starts");
    let write = || worker.call(Ask::Write(None));
    for (name, half) in [("fault", Half::Fault), ("kill", Half::Endless)] {
        let mut times = Vec::new();
        for _ in 0..rounds {
            while standby && worker.stats().standby.is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let last = write().await.expect("it serves");
            let call = worker.call(Ask::Write(Some(half))).send();
            while name == "kill" && !worker.log().ends_with("it writes\n") {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let begun = Instant::now();
            if name == "kill" {
                let pid = worker.stats().process.expect("it serves").to_string();
                Command::new("kill").args(["-9", &pid]).status().expect("kill runs");
            }
            call.await.expect_err("its process dies");
            let next = write().await.expect("the next one serves");
            times.push(begun.elapsed().as_secs_f64() * 1e3);
            // What the one that died wrote is there, or not.
            assert!(next[0] == 1.0 && next[2] == next[1] + 1.0 && next[1] >= last[2], "{next:?}");
        }
        let of = if standby { "keep_mut.standby" } else { "keep_mut" };
        print(&format!("recovery.{of}.{name}.answered_ms"), quantile(&mut times, 0.5), "ms");
    }
    worker.close(Duration::from_secs(10)).await;
}

async fn left(rounds: usize) {
    let worker = builder(0).spawn().await.expect("it starts");
    let (mut guilty, mut again, mut answered) = (0usize, 0usize, 0usize);
    for _ in 0..rounds {
        let deaths = worker.stats().deaths;
        // Lost itself if its fault is known by then.
        drop(worker.call(Ask::Leave).await);
        for n in 0.. {
            if worker.stats().deaths > deaths {
                break;
            }
            let call = worker.call(Ask::Small(vec![1.0; 256]));
            let ended = if n % 2 == 0 { call.idempotent().await } else { call.await };
            again += usize::from(n % 2 == 0);
            answered += usize::from(n % 2 == 0 && ended.as_ref().is_ok_and(|y| *y == [2.0; 256]));
            let is_guilty = matches!(ended, Err(Error::Lost(lost)) if lost.guilt == Guilt::Alone);
            guilty += usize::from(is_guilty);
        }
    }
    print("recovery.left.guilty", guilty as f64, "calls");
    print("recovery.left.answered", answered as f64 / again.max(1) as f64, "of all");
    worker.close(Duration::from_secs(10)).await;
}

/// Calls of two clients until told to stop: how long each took, in ms, and how many failed.
async fn clients(worker: &Worker<Bench>, stop: &Arc<AtomicBool>) -> (Vec<f64>, usize) {
    let client = |worker: Worker<Bench>, stop: Arc<AtomicBool>| async move {
        let (mut times, mut failed) = (Vec::new(), 0);
        while !stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let answer = worker.call(Ask::Small(vec![1.0; 256])).await;
            failed += usize::from(answer != Ok(vec![2.0; 256]));
            times.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        (times, failed)
    };
    let both = [(); 2].map(|()| tokio::spawn(client(worker.clone(), stop.clone())));
    let (mut times, mut failed) = (Vec::new(), 0);
    for client in both {
        let (its, failures) = client.await.expect("no panic");
        times.extend(its);
        failed += failures;
    }
    (times, failed)
}

async fn replaced(bytes: usize) {
    let given =
        std::env::args().find_map(|given| given.strip_prefix("replacements=")?.parse().ok());
    let count = given.unwrap_or(if is_smoke() { 2 } else { 100 });
    let worker = builder(bytes).spawn().await.expect("it starts");
    let mut of_each = Vec::new();
    let (mut p50, mut failed) = (Vec::new(), 0);
    let mut took = Vec::new();
    for replaces in [false, true] {
        let stop = Arc::new(AtomicBool::new(false));
        let (client, stopped) = (worker.clone(), stop.clone());
        let calls = tokio::spawn(async move { clients(&client, &stopped).await });
        if replaces {
            for _ in 0..count {
                let begun = Instant::now();
                worker.replace().await.expect("it is replaced");
                took.push(begun.elapsed().as_secs_f64() * 1e3);
            }
        } else {
            tokio::time::sleep(Duration::from_millis(if is_smoke() { 50 } else { 3000 })).await;
        }
        stop.store(true, Ordering::Relaxed);
        let (mut times, failures) = calls.await.expect("no panic");
        of_each.push(quantile(&mut times, 0.99));
        p50.push(quantile(&mut times, 0.5));
        failed += failures;
    }
    let stats = worker.stats();
    print("recovery.replaced.replacements", stats.replacements as f64, "replacements");
    print("recovery.replaced.took_ms", quantile(&mut took, 0.5), "ms");
    print("recovery.replaced.calls_p50", p50[1] / p50[0], "of the same without");
    print("recovery.replaced.calls_p99", of_each[1] / of_each[0], "of the same without");
    print("recovery.replaced.calls_p99_ms", of_each[1], "ms");
    print("recovery.replaced.failed", failed as f64, "calls");
}

/// Two devices, one of which does not come back.
async fn with_group() {
    let gpus = gpus().expect("GPUs are listed");
    let second = match gpus.get(1) {
        Some(gpu) if on_gpu() => builder(0).gpu(gpu.uuid.clone()),
        _ => builder(0),
    };
    let once = std::env::temp_dir().join(format!("gpu-await-recovery-{}", std::process::id()));
    std::fs::write(&once, "").expect("a file is written");
    let group = Group::spawn([builder(0), second.env(ONCE, once)]).await.expect("both start");
    let begun = Instant::now();
    let half = Duration::from_millis(if is_smoke() { 100 } else { 500 });
    let callers: Vec<_> = (0..64)
        .map(|_| {
            let group = group.clone();
            tokio::spawn(async move {
                let mut calls = Vec::new();
                while begun.elapsed() < 2 * half {
                    let at = begun.elapsed();
                    let answer = group.call(Ask::Small(vec![1.0; 256])).idempotent().await;
                    assert!(answer.as_ref().is_ok_and(|y| *y == [2.0; 256]) || answer.is_err());
                    calls.push((at, begun.elapsed() - at, answer.is_ok()));
                }
                calls
            })
        })
        .collect();
    tokio::time::sleep(half).await;
    let pid = group.stats().workers[1].process.expect("it serves").to_string();
    Command::new("kill").args(["-9", &pid]).status().expect("kill runs");
    let mut calls = Vec::new();
    for caller in callers {
        calls.extend(caller.await.expect("right answers"));
    }
    let answered = calls.iter().filter(|(.., answered)| *answered).count() as f64;
    print("recovery.group.calls", calls.len() as f64, "calls");
    print("recovery.group.answered", answered / calls.len() as f64, "of all");
    print("recovery.group.moved", group.stats().moved as f64, "calls");
    for (name, is_in) in [("before", false), ("after", true)] {
        let part = calls.iter().filter(|(at, ..)| (*at >= half) == is_in);
        let mut times: Vec<_> = part.map(|(_, took, _)| took.as_secs_f64() * 1e3).collect();
        print(&format!("recovery.group.{name}.p50_ms"), quantile(&mut times, 0.5), "ms");
        print(&format!("recovery.group.{name}.p99_ms"), quantile(&mut times, 0.99), "ms");
    }
    group.close(Duration::from_secs(10)).await;
}
