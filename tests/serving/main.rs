//! Stream pools and batchers: who is admitted and who is refused, in time, whatever panics.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod child;
    pub(crate) mod eventually;
    pub(crate) mod held_pool;
    pub(crate) mod host_threads;
}

mod batch_panics;
mod batch_spans;
mod batches;
mod deadlines;
mod pools;
mod refusal_events;

/// How long anything may take that happens on its own.
const SOON: std::time::Duration = std::time::Duration::from_secs(15);
