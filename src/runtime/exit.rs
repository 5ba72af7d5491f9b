//! The end of the process: pollers stop before the driver is torn down.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::attention::Attention;
use crate::error::Result;
use crate::thread::exit;

/// Process state, and the only one of this crate: the pollers that must stop before the driver
/// is torn down.
static POLLERS: Mutex<Vec<Weak<Attention>>> = Mutex::new(Vec::new());

/// How long the end of the process waits for devices that are closing, and then for pollers.
const PATIENCE: Duration = Duration::from_millis(200);

/// How long it waits for our threads that are in the driver. If a driver, or a tool that traces it, is torn down during a
/// call, the process ends with a signal; but the call may wait for a kernel that never ends.
const DRIVER: Duration = Duration::from_secs(10);

/// Registers a poller to be stopped at the end of the process.
///
/// # Errors
/// The process is ending: the list of pollers to stop may have been taken already.
pub(super) fn watch(attention: &Arc<Attention>) -> Result<()> {
    exit::register(stop_pollers);
    let mut pollers = POLLERS.lock();
    exit::check_running("opening a device")?;
    pollers.retain(|poller| poller.strong_count() > 0);
    pollers.push(Arc::downgrade(attention));
    Ok(())
}

/// Runs when `main` returned or `exit` was called, before the driver's own handlers.
fn stop_pollers() {
    // Never held for long, except in the child of a fork, where it may be locked for ever.
    let pollers: Vec<_> = match POLLERS.try_lock_for(PATIENCE) {
        Some(pollers) => pollers.iter().filter_map(Weak::upgrade).collect(),
        None => Vec::new(),
    };
    // A device that was just dropped is released with the help of its poller, which may keep a stream whose
    // owner holds the device last.
    let limit = Instant::now() + PATIENCE;
    let looks: Vec<_> = pollers.iter().map(|poller| poller.looks.load(Ordering::SeqCst)).collect();
    pollers.iter().for_each(|poller| poller.hurry());
    for (poller, looks) in pollers.iter().zip(looks) {
        wait_until(limit, || poller.has_let_go(looks));
    }
    wait_until(limit, || !exit::is_leaving());
    exit::begin();
    pollers.iter().for_each(|poller| poller.stop());
    // A poller is between driver calls in microseconds; one that is held by the driver (a
    // full queue never holds it) is not waited for.
    let limit = Instant::now() + PATIENCE;
    for poller in pollers {
        wait_until(limit, || poller.has_ended());
    }
    wait_until(Instant::now() + DRIVER, || !exit::is_in_driver());
}

fn wait_until(limit: Instant, holds: impl Fn() -> bool) {
    while !holds() && Instant::now() < limit {
        std::thread::sleep(Duration::from_micros(50));
    }
}
