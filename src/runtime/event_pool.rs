//! The pool of a device's completion events, and markers: points with such an event behind them.
#![forbid(unsafe_code)]

use gpu_await_protocol::event_pool;
use gpu_await_protocol::timeline::Point;

use crate::backend::RawEvent;

pub(crate) type EventPool = event_pool::EventPool<RawEvent>;
/// A share of a borrowed event.
pub(crate) type EventHandle = event_pool::EventHandle<RawEvent>;
/// Destroys an event without holders.
pub(crate) type Destroy = event_pool::Destroy<RawEvent>;

/// An event, recorded behind a ticket.
#[derive(Clone)]
pub(crate) struct Marker {
    pub(crate) ticket: u64,
    pub(crate) event: EventHandle,
}

/// A point, with a marker at or behind it if one is available.
#[derive(Clone)]
pub(crate) struct MarkedPoint<S> {
    pub(crate) point: Point<S>,
    pub(crate) marker: Option<Marker>,
}

impl<S> MarkedPoint<S> {
    /// The point that a marker is right behind.
    pub(crate) fn at(stream: S, marker: Marker) -> Self {
        MarkedPoint { point: Point { stream, ticket: marker.ticket }, marker: Some(marker) }
    }
}

impl<S> From<Point<S>> for MarkedPoint<S> {
    fn from(point: Point<S>) -> Self {
        MarkedPoint { point, marker: None }
    }
}
