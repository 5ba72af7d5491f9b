//! The end of the process: devices count as lost, and pollers stop, before the driver is torn down.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::attention::Attention;
use crate::error::Result;
use crate::thread::process::{self, PerProcess};
use crate::thread::{exit, native};

/// The devices to end, with their pollers, before the driver is torn down. The child of a fork locks its parent's list, so this
/// lock must keep no table of waiting threads.
static DEVICES: PerProcess<Mutex<Vec<Weak<Attention>>>> = PerProcess::new(Mutex::default);

/// How long the end of the process waits for devices that are closing, and then for pollers.
const PATIENCE: Duration = Duration::from_millis(200);

/// How long it waits for this crate's threads that are in the driver, or are ending. Tearing down a driver, or a tool that traces
/// it, under them would crash the process; but a call may wait for a kernel that never ends.
const DRIVER: Duration = Duration::from_secs(10);

/// Registers a device to be ended with the process.
///
/// # Errors
/// The process is ending: the list of devices may have been taken already.
pub(super) fn watch(attention: &Arc<Attention>) -> Result<()> {
    exit::register(end_devices);
    process::in_child(leave_to_the_parent);
    let mut devices = DEVICES.get().lock().unwrap_or_else(PoisonError::into_inner);
    exit::check_running("opening a device")?;
    devices.retain(|device| device.strong_count() > 0);
    devices.push(Arc::downgrade(attention));
    Ok(())
}

/// Runs in the child of a fork, where neither a thread nor the end of the process looks at the parent's devices.
fn leave_to_the_parent() {
    // The fork may have interrupted the lock's holder. Waits for those devices then last for ever, as they would anyway.
    let Some(Ok(devices)) = DEVICES.made().map(Mutex::try_lock) else { return };
    devices.iter().filter_map(Weak::upgrade).for_each(|device| device.leave_to_the_parent());
}

/// Runs when `main` returned or `exit` was called, before the driver's own handlers.
fn end_devices() {
    let devices: Vec<_> = {
        let devices = DEVICES.get().lock().unwrap_or_else(PoisonError::into_inner);
        devices.iter().filter_map(Weak::upgrade).collect()
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
    // A poller leaves the driver within microseconds; one that the driver blocks (a full queue never does) is not waited for.
    let limit = Instant::now() + PATIENCE;
    for device in devices {
        wait_until(limit, || device.has_ended());
    }
    native::count_ending();
    wait_until(Instant::now() + DRIVER, || !exit::is_in_driver());
}

fn wait_until(limit: Instant, holds: impl Fn() -> bool) {
    while !holds() && Instant::now() < limit {
        std::thread::sleep(Duration::from_micros(50));
    }
}
