//! The end of the process: this crate makes no driver calls after `main` has returned.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use gpu_await_protocol::sync::Mutex;

use crate::error::{ErrorDetail, Result};
use crate::thread::process::PerProcess;

static STATE: PerProcess<ExitState> = PerProcess::new(ExitState::default);

/// What is under way in a process, and how far its end has come.
#[derive(Default)]
struct ExitState {
    /// No device is opened any more.
    ending: AtomicBool,
    /// No driver call is made any more.
    begun: AtomicBool,
    /// Driver calls under way on threads of this crate (last acts and errands), and ends of its threads.
    in_driver: AtomicU32,
    /// Devices whose last handle is gone and that still hold driver resources; and values to be dropped on
    /// another thread, which may be such handles.
    leaving: AtomicU32,
    handler: Mutex<Option<fn()>>,
    registered: Mutex<u32>,
}

/// Something that the end of the process waits for, but not for ever.
pub(crate) struct ExitGuard(&'static AtomicU32);

impl ExitGuard {
    /// For driver calls on a thread of this crate; `None` if the process is ending.
    pub(crate) fn in_driver() -> Option<Self> {
        let guard = Self::counted(&STATE.get().in_driver);
        (!begun()).then_some(guard)
    }

    /// For threads that were in the driver, and are still ending when the process is.
    pub(super) fn ending() -> Self {
        Self::counted(&STATE.get().in_driver)
    }

    /// For a device that is closing: it is waited for before anything is stopped.
    pub(crate) fn leaving() -> Self {
        Self::counted(&STATE.get().leaving)
    }

    fn counted(count: &'static AtomicU32) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        ExitGuard(count)
    }
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether a thread of this crate is in the driver, or is ending.
pub(crate) fn is_in_driver() -> bool {
    STATE.get().in_driver.load(Ordering::SeqCst) > 0
}

/// Whether any device is closing.
pub(crate) fn is_leaving() -> bool {
    STATE.get().leaving.load(Ordering::SeqCst) > 0
}

/// Refuses to start anything new from the moment that the end of the process waits for existing devices.
pub(crate) fn check_running(what: &'static str) -> Result<()> {
    if STATE.get().ending.load(Ordering::SeqCst) {
        return Err(ErrorDetail::ProcessEnding { what }.into());
    }
    Ok(())
}

/// Whether the process is ending.
pub(crate) fn begun() -> bool {
    STATE.get().begun.load(Ordering::SeqCst)
}

/// Marks the process as ending; called by the exit handler, which may first let others finish.
pub(crate) fn begin() {
    STATE.get().begun.store(true, Ordering::SeqCst);
}

/// Registers `handler` with the C runtime, again each time the set of loaded libraries may have grown: handlers run in reverse order, and ours
/// must run before those of a driver that was loaded meanwhile. It runs once.
pub(crate) fn register(handler: fn()) {
    let state = STATE.get();
    *state.handler.lock() = Some(handler);
    // A host device, then a CUDA device: after that the driver's handlers are all below ours.
    register_within(8);
}

/// Registers the handler once more, after a library that was just loaded, or made its first object, registered its own: threads of this crate
/// may be inside that library until the handler has run.
pub fn register_again() {
    register_within(32);
}

fn register_within(most: u32) {
    extern "C" fn call() {
        // The child of a fork inherits what its parent registered.
        let state = STATE.get();
        if !state.ending.swap(true, Ordering::SeqCst) {
            let handler = state.handler.lock().take();
            if let Some(handler) = handler {
                handler();
            }
        }
        begin();
    }

    let mut registered = STATE.get().registered.lock();
    if *registered < most {
        *registered += 1;
        crate::system::at_exit(call);
    }
}
