//! The values of operations, and which of them are usable without a host wait.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::submit::{Dependencies, Dependency};

/// The value that an operation resolves with.
pub(crate) enum HostValue<T> {
    /// Known since the submission.
    Here(T),
    /// Made, or proved good, when the operation is complete.
    Later(Box<dyn Late<T> + Send>),
}

/// A value that exists once the operation is complete.
pub(crate) trait Late<T> {
    fn take(self: Box<Self>) -> Result<T>;

    /// Whether the value is known since the submission, and has to be proved good.
    fn is_known(&self) -> bool;

    /// The value, if it is known, with what it depends on put to others.
    fn unproved(self: Box<Self>, on: &mut Dependencies) -> Option<T>;

    /// What it depends on alone: the value is not wanted.
    fn dependencies(self: Box<Self>) -> Dependencies;
}

/// A value that is good if nothing that it depends on failed, which is known when the operation is complete.
struct Unproved<T> {
    value: T,
    on: Dependencies,
}

fn none_failed(on: &Dependencies) -> Result<()> {
    on.iter().try_for_each(Dependency::check)
}

impl<T> Late<T> for Unproved<T> {
    fn take(self: Box<Self>) -> Result<T> {
        none_failed(&self.on).map(|()| self.value)
    }

    fn is_known(&self) -> bool {
        true
    }

    fn unproved(self: Box<Self>, on: &mut Dependencies) -> Option<T> {
        on.extend(self.on);
        Some(self.value)
    }

    fn dependencies(self: Box<Self>) -> Dependencies {
        self.on
    }
}

/// A value that is made if nothing that it depends on failed.
struct ProvedFirst<T> {
    on: Dependencies,
    value: HostValue<T>,
}

impl<T> Late<T> for ProvedFirst<T> {
    fn take(self: Box<Self>) -> Result<T> {
        none_failed(&self.on)?;
        self.value.take()
    }

    fn is_known(&self) -> bool {
        false
    }

    fn unproved(self: Box<Self>, _: &mut Dependencies) -> Option<T> {
        None
    }

    fn dependencies(self: Box<Self>) -> Dependencies {
        let ProvedFirst { mut on, value } = *self;
        on.extend(value.dependencies());
        on
    }
}

impl<T, F: FnOnce() -> Result<T>> Late<T> for F {
    fn take(self: Box<Self>) -> Result<T> {
        self()
    }

    fn is_known(&self) -> bool {
        false
    }

    fn unproved(self: Box<Self>, _: &mut Dependencies) -> Option<T> {
        None
    }

    fn dependencies(self: Box<Self>) -> Dependencies {
        Dependencies::new()
    }
}

/// Values that are good without a host wait because device order is enough: `()`, device buffers,
/// and tuples, vectors and options of them. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is read by the host, and only valid when the operation is complete: await it",
    label = "`.queued()` does not wait: say `.await` instead",
    note = "`.synchronize()` waits in sync code; `.without_value().queued()` gives the value up"
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
    pub(crate) fn later(make: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        HostValue::Later(Box::new(make))
    }

    pub(crate) fn take(self) -> Result<T> {
        match self {
            HostValue::Here(value) => Ok(value),
            HostValue::Later(late) => late.take(),
        }
    }

    /// The value where device order is enough, if it is known.
    #[inline]
    pub(crate) fn known(self) -> Option<T> {
        match self {
            HostValue::Here(value) => Some(value),
            HostValue::Later(late) => late.unproved(&mut Dependencies::new()),
        }
    }

    /// What it depends on, without the value, which is dropped.
    pub(super) fn dependencies(self) -> Dependencies {
        match self {
            HostValue::Here(_) => Dependencies::new(),
            HostValue::Later(late) => late.dependencies(),
        }
    }

    fn is_known(&self) -> bool {
        match self {
            HostValue::Here(_) => true,
            HostValue::Later(late) => late.is_known(),
        }
    }

    fn unproved(self, on: &mut Dependencies) -> Option<T> {
        match self {
            HostValue::Here(value) => Some(value),
            HostValue::Later(late) => late.unproved(on),
        }
    }
}

impl<T: Send + 'static> HostValue<T> {
    pub(super) fn depending(value: T, on: Dependencies) -> Self {
        if on.is_empty() {
            return HostValue::Here(value);
        }
        HostValue::Later(Box::new(Unproved { value, on }))
    }

    /// The value, if nothing of this failed either.
    pub(crate) fn if_none_failed(self, mut on: Dependencies) -> Self {
        if !self.is_known() {
            return HostValue::Later(Box::new(ProvedFirst { on, value: self }));
        }
        match self.unproved(&mut on) {
            Some(value) => HostValue::depending(value, on),
            None => unreachable!("it is known"),
        }
    }

    /// Both values.
    pub(crate) fn and<U: Send + 'static>(self, other: HostValue<U>) -> HostValue<(T, U)> {
        if !self.is_known() || !other.is_known() {
            return HostValue::later(move || Ok((self.take()?, other.take()?)));
        }
        let mut on = Dependencies::new();
        match (self.unproved(&mut on), other.unproved(&mut on)) {
            (Some(a), Some(b)) => HostValue::depending((a, b), on),
            _ => unreachable!("both are known"),
        }
    }

    pub(crate) fn collect(values: Vec<HostValue<T>>) -> HostValue<Vec<T>> {
        if !values.iter().all(HostValue::is_known) {
            return HostValue::later(move || values.into_iter().map(HostValue::take).collect());
        }
        let mut on = Dependencies::new();
        let known = values.into_iter().filter_map(|value| value.unproved(&mut on)).collect();
        HostValue::depending(known, on)
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
