//! State of this crate that belongs to a process, and that the child of a fork begins anew.
//!
//! The child has a copy of its parent's memory and none of its other threads: counts of work under way, lists of devices and handles of
//! threads are the parent's, and a lock that another thread held stays locked. So they are in [`PerProcess`] values: a child makes its own
//! with its first use, and leaves its parent's as they are.
//!
//! | static | in the child of a fork |
//! |---|---|
//! | a [`PerProcess`] value | its own |
//! | counters of ids and names, hints, functions of loaded libraries, the number of GPUs | inherited: the child continues from its parent's value |
//! | entry points of the driver | refuse, if the parent had initialized it |
//! | gates and turns of tests on a GPU, calls that take the driver's lock | not used: CUDA does not work there |
//!
//! # Invariants
//! 1. A child waits for nothing that its parent had under way (`the_child_of_a_fork_ends_at_once`), and for no thread of its parent: a wait for one
//!    remembers its [`Process`], and ends in any other (`a_child_waits_for_no_thread_of_its_parent`).
//!
//! Source: `pthread_atfork(3)`, POSIX. Systems without it have no fork.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Whether forks are counted, by a handler that this process registered or inherited.
#[cfg(all(unix, not(miri)))]
static COUNTED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// How many forks lie between the process that used this crate first and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// What a child does before its own code runs.
static IN_CHILD: [OnceLock<fn()>; 2] = [const { OnceLock::new() }; 2];

/// A process, among those that were forked from one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// This one. A child of a fork differs from its parent if that has used a [`PerProcess`] value.
    pub(crate) fn this() -> Self {
        // ORDERING: Relaxed: stored while the process has one thread.
        Process(FORKS.load(Ordering::Relaxed))
    }

    /// This one, for a value that is of use only here: a child that is forked from now on differs from it.
    pub fn remembered() -> Self {
        count_forks();
        Process::this()
    }

    /// The parent of this one, for tests of values that remember their process.
    #[cfg(test)]
    pub(crate) fn parent() -> Self {
        Process(Process::this().0.wrapping_sub(1))
    }

    /// Whether it is this one, and not an ancestor.
    pub fn is_here(self) -> bool {
        self == Process::this()
    }
}

/// Has each child of a fork call `run` before its own code runs, on its only thread: it may neither wait for a lock nor allocate.
/// There is one slot for each caller.
pub(crate) fn in_child(run: fn()) {
    count_forks();
    let is_its = |place: &OnceLock<fn()>| std::ptr::fn_addr_eq(*place.get_or_init(|| run), run);
    let is_there = IN_CHILD.iter().any(is_its);
    debug_assert!(is_there, "no place is left");
}

/// What a thread does before a fork, and after it in the parent.
static AROUND: OnceLock<[fn(); 2]> = OnceLock::new();

/// Has each thread that forks call `before` before the fork, and `in_parent` after it. There is one slot.
pub(crate) fn around_forks(before: fn(), in_parent: fn()) {
    AROUND.get_or_init(|| [before, in_parent]);
    count_forks();
}

/// Registers [`after_fork`] for each child, and the calls around forks.
fn count_forks() {
    #[cfg(all(unix, not(miri)))]
    {
        type Handler = Option<extern "C" fn()>;
        unsafe extern "C" {
            fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> libc::c_int;
        }
        // Registered before the flag says so: two threads may both register, which does no harm.
        if !COUNTED.load(Ordering::SeqCst) {
            // SAFETY: a plain function lives as long as the program. If it is refused, a child counts as its parent.
            unsafe { pthread_atfork(Some(before_fork), Some(in_parent), Some(after_fork)) };
            COUNTED.store(true, Ordering::SeqCst);
        }
    }
}

#[cfg_attr(any(not(unix), miri), expect(dead_code, reason = "there are no forks"))]
extern "C" fn before_fork() {
    AROUND.get().into_iter().for_each(|[before, _]| before());
}

#[cfg_attr(any(not(unix), miri), expect(dead_code, reason = "there are no forks"))]
extern "C" fn in_parent() {
    AROUND.get().into_iter().for_each(|[_, in_parent]| in_parent());
}

#[cfg_attr(any(not(unix), miri), expect(dead_code, reason = "there are no forks"))]
extern "C" fn after_fork() {
    IN_CHILD.iter().filter_map(OnceLock::get).for_each(|run| run());
    // ORDERING: Relaxed, as above.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A value that each process has of its own. Values are never dropped: a thread may use one at the end of the process.
pub struct PerProcess<T: 'static> {
    current: AtomicPtr<OfProcess<T>>,
    new: fn() -> T,
}

struct OfProcess<T> {
    process: Process,
    value: T,
}

impl<T: Sync> PerProcess<T> {
    /// Values made by `new`.
    pub const fn new(new: fn() -> T) -> Self {
        PerProcess { current: AtomicPtr::new(std::ptr::null_mut()), new }
    }

    /// This process's value.
    #[inline]
    pub fn get(&self) -> &'static T {
        self.made().unwrap_or_else(|| self.begin())
    }

    /// This process's value, if it has one.
    #[inline]
    pub fn made(&self) -> Option<&'static T> {
        // ORDERING: Acquire, pairs with the store in `begin`: the value is seen as it was made.
        let current = self.current.load(Ordering::Acquire);
        // SAFETY: null, or a box that was made into a pointer below, and is never freed.
        let found = unsafe { current.as_ref() };
        found.filter(|found| found.process == Process::this()).map(|found| &found.value)
    }

    /// Makes this process's value, unless another thread does.
    #[cold]
    fn begin(&self) -> &'static T {
        // Before the first value: a child of a process without any has nothing to leave.
        count_forks();
        let fresh = Box::new(OfProcess { process: Process::this(), value: (self.new)() });
        let fresh = Box::into_raw(fresh);
        // ORDERING: Relaxed: it is only compared.
        let mut before = self.current.load(Ordering::Relaxed);
        loop {
            if let Some(found) = self.made() {
                // Another thread was first.
                // SAFETY: made above, and never published.
                drop(unsafe { Box::from_raw(fresh) });
                return found;
            }
            // ORDERING: Release, pairs with the load in `made`.
            let stored =
                self.current.compare_exchange(before, fresh, Ordering::Release, Ordering::Relaxed);
            match stored {
                // SAFETY: as in `made`.
                Ok(_) => return unsafe { &(*fresh).value },
                Err(newer) => before = newer,
            }
        }
    }
}
