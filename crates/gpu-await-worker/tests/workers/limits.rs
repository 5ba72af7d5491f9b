//! Limits, deadlines, retries and restarts.

use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use gpu_await_worker::{Cause, Error, Guilt, Health, Restart, Worker};

use crate::twin::{Do, Done, Start, Use, eventually, kill, lives, lost, run, signal, worker};

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn a_call_over_its_limit_ends_with_its_process() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let begun = Instant::now();
        let limit = Duration::from_millis(100);
        // Beside it, one that may run again, and one that may not.
        let again = worker.call(Do::Later(1, Duration::from_millis(150))).idempotent().send();
        let once = worker.call(Do::Later(2, LONG)).send();
        let lost_one = lost(worker.call(Do::Loop).within(limit).await);
        // Which of them did not end the supervisor cannot know.
        assert_eq!((lost_one.cause, lost_one.guilt), (Cause::CallLimit(limit), Guilt::Suspect));
        assert!(begun.elapsed() >= limit);
        assert_eq!(lost(once.await).guilt, Guilt::Suspect);
        assert_eq!(again.await, Ok(Done::Number(1)));
    });
}

#[test]
fn a_call_over_its_own_limit_is_guilty() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let limit = Duration::from_millis(50);
        assert_eq!(lost(worker.call(Do::Later(0, LONG)).within(limit).await).guilt, Guilt::Alone);
        // Beside others it may have waited for them, and they for it. On a busy machine some begin later.
        let calls: Vec<_> =
            (0..20).map(|n| worker.call(Do::Later(n, LONG)).within(2 * limit).send()).collect();
        let beside = worker.call(Do::Later(1, LONG)).send();
        for call in futures::future::join_all(calls).await.into_iter().chain([beside.await]) {
            assert_ne!(lost(call).guilt, Guilt::Alone);
        }
    });
}

#[test]
fn a_limit_does_not_count_what_the_service_waits_for() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let limit = Duration::from_millis(200);
        let waits = worker.call(Do::WaitsItsTurn(3 * limit, true)).within(limit);
        assert_eq!(waits.await, Ok(Done::Nothing));
        // Behind that it counts; and who still waits is not why.
        let begun = Instant::now();
        let endless = worker.call(Do::WaitsItsTurn(2 * limit, false)).within(limit).send();
        let waits = worker.call(Do::WaitsItsTurn(LONG, true)).within(limit).send();
        assert_eq!(lost(endless.await).cause, Cause::CallLimit(limit));
        assert!(begun.elapsed() >= 3 * limit, "{:?}", begun.elapsed());
        assert_eq!(lost(waits.await).guilt, Guilt::Innocent);
    });
}

#[test]
fn a_limit_does_not_count_the_calls_in_front() {
    run(async {
        let worker = worker().threads(1).spawn().await.unwrap();
        // All in front take longer than the limit, and none comes near it on a busy machine.
        let time = Duration::from_millis(25);
        let limit = Duration::from_secs(1);
        let calls = (0..60).map(|n| worker.call(Do::Block(n, time)).within(limit).into_future());
        for (n, answer) in futures::future::join_all(calls).await.into_iter().enumerate() {
            assert_eq!(answer, Ok(Done::Number(n as u32)));
        }
        // One that has begun has no more than its limit, whatever waits behind it.
        let begun = Instant::now();
        let endless = worker.call(Do::Loop).within(limit).send();
        let behind = worker.call(Do::Block(7, time)).within(limit).idempotent().send();
        // Or one that was answered just now left something on the executor.
        assert_eq!(lost(endless.await).guilt, Guilt::Suspect);
        assert!(begun.elapsed() < 10 * limit, "{:?}", begun.elapsed());
        assert_eq!(behind.await, Ok(Done::Number(7)));
        assert_eq!(worker.stats().deaths, 1);
    });
}

#[test]
fn no_call_takes_no_time() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let refused = worker.call(Do::Pid).within(Duration::ZERO).await;
        assert!(matches!(refused, Err(Error::Unfit { found: 0, limit: 1, .. })), "{refused:?}");
        let least = Duration::from_nanos(1);
        let late = worker.call(Do::Later(1, LONG)).within(least).await;
        assert_eq!(lost(late).cause, Cause::CallLimit(least));
    });
}

#[test]
fn limits_may_be_endless() {
    run(async {
        let endless = Duration::MAX;
        let worker = worker().start_limit(endless).stuck(endless, 1).executor_limit(endless);
        let worker = worker.spawn().await.unwrap();
        let call = worker.call(Do::Later(4, Duration::ZERO)).within(endless).deadline(endless);
        assert_eq!(call.await, Ok(Done::Number(4)));
        worker.close(endless).await;
    });
}

#[test]
fn a_limit_holds_without_a_caller() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        drop(worker.call(Do::Loop).within(Duration::from_millis(50)).send());
        eventually("it was killed", || worker.stats().deaths == 1);
        assert_eq!(worker.call(Do::Later(5, Duration::ZERO)).await, Ok(Done::Number(5)));
    });
}

#[test]
fn a_deadline_ends_a_call_and_no_process() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let late = worker.call(Do::Later(1, LONG)).deadline(Duration::from_millis(30)).await;
        assert_eq!(late, Err(Error::Deadline));
        assert_eq!(worker.stats().running, 1, "the process still has it");
        assert_eq!(worker.call(Do::Later(2, Duration::ZERO)).await, Ok(Done::Number(2)));
        assert_eq!(worker.stats().deaths, 0);
    });
}

#[test]
fn what_is_under_way_is_bounded() {
    run(async {
        let worker = worker().most_calls(4).spawn().await.unwrap();
        let calls: Vec<_> = (0..4).map(|n| worker.call(Do::Later(n, LONG)).send()).collect();
        let fifth = worker.call(Do::Pid).await;
        assert_eq!(fifth, Err(Error::Overloaded { what: "calls", found: 4, limit: 4 }));
        // Giving up makes no room: the process still has them.
        drop(calls);
        assert!(matches!(worker.call(Do::Pid).await, Err(Error::Overloaded { .. })));
    });
}

#[test]
fn the_guilty_call_is_found() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let brief = Duration::from_millis(30);
        let good: Vec<_> =
            (0..6).map(|n| worker.call(Do::Later(n, brief)).idempotent().send()).collect();
        let poison = worker.call(Do::Abort).idempotent().send();
        for (n, call) in good.into_iter().enumerate() {
            assert_eq!(call.await, Ok(Done::Number(n as u32)));
        }
        let lost = lost(poison.await);
        assert_eq!((lost.guilt, lost.attempt), (Guilt::Alone, 2));
        assert_eq!(worker.stats().deaths, 2);
    });
}

#[test]
fn a_kill_from_outside_blames_no_call_at_once() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let brief = Duration::from_millis(50);
        // It is sent again, alone.
        let again = worker.call(Do::Later(1, brief)).idempotent().send();
        kill(&worker);
        assert_eq!(again.await, Ok(Done::Number(1)));
        assert_eq!(worker.stats().deaths, 1);
        let once = worker.call(Do::Later(2, brief)).send();
        eventually("it runs", || worker.stats().running == 1);
        kill(&worker);
        let once = lost(once.await);
        assert_eq!((once.cause, once.guilt, once.attempt), (Cause::Signal(9), Guilt::Suspect, 1));
        // However often: what tells one that kills itself is `blame`.
        worker.serving().await.unwrap();
        let poison = worker.call(Do::KillMe).idempotent();
        let poison = lost(poison.await);
        assert_eq!((poison.guilt, poison.attempt), (Guilt::Suspect, 3));
    });
}

#[test]
fn early_deaths_end_a_worker() {
    run(async {
        let restart = Restart {
            first_delay: Duration::from_millis(1),
            most_delay: Duration::from_millis(4),
            early_deaths: 3,
            ..Restart::default()
        };
        let worker = worker().restart(restart).spawn().await.unwrap();
        let dies = async {
            // Nobody calls it when it dies.
            for death in 1..=4 {
                worker.serving().await.unwrap();
                worker.call(Do::ExitLater(3)).await.unwrap();
                eventually("it died", || worker.stats().deaths == death);
            }
            worker.serving().await.unwrap_err()
        };
        let (ended, error) = futures::join!(worker.ended(), dies);
        assert_eq!((&ended, &worker.ended().await), (&error, &error));
        let Error::GivenUp { early_deaths, causes, .. } = &error else { panic!("{error:?}") };
        assert_eq!((*early_deaths, &**causes), (4, &[const { Cause::Exited(3) }; 4][..]));
        assert_eq!(worker.stats().health, Some(Health::GivenUp));
        assert_eq!(worker.call(Do::Pid).await.unwrap_err(), error);
    });
}

#[test]
fn calls_that_kill_it_do_not_end_a_worker() {
    run(async {
        let restart = Restart { most_delay: Duration::from_millis(4), ..Restart::default() };
        let restart = Restart { first_delay: Duration::from_millis(1), early_deaths: 2, ..restart };
        let worker = worker().restart(restart).spawn().await.unwrap();
        for _ in 0..6 {
            lost(worker.call(Do::Exit(3)).await);
            lost(worker.call(Do::Loop).within(Duration::from_millis(1)).await);
        }
        let stats = worker.stats();
        assert_eq!((stats.deaths, stats.early_deaths), (12, 0));
        assert_eq!(worker.call(Do::Later(1, Duration::ZERO)).await, Ok(Done::Number(1)));
    });
}

#[test]
fn starts_that_fail_later_are_retried_and_given_up() {
    run(async {
        let path = std::env::temp_dir().join(format!("gpu-await-worker-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        let once = Some(path.to_string_lossy().into_owned());
        let restart = Restart {
            first_delay: Duration::from_millis(1),
            early_deaths: 2,
            ..Restart::default()
        };
        let config = Start { once, ..Start::default() };
        let worker = Worker::<crate::twin::Twin>::builder(config).restart(restart);
        let worker = worker.spawn().await.unwrap();
        lost(worker.call(Do::Abort).await);
        let error = worker.call(Do::Pid).await.unwrap_err();
        let Error::GivenUp { cause: Cause::StartFailed(why), .. } = &error else {
            panic!("{error:?}")
        };
        assert!(why.contains("No such file"), "{why}");
        // The first death, in a call, was not early.
        assert_eq!(worker.stats().starts, 4);
    });
}

#[test]
fn a_start_that_takes_too_long_is_ended() {
    run(async {
        let config = Start { delay: LONG, ..Start::default() };
        let limit = Duration::from_millis(200);
        let spawned = Worker::<crate::twin::Twin>::builder(config).start_limit(limit).spawn().await;
        let Err(Error::GivenUp { cause, .. }) = spawned else { panic!("{spawned:?}") };
        assert_eq!(cause, Cause::NoStart(limit));
    });
}

#[test]
fn too_much_memory_ends_a_process() {
    run(async {
        let limit = 200 << 20;
        let worker = worker().resident_bytes(limit).spawn().await.unwrap();
        let lost = lost(worker.call(Do::Hoard(400 << 20)).await);
        let Cause::MemoryLimit { resident, limit: found } = lost.cause else { panic!("{lost:?}") };
        assert!(resident > limit && found == limit);
        assert_eq!(lost.guilt, Guilt::Suspect);
    });
}

#[test]
fn a_stopped_process_is_left_alone() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let pid = worker.stats().process.unwrap();
        let stopped = worker.call(Do::Stop).send();
        eventually("it is reported", || worker.stats().is_stopped);
        assert_eq!(worker.stats().deaths, 0);
        signal(pid, libc::SIGCONT);
        assert_eq!(stopped.await, Ok(Done::Nothing));
    });
}

#[test]
fn figures_are_of_the_process_that_is_there() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let stopped = worker.call(Do::Stop).send();
        eventually("it is reported", || worker.stats().is_stopped);
        kill(&worker);
        lost(stopped.await);
        eventually("it is gone", || worker.stats().deaths == 1);
        assert!(!worker.stats().is_stopped);
        worker.serving().await.unwrap();
        assert!(!worker.stats().is_stopped && !worker.stats().is_busy);
    });
}

#[test]
fn a_process_that_does_not_go_is_set_aside() {
    run(async {
        // No process is gone at the moment when it is killed.
        let restart = Restart { early_deaths: 100, ..Restart::default() };
        let worker = worker().stuck(Duration::ZERO, 1).restart(restart).spawn().await.unwrap();
        let limit = Duration::from_millis(20);
        let lost = lost(worker.call(Do::Loop).within(limit).await);
        assert_eq!(lost.cause, Cause::CallLimit(limit));
        assert_eq!(worker.call(Do::Later(1, Duration::ZERO)).await, Ok(Done::Number(1)));
        eventually("it is reaped after all", || worker.stats().stuck == 0);
    });
}

#[test]
fn a_blocked_executor_ends_its_process() {
    run(async {
        let limit = Duration::from_millis(1500);
        let worker = worker().threads(1).executor_limit(limit).spawn().await.unwrap();
        let lost = lost(worker.call(Do::Loop).await);
        assert!(matches!(lost.cause, Cause::Hung(time) if time > limit), "{lost:?}");
    });
}

#[test]
fn closing_answers_what_runs() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let pid = worker.stats().process.unwrap();
        let runs = worker.call(Do::Later(1, Duration::from_millis(50))).send();
        let other = worker.clone();
        worker.close(Duration::from_secs(20)).await;
        assert!(!lives(pid));
        assert_eq!(runs.await, Ok(Done::Number(1)));
        assert_eq!(other.call(Do::Pid).await, Err(Error::Closed));
        assert_eq!(other.stats().health, Some(Health::Closed));
    });
}

#[test]
fn closing_kills_what_does_not_end() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let runs = worker.call(Do::Loop).send();
        worker.close(Duration::from_millis(50)).await;
        assert_eq!(lost(runs.await).cause, Cause::NoEnd);
    });
}

#[test]
fn a_worker_that_was_given_up_begins_anew() {
    run(async {
        let path = std::env::temp_dir().join(format!("gpu-await-revive-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        let once = Some(path.to_string_lossy().into_owned());
        let first_delay = Duration::from_millis(1);
        let restart = Restart { first_delay, early_deaths: 1, ..Restart::default() };
        let config = Start { once, ..Start::default() };
        let worker = Worker::<crate::twin::Twin>::builder(config).restart(restart);
        let worker = worker.spawn().await.unwrap();
        // One that serves goes on.
        let pid = worker.stats().process;
        assert_eq!((worker.revive().await, worker.stats().process), (Ok(()), pid));
        let mut lease = worker.try_lease(100).unwrap();
        lease.fill(7);
        lost(worker.call(Do::Abort).await);
        let error = worker.call(Do::Pid).await.unwrap_err();
        assert!(matches!(error, Error::GivenUp { early_deaths: 2, .. }), "{error:?}");
        // As if it were new: one start that fails is enough.
        let again = worker.revive().await;
        assert!(matches!(again, Err(Error::GivenUp { early_deaths: 1, .. })), "{again:?}");
        std::fs::write(&path, "").unwrap();
        let (one, other) = futures::join!(worker.revive(), worker.revive());
        assert_eq!((one, other), (Ok(()), Ok(())));
        assert_eq!(
            (worker.stats().early_deaths, worker.stats().health),
            (0, Some(Health::Serving))
        );
        let call = worker.call(Do::First(Use::Keep, Duration::ZERO)).lease(lease);
        assert_eq!(call.await, Ok(Done::Number(7)));
        // Looked after as before: deaths, and the end.
        let gone = worker.clone();
        let mut ended = pin!(gone.ended());
        assert_eq!(futures::poll!(&mut ended), Poll::Pending);
        lost(worker.call(Do::Abort).await);
        assert_eq!(futures::poll!(&mut ended), Poll::Pending);
        worker.close(Duration::ZERO).await;
        assert_eq!((ended.await, gone.revive().await), (Error::Closed, Err(Error::Closed)));
    });
}

#[test]
fn one_that_was_given_up_is_closed() {
    run(async {
        let path = std::env::temp_dir().join(format!("gpu-await-closed-{}", std::process::id()));
        let once = Some(path.to_string_lossy().into_owned());
        let restart = Restart { early_deaths: 0, ..Restart::default() };
        for round in 0..40u32 {
            std::fs::write(&path, "").unwrap();
            let config = Start { once: once.clone(), ..Start::default() };
            let worker = Worker::<crate::twin::Twin>::builder(config).restart(restart);
            let worker = worker.spawn().await.unwrap();
            kill(&worker);
            eventually("it is given up", || worker.health().health == Some(Health::GivenUp));
            // The next process could start.
            std::fs::write(&path, "").unwrap();
            let (gone, other) = (worker.clone(), worker.clone());
            if round == 0 {
                worker.close(Duration::from_secs(20)).await;
                assert_eq!(other.revive().await, Err(Error::Closed));
            } else {
                // Beside it, earlier or later.
                let revive = || futures::executor::block_on(other.revive());
                let revived = std::thread::scope(|threads| {
                    let revived = threads.spawn(revive);
                    let until = Instant::now() + Duration::from_micros(25) * round;
                    while Instant::now() < until {}
                    futures::executor::block_on(worker.close(Duration::from_millis(300)));
                    revived.join().unwrap()
                });
                assert!(matches!(revived, Ok(()) | Err(Error::Closed)), "{revived:?}");
            }
            assert_eq!(gone.health().health, Some(Health::Closed), "{round}");
            assert_eq!(gone.call(Do::Pid).await, Err(Error::Closed));
        }
        std::fs::remove_file(path).ok();
    });
}

/// One that runs alone holds up the others for as long as somebody waits for it.
#[test]
fn a_suspect_that_nobody_waits_for_ends() {
    // All at once: each takes the seconds of its limit.
    let ways = [(false, true), (false, false), (true, true), (true, false)];
    std::thread::scope(|scope| {
        for (standby, deadline) in ways {
            scope.spawn(move || run(a_suspect_without_callers_ends(standby, deadline)));
        }
    });
}

async fn a_suspect_without_callers_ends(standby: bool, deadline: bool) {
    let restart = Restart { first_delay: Duration::ZERO, ..Restart::default() };
    let worker = worker().restart(restart).standby(standby).spawn().await.unwrap();
    let is_ready = || worker.stats().standby.is_some() == standby;
    eventually("it is ready", is_ready);
    let endless = worker.call(Do::Later(0, LONG)).idempotent();
    let limit = Duration::from_secs(3);
    let endless = if deadline { endless.deadline(limit) } else { endless }.send();
    let other = worker.call(Do::Later(2, Duration::from_secs(1))).idempotent().send();
    eventually("they run", || worker.stats().running == 2);
    lost(worker.call(Do::Abort).await);
    eventually("it runs alone", || {
        let stats = worker.stats();
        (stats.running, stats.suspects) == (1, 1)
    });
    match deadline {
        true => assert_eq!(endless.await, Err(Error::Deadline)),
        false => drop(endless),
    }
    assert!(worker.call(Do::Pid).await.is_ok());
    assert_eq!(other.await, Ok(Done::Number(2)));
    let stats = worker.stats();
    let cause = if standby { stats.last_standby_cause } else { stats.last_cause };
    assert_eq!((cause, stats.suspects), (Some(Cause::Abandoned), 0));
}

#[test]
fn giving_up_tells_what_the_last_process_wrote() {
    run(async {
        // No process is gone at the moment when it is killed, and none may be stuck.
        let worker = worker().stuck(Duration::ZERO, 0).spawn().await.unwrap();
        worker.call(Do::Say("the last words".into())).await.unwrap();
        lost(worker.call(Do::Loop).within(Duration::from_millis(20)).await);
        let error = worker.serving().await.unwrap_err();
        let Error::GivenUp { log, .. } = &error else { panic!("{error:?}") };
        assert!(log.contains("the last words"), "{log}");
    });
}
