//! A point and, once there is one, the event that the device can wait for.
#![forbid(unsafe_code)]

use crate::runtime::event_pool::EventHandle;
use gpu_await_protocol::point::Point;

/// An event, recorded behind a ticket.
#[derive(Clone)]
pub(crate) struct Marker {
    pub(crate) ticket: u64,
    pub(crate) event: EventHandle,
}

/// A point, with a marker at or behind it where one is at hand.
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
