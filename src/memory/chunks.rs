//! Device memory in chunks of equal length, like `chunks` of a slice.
#![forbid(unsafe_code)]

use std::iter::FusedIterator;

use super::Element;
use super::buffer::DeviceBuffer;
use super::view::{View, ViewMut};

/// The chunks of device memory for reading: an iterator, made by [`View::chunks`].
#[derive(Debug)]
#[must_use = "an iterator does nothing until it is asked"]
pub struct Chunks<'a, T> {
    rest: Option<View<'a, T>>,
    chunk_len: usize,
}

/// The disjoint chunks of device memory for writing: an iterator, made by [`ViewMut::chunks_mut`].
#[derive(Debug)]
#[must_use = "an iterator does nothing until it is asked"]
pub struct ChunksMut<'a, T> {
    rest: Option<ViewMut<'a, T>>,
    chunk_len: usize,
}

impl<T: Element> DeviceBuffer<T> {
    /// Borrows chunks of `chunk_len` elements for reading; the last one may be shorter.
    ///
    /// # Panics
    /// If `chunk_len` is 0, as slices' do.
    pub fn chunks(&self, chunk_len: usize) -> Chunks<'_, T> {
        self.view().chunks(chunk_len)
    }

    /// Borrows disjoint chunks of `chunk_len` elements, which different streams may write concurrently; the
    /// last one may be shorter.
    ///
    /// # Panics
    /// If `chunk_len` is 0, as slices' do.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// let streams = [device.stream()?, device.stream()?, device.stream()?];
    /// let mut x = streams[0].zeros::<u32>(10).queued()?;
    /// for (n, mut part) in (0..).zip(x.chunks_mut(4)) {
    ///     streams[n as usize].fill(&mut part, n).queued()?;
    /// }
    /// assert_eq!(streams[0].download(&x).await?, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn chunks_mut(&mut self, chunk_len: usize) -> ChunksMut<'_, T> {
        self.view_mut().chunks_mut(chunk_len)
    }
}

impl<'a, T: Element> View<'a, T> {
    /// Chunks of `chunk_len` elements; the last one may be shorter.
    ///
    /// # Panics
    /// If `chunk_len` is 0, as slices' do.
    pub fn chunks(self, chunk_len: usize) -> Chunks<'a, T> {
        assert!(chunk_len > 0, "chunks have at least one element");
        Chunks { rest: Some(self).filter(|view| !view.is_empty()), chunk_len }
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// Disjoint chunks of `chunk_len` elements; the last one may be shorter.
    ///
    /// # Panics
    /// If `chunk_len` is 0, as slices' do.
    pub fn chunks_mut(self, chunk_len: usize) -> ChunksMut<'a, T> {
        assert!(chunk_len > 0, "chunks have at least one element");
        ChunksMut { rest: Some(self).filter(|view| !view.is_empty()), chunk_len }
    }
}

macro_rules! iterators {
    ($($chunks:ident of $view:ident)+) => {$(
        impl<'a, T: Element> Iterator for $chunks<'a, T> {
            type Item = $view<'a, T>;

            fn next(&mut self) -> Option<$view<'a, T>> {
                let (chunk, rest) = self.rest.take()?.cut(self.chunk_len);
                self.rest = Some(rest).filter(|rest| !rest.is_empty());
                Some(chunk)
            }

            fn size_hint(&self) -> (usize, Option<usize>) {
                let left = self.rest.as_ref().map_or(0, |rest| rest.len().div_ceil(self.chunk_len));
                (left, Some(left))
            }
        }

        impl<T: Element> DoubleEndedIterator for $chunks<'_, T> {
            fn next_back(&mut self) -> Option<Self::Item> {
                let rest = self.rest.take()?;
                let (rest, chunk) = {
                    let last = (rest.len() - 1) / self.chunk_len * self.chunk_len;
                    rest.cut(last)
                };
                self.rest = Some(rest).filter(|rest| !rest.is_empty());
                Some(chunk)
            }
        }

        impl<T: Element> ExactSizeIterator for $chunks<'_, T> {}
        impl<T: Element> FusedIterator for $chunks<'_, T> {}
    )+};
}
iterators! { Chunks of View ChunksMut of ViewMut }
