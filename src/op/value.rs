//! The values of operations, and which of them are usable without a host wait.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::slab::DeviceSlab;
use crate::submit::Dependencies;

/// The value that an operation resolves with.
pub(crate) enum HostValue<T> {
    /// Known since the submission, and valid if no dependency failed, which is known when the operation is complete.
    Here(T, Option<Box<Dependencies>>),
    /// Made when the operation is complete.
    Later(Box<dyn Late<T> + Send>),
}

/// A value that exists once the operation is complete.
pub(crate) trait Late<T> {
    fn take(self: Box<Self>) -> Result<T>;

    /// Its dependencies, without computing the value.
    fn dependencies(self: Box<Self>) -> Option<Box<Dependencies>>;
}

/// Adds dependencies to others. Usually one side or both are empty.
fn join(on: &mut Option<Box<Dependencies>>, others: Option<Box<Dependencies>>) {
    match (on, others) {
        (Some(on), Some(others)) => on.extend(*others),
        (on, others) => *on = on.take().or(others),
    }
}

/// Values from which another one is computed.
pub(crate) trait Values: Send + 'static {
    type Taken;

    fn take(self) -> Result<Self::Taken>;

    /// Their dependencies, without the values.
    fn dependencies(self) -> Option<Box<Dependencies>>;

    /// Returns the value that `make` computes from these values once the operation is complete. A caller that discards that value
    /// still gets the failure of anything that these values depend on.
    fn make<U>(self, make: impl FnOnce(Self::Taken) -> Result<U> + Send + 'static) -> HostValue<U>
    where
        Self: Sized,
    {
        HostValue::Later(Box::new(MadeOf { values: self, make }))
    }
}

impl<T: Send + 'static> Values for HostValue<T> {
    type Taken = T;

    fn take(self) -> Result<T> {
        HostValue::take(self)
    }

    fn dependencies(self) -> Option<Box<Dependencies>> {
        HostValue::dependencies(self)
    }
}

impl<T: Send + 'static> Values for Vec<HostValue<T>> {
    type Taken = Vec<T>;

    fn take(self) -> Result<Vec<T>> {
        self.into_iter().map(HostValue::take).collect()
    }

    fn dependencies(self) -> Option<Box<Dependencies>> {
        let mut on = None;
        self.into_iter().for_each(|value| join(&mut on, value.dependencies()));
        on
    }
}

macro_rules! tuples_of_values {
    ($(($($name:ident)+))+) => {$(
        impl<$($name: Send + 'static),+> Values for ($(HostValue<$name>,)+) {
            type Taken = ($($name,)+);

            #[expect(non_snake_case, reason = "a value for each type parameter")]
            fn take(self) -> Result<Self::Taken> {
                let ($($name,)+) = self;
                Ok(($($name.take()?,)+))
            }

            #[expect(non_snake_case, reason = "a value for each type parameter")]
            fn dependencies(self) -> Option<Box<Dependencies>> {
                let (mut on, ($($name,)+)) = (None, self);
                $(join(&mut on, $name.dependencies());)+
                on
            }
        }
    )+};
}
tuples_of_values! { (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) }

struct MadeOf<V, F> {
    values: V,
    make: F,
}

impl<V: Values, U, F: FnOnce(V::Taken) -> Result<U>> Late<U> for MadeOf<V, F> {
    fn take(self: Box<Self>) -> Result<U> {
        (self.make)(self.values.take()?)
    }

    fn dependencies(self: Box<Self>) -> Option<Box<Dependencies>> {
        self.values.dependencies()
    }
}

/// A value that is computed only if no dependency failed.
struct ProvedFirst<T> {
    on: Box<Dependencies>,
    late: Box<dyn Late<T> + Send>,
}

impl<T> Late<T> for ProvedFirst<T> {
    fn take(self: Box<Self>) -> Result<T> {
        self.on.check()?;
        self.late.take()
    }

    fn dependencies(self: Box<Self>) -> Option<Box<Dependencies>> {
        let mut on = Some(self.on);
        join(&mut on, self.late.dependencies());
        on
    }
}

impl<T, F: FnOnce() -> Result<T>> Late<T> for F {
    fn take(self: Box<Self>) -> Result<T> {
        self()
    }

    fn dependencies(self: Box<Self>) -> Option<Box<Dependencies>> {
        None
    }
}

/// Values that are usable without a host wait because device order is enough: `()`, device buffers, and
/// tuples, vectors and options of them. Sealed.
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
    #[inline]
    pub(crate) fn here(value: T) -> Self {
        HostValue::Here(value, None)
    }

    pub(crate) fn later(make: impl FnOnce() -> Result<T> + Send + 'static) -> Self {
        HostValue::Later(Box::new(make))
    }

    pub(crate) fn take(self) -> Result<T> {
        match self {
            HostValue::Here(value, None) => Ok(value),
            HostValue::Here(value, Some(on)) => on.check().map(|()| value),
            HostValue::Later(late) => late.take(),
        }
    }

    /// The value where device order is enough, if it is known.
    #[inline]
    pub(crate) fn known(self) -> Option<T> {
        match self {
            HostValue::Here(value, _) => Some(value),
            HostValue::Later(_) => None,
        }
    }

    /// Its dependencies; the value is dropped.
    pub(super) fn dependencies(self) -> Option<Box<Dependencies>> {
        match self {
            HostValue::Here(_, on) => on,
            HostValue::Later(late) => late.dependencies(),
        }
    }

    fn is_known(&self) -> bool {
        !matches!(self, HostValue::Later(_))
    }

    /// The value, if it is known; adds its dependencies to `on`.
    fn unproved(self, on: &mut Option<Box<Dependencies>>) -> Option<T> {
        match self {
            HostValue::Here(value, own) => {
                join(on, own);
                Some(value)
            }
            HostValue::Later(_) => None,
        }
    }
}

impl<T: Send + 'static> HostValue<T> {
    /// The value, valid only if none of `on` failed either.
    pub(crate) fn if_none_failed(self, on: Option<Box<Dependencies>>) -> Self {
        let Some(on) = on else { return self };
        match self {
            HostValue::Later(late) => HostValue::Later(Box::new(ProvedFirst { on, late })),
            HostValue::Here(value, own) => {
                let mut on = Some(on);
                join(&mut on, own);
                HostValue::Here(value, on)
            }
        }
    }

    /// Both values.
    pub(crate) fn and<U: Send + 'static>(self, other: HostValue<U>) -> HostValue<(T, U)> {
        if !self.is_known() || !other.is_known() {
            return (self, other).make(Ok);
        }
        let mut on = None;
        match (self.unproved(&mut on), other.unproved(&mut on)) {
            (Some(a), Some(b)) => HostValue::Here((a, b), on),
            _ => unreachable!("both are known"),
        }
    }

    pub(crate) fn collect(values: Vec<HostValue<T>>) -> HostValue<Vec<T>> {
        if !values.iter().all(HostValue::is_known) {
            return values.make(Ok);
        }
        let (mut on, mut known) = (None, Vec::with_capacity(values.len()));
        values.into_iter().for_each(|value| known.extend(value.unproved(&mut on)));
        HostValue::Here(known, on)
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
impl<T: Element> sealed::Sealed for DeviceSlab<T> {}
impl<T: Element> DeviceSide for DeviceSlab<T> {}
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
