//! [`Points`]: what an operation or a value waits for.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use crate::completion::lane::Lane;
use crate::hazard::Track;

/// A point on a stream.
#[derive(Clone)]
pub(crate) struct Point {
    pub(crate) lane: Arc<Lane>,
    pub(crate) ticket: u64,
}

/// Points of streams, the highest of each.
pub(crate) enum Points {
    One(Point),
    Many(Vec<Point>),
}

impl fmt::Display for Points {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, point) in self.as_slice().iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}ticket {} of {:?}", point.ticket, point.lane)?;
        }
        Ok(())
    }
}

impl Points {
    pub(crate) const NONE: Points = Points::Many(Vec::new());

    pub(crate) fn as_slice(&self) -> &[Point] {
        match self {
            Points::One(point) => std::slice::from_ref(point),
            Points::Many(points) => points,
        }
    }

    /// Adds a ticket of `lane`, which is not cloned where it is among the streams already. Ticket 0 is
    /// in front of all work: it adds nothing to others.
    pub(crate) fn reach(&mut self, lane: &Arc<Lane>, ticket: u64) {
        if ticket == 0 && !self.as_slice().is_empty() {
            return;
        }
        match self.on(lane.id()) {
            Some(known) => known.ticket = known.ticket.max(ticket),
            None => self.push(Point { lane: lane.clone(), ticket }),
        }
    }

    pub(crate) fn merge(&mut self, others: Points) {
        match others {
            Points::One(point) => self.add(point),
            Points::Many(points) => points.into_iter().for_each(|point| self.add(point)),
        }
    }

    pub(super) fn add(&mut self, point: Point) {
        match self.on(point.lane.id()) {
            Some(known) => known.ticket = known.ticket.max(point.ticket),
            None => self.push(point),
        }
    }

    /// The point on a stream.
    fn on(&mut self, lane: u64) -> Option<&mut Point> {
        let points = match self {
            Points::One(point) => std::slice::from_mut(point),
            Points::Many(points) => points,
        };
        points.iter_mut().find(|point| point.lane.id() == lane)
    }

    fn push(&mut self, point: Point) {
        *self = match std::mem::replace(self, Points::NONE) {
            Points::One(first) => Points::Many(vec![first, point]),
            Points::Many(points) if points.is_empty() => Points::One(point),
            Points::Many(mut points) => {
                points.push(point);
                Points::Many(points)
            }
        };
    }
}

impl Point {
    /// Whether it is complete or never will be.
    pub(super) fn ask(&self) -> bool {
        if !self.lane.is_complete(self.ticket) {
            self.lane.want(self.ticket);
            self.lane.sweep();
        }
        self.lane.is_settled(self.ticket)
    }
}
