//! When a batch is ready, and who is in it (pure).
//!
//! | there are | and | then |
//! |---|---|---|
//! | as many requests as a batch may have | a batch may start | it starts with these |
//! | fewer | the oldest has waited long enough, or no further one can come | it starts with these |
//! | fewer | neither | it starts when the oldest has waited long enough, or more come |
//! | any | as many batches are in flight as may be | they wait for the end of one |
//! | none | none in flight, no further one can come | that was all |
//!
//! # Invariants
//! 1. Batches are made in the order in which requests came, and none has more than `max_len`
//!    (`batches_are_whole_and_in_order`).
//! 2. A request waits no longer than `max_delay` while a batch may start
//!    (`batches_are_whole_and_in_order`).
//! 3. Who left is in no later batch, and changes nothing for the others
//!    (`batches_are_whole_and_in_order`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// The limits of a batcher.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchLimits {
    pub(crate) max_len: usize,
    pub(crate) max_delay_ns: u64,
    /// Batches at once.
    pub(crate) max_in_flight: usize,
}

/// What to do now.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Next<T> {
    /// Run these; say [`Gather::finished`] afterwards.
    Run(Vec<T>),
    /// Ask again at that time.
    At(u64),
    /// Ask again when something changes.
    Idle,
    /// Nothing is left and nothing can come.
    End,
}

#[derive(Debug)]
pub(crate) struct Gather<T> {
    limits: BatchLimits,
    /// By the order in which they came, with the time.
    waiting: BTreeMap<u64, (u64, T)>,
    came: u64,
    in_flight: usize,
    ended: bool,
}

impl<T> Gather<T> {
    pub(crate) fn new(limits: BatchLimits) -> Self {
        Gather { limits, waiting: BTreeMap::new(), came: 0, in_flight: 0, ended: false }
    }

    /// Enters a request. The key is for [`leave`](Self::leave); true: [`next`](Self::next) has
    /// something new to say.
    pub(crate) fn add(&mut self, now: u64, request: T) -> (u64, bool) {
        let key = self.came;
        self.came += 1;
        self.waiting.insert(key, (now, request));
        let len = self.waiting.len();
        let tells =
            self.in_flight < self.limits.max_in_flight && (len == 1 || len >= self.limits.max_len);
        (key, tells)
    }

    /// Takes a request out that is not in a batch yet.
    pub(crate) fn leave(&mut self, key: u64) -> Option<T> {
        self.waiting.remove(&key).map(|(_, request)| request)
    }

    /// Says what to do at `now`.
    pub(crate) fn next(&mut self, now: u64) -> Next<T> {
        let Some((_, &(oldest, _))) = self.waiting.first_key_value() else {
            let over = self.ended && self.in_flight == 0;
            return if over { Next::End } else { Next::Idle };
        };
        if self.in_flight == self.limits.max_in_flight {
            return Next::Idle;
        }
        let due = oldest.saturating_add(self.limits.max_delay_ns);
        let is_whole = self.waiting.len() >= self.limits.max_len;
        if !is_whole && !self.ended && now < due {
            return Next::At(due);
        }
        self.in_flight += 1;
        let rest = match self.waiting.keys().nth(self.limits.max_len).copied() {
            Some(first_of_rest) => self.waiting.split_off(&first_of_rest),
            None => BTreeMap::new(),
        };
        let batch = std::mem::replace(&mut self.waiting, rest);
        Next::Run(batch.into_values().map(|(_, request)| request).collect())
    }

    /// A batch has ended.
    pub(crate) fn finished(&mut self) {
        self.in_flight -= 1;
    }

    /// No further request will come.
    pub(crate) fn end(&mut self) {
        self.ended = true;
    }

    /// Takes out everybody who waits.
    pub(crate) fn clear(&mut self) -> Vec<T> {
        std::mem::take(&mut self.waiting).into_values().map(|(_, request)| request).collect()
    }

    /// Batches in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Requests that wait for a batch.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }
}
