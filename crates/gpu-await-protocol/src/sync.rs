//! The atomics and the locks of these modules, and of everything in `gpu-await` above its backends.
//!
//! `tests/loom.rs` compiles the modules against loom's types by putting a module of the same name in this one's place.
//!
//! In debug builds with the feature `test-util` a thread counts the locks that it holds. Otherwise a lock is a plain [`lock`](super::lock).
#![forbid(unsafe_code)]

#[cfg(not(all(debug_assertions, feature = "test-util")))]
pub use super::lock::{Mutex, MutexGuard};
#[cfg(all(debug_assertions, feature = "test-util"))]
pub use counting::{Mutex, MutexGuard, held};
pub use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};

/// A lock without `try_lock`.
pub use self::Mutex as Plain;

#[cfg(all(debug_assertions, feature = "test-util"))]
mod counting {
    use std::cell::Cell;
    use std::fmt;
    use std::ops::{Deref, DerefMut};

    use super::super::lock;

    thread_local! {
        static HELD: Cell<usize> = const { Cell::new(0) };
    }

    /// How many locks the current thread holds.
    pub fn held() -> usize {
        HELD.try_with(Cell::get).unwrap_or(0)
    }

    /// A lock that counts.
    #[derive(Default)]
    pub struct Mutex<T: ?Sized>(lock::Mutex<T>);

    /// A held lock, counted while it lives.
    pub struct MutexGuard<'m, T: ?Sized>(lock::MutexGuard<'m, T>);

    impl<'m, T: ?Sized> MutexGuard<'m, T> {
        fn counted(guard: lock::MutexGuard<'m, T>) -> Self {
            // A thread that ends counts nothing any more.
            let _ = HELD.try_with(|held| held.set(held.get() + 1));
            MutexGuard(guard)
        }
    }

    impl<T: ?Sized> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            let _ = HELD.try_with(|held| held.set(held.get() - 1));
        }
    }

    impl<T> Mutex<T> {
        /// A free lock.
        pub const fn new(value: T) -> Self {
            Mutex(lock::Mutex::new(value))
        }
    }

    impl<T: ?Sized> Mutex<T> {
        /// Blocks until it is free.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard::counted(self.0.lock())
        }

        /// Does not block.
        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().map(MutexGuard::counted)
        }

        /// What it protects; nothing else can have it.
        pub fn get_mut(&mut self) -> &mut T {
            self.0.get_mut()
        }
    }

    impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.fmt(f)
        }
    }

    impl<T: ?Sized> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.0
        }
    }

    impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.0
        }
    }
}
