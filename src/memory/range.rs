//! [`AddressRange`]: reserved addresses of one device, which get memory step by step, from the beginning on.
//!
//! | the addresses | left by |
//! |---|---|
//! | reserved, without memory: nobody may use them | [`commit`](AddressRange::commit) |
//! | committed: memory like any other, counted in the account | [`decommit`](AddressRange::decommit), of steps that nobody uses or may use again |
//! | given back, when the last share goes | – |
//!
//! # Invariants
//! 1. What is committed takes room of the limit before the driver is asked, and leaves it after the driver took it back
//!    (`growth_is_within_the_limit`).
//! 2. No other memory gets these addresses while a share exists: the driver keeps them reserved, whatever has memory
//!    (`addresses_stay_while_it_lives`).
//! 3. One thread changes it at a time, each time all or nothing (`growth_survives_a_failure_of_each_call`).
//! 4. What the owner wants last it has, in whatever order the calls come: where the system refuses threads, errands can overtake
//!    (`a_late_shrink_takes_nothing`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::MemoryInfo;
use super::allocation::Allocation;
use super::beside_pool::{self, OUT_OF_MEMORY};
use crate::backend::DevicePtr;
use crate::error::{DriverCode, Error, ErrorDetail, Result};
use crate::runtime::Engine;
use crate::runtime::stream_state::StreamState;
use gpu_await_protocol::account::Account;

/// Reserved addresses. Dropped when nobody uses them, with their memory.
pub(crate) struct AddressRange {
    engine: Arc<Engine>,
    ptr: DevicePtr,
    bytes: u64,
    step: u64,
    /// Bytes from the beginning on that have memory. Held during driver calls: it is none of the locks that are counted.
    committed: Mutex<u64>,
    /// Up to where the owner uses it, or will.
    wanted: AtomicU64,
}

impl AddressRange {
    /// Reserves addresses for `bytes`, in whole steps. Blocks for driver calls.
    ///
    /// # Errors
    /// A device that has no such memory; no addresses; a device that is lost or closed.
    pub(crate) fn reserve(engine: &Arc<Engine>, bytes: u64) -> Result<Arc<Self>> {
        engine.check_open()?;
        let step = engine.backend.range_granularity().map_err(|code| refused(engine, code))?;
        let bytes = bytes.max(1).next_multiple_of(step);
        let ptr = engine.backend.range_reserve(bytes).map_err(|code| refused(engine, code))?;
        let (engine, committed, wanted) = (engine.clone(), Mutex::new(0), AtomicU64::new(0));
        Ok(Arc::new(AddressRange { engine, ptr, bytes, step, committed, wanted }))
    }

    /// All of it as memory like any other, unwritten, whose parts that have no memory the caller keeps from everybody. It keeps the range, and its
    /// last share is dropped where owners of memory are.
    pub(crate) fn into_allocation(self: Arc<Self>) -> Allocation {
        let (engine, ptr, bytes) = (self.engine.clone(), self.ptr, self.bytes);
        Allocation::mapped(&engine, ptr, bytes, false, Box::new(self))
    }

    /// The end of the step that holds the last of these bytes.
    pub(crate) fn in_steps(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.step)
    }

    /// How many bytes have memory.
    pub(crate) fn committed(&self) -> u64 {
        *self.committed.lock()
    }

    /// The owner wants it up to there from now on: a commit or a decommit follows.
    pub(crate) fn want(&self, to: u64) {
        self.wanted.store(to, Ordering::SeqCst);
    }

    /// Gives memory to what has none up to `to`, a multiple of the step. Blocks for driver calls.
    ///
    /// # Errors
    /// Out of memory, after all that streams keep and the pool reserves was returned; a driver's refusal; a device that is lost or
    /// closed. Nothing has changed then.
    pub(crate) fn commit(&self, stream: &Arc<StreamState>, to: u64) -> Result<()> {
        let engine = &self.engine;
        engine.check_open()?;
        let mut committed = self.committed.lock();
        let Some(bytes) = to.checked_sub(*committed).filter(|bytes| *bytes > 0) else {
            return Ok(());
        };
        let full = || MemoryInfo::out_of_memory(stream, "grow".into(), bytes, None);
        if !beside_pool::claim(stream, bytes, Account::commit) {
            return Err(full());
        }
        let (at, steps) = (self.ptr.offset(*committed), bytes / self.step);
        let made = beside_pool::make(engine, || {
            // SAFETY: these steps are reserved, and have no memory: what has is in front of them.
            unsafe { engine.backend.range_commit(at, self.step, steps) }
        });
        if let Err(code) = made {
            let mut account = engine.memory.account.lock();
            account.uncommit(bytes);
            if code.code == OUT_OF_MEMORY {
                account.refuse(bytes);
            }
            drop(account);
            return Err(if code.code == OUT_OF_MEMORY { full() } else { engine.refused(code) });
        }
        *committed = to;
        Ok(())
    }

    /// Takes the memory behind `to`, a multiple of the step, and behind what is wanted by now; says how much that was. Blocks for a driver
    /// call.
    ///
    /// # Errors
    /// A driver's refusal, a device that is lost: nothing has changed then.
    ///
    /// # Safety
    /// Every use of what is behind `to` is complete, and nobody will use it before it is wanted, and then committed, again.
    pub(crate) unsafe fn decommit(&self, to: u64) -> Result<u64> {
        let engine = &self.engine;
        if let Some(lost) = engine.lost() {
            return Err(lost.clone());
        }
        let mut committed = self.committed.lock();
        // Behind the lock: a commit that was made sees its memory wanted, and one that comes is made behind this.
        let to = to.max(self.wanted.load(Ordering::SeqCst));
        let bytes = committed.saturating_sub(to);
        if bytes > 0 {
            let (at, steps) = (self.ptr.offset(to), bytes / self.step);
            // SAFETY: these steps have memory, and no command uses them by the caller's promise.
            let taken = unsafe { engine.backend.range_decommit(at, self.step, steps) };
            taken.map_err(|code| engine.refused(code))?;
            *committed = to;
            drop(committed);
            engine.memory.account.lock().uncommit(bytes);
            engine.memory.moved();
        }
        Ok(bytes)
    }
}

fn refused(engine: &Engine, code: DriverCode) -> Error {
    const NOT_SUPPORTED: i32 = 801;
    if code.code != NOT_SUPPORTED {
        return engine.refused(code);
    }
    let (what, device) = ("memory that grows in place", engine.label().to_owned());
    ErrorDetail::Unsupported { what, device }.into()
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let AddressRange { engine, ptr, bytes, step, committed, .. } = self;
        let committed = *committed.get_mut();
        if engine.is_usable() {
            let backend = &engine.backend;
            let taken = match committed / *step {
                0 => Ok(()),
                // SAFETY: the owner of memory is dropped when every use is complete; before it became memory there was none.
                steps => unsafe { backend.range_decommit(*ptr, *step, steps) },
            };
            // SAFETY: none of it has memory.
            let freed = taken.and_then(|()| unsafe { backend.range_free(*ptr, *bytes) });
            if freed.is_err() {
                engine.state.count_unreturned();
            }
        }
        if committed > 0 {
            engine.memory.account.lock().uncommit(committed);
            engine.memory.moved();
        }
    }
}
