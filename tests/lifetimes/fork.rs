//! Forks: a child that runs a closure, and is waited for.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

/// Whether all other threads sleep, in two scans. (A scan reads one thread after another: it may see a thread asleep on a lock, and
/// then the owner asleep as well, which has released the lock in between.)
pub(crate) fn others_sleep() -> bool {
    let states = || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok())
    };
    (0..2).all(|_| states().filter(|state| !state.contains(") S ")).count() == 1)
}

/// [`forked`] as soon as no thread is starting or ending: it may hold a lock of the standard library.
pub(crate) fn forked_in_quiet(child: impl FnOnce()) -> Duration {
    let end = Instant::now() + Duration::from_secs(10);
    while !others_sleep() {
        assert!(Instant::now() < end, "the other threads sleep");
        std::thread::yield_now();
    }
    forked(child)
}

/// Forks, and runs `child` in the child, which then exits. Returns how long its exit took. No other thread is starting or ending.
pub(crate) fn forked(child: impl FnOnce()) -> Duration {
    let (mut exits, exit) = std::io::pipe().expect("a pipe");
    // SAFETY: the other threads of this process hold no lock that the child needs.
    let forked = unsafe { libc::fork() };
    if forked == 0 {
        // If the child hangs, it is killed with its parent, which has a time limit.
        // SAFETY: the call takes integers, and affects this process alone.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        (&exit).write_all(&[1]).expect("the parent reads");
        std::process::exit(i32::from(done.is_err()));
    }
    drop(exit);
    exits.read_exact(&mut [0]).expect("the child comes to its end");
    let (mut status, start) = (-1, Instant::now());
    // SAFETY: the status is written for the length of the call.
    assert_eq!(unsafe { libc::waitpid(forked, &raw mut status, 0) }, forked);
    assert_eq!(status, 0);
    start.elapsed()
}
