//! [`AddressRange`]: reserved addresses of one device, which are backed by memory step by step from the beginning.
//!
//! | the addresses | left by |
//! |---|---|
//! | reserved, without memory: nothing may use them | [`commit`](AddressRange::commit) |
//! | committed: memory like any other, counted in the account | [`decommit`](AddressRange::decommit), of steps that nothing uses or may use again |
//! | freed, with the last share | – |
//!
//! # Invariants
//! 1. Committed memory counts toward the limit from before the driver call that maps it until after the one that unmaps
//!    it (`growth_is_within_the_limit`).
//! 2. No other memory gets these addresses while a share exists: the driver keeps them reserved, with or without
//!    memory (`addresses_stay_while_it_lives`).
//! 3. One thread at a time changes it, and each change is all or nothing (`growth_survives_a_failure_of_each_call`).
//! 4. The owner's last wish wins, in whatever order the calls come: where the system refuses threads, errands can overtake each
//!    other (`a_late_shrink_takes_nothing`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_await_protocol::lock::Mutex;

use super::MemoryInfo;
use super::allocation::Allocation;
use super::beside_pool::{self, OUT_OF_MEMORY};
use super::reclaim::allowance::Allowance;
use crate::backend::DevicePtr;
use crate::error::advice::MemoryAdvice;
use crate::error::{DriverCode, Error, ErrorDetail, Result};
use crate::runtime::Engine;
use crate::runtime::stream_state::StreamState;

/// Reserved addresses. Dropped with their memory when nothing uses them.
pub(crate) struct AddressRange {
    engine: Arc<Engine>,
    ptr: DevicePtr,
    bytes: u64,
    step: u64,
    /// The backed part, from the beginning. Held during driver calls, so not one of the counted locks.
    committed: Mutex<Committed>,
    /// The end of the part that the owner uses or will use.
    wanted: AtomicU64,
}

/// The steps that have memory, in parts by the budget that they draw from.
#[derive(Default)]
struct Committed {
    bytes: u64,
    parts: Vec<(u64, Option<Arc<Allowance>>)>,
}

impl Committed {
    fn push(&mut self, bytes: u64, allowance: Option<Arc<Allowance>>) {
        self.bytes += bytes;
        self.parts.push((bytes, allowance));
    }

    /// Removes the last `bytes`, and returns them to the budgets that they were drawn from.
    fn pop(&mut self, engine: &Engine, bytes: u64) {
        self.bytes -= bytes;
        let mut left = bytes;
        while let Some((part, allowance)) = self.parts.last_mut().filter(|_| left > 0) {
            let taken = left.min(*part);
            engine.memory.account.lock().uncommit(taken, number(allowance));
            *part -= taken;
            left -= taken;
            if *part == 0 {
                self.parts.pop();
            }
        }
        engine.memory.moved();
    }
}

fn number(allowance: &Option<Arc<Allowance>>) -> Option<usize> {
    allowance.as_ref().map(|allowance| allowance.number())
}

impl AddressRange {
    /// Reserves addresses for `bytes`, in whole steps. Blocks for driver calls.
    ///
    /// # Errors
    /// A device without such memory; no free addresses; a lost or closed device.
    pub(crate) fn reserve(engine: &Arc<Engine>, bytes: u64) -> Result<Arc<Self>> {
        engine.check_open()?;
        let step = engine.backend.range_granularity().map_err(|code| refused(engine, code))?;
        let bytes = bytes.max(1).next_multiple_of(step);
        let ptr = engine.backend.range_reserve(bytes).map_err(|code| refused(engine, code))?;
        let (engine, committed, wanted) = (engine.clone(), Mutex::default(), AtomicU64::new(0));
        Ok(Arc::new(AddressRange { engine, ptr, bytes, step, committed, wanted }))
    }

    /// The whole range as unwritten memory like any other; the caller must prevent uses of parts without memory. The allocation keeps the range,
    /// whose last share is dropped by the thread that drops owners of memory.
    pub(crate) fn into_allocation(self: Arc<Self>) -> Allocation {
        let (engine, ptr, bytes) = (self.engine.clone(), self.ptr, self.bytes);
        Allocation::mapped(&engine, ptr, bytes, false, Box::new(self))
    }

    /// `bytes` rounded up to whole steps.
    pub(crate) fn in_steps(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.step)
    }

    /// How many bytes have memory.
    pub(crate) fn committed(&self) -> u64 {
        self.committed.lock().bytes
    }

    /// Sets how far the owner wants memory from now on; a commit or a decommit follows.
    pub(crate) fn want(&self, to: u64) {
        self.wanted.store(to, Ordering::SeqCst);
    }

    /// Adds memory up to `to`, a multiple of the step, drawn from `allowance`. Blocks for driver calls.
    ///
    /// # Errors
    /// Out of memory, after everything that streams keep and the pool reserves was returned; more than is left of the allowance; a driver refusal; a
    /// lost or closed device. Nothing has changed then.
    pub(crate) fn commit(
        &self,
        stream: &Arc<StreamState>,
        to: u64,
        allowance: Option<Arc<Allowance>>,
    ) -> Result<()> {
        let engine = &self.engine;
        engine.check_open()?;
        let mut committed = self.committed.lock();
        let Some(bytes) = to.checked_sub(committed.bytes).filter(|bytes| *bytes > 0) else {
            return Ok(());
        };
        let budget = number(&allowance);
        let full = || match &allowance {
            Some(allowance) if allowance.size_and_left().1 < bytes => allowance.spent(bytes),
            _ => full(stream, bytes, budget),
        };
        if !beside_pool::claim(stream, bytes, budget, |account| account.commit(bytes, budget)) {
            return Err(full());
        }
        let (at, steps) = (self.ptr.offset(committed.bytes), bytes / self.step);
        let made = beside_pool::make(engine, || {
            // SAFETY: these steps are reserved, and have no memory: the committed steps are in front of them.
            unsafe { engine.backend.range_commit(at, self.step, steps) }
        });
        if let Err(code) = made {
            let mut account = engine.memory.account.lock();
            account.uncommit(bytes, budget);
            if code.code == OUT_OF_MEMORY {
                account.refuse(bytes);
            }
            drop(account);
            engine.memory.moved();
            return Err(if code.code == OUT_OF_MEMORY { full() } else { engine.refused(code) });
        }
        committed.push(bytes, allowance);
        Ok(())
    }

    /// Removes the memory behind both `to`, a multiple of the step, and the part that is wanted by now; returns how much that was. Blocks
    /// for a driver call.
    ///
    /// # Errors
    /// A driver refusal or a lost device: nothing has changed then.
    ///
    /// # Safety
    /// Every use of the memory behind `to` is complete, and nothing will use it before it is wanted, and then committed, again.
    pub(crate) unsafe fn decommit(&self, to: u64) -> Result<u64> {
        let engine = &self.engine;
        if let Some(lost) = engine.state.lost() {
            return Err(lost.clone());
        }
        let mut committed = self.committed.lock();
        // Read under the lock: an earlier commit has its memory wanted already, and a later one comes after this.
        let to = to.max(self.wanted.load(Ordering::SeqCst));
        let bytes = committed.bytes.saturating_sub(to);
        if bytes > 0 {
            let (at, steps) = (self.ptr.offset(to), bytes / self.step);
            // SAFETY: these steps have memory, and no command uses them by the caller's promise.
            let taken = unsafe { engine.backend.range_decommit(at, self.step, steps) };
            taken.map_err(|code| engine.refused(code))?;
            committed.pop(engine, bytes);
        }
        Ok(bytes)
    }
}

/// The error of a growth. Memory of its stream may be free for an allocation and not for this: it advises a reservation, which waits for both.
fn full(stream: &Arc<StreamState>, bytes: u64, budget: Option<usize>) -> Error {
    let error = MemoryInfo::out_of_memory(stream, "grow".into(), bytes, budget);
    let mut detail = error.detail().clone();
    match &mut detail {
        ErrorDetail::OutOfMemory { advice, driver_refused: false, .. }
            if matches!(advice, MemoryAdvice::Reclaim | MemoryAdvice::TryAgain) =>
        {
            *advice = MemoryAdvice::Reserve;
            detail.into()
        }
        _ => error,
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
        let committed = committed.get_mut();
        if engine.is_usable() {
            let backend = &engine.backend;
            let taken = match committed.bytes / *step {
                0 => Ok(()),
                // SAFETY: the owner of memory is dropped when every use is complete; before it owned memory there was no use.
                steps => unsafe { backend.range_decommit(*ptr, *step, steps) },
            };
            // SAFETY: no part of it has memory.
            let freed = taken.and_then(|()| unsafe { backend.range_free(*ptr, *bytes) });
            if freed.is_err() {
                engine.state.count_unreturned();
            }
        }
        committed.pop(engine, committed.bytes);
    }
}
