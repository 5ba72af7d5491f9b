//! Words that streams write: one 128-byte line each, in pinned memory that the device can reach.
//!
//! A stream writes its ticket into its word; reading the word never enters the driver. A line is returned only when its last value was
//! seen, so a late write never reaches another stream. A write that the driver refused may still have been submitted: its stream writes no
//! other, and returns the line only when it is known to be idle (`no_word_is_written_behind_a_refused_one`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_await_protocol::sync::Mutex;
use memmap2::{MmapMut, MmapRaw};

use crate::backend::{Backend, DevicePtr, DriverResult, HostPtr};

const LINE_BYTES: usize = 128;
const PAGE_BYTES: usize = 64 << 10;

/// The lines of one device.
#[derive(Default)]
pub(crate) struct Words {
    state: Mutex<Pages>,
}

#[derive(Default)]
struct Pages {
    pages: Vec<Arc<Page>>,
    free: Vec<(Arc<Page>, usize)>,
    /// A write may still come when all streams are gone.
    unsettled: bool,
}

struct Page {
    /// Written by the device. Never borrowed as a reference, which would count as an access to all of it.
    memory: MmapRaw,
    address: usize,
    device: DevicePtr,
}

/// A value that no word will have: whether a write is still to come is not known.
const UNKNOWN: u64 = u64::MAX;

/// A stream's word.
pub(crate) struct Word {
    page: Arc<Page>,
    line: usize,
    /// The last value that the stream was asked to write; [`UNKNOWN`] after a refusal.
    told: AtomicU64,
}

impl Words {
    /// Takes a line; maps and registers a page when none is free.
    pub(crate) fn get(&self, backend: &dyn Backend) -> DriverResult<Word> {
        let mut state = self.state.lock();
        if state.free.is_empty() {
            // Not under the lock, which drops take: registering may take long.
            drop(state);
            let page = Arc::new(Page::new(backend)?);
            state = self.state.lock();
            state.free.extend((0..PAGE_BYTES / LINE_BYTES).map(|line| (page.clone(), line)));
            state.pages.push(page);
        }
        match state.free.pop() {
            Some((page, line)) => {
                let word = Word { page, line, told: AtomicU64::new(0) };
                // ORDERING: Relaxed: the line has no other user, and its stream is new.
                word.atomic().store(0, Ordering::Relaxed);
                Ok(word)
            }
            None => Err(crate::error::DriverCode { call: "mmap", code: 2 }),
        }
    }

    /// Takes a line back. Unless its last value was seen, or nothing is left on the stream that wrote it, a write into it may
    /// still come: no other stream gets it then, and the pages stay.
    pub(crate) fn take_back(&self, word: Word, is_stream_through: impl FnOnce() -> bool) {
        // Not the stream's `completed`: an event in front of the word's last value may have raised that, and the
        // late write would complete the tickets of the line's next stream.
        // ORDERING: Relaxed, see `tell`.
        let told = word.told.load(Ordering::Relaxed);
        if word.read() >= told || (told == UNKNOWN && is_stream_through()) {
            self.state.lock().free.push((word.page, word.line));
        } else {
            self.state.lock().unsettled = true;
        }
    }

    /// Unregisters the pages from the device; no stream may write any more, except into lines that did not
    /// [come back](Self::take_back).
    pub(crate) fn close(&self, backend: &dyn Backend) {
        let mut state = self.state.lock();
        if state.unsettled {
            drop(state);
            return self.leak();
        }
        state.free.clear();
        for page in state.pages.drain(..) {
            // SAFETY: the page was registered with this backend when it was made, and the caller
            // says that no stream writes it any more.
            if unsafe { backend.unregister(HostPtr(page.address)) }.is_err() {
                // The driver may still have it: it stays mapped.
                std::mem::forget(page);
            }
        }
    }

    /// Leaves the pages where they are for the life of the process.
    pub(crate) fn leak(&self) {
        let mut state = self.state.lock();
        state.free.clear();
        state.pages.drain(..).for_each(std::mem::forget);
    }
}

impl Page {
    fn new(backend: &dyn Backend) -> DriverResult<Page> {
        let failed = |_| crate::error::DriverCode { call: "mmap", code: 2 };
        let mut memory = MmapMut::map_anon(PAGE_BYTES).map_err(failed)?;
        memory.fill(0);
        let memory = MmapRaw::from(memory);
        let address = memory.as_mut_ptr() as usize;
        // SAFETY: the mapping is ours, page-aligned, `PAGE_BYTES` long, and lives in the `Page`
        // until `close` unregistered it.
        let device = unsafe { backend.register(HostPtr(address), PAGE_BYTES) }?;
        Ok(Page { memory, address, device })
    }
}

impl Word {
    /// The last value that the stream wrote.
    pub(crate) fn read(&self) -> u64 {
        // ORDERING: Acquire: the stream's work before the write is visible to a reader of it.
        self.atomic().load(Ordering::Acquire)
    }

    /// Has the stream write `value`, by a driver call that gets the word's address. Under the submission lock of the stream.
    pub(crate) fn tell(
        &self,
        value: u64,
        write: impl FnOnce(DevicePtr) -> DriverResult<()>,
    ) -> DriverResult<()> {
        // ORDERING: Relaxed: read by the end of the stream, which is exclusive. Before the call,
        // because a failed one may have been submitted all the same.
        self.told.store(value, Ordering::Relaxed);
        // ORDERING: Relaxed, as above.
        write(self.device_ptr()).inspect_err(|_| self.told.store(UNKNOWN, Ordering::Relaxed))
    }

    /// Whether the stream may write it: not after a refused write, which may come late, and could not be told from the next.
    pub(crate) fn is_usable(&self) -> bool {
        // ORDERING: Relaxed: changed under the submission lock, which the caller has.
        self.told.load(Ordering::Relaxed) != UNKNOWN
    }

    /// Whether a write may still come. After a refused one, only if the stream has work left, as far as the caller knows.
    pub(crate) fn is_late(&self, has_work: impl FnOnce() -> bool) -> bool {
        // ORDERING: Relaxed, here and below: a hint; the end of the stream asks again.
        let told = self.told.load(Ordering::Relaxed);
        self.read() < told && (told != UNKNOWN || has_work())
    }

    /// The ticket of the last write, if that is behind `completed`.
    pub(crate) fn will_tell(&self, completed: u64) -> Option<u64> {
        let told = self.told.load(Ordering::Relaxed);
        (told != UNKNOWN && told > completed).then_some(told)
    }

    /// The address at which the device writes it.
    fn device_ptr(&self) -> DevicePtr {
        self.page.device.offset((self.line * LINE_BYTES) as u64)
    }

    fn atomic(&self) -> &AtomicU64 {
        debug_assert!(self.line < self.page.memory.len() / LINE_BYTES);
        let word: *mut u64 = (self.page.address + self.line * LINE_BYTES) as *mut u64;
        // SAFETY: the line lies inside the page's mapping, which `self.page` keeps mapped; it is 128-byte
        // aligned; every access, the device's included, is as one 8-byte word.
        unsafe { AtomicU64::from_ptr(word) }
    }
}
