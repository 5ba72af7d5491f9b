//! Panics of the code that looks after workers, injected.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::trips::{BETWEEN, RARE, Trip, UNMAPPED};
use crate::{Cause, Error, Failure, Health, Host, Payloads, Service, Worker};

/// Answers later.
#[derive(Debug)]
struct Later;

impl Service for Later {
    type Config = ();
    type Request = Option<Duration>;
    type Response = u32;

    async fn start((): (), _: &Host) -> Result<Self, Failure> {
        Ok(Later)
    }

    async fn call(&self, delay: Option<Duration>, _: &mut Payloads) -> Result<u32, Failure> {
        match delay {
            Some(delay) => tokio::time::sleep(delay).await,
            None => std::process::abort(),
        }
        Ok(std::process::id())
    }
}

crate::test_main!(Later);

const LONG: Option<Duration> = Some(Duration::from_secs(3600));
const NOW: Option<Duration> = Some(Duration::ZERO);

fn run(test: impl Future<Output = ()>) {
    let _one = ONE_TEST.lock();
    gpu_await_worker_init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limit = Duration::from_secs(30);
    runtime.block_on(async { tokio::time::timeout(limit, test).await.expect("it ends") });
}

async fn worker() -> Worker<Later> {
    Worker::builder(()).payload_bytes(4096, 4096).spawn().await.unwrap()
}

#[track_caller]
fn is_injected<T: std::fmt::Debug>(result: Result<T, Error>) {
    match result {
        Err(Error::GivenUp { cause: Cause::Supervisor(why), .. }) if why.contains("injected") => {}
        other => panic!("{other:?}"),
    }
}

fn lives(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

/// A panic between two workers ends all workers, even those of another test.
static ONE_TEST: gpu_await_protocol::lock::Mutex<()> = gpu_await_protocol::lock::Mutex::new(());

#[test]
fn a_panic_ends_one_worker() {
    run(async {
        let calm = worker().await;
        for at in [Trip::Turn, Trip::Lose] {
            let worker = worker().await;
            let pid = worker.stats().process.unwrap();
            let _all = worker.try_lease(4096).unwrap();
            let calls: Vec<_> = (0..3).map(|_| worker.call(LONG).send()).collect();
            let waits = worker.call(NOW).payload(vec![1]).send();
            let lease = worker.lease(1);
            worker.handle.inside.spec.trips.arm(at);
            super::wake();
            if let Trip::Lose = at {
                drop(worker.call(None).send());
            }
            for call in calls.into_iter().chain([waits]) {
                is_injected(call.await);
            }
            is_injected(lease.await);
            is_injected(worker.serving().await);
            is_injected(worker.call(NOW).await);
            // Which lease has which part of its memory is no longer known.
            is_injected(worker.revive().await);
            assert_eq!(worker.stats().health, Some(Health::GivenUp));
            while lives(pid) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // Another worker, and one that comes now, notice nothing.
            assert_eq!(calm.call(NOW).await, Ok(calm.stats().process.unwrap()));
            worker.close(Duration::ZERO).await;
        }

        // While one starts.
        let starts = Worker::<Later>::builder(()).begin().unwrap();
        starts.handle.inside.spec.trips.arm(Trip::Turn);
        super::wake();
        is_injected(starts.serving().await);
        assert_eq!(calm.stats().deaths, 0);
    });
}

#[test]
fn a_panic_between_workers_ends_all() {
    run(async {
        let (one, other) = (worker().await, worker().await);
        let pids = [&one, &other].map(|worker| worker.stats().process.unwrap());
        let calls = [&one, &other].map(|worker| worker.call(LONG).send());
        BETWEEN.store(true, Ordering::SeqCst);
        super::wake();
        for call in calls {
            is_injected(call.await);
        }
        while pids.into_iter().any(lives) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let next = worker().await;
        assert!(next.call(NOW).await.is_ok());
    });
}

#[test]
fn a_slow_start_holds_up_nobody() {
    run(async {
        let calm = worker().await;
        let slow = Worker::<Later>::builder(()).restart(crate::Restart::default()).spawn().await;
        let slow = slow.unwrap();
        slow.handle.inside.spec.trips.is_slow.store(true, Ordering::SeqCst);
        assert!(matches!(slow.call(None).await, Err(Error::Lost(_))));
        // The other worker answers, and the handles of this one do.
        let begun = std::time::Instant::now();
        for _ in 0..3 {
            let late = calm.call(LONG).deadline(Duration::from_millis(20)).await;
            assert_eq!(late, Err(Error::Deadline));
            assert!(calm.call(NOW).await.is_ok());
            assert_eq!(slow.stats().process, None);
            drop((slow.log(), slow.try_lease(1)));
            let late = slow.call(NOW).deadline(Duration::from_millis(20)).await;
            assert_eq!(late, Err(Error::Deadline));
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        slow.handle.inside.spec.trips.is_slow.store(false, Ordering::SeqCst);
        assert!(slow.call(NOW).await.is_ok());
        // A process that nobody wants any more by the time it has started.
        slow.handle.inside.spec.trips.is_slow.store(true, Ordering::SeqCst);
        slow.handle.inside.spec.trips.waits.store(false, Ordering::SeqCst);
        assert!(matches!(slow.call(None).await, Err(Error::Lost(_))));
        while !slow.handle.inside.spec.trips.waits.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let (inside, waits) = (slow.handle.inside.clone(), slow.call(NOW).send());
        let closing = tokio::spawn(slow.close(Duration::ZERO));
        assert_eq!(waits.await, Err(Error::Closed));
        inside.spec.trips.is_slow.store(false, Ordering::SeqCst);
        closing.await.unwrap();
        assert_eq!(inside.stats().starts, 3);
    });
}

#[test]
fn what_a_process_leaves_is_freed_elsewhere() {
    run(async {
        let rare = RARE as u64 - crate::slab::status_bytes(4096);
        let mut worker =
            Some(Worker::<Later>::builder(()).payload_bytes(4096, rare).spawn().await.unwrap());
        for round in 0..3 {
            if let Some(worker) = &worker {
                worker.serving().await.unwrap();
            }
            // One that dies, one that is replaced, one that is closed.
            match (&worker, round) {
                (Some(worker), 0) => drop(worker.call(None).await),
                (Some(worker), 1) => worker.replace().await.unwrap(),
                _ => drop(worker.take()),
            }
            assert_eq!(unmapped().await, "gpu-await-starts", "{round}");
        }
        // The memory of requests is freed with the last reference to the worker, which this thread may drop.
        let worker = Worker::<Later>::builder(()).payload_bytes(RARE as u64, 4096).spawn().await;
        drop(worker.unwrap());
        assert_ne!(unmapped().await, "gpu-await-workers");
    });
}

async fn unmapped() -> String {
    loop {
        let thread = UNMAPPED.lock().take();
        if let Some(thread) = thread {
            return thread;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
