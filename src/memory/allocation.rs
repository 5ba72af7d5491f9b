//! One allocation: who used which part of it, and how it ends.
//!
//! | used by | freed |
//! |---|---|
//! | its home stream only (other uses complete) | in place: for the next allocation there, or a free behind everything on the home stream |
//! | nobody knows whom: it was frozen | retired behind all that is on any stream of the device |
//! | other streams as well | retired with their tickets; freed when all are complete, by the poller |
//! | nobody any more, device lost or process exiting | not at all: the memory went with the device |
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::backend::DevicePtr;
use crate::error::Error;
use crate::memory::hazard::{Content, Hazards};
use crate::memory::point::Track;
use crate::memory::reclaim::retired::Remnant;
use crate::runtime::stream_state::StreamHandle;
use crate::runtime::{Engine, Progress};

/// Every backend aligns allocations to at least so many bytes.
pub(crate) const ALIGNMENT: u64 = 256;

/// Why a range is not worth reading.
#[derive(Clone, Debug)]
pub(crate) struct Poison {
    pub(crate) producer: Arc<str>,
    pub(crate) cause: Error,
}

impl PartialEq for Poison {
    fn eq(&self, other: &Self) -> bool {
        // One kernel's launches share its name.
        Arc::ptr_eq(&self.producer, &other.producer) && self.cause.is(&other.cause)
    }
}

/// Who used which part.
pub(crate) type AllocationHazards = Hazards<Arc<Progress>, Poison>;

/// Device memory, its home stream and its hazards.
pub(crate) struct Allocation {
    home: Arc<StreamHandle>,
    ptr: DevicePtr,
    bytes: u64,
    /// What is held for it.
    block: u64,
    hazards: Mutex<AllocationHazards>,
    /// Nobody writes it any more, and its readers on this device are not entered.
    frozen: AtomicBool,
}

impl Allocation {
    /// Memory that ticket `ticket` of `home` made, and that the caller counted: a block of which the
    /// buffer has `bytes`.
    pub(crate) fn new(
        home: &Arc<StreamHandle>,
        (ptr, block): (DevicePtr, u64),
        bytes: u64,
        ticket: u64,
        written: bool,
    ) -> Self {
        let content = if written { Content::Valid } else { Content::Unwritten };
        let writer = (bytes > 0).then(|| home.point(ticket));
        Allocation {
            home: home.clone(),
            ptr,
            bytes,
            block,
            hazards: Mutex::new(Hazards::new(bytes, writer, content)),
            frozen: AtomicBool::new(false),
        }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.home.engine()
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn freeze(&self) {
        // ORDERING: Relaxed, here and below: whoever has a share got it from who froze it.
        self.frozen.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    pub(crate) fn with_hazards<R>(&self, f: impl FnOnce(&mut AllocationHazards) -> R) -> R {
        f(&mut self.hazards.lock())
    }

    pub(crate) fn poison(&self, range: &Range<u64>, poison: &Poison) {
        self.hazards.lock().poison(range, poison);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let engine = self.home.engine();
        let users = self.hazards.get_mut().users();
        let home_only =
            users.iter().all(|used| used.stream.id() == self.home.id() || used.is_complete());
        if self.bytes == 0 || engine.lost().is_some() || crate::thread::exit::begun() {
            engine.account.lock().abandon(self.block);
            return;
        }
        let is_frozen = *self.frozen.get_mut();
        if home_only && !is_frozen {
            self.home.free_in_order(self.ptr, self.block);
            return;
        }
        engine.account.lock().retire(self.block);
        let what = Remnant::Memory { ptr: self.ptr, bytes: self.block };
        if is_frozen {
            engine.retire_behind_all(what, users);
            return;
        }
        // The home stream's uses are among them: the free is on none of the users' streams.
        engine.retire(what, users);
        engine.memory_moved();
    }
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes on {}", self.bytes, self.home.engine().label())
    }
}
