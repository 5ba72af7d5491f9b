//! Payloads as the front sees them: [`Lease`] for a request, [`Payload`] of an answer.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::leases::{LeaseId, Part};
use crate::lender::Lender;
use crate::slab::Slab;
use crate::system;

/// Shared memory for the payload of a request, to be written before the call.
///
/// It dereferences to `[u8]`, and belongs to the worker, whatever becomes of its processes. Once the call is made, the process reads it. The
/// memory is reused when the process has said that it is done, or was reaped, even if the future of the call was dropped long before; for
/// a call that [may run again](crate::Call::idempotent), only when the call has ended as well. Until then it counts against
/// [`payload_bytes`](crate::WorkerBuilder::payload_bytes), so that callers that give up meet back pressure. A call to another worker gets a copy.
pub struct Lease {
    pub(crate) lender: Weak<dyn Lender>,
    pub(crate) slab: Arc<Slab>,
    pub(crate) id: LeaseId,
    pub(crate) part: Part,
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slab is sealed against writes by other processes, and the lease is exclusive: it is behind no other
        // `Lease`, and a shared borrow of this one writes nothing.
        unsafe { self.slab.slice(self.part) }
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, with an exclusive borrow. A lease that was sent is in nobody's hands but the library's.
        unsafe { self.slab.slice_mut(self.part) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A lease that was sent is returned by the process, or goes with its slab.
        if let Some(lender) = self.lender.upgrade() {
            lender.give_back(self.id);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({} bytes)", self.part.len)
    }
}

/// What to send beside a request: a [`Lease`], which costs no copy, or bytes, which are copied once.
#[derive(Debug)]
pub(crate) enum Input {
    Bytes(Arc<[u8]>),
    Lease(Lease),
}

impl Input {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Input::Bytes(bytes) => bytes.len() as u64,
            Input::Lease(lease) => lease.part.len,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Input::Bytes(bytes) => bytes,
            Input::Lease(lease) => lease,
        }
    }
}

/// The payload of a call that was made.
#[derive(Debug)]
pub(crate) enum Placed {
    Lease(Lease),
    /// There was no room for it.
    Waits {
        bytes: Arc<[u8]>,
        _counted: Waiting,
    },
}

/// Counts bytes that wait in the front for room, until it is dropped.
#[derive(Debug)]
pub(crate) struct Waiting {
    bytes: u64,
    all: Arc<AtomicU64>,
}

impl Waiting {
    /// Counts these bytes, unless the total would exceed `limit`: then returns that total.
    pub(crate) fn count(bytes: u64, all: &Arc<AtomicU64>, limit: u64) -> Result<Self, u64> {
        let more = |all: u64| all.checked_add(bytes).filter(|all| *all <= limit);
        // ORDERING: Relaxed, as below: a count that orders nothing.
        match all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Waiting { bytes, all: all.clone() }),
            Err(all) => Err(all.saturating_add(bytes)),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // ORDERING: Relaxed, as above.
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The payload of an answer, in memory shared with the worker's process.
///
/// The process can still write it, by mistake, for as long as it lives. So nothing here makes a reference to it but
/// [`as_slice`](Self::as_slice), which is `unsafe`: the bytes are copied, or written to a descriptor. When it is dropped, the process may
/// use the memory for another answer; the memory of a process that died is never reused. Until then it counts against
/// [`payload_bytes`](crate::WorkerBuilder::payload_bytes): other calls wait for its room.
pub struct Payload {
    pub(crate) lender: Weak<dyn Lender>,
    pub(crate) slab: Arc<Slab>,
    pub(crate) id: LeaseId,
    pub(crate) part: Part,
    pub(crate) incarnation: u32,
}

impl Payload {
    /// The number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.part.len as usize
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.part.len == 0
    }

    /// Copies as many of its first bytes as `into` holds; returns how many.
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        self.slab.copy_out(self.part, into);
        into.len().min(self.len())
    }

    /// Copies all of it.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(&mut bytes);
        bytes
    }

    /// Writes its bytes from `from` on to a file, a pipe or a socket; returns how many were written, as `write(2)` does.
    ///
    /// # Blocking
    /// As the descriptor does.
    ///
    /// # Errors
    /// Those of `write(2)`; in a fork, where the memory is not mapped.
    pub fn write_to(&self, file: impl AsFd, from: usize) -> io::Result<usize> {
        if !self.slab.is_here() {
            return Err(io::Error::other("shared memory of the parent of this fork"));
        }
        let rest = self.len().checked_sub(from).ok_or(io::ErrorKind::InvalidInput)?;
        let part = Part { offset: self.part.offset + from as u64, len: rest as u64 };
        // SAFETY: the part is mapped for as long as the slab, which `self` holds.
        unsafe { system::write_from(file.as_fd(), self.slab.at(part), rest) }
    }

    /// The address of its first byte, for copies made elsewhere.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.slab.at(self.part)
    }

    /// Its bytes in place.
    ///
    /// # Safety
    /// The worker's process must not write them while the slice lives. One that uses only this crate never does, but a stray pointer
    /// or a stray kernel of it may.
    #[must_use]
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: as the caller says.
        unsafe { self.slab.slice(self.part) }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        if let Some(lender) = self.lender.upgrade() {
            lender.release(self.incarnation, self.id);
        }
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Payload({} bytes)", self.part.len)
    }
}
