//! How a thread that looks repeatedly lets others run in between.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A yield that takes at most this long had its core to itself.
const CHEAP: Duration = Duration::from_micros(50);
/// How long it sleeps otherwise: a sleeper gets its core back at once.
const NAP: Duration = Duration::from_micros(20);

/// Yields until a yield costs what it costs on a busy core: its neighbours' slices, some milliseconds. Then it sleeps.
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
