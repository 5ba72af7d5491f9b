//! [`DeviceSlab`]: device memory in blocks of one size, with uses tracked by block.
//!
//! | passed to an operation as | is ordered by | the operation |
//! |---|---|---|
//! | [`block`](DeviceSlab::block), [`blocks`](DeviceSlab::blocks) | these blocks | touches only them |
//! | [`naming`](DeviceSlab::naming) | the named blocks; in lists, on host devices and in operations other than launches, the whole slab | is a kernel that gets the whole slab and finds its blocks by index |
//! | itself | the whole slab | may touch all of it |
//!
//! # Invariants
//! 1. Operations that name no common block do not wait for each other (`launches_wait_for_the_blocks_that_they_name`).
//! 2. A launch that touches blocks other than those it names stays within the slab, which outlives it and holds only its owner's data, as it
//!    was filled with zeros (`a_slab_outlives_a_launch_that_names_nothing`, `a_new_slab_is_zeros`).
#![forbid(unsafe_code)]

use std::fmt;

use super::Element;
use super::allocation::{BlockSet, NamedUses};
use super::buffer::DeviceBuffer;
use super::view::{Extent, Readable, Span, Tracking, View, ViewMut, Writable, sealed};
use crate::error::{ErrorDetail, Result};

/// Device memory in blocks of one size: for example a model's cache, in which each request owns some blocks.
///
/// Created by [`Stream::slab`](crate::Stream::slab), filled with zeros. The owner assigns the blocks; the library tracks each block's uses,
/// in 16 bytes of host memory, so naming a thousand blocks takes some microseconds.
///
/// Pass single blocks to operations as views ([`block`](Self::block), [`blocks_mut`](Self::blocks_mut)), and the slab itself to kernels that
/// find their blocks by index: [`naming`](Self::naming) those blocks orders the launch only with other uses of them.
///
/// # Ownership
/// As for a [`DeviceBuffer`]. Operations borrow blocks only for the call, so a task that owns the slab, or locks it for the call, can
/// serve many requests.
///
/// # Errors follow blocks
/// An operation that fails poisons the blocks that it would have written, as a whole: for a launch, all that it [names](Self::naming_mut) for
/// writing, even those that the kernel would only have read. A copy or a fill that overwrites a whole block heals it.
/// [`clear_poison`](ViewMut::clear_poison) of a block accepts its old contents, which are intact after a refused launch; the target of a failed copy
/// or fill must be overwritten. A block keeps its poison when it changes hands: overwrite all of it for its next owner.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// # let device = gpu_await::Device::host();
/// # let stream = device.stream()?;
/// use gpu_await::CopyBy;
/// let mut cache = stream.slab::<f32>(100, 256).queued()?;
/// stream.fill(&mut cache.block_mut(7)?, 1.5).queued()?;
/// // Copied on the device: block 7 to 40.
/// let mut pair = cache.blocks_mut(&[7, 40])?.into_iter();
/// if let (Some(from), Some(to)) = (pair.next(), pair.next()) {
///     stream.copy_many(vec![(from.view(), to)], CopyBy::Auto).queued()?;
/// }
/// assert_eq!(stream.download(&cache.block(40)?).await?, [1.5; 256]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
pub struct DeviceSlab<T> {
    memory: DeviceBuffer<T>,
    block_len: usize,
}

/// A slab, with the blocks that a launch names for reading; see [`DeviceSlab::naming`].
pub struct NamedBlocks<'a, T> {
    slab: &'a DeviceSlab<T>,
    blocks: NamedUses,
}

/// A slab, with the blocks that a launch names for reading and writing; see [`DeviceSlab::naming_mut`].
pub struct NamedBlocksMut<'a, T> {
    slab: &'a mut DeviceSlab<T>,
    blocks: NamedUses,
}

/// The number of elements in that many blocks.
///
/// # Errors
/// [`ErrorDetail::TooLarge`], also for more blocks than a `u32` can number.
pub(crate) fn slab_len<T>(blocks: usize, block_len: usize) -> Result<usize> {
    let is_numbered = |len: &usize| *len == 0 || u32::try_from(blocks).is_ok();
    let (len, asked) = (blocks.checked_mul(block_len), blocks.saturating_mul(block_len));
    let too_large = ErrorDetail::TooLarge { len: asked, element_bytes: size_of::<T>() };
    Ok(len.filter(is_numbered).ok_or(too_large)?)
}

impl<T: Element> DeviceSlab<T> {
    /// A slab in a buffer that is all of its memory, and was written as a whole.
    pub(crate) fn new(mut memory: DeviceBuffer<T>, block_len: usize) -> Self {
        divide(&mut memory, block_len);
        DeviceSlab { memory, block_len }
    }

    /// The number of elements in all blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
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

    /// Borrows a block for reading.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`]: there is no such block.
    pub fn block(&self, number: u32) -> Result<View<'_, T>> {
        view(&self.memory, self.block_len, number)
    }

    /// Borrows a block for writing.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`]: there is no such block.
    pub fn block_mut(&mut self, number: u32) -> Result<ViewMut<'_, T>> {
        Ok(views_mut(&mut self.memory, self.block_len, &[number])?.remove(0))
    }

    /// Borrows blocks for reading, in that order.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`]: there is no such block.
    pub fn blocks(&self, numbers: &[u32]) -> Result<Vec<View<'_, T>>> {
        views(&self.memory, self.block_len, numbers)
    }

    /// Borrows blocks for writing, in that order.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`]: there is no such block; [`ErrorDetail::RepeatedBlock`]: a block is listed twice.
    pub fn blocks_mut(&mut self, numbers: &[u32]) -> Result<Vec<ViewMut<'_, T>>> {
        views_mut(&mut self.memory, self.block_len, numbers)
    }

    /// Borrows the slab for a kernel that reads blocks of it by index, and names those blocks; see [`naming_mut`](Self::naming_mut).
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`]: there is no such block.
    pub fn naming(&self, numbers: &[u32]) -> Result<NamedBlocks<'_, T>> {
        Ok(NamedBlocks { blocks: self.set(numbers)?, slab: self })
    }

    /// Borrows the slab for a kernel that reads and writes blocks of it by index, and names those blocks. Pass it for `&mut [T]`: the kernel
    /// gets the whole slab, and the indices as another argument.
    ///
    /// # Ordering
    /// The launch waits for other uses of the blocks that it names, and they for it; blocks that it only [reads](NamedBlocksMut::reading) are named
    /// separately. The names have no other effect: the kernel's declaration vouches that no index leaves the slab, so if a block is left out, the
    /// kernel may see its old values.
    ///
    /// In the list of a [replayed batch](crate::Stream::replay) or of a [graph](crate::Graph), other launches of the list are ordered with it as with
    /// a use of the whole slab, so the list keeps its shape whatever the blocks. In a graph, and on a host device, whose twin gets a slice of the
    /// whole slab, all other operations are too. Operations other than launches, such as a fill or a download, use the whole slab, whatever is named.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`]: there is no such block. A block may be named twice.
    ///
    /// # Examples
    /// ```
    /// use gpu_await::{Device, Grid, LaunchConfig, kernel};
    ///
    /// kernel! {
    ///     /// Adds `by` to each element of the blocks; an index that is too large touches nothing.
    ///     unsafe fn add_to(slab: &mut [f32], blocks: &[u32], block_len: u32, by: f32);
    ///     launch = LaunchConfig::new(blocks.len().max(1), 256);
    ///     host = twin;
    /// }
    /// fn twin(_: &Grid, slab: &mut [f32], blocks: &[u32], block_len: u32, by: f32) {
    ///     let mut all: Vec<_> = slab.chunks_exact_mut(block_len as usize).collect();
    ///     for block in blocks {
    ///         if let Some(block) = all.get_mut(*block as usize) {
    ///             block.iter_mut().for_each(|x| *x += by);
    ///         }
    ///     }
    /// }
    ///
    /// # futures::executor::block_on(async {
    /// # let device = Device::host();
    /// # let stream = device.stream()?;
    /// let add_to = add_to::load(&device).await?;
    /// let mut cache = stream.slab::<f32>(100, 16).queued()?;
    /// let mine = [3, 70, 9];
    /// let indices = stream.upload_from(&mine).queued()?;
    /// add_to.launch(&stream, &mut cache.naming_mut(&mine)?, &indices, 16, 2.0).queued()?;
    /// assert_eq!(stream.download(&cache.block(70)?).await?, [2.0; 16]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn naming_mut(&mut self, numbers: &[u32]) -> Result<NamedBlocksMut<'_, T>> {
        Ok(NamedBlocksMut { blocks: self.set(numbers)?, slab: self })
    }

    fn set(&self, numbers: &[u32]) -> Result<NamedUses> {
        check_all(numbers, self.block_count())?;
        Ok(NamedUses { used: BlockSet(numbers.to_vec()), read: BlockSet::default() })
    }
}

impl<T: Element> NamedBlocksMut<'_, T> {
    /// Names additional blocks that the kernel only reads: the launch runs beside others that read them, and if it fails they keep their contents.
    /// Blocks that are also [named for writing](DeviceSlab::naming_mut) count as written.
    ///
    /// For example, a step that reads a thousand blocks of a request, some of them shared with other requests, and appends to one block names that
    /// one for writing and the others for reading.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`]: there is no such block. A block may be named twice.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let mut cache = stream.slab::<f32>(100, 16).queued()?;
    /// let step = cache.naming_mut(&[9])?.reading(&[3, 70])?;
    /// # drop(step);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn reading(mut self, numbers: &[u32]) -> Result<Self> {
        check_all(numbers, self.slab.block_count())?;
        let mut written = vec![0_u64; self.slab.block_count().div_ceil(64)];
        self.blocks
            .used
            .0
            .iter()
            .for_each(|number| written[*number as usize / 64] |= 1 << (number % 64));
        let is_read = |number: &&u32| written[**number as usize / 64] >> (*number % 64) & 1 == 0;
        self.blocks.read.0.extend(numbers.iter().filter(is_read));
        Ok(self)
    }
}

/// Switches to tracking by block. Empty memory has no blocks.
pub(super) fn divide<T: Element>(memory: &mut DeviceBuffer<T>, block_len: usize) {
    if memory.size_bytes() == 0 {
        return;
    }
    match memory.memory_mut() {
        Some(memory) => memory.divide((block_len * size_of::<T>()) as u64),
        None => debug_assert!(false, "the caller made it just now"),
    }
}

fn check_all(numbers: &[u32], count: usize) -> Result<()> {
    numbers.iter().max().map_or(Ok(()), |last| check(*last, count))
}

fn check(number: u32, count: usize) -> Result<()> {
    let start = number as usize;
    if start < count {
        return Ok(());
    }
    Err(ErrorDetail::OutOfBounds { start, end: start + 1, len: count, unit: "blocks" }.into())
}

pub(super) fn view<T: Element>(
    memory: &DeviceBuffer<T>,
    block_len: usize,
    number: u32,
) -> Result<View<'_, T>> {
    check(number, memory.len().checked_div(block_len).unwrap_or(0))?;
    memory.slice(number as usize * block_len..(number as usize + 1) * block_len)
}

pub(super) fn views<'a, T: Element>(
    memory: &'a DeviceBuffer<T>,
    block_len: usize,
    numbers: &[u32],
) -> Result<Vec<View<'a, T>>> {
    check_all(numbers, memory.len().checked_div(block_len).unwrap_or(0))?;
    let (memory, start) = memory.place();
    let block_bytes = (block_len * size_of::<T>()) as u64;
    let at = |number: &u32| start + u64::from(*number) * block_bytes;
    let view = |number: &u32| View::new(memory, at(number), block_len, Tracking::Tracked);
    Ok(numbers.iter().map(view).collect())
}

pub(super) fn views_mut<'a, T: Element>(
    memory: &'a mut DeviceBuffer<T>,
    block_len: usize,
    numbers: &[u32],
) -> Result<Vec<ViewMut<'a, T>>> {
    let count = memory.len().checked_div(block_len).unwrap_or(0);
    let mut seen = vec![0_u64; if numbers.len() > 1 { count.div_ceil(64) } else { 0 }];
    for (at, number) in numbers.iter().enumerate() {
        check(*number, count)?;
        let Some(word) = seen.get_mut(*number as usize / 64) else { continue };
        if *word >> (number % 64) & 1 == 1 {
            let first = numbers.iter().position(|other| other == number).unwrap_or(at);
            return Err(ErrorDetail::RepeatedBlock { block: *number, first, second: at }.into());
        }
        *word |= 1 << (number % 64);
    }
    let (memory, start) = memory.place();
    let block_bytes = (block_len * size_of::<T>()) as u64;
    let view =
        |number: &u32| ViewMut::new(memory, start + u64::from(*number) * block_bytes, block_len);
    Ok(numbers.iter().map(view).collect())
}

impl<T> sealed::Sealed for DeviceSlab<T> {}
impl<T> sealed::Sealed for NamedBlocks<'_, T> {}
impl<T> sealed::Sealed for NamedBlocksMut<'_, T> {}

impl<T: Element> Extent for DeviceSlab<T> {
    fn len(&self) -> usize {
        self.memory.len()
    }
}

impl<T: Element> Readable<T> for DeviceSlab<T> {
    fn span(&self) -> Span<'_> {
        self.memory.span()
    }
}

impl<T: Element> Writable<T> for DeviceSlab<T> {
    fn span_mut(&mut self) -> Span<'_> {
        self.memory.span_mut()
    }
}

impl<T: Element> Extent for NamedBlocks<'_, T> {
    fn len(&self) -> usize {
        self.slab.len()
    }
}

impl<T: Element> Readable<T> for NamedBlocks<'_, T> {
    fn span(&self) -> Span<'_> {
        Span { named: Some(&self.blocks), ..self.slab.span() }
    }
}

impl<T: Element> Extent for NamedBlocksMut<'_, T> {
    fn len(&self) -> usize {
        self.slab.len()
    }
}

impl<T: Element> Readable<T> for NamedBlocksMut<'_, T> {
    fn span(&self) -> Span<'_> {
        Span { named: Some(&self.blocks), ..self.slab.span() }
    }
}

impl<T: Element> Writable<T> for NamedBlocksMut<'_, T> {
    fn span_mut(&mut self) -> Span<'_> {
        Span { named: Some(&self.blocks), ..self.slab.span_mut() }
    }
}

impl<T> fmt::Debug for DeviceSlab<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceSlab(blocks of {} elements, {:?})", self.block_len, self.memory)
    }
}

impl<T> fmt::Debug for NamedBlocks<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NamedBlocks({} of {:?})", self.blocks.used.0.len(), self.slab)
    }
}

impl<T> fmt::Debug for NamedBlocksMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NamedUses { used, read } = &self.blocks;
        let (written, read) = (used.0.len(), read.0.len());
        write!(f, "NamedBlocksMut({written} written, {read} read of {:?})", self.slab)
    }
}
