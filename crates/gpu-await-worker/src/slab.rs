//! Memory that two processes see: a sealed `memfd`, mapped.
//!
//! | slab | the supervisor | the process |
//! |---|---|---|
//! | of requests | maps it for writing, then seals it: nobody else can write it | reads it: plain slices are sound there, because the supervisor does not touch a lease that it has sent |
//! | of responses | reads it, never by reference: the process may write it at any time | writes it; its first page has what it publishes about itself |
//!
//! Neither is inherited by a fork nor part of a core dump. The slab of requests serves all processes of a worker, which can only read it. The
//! slab of responses is new for each process and goes with the last lease in it, so nothing that a dead process might still write is ever
//! used again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpu_await::sibling::Process;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::heart::Beat;
use crate::leases::Part;
use crate::system;

/// The page in which a process publishes its status, and the bytes per call after it.
const PAGE: u64 = 4096;
const CALL_BYTES: u64 = size_of::<[AtomicU64; 2]>() as u64;
/// In place of a time: a call that has begun and is paused once; for each further pause one less.
const WAITS: u64 = u64::MAX;
/// No time is later.
const LAST_TIME: u64 = WAITS - u32::MAX as u64;

/// The size of the status area, before all leases, of a response slab for this many calls.
pub(crate) fn status_bytes(most_calls: usize) -> u64 {
    PAGE + (most_calls as u64 * CALL_BYTES).next_multiple_of(PAGE)
}

/// A mapped slab.
#[derive(Debug)]
pub(crate) struct Slab {
    /// Not closed in a fork, where the number may be another file's by then.
    fd: Option<OwnedFd>,
    /// Where it is mapped: a fork has something else there, or nothing.
    process: Process,
    start: *mut u8,
    len: usize,
    writable: bool,
}

// SAFETY: the mapping belongs to no thread; every access goes through raw pointers, whose callers order them.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    /// New memory. `exclusive` memory can be written through this mapping and through no other.
    pub(crate) fn new(name: &str, bytes: u64, exclusive: bool) -> io::Result<Slab> {
        let fd = system::memory(name, bytes)?;
        let slab = Slab::map(fd, bytes, true)?;
        if exclusive {
            system::seal_writes(slab.fd())?;
        }
        system::seal(slab.fd())?;
        Ok(slab)
    }

    /// Memory that the other side made.
    pub(crate) fn open(fd: OwnedFd, bytes: u64, writable: bool) -> io::Result<Slab> {
        // Otherwise it could be shortened under the mapping.
        if system::sealed_bytes(fd.as_fd())? != bytes {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Slab::map(fd, bytes, writable)
    }

    fn map(fd: OwnedFd, bytes: u64, writable: bool) -> io::Result<Slab> {
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut access = ProtFlags::READ;
        access.set(ProtFlags::WRITE, writable);
        // SAFETY: a new mapping, at an address that the kernel chooses, of memory whose size is sealed.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &fd, 0)?
        };
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // SAFETY: the mapping is this slab's; the advice changes no contents. A child of a fork does not use it.
            unsafe { rustix::mm::madvise(start, len, advice)? };
        }
        let (fd, process) = (Some(fd), Process::remembered());
        Ok(Slab { fd, process, start: start.cast(), len, writable })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("it is taken when the slab is dropped").as_fd()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.len as u64
    }

    /// Whether this process mapped it, and is no fork of that.
    pub(crate) fn is_here(&self) -> bool {
        self.process.is_here()
    }

    /// The address of a part.
    pub(crate) fn at(&self, part: Part) -> *mut u8 {
        assert!(self.is_here(), "shared memory of the parent of this fork");
        assert!(part.is_within(self.bytes()), "{part:?} is not within {} bytes", self.len);
        // SAFETY: within the mapping, as just checked.
        unsafe { self.start.add(part.offset as usize) }
    }

    /// Copies a part out, whatever the other side does meanwhile.
    pub(crate) fn copy_out(&self, part: Part, into: &mut [u8]) {
        let len = into.len().min(part.len as usize);
        let from = self.at(part);
        // SAFETY: `from` is mapped for `part.len` bytes, and `into` is a slice of at least `len`; they do not overlap, because
        // a slab is behind no reference here.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), len) };
    }

    /// A part as a slice.
    ///
    /// # Safety
    /// Nobody writes it while the slice lives.
    pub(crate) unsafe fn slice(&self, part: Part) -> &[u8] {
        let start = self.at(part);
        // SAFETY: mapped and initialised (new memory is zeroed); not written meanwhile, as the caller says.
        unsafe { std::slice::from_raw_parts(start, part.len as usize) }
    }

    /// A part as a slice to write.
    ///
    /// # Safety
    /// Nobody else has a reference to it or writes it while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "parts are exclusive, as the caller says")]
    pub(crate) unsafe fn slice_mut(&self, part: Part) -> &mut [u8] {
        assert!(self.writable, "the mapping is for reading");
        let start = self.at(part);
        // SAFETY: mapped for writing; exclusive, as the caller says.
        unsafe { std::slice::from_raw_parts_mut(start, part.len as usize) }
    }

    /// What a process publishes about itself.
    pub(crate) fn status(&self) -> Status<'_> {
        Status(self.words(0))
    }

    /// What a process publishes about the call in a slot.
    pub(crate) fn begun(&self, slot: u32) -> Begun<'_> {
        Begun(self.words(PAGE + u64::from(slot) * CALL_BYTES))
    }

    /// Two words of the status area, as the caller knows.
    fn words(&self, offset: u64) -> &[AtomicU64; 2] {
        let words = self.at(Part { offset, len: CALL_BYTES }).cast::<[AtomicU64; 2]>();
        // SAFETY: within the mapping, as `at` checks, which is aligned to pages, as `offset` is to a pair of words; both sides use atomics there.
        unsafe { &*words }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if !self.is_here() {
            std::mem::forget(self.fd.take());
            return;
        }
        #[cfg(test)]
        crate::trips::unmaps(self.len);
        // SAFETY: the mapping is this slab's, and nothing refers to it any more. What fails stays mapped.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
    }
}

/// The words that a process publishes: beats, and polls of its executor.
pub(crate) struct Status<'s>(&'s [AtomicU64; 2]);

impl Status<'_> {
    // ORDERING: Relaxed everywhere: single numbers, which order nothing.

    /// Counts a beat of the thread that does nothing else.
    pub(crate) fn beat(&self) {
        self.0[0].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a poll of the executor.
    pub(crate) fn polled(&self) {
        self.0[1].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Beat {
        Beat {
            process: self.0[0].load(Ordering::Relaxed),
            executor: self.0[1].load(Ordering::Relaxed),
        }
    }
}

/// When a process began with the call in a slot, and which call that was.
pub(crate) struct Begun<'s>(&'s [AtomicU64; 2]);

impl Begun<'_> {
    /// It begins now.
    pub(crate) fn begins(&self, generation: u64) {
        self.0[0].store(system::monotonic_ns(), Ordering::Relaxed);
        // ORDERING: Release, paired with the load in `age`: a reader that sees the call sees its time.
        self.0[1].store(generation.wrapping_add(1), Ordering::Release);
    }

    /// The call that began last is paused once more.
    pub(crate) fn pauses(&self) {
        let pause = |at| Some(if at > LAST_TIME { at - 1 } else { WAITS });
        self.update(pause);
    }

    /// A pause of this call ends; with the last one its limit counts again. Nothing if another call began since.
    pub(crate) fn restarts(&self, generation: u64) {
        // ORDERING: Relaxed: if another call begins in its slot at this very moment, the other one counts from now.
        if self.0[1].load(Ordering::Relaxed) == generation.wrapping_add(1) {
            let end = |at| match at {
                WAITS => Some(system::monotonic_ns()),
                _ => (at > LAST_TIME).then_some(at + 1),
            };
            self.update(end);
        }
    }

    fn update(&self, next: impl FnMut(u64) -> Option<u64>) {
        // ORDERING: Relaxed: a single number, which orders nothing.
        self.0[0].fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok();
    }

    /// How long ago the call began; `None` before that, and while it is paused.
    pub(crate) fn age(&self, generation: u64) -> Option<Duration> {
        // ORDERING: Acquire, as above.
        let is_it = self.0[1].load(Ordering::Acquire) == generation.wrapping_add(1);
        // A process may write any time: one in the future counts as now.
        let since = is_it.then(|| self.0[0].load(Ordering::Relaxed));
        let since = since.filter(|at| *at <= LAST_TIME)?;
        Some(Duration::from_nanos(system::monotonic_ns().saturating_sub(since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_call_in_a_slot_begins() {
        let bytes = PAGE + status_bytes(1);
        let slab = Slab::new("begun", bytes, false).unwrap();
        let begun = slab.begun(0);
        let long_ago = |generation| {
            begun.begins(generation);
            begun.0[0].store(0, Ordering::Relaxed);
            begun.age(generation).unwrap()
        };
        let age = long_ago(7);
        for other in [6, 8, u64::MAX] {
            begun.restarts(other);
            assert!(begun.age(7).unwrap() >= age && begun.age(other).is_none());
        }
        begun.pauses();
        assert_eq!(begun.age(7), None);
        begun.restarts(6);
        assert_eq!(begun.age(7), None);
        begun.restarts(7);
        assert!(begun.age(7).unwrap() < age);
        // Until the last of several pauses ends.
        begun.pauses();
        begun.pauses();
        begun.restarts(7);
        assert_eq!(begun.age(7), None);
        begun.restarts(7);
        assert!(begun.age(7).is_some());
        // One that ended too often changes nothing.
        let age = long_ago(7);
        begun.restarts(7);
        assert!(begun.age(7).unwrap() >= age);
        // The next one in the slot does not wait.
        begun.pauses();
        begun.begins(8);
        begun.restarts(7);
        assert!(begun.age(7).is_none() && begun.age(8).is_some());
    }
}
