//! Graphs and replayed batches: what they compute, keep and refuse.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod cases;
    pub(crate) mod eventually;
    pub(crate) mod modes;
    pub(crate) mod random;
}

mod across;
mod capture;
mod captured;
mod fills_and_copies;
mod graph;
mod graph_events;
mod graph_limit;
mod refusals;
mod replay;

/// How long anything may take that happens on its own.
const SOON: std::time::Duration = std::time::Duration::from_secs(10);
