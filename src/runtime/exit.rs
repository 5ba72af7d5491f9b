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

/// How long the end of the process waits for what leaves, and then for pollers.
const PATIENCE: Duration = Duration::from_millis(200);

/// How long for threads of ours that are in the driver. A driver, or a tool that traces it, that is torn down under a call ends the process with
/// a signal; but the call may wait for a kernel that never ends.
const DRIVER: Duration = Duration::from_secs(10);

/// From now on the end of the process stops this poller.
///
/// # Errors
/// The process is ending: what stops them may have its list already.
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
    // Never held for long; but in the child of a fork by nobody, for ever.
    let pollers: Vec<_> = match POLLERS.try_lock_for(PATIENCE) {
        Some(pollers) => pollers.iter().filter_map(Weak::upgrade).collect(),
        None => Vec::new(),
    };
    // What a device that was just dropped has goes with the help of its poller, which may keep a
    // stream whose owner is the last to have the device.
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
