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

/// Reserved addresses. Dropped when nobody uses them, with their memory.
pub(crate) struct AddressRange {
    engine: Arc<Engine>,
    ptr: DevicePtr,
    bytes: u64,
    step: u64,
    /// What has memory, from the beginning on. Held during driver calls: it is none of the locks that are counted.
    committed: Mutex<Committed>,
    /// Up to where the owner uses it, or will.
    wanted: AtomicU64,
}

/// Steps that have memory, in parts by what they draw from.
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

    /// Takes the last `bytes`, and gives them back to what they were drawn from.
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
    /// A device that has no such memory; no addresses; a device that is lost or closed.
    pub(crate) fn reserve(engine: &Arc<Engine>, bytes: u64) -> Result<Arc<Self>> {
        engine.check_open()?;
        let step = engine.backend.range_granularity().map_err(|code| refused(engine, code))?;
        let bytes = bytes.max(1).next_multiple_of(step);
        let ptr = engine.backend.range_reserve(bytes).map_err(|code| refused(engine, code))?;
        let (engine, committed, wanted) = (engine.clone(), Mutex::default(), AtomicU64::new(0));
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
        self.committed.lock().bytes
    }

    /// The owner wants it up to there from now on: a commit or a decommit follows.
    pub(crate) fn want(&self, to: u64) {
        self.wanted.store(to, Ordering::SeqCst);
    }

    /// Gives memory to what has none up to `to`, a multiple of the step, drawn from `allowance`. Blocks for driver calls.
    ///
    /// # Errors
    /// Out of memory, after all that streams keep and the pool reserves was returned; more than what is left of the allowance; a driver's refusal; a
    /// device that is lost or closed. Nothing has changed then.
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
            // SAFETY: these steps are reserved, and have no memory: what has is in front of them.
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
        if let Some(lost) = engine.state.lost() {
            return Err(lost.clone());
        }
        let mut committed = self.committed.lock();
        // Behind the lock: a commit that was made sees its memory wanted, and one that comes is made behind this.
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

/// The error of a growth. Its stream's memory may be free for an allocation, and not for this: it advises what waits for both.
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
                // SAFETY: the owner of memory is dropped when every use is complete; before it became memory there was none.
                steps => unsafe { backend.range_decommit(*ptr, *step, steps) },
            };
            // SAFETY: none of it has memory.
            let freed = taken.and_then(|()| unsafe { backend.range_free(*ptr, *bytes) });
            if freed.is_err() {
                engine.state.count_unreturned();
            }
        }
        committed.pop(engine, committed.bytes);
    }
}
