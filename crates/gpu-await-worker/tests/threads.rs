//! Threads that the system refuses to a worker's process: in a binary of its own, which becomes a user of its own.

#[path = "workers/misbehave.rs"]
mod misbehave;
#[path = "workers/twin.rs"]
#[expect(dead_code, reason = "what other tests use")]
mod twin;

use std::time::Duration;

use gpu_await_worker::{Health, Restart};
use twin::{Do, eventually, lost, run, worker};

gpu_await_worker::test_main!(twin::Twin);

/// Sets how many threads the processes of this user may have, together.
fn set_threads(most: libc::rlim_t) {
    let mut threads = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills a value of this function's.
    unsafe { libc::getrlimit(libc::RLIMIT_NPROC, &raw mut threads) };
    threads.rlim_cur = most.min(threads.rlim_max);
    // SAFETY: reads a value of this function's.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const threads) }, 0);
}

/// However many a process gets: until it gets all that it and its service need, that is tried again, and no death.
#[test]
fn threads_that_a_process_does_not_get_are_no_death() {
    // A user whom nobody else is: the limit is a user's, and none for root.
    let user = 100_000 + std::process::id();
    // SAFETY: a plain call; nothing here depends on who this process is.
    let in_group = unsafe { libc::setgid(user) } == 0;
    // SAFETY: likewise.
    if !in_group || unsafe { libc::setuid(user) } != 0 {
        println!("not run: only root becomes another user");
        return;
    }
    run(async {
        let (first_delay, most_delay) = (Duration::from_millis(2), Duration::from_millis(20));
        let restart = Restart { first_delay, most_delay, early_deaths: 3, ..Restart::default() };
        let worker = worker().restart(restart).spawn().await.unwrap();
        let tasks = || std::fs::read_dir("/proc/self/task").expect("Linux").count() as libc::rlim_t;
        let mut in_the_process = 0;
        for (deaths, extra) in (1..).zip(0..20) {
            let before = worker.stats();
            set_threads(tasks() + extra);
            lost(worker.call(Do::Abort).await);
            let is_refused = || worker.stats().refused_starts > before.refused_starts + 8;
            let serves = || {
                let stats = worker.stats();
                stats.starts > before.starts && stats.health == Some(Health::Serving)
            };
            eventually("starts are refused, or not", || is_refused() || serves());
            let (is_refused, health) = (is_refused(), worker.health().to_string());
            set_threads(libc::RLIM_INFINITY);
            if !is_refused {
                assert!(in_the_process > 2, "{in_the_process}");
                return;
            }
            assert!(health.contains("(os error 11)"), "{health}");
            in_the_process += u32::from(health.contains("in its process"));
            worker.serving().await.unwrap();
            assert_eq!(worker.stats().deaths, deaths, "with {extra}: {health}");
        }
        panic!("it never serves");
    });
}
