//! How much of its stack a thread has left.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::fs;
use std::ops::Range;

use rustix::process::{Resource, getrlimit};

/// What is assumed to be left where the system does not say it.
const UNKNOWN: usize = 32 << 10;
/// How far the stack of the first thread grows, where it has no limit.
const FIRST: u64 = 8 << 20;

thread_local! {
    /// Where the stack lies that was last asked about: a thread may switch stacks.
    static STACK: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// How many bytes are below the caller's frame.
pub(super) fn left() -> usize {
    let here = here();
    let (low, high) = STACK.get();
    if (low..high).contains(&here) {
        return here - low;
    }
    let stack = around(here).unwrap_or(here - UNKNOWN..here + 1);
    STACK.set((stack.start, stack.end));
    here - stack.start
}

/// An address in the frame of the caller.
#[inline(never)]
fn here() -> usize {
    let here = 0u8;
    std::hint::black_box(&raw const here).addr()
}

/// The mapping around an address; for the stack of the first thread, as far as it grows.
fn around(here: usize) -> Option<Range<usize>> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (low, rest) = line.split_once('-')?;
        let (high, rest) = rest.split_once(' ')?;
        let [low, high] = [low, high].map(|number| usize::from_str_radix(number, 16));
        let (low, high) = (low.ok()?, high.ok()?);
        if !(low..high).contains(&here) {
            return None;
        }
        let grows = getrlimit(Resource::Stack).current.unwrap_or(FIRST).min(FIRST);
        let low = if rest.ends_with("[stack]") {
            low.min(high.saturating_sub(grows as usize))
        } else {
            low
        };
        Some(low..high)
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_thread_knows_its_stack() {
        let left = |bytes| {
            let thread = std::thread::Builder::new().stack_size(bytes);
            thread.spawn(super::left).unwrap().join().unwrap()
        };
        for bytes in [64 << 10, 1 << 20] {
            let left = left(bytes);
            // The C library may reuse the stack of a thread that has ended, of up to four times the size.
            assert!(left > bytes / 2 && left < 5 * bytes, "{left} of {bytes}");
        }
    }
}
