//! How the host learns that a stream reached a point.
//!
//! Pure parts first (no driver, no clock, no thread; loom checks them in `tests/loom.rs`):
//!
//! | module | decides |
//! |---|---|
//! | [`timeline`] | tickets handed out and complete |
//! | [`submission`] | who may submit, and who places a marker that somebody waits for |
//! | [`sweep`] | who asks the driver |
//! | [`wait_queue`] | registered wakers, their wake-ups, and the poller's next look |
//! | [`waiters`] | the wakers of one stream in ticket order |
//! | [`park`] | when the poller may sleep |
//! | [`policy`] | how a waiter spends its time |
//! | [`estimator`] | how long work took, and so when it may be complete |
//! | [`checkers`] | which tasks look for themselves, and which one stays awake |
//! | [`backlog`] | whether tasks that were woken wait for a worker |
//! | [`block_cache`] | what a stream keeps of freed memory |
//! | [`account`] | where a device's memory is, in bytes |
//!
//! Then the shell that drives them: [`lane`] is one stream, [`engine`] one device, [`poller`] its
//! thread, [`attention`] what that is told by, and [`exit`] what stops it at the end of the process;
//! [`reaper`] the thread that drops what users lent, [`events`] the pool of events,
//! [`shared_event`] an event of several processes, [`registry`] the streams of a device,
//! [`counted`] a list whose length needs no lock,
//! [`retired`] what is given up and waits for them, [`progress`] and [`device_state`] what outlives
//! streams and devices, [`claim`] the memory for an allocation, [`prospect`] what could be had and
//! [`pressure`] what to do where that is not enough, [`reclaimers`] the futures that wait for memory.
//!
//! Imports run one way: [`engine`], [`registry`], [`progress`] and [`retired`] know no stream, and say what
//! they ask of one ([`DeviceStream`](engine::DeviceStream), [`PointStream`](progress::PointStream)); [`lane`] answers.
//! The aliases at the end of this file bring them together, for all who come after.

pub(crate) mod account;
pub(crate) mod attention;
pub(crate) mod backlog;
pub(crate) mod block_cache;
pub(crate) mod checkers;
pub(crate) mod claim;
pub(crate) mod counted;
pub(crate) mod deadlines;
pub(crate) mod device_state;
pub(crate) mod doorbell;
pub(crate) mod engine;
pub(crate) mod estimator;
pub(crate) mod events;
pub(crate) mod exit;
pub(crate) mod lane;
pub(crate) mod park;
pub(crate) mod policy;
pub(crate) mod poller;
pub(crate) mod pressure;
pub(crate) mod progress;
pub(crate) mod prospect;
pub(crate) mod reaper;
pub(crate) mod reclaimers;
pub(crate) mod registry;
pub(crate) mod retired;
pub(crate) mod shared_event;
pub(crate) mod submission;
pub(crate) mod sweep;
pub(crate) mod timeline;
pub(crate) mod wait_queue;
pub(crate) mod waiters;
pub(crate) mod words;

use crate::completion::lane::Lane;

/// The engine of one device, whose streams are lanes.
pub(crate) type Engine = crate::completion::engine::Engine<Lane>;
/// How far a stream is.
pub(crate) type Progress = crate::completion::progress::Progress<Lane>;
/// What is given up, and who uses it.
pub(crate) type Retired = crate::completion::retired::Retired<Lane>;
/// Streams that use something, each with its last ticket.
pub(crate) type UserList = crate::completion::retired::UserList<Lane>;
