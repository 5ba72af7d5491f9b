//! [`Source`]: host data that can be uploaded.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::error::Result;
use crate::memory::Element;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::pinned_pool::PinnedPool;

/// Host data that [`upload`](crate::Stream::upload) takes: `Vec<T>`, `Box<[T]>`, `Arc<[T]>`, `[T; N]`, and
/// [`PinnedBuffer<T>`], which is not copied. Sealed, because threads of this crate read and drop it. For other memory,
/// such as a mapped file, use [`upload_from`](crate::Stream::upload_from), which copies it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not host data of `{T}` that an upload can keep",
    label = "not owned host data of `{T}`",
    note = "pass a `Vec`, `Box<[T]>`, `Arc<[T]>`, an array or a `PinnedBuffer`; a borrowed slice is copied \
            by `upload_from(&[T])`"
)]
pub trait Source<T>: sealed::Sealed {
    #[doc(hidden)]
    fn into_pinned(self, pool: &Pool<'_>) -> Result<PinnedBuffer<T>>;
    #[doc(hidden)]
    fn into_staged(self) -> Staged<T>;
}

/// Host data to be copied by other threads.
#[doc(hidden)]
pub struct Staged<T>(pub(crate) StagedSource<T>);

pub(crate) enum StagedSource<T> {
    /// Goes to the device without a copy on the host.
    Pinned(PinnedBuffer<T>),
    Pageable(Arc<dyn AsRef<[T]> + Send + Sync>),
}

/// The pool that pinned memory comes from.
#[doc(hidden)]
pub struct Pool<'a>(pub(crate) &'a Arc<PinnedPool>);

mod sealed {
    pub trait Sealed {}
}

pub(crate) fn copied<T: Element>(source: &[T], pool: &Pool<'_>) -> Result<PinnedBuffer<T>> {
    let mut pinned = PinnedBuffer::new(pool.0, source.len())?;
    pinned.copy_from_slice(source);
    Ok(pinned)
}

impl<T> sealed::Sealed for Vec<T> {}
impl<T: Element> Source<T> for Vec<T> {
    fn into_pinned(self, pool: &Pool<'_>) -> Result<PinnedBuffer<T>> {
        copied(&self, pool)
    }

    fn into_staged(self) -> Staged<T> {
        Staged(StagedSource::Pageable(Arc::new(self)))
    }
}

impl<T> sealed::Sealed for Box<[T]> {}
impl<T: Element> Source<T> for Box<[T]> {
    fn into_pinned(self, pool: &Pool<'_>) -> Result<PinnedBuffer<T>> {
        copied(&self, pool)
    }

    fn into_staged(self) -> Staged<T> {
        Staged(StagedSource::Pageable(Arc::new(self)))
    }
}

impl<T> sealed::Sealed for Arc<[T]> {}
impl<T: Element> Source<T> for Arc<[T]> {
    fn into_pinned(self, pool: &Pool<'_>) -> Result<PinnedBuffer<T>> {
        copied(&self, pool)
    }

    fn into_staged(self) -> Staged<T> {
        Staged(StagedSource::Pageable(Arc::new(self)))
    }
}

impl<T, const N: usize> sealed::Sealed for [T; N] {}
impl<T: Element, const N: usize> Source<T> for [T; N] {
    fn into_pinned(self, pool: &Pool<'_>) -> Result<PinnedBuffer<T>> {
        copied(&self, pool)
    }

    fn into_staged(self) -> Staged<T> {
        Staged(StagedSource::Pageable(Arc::new(self)))
    }
}

impl<T> sealed::Sealed for PinnedBuffer<T> {}
impl<T: Element> Source<T> for PinnedBuffer<T> {
    fn into_pinned(self, _pool: &Pool<'_>) -> Result<PinnedBuffer<T>> {
        Ok(self)
    }

    fn into_staged(self) -> Staged<T> {
        Staged(StagedSource::Pinned(self))
    }
}
