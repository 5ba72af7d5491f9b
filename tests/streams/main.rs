//! Streams, and waiting: what is on the device when, what waits for what, and who is held up.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod child;
    pub(crate) mod completions;
    pub(crate) mod eventually;
    pub(crate) mod every_method;
    pub(crate) mod given_up;
    pub(crate) mod host_threads;
    pub(crate) mod inside;
    pub(crate) mod modes;
    pub(crate) mod settled;
}

mod events;
mod full_queue;
mod gates;
mod host_functions;
mod one_core;
mod order;
mod partitions;
mod peers;
mod priorities;
mod scopes;
mod streams;
mod waits;
mod wholes;

/// How long anything may take that happens on its own.
const SOON: std::time::Duration = std::time::Duration::from_secs(10);
