//! [`Mapped`]: pinned host memory that kernels use in place.
//!
//! | used by | until |
//! |---|---|
//! | operations, by the rules of device memory | each is complete |
//! | the host, as a slice | the borrow ends, during which no operation can use it |
//!
//! # Invariants
//! 1. The host gets its slice when every use is complete (`the_host_gets_its_slice_behind_every_use`).
//! 2. The memory returns to its pool behind every use (`a_dropped_mapping_stays_until_its_kernel_ends`); the pool of a lost device
//!    neither hands out nor unmaps anything.
//! 3. Memory that a lost device may still use is quarantined when it is dropped, like lent memory
//!    (`what_a_loss_sets_aside_is_counted_once`).

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::Element;
use super::allocation::Allocation;
use super::buffer::DeviceBuffer;
use super::pinned::PinnedBuffer;
use super::reclaim::retired::LentBlock;
use super::view::{Extent, Readable, Span, ViewMut, Writable, sealed};
use crate::backend::DevicePtr;

/// `len` elements of pinned host memory, mapped into the device's address space: kernels read and write it in
/// place, over the bus.
///
/// Created by [`PinnedBuffer::into_mapped`]. For a small request of a few kilobytes, one launch replaces an
/// upload, a launch and a download. Data that a kernel reads more than once belongs in device memory.
///
/// It is passed to operations like a [`DeviceBuffer`], with the same rules of ordering, errors and drops.
///
/// # Examples
/// ```
/// use gpu_await::{Device, kernels};
/// # futures::executor::block_on(async {
/// # let device = Device::host();
/// # let stream = device.stream()?;
/// let scale = kernels::scale::load(&device).await?;
/// let mut request = stream.pinned::<f32>(3)?;
/// request.copy_from_slice(&[1.0, 2.0, 3.0]);
/// let mut request = request.into_mapped();
/// scale.launch(&stream, 2.0, &mut request).queued()?;
/// assert_eq!(*request.host().await?, [2.0, 4.0, 6.0]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
///
/// # Source
/// `cuMemHostGetDevicePointer`.
pub struct Mapped<T> {
    /// The memory as the device sees it; keeps the block until the last use is complete.
    device: DeviceBuffer<T>,
    /// The same memory on the host.
    host: PinnedBuffer<T>,
}

impl<T: Element> PinnedBuffer<T> {
    /// Maps the buffer for kernels that use it in place. Puts nothing on a stream.
    #[must_use]
    pub fn into_mapped(self) -> Mapped<T> {
        let (block, bytes) = (self.block().clone(), self.size_bytes());
        let engine = block.engine().clone();
        let ptr = if bytes > 0 { DevicePtr(self.device_ptr()) } else { DevicePtr::NULL };
        if bytes > 0 {
            // SAFETY: the block is mapped for the device at that address, and its owner is dropped behind the
            // last use.
            unsafe { engine.backend.adopt(ptr, bytes) };
        }
        let keeper: Arc<dyn LentBlock> = block;
        let memory = Allocation::foreign(&engine, ptr, bytes, None, Box::new(keeper));
        let memory = memory.on_host(self.host());
        Mapped { device: DeviceBuffer::new(memory, self.len()), host: self }
    }
}

impl<T: Element> Mapped<T> {
    /// Borrows all of it for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        self.device.view_mut()
    }

    /// The memory for the host to use; the caller has checked that no use is pending.
    pub(crate) fn host_mut(&mut self) -> &mut PinnedBuffer<T> {
        &mut self.host
    }

    /// The memory as the device sees it, and the same memory on the host.
    pub(super) fn into_parts(self) -> (DeviceBuffer<T>, PinnedBuffer<T>) {
        (self.device, self.host)
    }

    /// The host memory alone; the caller has checked that no use is pending.
    pub(crate) fn into_host(self) -> PinnedBuffer<T> {
        self.host
    }
}

/// Reads and borrows go to the device memory.
impl<T> Deref for Mapped<T> {
    type Target = DeviceBuffer<T>;

    fn deref(&self) -> &DeviceBuffer<T> {
        &self.device
    }
}

impl<T> sealed::Sealed for Mapped<T> {}

impl<T: Element> Extent for Mapped<T> {
    fn len(&self) -> usize {
        self.device.len()
    }
}

impl<T: Element> Readable<T> for Mapped<T> {
    fn span(&self) -> Span<'_> {
        self.device.span()
    }
}

impl<T: Element> Writable<T> for Mapped<T> {
    fn span_mut(&mut self) -> Span<'_> {
        self.device.span_mut()
    }
}

impl<T> fmt::Debug for Mapped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapped({:?})", self.device)
    }
}
