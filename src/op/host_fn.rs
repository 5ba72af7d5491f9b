//! A closure that is called when its stream reaches it.
//!
//! The closure and its result live in a shared cell: one share goes through the driver, one is lent to the stream until the ticket is
//! complete, one belongs to the future.
//!
//! | value | is dropped |
//! |---|---|
//! | the closure's captures | by the closure, when it returns: on the driver's thread, in the role `HostFn` |
//! | a closure that never ran | by its submitter if the driver refused it; by the reaper after a loss |
//! | the result, or the panic's payload, if never taken | by the future's drop, or the reaper |
//!
//! A callback that never runs (the device faulted) leaks its cell, which is empty by then. Only one thread can take the closure out of
//! the cell: if the driver calls after all, there is nothing left to run.
//!
//! # Invariants
//! 1. No value in the cell is dropped on the driver's thread (`what_a_host_function_leaves_is_dropped_off_the_drivers_thread`).

use std::any::Any;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::Mutex;

use crate::backend::HostCallback;
use crate::runtime::Engine;
use crate::runtime::stream_state::Callback;
use crate::thread::contain;
use crate::thread::native;
use crate::thread::role;
use crate::thread::role::Role;

pub(crate) struct HostFn<F: Send + 'static, R: Send + 'static> {
    /// `None` only inside `drop`.
    cell: Option<Arc<Cell<F, R>>>,
    /// For access to the reaper. Weak, as the share may be leaked.
    engine: Weak<Engine>,
}

struct Cell<F, R> {
    function: Mutex<Option<F>>,
    result: Mutex<Option<std::thread::Result<R>>>,
}

impl<F: FnOnce() -> R + Send + 'static, R: Send + 'static> HostFn<F, R> {
    pub(crate) fn new(engine: &Arc<Engine>, function: F) -> Self {
        let cell = Cell { function: Mutex::new(Some(function)), result: Mutex::new(None) };
        HostFn { cell: Some(Arc::new(cell)), engine: Arc::downgrade(engine) }
    }

    fn cell(&self) -> &Arc<Cell<F, R>> {
        self.cell.as_ref().unwrap_or_else(|| unreachable!("taken by the drop only"))
    }

    /// Another share of the cell, for the stream to keep.
    pub(crate) fn share(&self) -> impl Callback {
        HostFn { cell: self.cell.clone(), engine: self.engine.clone() }
    }

    /// The function that the driver calls with the pointer that [`lend`](Self::lend) returned.
    pub(crate) fn callback(&self) -> HostCallback {
        call::<F, R>
    }

    /// A share for the driver.
    pub(crate) fn lend(&self) -> *mut c_void {
        Arc::into_raw(self.cell().clone()).cast_mut().cast()
    }

    /// Called after the driver refused the pointer of [`lend`](Self::lend): drops the function, which will
    /// not run. The cell is leaked: the driver may have reported an earlier failure and still call.
    pub(crate) fn refused(&self) {
        let function = self.cell().function.lock().take();
        self.let_go(function);
    }

    /// The result, once the function has been called. Resumes the function's panic.
    pub(crate) fn result(&self) -> R {
        let result = self.cell().result.lock().take();
        match result {
            Some(Ok(value)) => value,
            Some(Err(panic)) => resume_unwind(panic),
            None => unreachable!("the ticket is complete, so the function ran"),
        }
    }
}

impl<F: Send + 'static, R: Send + 'static> Callback for HostFn<F, R> {
    fn give_up(&self) -> Option<Box<dyn Any + Send>> {
        let function = self.cell.as_ref()?.function.lock().take()?;
        Some(Box::new(function))
    }
}

impl<F: Send + 'static, R: Send + 'static> HostFn<F, R> {
    /// Drops a user's value off the driver's thread.
    fn let_go(&self, value: impl Send + 'static) {
        match self.engine.upgrade() {
            Some(engine) => engine.background.let_go(value),
            None if role::current() == Role::Free => contain::let_go(value),
            // The device is gone, and its reaper with it.
            None => {
                let value = ManuallyDrop::new(value);
                let reap = move || drop(ManuallyDrop::into_inner(value));
                // If there is no thread, the value leaks, which is the lesser evil.
                native::spawn("gpu-await-reaper", Box::new(reap)).ok();
            }
        }
    }
}

impl<F: Send + 'static, R: Send + 'static> Drop for HostFn<F, R> {
    fn drop(&mut self) {
        // The last share holds the values that were never taken, and may be dropped inside this or another
        // host function.
        if let Some(cell) = self.cell.take().and_then(Arc::into_inner) {
            self.let_go(cell);
        }
    }
}

/// The driver's callback. Does not unwind and makes no driver call.
unsafe extern "C" fn call<F: FnOnce() -> R + Send + 'static, R: Send + 'static>(data: *mut c_void) {
    let _role = role::enter(Role::HostFn);
    // SAFETY: `lend` made this share for this very type, and the driver calls at most once.
    let cell = unsafe { Arc::from_raw(data.cast_const().cast::<Cell<F, R>>()) };
    // One share is lent until this returns. The loss of the device drops that one; then this may be the last
    // share, which moves the remaining values to a new thread.
    let share = HostFn { cell: Some(cell), engine: Weak::new() };
    let function = share.cell().function.lock().take();
    if let Some(function) = function {
        let result = catch_unwind(AssertUnwindSafe(function));
        // Replaces `None`, so nothing is dropped under the lock.
        *share.cell().result.lock() = Some(result);
    }
}
