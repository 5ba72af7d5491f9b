//! How the host learns that a stream reached a point.
//!
//! | module | what it is |
//! |---|---|
//! | [`gpu_await_protocol`] | the pure part: no driver, clock or thread; loom checks it. The others drive it |
//! | [`stream_state`] | one stream |
//! | [`engine`] | one device |
//! | [`poller`], [`attention`] | a device's thread, and how it is notified |
//! | [`exit`] | stops the pollers at the end of the process |
//! | [`event_pool`], [`words`], [`doorbell`] | events and markers, and the other ways to learn of a completion |
//! | [`registry`], [`loans`] | the streams of a device; its loans to other libraries |
//! | [`clock`] | a device's time, the moments of it that tasks wait for, and when its poller looks |
//! | [`coop`] | how a task yields |
//! | [`partitions`] | shares of a device's multiprocessors |
//! | [`progress`] | the parts that outlive streams and devices |
//! | [`graph_budget`], [`graph_memory`] | the number of compiled graphs; memory that graphs can release |
//! | [`tracer`], [`traced_op`], [`device_clock`] | the log of operations, its entries, and device times on the host's clock |
//! | [`weak_list`] | a list of weak references |
//!
//! Freed memory is in [`reclaim`](crate::memory::reclaim), the thread that drops users' values in [`reaper`](crate::thread::reaper).
//!
//! Imports run one way: [`engine`], [`registry`], [`progress`] and [`retired`](crate::memory::reclaim::retired) do not know the type of a
//! stream. They state what they need as traits ([`DeviceStream`](engine::DeviceStream), [`PointStream`](progress::PointStream)), which
//! [`stream_state`] implements. The aliases at the end of this file combine them, for all other modules.

pub(crate) mod attention;
pub(crate) mod clock;
pub(crate) mod coop;
pub(crate) mod doorbell;
pub(crate) mod engine;
pub(crate) mod event_pool;
pub(crate) mod exit;
pub(crate) mod graph_budget;
pub(crate) mod graph_memory;
pub(crate) mod loans;
pub(crate) mod partitions;
pub(crate) mod poller;
pub(crate) mod progress;
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
/// A stream's progress.
pub(crate) type Progress = self::progress::Progress<StreamState>;
/// A point on a stream.
pub(crate) type Point = gpu_await_protocol::timeline::Point<Arc<Progress>>;
/// The same, with an event if one is available.
pub(crate) type MarkedPoint = self::event_pool::MarkedPoint<Arc<Progress>>;
/// A retired value, and the streams that use it.
pub(crate) type Retired = crate::memory::reclaim::retired::Retired<StreamState>;
/// Streams that use something, each with its last ticket.
pub(crate) type UserList = crate::memory::reclaim::retired::UserList<StreamState>;
