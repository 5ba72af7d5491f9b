//! Device memory and host memory: what it costs, who may use it when, and when it comes back.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod cases;
    #[cfg(target_os = "linux")]
    pub(crate) mod child;
    pub(crate) mod completions;
    #[cfg(target_os = "linux")]
    pub(crate) mod descriptors;
    pub(crate) mod eventually;
    pub(crate) mod limited;
    pub(crate) mod modes;
    pub(crate) mod random;
    pub(crate) mod settled;
    pub(crate) mod taken_pool;
}

mod block_cache;
mod frozen;
mod growable;
mod growth_in_turn;
mod lent;
mod mapped;
mod mapped_values;
mod memory;
mod memory_limit;
mod parts;
mod pieces;
mod reservation_events;
mod reservation_wakes;
mod reservations;
#[cfg(all(target_os = "linux", not(miri)))]
mod shared;
mod slabs;
mod staged;
mod unwritten;

/// How long anything may take that happens on its own.
const SOON: std::time::Duration = std::time::Duration::from_secs(10);
