//! Work that a device moves to its own two threads, and the only way to reach them: driver calls that may block (errands), and drops of
//! users' values (the reaper).
//!
//! If the system refuses a thread, the work is kept and the poller is called:
//!
//! | kept | the poller |
//! |---|---|
//! | errands | asks for the thread again; without one it runs them itself, one per round |
//! | users' values | asks for the thread again |
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{DeviceStream, Engine};
use crate::backend::Backend;
use crate::runtime::attention::Attention;
use crate::runtime::progress::DeviceState;
use crate::thread::exit::ExitGuard;
use crate::thread::process::Process;
use crate::thread::reaper::Reaper;
use crate::thread::role::Role;
use crate::thread::worker::{Task, Unwanted, package};
use crate::thread::{exit, role, worker};

/// The threads, and what is on its way to them.
pub(crate) struct Background {
    backend: Arc<dyn Backend>,
    state: Arc<DeviceState>,
    attention: Arc<Attention>,
    /// The device runs only when it is stepped, as far as possible without threads of its own.
    stepped: bool,
    reaper: Reaper,
    errands: Reaper,
    /// User values that the reaper has not dropped.
    to_drop: Arc<AtomicU64>,
    /// Counts values that were retired, or sent to be dropped.
    retirements: AtomicU64,
}

impl Background {
    pub(super) fn new(
        backend: &Arc<dyn Backend>,
        state: &Arc<DeviceState>,
        attention: &Arc<Attention>,
        stepped: bool,
    ) -> Self {
        Background {
            backend: backend.clone(),
            state: state.clone(),
            attention: attention.clone(),
            stepped,
            reaper: Reaper::new("gpu-await-reaper"),
            errands: Reaper::new("gpu-await-errand"),
            to_drop: Arc::default(),
            retirements: AtomicU64::new(0),
        }
    }

    /// Destroys a driver object on the errands thread: the driver may wait for full queues, and the caller
    /// is a drop or the poller.
    pub(crate) fn act(&self, act: impl FnOnce() + Send + 'static) {
        if self.stepped && role::may_call_driver() {
            act();
        } else {
            self.errands.send(act);
            self.call_for_left();
        }
    }

    /// Drops a stream on the errands thread: the caller may hold locks.
    pub(crate) fn drop_stream(&self, stream: impl Send + 'static) {
        self.errands.send(move || drop(stream));
        self.call_for_left();
    }

    /// Starts the thread that drops users' values: a process that has no thread left when the first value is dropped would
    /// have to keep it.
    pub(crate) fn start_reaper(&self) {
        self.reaper.start();
    }

    /// How many tasks wait for a thread that the system refused.
    pub(crate) fn left_without_a_thread(&self) -> u64 {
        self.errands.left() + self.reaper.left()
    }

    fn call_for_left(&self) {
        if self.left_without_a_thread() > 0 {
            if self.state.lost().is_some() {
                // There is no poller any more.
                self.send_left_values();
            }
            self.attention.call();
        }
    }

    /// Asks for the threads again. Without one it runs an errand here, on the poller: destroying a stream may
    /// be what frees a thread, and a delayed poller is better than waiting for ever. Users' values are kept.
    pub(crate) fn send_left(&self) {
        self.send_left_values();
        if let Some(errand) = self.errands.send_left() {
            worker::run(errand);
        }
    }

    fn send_left_values(&self) {
        if let Some(value) = self.reaper.send_left() {
            self.reaper.keep([value]);
        }
    }

    /// Drops a user's value here, or on the reaper's thread where this one must not run users' code.
    pub(crate) fn let_go(&self, value: impl Send + 'static) {
        if role::current() == Role::Free {
            drop(value);
        } else {
            self.drop_later(Box::new(value));
        }
    }

    /// Drops a user's value on the reaper's thread.
    pub(crate) fn drop_later(&self, value: Box<dyn Any + Send>) {
        self.reap(move || drop(value));
    }

    /// Drops a value on the reaper's thread, no sooner than the poller's next look: a call that its drop needed
    /// was refused.
    pub(crate) fn drop_again(&self, value: Box<dyn Any + Send>) {
        self.reaper.keep([self.on_reaper(self.counted(move || drop(value)))]);
        self.call_for_left();
    }

    /// After the loss: drops a value that the device's work used, once none of that can run any more. After `main` that
    /// work goes on, and the value is leaked.
    pub(crate) fn bury(&self, value: Box<dyn Any + Send>) {
        if exit::begun() {
            return std::mem::forget(value);
        }
        if let Some(value) = self.backend.bury(value) {
            self.drop_later(value);
        }
    }

    /// Waits until the values sent before are dropped. Returns at once on a reaper's thread, where such a drop would wait for itself,
    /// and in the child of a fork.
    pub(crate) async fn reaped(&self) {
        if self.reaper.has_begun() && !self.reaper.is_here() {
            let (behind, reaped) = package(Process::remembered(), Unwanted::IsDone, || ());
            self.reaper.send(self.on_reaper(behind));
            self.call_for_left();
            reaped.await.ok();
        }
    }

    /// Runs a task on the reaper's thread, behind the drops sent before, with the device's context current: the values
    /// dropped there may be another library's.
    pub(super) fn reap(&self, task: impl FnOnce() + Send + 'static) {
        self.reaper.send(self.on_reaper(self.counted(task)));
        // After sending: a thread that reads the new number waits for the task.
        self.count_retirement();
        self.call_for_left();
    }

    /// Counts a value that was retired and is in its place, or that was sent to be dropped.
    pub(super) fn count_retirement(&self) {
        // ORDERING: Release, pairs with `retirements`.
        self.retirements.fetch_add(1, Ordering::Release);
    }

    /// How many values were retired, or sent to be dropped.
    pub(crate) fn retirements(&self) -> u64 {
        // ORDERING: Acquire: what was counted is in its place.
        self.retirements.load(Ordering::Acquire)
    }

    /// How many user values the reaper has not dropped.
    pub(crate) fn values_to_drop(&self) -> u64 {
        // ORDERING: Relaxed: a statistic.
        self.to_drop.load(Ordering::Relaxed)
    }

    /// A task that is counted until it is done.
    fn counted(&self, task: impl FnOnce() + Send + 'static) -> impl FnOnce() + Send + 'static {
        let counted = ToDrop::one(&self.to_drop);
        move || {
            task();
            drop(counted);
        }
    }

    /// A task for the reaper's thread.
    fn on_reaper(&self, task: impl FnOnce() + Send + 'static) -> Task {
        let (backend, state) = (self.backend.clone(), self.state.clone());
        Box::new(move || {
            // A lost device's driver is left alone.
            if state.lost().is_none()
                && let Some(_in_driver) = ExitGuard::in_driver()
            {
                backend.ready_thread();
            }
            task();
        })
    }
}

impl<S: DeviceStream> Engine<S> {
    /// Makes a driver call that may block for a long time, on a thread that nothing waits for. Skipped once the
    /// device is lost or the process ends.
    pub(crate) fn errand(self: &Arc<Self>, errand: impl FnOnce(&Arc<Self>) + Send + 'static) {
        if self.options.stepped {
            return errand(self);
        }
        let engine = Arc::downgrade(self);
        self.background.errands.enqueue(Box::new(move || {
            if let Some(engine) = engine.upgrade()
                && let Some(_in_driver) = engine.in_driver()
            {
                errand(&engine);
            }
        }));
        self.background.call_for_left();
    }
}

/// A user value on its way to the reaper's thread, counted until it is dropped.
struct ToDrop(Arc<AtomicU64>);

impl ToDrop {
    fn one(all: &Arc<AtomicU64>) -> Self {
        // ORDERING: Relaxed: a statistic.
        all.fetch_add(1, Ordering::Relaxed);
        ToDrop(all.clone())
    }
}

impl Drop for ToDrop {
    fn drop(&mut self) {
        // ORDERING: Relaxed: a statistic.
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
