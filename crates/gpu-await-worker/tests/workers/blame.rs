//! Requests and clients that are refused, because what they sent killed processes.

use std::time::{Duration, Instant};

use gpu_await_worker::{Blame, Cause, Error, Guilt, Restart, Worker, WorkerBuilder};

use crate::twin::{Do, Done, Twin, eventually, kill, lost, run, worker};

const LONG: Duration = Duration::from_secs(3600);

fn blaming(blame: Blame) -> WorkerBuilder<Twin> {
    worker().restart(Restart { first_delay: Duration::ZERO, ..Restart::default() }).blame(blame)
}

/// For what a call was refused, and until when.
#[track_caller]
fn refused(result: Result<Done, Error>) -> (&'static str, Instant) {
    match result {
        Err(Error::Refused { what, until }) => (what, until),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_guilty_request_is_refused() {
    run(async {
        let refused_for = Duration::from_secs(30);
        let worker = blaming(Blame { refused_for, ..Blame::default() }).spawn().await.unwrap();
        let exit = |payload: u8| worker.call(Do::Exit(3)).payload(vec![payload; 100]);
        let begun = Instant::now();
        assert_eq!(lost(exit(1).await).guilt, Guilt::Alone);
        for _ in 0..3 {
            let (what, until) = refused(exit(1).await);
            assert_eq!(what, "request");
            let at = until - refused_for;
            assert!(at >= begun && at <= Instant::now());
        }
        assert_eq!((worker.stats().deaths, worker.stats().refused), (1, 3));
        // One that is told apart by its payload alone, and another request.
        assert_eq!(lost(exit(2).await).guilt, Guilt::Alone);
        assert_eq!(worker.call(Do::Later(1, Duration::ZERO)).await, Ok(Done::Number(1)));
        // Or by nothing: its payload is too long for a digest, and it has no key.
        for _ in 0..2 {
            lost(worker.call(Do::Exit(4)).payload(vec![1; (1 << 20) + 1]).await);
        }
        // By its key, whatever it is otherwise.
        lost(worker.call(Do::Exit(5)).key("five").await);
        assert_eq!(refused(worker.call(Do::Pid).key("five").await).0, "request");
        assert!(worker.call(Do::Pid).key("six").await.is_ok());
    });
}

#[test]
fn a_refusal_ends() {
    run(async {
        let refused_for = Duration::from_millis(100);
        let worker = blaming(Blame { refused_for, ..Blame::default() }).spawn().await.unwrap();
        lost(worker.call(Do::Abort).await);
        let (_, until) = refused(worker.call(Do::Abort).await);
        tokio::time::sleep_until(until.into()).await;
        lost(worker.call(Do::Abort).await);
    });
}

#[test]
fn a_client_of_guilty_requests_is_refused() {
    run(async {
        let worker = blaming(Blame::default()).spawn().await.unwrap();
        let limit = Duration::from_millis(20);
        for code in 1..=3 {
            // Beside it, calls of another client, which are lost with it. It runs again, and alone.
            let innocent = worker.call(Do::Later(code, LONG)).client("good").send();
            eventually("it runs", || worker.stats().running == 1);
            let endless = worker.call(Do::Later(100 + code, LONG)).client("bad").within(limit);
            assert_eq!(lost(endless.idempotent().await).guilt, Guilt::Alone);
            assert_eq!(lost(innocent.await).guilt, Guilt::Suspect);
            assert!(worker.call(Do::Pid).client("good").await.is_ok());
        }
        assert_eq!(refused(worker.call(Do::Pid).client("bad").await).0, "client");
        assert!(worker.call(Do::Pid).client("good").await.is_ok());
        assert!(worker.call(Do::Pid).await.is_ok());
    });
}

#[test]
fn a_suspect_that_may_not_run_again_is_watched() {
    run(async {
        for standby in [false, true] {
            let worker = blaming(Blame::default()).standby(standby).spawn().await.unwrap();
            let is_ready = || !standby || worker.stats().standby.is_some();
            eventually("it is ready", is_ready);
            let brief = Duration::from_millis(100);
            let beside = |n| worker.call(Do::Later(n, brief)).idempotent().send();
            // It is never alone by itself.
            let good = beside(1);
            eventually("it runs", || worker.stats().running == 1);
            assert_eq!(lost(worker.call(Do::Abort).await).guilt, Guilt::Suspect);
            assert_eq!(good.await, Ok(Done::Number(1)));
            eventually("it is ready", is_ready);
            let good = beside(2);
            eventually("it runs", || worker.stats().running == 1);
            assert_eq!(lost(worker.call(Do::Abort).await).guilt, Guilt::Alone);
            assert_eq!(good.await, Ok(Done::Number(2)));
            assert_eq!(refused(worker.call(Do::Abort).await).0, "request");
            assert_eq!(worker.stats().deaths, 2);
            // In the standby it interrupted nothing.
            assert_eq!(worker.stats().takeovers, u64::from(standby));
        }
    });
}

#[test]
fn one_of_many_is_enough() {
    run(async {
        let worker = blaming(Blame::default()).spawn().await.unwrap();
        let good: Vec<_> = (0..5)
            .map(|n| worker.call(Do::Later(n, Duration::from_millis(30))).idempotent().send())
            .collect();
        let bad: Vec<_> = (0..5).map(|_| worker.call(Do::Abort).idempotent().send()).collect();
        let bad = futures::future::join_all(bad).await;
        for (n, call) in good.into_iter().enumerate() {
            assert_eq!(call.await, Ok(Done::Number(n as u32)));
        }
        // Once beside others, and once alone: the rest is not even tried, though some may not have been sent.
        let is_lost = |call: &&Result<Done, Error>| matches!(call, Err(Error::Lost(_)));
        assert_eq!(bad.iter().filter(is_lost).count(), 1, "{bad:?}");
        let is_refused = |call: &&Result<Done, Error>| matches!(call, Err(Error::Refused { .. }));
        assert_eq!(bad.iter().filter(is_refused).count(), 4, "{bad:?}");
        assert_eq!(worker.stats().deaths, 2);
    });
}

#[test]
fn one_that_nobody_waits_for_is_guilty_too() {
    run(async {
        let worker = blaming(Blame::default()).spawn().await.unwrap();
        let call = worker.call(Do::Block(1, Duration::from_secs(20))).key("late");
        let call = call.within(Duration::from_millis(50)).deadline(Duration::from_millis(5));
        assert_eq!(call.await, Err(Error::Deadline));
        eventually("it died", || worker.stats().deaths == 1);
        assert_eq!(refused(worker.call(Do::Pid).key("late").await).0, "request");
    });
}

/// Calls behind one that does not end, which has more time than they have: on its stream, or behind code that blocks the executor.
async fn behind(poison: Do, standby: bool) {
    let worker = blaming(Blame::default()).threads(1).standby(standby).spawn().await.unwrap();
    eventually("it is ready", || !standby || worker.stats().standby.is_some());
    let good: Vec<_> = (0..6u8)
        .map(|n| {
            let call = match poison {
                Do::Endless => Do::Double(vec![f32::from(n); 4]),
                _ => Do::Later(n.into(), Duration::from_millis(1)),
            };
            worker.call(call).within(Duration::from_millis(500)).idempotent().client("good")
        })
        .collect();
    let bad = worker.call(poison.clone()).within(Duration::from_secs(1)).idempotent().send();
    let (bad, good) = futures::join!(
        bad,
        futures::future::join_all(good.into_iter().map(IntoFuture::into_future))
    );
    assert!(good.iter().all(Result::is_ok), "{good:?}");
    let bad = lost(bad);
    assert_eq!((bad.guilt, worker.stats().refused), (Guilt::Alone, 0));
    assert!(bad.attempt <= 2, "{bad:?}");
    assert_eq!(refused(worker.call(poison).await).0, "request");
    assert!(worker.call(Do::Pid).client("good").await.is_ok());
}

#[test]
fn who_waits_for_others_is_not_guilty() {
    run(async {
        futures::join!(behind(Do::Endless, false), behind(Do::Endless, true));
        behind(Do::Loop, false).await;
    });
}

#[test]
fn one_over_its_limit_beside_others_is_watched() {
    run(async {
        let worker = blaming(Blame::default()).spawn().await.unwrap();
        let later = |n| worker.call(Do::Later(n, LONG));
        let beside = later(1).send();
        eventually("it runs", || worker.stats().running == 1);
        let limit = Duration::from_millis(50);
        assert_eq!(lost(later(2).within(limit).await).guilt, Guilt::Suspect);
        assert_eq!(lost(beside.await).guilt, Guilt::Suspect);
        // The next one has the process for itself.
        let brief = worker.call(Do::Later(3, Duration::from_millis(100))).send();
        eventually("it runs", || worker.stats().running == 1);
        assert_eq!(lost(later(2).within(limit).await).guilt, Guilt::Alone);
        assert_eq!(brief.await, Ok(Done::Number(3)));
        assert_eq!(refused(later(2).await).0, "request");
        assert_eq!(worker.stats().deaths, 2);
    });
}

#[test]
fn a_limit_in_a_stopped_process_blames_nobody() {
    run(async {
        let worker = blaming(Blame::default()).spawn().await.unwrap();
        let limit = Duration::from_millis(200);
        let stopped = lost(worker.call(Do::Stop).key("stopped").within(limit).await);
        assert_eq!((stopped.cause, stopped.guilt), (Cause::CallLimit(limit), Guilt::Suspect));
        assert!(worker.call(Do::Pid).key("stopped").await.is_ok());
    });
}

#[test]
fn three_kills_of_a_lone_call_are_its_own() {
    run(async {
        let worker = blaming(Blame::default()).spawn().await.unwrap();
        let long = || worker.call(Do::Later(1, Duration::from_millis(500))).idempotent();
        // Somebody's kill, twice: it is answered, and what came before is forgotten.
        for _ in 0..2 {
            let call = long().send();
            for _ in 0..2 {
                let deaths = worker.stats().deaths;
                eventually("it runs", || worker.stats().running == 1);
                kill(&worker);
                eventually("it died", || worker.stats().deaths > deaths);
            }
            assert_eq!(call.await, Ok(Done::Number(1)));
        }
        // Its own, whether or not it may run again.
        for attempts in [1, 3] {
            let deaths = worker.stats().deaths;
            let poison = || worker.call(Do::KillMe).key(attempts);
            for _ in 0..3 / attempts {
                let poison = if attempts > 1 { poison().idempotent() } else { poison() };
                assert_eq!(lost(poison.await).attempt, attempts);
            }
            assert_eq!(refused(poison().await).0, "request");
            assert_eq!(worker.stats().deaths, deaths + 3);
        }
    });
}

/// Where a kernel of the device is told to fault: once this file is gone.
fn fault_file(name: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("gpu_await_{name}_{}", std::process::id()));
    std::fs::write(&path, "").unwrap();
    path
}

/// Waits until the kernel runs.
#[track_caller]
fn runs(path: &std::path::Path) {
    eventually("the kernel runs", || std::fs::read(path).unwrap() == b"it runs");
}

/// Has calls with this key run alone from now on.
async fn watch(worker: &Worker<Twin>, key: &str) {
    let beside = worker.call(Do::Later(1, LONG)).key((key, "beside")).send();
    eventually("it runs", || worker.stats().running == 1);
    assert_eq!(lost(worker.call(Do::Abort).key(key).await).guilt, Guilt::Suspect);
    assert_eq!(lost(beside.await).guilt, Guilt::Suspect);
    worker.serving().await.unwrap();
}

#[test]
fn who_meets_what_another_left_is_not_guilty() {
    run(async {
        let (path, held) = (fault_file("left"), fault_file("left_held"));
        let worker = blaming(Blame::default()).spawn().await.unwrap();
        let call = || worker.call(Do::OnceGone(held.to_string_lossy().into_owned()));
        for deaths in [1, 2] {
            let may_run_again = deaths == 1;
            std::fs::write(&path, "").unwrap();
            std::fs::write(&held, "").unwrap();
            let good = if may_run_again { call().idempotent() } else { call() }.send();
            eventually("it runs", || worker.stats().running == 1);
            // Somebody leaves a bad kernel, and is answered.
            let bad = Do::FaultOnceGone(path.to_string_lossy().into_owned());
            assert_eq!(worker.call(bad).await, Ok(Done::Nothing));
            runs(&path);
            std::fs::remove_file(&path).unwrap();
            eventually("it died", || worker.stats().deaths == deaths);
            std::fs::remove_file(&held).unwrap();
            match may_run_again {
                true => assert_eq!(good.await, Ok(Done::Nothing)),
                false => assert_eq!(lost(good.await).guilt, Guilt::Suspect),
            }
            assert_eq!(call().await, Ok(Done::Nothing));
        }
        assert_eq!(worker.stats().refused, 0);
    });
}

/// How long a call that runs alone, or its answer, waits for the device at most. On a busy machine a fault may be known later: then it proves nothing.
const WAITS: Duration = Duration::from_secs(1);

#[test]
fn who_runs_alone_has_the_device_alone() {
    run(async {
        let path = fault_file("alone");
        let bad = || Do::FaultOnceGone(path.to_string_lossy().into_owned());
        let worker = blaming(Blame::default()).env("RUST_BACKTRACE", "0").spawn().await.unwrap();
        // It is not answered before what it launched is done.
        for key in ["bad", "again", "once more"] {
            std::fs::write(&path, "").unwrap();
            watch(&worker, key).await;
            let (sent, deaths) = (Instant::now(), worker.stats().deaths);
            let call = worker.call(bad()).key(key).send();
            runs(&path);
            std::fs::remove_file(&path).unwrap();
            let (ended, took) = (call.await, sent.elapsed());
            eventually("it died", || worker.stats().deaths > deaths);
            if ended.is_err() || took < WAITS {
                assert_eq!(lost(ended).guilt, Guilt::Alone);
                assert_eq!(refused(worker.call(Do::Pid).key(key).await).0, "request");
                break;
            }
        }
        // It does not begin before what others launched is done.
        for key in ["good", "as good", "the third"] {
            watch(&worker, key).await;
            std::fs::write(&path, "").unwrap();
            assert_eq!(worker.call(bad()).await, Ok(Done::Nothing));
            runs(&path);
            let (sent, deaths) = (Instant::now(), worker.stats().deaths);
            let call = worker.call(Do::Pid).key(key).send();
            eventually("it is sent", || worker.stats().running == 1);
            std::fs::remove_file(&path).unwrap();
            let (ended, took) = (call.await, sent.elapsed());
            eventually("it died", || worker.stats().deaths > deaths);
            if took < WAITS {
                assert_eq!(lost(ended).guilt, Guilt::Suspect);
                break;
            }
        }
    });
}

#[test]
fn work_without_an_end_holds_up_no_suspect() {
    run(async {
        let path = fault_file("endless");
        let worker = blaming(Blame::default()).spawn().await.unwrap();
        watch(&worker, "good").await;
        let endless = Do::FaultOnceGone(path.to_string_lossy().into_owned());
        assert_eq!(worker.call(endless).await, Ok(Done::Nothing));
        runs(&path);
        assert!(worker.call(Do::Pid).key("good").await.is_ok());
        assert_eq!(worker.stats().deaths, 1);
        std::fs::remove_file(&path).unwrap();
    });
}

#[test]
fn a_kill_makes_nobody_wait_for_a_turn() {
    run(async {
        let worker = blaming(Blame::default()).spawn().await.unwrap();
        let calls: Vec<_> = (0..5)
            .map(|n| worker.call(Do::Later(n, Duration::from_millis(800))).idempotent().send())
            .collect();
        eventually("they run", || worker.stats().running == 5);
        // All together once more; but not for ever.
        for (deaths, running) in [(1, 5), (2, 1)] {
            kill(&worker);
            eventually("it died", || worker.stats().deaths == deaths);
            eventually("they run", || worker.stats().running > 0);
            let stats = worker.stats();
            assert_eq!((stats.running, stats.suspects), (running, 5 - running));
        }
        for (n, call) in calls.into_iter().enumerate() {
            assert_eq!(call.await, Ok(Done::Number(n as u32)));
        }
    });
}

#[test]
fn a_client_of_ever_other_poisons_is_found() {
    run(async {
        for standby in [false, true] {
            let worker = blaming(Blame::default()).standby(standby).spawn().await.unwrap();
            let (mut guilt, brief) = (Vec::new(), Duration::from_millis(100));
            for n in 0.. {
                eventually("it is ready", || !standby || worker.stats().standby.is_some());
                let good = worker.call(Do::Later(n, brief)).idempotent().client("good").send();
                let once = worker.call(Do::Later(n, brief)).client("once").send();
                eventually("they run", || worker.stats().running == 2);
                let bad = worker.call(Do::Exit(10 + n as i32)).client("bad").await;
                if matches!(bad, Err(Error::Refused { .. })) {
                    assert_eq!(refused(bad).0, "client");
                    break;
                }
                guilt.push(lost(bad).guilt);
                assert_eq!(good.await, Ok(Done::Number(n)));
                // It may not run again; but it is answered now and then.
                drop(once.await);
                assert!(worker.call(Do::Pid).client("once").await.is_ok());
            }
            use Guilt::{Alone, Suspect};
            assert_eq!(guilt, [Suspect, Suspect, Alone, Alone, Alone]);
        }
    });
}
