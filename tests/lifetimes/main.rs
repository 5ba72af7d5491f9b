//! Drops at any moment, and the end: of streams, of devices, of the process.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod child;
    pub(crate) mod completions;
    pub(crate) mod eventually;
    pub(crate) mod host_threads;
    pub(crate) mod modes;
    pub(crate) mod random;
    pub(crate) mod settled;
    pub(crate) mod taken_pool;
}

mod drop_points;
mod drops;
#[cfg(target_os = "linux")]
mod fork;
mod kept_handles;
mod random_drops;
mod shutdown;
mod stream_lifetimes;

/// How long anything may take that happens on its own.
const SOON: std::time::Duration = std::time::Duration::from_secs(10);
