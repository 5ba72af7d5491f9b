//! The end of the process: devices count as lost, and pollers stop, before the driver is torn down.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::sync::Mutex;

use super::attention::Attention;
use crate::error::Result;
use crate::thread::{exit, native};

/// Process state: the devices that must end, and their pollers, before the
/// driver is torn down.
static DEVICES: Mutex<Vec<Weak<Attention>>> = Mutex::new(Vec::new());

/// The process that opened a device last. The child of a fork that opened none has no thread to wait for.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// How long the end of the process waits for devices that are closing, and then for pollers.
const PATIENCE: Duration = Duration::from_millis(200);

/// How long it waits for our threads that are in the driver, or are ending. If a driver, or a tool that traces it, is torn
/// down meanwhile, the process ends with a signal; but a call may wait for a kernel that never ends.
const DRIVER: Duration = Duration::from_secs(10);

/// Registers a device to be ended with the process.
///
/// # Errors
/// The process is ending: the list of devices may have been taken already.
pub(super) fn watch(attention: &Arc<Attention>) -> Result<()> {
    exit::register(end_devices);
    let mut devices = DEVICES.lock();
    exit::check_running("opening a device")?;
    PROCESS.store(std::process::id(), Ordering::SeqCst);
    devices.retain(|device| device.strong_count() > 0);
    devices.push(Arc::downgrade(attention));
    Ok(())
}

/// Runs when `main` returned or `exit` was called, before the driver's own handlers.
fn end_devices() {
    if PROCESS.load(Ordering::SeqCst) != std::process::id() {
        return exit::begin();
    }
    // Never held for long, except in the child of a fork, where it may be locked for ever.
    let devices: Vec<_> = match DEVICES.try_lock_for(PATIENCE) {
        Some(devices) => devices.iter().filter_map(Weak::upgrade).collect(),
        None => Vec::new(),
    };
    // A device that was just dropped is released with the help of its poller, which may keep a stream whose
    // owner holds the device last.
    let limit = Instant::now() + PATIENCE;
    let looks: Vec<_> = devices.iter().map(|device| device.looks.load(Ordering::SeqCst)).collect();
    devices.iter().for_each(|device| device.hurry());
    for (device, looks) in devices.iter().zip(looks) {
        wait_until(limit, || device.has_let_go(looks));
    }
    wait_until(limit, || !exit::is_leaving());
    exit::begin();
    devices.iter().for_each(|device| device.end_device());
    // A poller is between driver calls in microseconds; one that is held by the driver (a
    // full queue never holds it) is not waited for.
    let limit = Instant::now() + PATIENCE;
    for device in devices {
        wait_until(limit, || device.has_ended());
    }
    native::count_ending(PATIENCE);
    wait_until(Instant::now() + DRIVER, || !exit::is_in_driver());
}

fn wait_until(limit: Instant, holds: impl Fn() -> bool) {
    while !holds() && Instant::now() < limit {
        std::thread::sleep(Duration::from_micros(50));
    }
}
