//! Starting, calling, dying, starting again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures::FutureExt;
use gpu_await_worker::{Cause, Error, Guilt, Health, Restart, Worker};

use crate::twin::{
    Do, Done, NeverStarts, Start, Stranger, Twin, eventually, lives, lost, run, worker,
};

#[test]
fn a_worker_answers() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let answer = worker.call(Do::Double(vec![1.0, 2.5])).await.unwrap();
        assert_eq!(answer, Done::Floats(vec![2.0, 5.0]));
        let Done::Number(pid) = worker.call(Do::Pid).await.unwrap() else { panic!() };
        assert_ne!(pid, std::process::id());
        assert_eq!(worker.stats().process, Some(pid));
        assert_eq!(worker.stats().health, Some(Health::Serving));
        worker.close(Duration::from_secs(10)).await;
        assert!(!lives(pid));
    });
}

#[test]
fn a_hot_worker_answers_as_well() {
    run(async {
        let worker = worker().hot(Duration::from_micros(200)).spawn().await.unwrap();
        for n in 0..500 {
            // At once, after the look, and beside others.
            let delay = Duration::from_micros(u64::from(n % 5) * 100);
            let (one, other) = (worker.call(Do::Later(n, delay)), worker.call(Do::Pid));
            let (one, _) = futures::join!(one.send(), other.send());
            assert_eq!(one, Ok(Done::Number(n)));
        }
        lost(worker.call(Do::Abort).await);
        assert_eq!(worker.call(Do::Later(7, Duration::ZERO)).await, Ok(Done::Number(7)));
    });
}

#[test]
fn each_death_is_named() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        for (request, cause) in [
            (Do::Abort, Cause::Signal(6)),
            (Do::Exit(7), Cause::Exited(7)),
            (Do::Stray, Cause::Signal(11)),
        ] {
            let lost = lost(worker.call(&request).await);
            assert_eq!((lost.cause, lost.guilt, lost.attempt), (cause, Guilt::Alone, 1));
        }
        let answer = worker.call(Do::Double(vec![1.0])).await.unwrap();
        assert_eq!(answer, Done::Floats(vec![2.0]));
        let lost = lost(worker.call(Do::Fault).await);
        let Cause::Fault(text) = &lost.cause else { panic!("{lost:?}") };
        assert!(text.contains("an illegal address"), "{text}");
        assert_eq!(worker.stats().deaths, 4);
    });
}

#[test]
fn a_fault_names_its_line_once() {
    run(async {
        let restart = Restart { first_delay: Duration::ZERO, ..Restart::default() };
        let worker = worker().restart(restart).spawn().await.unwrap();
        for _ in 0..20 {
            let lost = lost(worker.call(Do::Fault).await);
            let Cause::Fault(text) = &lost.cause else { panic!("{lost:?}") };
            assert_eq!(text.matches("twin.rs:").count(), 1, "{text}");
        }
    });
}

#[test]
fn a_call_that_is_polled_late_names_its_line() {
    run(async {
        let late = Duration::from_millis(100);
        let restart = Restart { first_delay: Duration::ZERO, ..Restart::default() };
        let worker = worker().restart(restart).spawn().await.unwrap();
        for _ in 0..3 {
            // One that waits for something else holds up nothing.
            let waits = worker.call(Do::Later(1, Duration::from_secs(3600))).send();
            let lost = lost(worker.call(Do::FaultPolledLate(late)).await);
            let Cause::Fault(text) = &lost.cause else { panic!("{lost:?}") };
            assert_eq!(text.matches("twin.rs:").count(), 1, "{text}");
            assert!(matches!(waits.await, Err(Error::Lost(_))));
        }
        let start = Start { fault_polled_late: Some(late), ..Start::default() };
        let refused = Worker::<Twin>::builder(start).threads(2).spawn().await;
        let Err(Error::GivenUp { cause: Cause::Fault(text), .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(text.matches("twin.rs:").count(), 1, "{text}");
    });
}

#[test]
fn an_answer_is_held_until_the_device_is_well() {
    run(async {
        let restart = Restart { first_delay: Duration::ZERO, ..Restart::default() };
        let path = std::env::temp_dir().join(format!("gpu-await-hold-{}", std::process::id()));
        let doubled = Done::Floats(vec![2.0, 5.0]);
        for holds in [false, true] {
            std::fs::write(&path, "").unwrap();
            let worker = worker().restart(restart).hold_answers(holds).spawn().await.unwrap();
            let double = || worker.call(Do::Double(vec![1.0, 2.5]));
            assert_eq!(double().await, Ok(doubled.clone()));
            // A kernel that will fault is on the device, and nobody waits for it.
            let later = Do::FaultOnceGone(path.to_string_lossy().into_owned());
            let mut launched = worker.call(later).send();
            eventually("it runs", || std::fs::read(&path).unwrap() == b"it runs");
            if !holds {
                assert_eq!(launched.await, Ok(Done::Nothing));
                assert_eq!(double().await, Ok(doubled.clone()));
                std::fs::remove_file(&path).unwrap();
                eventually("it is lost", || worker.stats().deaths == 1);
                continue;
            }
            // Neither what launched it answers, nor what ran beside it; and what may run again does so in another process.
            let (mut once, again) = (double().send(), double().idempotent().send());
            let brief = tokio::time::sleep(Duration::from_millis(200));
            tokio::select! {
                answer = &mut launched => panic!("{answer:?}"),
                answer = &mut once => panic!("{answer:?}"),
                () = brief => {}
            }
            assert_eq!(worker.stats().running, 3);
            std::fs::remove_file(&path).unwrap();
            for call in [launched, once] {
                assert!(matches!(lost(call.await).cause, Cause::Fault(_)));
            }
            assert_eq!(again.await, Ok(doubled.clone()));
        }
    });
}

#[test]
fn the_log_of_a_death_stays() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let pid = worker.stats().process.unwrap();
        worker.call(Do::Say("the first says this".into())).await.unwrap();
        let lost = lost(worker.call(Do::Exit(3)).await);
        assert!(lost.log.contains("the first says this"), "{lost:?}");
        assert!(!lost.to_string().contains("the first says this"), "{lost}");
        // Right away, and when the next one serves.
        for _ in 0..2 {
            let log = worker.log();
            assert!(log.contains("the first says this"), "{log}");
            assert!(log.contains(&format!("process {pid} died: it exited with 3")), "{log}");
            worker.call(Do::Say("the second says that".into())).await.unwrap();
        }
        eventually("it is read", || worker.log().contains("the second says that"));
        assert!(worker.log().contains("the first says this"));
    });
}

#[test]
fn a_wrong_message_is_the_fault_of_who_sends_it() {
    run(async {
        let restart = Restart { first_delay: Duration::ZERO, ..Restart::default() };
        let worker = worker().restart(restart).spawn().await.unwrap();
        // By the numbers of the messages: a hello, that it serves, parts of a timeline, and each ending but a fault.
        let hello = vec![0, 1, 0, 0, 0, 0];
        let endings = [0, 3, 4, 5, 6].map(|ending| vec![7, ending]);
        let packets = [hello, vec![0; 6], vec![1, 0], vec![12], vec![255; 100], Vec::from([3])];
        let timelines = [0, 1, 2].map(|part| vec![8, part]);
        for packet in packets.into_iter().chain(endings).chain(timelines) {
            let lost = lost(worker.call(Do::Send(packet.clone())).await);
            assert!(matches!(lost.cause, Cause::Protocol(_)), "{packet:?}: {lost:?}");
            assert_eq!(lost.guilt, Guilt::Alone, "{packet:?}");
        }
        assert_eq!(worker.call(Do::Later(1, Duration::ZERO)).await, Ok(Done::Number(1)));
    });
}

#[test]
fn what_fails_because_the_process_ends_is_no_answer() {
    run(async {
        let restart = Restart { first_delay: Duration::ZERO, ..Restart::default() };
        let worker = worker().restart(restart).spawn().await.unwrap();
        for _ in 0..10 {
            let doubles = (0..20).map(|_| {
                let worker = worker.clone();
                async move {
                    let request = Do::DoubleOften(vec![1.0; 100], Duration::from_millis(30));
                    worker.call(request).idempotent().await
                }
            });
            let exits = worker.call(Do::ExitLater(0)).send();
            for answer in futures::future::join_all(doubles).await {
                match answer {
                    Ok(_) | Err(Error::Lost(_)) => {}
                    other => panic!("{other:?}"),
                }
            }
            drop(exits.await);
        }
    });
}

#[test]
fn errors_and_panics_are_the_calls_own() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let failed = worker.call(Do::Fail("no".into())).await;
        assert_eq!(failed, Err(Error::Service("no".into())));
        assert_eq!(worker.call(Do::Panic).await, Err(Error::Panicked("as asked".into())));
        assert_eq!(worker.stats().deaths, 0);
    });
}

#[test]
fn a_first_start_that_fails_is_reported() {
    run(async {
        for (how, part) in
            [("no weights", "no weights"), ("panic", "at the start"), ("abort", "signal 6")]
        {
            let brief = match how {
                "abort" => "signal 6",
                "panic" => "its `start` panicked",
                _ => "its `start` returned an error",
            };
            let spawned = Worker::<NeverStarts>::builder(how.to_owned()).spawn().await;
            let error = spawned.unwrap_err();
            assert!(matches!(error, Error::GivenUp { .. }), "{error:?}");
            let Error::GivenUp { cause, .. } = &error else { panic!("{error:?}") };
            assert!(cause.to_string().contains(part), "{cause}");
            assert!(error.log().unwrap().contains("about to fail"), "{error:?}");
            assert!(!error.to_string().contains("about to fail"), "{error}");
            assert!(error.to_string().contains(brief), "{error}");
        }
    });
}

#[test]
fn advice_is_for_whom_it_helps() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let often = lost(worker.call(Do::KillMe).idempotent().await);
        assert_eq!((often.attempt, often.guilt), (3, Guilt::Suspect));
        assert!(!often.to_string().contains("`Call::idempotent`"), "{often}");
        let once = lost(worker.call(Do::KillMe).await);
        assert!(once.to_string().contains("`Call::idempotent`"), "{once}");
    });
}

#[test]
fn what_cannot_work_starts_nothing() {
    run(async {
        let stranger = Worker::<Stranger>::builder(()).spawn().await;
        assert!(matches!(stranger, Err(Error::NotRegistered { .. })), "{stranger:?}");
        let worker = worker().spawn().await.unwrap();
        let inside = worker.call(Do::Worker).await.unwrap();
        assert_eq!(inside, Done::Text("InsideWorker".into()));
    });
}

#[test]
fn the_last_handle_ends_the_process() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        let Done::Number(pid) = worker.call(Do::Pid).await.unwrap() else { panic!() };
        let call = worker.call(Do::Later(1, Duration::from_secs(3600))).send();
        drop(worker);
        assert!(lives(pid));
        drop(call);
        eventually("the process is gone", || !lives(pid));
    });
}

#[test]
fn a_program_of_a_worker_is_none() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        // It inherits no descriptor, so it keeps nothing of the worker, whose death is seen all the same.
        let Done::Number(program) = worker.call(Do::Program).await.unwrap() else { panic!() };
        let fds = std::fs::read_dir(format!("/proc/{program}/fd")).unwrap();
        let targets: Vec<_> = fds
            .filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
            .map(|target| target.to_string_lossy().into_owned())
            .collect();
        let kept =
            targets.iter().filter(|target| target.contains("socket") || target.contains("memfd"));
        assert_eq!(kept.count(), 0, "{targets:?}");
        lost(worker.call(Do::Abort).await);
        // It was in the group of the process.
        eventually("the program is gone", || !lives(program));
    });
}

#[test]
fn a_fork_of_a_worker_goes_with_it() {
    run(async {
        let worker = worker().spawn().await.unwrap();
        // It has the socket, and the slabs' descriptors: no end of file, but a death all the same.
        let Done::Number(child) = worker.call(Do::Fork).await.unwrap() else { panic!() };
        lost(worker.call(Do::Abort).await);
        eventually("the fork is gone", || !lives(child));
        assert_eq!(worker.call(Do::Later(1, Duration::ZERO)).await, Ok(Done::Number(1)));
    });
}

/// A waker that holds up the thread that calls it.
#[derive(Default)]
struct Holds {
    is_held: AtomicBool,
    may_go: AtomicBool,
}

impl Wake for Holds {
    fn wake(self: Arc<Self>) {
        self.is_held.store(true, Ordering::SeqCst);
        eventually("it may go on", || self.may_go.load(Ordering::SeqCst));
    }
}

#[test]
fn answers_before_the_death_count() {
    run(async {
        // One thread: the process has answered what came before when it comes to the call that kills it.
        let worker = worker().threads(1).spawn().await.unwrap();
        let pid = worker.stats().process.unwrap();
        // The supervisor hears nothing meanwhile.
        let holds = Arc::new(Holds::default());
        let waker = Waker::from(holds.clone());
        let mut first = worker.call(Do::Later(0, Duration::from_millis(20))).send();
        assert!(first.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        eventually("the supervisor is held up", || holds.is_held.load(Ordering::SeqCst));
        // More than it hears at once.
        let calls: Vec<_> = (0..300).map(|_| worker.call(Do::Pid).idempotent().send()).collect();
        let killer = worker.call(Do::Abort).send();
        eventually("it died", || !lives(pid));
        holds.may_go.store(true, Ordering::SeqCst);
        for call in calls {
            assert_eq!(call.await, Ok(Done::Number(pid)), "it ran twice, or was lost");
        }
        // Any of those that were answered may have left something behind.
        assert_eq!(lost(killer.await).guilt, Guilt::Suspect);
        assert_eq!(first.await, Ok(Done::Number(0)));
    });
}

#[test]
fn output_is_kept_from_the_end() {
    run(async {
        let worker = worker().log_bytes(1000).spawn().await.unwrap();
        // More than a pipe holds: nobody waits for a reader.
        for _ in 0..20 {
            worker.call(Do::Say("x".repeat(16_000))).await.unwrap();
        }
        worker.call(Do::Say("the end".into())).await.unwrap();
        eventually("all is read", || worker.log().contains("the end"));
        assert!(worker.log().len() < 1100, "{}", worker.log().len());
        assert!(worker.log().contains("bytes before this were dropped"));
    });
}
