//! How the host learns that a stream reached a point.
//!
//! [`protocol`] is pure: no driver, no clock, no thread; loom checks it in `tests/loom.rs`. The shell drives it:
//! [`stream_state`] is one stream, [`engine`] one device, [`poller`] its
//! thread, [`attention`] what that is told by, and [`exit`] what stops it at the end of the process;
//! [`event_pool`] the pool of events, [`registry`] the streams of a device,
//! [`counted`] a list whose length needs no lock, [`weak_list`] one of what others own, [`graph_budget`] how many compiled graphs there are, [`graph_memory`] what graphs
//! give up, [`loans`] what other libraries have on loan, [`deadlines`] what the poller does at a time, [`coop`] how a task yields,
//! [`tracer`] a log of operations, [`traced_op`] what is in it, and [`device_clock`] the device's times in it,
//! [`words`] and [`doorbell`] what else than an event tells of a completion, [`progress`] and [`device_state`] what
//! outlives streams and devices. What was given up is in [`reclaim`](crate::memory::reclaim), the thread that drops what users lent in
//! [`reaper`](crate::thread::reaper).
//!
//! Imports run one way: [`engine`], [`registry`], [`progress`] and [`retired`](crate::memory::reclaim::retired) know no stream, and say what
//! they ask of one ([`DeviceStream`](engine::DeviceStream), [`PointStream`](progress::PointStream)); [`stream_state`] answers.
//! The aliases at the end of this file bring them together, for all who come after.

pub(crate) mod attention;
pub(crate) mod coop;
pub(crate) mod counted;
pub(crate) mod deadlines;
pub(crate) mod device_clock;
pub(crate) mod device_state;
pub(crate) mod doorbell;
pub(crate) mod engine;
pub(crate) mod event_pool;
pub(crate) mod exit;
pub(crate) mod graph_budget;
pub(crate) mod graph_memory;
pub(crate) mod late_work;
pub(crate) mod loans;
pub(crate) mod marker;
pub(crate) mod poller;
pub(crate) mod progress;
pub(crate) mod protocol;
pub(crate) mod registry;
pub(crate) mod stream_state;
pub(crate) mod traced_op;
pub(crate) mod tracer;
pub(crate) mod weak_list;
pub(crate) mod words;

use std::sync::Arc;

use self::stream_state::StreamState;

/// The engine of one device.
pub(crate) type Engine = self::engine::Engine<StreamState>;
/// How far a stream is.
pub(crate) type Progress = self::progress::Progress<StreamState>;
/// A point on a stream.
pub(crate) type Point = crate::memory::point::Point<Arc<Progress>>;
/// The same, with an event where one is at hand.
pub(crate) type MarkedPoint = self::marker::MarkedPoint<Arc<Progress>>;
/// What is given up, and who uses it.
pub(crate) type Retired = crate::memory::reclaim::retired::Retired<StreamState>;
/// Streams that use something, each with its last ticket.
pub(crate) type UserList = crate::memory::reclaim::retired::UserList<StreamState>;
