//! The protocol of waiting (pure): no driver, no clock, no thread, no channel. The crate and `tests/loom.rs` compile the same files.
//!
//! | module | decides |
//! |---|---|
//! | [`timeline`] | which tickets are issued and complete |
//! | [`submission`] | who may submit, and who places a marker that a waiter needs |
//! | [`sweep`] | which thread queries the driver |
//! | [`wait_queue`] | registered wakers, their wake-ups, and the poller's next look |
//! | [`waiters`] | the wakers of one stream in ticket order |
//! | [`park`] | when the poller may sleep |
//! | [`cadence`] | when a wait is looked at, and by whom |
//! | [`estimator`] | how long work took, and so when it may be complete |
//! | [`checkers`] | which tasks check for themselves, and which one stays awake |
//! | [`lineage`] | whether work failed, or work that it read from |
//! | [`sharing`] | whether other libraries put work on the stream |
//! | [`backlog`] | whether woken tasks wait for a worker |
#![forbid(unsafe_code)]

pub(crate) mod backlog;
pub(crate) mod cadence;
pub(crate) mod checkers;
pub(crate) mod estimator;
pub(crate) mod lineage;
pub(crate) mod park;
pub(crate) mod sharing;
pub(crate) mod submission;
pub(crate) mod sweep;
pub(crate) mod timeline;
pub(crate) mod wait_queue;
pub(crate) mod waiters;
