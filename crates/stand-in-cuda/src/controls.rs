//! What a test may ask and change: the `standin_*` functions.

use std::ffi::{c_char, c_int};
use std::sync::atomic::Ordering;

use crate::SOURCES;
use crate::abi::{Code, Out, Text};
use crate::device_calls::SLOW_RELEASE_MS;
use crate::engine;
use crate::entry_points::is_entry_point;
use crate::journal::{Injected, thread_number};
use crate::memory::MAX_DEVICES;
use crate::stream::Stream;
use crate::world::{LEAVING, SLOW_THREAD_END_MS, lock};

/// Forgets the calls written down so far.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_log_clear() {
    lock().journal.clear();
}

/// Counts the calls since the last clear.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_log_count() -> u64 {
    lock().journal.count()
}

/// Writes the calls since the last clear, one a line, cut to `capacity` with a NUL; returns the
/// bytes of the whole text.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_log_copy(buffer: Out<c_char>, capacity: usize) -> usize {
    let text = lock().journal.text();
    buffer.put_text(&text, capacity);
    text.len()
}

/// Writes where kernels and fills run that were put on streams since the last clear, as
/// `standin_log_copy` does: from the first green context on.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_places_copy(buffer: Out<c_char>, capacity: usize) -> usize {
    let text = lock().journal.places().join("\n");
    buffer.put_text(&text, capacity);
    text.len()
}

/// Forks while no other thread is in the stand-in, so that the child finds its lock open.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_fork() -> c_int {
    let _world = lock();
    // SAFETY: the caller says what its other threads may be in.
    unsafe { libc::fork() }
}

/// The number that the journal gives the calling thread.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_thread() -> u64 {
    thread_number()
}

/// Stops the start of any queued command, or (0) lets them go on. A command already running goes
/// on.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_hold(on: c_int) {
    let mut world = lock();
    world.held = on != 0;
    world.ring();
}

/// Has each release of a primary context take so long.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_slow_release(ms: u64) {
    SLOW_RELEASE_MS.store(ms, Ordering::SeqCst);
}

/// Has each thread that called the driver take so long to end.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_slow_thread_end(ms: u64) {
    SLOW_THREAD_END_MS.store(ms, Ordering::SeqCst);
}

/// How many of either have not returned.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_leaving() -> u32 {
    LEAVING.load(Ordering::SeqCst)
}

/// Runs event records, writes of words and the kernel `empty` within the call, where their stream is
/// idle; (0) later, as everything else.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_instant(on: c_int) {
    lock().instant = on != 0;
}

/// Makes the `nth` call of `name` from now return `code`, before or after it does its work. -1: no
/// such function.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_fail(
    name: Text,
    nth: u64,
    code: Code,
    after_effect: c_int,
) -> c_int {
    let Ok(name) = name.read() else { return -1 };
    if !is_entry_point(&name) {
        return -1;
    }
    lock().journal.inject(name, nth, Injected { code, after_effect: after_effect != 0 });
    0
}

/// Forgets the failures that did not strike yet, and counts them.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_forgive() -> u64 {
    lock().journal.forgive() as u64
}

/// Loses a device now, as a fault would: queued commands never run, and what talks to it returns
/// `code`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_lose(device: c_int, code: Code) -> c_int {
    match usize::try_from(device) {
        Ok(device) if device < MAX_DEVICES => {
            engine::lose(device, code);
            0
        }
        _ => -1,
    }
}

/// Writes a sentence about each misuse, as `standin_log_copy` does.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_misuse_copy(buffer: Out<c_char>, capacity: usize) -> usize {
    let text = lock().journal.misuses().join("\n");
    buffer.put_text(&text, capacity);
    text.len()
}

/// Counts what lives: "stream", "event", "memory", "registered", "module", "graph", "pool" (of those made),
/// "green" (contexts), "shared" (handles and reserved ranges),
/// "context" (retains),
/// "command" (not complete, on devices that are not lost). -1: no such kind.
///
/// Memory lives until its free is reached in stream order, the others but commands until the call
/// that ends them.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_live(kind: Text) -> i64 {
    let Ok(kind) = kind.read() else { return -1 };
    let world = lock();
    let count = match kind.as_str() {
        // The default streams have number 0 and no end.
        "stream" => {
            world.streams.values().filter(|stream| !stream.retired && stream.number > 0).count()
        }
        "event" => world.events.len(),
        "memory" => world.memory.live_allocations(),
        "registered" => world.memory.live_registrations(),
        "module" => world.modules.len(),
        "graph" => world.graphs.len() + world.execs.len(),
        "pool" => world.pools_made(),
        "shared" => world.shared.live(),
        "green" => world.greens.values().filter(|green| !green.destroyed).count(),
        "command" => {
            let devices = &world.devices;
            let run = |stream: &&Stream| devices[stream.device].lost.is_none();
            return world.streams.values().filter(run).map(|stream| stream.pending() as i64).sum();
        }
        "context" => return world.devices.iter().map(|device| i64::from(device.retained)).sum(),
        _ => return -1,
    };
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Gives every device so many bytes; 4 GiB at first.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_set_memory(total_bytes: u64) {
    lock().memory.total_bytes = total_bytes;
}

/// Shows so many devices, up to 8; 1 at first. -1: too many, or negative.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_set_devices(count: c_int) -> c_int {
    match usize::try_from(count) {
        Ok(count) if count <= MAX_DEVICES => {
            lock().device_count = count;
            0
        }
        _ => -1,
    }
}

/// Changes a device attribute of every device.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_set_attribute(attribute: c_int, value: c_int) {
    lock().attributes.insert(attribute, value);
}

/// Changes an attribute of every kernel.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_set_function_attribute(attribute: c_int, value: c_int) {
    lock().function_attributes.insert(attribute, value);
}

/// Writes which sources the stand-in is made of, as `standin_log_copy` does.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn standin_sources(buffer: Out<c_char>, capacity: usize) -> usize {
    buffer.put_text(SOURCES, capacity);
    SOURCES.len()
}
