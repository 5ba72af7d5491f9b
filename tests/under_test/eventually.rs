//! Waits for what happens on its own, at most [`SOON`](crate::SOON).

use std::time::Instant;

use crate::SOON;

pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within {SOON:?}");
        std::thread::yield_now();
    }
}
