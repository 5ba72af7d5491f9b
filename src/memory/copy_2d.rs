//! The geometry of 2-D copies.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::error::{ErrorDetail, Result};

/// The layout of the rows of a 2-D copy in the source and in the destination, in elements.
///
/// Row *i* goes from `source_start + i * source_pitch` to `destination_start + i *
/// destination_pitch`; each is `width` elements, and there are `height` of them. With a height of 1
/// it is a copy of `width` elements between two offsets.
///
/// # Examples
/// The inner 2 × 2 of a 4 × 4 matrix:
/// ```
/// use gpu_await::Copy2d;
/// # futures::executor::block_on(async {
/// # let device = gpu_await::Device::host();
/// # let stream = device.stream()?;
/// let matrix = stream.upload((0..16u32).collect::<Vec<_>>()).queued()?;
/// let mut inner = stream.zeros::<u32>(4).queued()?;
/// let rows = Copy2d::new(2, 2).source_start(5).source_pitch(4);
/// stream.copy_2d(&matrix, &mut inner, rows).queued()?;
/// assert_eq!(stream.download(&inner).await?, [5, 6, 9, 10]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a geometry does nothing until something is copied with it"]
pub struct Copy2d {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) source: Rows,
    pub(crate) destination: Rows,
}

/// The layout on one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rows {
    pub(crate) start: usize,
    pub(crate) pitch: usize,
}

impl Copy2d {
    /// `height` rows of `width` elements, contiguous from offset 0 on both sides.
    pub fn new(width: usize, height: usize) -> Self {
        let dense = Rows { start: 0, pitch: width };
        Copy2d { width, height, source: dense, destination: dense }
    }

    /// Sets where the first row begins in the source.
    pub fn source_start(mut self, start: usize) -> Self {
        self.source.start = start;
        self
    }

    /// Sets the distance from row to row in the source.
    pub fn source_pitch(mut self, pitch: usize) -> Self {
        self.source.pitch = pitch;
        self
    }

    /// Sets where the first row begins in the destination.
    pub fn destination_start(mut self, start: usize) -> Self {
        self.destination.start = start;
        self
    }

    /// Sets the distance from row to row in the destination.
    pub fn destination_pitch(mut self, pitch: usize) -> Self {
        self.destination.pitch = pitch;
        self
    }

    /// Whether the rows of that side leave no gaps.
    pub(crate) fn is_dense(&self, side: Rows) -> bool {
        self.height <= 1 || side.pitch == self.width
    }

    /// The range that the rows of the source span, out of `len` elements; empty if there is nothing to copy.
    ///
    /// # Errors
    /// As [`span`](Self::span).
    pub(crate) fn source_span(&self, op: &'static str, len: usize) -> Result<Range<usize>> {
        self.span(op, self.source, len, "elements in the source")
    }

    /// [`source_span`](Self::source_span) of the destination.
    ///
    /// # Errors
    /// As [`span`](Self::span).
    pub(crate) fn destination_span(&self, op: &'static str, len: usize) -> Result<Range<usize>> {
        self.span(op, self.destination, len, "elements in the destination")
    }

    /// The range that the rows on that side span, out of `len` elements; empty if there is nothing to copy.
    ///
    /// # Errors
    /// [`ErrorDetail::Pitch`], [`ErrorDetail::OutOfBounds`].
    fn span(
        &self,
        op: &'static str,
        side: Rows,
        len: usize,
        unit: &'static str,
    ) -> Result<Range<usize>> {
        let Rows { start, pitch } = side;
        if self.height > 1 && pitch < self.width {
            return Err(ErrorDetail::Pitch { op, width: self.width, pitch }.into());
        }
        let extent = match self.height.checked_sub(1) {
            Some(gaps) if self.width > 0 => {
                gaps.checked_mul(pitch).and_then(|rows| rows.checked_add(self.width))
            }
            _ => Some(0),
        };
        let end = extent.and_then(|extent| start.checked_add(extent)).unwrap_or(usize::MAX);
        if end > len {
            return Err(ErrorDetail::OutOfBounds { start, end, len, unit }.into());
        }
        Ok(start..end)
    }
}
