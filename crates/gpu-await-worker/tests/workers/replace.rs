//! Processes that are replaced while they serve.

use std::collections::BTreeMap;
use std::time::Duration;

use gpu_await_worker::{Cause, Error, Guilt, Health, Replace, Restart, Worker};

use crate::twin::{
    Do, Done, Start, Twin, Use, eventually, kill, lives, lost, run, worker, written,
};

const LONG: Duration = Duration::from_secs(3600);

fn quick() -> Restart {
    Restart { first_delay: Duration::ZERO, early_deaths: 2, ..Restart::default() }
}

#[test]
fn a_replacement_takes_over() {
    run(async {
        for standby in [false, true] {
            let worker = worker().standby(standby).spawn().await.unwrap();
            for round in 1..=3 {
                let old = worker.stats().process.unwrap();
                // What it has, it answers, and what comes meanwhile is another process's.
                let runs = worker.call(Do::Later(7, Duration::from_millis(100))).send();
                eventually("it runs", || worker.stats().running == 1);
                let (replaced, ()) = tokio::join!(worker.replace(), async {
                    while worker.stats().replacements < round {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    let stats = worker.stats();
                    assert_ne!(stats.process, Some(old));
                    let Ok(Done::Number(next)) = worker.call(Do::Pid).await else { panic!() };
                    assert_eq!(stats.process, Some(next));
                });
                replaced.unwrap();
                assert!(!lives(old), "ready says that it is gone");
                assert_eq!(runs.await, Ok(Done::Number(7)));
            }
            let stats = worker.stats();
            assert_eq!((stats.replacements, stats.deaths, stats.takeovers), (3, 0, 0));
            assert_eq!((stats.lost_calls, stats.last_cause, stats.draining), (0, None, None));
            assert_eq!(stats.health, Some(Health::Serving));
            eventually("as many as before", || worker.stats().standby.is_some() == standby);
            worker.close(Duration::from_secs(20)).await;
        }
    });
}

#[test]
fn a_hundred_replacements_lose_no_call() {
    run(async {
        let path = std::env::temp_dir().join(format!("gpu-await-calls-{}", std::process::id()));
        let path = path.to_string_lossy().into_owned();
        std::fs::write(&path, "").unwrap();
        let payloads = 256 << 10;
        let worker = worker().payload_bytes(payloads, payloads).spawn().await.unwrap();
        let clients = (0..8u32).map(|client| {
            let (worker, path) = (worker.clone(), path.clone());
            tokio::spawn(async move {
                let mut n = 0u32;
                while worker.stats().replacements < 100 {
                    // None may run again: what is lost or doubled shows.
                    let number = client << 24 | n;
                    let wrote = worker.call(Do::Write(path.clone(), number)).await;
                    assert_eq!(wrote, Ok(Done::Number(number)));
                    let bytes: Vec<u8> = (0..20_000u32).map(|at| (at ^ number) as u8).collect();
                    let call = worker.call(Do::Reverse).payload(bytes.clone());
                    let (_, payload) = call.send().with_payload().await.unwrap();
                    let answer: Vec<u8> = payload.unwrap().to_vec().into_iter().rev().collect();
                    assert_eq!(answer, bytes);
                    n += 1;
                }
                n
            })
        });
        let clients: Vec<_> = clients.collect();
        for _ in 0..100 {
            worker.replace().await.unwrap();
        }
        let mut wanted = BTreeMap::new();
        for (client, calls) in clients.into_iter().enumerate() {
            let calls = calls.await.unwrap();
            wanted.extend((0..calls).map(|n| ((client as u32) << 24 | n, 1)));
        }
        assert_eq!(written(&path), wanted);
        let stats = worker.stats();
        assert_eq!((stats.replacements, stats.deaths, stats.retries), (100, 0, 0));
        assert_eq!((stats.lost_calls, stats.stale_messages, stats.starts), (0, 0, 101));
        assert!(worker.lease(payloads as usize).await.is_ok(), "all memory came back");
        std::fs::remove_file(path).unwrap();
    });
}

#[test]
fn a_process_that_has_done_enough_is_replaced() {
    run(async {
        let (bytes, none) = (vec![1; 30_000], Replace::default());
        for (replace, why) in [
            (Replace { calls: Some(5), ..none }, "calls"),
            (Replace { payload_bytes: Some(100_000), ..none }, "bytes"),
            (Replace { time: Some(Duration::from_millis(200)), ..none }, "time"),
        ] {
            let worker = worker().replace(replace).spawn().await.unwrap();
            let first = worker.stats().process;
            for _ in 0..4 {
                let call = worker.call(Do::First(Use::Drop, Duration::ZERO));
                let call = call.payload(bytes.clone());
                assert_eq!(call.await, Ok(Done::Number(1)), "{why}");
            }
            // The fifth call, or four of them with 30,000 bytes each, or the time.
            if why == "calls" {
                assert_eq!(worker.stats().process, first);
                assert!(worker.call(Do::Pid).await.is_ok());
            }
            eventually(why, || {
                worker.stats().replacements > 0 && worker.stats().draining.is_none()
            });
            assert_ne!(worker.stats().process, first);
            assert_eq!(worker.stats().deaths, 0);
        }
    });
}

#[test]
fn a_replacement_that_cannot_start_changes_nothing() {
    run(async {
        let path = std::env::temp_dir().join(format!("gpu-await-replace-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        // The first process alone can start.
        let config = Start { once: Some(path.to_string_lossy().into_owned()), ..Start::default() };
        let worker = Worker::<Twin>::builder(config).restart(quick()).spawn().await.unwrap();
        let first = worker.stats().process;
        let runs = worker.call(Do::Later(1, Duration::from_millis(300))).send();
        for _ in 0..2 {
            let Err(Error::NotReplaced { cause: Cause::StartFailed(why) }) = worker.replace().await
            else {
                panic!("{:?}", worker.stats())
            };
            assert!(why.contains("No such file"), "{why}");
        }
        assert_eq!(runs.await, Ok(Done::Number(1)));
        let stats = worker.stats();
        assert_eq!((stats.process, stats.replacements, stats.early_deaths), (first, 0, 0));
        // And no standby is left over from it.
        assert_eq!((stats.standby, stats.starts), (None, 7));
        std::fs::write(&path, "").unwrap();
        worker.replace().await.unwrap();
        assert_ne!(worker.stats().process, first);
    });
}

#[test]
fn a_death_while_it_is_replaced() {
    run(async {
        // Of the old one, while the new one starts: that takes over.
        let gate = std::env::temp_dir().join(format!("gpu-await-replaced-{}", std::process::id()));
        let path = gate.to_string_lossy().into_owned();
        let start = Start { once_gone: Some(path), ..Start::default() };
        let worker = Worker::<Twin>::builder(start).restart(quick()).spawn().await.unwrap();
        let old = worker.stats().process.unwrap();
        std::fs::write(&gate, "").unwrap();
        let (replaced, ()) = tokio::join!(worker.replace(), async {
            while worker.stats().starts < 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            kill(&worker);
            while worker.stats().deaths < 1 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            std::fs::remove_file(&gate).unwrap();
        });
        replaced.unwrap();
        assert!(!lives(old));
        assert!(worker.call(Do::Pid).await.is_ok());
        let stats = worker.stats();
        assert_eq!((stats.starts, stats.deaths, stats.replacements), (2, 1, 0));
        // Of the old one while it drains: what it had is lost, and the new one goes on.
        let runs = worker.call(Do::Later(0, LONG)).send();
        eventually("it runs", || worker.stats().running == 1);
        let (replaced, ()) = tokio::join!(worker.replace(), async {
            while worker.stats().draining.is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let pid = worker.stats().draining.unwrap();
            // SAFETY: signals a process that this one started, and has not waited for.
            unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
        });
        replaced.unwrap();
        assert_eq!(lost(runs.await).cause, Cause::Signal(9));
        let stats = worker.stats();
        assert_eq!((stats.starts, stats.deaths, stats.replacements), (3, 2, 1));
        // Of the new one, while the old one drains.
        let held = gate.with_extension("held");
        std::fs::write(&held, "").unwrap();
        let runs = worker.call(Do::OnceGone(held.to_string_lossy().into_owned())).send();
        eventually("it runs", || worker.stats().running == 1);
        let (replaced, ()) = tokio::join!(worker.replace(), async {
            while worker.stats().draining.is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            lost(worker.call(Do::Abort).await);
            assert!(worker.call(Do::Pid).await.is_ok());
            std::fs::remove_file(&held).unwrap();
        });
        replaced.unwrap();
        assert_eq!(runs.await, Ok(Done::Nothing));
    });
}

#[test]
fn a_process_that_does_not_drain_is_killed() {
    run(async {
        let replace = Replace { drain: Duration::from_millis(100), ..Replace::default() };
        let worker = worker().replace(replace).spawn().await.unwrap();
        let old = worker.stats().process.unwrap();
        let runs = worker.call(Do::Later(0, LONG)).send();
        let again = worker.call(Do::BlockOnce(old, LONG)).idempotent().send();
        eventually("they run", || worker.stats().running == 2);
        worker.replace().await.unwrap();
        let lost = lost(runs.await);
        assert_eq!((lost.cause, lost.guilt), (Cause::NoEnd, Guilt::Innocent));
        let Ok(Done::Number(next)) = again.await else { panic!() };
        assert_eq!(worker.stats().process, Some(next));
    });
}

#[test]
fn a_suspect_without_an_end_is_replaced() {
    run(async {
        let replace = Replace { drain: Duration::from_millis(300), ..Replace::default() };
        for standby in [false, true] {
            let worker = worker().replace(replace).restart(quick()).standby(standby);
            let worker = worker.spawn().await.unwrap();
            eventually("it is ready", || worker.stats().standby.is_some() == standby);
            let endless = worker.call(Do::Later(0, LONG)).idempotent().send();
            let other = worker.call(Do::Later(2, Duration::from_secs(1))).idempotent().send();
            eventually("they run", || worker.stats().running == 2);
            lost(worker.call(Do::Abort).await);
            eventually("one runs alone", || {
                let stats = worker.stats();
                stats.starts == 2 + u64::from(standby) && stats.running == 1
            });
            let old = worker.stats().process.unwrap();
            worker.replace().await.unwrap();
            assert!(!lives(old));
            assert_eq!(worker.stats().early_deaths, 0);
            // The others go on, if nobody waits for that one.
            drop(endless);
            assert_eq!(other.await, Ok(Done::Number(2)));
        }
    });
}

#[test]
fn closing_ends_a_process_that_drains() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let runs = worker.call(Do::Later(3, Duration::from_millis(200))).send();
        eventually("it runs", || worker.stats().running == 1);
        let replaced = tokio::spawn({
            let worker = worker.clone();
            async move { worker.replace().await }
        });
        while worker.stats().draining.is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let all = [worker.stats().process.unwrap(), worker.stats().draining.unwrap()];
        worker.clone().close(Duration::from_secs(20)).await;
        assert!(!all.into_iter().any(lives));
        assert_eq!(runs.await, Ok(Done::Number(3)));
        assert_eq!(replaced.await.unwrap(), Err(Error::Closed));
        assert_eq!(worker.replace().await, Err(Error::Closed));
    });
}

/// What a call in an old process needs of the front, it has.
#[test]
fn a_process_that_drains_hears_its_front() {
    run(async {
        let worker = worker().payload_bytes(4096, 4096).spawn().await.unwrap();
        let (_, held) =
            worker.call(Do::Reverse).payload(vec![1; 4096]).send().with_payload().await.unwrap();
        // It waits for the room that this program holds.
        let waits = worker.call(Do::Hold(4096, Duration::ZERO)).send();
        eventually("it runs", || worker.stats().running == 1);
        let replaced = tokio::spawn({
            let worker = worker.clone();
            async move { worker.replace().await }
        });
        while worker.stats().draining.is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(held);
        assert_eq!(waits.await, Ok(Done::Nothing));
        replaced.await.unwrap().unwrap();
    });
}
