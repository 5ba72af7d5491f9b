//! A second process that takes over.

use std::time::Duration;

use gpu_await_worker::{Cause, Error, Guilt, Health, Restart, Worker, WorkerBuilder};
use gpu_await_worker::{forget_kept, kept};

use crate::front::is_stopped;
use crate::twin::{Do, Done, Start, Twin, Use, eventually, kill, lives, lost, run, signal, worker};

const LONG: Duration = Duration::from_secs(3600);

fn quick() -> Restart {
    Restart { first_delay: Duration::ZERO, early_deaths: 2, ..Restart::default() }
}

fn with_standby() -> WorkerBuilder<Twin> {
    worker().restart(quick()).standby(true)
}

/// Waits until a standby is ready; returns its number.
#[track_caller]
fn ready(worker: &Worker<Twin>) -> u32 {
    eventually("a standby is ready", || worker.stats().standby.is_some());
    worker.stats().standby.unwrap()
}

#[test]
fn a_standby_takes_over() {
    run(async {
        let worker = with_standby().spawn().await.unwrap();
        for round in 1..=5 {
            let (main, standby) = (worker.stats().process.unwrap(), ready(&worker));
            assert_ne!(main, standby);
            match round % 3 {
                0 => drop(lost(worker.call(Do::Abort).await)),
                1 => drop(lost(worker.call(Do::Fault).await)),
                _ => kill(&worker),
            }
            eventually("it is seen", || worker.stats().takeovers == round);
            // The next one is right, and there at once.
            assert_eq!(worker.call(Do::Pid).await, Ok(Done::Number(standby)));
            eventually("the other one is gone", || !lives(main));
        }
        let stats = worker.stats();
        assert_eq!((stats.health, stats.standby_deaths), (Some(Health::Serving), 0));
        let all = [stats.process.unwrap(), ready(&worker)];
        worker.close(Duration::ZERO).await;
        assert!(!all.into_iter().any(lives));
    });
}

#[test]
fn without_a_standby_there_is_one_process() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        lost(worker.call(Do::Abort).await);
        worker.serving().await.unwrap();
        let stats = worker.stats();
        assert_eq!((stats.starts, stats.standby, stats.takeovers), (2, None, 0));
    });
}

#[test]
fn it_takes_over_before_the_other_one_is_gone() {
    run(async {
        let worker = with_standby().spawn().await.unwrap();
        let (main, standby) = (worker.stats().process.unwrap(), ready(&worker));
        // What it had is not lost, and not sent again, before it is gone.
        let limit = Duration::from_millis(30);
        let first = worker.call(Do::Loop).within(limit).send();
        let again = worker.call(Do::Pid).payload(vec![7; 1000]).idempotent().send();
        assert_eq!(lost(first.await).cause, Cause::CallLimit(limit));
        let again = again.await;
        assert!(again == Ok(Done::Number(standby)) || again == Ok(Done::Number(main)), "{again:?}");
    });
}

#[test]
fn payloads_survive_a_takeover() {
    run(async {
        let worker = with_standby().payload_bytes(1 << 20, 1 << 20).spawn().await.unwrap();
        for round in 0..10u8 {
            ready(&worker);
            let calls: Vec<_> = (0..20u8)
                .map(|n| {
                    let call = worker.call(Do::First(Use::Keep, Duration::from_millis(3)));
                    call.payload(vec![n; 20_000]).idempotent().send()
                })
                .collect();
            if round % 2 == 0 {
                kill(&worker);
            } else {
                drop(worker.call(Do::Abort).await);
            }
            let fresh: Vec<_> = (100..120u8)
                .map(|n| {
                    let call = worker.call(Do::First(Use::Drop, Duration::from_millis(1)));
                    call.payload(vec![n; 20_000]).idempotent().send()
                })
                .collect();
            for (n, call) in (0..20).chain(100..120).zip(calls.into_iter().chain(fresh)) {
                assert_eq!(call.await, Ok(Done::Number(n)));
            }
        }
        assert_eq!(worker.stats().stale_messages, 0);
        assert!(worker.lease(1 << 20).await.is_ok(), "all memory came back");
    });
}

#[test]
fn suspects_run_in_the_standby() {
    run(async {
        let worker = with_standby().spawn().await.unwrap();
        ready(&worker);
        let brief = Duration::from_millis(20);
        let good: Vec<_> =
            (0..5).map(|n| worker.call(Do::Later(n, brief)).idempotent().send()).collect();
        let poison = worker.call(Do::Abort).idempotent().send();
        eventually("it took over", || worker.stats().takeovers == 1);
        // Nobody waits for the suspects.
        let main = worker.stats().process.unwrap();
        let long = worker.call(Do::Later(9, Duration::from_millis(300))).send();
        assert_eq!(worker.call(Do::Pid).await, Ok(Done::Number(main)));
        for (n, call) in good.into_iter().enumerate() {
            assert_eq!(call.await, Ok(Done::Number(n as u32)));
        }
        let lost = lost(poison.await);
        assert_eq!((lost.guilt, lost.attempt, &lost.cause), (Guilt::Alone, 2, &Cause::Signal(6)));
        // What it killed there was nobody else's.
        assert_eq!(long.await, Ok(Done::Number(9)));
        let stats = worker.stats();
        assert_eq!((stats.process, stats.takeovers, stats.deaths), (Some(main), 1, 2));
        assert_eq!((stats.standby_deaths, stats.early_deaths), (1, 0));
        ready(&worker);
    });
}

#[test]
fn a_standby_that_dies_interrupts_nothing() {
    run(async {
        let path = std::env::temp_dir().join(format!("gpu-await-standby-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        // The first process alone can start.
        let config = Start { once: Some(path.to_string_lossy().into_owned()), ..Start::default() };
        let worker = Worker::<Twin>::builder(config).restart(quick()).standby(true);
        let worker = worker.spawn().await.unwrap();
        let runs = worker.call(Do::Later(1, Duration::from_millis(200))).send();
        // Three early deaths, and then none is started.
        eventually("no standby", || worker.stats().standby_deaths == 3);
        assert_eq!(runs.await, Ok(Done::Number(1)));
        let stats = worker.stats();
        let Some(Cause::StartFailed(why)) = &stats.last_standby_cause else { panic!("{stats:?}") };
        assert!(why.contains("No such file"), "{why}");
        assert_eq!((stats.early_deaths, stats.starts, stats.standby), (0, 4, None));
        let health = worker.health();
        assert!(health.is_serving(), "{health}");
        let text = health.to_string();
        assert!(text.contains("no standby is started any more, after: "), "{text}");
        // Suspects do not wait for one that will not be.
        std::fs::write(&path, "").unwrap();
        let good = worker.call(Do::Later(2, Duration::from_millis(20))).idempotent().send();
        drop(worker.call(Do::Abort).await);
        assert_eq!(good.await, Ok(Done::Number(2)));
        // Another process serves: a standby is tried again.
        eventually("they fail again", || worker.stats().standby_deaths == 6);
        // One that is killed while it is idle costs nothing either.
        assert_eq!(worker.call(Do::Later(3, Duration::ZERO)).await, Ok(Done::Number(3)));
    });
}

#[test]
fn an_idle_standby_is_replaced() {
    run(async {
        let worker = with_standby().spawn().await.unwrap();
        let main = worker.stats().process;
        for _ in 0..2 {
            let standby = ready(&worker);
            // SAFETY: signals a process that this one started, and has not waited for.
            unsafe { libc::kill(standby as libc::pid_t, libc::SIGKILL) };
            let other = || worker.stats().standby.is_some_and(|other| other != standby);
            eventually("another one", other);
        }
        let stats = worker.stats();
        assert_eq!((stats.process, stats.takeovers, stats.standby_deaths), (main, 0, 2));
    });
}

#[test]
fn one_that_starts_takes_over_as_well() {
    run(async {
        let start = Start { delay: Duration::from_millis(300), ..Start::default() };
        let worker = Worker::<Twin>::builder(start).restart(quick()).standby(true);
        let worker = worker.spawn().await.unwrap();
        eventually("it starts", || worker.stats().starts == 2);
        lost(worker.call(Do::Abort).await);
        // No third one is started before it serves.
        let stats = worker.stats();
        let wanted = (Some(Health::Restarting), 1, 2);
        assert_eq!((stats.health, stats.takeovers, stats.starts), wanted);
        let Ok(Done::Number(pid)) = worker.call(Do::Pid).await else { panic!() };
        assert_eq!(worker.stats().process, Some(pid));
        ready(&worker);
    });
}

#[test]
fn closing_ends_both() {
    run(async {
        let worker = with_standby().spawn().await.unwrap();
        let all = [worker.stats().process.unwrap(), ready(&worker)];
        let runs = worker.call(Do::Later(1, Duration::from_millis(50))).send();
        let other = worker.clone();
        worker.close(Duration::from_secs(20)).await;
        assert!(!all.into_iter().any(lives));
        assert_eq!(runs.await, Ok(Done::Number(1)));
        let stats = other.stats();
        assert_eq!((stats.health, stats.standby), (Some(Health::Closed), None));
        assert_eq!(other.call(Do::Pid).await, Err(Error::Closed));
        // With a suspect in the standby, which has its time; or none, with the last handle.
        let worker = with_standby().spawn().await.unwrap();
        ready(&worker);
        let suspect = worker.call(Do::Later(7, Duration::from_millis(100))).idempotent().send();
        drop(worker.call(Do::Abort).await);
        ready(&worker);
        eventually("it runs again", || worker.stats().running == 1);
        worker.clone().close(Duration::from_secs(20)).await;
        assert_eq!(suspect.await, Ok(Done::Number(7)));
        let worker = with_standby().spawn().await.unwrap();
        let all = [worker.stats().process.unwrap(), ready(&worker)];
        drop(worker);
        eventually("both are gone", || !all.into_iter().any(lives));
    });
}

#[test]
fn a_stuck_process_is_replaced() {
    run(async {
        // None is gone at the moment when it is killed.
        let worker = with_standby().stuck(Duration::ZERO, 1).spawn().await.unwrap();
        let standby = ready(&worker);
        let limit = Duration::from_millis(20);
        assert_eq!(lost(worker.call(Do::Loop).within(limit).await).cause, Cause::CallLimit(limit));
        assert_eq!(worker.call(Do::Pid).await, Ok(Done::Number(standby)));
        eventually("it is reaped after all", || worker.stats().stuck == 0);
        ready(&worker);
        let runs = worker.call(Do::Later(0, LONG)).deadline(limit).await;
        assert_eq!(runs, Err(Error::Deadline));
    });
}

#[test]
fn the_price_of_a_standby_is_told() {
    run(async {
        const BYTES: usize = 8 << 20;
        let config = Start { takes: BYTES, keep: Some("price".to_owned()), ..Start::default() };
        let worker = Worker::<Twin>::builder(config).standby(true).spawn().await.unwrap();
        assert_eq!(worker.stats().standby_device_bytes, 0);
        ready(&worker);
        let stats = worker.stats();
        let once = BYTES as u64..2 * BYTES as u64;
        assert!(once.contains(&stats.device_bytes), "{stats:?}");
        assert!(once.contains(&stats.standby_device_bytes), "{stats:?}");
        // What is kept is there once: the standby could not fill it again.
        assert_eq!(kept().iter().filter(|kept| kept.name == "price").count(), 1);
        assert!(forget_kept(None, "price"));
    });
}

#[test]
fn a_stopped_standby_does_not_take_over() {
    run(async {
        let worker = with_standby().spawn().await.unwrap();
        let standby = ready(&worker);
        signal(standby, libc::SIGSTOP);
        // The supervisor looks when it matters.
        eventually("it is stopped", || is_stopped(standby));
        kill(&worker);
        let next =
            worker.call(Do::Pid).idempotent().deadline(Duration::from_secs(20)).await.unwrap();
        assert_ne!(next, Done::Number(standby));
        eventually("it is gone", || !lives(standby));
        // A third process may have been there, and have taken over, before the first was gone.
        eventually("both have died", || worker.stats().deaths == 2);
        let stats = worker.stats();
        assert!(stats.takeovers <= 1 && stats.standby_deaths == 1, "{stats:?}");
        assert_eq!(stats.last_standby_cause, Some(Cause::Stopped));
        assert_eq!(stats.last_cause, Some(Cause::Signal(9)));
        ready(&worker);
    });
}

#[test]
fn a_stopped_standby_is_reported() {
    run(async {
        let worker = with_standby().spawn().await.unwrap();
        let standby = ready(&worker);
        signal(standby, libc::SIGSTOP);
        eventually("it is seen", || worker.stats().stopped_standby == Some(standby));
        let stats = worker.stats();
        assert_eq!((stats.standby, stats.is_stopped), (None, false));
        // What the main process had when it is killed is answered by another one.
        let limit = Duration::from_millis(300);
        let calls = [(); 2].map(|()| worker.call(Do::Pid).idempotent());
        let block = worker.call(Do::Loop).within(limit).send();
        for call in calls {
            assert!(call.deadline(Duration::from_secs(20)).await.is_ok());
        }
        lost(block.await);
        assert!(worker.call(Do::Pid).deadline(Duration::from_secs(20)).await.is_ok());
        // One that runs again is as good as any.
        let standby = ready(&worker);
        signal(standby, libc::SIGSTOP);
        eventually("it is seen", || worker.stats().stopped_standby == Some(standby));
        signal(standby, libc::SIGCONT);
        assert_eq!(ready(&worker), standby);
        assert_eq!(worker.stats().stopped_standby, None);
        let takeovers = worker.stats().takeovers;
        kill(&worker);
        eventually("it takes over", || worker.stats().takeovers > takeovers);
        assert_eq!(worker.call(Do::Pid).await, Ok(Done::Number(standby)));
    });
}

#[test]
fn a_suspect_in_a_stopped_standby_runs_elsewhere() {
    run(async {
        let worker = with_standby().spawn().await.unwrap();
        ready(&worker);
        let suspect = worker.call(Do::Later(7, Duration::from_secs(2))).idempotent().send();
        eventually("it runs", || worker.stats().running == 1);
        lost(worker.call(Do::Abort).await);
        let standby = ready(&worker);
        eventually("it runs there", || worker.stats().running == 1);
        signal(standby, libc::SIGSTOP);
        assert_eq!(suspect.await, Ok(Done::Number(7)));
        assert!(!lives(standby));
        assert_eq!(worker.stats().last_standby_cause, Some(Cause::Stopped));
    });
}
