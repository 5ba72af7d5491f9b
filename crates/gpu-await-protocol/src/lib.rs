//! The pure part of [gpu-await](https://docs.rs/gpu-await): state transitions without driver, clock or thread. It is an implementation
//! detail of that crate: its interface may change in every release.
//!
//! | module | decides |
//! |---|---|
//! | [`timeline`] | which tickets are issued and complete, and what a point on a stream is |
//! | [`hazard`], [`block_hazards`] | what an operation must wait for |
//! | [`submission`] | who may submit, and who places a marker that a waiter needs |
//! | [`sharing`] | whether other libraries put work on the stream |
//! | [`overlap`] | which launches may start before the preceding one has ended |
//! | [`sweep`] | which thread queries the driver |
//! | [`wait_queue`], [`waiters`] | registered wakers in ticket order, their wake-ups, and the poller's next look |
//! | [`park`] | when the poller may sleep |
//! | [`deadlines`] | which deadlines are due |
//! | [`cadence`], [`estimator`] | when a wait is looked at, and by whom; how long work took |
//! | [`checkers`], [`owed`] | which tasks check for themselves, and which one stays awake; what the poller leaves its neighbours where cores are busy |
//! | [`ready_tasks`] | whether woken tasks wait for a worker |
//! | [`turn`] | whether a thread of the runtime may hold a lock as the process forks |
//! | [`linked_outcome`] | whether work failed, or work that it read from |
//! | [`lock`] | nothing: locks that leave nothing to the child of a fork |
//! | [`event_pool`] | which events may be used again |
//! | [`device_clock`] | times of the device on the host's clock |
//! | [`account`], [`block_cache`], [`buddy`] | how much memory is in use; which freed block is used again; free blocks of a slab |
//! | [`copies`] | which pieces may be copied together, and by what |
//! | [`reservations`] | who may use how much of the memory, and who waits for that |
//! | [`grains`] | who owns which of a device's multiprocessors |
//! | [`admission`], [`batching`] | who is admitted, and which requests form a batch, by deadlines and what requests took lately |
//! | [`cancellable_queues`], [`service_times`] | queues that entries leave from anywhere; how long requests took |
//!
//! `tests/loom.rs` compiles the same files against loom's types, by the name `crate::sync`.
// Tests and examples may unwrap, the library may not.
#![cfg_attr(not(test), warn(clippy::unwrap_used))]
#![forbid(unsafe_code)]

pub mod account;
pub mod admission;
pub mod batching;
pub mod block_cache;
pub mod block_hazards;
pub mod buddy;
pub mod cadence;
pub mod cancellable_queues;
pub mod checkers;
pub mod copies;
pub mod deadlines;
pub mod device_clock;
pub mod estimator;
pub mod event_pool;
pub mod grains;
pub mod hazard;
pub mod linked_outcome;
pub mod lock;
pub mod overlap;
pub mod owed;
pub mod park;
pub mod ready_tasks;
pub mod reservations;
pub mod service_times;
pub mod sharing;
pub mod submission;
pub mod sweep;
pub mod sync;
pub mod timeline;
pub mod turn;
pub mod wait_queue;
pub mod waiters;
