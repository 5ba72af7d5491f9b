//! Copies of parts and rows.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::queue::Queue;
use super::settle::Lent;
use crate::backend::{HostPtr, Place, RowCopy};
use crate::error::Result;
use crate::error::refused::Refused;
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::copy_2d::{Copy2d, Rows};
use crate::memory::pinned::PinnedBuffer;
use crate::memory::view::{Readable, Span, Writable};
use crate::submit::{Footprint, SubmitError};

impl Queue<'_> {
    /// Copies `source` to `start` of a buffer that is not shared yet. Tracked as a write of the whole buffer,
    /// so that the buffer keeps a single entry.
    pub(crate) fn upload_part<T: Element>(
        &self,
        source: PinnedBuffer<T>,
        destination: &mut DeviceBuffer<T>,
        start: usize,
    ) -> Result<Lent<PinnedBuffer<T>>> {
        let to = destination.slice(start..start + source.len())?.span().ptr();
        let whole = destination.span_mut();
        let mut footprint = Footprint::new("upload_staged");
        footprint.overwrites(&whole);
        footprint.lends(source.block());
        let (from, bytes) = (source.host(), source.size_bytes());
        let copied =
            self.submit(&mut footprint, 1, &mut |raw| Ok(raw.copy_to_device(to, from, bytes)?));
        Ok(self.lent(source, copied)?)
    }

    /// Copies from `start` of `source` into all of `destination`. Tracked as a read of the whole source, so
    /// that its entry is not split.
    pub(crate) fn download_part<T: Element>(
        &self,
        source: &impl Readable<T>,
        start: usize,
        destination: PinnedBuffer<T>,
    ) -> Result<Lent<PinnedBuffer<T>>> {
        debug_assert!(start + destination.len() <= source.len());
        let whole = source.span();
        let mut footprint = Footprint::new("download_staged");
        footprint.reads(&whole);
        footprint.lends(destination.block());
        let from = whole.ptr().offset((start * size_of::<T>()) as u64);
        let (to, bytes) = (destination.host(), destination.size_bytes());
        let copied =
            self.submit(&mut footprint, 1, &mut |raw| Ok(raw.copy_to_host(to, from, bytes)?));
        Ok(self.lent(destination, copied)?)
    }

    /// See [`Stream::copy_2d`](crate::Stream::copy_2d).
    ///
    /// # Errors
    /// Those listed there.
    #[track_caller]
    pub fn copy_2d<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: &mut impl Writable<T>,
        rows: Copy2d,
    ) -> Result<()> {
        self.verb(|| {
            const OP: &str = "copy_2d";
            let read = rows.source_span(OP, source.len());
            let (mut footprint, to) = written(OP, destination, rows)?;
            let from = match read {
                Ok(range) => part::<T>(&source.span(), range),
                Err(error) => return Err(footprint.poison(error)),
            };
            footprint.reads(&from);
            if from.range.is_empty() {
                return self.submit_nothing(&footprint);
            }
            let copy = row_copy::<T>(Place::Device(to.ptr()), Place::Device(from.ptr()), rows);
            Ok(self.submit_copy(&mut footprint, &copy)?)
        })
    }

    /// See [`Stream::upload_2d`](crate::Stream::upload_2d).
    ///
    /// # Errors
    /// Those listed there. [`Refused`] has the pinned buffer.
    #[track_caller]
    pub fn upload_2d<T: Element>(
        &self,
        source: PinnedBuffer<T>,
        destination: &mut impl Writable<T>,
        rows: Copy2d,
    ) -> Result<Lent<PinnedBuffer<T>>, Refused<PinnedBuffer<T>>> {
        self.verb(|| {
            let ticket = self.rows_in(&source, destination, rows);
            self.lent(source, ticket)
        })
    }

    fn rows_in<T: Element>(
        &self,
        source: &PinnedBuffer<T>,
        destination: &mut impl Writable<T>,
        rows: Copy2d,
    ) -> Result<u64, SubmitError> {
        const OP: &str = "upload_2d";
        let (mut footprint, to) = written(OP, destination, rows)?;
        let read = rows.source_span(OP, source.len());
        let start = match read {
            Ok(range) => range.start,
            Err(error) => return Err(footprint.poison(error).into()),
        };
        footprint.lends(source.block());
        if to.range.is_empty() {
            return Ok(self.submit_nothing(&footprint).map(|()| 0)?);
        }
        let from = HostPtr(source.host().0 + start * size_of::<T>());
        let copy = row_copy::<T>(Place::Device(to.ptr()), Place::Host(from), rows);
        self.submit(&mut footprint, 1, &mut |raw| Ok(raw.copy_rows(&copy)?))
    }

    /// See [`Stream::download_2d`](crate::Stream::download_2d).
    ///
    /// # Errors
    /// Those listed there. [`Refused`] has the pinned buffer.
    #[track_caller]
    pub fn download_2d<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: PinnedBuffer<T>,
        rows: Copy2d,
    ) -> Result<Lent<PinnedBuffer<T>>, Refused<PinnedBuffer<T>>> {
        self.verb(|| {
            let ticket = self.rows_out(source, &destination, rows);
            self.lent(destination, ticket)
        })
    }

    fn rows_out<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: &PinnedBuffer<T>,
        rows: Copy2d,
    ) -> Result<u64, SubmitError> {
        const OP: &str = "download_2d";
        let start = rows.destination_span(OP, destination.len())?.start;
        let from = part::<T>(&source.span(), rows.source_span(OP, source.len())?);
        let mut footprint = Footprint::new(OP);
        footprint.reads(&from);
        footprint.lends(destination.block());
        if from.range.is_empty() {
            return Ok(self.submit_nothing(&footprint).map(|()| 0)?);
        }
        let to = HostPtr(destination.host().0 + start * size_of::<T>());
        let copy = row_copy::<T>(Place::Host(to), Place::Device(from.ptr()), rows);
        self.submit(&mut footprint, 1, &mut |raw| Ok(raw.copy_rows(&copy)?))
    }
}

/// The footprint of a copy that writes `rows` of `destination`, and the range that they span. Gaps between
/// rows keep their contents, so only rows without gaps count as an overwrite.
fn written<'a, T: Element>(
    op: &'static str,
    destination: &'a mut impl Writable<T>,
    rows: Copy2d,
) -> Result<(Footprint<'a>, Span<'a>)> {
    let len = destination.len();
    let whole = destination.span_mut();
    let mut footprint = Footprint::new(op);
    let range = match rows.destination_span(op, len) {
        Ok(range) => range,
        Err(error) => {
            footprint.overwrites(&whole);
            return Err(footprint.poison(error));
        }
    };
    let to = part::<T>(&whole, range);
    if rows.is_dense(rows.destination) {
        footprint.overwrites(&to);
    } else {
        footprint.updates(&to);
    }
    Ok((footprint, to))
}

/// The sub-range `range`, in elements, of `span`.
fn part<'a, T>(span: &Span<'a>, range: Range<usize>) -> Span<'a> {
    let bytes = |elements: usize| span.range.start + (elements * size_of::<T>()) as u64;
    Span { range: bytes(range.start)..bytes(range.end), ..*span }
}

fn row_copy<T>(to: Place, from: Place, rows: Copy2d) -> RowCopy {
    let bytes = |elements: usize| (elements * size_of::<T>()) as u64;
    // Nothing follows the last row: a single row may have any pitch.
    let pitch = |side: Rows| bytes(if rows.height > 1 { side.pitch } else { rows.width });
    RowCopy {
        to,
        to_pitch: pitch(rows.destination),
        from,
        from_pitch: pitch(rows.source),
        row_bytes: bytes(rows.width),
        rows: rows.height as u64,
    }
}
