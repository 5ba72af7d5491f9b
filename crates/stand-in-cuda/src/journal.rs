//! What was called, what was wrong, and what is to fail.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::Code;

/// Lines kept; calls beyond are counted and not kept.
const MAX_LINES: usize = 1 << 20;

/// The record of calls, the misuse seen, and the failures still to be injected.
pub(crate) struct Journal {
    lines: Vec<Line>,
    /// What ran where, since the last clear.
    places: Vec<String>,
    /// The sequence number of `lines[0]`.
    first: u64,
    count: u64,
    misuse: Vec<String>,
    failures: Vec<Failure>,
}

struct Line {
    text: String,
    result: Code,
}

struct Failure {
    name: String,
    /// Calls until it strikes; 1 is the next call.
    remaining: u64,
    injected: Injected,
}

/// A result that a test asked for.
#[derive(Clone, Copy)]
pub(crate) struct Injected {
    pub(crate) code: Code,
    /// Whether the call does its work first.
    pub(crate) after_effect: bool,
}

impl Journal {
    pub(crate) const fn new() -> Self {
        Journal {
            lines: Vec::new(),
            places: Vec::new(),
            first: 0,
            count: 0,
            misuse: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Writes a call down, and returns the line's sequence number for [`Journal::leave`].
    pub(crate) fn enter(&mut self, name: &'static str, arguments: &str) -> Option<u64> {
        CALL.set(name);
        self.count += 1;
        if self.lines.len() >= MAX_LINES {
            return None;
        }
        let space = if arguments.is_empty() { "" } else { " " };
        let relaxed = if capture_mode() == CAPTURE_MODE_RELAXED { " relaxed" } else { "" };
        self.lines.push(Line {
            text: format!("{name}{space}{arguments}{relaxed} thread={}", thread_number()),
            result: 0,
        });
        Some(self.first + self.lines.len() as u64 - 1)
    }

    /// Adds the result of a call that did not succeed, unless the journal was cleared meanwhile.
    pub(crate) fn leave(&mut self, sequence: u64, result: Code) {
        let index = sequence.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        if let Some(line) = index.and_then(|index| self.lines.get_mut(index)) {
            line.result = result;
        }
    }

    /// Counts down the failures waiting for a call of this name, and returns the one that strikes
    /// now.
    pub(crate) fn injected(&mut self, name: &str) -> Option<Injected> {
        let mut struck = None;
        self.failures.retain_mut(|failure| {
            if failure.name != name {
                return true;
            }
            failure.remaining -= 1;
            if failure.remaining == 0 {
                struck = Some(failure.injected);
            }
            failure.remaining > 0
        });
        struck
    }

    /// Makes the `nth` call of `name` from now fail; 0 and 1 both mean the next.
    pub(crate) fn inject(&mut self, name: String, nth: u64, injected: Injected) {
        self.failures.push(Failure { name, remaining: nth.max(1), injected });
    }

    /// Forgets the failures that did not strike yet, and counts them.
    pub(crate) fn forgive(&mut self) -> usize {
        std::mem::take(&mut self.failures).len()
    }

    /// Counts a wrong use of the driver and keeps the sentence about it.
    pub(crate) fn misuse(&mut self, what: String) {
        self.misuse.push(format!("{} on thread {}: {what}", CALL.get(), thread_number()));
    }

    pub(crate) fn misuses(&self) -> &[String] {
        &self.misuse
    }

    pub(crate) fn clear(&mut self) {
        self.first += self.lines.len() as u64;
        self.lines.clear();
        self.places.clear();
        self.count = 0;
    }

    /// Writes down on which multiprocessors something runs.
    pub(crate) fn note_place(&mut self, place: String) {
        if self.places.len() < MAX_LINES {
            self.places.push(place);
        }
    }

    pub(crate) fn places(&self) -> &[String] {
        &self.places
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The calls since the last clear, one a line.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.lines {
            text.push_str(&line.text);
            if line.result != 0 {
                text.push_str(&format!(" result={}", line.result));
            }
            text.push('\n');
        }
        text
    }
}

/// The capture mode in which a thread's calls break nobody's stream capture.
pub(crate) const CAPTURE_MODE_RELAXED: u32 = 2;

/// What misuse is put down to on a worker's thread.
const NO_CALL: &str = "a queued command";

/// Says that the calling thread, a worker, is back from foreign code.
pub(crate) fn back_to_queue() {
    CALL.set(NO_CALL);
}

thread_local! {
    /// What this thread called last. No destructor here and below: calls are made while threads
    /// end.
    static CALL: Cell<&'static str> = const { Cell::new(NO_CALL) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
    static CAPTURE_MODE: Cell<u32> = const { Cell::new(0) };
}

/// The calling thread's number, given in the order of first calls, from 1.
pub(crate) fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if THREAD.get() == 0 {
        // ORDERING: Relaxed, only the number's uniqueness matters.
        THREAD.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    THREAD.get()
}

/// The calling thread's stream capture mode; global at first, as in CUDA.
pub(crate) fn capture_mode() -> u32 {
    CAPTURE_MODE.get()
}

pub(crate) fn set_capture_mode(mode: u32) {
    CAPTURE_MODE.set(mode);
}
