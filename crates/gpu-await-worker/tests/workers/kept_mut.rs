//! Memory that outlives processes and that they may write, one after the other.

use std::time::Duration;

use gpu_await_worker::{Cause, Error, Group, Restart, Worker, WorkerBuilder};
use gpu_await_worker::{forget_kept, kept};

use crate::twin::{CELLS, Do, Done, Found, Start, Twin, Write, eventually, kill, lives, lost, run};

const LONG: Duration = Duration::from_secs(3600);

fn builder(name: &str) -> WorkerBuilder<Twin> {
    let restart = Restart { first_delay: Duration::ZERO, ..Restart::default() };
    let config = Start { keep_mut: Some(name.to_owned()), ..Start::default() };
    Worker::<Twin>::builder(config).threads(2).restart(restart)
}

/// What it counted, and found.
#[track_caller]
fn counted(done: Result<Done, Error>) -> (u64, Found) {
    match done {
        Ok(Done::Counted(count, found)) => (count, found),
        other => panic!("{other:?}"),
    }
}

async fn count(worker: &Worker<Twin>, how: Write) -> (u64, Found) {
    counted(worker.call(Do::Count(how)).await)
}

#[test]
fn the_next_one_learns_who_died_as_it_wrote() {
    run(async {
        let worker = builder("learns").spawn().await.unwrap();
        let (1, Found::Fresh(first)) = count(&worker, Write::Whole).await else { panic!() };
        assert_eq!(count(&worker, Write::Whole).await, (2, Found::Fresh(first)));
        // One that died, and did not write.
        lost(worker.call(Do::Abort).await);
        let (3, Found::Clean(second)) = count(&worker, Write::Whole).await else { panic!() };
        assert!(second > first);
        // One that died as it wrote, which stays known until somebody has written.
        lost(worker.call(Do::Count(Write::Dies)).await);
        let (_, Found::Died(third, died)) = count(&worker, Write::Nothing).await else { panic!() };
        assert_eq!(died, second);
        lost(worker.call(Do::Fault).await);
        let (n, Found::Died(_, died)) = count(&worker, Write::Whole).await else { panic!() };
        assert!(died == second && third > second);
        kill(&worker);
        eventually("it is seen", || worker.stats().deaths == 4);
        let (again, Found::Clean(_)) = count(&worker, Write::Whole).await else { panic!() };
        assert_eq!(again, n + 1);
        // One whose write failed, with and without a better one behind it.
        let failed = worker.call(Do::Count(Write::Fails)).await;
        assert_eq!(failed, Err(Error::Service("half written".into())));
        lost(worker.call(Do::Abort).await);
        let (_, Found::Died(..)) = count(&worker, Write::Nothing).await else { panic!() };
        worker.call(Do::Count(Write::Fails)).await.unwrap_err();
        count(&worker, Write::Whole).await;
        lost(worker.call(Do::Abort).await);
        let (_, Found::Clean(_)) = count(&worker, Write::Nothing).await else { panic!() };
        // A process has it to its end.
        let found = kept().into_iter().find(|kept| kept.name == "learns").unwrap();
        assert_eq!((found.info.len, found.info.is_mutable), (CELLS as u64, true));
        assert!(!forget_kept(None, "learns"));
        worker.close(Duration::from_secs(20)).await;
        assert!(forget_kept(None, "learns"));
        let worker = builder("learns").spawn().await.unwrap();
        let (1, Found::Fresh(_)) = count(&worker, Write::Whole).await else { panic!() };
        worker.close(Duration::from_secs(20)).await;
        assert!(forget_kept(None, "learns"));
    });
}

#[test]
fn a_second_worker_says_what_it_waits_for() {
    run(async {
        let first = builder("wanted").spawn().await.unwrap();
        assert_eq!(count(&first, Write::Whole).await.0, 1);
        let second = builder("wanted").spawn().await.unwrap();
        eventually("it waits", || second.health().waits_for.as_deref() == Some("wanted"));
        let health = second.health();
        assert!(!health.is_serving() && health.to_string().contains("\"wanted\""), "{health}");
        assert!(first.health().is_serving());
        let counts = second.call(Do::Count(Write::Whole)).send();
        first.close(Duration::from_secs(20)).await;
        assert_eq!(counted(counts.await).0, 2);
        assert!(second.health().is_serving(), "{}", second.health());
        second.close(Duration::from_secs(20)).await;
        assert!(forget_kept(None, "wanted"));
    });
}

/// Two workers of a group ask for one name: all calls go to the one that has the memory, and back to it after a death.
#[test]
fn a_group_calls_the_one_that_has_it() {
    run(async {
        let group = Group::spawn([builder("group"), builder("group")]).await.unwrap();
        let call = |request| group.call(request).idempotent().deadline(Duration::from_secs(20));
        for n in 1..=8 {
            assert_eq!(counted(call(Do::Count(Write::Whole)).await).0, n);
        }
        let dies = group.call(Do::Abort).send();
        let others = (0..8).map(|_| call(Do::Later(7, Duration::from_millis(20))).into_future());
        let others = futures::future::join_all(others).await;
        lost(dies.await);
        assert!(others.iter().all(|answer| *answer == Ok(Done::Number(7))), "{others:?}");
        assert_eq!(counted(call(Do::Count(Write::Whole)).await).0, 9);
        assert_eq!(group.stats().moved, 0);
        group.close(Duration::from_secs(20)).await;
        assert!(forget_kept(None, "group"));
    });
}

/// Another worker waits for it as its process dies: the next process of its own gets it.
#[test]
fn it_stays_with_its_worker() {
    run(async {
        for standby in [false, true] {
            let old = builder("stays").standby(standby).spawn().await.unwrap();
            assert_eq!(count(&old, Write::Whole).await.0, 1);
            let new = builder("stays").spawn().await.unwrap();
            eventually("it waits", || new.health().waits_for.is_some());
            for n in 2..6 {
                lost(old.call(Do::Abort).await);
                let counts = old.call(Do::Count(Write::Whole)).deadline(Duration::from_secs(20));
                assert_eq!(counted(counts.await).0, n);
            }
            assert!(new.health().waits_for.is_some());
            old.close(Duration::from_secs(20)).await;
            assert_eq!(count(&new, Write::Whole).await.0, 6);
            new.close(Duration::from_secs(20)).await;
            assert!(forget_kept(None, "stays"));
        }
    });
}

#[test]
fn who_broke_the_protocol_may_have_written() {
    run(async {
        let worker = builder("broke").spawn().await.unwrap();
        let (1, Found::Fresh(first)) = count(&worker, Write::Whole).await else { panic!() };
        lost(worker.call(Do::Send(vec![250; 20])).await);
        let (_, Found::Died(_, died)) = count(&worker, Write::Whole).await else { panic!() };
        assert_eq!(died, first);
        drop(worker);
        eventually("it is nobody's", || forget_kept(None, "broke"));
    });
}

#[test]
fn a_standby_gets_it_when_the_other_one_is_reaped() {
    run(async {
        let worker = builder("standby").standby(true).spawn().await.unwrap();
        for round in 1..6u64 {
            eventually("a standby is ready", || worker.stats().standby.is_some());
            let (main, standby) = (worker.stats().process.unwrap(), worker.stats().standby);
            let (n, _) = count(&worker, Write::Whole).await;
            assert_eq!(n, 2 * round - 1);
            let slow = worker.call(Do::Count(Write::Slowly(LONG))).send();
            eventually("it is sent", || worker.stats().running == 1);
            // Others wait until it has its memory, and none is lost.
            kill(&worker);
            eventually("it took over", || worker.stats().takeovers == round);
            assert_eq!(worker.stats().process, standby);
            let (n, found) = count(&worker, Write::Nothing).await;
            assert!(!lives(main));
            // Whether it had begun to write as it was killed.
            match found {
                Found::Clean(_) => assert_eq!(n, 2 * round - 1),
                Found::Died(..) => {}
                Found::Fresh(_) => panic!("it is another one's"),
            }
            lost(slow.await);
            // Half of it is old: whole again.
            let reset = worker.call(Do::Reset(2 * round)).await;
            assert_eq!(reset, Ok(Done::Nothing));
        }
        drop(worker);
        eventually("it is nobody's", || forget_kept(None, "standby"));
    });
}

/// Also where no other process of the worker has it.
#[test]
fn a_standby_gets_nothing_before_it_takes_over() {
    run(async {
        let path = std::env::temp_dir().join(format!("gpu-await-second-{}", std::process::id()));
        let second = Some(path.to_string_lossy().into_owned());
        let config = Start { keep_mut: Some("early".to_owned()), second, ..Start::default() };
        let worker = Worker::<Twin>::builder(config).threads(2).standby(true);
        let worker = worker.spawn().await.unwrap();
        eventually("a standby is ready", || worker.stats().standby.is_some());
        // It has asked, and another worker gets the memory.
        let other = builder("early").spawn().await.unwrap();
        let (1, Found::Fresh(_)) = count(&other, Write::Whole).await else { panic!() };
        kill(&worker);
        eventually("it took over", || worker.stats().takeovers == 1);
        let waits = worker.call(Do::Count(Write::Whole)).send();
        other.close(Duration::from_secs(20)).await;
        let (2, Found::Clean(_)) = counted(waits.await) else { panic!() };
        drop(worker);
        eventually("it is nobody's", || forget_kept(None, "early"));
        std::fs::remove_file(path).unwrap();
    });
}

#[test]
fn suspects_run_where_the_memory_is() {
    run(async {
        let worker = builder("suspects").standby(true).spawn().await.unwrap();
        eventually("a standby is ready", || worker.stats().standby.is_some());
        let brief = Write::Slowly(Duration::from_millis(50));
        let good = worker.call(Do::Count(brief)).idempotent().send();
        eventually("it runs", || worker.stats().running == 1);
        let poison = worker.call(Do::Abort).idempotent().send();
        // The one that takes over, and the one behind that, get no call without their memory.
        counted(good.await);
        let lost = lost(poison.await);
        assert_eq!((lost.attempt, lost.cause), (2, Cause::Signal(6)));
        assert_eq!(worker.stats().standby_deaths, 0);
        count(&worker, Write::Whole).await;
        drop(worker);
        eventually("it is nobody's", || forget_kept(None, "suspects"));
    });
}

#[test]
fn a_replacement_gets_it_when_the_other_one_is_gone() {
    run(async {
        let worker = builder("replaced").spawn().await.unwrap();
        for round in 0..5u64 {
            let (n, _) = count(&worker, Write::Whole).await;
            assert_eq!(n, 3 * round + 1);
            let old = worker.stats().process.unwrap();
            let slow = worker.call(Do::Count(Write::Slowly(Duration::from_millis(50)))).send();
            eventually("it writes", || worker.stats().running == 1);
            let (replaced, next) = tokio::join!(worker.replace(), async {
                while worker.stats().replacements <= round {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                let next = counted(worker.call(Do::Count(Write::Whole)).await);
                (next, lives(old))
            });
            replaced.unwrap();
            assert_eq!(counted(slow.await).0, 3 * round + 2);
            let ((n, found), other_lives) = next;
            assert!(n == 3 * round + 3 && matches!(found, Found::Clean(_)), "{n} {found:?}");
            assert!(!other_lives, "two of them had it");
        }
        assert_eq!((worker.stats().lost_calls, worker.stats().deaths), (0, 0));
        drop(worker);
        eventually("it is nobody's", || forget_kept(None, "replaced"));
    });
}

#[test]
fn what_a_process_forked_keeps_its_memory() {
    run(async {
        let worker = builder("forked").spawn().await.unwrap();
        // With all that it inherits; with the mapping alone; and for good.
        for (closes, dies) in [(false, true), (true, true), (false, false)] {
            let (before, _) = count(&worker, Write::Whole).await;
            let fork = worker.call(Do::ForkAway { closes }).await;
            let Ok(Done::Number(fork)) = fork else { panic!() };
            lost(worker.call(Do::Abort).await);
            worker.serving().await.unwrap();
            let waits = worker.call(Do::Count(Write::Whole)).send();
            let end = || {
                // SAFETY: signals a process that a process of this test forked.
                unsafe { libc::kill(fork as libc::pid_t, libc::SIGKILL) };
            };
            // It serves, and is sent nothing as long as the other one has the memory.
            eventually("it waits", || worker.stats().calls == 1);
            if dies {
                let late = worker.call(Do::Pid).deadline(Duration::from_millis(100)).await;
                assert_eq!((late, worker.stats().running), (Err(Error::Deadline), 0));
                end();
                let (next, Found::Clean(_)) = counted(waits.await) else { panic!() };
                assert_eq!(next, before + 1);
            } else {
                // For so long, after which there is new memory.
                let (1, Found::Fresh(_)) = counted(waits.await) else { panic!() };
                assert!(lives(fork));
                end();
            }
        }
        drop(worker);
        eventually("it is nobody's", || forget_kept(None, "forked"));
    });
}

#[test]
fn two_workers_have_it_one_after_the_other() {
    run(async {
        let one = builder("two").spawn().await.unwrap();
        assert_eq!(count(&one, Write::Whole).await.0, 1);
        let other = builder("two").spawn().await.unwrap();
        let waits = other.call(Do::Count(Write::Whole)).send();
        let late = other.call(Do::Pid).deadline(Duration::from_millis(50)).await;
        assert_eq!(late, Err(Error::Deadline));
        one.close(Duration::from_secs(20)).await;
        let (2, Found::Clean(_)) = counted(waits.await) else { panic!() };
        drop(other);
        eventually("it is nobody's", || forget_kept(None, "two"));
    });
}
