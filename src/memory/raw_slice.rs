//! Device addresses for code outside this crate.

use std::fmt;
use std::marker::PhantomData;

use crate::backend::DevicePtr;

/// The address of `len` elements of device memory: plain data, with no claim on the memory.
///
/// The closure of [`enqueue`](crate::Stream::enqueue) gets one for each range that it declared, and
/// [`MemoryLoan::slices`](crate::MemoryLoan::slices) returns one for each range on loan.
pub struct RawSlice<T> {
    ptr: DevicePtr,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T> RawSlice<T> {
    pub(crate) fn new(ptr: DevicePtr, len: usize) -> Self {
        RawSlice { ptr, len, element: PhantomData }
    }

    /// Returns the device address of the first element, a `CUdeviceptr`. On a host device it is an address in
    /// this process, valid once the stream reaches the operation.
    #[must_use]
    pub fn address(self) -> u64 {
        self.ptr.0
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn size_bytes(self) -> usize {
        self.len * size_of::<T>()
    }

    /// Borrows the elements, on a host device: inside [`RawQueue::host`](crate::RawQueue::host), or on any thread while the
    /// range is on a loan that is [ready](crate::MemoryLoan::ready).
    ///
    /// # Safety
    /// The device is a host device. The call is made by the host function of an operation that declared this range, or
    /// during such a loan of it; the slice is dropped before that function returns or the loan ends. Nothing writes
    /// the elements meanwhile.
    #[must_use]
    pub unsafe fn as_slice<'a>(self) -> &'a [T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the range comes from a buffer of `T`, whose elements accept any bits; the caller runs while
        // the memory is live, keeps it unwritten, and chose a lifetime that ends in that time.
        unsafe { std::slice::from_raw_parts(self.ptr.0 as *const T, self.len) }
    }

    /// Borrows the elements for writing, on a host device; see [`as_slice`](Self::as_slice).
    ///
    /// # Safety
    /// As [`as_slice`](Self::as_slice), in an operation or a loan that declared the range as written or updated; and
    /// nothing else reads or writes the elements meanwhile.
    #[must_use]
    pub unsafe fn as_mut_slice<'a>(self) -> &'a mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as above; the caller keeps the memory exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.0 as *mut T, self.len) }
    }
}

impl<T> Clone for RawSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for RawSlice<T> {}

impl<T> fmt::Debug for RawSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (element, len, address) = (std::any::type_name::<T>(), self.len, self.ptr.0);
        write!(f, "RawSlice<{element}>({len} elements at {address:#x})")
    }
}
