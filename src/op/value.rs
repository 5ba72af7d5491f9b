//! What an operation resolves with, and which values are good without a host wait.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;

/// What an operation resolves with.
pub(crate) enum HostValue<T> {
    /// Known since the submission.
    Here(T),
    /// Made when the operation is complete.
    Later(Box<dyn FnOnce() -> Result<T> + Send>),
}

/// Values that are good without a host wait because device order is enough: `()`, device buffers,
/// and tuples, vectors and options of them. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is a host value: it is not good before the device got there",
    label = "only the host can have it",
    note = "`.await` the operation, or give the value up with `.without_value().queued()`"
)]
pub trait DeviceSide: sealed::Sealed + Sized {
    #[doc(hidden)]
    fn without_host() -> Option<Self> {
        None
    }
}

mod sealed {
    pub trait Sealed {}
}

impl<T> HostValue<T> {
    pub(crate) fn take(self) -> Result<T> {
        match self {
            HostValue::Here(value) => Ok(value),
            HostValue::Later(make) => make(),
        }
    }
}

impl<T: Send + 'static> HostValue<T> {
    pub(crate) fn collect(values: Vec<HostValue<T>>) -> HostValue<Vec<T>> {
        if values.iter().all(|value| matches!(value, HostValue::Here(_))) {
            let here = values.into_iter().filter_map(|value| match value {
                HostValue::Here(value) => Some(value),
                HostValue::Later(_) => None,
            });
            return HostValue::Here(here.collect());
        }
        HostValue::Later(Box::new(move || values.into_iter().map(HostValue::take).collect()))
    }
}

impl sealed::Sealed for () {}
impl DeviceSide for () {
    fn without_host() -> Option<()> {
        Some(())
    }
}
impl<T: Element> sealed::Sealed for DeviceBuffer<T> {}
impl<T: Element> DeviceSide for DeviceBuffer<T> {}
impl<T: DeviceSide> sealed::Sealed for Vec<T> {}
impl<T: DeviceSide> DeviceSide for Vec<T> {}
impl<T: DeviceSide> sealed::Sealed for Option<T> {}
impl<T: DeviceSide> DeviceSide for Option<T> {}

macro_rules! device_side_tuples {
    ($(($($name:ident)+))+) => {$(
        impl<$($name: DeviceSide),+> sealed::Sealed for ($($name,)+) {}
        impl<$($name: DeviceSide),+> DeviceSide for ($($name,)+) {}
    )+};
}
device_side_tuples! { (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) }
