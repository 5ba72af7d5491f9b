//! A closure that a stream calls when it gets there.
//!
//! The closure and its result live in a shared cell: one share goes through the driver, one is lent
//! to the stream until the ticket is complete, one is the future's. So a result that nobody awaits
//! is dropped by the reaper and not on the driver's thread, and a callback that never runs (the
//! device faulted, the driver refused it) leaks a cell and nothing worse.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::HostCallback;
use crate::contain;
use crate::thread_role::{self, Role};

pub(crate) struct HostFn<F, R> {
    cell: Arc<Cell<F, R>>,
}

struct Cell<F, R> {
    function: Mutex<Option<F>>,
    result: Mutex<Option<std::thread::Result<R>>>,
}

impl<F: FnOnce() -> R + Send + 'static, R: Send + 'static> HostFn<F, R> {
    pub(crate) fn new(function: F) -> Self {
        let cell = Cell { function: Mutex::new(Some(function)), result: Mutex::new(None) };
        HostFn { cell: Arc::new(cell) }
    }

    /// Another share of the cell, to be kept.
    pub(crate) fn share(&self) -> impl Send + 'static {
        HostFn { cell: self.cell.clone() }
    }

    /// The function that the driver calls with what [`lend`](Self::lend) returned.
    pub(crate) fn callback(&self) -> HostCallback {
        call::<F, R>
    }

    /// A share for the driver.
    pub(crate) fn lend(&self) -> *mut c_void {
        Arc::into_raw(self.cell.clone()).cast_mut().cast()
    }

    /// After the driver refused what [`lend`](Self::lend) made: drops the function, which will not
    /// run. The cell is leaked: the driver may report an earlier failure and call all the same.
    pub(crate) fn refused(&self) {
        let function = self.cell.function.lock().take();
        drop(function);
    }

    /// The result, after the stream was there. Goes on with the function's panic.
    pub(crate) fn result(&self) -> R {
        match self.cell.result.lock().take() {
            Some(Ok(value)) => value,
            Some(Err(panic)) => resume_unwind(panic),
            None => unreachable!("the ticket is complete, so the function ran"),
        }
    }
}

/// The driver's side. Does not unwind and makes no driver call.
unsafe extern "C" fn call<F: FnOnce() -> R, R>(data: *mut c_void) {
    // SAFETY: `lend` made this share for this very type, and the driver calls at most once.
    let cell = unsafe { Arc::from_raw(data.cast_const().cast::<Cell<F, R>>()) };
    let _role = thread_role::enter(Role::HostFn);
    let function = cell.function.lock().take();
    if let Some(function) = function {
        let result = catch_unwind(AssertUnwindSafe(function));
        if result.is_err() {
            contain::log(|| {
                tracing::error!("a host function panicked; its future goes on with the panic");
            });
        }
        *cell.result.lock() = Some(result);
    }
}
