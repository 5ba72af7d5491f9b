//! A `Vec` that several threads fill, each in its own part.
//!
//! # Invariants
//! 1. A part is written at most once: [`Part::fill`] consumes it, and parts are disjoint.
//! 2. The `Vec` is handed out only when every part was written (`a_vec_of_which_a_part_is_missing_is_not_handed_out`).

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Element;
use crate::error::{ErrorDetail, Result};
use crate::system;

/// Room for `len` elements; the parts that were filled are initialised.
pub(crate) struct Room<T> {
    start: *mut T,
    len: usize,
    capacity: usize,
    filled: AtomicUsize,
}

/// A part of a [`Room`] that is not filled yet.
pub(crate) struct Part<T> {
    room: Arc<Room<T>>,
    start: usize,
    len: usize,
}

/// A room, and its parts.
pub(crate) type Parts<T> = (Arc<Room<T>>, Vec<Part<T>>);

// SAFETY: the room owns its memory like a `Vec<T>`, and `T: Element` is `Send`.
unsafe impl<T: Element> Send for Room<T> {}
// SAFETY: nothing is read through `&Room`, and only parts write, each its own range.
unsafe impl<T: Element> Sync for Room<T> {}

impl<T: Element> Room<T> {
    /// Room for `len` elements in `memory`, which is grown if it is too small, in parts of at most
    /// `part_len`. Does not touch the memory.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfHostMemory`].
    pub(crate) fn in_parts(memory: Vec<T>, len: usize, part_len: usize) -> Result<Parts<T>> {
        let mut memory = memory;
        let fresh = memory.capacity() < len;
        memory.clear();
        memory.try_reserve_exact(len).map_err(|_| {
            let asked_bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
            crate::Error::from(ErrorDetail::OutOfHostMemory { asked_bytes })
        })?;
        let mut memory = ManuallyDrop::new(memory);
        let (start, capacity) = (memory.as_mut_ptr(), memory.capacity());
        if fresh {
            advise(start as usize, len * size_of::<T>());
        }
        let room = Arc::new(Room { start, len, capacity, filled: AtomicUsize::new(0) });
        let parts = (0..len).step_by(part_len.max(1)).map(|start| Part {
            room: room.clone(),
            start,
            len: part_len.min(len - start),
        });
        let parts = parts.collect();
        Ok((room, parts))
    }

    /// The elements, if every part was filled and dropped.
    pub(crate) fn into_vec(self: Arc<Self>) -> Option<Vec<T>> {
        let room = Arc::into_inner(self)?;
        // ORDERING: Relaxed: `into_inner` orders this behind every part's end.
        if room.filled.load(Ordering::Relaxed) != room.len {
            return None;
        }
        let room = ManuallyDrop::new(room);
        // SAFETY: pointer and capacity are those of the `Vec` that `in_parts` took apart, nothing else refers
        // to them any more, and all `len` elements were written.
        Some(unsafe { Vec::from_raw_parts(room.start, room.len, room.capacity) })
    }
}

impl<T> Drop for Room<T> {
    fn drop(&mut self) {
        // SAFETY: as in `into_vec`; no element is claimed, and none needs a drop.
        drop(unsafe { Vec::from_raw_parts(self.start, 0, self.capacity) });
    }
}

impl<T: Element> Part<T> {
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Writes the part.
    ///
    /// # Panics
    /// If `source` has another length.
    pub(crate) fn fill(self, source: &[T]) {
        assert_eq!(source.len(), self.len);
        // SAFETY: `start + len` is within the room's capacity, as `in_parts` cut it.
        let to = unsafe { self.room.start.add(self.start) };
        // SAFETY: `to` has room for `len` elements that no other part has (invariant 1), and nothing reads
        // before all are written. The source is a slice of other memory: the room was never behind a
        // reference.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), to, self.len) };
        // ORDERING: Relaxed: the drop of this part's share of the room orders it.
        self.room.filled.fetch_add(self.len, Ordering::Relaxed);
    }
}

/// Requests huge pages if the memory is large enough to be worth the call.
fn advise(start: usize, bytes: usize) {
    const WORTHWHILE: usize = 4 << 20;
    if bytes >= WORTHWHILE {
        system::advise_huge_pages(start, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::Room;

    #[test]
    fn a_vec_of_which_a_part_is_missing_is_not_handed_out() {
        let (room, mut parts) = Room::<u16>::in_parts(Vec::new(), 10, 4).unwrap();
        assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [4, 4, 2]);
        parts.pop();
        parts.into_iter().for_each(|part| part.fill(&[7; 4]));
        assert!(room.into_vec().is_none());
    }

    #[test]
    fn parts_filled_by_several_threads_make_the_vec() {
        let (room, parts) = Room::<u32>::in_parts(vec![9; 2000], 1003, 10).unwrap();
        std::thread::scope(|scope| {
            for part in parts {
                let start = part.start() as u32;
                let source: Vec<u32> = (start..start + part.len() as u32).collect();
                scope.spawn(move || part.fill(&source));
            }
        });
        assert_eq!(room.into_vec().unwrap(), (0..1003).collect::<Vec<_>>());
    }
}
