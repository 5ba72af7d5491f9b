//! [`Sequence`]: an array whose length is known to the host, or to the device alone.
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;

use gpu_await::sibling::Span;
use gpu_await::{ErrorDetail, Extent, Readable, Result, Writable};

/// Elements of type `T` that an algorithm reads: a buffer or a view, or the beginning of one whose length only the device
/// knows ([`UpTo`]). Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory of `{T}` that an algorithm reads",
    label = "not elements of `{T}`",
    note = "pass `&DeviceBuffer<{T}>`, `&View<{T}>`, or `&buffer.up_to(&count)?`",
    note = "of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does",
    note = "host memory is uploaded first: `stream.upload(vec).queued()?`"
)]
pub trait Sequence<T> {
    #[doc(hidden)]
    fn elements(&self) -> Elements<'_>;

    /// The first `count[0]` elements of a buffer or a view.
    ///
    /// # Errors
    /// A `count` of not exactly one element: take one of several numbers by a [`slice`](gpu_await::DeviceBuffer::slice).
    fn up_to<'a>(&'a self, count: &'a impl Readable<u64>) -> Result<UpTo<'a, T>>
    where
        Self: Readable<T> + Sized,
    {
        let memory = (self.span(), self.len());
        Ok(UpTo { memory, count: one("up_to", count)?, element: PhantomData })
    }
}

/// Elements of type `T` that an algorithm reads and writes in place. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory of `{T}` that an algorithm changes",
    label = "not elements of `{T}` that can be written",
    note = "pass `&mut DeviceBuffer<{T}>`, `&mut ViewMut<{T}>`, or `&mut buffer.up_to_mut(&count)?`",
    note = "of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does"
)]
pub trait SequenceMut<T> {
    #[doc(hidden)]
    fn elements_mut(&mut self) -> Elements<'_>;

    /// The first `count[0]` elements of a buffer or a view, to be changed in place.
    ///
    /// # Errors
    /// A `count` of not exactly one element: take one of several numbers by a [`slice`](gpu_await::DeviceBuffer::slice).
    fn up_to_mut<'a>(&'a mut self, count: &'a impl Readable<u64>) -> Result<UpToMut<'a, Self>>
    where
        Self: Writable<T> + Sized,
    {
        Ok(UpToMut { memory: self, count: one("up_to_mut", count)? })
    }
}

/// Memory, and how much of it counts.
#[doc(hidden)]
#[derive(Clone)]
pub struct Elements<'a> {
    pub(super) span: Span<'a>,
    pub(super) length: ElementCount<'a>,
}

/// How many elements there are.
#[derive(Clone)]
pub(super) struct ElementCount<'a> {
    /// The length, or an upper bound if the device has the length.
    pub(super) most: usize,
    /// A `u64` on the device.
    pub(super) count: Option<Span<'a>>,
}

impl<'a> ElementCount<'a> {
    /// The memory from which the device reads it.
    pub(super) fn memory(&self) -> impl Iterator<Item = &Span<'a>> {
        self.count.iter()
    }
}

/// The first elements of memory, as many as a number on the device says: for example what [`copy_if`](crate::Algorithms::copy_if)
/// selected, for the next algorithm, without a host wait.
///
/// A number that is larger than the memory counts as the memory's length.
///
/// It cannot be downloaded, because the host does not know its length: download the memory and the number together, in one batch, and truncate;
/// or await the number and download a [`slice`](gpu_await::DeviceBuffer::slice).
pub struct UpTo<'a, T> {
    /// The memory, with its length.
    memory: (Span<'a>, usize),
    count: Span<'a>,
    element: PhantomData<&'a T>,
}

/// [`UpTo`], to be changed in place.
pub struct UpToMut<'a, M: ?Sized> {
    memory: &'a mut M,
    count: Span<'a>,
}

fn one<'a>(op: &'static str, count: &'a impl Readable<u64>) -> Result<Span<'a>> {
    match count.len() {
        1 => Ok(count.span()),
        found => {
            let what = "the number of elements";
            Err(ErrorDetail::WrongLength { op, what, expected: 1, found }.into())
        }
    }
}

impl<T, M: Readable<T>> Sequence<T> for M {
    fn elements(&self) -> Elements<'_> {
        Elements { span: self.span(), length: ElementCount { most: self.len(), count: None } }
    }
}

impl<T> Sequence<T> for UpTo<'_, T> {
    fn elements(&self) -> Elements<'_> {
        let (span, most) = self.memory.clone();
        Elements { span, length: ElementCount { most, count: Some(self.count.clone()) } }
    }
}

impl<T, M: Writable<T>> SequenceMut<T> for M {
    fn elements_mut(&mut self) -> Elements<'_> {
        let most = self.len();
        Elements { span: self.span_mut(), length: ElementCount { most, count: None } }
    }
}

impl<T, M: Writable<T>> SequenceMut<T> for UpToMut<'_, M> {
    fn elements_mut(&mut self) -> Elements<'_> {
        let length = ElementCount { most: self.memory.len(), count: Some(self.count.clone()) };
        Elements { span: self.memory.span_mut(), length }
    }
}

impl<T> fmt::Debug for UpTo<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UpTo({} elements at most)", self.memory.1)
    }
}

impl<M: Extent> fmt::Debug for UpToMut<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UpToMut({} elements at most)", self.memory.len())
    }
}

/// The elements of an array that count: as many as `count` says, if it is there.
pub(super) fn counted<'x, T>(x: &'x [T], count: &[u64]) -> &'x [T] {
    let most = count.first().and_then(|count| usize::try_from(*count).ok());
    &x[..most.map_or(x.len(), |most| most.min(x.len()))]
}
