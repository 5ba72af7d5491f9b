//! Many deaths of all kinds, under load, without a standby and with one, with memory that outlives processes and that they write: no call is without
//! an end or a wrong answer, nothing grows, and no two processes write at once.
//!
//! `GPU_AWAIT_TEST_DEATHS` says how many, 200 by default. In a binary of its own, as it counts what its process has.

#[path = "workers/misbehave.rs"]
mod misbehave;
#[path = "workers/twin.rs"]
#[expect(dead_code, reason = "what other tests use")]
mod twin;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpu_await_worker::{Error, Restart, Worker, forget_kept, kept};
use twin::{Do, Done, Start, Twin, Write, eventually};

gpu_await_worker::test_main!(twin::Twin, twin::NeverStarts);

/// What this process has: descriptors, threads, resident bytes.
fn has() -> (usize, usize, u64) {
    let count = |folder| std::fs::read_dir(folder).unwrap().count();
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    (count("/proc/self/fd"), count("/proc/self/task"), pages * 4096)
}

async fn client(worker: Worker<Twin>, seed: u64, done: Arc<AtomicU64>, deaths: u64) {
    let mut n = seed;
    while worker.stats().deaths < deaths {
        n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = (n >> 33) as u32;
        let ended = match x % 16 {
            0..=5 => {
                let call = worker.call(Do::Later(x, Duration::ZERO)).idempotent();
                call.await.map(|answer| assert_eq!(answer, Done::Number(x)))
            }
            6..=9 => {
                let bytes: Vec<u8> = (0..x % 5000).map(|at| (at ^ x) as u8).collect();
                let call = worker.call(Do::Reverse).payload(bytes.clone()).send().with_payload();
                call.await.map(|(_, payload)| {
                    let answer: Vec<u8> = payload.unwrap().to_vec().into_iter().rev().collect();
                    assert_eq!(answer, bytes);
                })
            }
            10 => {
                // A second writer, or a torn write that nobody owns up to, is an error of the service.
                let slowly = Write::Slowly(Duration::from_millis(u64::from(x / 16 % 3)));
                let call = worker.call(Do::Count(if x & 64 == 0 { slowly } else { Write::Dies }));
                call.await.map(drop)
            }
            11 => {
                let numbers = vec![x as f32; 100];
                let call = worker.call(Do::Double(numbers));
                let doubled = Done::Floats(vec![2.0 * x as f32; 100]);
                call.await.map(|answer| assert_eq!(answer, doubled))
            }
            12 => {
                let later = Do::Later(1, Duration::from_millis(20));
                worker.call(later).deadline(Duration::from_millis(2)).await.map(drop)
            }
            13 => {
                // Nobody waits for it.
                drop(worker.call(Do::Reverse).payload(vec![1; 3000]).send());
                Ok(())
            }
            _ => {
                let poison = [
                    Do::Abort,
                    Do::Exit(3),
                    Do::Fault,
                    Do::Stray,
                    Do::Loop,
                    Do::AnswerAndDie,
                    Do::Fuzz(u64::from(x)),
                ];
                let poison = poison[x as usize / 16 % poison.len()].clone();
                worker.call(poison).within(Duration::from_millis(30)).await.map(drop)
            }
        };
        match ended {
            Ok(()) | Err(Error::Lost(_) | Error::Deadline | Error::Overloaded { .. }) => {}
            // A process that forges messages may forge its own answers.
            Err(Error::Service(why)) if ["two writers", "torn"].contains(&&*why) => panic!("{why}"),
            Err(Error::Service(_) | Error::Panicked(_)) => {}
            Err(
                Error::Decode { .. }
                | Error::Encode { .. }
                | Error::TooLarge { .. }
                | Error::TooDeep { .. }
                | Error::PayloadsHeld { .. },
            ) => {}
            Err(error) => panic!("{error:?}"),
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Until so many have died, on two workers with clients beside each other.
fn storm(deaths: u64) -> u64 {
    let runtime = runtime();
    let done = Arc::new(AtomicU64::new(0));
    runtime.block_on(async {
        let mut clients = Vec::new();
        let mut workers = Vec::new();
        for seed in 0..2 {
            let restart = Restart {
                early_deaths: u32::MAX,
                first_delay: Duration::ZERO,
                ..Restart::default()
            };
            let payloads = 1 << 20;
            // One of them has a standby.
            let config = Start { keep_mut: Some(format!("cache {seed}")), ..Start::default() };
            let worker = Worker::<Twin>::builder(config).threads(2);
            let worker = worker.restart(restart).payload_bytes(payloads, payloads);
            let worker = worker.standby(seed == 1);
            let worker = worker.spawn().await.unwrap();
            for client_seed in 0..6 {
                let seed = seed * 100 + client_seed;
                let client = client(worker.clone(), seed, done.clone(), deaths / 2);
                clients.push(tokio::spawn(client));
            }
            workers.push(worker);
        }
        let limit = Duration::from_secs(60 + deaths / 5);
        for client in clients {
            tokio::time::timeout(limit, client).await.expect("every call ends").unwrap();
        }
        assert!(workers[1].stats().takeovers > deaths / 10, "{:?}", workers[1].stats());
        for worker in workers {
            assert_eq!(worker.stats().stuck, 0);
            worker.close(Duration::ZERO).await;
        }
        for seed in 0..2 {
            forget_kept(None, &format!("cache {seed}"));
        }
        assert!(kept().is_empty(), "a process that is reaped has it");
    });
    done.load(Ordering::Relaxed)
}

#[test]
fn no_death_loses_a_call_or_leaves_anything() {
    gpu_await_worker_init();
    let deaths = std::env::var("GPU_AWAIT_TEST_DEATHS").ok().and_then(|text| text.parse().ok());
    let deaths = deaths.unwrap_or(200);
    // Whoever started the tests may have left them descriptors, and the first runtime of a process opens some for
    // good, where tokio is built with signals.
    drop(runtime());
    let before = has().0;
    storm(20);
    // The supervisor's thread lets go of a worker just after it said that it has ended.
    eventually("one event, and no process", || has().0 <= before + 1);
    let (fds, threads, bytes) = has();
    let calls = storm(deaths);
    eventually("no descriptor is left", || has().0 <= fds);
    let after = has();
    println!("{deaths} deaths, {calls} calls; {fds} {threads} {bytes} before, {after:?} after");
    assert!(after.1 <= threads, "{:?} after {:?}", after, (fds, threads));
    assert!(after.2 <= bytes + (8 << 20), "{} after {bytes} bytes", after.2);
}
