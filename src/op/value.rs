//! The values of operations, and which of them are usable without a host wait.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;

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

    /// The value, if it is known, with its proof put to others.
    fn unproved(self: Box<Self>, proofs: &mut Vec<Proof>) -> Option<T>;

    /// The proofs alone: the value is not wanted.
    fn proofs(self: Box<Self>) -> Vec<Proof>;
}

/// A check that is possible only when the operation is complete.
pub(crate) type Proof = Box<dyn FnOnce() -> Result<()> + Send>;

/// A value that is good if every proof succeeds.
struct Unproved<T> {
    value: T,
    proofs: Vec<Proof>,
}

impl<T> Late<T> for Unproved<T> {
    fn take(self: Box<Self>) -> Result<T> {
        let Unproved { value, proofs } = *self;
        proofs.into_iter().try_for_each(|proof| proof()).map(|()| value)
    }

    fn is_known(&self) -> bool {
        true
    }

    fn unproved(self: Box<Self>, proofs: &mut Vec<Proof>) -> Option<T> {
        proofs.extend(self.proofs);
        Some(self.value)
    }

    fn proofs(self: Box<Self>) -> Vec<Proof> {
        self.proofs
    }
}

/// A value that is made if a proof succeeds.
struct ProvedFirst<T> {
    proof: Proof,
    value: HostValue<T>,
}

impl<T> Late<T> for ProvedFirst<T> {
    fn take(self: Box<Self>) -> Result<T> {
        (self.proof)()?;
        self.value.take()
    }

    fn is_known(&self) -> bool {
        false
    }

    fn unproved(self: Box<Self>, _: &mut Vec<Proof>) -> Option<T> {
        None
    }

    fn proofs(self: Box<Self>) -> Vec<Proof> {
        let ProvedFirst { proof, value } = *self;
        let mut proofs = vec![proof];
        proofs.extend(value.proofs());
        proofs
    }
}

impl<T, F: FnOnce() -> Result<T>> Late<T> for F {
    fn take(self: Box<Self>) -> Result<T> {
        self()
    }

    fn is_known(&self) -> bool {
        false
    }

    fn unproved(self: Box<Self>, _: &mut Vec<Proof>) -> Option<T> {
        None
    }

    fn proofs(self: Box<Self>) -> Vec<Proof> {
        Vec::new()
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
            HostValue::Later(late) => late.unproved(&mut Vec::new()),
        }
    }

    /// Its proofs, without the value, which is dropped.
    pub(super) fn proofs(self) -> Vec<Proof> {
        match self {
            HostValue::Here(_) => Vec::new(),
            HostValue::Later(late) => late.proofs(),
        }
    }

    fn is_known(&self) -> bool {
        match self {
            HostValue::Here(_) => true,
            HostValue::Later(late) => late.is_known(),
        }
    }

    fn unproved(self, proofs: &mut Vec<Proof>) -> Option<T> {
        match self {
            HostValue::Here(value) => Some(value),
            HostValue::Later(late) => late.unproved(proofs),
        }
    }
}

impl<T: Send + 'static> HostValue<T> {
    pub(super) fn proved_by(value: T, proofs: Vec<Proof>) -> Self {
        if proofs.is_empty() {
            return HostValue::Here(value);
        }
        HostValue::Later(Box::new(Unproved { value, proofs }))
    }

    /// The value, if the proof succeeds as well.
    pub(crate) fn if_proved(self, proof: Proof) -> Self {
        if !self.is_known() {
            return HostValue::Later(Box::new(ProvedFirst { proof, value: self }));
        }
        let mut proofs = vec![proof];
        match self.unproved(&mut proofs) {
            Some(value) => HostValue::proved_by(value, proofs),
            None => unreachable!("it is known"),
        }
    }

    /// Both values.
    pub(crate) fn and<U: Send + 'static>(self, other: HostValue<U>) -> HostValue<(T, U)> {
        if !self.is_known() || !other.is_known() {
            return HostValue::later(move || Ok((self.take()?, other.take()?)));
        }
        let mut proofs = Vec::new();
        match (self.unproved(&mut proofs), other.unproved(&mut proofs)) {
            (Some(a), Some(b)) => HostValue::proved_by((a, b), proofs),
            _ => unreachable!("both are known"),
        }
    }

    pub(crate) fn collect(values: Vec<HostValue<T>>) -> HostValue<Vec<T>> {
        if !values.iter().all(HostValue::is_known) {
            return HostValue::later(move || values.into_iter().map(HostValue::take).collect());
        }
        let mut proofs = Vec::new();
        let known = values.into_iter().filter_map(|value| value.unproved(&mut proofs)).collect();
        HostValue::proved_by(known, proofs)
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
