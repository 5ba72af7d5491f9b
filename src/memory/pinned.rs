//! Pinned host memory for users: [`PinnedBuffer`] and [`PinnedFlag`]. Both come from the [`PinnedPool`].

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::pinned_pool::{MOST_CUT_BYTES, PinnedBlock, PinnedPool};
use super::view::checked;
use super::{Element, must_fit};
use crate::backend::HostPtr;
use crate::error::{ErrorDetail, Result};
use gpu_await_protocol::buddy::LEAST_BYTES;

/// `len` elements in pinned host memory: copies to and from the device run at full speed and without a host
/// thread.
///
/// It dereferences to `[T]` and is aligned to 128 bytes; a part that was split off is aligned to its elements. A new buffer is zeroed, even if the
/// pool reuses memory. It is *lent* to a copy and comes back from the copy's future; when dropped, it returns to its device's pool.
///
/// To copy to or from a part, [`split_off`](Self::split_off) that part, lend it, and rejoin the two with
/// [`unsplit`](Self::unsplit): parts are independent buffers, so one may be filled while the device copies
/// another.
///
/// # Examples
/// The second half is lent while the first is written:
/// ```
/// # futures::executor::block_on(async {
/// # let device = gpu_await::Device::host();
/// # let stream = device.stream()?;
/// let x = stream.full(4, 7u32).queued()?;
/// let mut whole = stream.pinned::<u32>(8)?;
/// let part = whole.split_off(4)?;
/// let copy = stream.download_into(&x, part);
/// whole.fill(1);
/// whole.unsplit(copy.await?).expect("what was split off");
/// assert_eq!(whole, [1, 1, 1, 1, 7, 7, 7, 7]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
pub struct PinnedBuffer<T> {
    block: Arc<PinnedBlock>,
    /// Its exclusive part of the block, in bytes: at least `len` elements, aligned for an element.
    room: Range<usize>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> PinnedBuffer<T> {
    /// Memory for a copy that overwrites all of it before it can be read: until then it may hold an earlier
    /// user's data.
    pub(crate) fn new(pool: &Arc<PinnedPool>, len: usize) -> Result<Self> {
        Ok(PinnedBuffer::over(pool.get(bytes_of::<T>(len)?)?, len))
    }

    /// `len` elements in a block that is large enough; the only constructor.
    fn over(block: Arc<PinnedBlock>, len: usize) -> Self {
        const { must_fit::<T>(LEAST_BYTES as u64) };
        let room = 0..block.bytes() as usize;
        PinnedBuffer { block, room, len, element: PhantomData }
    }

    /// [`new`](Self::new) for users: zeroed, so that an earlier user's data does not leak.
    pub(crate) fn zeroed(pool: &Arc<PinnedPool>, len: usize) -> Result<Self> {
        let mut fresh = PinnedBuffer::new(pool, len)?;
        bytemuck::fill_zeroes(&mut fresh);
        Ok(fresh)
    }

    /// [`zeroed`](Self::zeroed) if the pool has such memory and clearing it is quick.
    pub(crate) fn pooled_zeroed(pool: &Arc<PinnedPool>, len: usize) -> Result<Option<Self>> {
        // Clearing a block cut from a slab takes no longer than a wake-up.
        if bytes_of::<T>(len)? > MOST_CUT_BYTES {
            return Ok(None);
        }
        let mut pooled = PinnedBuffer::pooled(pool, len)?;
        if let Some(pooled) = &mut pooled {
            bytemuck::fill_zeroes(pooled);
        }
        Ok(pooled)
    }

    /// [`new`](Self::new) if the pool has such memory: quick.
    pub(crate) fn pooled(pool: &Arc<PinnedPool>, len: usize) -> Result<Option<Self>> {
        let block = pool.get_pooled(bytes_of::<T>(len)?);
        Ok(block.map(|block| PinnedBuffer::over(block, len)))
    }

    /// The same memory with another length, which must fit.
    pub(crate) fn resized(self, len: usize) -> Self {
        assert!(len <= self.room.len() / size_of::<T>(), "no room for {len} elements");
        PinnedBuffer { len, ..self }
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the device address of the memory, as a number: the one that `cuMemHostGetDevicePointer`
    /// returns. To use it, see [`Uses::lends`](crate::Uses::lends).
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.block.device().0 + self.room.start as u64
    }

    /// Splits in two: this buffer keeps the elements before `at`, and those from `at` on are returned.
    ///
    /// Each can be lent, filled and dropped without the other; the memory returns to its pool with the last
    /// of them.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] if `at > len`; nothing is split then.
    pub fn split_off(&mut self, at: usize) -> Result<PinnedBuffer<T>> {
        checked(..at, self.len)?;
        let middle = self.room.start + at * size_of::<T>();
        let room = middle..std::mem::replace(&mut self.room.end, middle);
        let len = std::mem::replace(&mut self.len, at);
        Ok(PinnedBuffer { block: self.block.clone(), room, len: len - at, element: PhantomData })
    }

    /// Rejoins a part that was [split off](Self::split_off) the end of this buffer. Copies nothing.
    ///
    /// # Errors
    /// Returns `other` if it does not directly follow this buffer in the same memory.
    pub fn unsplit(&mut self, other: PinnedBuffer<T>) -> std::result::Result<(), PinnedBuffer<T>> {
        let end = self.room.start + self.len * size_of::<T>();
        // Several empty parts may begin where this one ends; the rest of the block belongs to one of them.
        let follows = other.room.start == end && (self.room.end == end || other.room.is_empty());
        if !follows || !Arc::ptr_eq(&self.block, &other.block) {
            return Err(other);
        }
        self.room.end = self.room.end.max(other.room.end);
        self.len += other.len;
        Ok(())
    }

    pub(crate) fn block(&self) -> &Arc<PinnedBlock> {
        &self.block
    }

    /// The host address of its first element.
    pub(crate) fn host(&self) -> HostPtr {
        HostPtr(self.block.host().0 + self.room.start)
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }
}

impl<T: Element> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let start: *const T = self.host().0 as *const T;
        // SAFETY: the block is mapped and has room for `len` elements from `start`, which is a whole number
        // of them behind the block's own start, and that is aligned for `T` (asserted in `over`); any bits
        // are a valid `T: Pod`. The user has a `PinnedBuffer` only while no device command may touch its
        // room: it moves into the operation it is lent to and comes back when that is complete.
        unsafe { std::slice::from_raw_parts(start, self.len) }
    }
}

impl<T: Element> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let start: *mut T = self.host().0 as *mut T;
        // SAFETY: as in `deref`; and no other `PinnedBuffer` has this room: a block is given to one, and
        // `split_off` divides it.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<T: Element + PartialEq<U>, U: Element> PartialEq<[U]> for PinnedBuffer<T> {
    fn eq(&self, other: &[U]) -> bool {
        self[..] == *other
    }
}

impl<T: Element + PartialEq<U>, U: Element, const N: usize> PartialEq<[U; N]> for PinnedBuffer<T> {
    fn eq(&self, other: &[U; N]) -> bool {
        self[..] == other[..]
    }
}

impl<T: Element + PartialEq<U>, U: Element> PartialEq<Vec<U>> for PinnedBuffer<T> {
    fn eq(&self, other: &Vec<U>) -> bool {
        self[..] == other[..]
    }
}

/// A 32-bit word in pinned memory, shared by the host and *running* kernels.
///
/// Cheap to clone; clones share the word. A launch that takes the flag keeps it alive until the launch is
/// complete.
#[derive(Clone)]
pub struct PinnedFlag {
    block: Arc<PinnedBlock>,
}

impl PinnedFlag {
    pub(crate) fn new(pool: &Arc<PinnedPool>) -> Result<Self> {
        let flag = PinnedFlag { block: pool.get(size_of::<u32>())? };
        flag.set(0);
        Ok(flag)
    }

    /// Reads the word.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    /// Writes the word; running kernels see the value soon.
    pub fn set(&self, value: u32) {
        self.word().store(value, Ordering::Release);
    }

    /// Writes `new` if the word is `current`; returns the previous value.
    ///
    /// Atomic among host threads; with respect to a running kernel only if the device reports native host
    /// atomics.
    ///
    /// # Errors
    /// The value found, if it was not `current`.
    pub fn compare_exchange(&self, current: u32, new: u32) -> std::result::Result<u32, u32> {
        self.word().compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    pub(crate) fn block(&self) -> &Arc<PinnedBlock> {
        &self.block
    }

    fn word(&self) -> &AtomicU32 {
        let word: *mut u32 = self.block.host().0 as *mut u32;
        // SAFETY: the block is mapped for as long as `self.block` lives, aligned to 128 bytes, and every
        // access to it is an access to one atomic word.
        unsafe { AtomicU32::from_ptr(word) }
    }
}

impl fmt::Debug for PinnedFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedFlag({})", self.get())
    }
}

/// The size of `len` elements in bytes.
pub(crate) fn bytes_of<T>(len: usize) -> Result<usize> {
    let element_bytes = size_of::<T>();
    match len.checked_mul(element_bytes).filter(|bytes| isize::try_from(*bytes).is_ok()) {
        Some(bytes) => Ok(bytes),
        None => Err(ErrorDetail::TooLarge { len, element_bytes }.into()),
    }
}
