//! No lock is held where something may end.
//!
//! When a stream, a device or an allocation ends, it calls the owners of its belongings, frees and wakes: under a lock of this crate it
//! could come back to that lock, or wait for a thread that waits for it. So the last reference to one is never dropped under a lock.
//! Debug builds with `test-util` check that at each such drop, and abort the process, since a panic in a drop may be contained.
//!
//! The closure of `enqueue` is the user's and runs under its stream's submission lock; what it drops only queues its work (see
//! [`role`](super::role)).
#![forbid(unsafe_code)]

#[cfg(all(debug_assertions, feature = "test-util"))]
pub(crate) fn assert_none(what: &str) {
    use super::role::{self, Role};

    let held = gpu_await_protocol::sync::held();
    if held > 0 && role::current() != Role::Enqueuing {
        let trace = std::backtrace::Backtrace::force_capture();
        eprintln!("{what} ends on a thread that holds {held} locks:\n{trace}");
        std::process::abort();
    }
}

#[cfg(not(all(debug_assertions, feature = "test-util")))]
#[inline(always)]
pub(crate) fn assert_none(_what: &str) {}

#[cfg(all(test, debug_assertions, feature = "test-util"))]
mod tests {
    use super::*;
    use crate::thread::role::{self, Role};
    use gpu_await_protocol::sync::{Mutex, held};

    #[test]
    fn held_locks_count() {
        let (a, b) = (Mutex::new(1), Mutex::new(2));
        let first = a.lock();
        assert!(a.try_lock().is_none());
        let second = b.try_lock().expect("free");
        assert_eq!(held(), 2);
        std::thread::scope(|scope| scope.spawn(|| assert_none("another thread's")).join().unwrap());
        {
            let _role = role::enter(Role::Enqueuing);
            assert_none("what the closure of `enqueue` drops");
        }
        drop((first, second));
        assert_eq!(held(), 0);
        assert_none("nothing");
    }
}
