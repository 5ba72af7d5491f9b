//! [`HostSlab`]: pinned memory in blocks of one size, which copies borrow.
//!
//! | a block | is used by | until |
//! |---|---|---|
//! | idle | nothing: the host may read and write it | a view is passed to an operation |
//! | read | operations, possibly several at once: the host may read it | each is complete |
//! | written | one operation, perhaps with others behind it | all are complete |
//! | failed | nothing; an operation that would have written it failed | another one overwrites all of it |
//!
//! Its uses are tracked like those of a [`DeviceSlab`](super::slab::DeviceSlab)'s blocks. No kernel gets the slab as a whole: every use of a block is
//! declared, so the host may access one block while the device uses others.
//!
//! # Invariants
//! 1. The host gets a slice of a block when every use that conflicts with it is complete (`the_host_gets_blocks_that_nobody_uses`).
//! 2. A block stays with its owner, whatever happens to the operations that use it (`blocks_stay_with_their_slab`).
//! 3. The memory returns to its pool behind every use; memory that a lost device may still use is quarantined when the slab
//!    is dropped (`a_loss_sets_the_slab_aside`).

use std::fmt;

use super::Element;
use super::buffer::DeviceBuffer;
use super::pinned::PinnedBuffer;
use super::slab::{divide, view, views, views_mut};
use super::view::{View, ViewMut};
use crate::error::Result;

/// Pinned host memory in blocks of one size, each of which several copies may borrow at once.
///
/// Created by [`Device::host_slab`](crate::Device::host_slab), filled with zeros. It is the host tier of a cache whose other tier is a
/// [`DeviceSlab`](crate::DeviceSlab): [`copy_many`](crate::Stream::copy_many) moves blocks between the two, and kernels may use single blocks in
/// place.
///
/// # Ownership
/// Operations borrow blocks only for the call, by views. Unlike a [`PinnedBuffer`], which is lent to one copy and comes back from its
/// future, a block stays here: dropping a future loses nothing, and the block is free again when the copy is complete. To read and write
/// blocks on the host, use [`host`](Self::host) and [`host_mut`](Self::host_mut), which wait for that, or [`try_host`](Self::try_host) and
/// [`try_host_mut`](Self::try_host_mut), which do not. To share a slab among tasks, put it behind a lock, wait with [`idle`](Self::idle),
/// whose future borrows nothing, and lock it for the call.
///
/// After a drop, the memory returns to its device's pool as soon as every use is complete. After the loss of the device, memory that
/// operations may still use is quarantined for the life of the process and counted:
/// [`Stats::quarantined_bytes`](crate::Stats::quarantined_bytes).
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// # let device = gpu_await::Device::host();
/// # let stream = device.stream()?;
/// use gpu_await::CopyBy;
/// let mut host = device.host_slab::<f32>(8, 256).await?;
/// let mut cache = stream.slab::<f32>(4, 256).queued()?;
/// host.host_mut(5).await?.fill(2.5);
/// // Blocks 5 and 6 go to the device; the future may be dropped.
/// let pieces = host.blocks(&[5, 6])?.into_iter().zip(cache.blocks_mut(&[1, 0])?);
/// drop(stream.copy_many(pieces.collect(), CopyBy::Auto));
/// // While they are read, so may the host; who writes waits.
/// assert_eq!(host.host(5).await?[0], 2.5);
/// host.host_mut(5).await?.fill(0.0);
/// assert_eq!(stream.download(&cache.block(1)?).await?, [2.5; 256]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
///
/// # Source
/// `cuMemHostRegister`, `cuMemHostGetDevicePointer`.
pub struct HostSlab<T> {
    /// The memory as the device sees it; keeps it until the last use is complete.
    device: DeviceBuffer<T>,
    /// The same memory on the host. Never dereferenced: that would make a reference to all of it.
    host: PinnedBuffer<T>,
    block_len: usize,
}

impl<T: Element> HostSlab<T> {
    /// A slab in `memory`, whose length is a whole number of blocks.
    pub(crate) fn new(memory: PinnedBuffer<T>, block_len: usize) -> Self {
        let (mut device, host) = memory.into_mapped().into_parts();
        divide(&mut device, block_len);
        HostSlab { device, host, block_len }
    }

    /// The number of elements in all blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.device.len()
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.device.is_empty()
    }

    /// The number of blocks.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.len().checked_div(self.block_len).unwrap_or(0)
    }

    /// The number of elements of a block.
    #[must_use]
    pub fn block_len(&self) -> usize {
        self.block_len
    }

    /// Borrows a block for operations that read it.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`](crate::ErrorDetail::OutOfBounds): there is no such block.
    pub fn block(&self, number: u32) -> Result<View<'_, T>> {
        view(&self.device, self.block_len, number)
    }

    /// Borrows a block for operations that write it.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`](crate::ErrorDetail::OutOfBounds): there is no such block.
    pub fn block_mut(&mut self, number: u32) -> Result<ViewMut<'_, T>> {
        Ok(views_mut(&mut self.device, self.block_len, &[number])?.remove(0))
    }

    /// Borrows blocks for operations that read them, in that order.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`](crate::ErrorDetail::OutOfBounds): there is no such block.
    pub fn blocks(&self, numbers: &[u32]) -> Result<Vec<View<'_, T>>> {
        views(&self.device, self.block_len, numbers)
    }

    /// Borrows blocks for operations that write them, in that order.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`](crate::ErrorDetail::OutOfBounds): there is no such block;
    /// [`ErrorDetail::RepeatedBlock`](crate::ErrorDetail::RepeatedBlock): a block is listed twice.
    pub fn blocks_mut(&mut self, numbers: &[u32]) -> Result<Vec<ViewMut<'_, T>>> {
        views_mut(&mut self.device, self.block_len, numbers)
    }

    /// A block for the host to read. The caller has checked that it exists and that no write of it is pending.
    pub(crate) fn slice(&self, number: u32) -> &[T] {
        // SAFETY: see `start`. Nothing pending writes the block, and submitting a write requires an exclusive borrow of the slab.
        unsafe { std::slice::from_raw_parts(self.start(number), self.block_len) }
    }

    /// A block for the host to write. The caller has checked that it exists and that no use of it is pending.
    pub(crate) fn slice_mut(&mut self, number: u32) -> &mut [T] {
        let start = self.start(number).cast_mut();
        // SAFETY: see `start`. Nothing pending uses the block, and nothing can be submitted while the slab is borrowed.
        unsafe { std::slice::from_raw_parts_mut(start, self.block_len) }
    }

    /// The first element of a block: the memory is mapped while `host` lives, is aligned for `T` like any buffer of `T`, and holds `block_len`
    /// elements from there on, for which any bits are valid.
    fn start(&self, number: u32) -> *const T {
        let offset = number as usize * self.block_len * size_of::<T>();
        (self.host.host().0 + offset) as *const T
    }
}

impl<T> fmt::Debug for HostSlab<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostSlab(blocks of {} elements, {:?})", self.block_len, self.device)
    }
}
