//! What a program would give if each step ended before the next one began.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_await::ErrorKind;
use parking_lot::Mutex;

use super::program::{LEN, Place};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Unwritten,
    Valid,
    /// Its producer failed in this way.
    Poisoned(ErrorKind),
}

/// The elements of a buffer.
#[derive(Clone, Debug)]
pub(crate) struct Contents {
    pub(crate) values: [f32; LEN],
    states: [State; LEN],
}

impl Contents {
    pub(crate) fn unwritten() -> Self {
        Contents { values: [f32::NAN; LEN], states: [State::Unwritten; LEN] }
    }

    pub(crate) fn full(value: f32) -> Self {
        Contents { values: [value; LEN], states: [State::Valid; LEN] }
    }

    /// Why these elements cannot be read, nor updated in place.
    pub(crate) fn unreadable(&self, place: &Place) -> Option<ErrorKind> {
        self.states[place.start..place.end].iter().find_map(|state| match state {
            State::Valid => None,
            State::Unwritten => Some(ErrorKind::InvalidCall),
            State::Poisoned(kind) => Some(*kind),
        })
    }

    pub(crate) fn read(&self, place: &Place) -> Vec<f32> {
        self.values[place.start..place.end].to_vec()
    }

    /// Applies `f` to each element and its index in the place, or poisons them all.
    pub(crate) fn write(
        &mut self,
        place: &Place,
        outcome: Result<(), ErrorKind>,
        f: impl Fn(usize, f32) -> f32,
    ) {
        for (index, at) in (place.start..place.end).enumerate() {
            match outcome {
                Ok(()) => {
                    self.values[at] = f(index, self.values[at]);
                    self.states[at] = State::Valid;
                }
                Err(kind) => self.states[at] = State::Poisoned(kind),
            }
        }
    }
}

/// By a stream's id: the last host function that must have run on it.
pub(crate) type Frontier = BTreeMap<u64, usize>;

/// Enters all that `more` knows.
pub(crate) fn join(frontier: &mut Frontier, more: &Frontier) {
    for (stream, function) in more {
        let known = frontier.entry(*stream).or_insert(*function);
        *known = (*known).max(*function);
    }
}

/// Which host functions ran, in what order, and what became of what they own.
#[derive(Default)]
pub(crate) struct Ledger {
    ran: Mutex<Ran>,
    made: AtomicU64,
    dropped: AtomicU64,
}

#[derive(Default)]
struct Ran {
    functions: Vec<bool>,
    violation: Option<String>,
}

/// Of the user's: in a closure, then in its result.
pub(crate) struct Payload {
    pub(crate) id: usize,
    ledger: Arc<Ledger>,
}

impl Drop for Payload {
    fn drop(&mut self) {
        self.ledger.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

impl Ledger {
    /// The number of a new host function.
    pub(crate) fn function(&self) -> usize {
        let mut ran = self.ran.lock();
        ran.functions.push(false);
        ran.functions.len() - 1
    }

    pub(crate) fn payload(self: &Arc<Self>, id: usize) -> Payload {
        self.made.fetch_add(1, Ordering::SeqCst);
        Payload { id, ledger: self.clone() }
    }

    /// Called by function `id`, behind all of `frontier`.
    pub(crate) fn run(&self, id: usize, frontier: &Frontier) {
        let mut ran = self.ran.lock();
        let early = frontier.iter().find(|(_, before)| !ran.functions[**before]);
        if let Some((stream, before)) = early {
            let what = format!("host function {id} ran before {before} of stream {stream}");
            ran.violation.get_or_insert(what);
        }
        if std::mem::replace(&mut ran.functions[id], true) {
            ran.violation.get_or_insert(format!("host function {id} ran twice"));
        }
    }

    pub(crate) fn has_run(&self, id: usize) -> bool {
        self.ran.lock().functions[id]
    }

    pub(crate) fn violation(&self) -> Option<String> {
        self.ran.lock().violation.clone()
    }

    /// How many were made and not dropped.
    pub(crate) fn alive(&self) -> u64 {
        self.made.load(Ordering::SeqCst) - self.dropped.load(Ordering::SeqCst)
    }
}
