//! Filling device memory: buffers that are made filled, and fills of memory that is there.
#![forbid(unsafe_code)]

use super::queue::Queue;
use crate::backend::Pattern;
use crate::error::{ErrorDetail, Result};
use crate::memory::buffer::DeviceBuffer;
use crate::memory::slab::{DeviceSlab, slab_len};
use crate::memory::view::Writable;
use crate::memory::{Element, Number};
use crate::submit::{Footprint, Raw};

impl Queue<'_> {
    /// See [`Stream::zeros`](crate::Stream::zeros).
    ///
    /// # Errors
    /// Out of device memory; a lost or closed device.
    #[track_caller]
    pub fn zeros<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        self.verb(|| {
            let zero = Pattern { bytes: [0; 16], len: 1 };
            if self.writes_down() {
                return self.make_filled("zeros", len, zero, len as u64 * size_of::<T>() as u64);
            }
            let fill = |raw: &Raw<'_>, ptr, bytes| Ok(raw.fill(ptr, zero, bytes)?);
            Ok(self.make(|| Footprint::new("zeros"), len, true, fill)?)
        })
    }

    /// See [`Stream::slab`](crate::Stream::slab).
    ///
    /// # Errors
    /// Out of device memory; a lost or closed device; in a graph.
    #[track_caller]
    pub fn slab<T: Element>(&self, blocks: usize, block_len: usize) -> Result<DeviceSlab<T>> {
        self.verb(|| {
            let len = slab_len::<T>(blocks, block_len)?;
            let zero = Pattern { bytes: [0; 16], len: 1 };
            // Not through a recorded list, which would keep a share of the memory.
            let fill = |raw: &Raw<'_>, ptr, bytes| Ok(raw.fill(ptr, zero, bytes)?);
            let memory = self.make(|| Footprint::new("slab"), len, true, fill)?;
            Ok(DeviceSlab::new(memory, block_len))
        })
    }

    /// See [`Stream::ones`](crate::Stream::ones).
    ///
    /// # Errors
    /// Out of device memory; a lost or closed device.
    #[track_caller]
    pub fn ones<T: Number>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        self.verb(|| self.full(len, T::ONE))
    }

    /// See [`Stream::full`](crate::Stream::full).
    ///
    /// # Errors
    /// Out of device memory; a lost or closed device; an element type of more than 16 bytes.
    #[track_caller]
    pub fn full<T: Element>(&self, len: usize, value: T) -> Result<DeviceBuffer<T>> {
        self.verb(|| {
            let pattern = self.pattern(value)?;
            if self.writes_down() {
                return self.make_filled("full", len, pattern, len as u64);
            }
            let fill = |raw: &Raw<'_>, ptr, _| self.put_fill(raw, ptr, pattern, len as u64);
            Ok(self.make(|| Footprint::new("full"), len, true, fill)?)
        })
    }

    /// See [`Stream::fill`](crate::Stream::fill).
    ///
    /// # Errors
    /// A lost or closed device; an element type of more than 16 bytes.
    #[track_caller]
    pub fn fill<T: Element>(&self, destination: &mut impl Writable<T>, value: T) -> Result<()> {
        self.verb(|| {
            let len = destination.len() as u64;
            let to = destination.span_mut();
            let mut footprint = Footprint::new("fill");
            footprint.overwrites(&to);
            let pattern = self.pattern(value).map_err(|error| footprint.poison(error))?;
            if to.range.is_empty() {
                return self.submit_nothing(&footprint);
            }
            Ok(self.submit_fill(&mut footprint, to.ptr(), pattern, len)?)
        })
    }

    /// Allocates in front of the recorded list, and fills behind it.
    fn make_filled<T: Element>(
        &self,
        name: &'static str,
        len: usize,
        pattern: Pattern,
        count: u64,
    ) -> Result<DeviceBuffer<T>> {
        let mut made = self.make(|| Footprint::new(name), len, false, |_, _, _| Ok(()))?;
        if made.size_bytes() > 0 {
            let all = made.span_mut();
            let mut footprint = Footprint::new(name);
            footprint.overwrites(&all);
            self.submit_fill(&mut footprint, all.ptr(), pattern, count)?;
        }
        Ok(made)
    }

    fn pattern<T: Element>(&self, value: T) -> Result<Pattern> {
        let source = bytemuck::bytes_of(&value);
        let mut bytes = [0; 16];
        let Some(head) = bytes.get_mut(..source.len()) else {
            let what = "filling with elements of more than 16 bytes";
            let device = self.stream.engine.label().to_owned();
            return Err(ErrorDetail::Unsupported { what, device }.into());
        };
        head.copy_from_slice(source);
        Ok(Pattern { bytes, len: source.len() })
    }
}
