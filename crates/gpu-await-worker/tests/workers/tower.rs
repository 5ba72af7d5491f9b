//! Workers and groups below layers of tower.

use std::cell::Cell;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{join, join_all};
use gpu_await_worker::{Call, Error, Group, Restart, Worker, WorkerBuilder};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt};

use crate::twin::{Do, Done, Start, Twin, eventually, kill, lost, run, worker};

const LONG: Duration = Duration::from_secs(3600);

fn call(worker: &Worker<Twin>, request: Do) -> Call<Twin> {
    worker.call(request)
}

fn call_group(group: &Group<Twin>, request: Do) -> Call<Twin> {
    group.call(request)
}

fn two(calls: usize) -> [WorkerBuilder<Twin>; 2] {
    [worker().most_calls(calls), worker().most_calls(calls)]
}

#[track_caller]
fn is_pending<S: Service<Do>>(service: &mut S) {
    assert!(service.ready().now_or_never().is_none(), "it is ready, or failed");
}

#[test]
fn a_worker_is_a_tower_service() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let mut service = worker.service(call);
        let answer = service.ready().await.unwrap().call(Do::Double(vec![1.0])).await;
        assert_eq!(answer, Ok(Done::Floats(vec![2.0])));
        lost(service.ready().await.unwrap().call(Do::Abort).await);
        // Ready says nothing of a process: the call waits for the next one.
        assert!(service.ready().await.unwrap().call(Do::Pid).await.is_ok());
        // The function makes whatever call it likes.
        let limit = Duration::from_millis(10);
        let with =
            move |worker: &Worker<Twin>, n: u32| worker.call(Do::Later(n, LONG)).deadline(limit);
        let mut service = worker.service(with);
        assert_eq!(service.ready().await.unwrap().call(1).await, Err(Error::Deadline));
        worker.close(Duration::ZERO).await;
        assert_eq!(service.ready().await.err(), Some(Error::Closed));
    });
}

#[test]
fn readiness_reserves_room() {
    run(async {
        let worker = worker().most_calls(2).spawn().await.unwrap();
        let mut services = [(); 5].map(|()| worker.service(call));
        let [one, two, three, four, five] = &mut services;
        one.ready().await.unwrap();
        two.ready().await.unwrap();
        // Both places are theirs, though nobody has called.
        let refused = worker.call(Do::Pid).await;
        assert!(matches!(refused, Err(Error::Overloaded { found: 2, limit: 2, .. })));
        is_pending(three);
        is_pending(four);
        is_pending(five);
        // A clone has none, and does not give it back.
        drop(one.clone());
        is_pending(three);
        let answer = one.call(Do::Later(7, LONG)).boxed();
        is_pending(three);
        // In their order, without the one that gave up.
        *three = worker.service(call);
        *two = worker.service(call);
        is_pending(five);
        four.ready().await.unwrap();
        is_pending(three);
        // An abandoned call counts until its process is done with it; a dead one is.
        drop(answer);
        is_pending(five);
        crate::twin::kill(&worker);
        five.ready().await.unwrap();
        let (four, five) = futures::join!(four.call(Do::Pid), five.call(Do::Pid));
        assert!(four.is_ok() && five == four);
        three.ready().await.unwrap();
        drop(services);
        let mut free = [(); 2].map(|()| worker.service(call));
        assert!(free.iter_mut().all(|service| service.ready().now_or_never().is_some()));
    });
}

/// Room on its way to a service that is dropped is nobody else's for no moment.
#[test]
fn room_for_who_goes_is_free_at_once() {
    run(async {
        let worker = worker().most_calls(1).spawn().await.unwrap();
        for round in 0..500 {
            let (mut has, mut waits) = (worker.service(call), worker.service(call));
            has.ready().await.unwrap();
            is_pending(&mut waits);
            let answer = has.call(Do::Pid);
            // With it the room goes to the one that waits, by another thread.
            answer.await.unwrap();
            drop(waits);
            let mut next = worker.service(call);
            assert!(next.ready().now_or_never().is_some(), "round {round}");
        }
    });
}

#[test]
fn readiness_ends_with_the_worker() {
    run(async {
        let worker = worker().most_calls(1).spawn().await.unwrap();
        let call_of_it = worker.call(Do::Later(1, LONG)).send();
        let mut service = worker.service(call);
        let waits = tokio::spawn(async move { service.ready().await.map(drop) });
        tokio::task::yield_now().await;
        worker.close(Duration::ZERO).await;
        assert_eq!(waits.await.unwrap(), Err(Error::Closed));
        lost(call_of_it.await);
    });
}

#[test]
fn load_shed_refuses_what_has_no_room() {
    run(async {
        let worker = worker().most_calls(1).spawn().await.unwrap();
        let service = ServiceBuilder::new().load_shed().service(worker.service(call));
        let (first, second) = (service.clone(), service.clone());
        let first = first.oneshot(Do::Later(1, Duration::from_millis(300)));
        let second = async {
            eventually("it runs", || worker.stats().running == 1);
            second.oneshot(Do::Pid).await
        };
        let (first, second): (Result<_, BoxError>, Result<_, BoxError>) =
            futures::join!(first, second);
        assert_eq!(first.unwrap(), Done::Number(1));
        assert!(second.unwrap_err().is::<tower::load_shed::error::Overloaded>());
        assert_eq!(worker.stats().overloads, 0, "it did not come so far");
        assert!(service.oneshot(Do::Pid).await.is_ok());
    });
}

#[test]
fn time_and_concurrency_are_limited() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let limit = Duration::from_millis(50);
        let service = ServiceBuilder::new().timeout(limit).service(worker.service(call));
        let late = service.clone().oneshot(Do::Later(1, LONG)).await;
        assert!(late.unwrap_err().is::<tower::timeout::error::Elapsed>());
        let service = ServiceBuilder::new().concurrency_limit(2).service(worker.service(call));
        let calls = (0..6u32).map(|n| {
            let (service, worker) = (service.clone(), worker.clone());
            async move {
                let answer = service.oneshot(Do::Later(n, Duration::from_millis(20))).await;
                // And the one that the time-out left there.
                assert!(worker.stats().calls <= 3);
                answer
            }
        });
        let answers = futures::future::join_all(calls).await;
        assert_eq!(answers, (0..6).map(|n| Ok(Done::Number(n))).collect::<Vec<_>>());
    });
}

#[test]
fn a_group_is_a_tower_service() {
    run(async {
        let group = Group::spawn(two(1)).await.unwrap();
        let mut services = [(); 3].map(|()| group.service(call_group));
        let [one, two, three] = &mut services;
        one.ready().await.unwrap();
        two.ready().await.unwrap();
        // Room for one at each.
        is_pending(three);
        let first = one.call(Do::Later(1, Duration::from_millis(50)));
        let second = two.call(Do::Later(2, LONG));
        assert_eq!(first.await, Ok(Done::Number(1)));
        // Whichever has room first.
        three.ready().await.unwrap();
        assert!(three.call(Do::Pid).await.is_ok());
        drop(second);
        // What was reserved at one that ends is a call of the other.
        one.ready().await.unwrap();
        let free = group.workers().position(|worker| worker.stats().calls == 0).unwrap();
        let workers: Vec<_> = group.workers().collect();
        crate::twin::kill(&workers[1 - free]);
        eventually("it serves again", || group.stats().workers[1 - free].calls == 0);
        workers[free].clone().close(Duration::ZERO).await;
        assert!(one.call(Do::Pid).await.is_ok());
        group.clone().close(Duration::ZERO).await;
        assert_eq!(one.ready().await.err(), Some(Error::Closed));
    });
}

/// A reserved place, and that of a call which is sent again, hold whatever dies.
#[test]
fn room_holds_whatever_dies() {
    run(async {
        const KILLS: usize = 30;
        let quick = Restart { most_delay: Duration::from_millis(5), ..Restart::default() };
        let group = Group::spawn(two(4).map(|worker| worker.restart(quick))).await.unwrap();
        let (is_over, answered) = (Cell::new(false), Cell::new(0u32));
        let again = |group: &Group<Twin>, request| group.call(request).idempotent();
        let request = || Do::Later(7, Duration::from_millis(2));
        // A call that was killed twice may be lost; one that was killed once is sent again.
        let ended = |ended: Result<Done, Error>| match ended {
            Err(Error::Lost(lost)) if lost.attempt > 1 => {}
            Ok(Done::Number(7)) => answered.set(answered.get() + 1),
            other => panic!("{other:?}"),
        };
        let reserved = (0..24).map(|_| async {
            let mut service = group.service(again);
            while !is_over.get() {
                ended(service.ready().await.unwrap().call(request()).await);
            }
        });
        let plain = (0..4).map(|_| async {
            while !is_over.get() {
                match group.call(request()).idempotent().await {
                    Err(Error::Overloaded { found, limit, .. }) => {
                        assert!(found >= limit, "{found} of {limit}");
                        tokio::task::yield_now().await;
                    }
                    other => ended(other),
                }
            }
        });
        let kills = async {
            for turn in 0..KILLS {
                let worker = group.workers().nth(turn % 2).unwrap();
                while worker.stats().running < 2 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                kill(&worker);
                let goal = answered.get() + 20;
                while answered.get() < goal {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            is_over.set(true);
        };
        join(kills, join(join_all(reserved), join_all(plain))).await;
        // Nothing of it is left.
        let mut free = [(); 8].map(|()| group.service(call_group));
        for service in &mut free {
            service.ready().await.unwrap();
        }
        is_pending(&mut group.service(call_group));
    });
}

#[test]
fn a_group_that_is_given_up_says_so() {
    run(async {
        let hour = Restart { first_delay: LONG, most_delay: LONG, ..Restart::default() };
        let start = || Start { once: Some("/proc/none".to_owned()), ..Start::default() };
        let workers = [(); 2].map(|()| Worker::<Twin>::builder(start()).threads(2).restart(hour));
        let group = Group::begin(workers).unwrap();
        eventually("both are given up", || group.health().has_ended());
        let of_call = group.call(Do::Pid).await.unwrap_err();
        let of_service = group.service(call_group).ready().await.err().unwrap();
        for error in [of_call, of_service] {
            assert!(matches!(error, Error::GivenUp { .. }), "{error:?}");
        }
    });
}
