//! A fork of the front: it has copies of all handles, and none of the threads behind them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::executor::block_on;
use gpu_await_worker::{Call, CallService, Error, Group, Worker, forget_kept, kept};
use tower::{Service, ServiceExt};

use crate::twin::{Do, Done, Twin, run, worker};

/// What the handles answer in a fork; the number of the first one that is wrong.
fn first_wrong(worker: Worker<Twin>, held: Held) -> i32 {
    let Held { mut pending, waiting, lease, payload, group, mut service } = held;
    let forked = |error: Option<Error>| matches!(error, Some(Error::Forked));
    let checks: [&mut dyn FnMut() -> bool; 13] = [
        &mut || forked(worker.try_lease(10).err()),
        &mut || forked(block_on(worker.lease(10)).err()),
        &mut || forked(block_on(worker.call(Do::Pid).into_future()).err()),
        &mut || matches!((&mut pending).now_or_never(), Some(Err(Error::Forked))),
        &mut || forked(block_on(worker.serving()).err()),
        &mut || forked(block_on(crate::twin::worker().spawn()).err()),
        &mut || worker.stats().health.is_none() && worker.log().is_empty(),
        &mut || worker.health().health.is_none() && !worker.health().is_serving(),
        &mut || forked(block_on(group.call(Do::Pid).into_future()).err()),
        &mut || forked(block_on(group.serving()).err()) && !group.health().is_serving(),
        // It was ready before the fork.
        &mut || {
            forked(block_on(service.call(Do::Pid)).err()) && forked(block_on(service.ready()).err())
        },
        &mut || payload.write_to(std::io::stderr(), 0).is_err(),
        &mut || kept().is_empty() && !forget_kept(None, "forks"),
    ];
    for (number, check) in checks.into_iter().enumerate() {
        if !check() {
            return number as i32 + 1;
        }
    }
    // None of these drops may do anything to the parent's.
    drop((pending, waiting, lease, payload, service));
    block_on(group.close(Duration::ZERO));
    block_on(worker.clone().close(Duration::ZERO));
    drop(worker);
    0
}

type Asks = fn(&Worker<Twin>, Do) -> Call<Twin>;

/// What the parent had when it forked.
struct Held {
    pending: gpu_await_worker::Answer<Twin>,
    waiting: gpu_await_worker::Answer<Twin>,
    lease: gpu_await_worker::Lease,
    payload: gpu_await_worker::Payload,
    group: Group<Twin>,
    service: CallService<Worker<Twin>, Asks>,
}

fn ask(worker: &Worker<Twin>, request: Do) -> Call<Twin> {
    worker.call(request)
}

#[test]
fn a_fork_of_the_front_does_nothing_to_its_workers() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let group = Group::spawn([crate::twin::worker()]).await.unwrap();
        // Threads that hold the locks which a fork copies.
        let ends = Arc::new(AtomicBool::new(false));
        let busy: Vec<_> = (0..2)
            .map(|_| {
                let (worker, ends) = (worker.clone(), ends.clone());
                std::thread::spawn(move || {
                    while !ends.load(Ordering::Relaxed) {
                        drop((worker.stats(), worker.try_lease(1)));
                    }
                })
            })
            .collect();
        for round in 0..20 {
            let (_, payload) =
                worker.call(Do::Reverse).payload(vec![1; 100]).send().with_payload().await.unwrap();
            let call = || worker.call(Do::Later(round, Duration::from_millis(5))).send();
            let (here, held) = (
                call(),
                Held {
                    pending: call(),
                    waiting: call(),
                    lease: worker.lease(100).await.unwrap(),
                    payload: payload.unwrap(),
                    group: group.clone(),
                    service: {
                        let mut service = worker.service(ask as Asks);
                        service.ready().await.unwrap();
                        service
                    },
                },
            );
            // SAFETY: the child calls nothing that waits for another thread, which is the point, and ends by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: ends the child if it waits.
                unsafe { libc::alarm(10) };
                let worker = worker.clone();
                let check = std::panic::AssertUnwindSafe(|| first_wrong(worker, held));
                let wrong = std::panic::catch_unwind(check).unwrap_or(99);
                // SAFETY: ends the child.
                unsafe { libc::_exit(wrong) };
            }
            assert_eq!(here.await, Ok(Done::Number(round)));
            assert_eq!(held.pending.await, Ok(Done::Number(round)));
            assert_eq!(held.payload.to_vec(), [1; 100]);
            let ended = tokio::task::spawn_blocking(move || {
                let mut status = 0;
                // SAFETY: waits for a child of this process, which nobody else waits for.
                let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
                (waited == child, status)
            });
            let (waited, status) = ended.await.unwrap();
            assert!(waited && status == 0, "round {round}: {status:#x}");
        }
        ends.store(true, Ordering::Relaxed);
        busy.into_iter().for_each(|thread| thread.join().unwrap());
        let stats = worker.stats();
        assert_eq!((stats.deaths, stats.stale_messages, stats.starts), (0, 0, 1));
        assert_eq!(worker.call(Do::Later(7, Duration::ZERO)).await, Ok(Done::Number(7)));
    });
}

#[test]
fn a_fork_of_a_process_says_nothing_in_its_name() {
    run(async {
        let worker = worker().payload_bytes(4096, 4096).spawn().await.unwrap();
        let runs = worker.call(Do::ForkThatDrops(Duration::from_millis(200)));
        let runs = runs.payload(vec![1; 4096]).send();
        let early = tokio::time::timeout(Duration::from_millis(100), worker.lease(1)).await;
        assert!(early.is_err(), "{early:?}");
        assert!(runs.await.is_ok());
        assert_eq!(worker.lease(4096).await.unwrap().len(), 4096);
        assert_eq!(worker.stats().stale_messages, 0);
    });
}
