//! The values that a batch may return, and host values that the device still uses.
//!
//! # Invariants
//! 1. A [`Lent`] carries its point. The future that returns its value waits for that point, whichever batch, stream or device made it
//!    (`every_shape_waits`, `a_lent_of_another_device_waits`). Nothing else gives access to the value.
//! 2. Lents of the batch's own stream share one point (`lents_of_one_stream_are_one_point`).
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::slab::DeviceSlab;
use crate::op::{HostValue, Points, Values};
use crate::runtime::stream_state::StreamState;

/// A host value that is lent to the device until its operation is complete.
///
/// Return it from a batch to get the value back: the future waits for the operation that the value is lent
/// to, even one of another batch, stream or device.
///
/// Inside the batch it cannot be read: it has no index and no methods. The value comes back from the batch's
/// future.
///
/// After a drop, the value returns to its pool, or is dropped, once the operation is complete.
#[must_use = "return it from the batch, or the future cannot hand it back"]
pub struct Lent<T>(pub(crate) Settled<T>);

/// A value that a batch may return: device values, [`Lent`] host values, and tuples, arrays, vectors and
/// options of them. Sealed, so that no other code can open a [`Lent`] early.
#[diagnostic::on_unimplemented(
    message = "a batch cannot return `{Self}`",
    label = "not a value that a batch returns",
    note = "return device buffers, what the queue lent (`Lent`), numbers and strings, also in tuples, arrays, vectors and \
            options; make other values of them behind the batch's `.await`"
)]
pub trait Settle: sealed::Sealed + Sized {
    /// The type that the future resolves with.
    type Output: Send + 'static;
    #[doc(hidden)]
    fn settle(self) -> Settled<Self::Output>;
}

/// A value, and the points that must be complete before it may be handed out.
#[doc(hidden)]
pub struct Settled<T> {
    pub(crate) value: HostValue<T>,
    pub(crate) points: Points,
}

impl<T> Settled<T> {
    /// A value with no points to wait for.
    fn here(value: T) -> Self {
        Settled { value: HostValue::here(value), points: Points::NONE }
    }
}

impl<T> Lent<T> {
    /// A value lent to `ticket` of `stream`, or to nothing if that is 0.
    pub(crate) fn to(stream: &Arc<StreamState>, ticket: u64, value: HostValue<T>) -> Self {
        let points = match ticket {
            0 => Points::NONE,
            _ => Points::One(stream.point(ticket)),
        };
        Lent(Settled { value, points })
    }
}

impl<T> fmt::Debug for Lent<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lent({})", self.0.points)
    }
}

mod sealed {
    pub trait Sealed {}
}

impl<T> sealed::Sealed for Lent<T> {}
impl<T: Send + 'static> Settle for Lent<T> {
    type Output = T;
    fn settle(self) -> Settled<T> {
        self.0
    }
}

impl<T: Element> sealed::Sealed for DeviceBuffer<T> {}
impl<T: Element> Settle for DeviceBuffer<T> {
    type Output = Self;
    fn settle(self) -> Settled<Self> {
        Settled::here(self)
    }
}

impl<T: Element> sealed::Sealed for DeviceSlab<T> {}
impl<T: Element> Settle for DeviceSlab<T> {
    type Output = Self;
    fn settle(self) -> Settled<Self> {
        Settled::here(self)
    }
}

impl<S: Settle> sealed::Sealed for Vec<S> {}
impl<S: Settle> Settle for Vec<S> {
    type Output = Vec<S::Output>;
    fn settle(self) -> Settled<Vec<S::Output>> {
        let mut points = Points::NONE;
        let values = self.into_iter().map(|value| points.of(value)).collect();
        Settled { value: HostValue::collect(values), points }
    }
}

impl<S: Settle> sealed::Sealed for Option<S> {}
impl<S: Settle> Settle for Option<S> {
    type Output = Option<S::Output>;
    fn settle(self) -> Settled<Option<S::Output>> {
        let Some(value) = self else { return Settled::here(None) };
        let Settled { value, points } = value.settle();
        let value = match value {
            HostValue::Here(value, on) => HostValue::Here(Some(value), on),
            later => later.make(|value| Ok(Some(value))),
        };
        Settled { value, points }
    }
}

impl<S: Settle, const N: usize> sealed::Sealed for [S; N] {}
impl<S: Settle, const N: usize> Settle for [S; N] {
    type Output = [S::Output; N];
    fn settle(self) -> Settled<[S::Output; N]> {
        let mut points = Points::NONE;
        let values: Vec<_> = self.into_iter().map(|value| points.of(value)).collect();
        let value = values.make(|taken| {
            let array: std::result::Result<[S::Output; N], _> = taken.try_into();
            array.map_err(|_| unreachable!("as many as there were"))
        });
        Settled { value, points }
    }
}

macro_rules! settle_plain {
    ($($type:ty)+) => {$(
        impl sealed::Sealed for $type {}
        impl Settle for $type {
            type Output = Self;
            fn settle(self) -> Settled<Self> {
                Settled::here(self)
            }
        }
    )+};
}
settle_plain! { () bool u8 u16 u32 u64 usize i8 i16 i32 i64 isize f32 f64 String std::time::Instant }

macro_rules! settle_tuples {
    ($(($($name:ident)+))+) => {$(
        impl<$($name: Settle),+> sealed::Sealed for ($($name,)+) {}
        impl<$($name: Settle),+> Settle for ($($name,)+) {
            type Output = ($($name::Output,)+);
            #[expect(non_snake_case, reason = "a value for each type parameter")]
            fn settle(self) -> Settled<Self::Output> {
                let mut points = Points::NONE;
                let ($($name,)+) = self;
                let value = match ($(points.of($name),)+) {
                    ($(HostValue::Here($name, None),)+) => HostValue::here(($($name,)+)),
                    values => values.make(Ok),
                };
                Settled { value, points }
            }
        }
    )+};
}
settle_tuples! { (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) }

impl Points {
    /// Settles a part of a value and adds its points to these.
    fn of<S: Settle>(&mut self, part: S) -> HostValue<S::Output> {
        let Settled { value, points } = part.settle();
        self.merge(points);
        value
    }
}
