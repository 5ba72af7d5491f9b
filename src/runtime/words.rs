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
    /// The device writes it. Has no way to a reference, which would be an access to all of it.
    memory: MmapRaw,
    address: usize,
    device: DevicePtr,
}

/// A stream's word.
pub(crate) struct Word {
    page: Arc<Page>,
    line: usize,
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
                let word = Word { page, line };
                // ORDERING: Relaxed: the line has no other user, and its stream is new.
                word.atomic().store(0, Ordering::Relaxed);
                Ok(word)
            }
            None => Err(crate::error::DriverCode { call: "mmap", code: 2 }),
        }
    }

    /// Gives back a line whose last value was seen.
    pub(crate) fn put(&self, word: Word) {
        self.state.lock().free.push((word.page, word.line));
    }

    /// Keeps a line into which a write may still come: no stream gets it, and the pages stay.
    pub(crate) fn retain(&self, word: Word) {
        self.state.lock().unsettled = true;
        drop(word);
    }

    /// Unregisters the pages from the device; no stream may write any more, except into
    /// [retained](Self::retain) lines.
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

    /// The address at which the device writes it.
    pub(crate) fn device_ptr(&self) -> DevicePtr {
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
