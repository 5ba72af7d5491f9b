//! Memory, streams and work of other libraries.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod eventually;
    pub(crate) mod random;
    pub(crate) mod slices;
}

mod cudarc;
mod dlpack;
mod enqueue;
mod foreign_memory;
mod late_outcomes;

/// How long anything may take that happens on its own.
const SOON: std::time::Duration = std::time::Duration::from_secs(10);
