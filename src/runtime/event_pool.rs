//! The pool of a device's completion events.
#![forbid(unsafe_code)]

use gpu_await_protocol::event_pool;

use crate::backend::RawEvent;

pub(crate) type EventPool = event_pool::EventPool<RawEvent>;
/// A share of a borrowed event.
pub(crate) type EventHandle = event_pool::EventHandle<RawEvent>;
/// Destroys an event without holders.
pub(crate) type Destroy = event_pool::Destroy<RawEvent>;
