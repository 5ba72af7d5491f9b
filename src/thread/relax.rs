//! How a thread that looks again and again lets others run in between.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A yield of at most that long had its core for itself.
const CHEAP: Duration = Duration::from_micros(50);
/// How long it sleeps otherwise: who sleeps gets its core back at once.
const NAP: Duration = Duration::from_micros(20);

/// Yields, until a yield cost what it costs on a busy core: the slices of its neighbours, some milliseconds. Then it sleeps.
#[derive(Default)]
pub(crate) struct Relax {
    are_costly: bool,
}

impl Relax {
    pub(crate) fn pause(&mut self) {
        if self.are_costly {
            std::thread::sleep(NAP);
            return;
        }
        let start = Instant::now();
        std::thread::yield_now();
        self.are_costly = start.elapsed() > CHEAP;
    }
}
