//! What the system refuses: in a binary of its own, whose limit of descriptors it changes.

#[path = "workers/misbehave.rs"]
mod misbehave;
#[path = "workers/twin.rs"]
#[expect(dead_code, reason = "what other tests use")]
mod twin;

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use gpu_await_worker::{Cause, Error, Restart};
use twin::{Do, eventually, lost, run, worker};

gpu_await_worker::test_main!(twin::Twin);

/// The limit is the whole process': one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Sets how many descriptors this process may have; returns how many those were.
fn set_descriptors(most: libc::rlim_t) -> libc::rlim_t {
    let mut files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills a value of this function's.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut files) };
    let changed = libc::rlimit { rlim_cur: most, ..files };
    // SAFETY: reads a value of this function's.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const changed) };
    files.rlim_cur
}

#[test]
fn refused_starts_are_no_deaths() {
    let _alone = alone();
    run(async {
        let (first_delay, most_delay) = (Duration::from_millis(2), Duration::from_millis(20));
        let restart = Restart { first_delay, most_delay, early_deaths: 3, ..Restart::default() };
        let worker = worker().restart(restart).spawn().await.unwrap();
        // A replacement comes, or it does not.
        let first = worker.stats().process;
        let most = set_descriptors(3);
        let replaced = tokio::time::timeout(Duration::from_secs(10), worker.replace()).await;
        set_descriptors(most);
        let replaced = replaced.expect("it ends");
        assert!(
            matches!(replaced, Err(Error::NotReplaced { cause: Cause::NotStarted(_) })),
            "{replaced:?}"
        );
        let stats = worker.stats();
        assert_eq!((stats.process, stats.deaths, stats.last_cause), (first, 0, None));
        worker.replace().await.unwrap();
        // The death counts, and not what kept the next process from starting.
        let most = set_descriptors(3);
        let refused = worker.stats().refused_starts;
        lost(worker.call(Do::Abort).await);
        eventually("starts are refused", || worker.stats().refused_starts > refused + 4);
        let (stats, health) = (worker.stats(), worker.health());
        set_descriptors(most);
        // Both are said.
        let text = health.to_string();
        assert!(text.contains("signal 6") && text.contains("(os error 24)"), "{text}");
        assert_eq!(stats.last_cause, Some(Cause::Signal(6)));
        assert_eq!((stats.deaths, health.cause), (1, Some(Cause::Signal(6))));
        worker.serving().await.unwrap();
        // To be asked to end is none either.
        let watch = worker.clone();
        worker.close(Duration::from_secs(20)).await;
        let stats = watch.stats();
        assert_eq!((stats.deaths, stats.last_cause), (1, Some(Cause::Signal(6))));
    });
}

/// Whatever it is that the system refuses, here or in the process, its error is in the text, and what it was refused for.
#[test]
fn a_first_start_that_is_refused_says_why() {
    let _alone = alone();
    run(async {
        worker().spawn().await.unwrap();
        for (refused, most) in (3..100).enumerate() {
            let all = set_descriptors(most);
            let texts = match worker().begin() {
                Ok(worker) => worker
                    .serving()
                    .await
                    .err()
                    .map(|error| vec![error.to_string(), worker.health().to_string()]),
                Err(error) => Some(vec![error.to_string()]),
            };
            set_descriptors(all);
            let Some(texts) = texts else {
                assert!(refused > 3, "{refused}");
                return;
            };
            for text in texts {
                println!("with {most}: {text}");
                assert!(text.contains("(os error 24)"), "with {most}: {text}");
            }
        }
        panic!("it never serves");
    });
}
