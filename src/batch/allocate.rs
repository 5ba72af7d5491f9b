//! New device memory: the allocation as an operation of its stream, and what happens when there is none: a second attempt behind the
//! recorded list, and others where the driver refuses memory that should fit.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::queue::Queue;
use crate::backend::DevicePtr;
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::allocation::Allocation;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::pinned::bytes_of;
use crate::memory::reclaim::allowance::Allowance;
use crate::memory::reclaim::claim::{Backoff, Claim};
use crate::memory::reclaim::prospect::Prospect;
use crate::memory::{Element, MemoryInfo, Reach};
use crate::submit::{Footprint, Raw, Refusal, SubmitError};
use crate::thread::role;
use gpu_await_protocol::account::block;
use gpu_await_protocol::block_cache;

impl<'s> Queue<'s> {
    /// See [`Stream::empty`](crate::Stream::empty).
    ///
    /// # Errors
    /// Out of device memory; a lost or closed device.
    #[track_caller]
    pub fn empty<T: Element>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        self.scratch("empty", len)
    }

    /// Scratch memory for an operation of several launches.
    #[track_caller]
    pub(crate) fn scratch<T: Element>(
        &self,
        op: &'static str,
        len: usize,
    ) -> Result<DeviceBuffer<T>> {
        self.verb(|| Ok(self.make(|| Footprint::new(op), len, false, |_, _, _| Ok(()))?))
    }

    /// Allocates, and runs `write` on the fresh memory. If no memory is left, submits the recorded list first: memory
    /// that only the list keeps becomes available behind it.
    pub(super) fn make<'a, T: Element>(
        &self,
        footprint: impl Fn() -> Footprint<'a>,
        len: usize,
        written: bool,
        write: impl Fn(&Raw<'_>, DevicePtr, u64) -> std::result::Result<(), Refusal>,
    ) -> Result<DeviceBuffer<T>, SubmitError> {
        let made = self.make_once(&footprint, len, written, &write);
        if made.as_ref().is_err_and(is_short) && self.end_list(footprint().name()) {
            return self.make_once(&footprint, len, written, &write);
        }
        made
    }

    /// If the driver refuses memory that should fit, tries again with freed memory taken over and the pool's unused memory
    /// returned.
    fn make_once<'a, T: Element>(
        &self,
        footprint: &impl Fn() -> Footprint<'a>,
        len: usize,
        written: bool,
        write: &impl Fn(&Raw<'_>, DevicePtr, u64) -> std::result::Result<(), Refusal>,
    ) -> Result<DeviceBuffer<T>, SubmitError> {
        role::check("submitting work")?;
        let bytes = bytes_of::<T>(len)? as u64;
        let engine = &self.stream.engine;
        if bytes == 0 {
            engine.check_open()?;
            Claim::of_nothing(engine);
            let nothing = Allocation::new(self.stream, (DevicePtr::NULL, 0), 0, 0, true, None);
            return Ok(DeviceBuffer::new(nothing, len));
        }
        let op = || footprint().name().to_arc();
        let mut claim = self.claim(op, bytes, false)?;
        let attempt = |claim: &mut Claim<'_>| {
            let mut footprint = footprint();
            footprint.makes(written);
            if bytes > block_cache::LARGEST {
                // No block of that size is cached, and the driver's pool may have to grow.
                footprint.may_block = true;
            }
            footprint.claims(claim);
            let name = footprint.name();
            let ticket = self.submit_untold(&mut footprint, 2, &mut |raw| {
                let ptr = raw.alloc(claim)?;
                write(raw, ptr, bytes)
            })?;
            Ok::<_, SubmitError>((name, ticket))
        };
        let mut made = attempt(&mut claim);
        let mut again = made.as_ref().is_err_and(is_short);
        let mut backoff = Backoff::default();
        while again {
            drop(claim);
            let reach = Reach::of(engine)?;
            let outlook = engine.outlook(self.stream, bytes, reach.bytes(), self.budget());
            if matches!(outlook.prospect, Prospect::Never) {
                return Err(reach.refusal(engine, op(), bytes, &outlook).into());
            }
            // A refusal means that there is nothing to return.
            engine.backend.pool_trim(0).ok();
            claim = self.claim(op, bytes, true)?;
            made = attempt(&mut claim);
            again = made.as_ref().is_err_and(is_short) && claim.missed() && backoff.pause();
        }
        let (name, ticket) = match made {
            Ok(made) => made,
            // Computes the error again, after dropping the claim's memory.
            Err(failed) if is_short(&failed) => {
                drop(claim);
                engine.memory.account.lock().refuse(block(bytes));
                return Err(self.out_of_memory(op(), bytes).into());
            }
            Err(failed) => return Err(failed),
        };
        let Some(memory) = claim.keep() else { unreachable!("the operation was submitted") };
        let drawn = self.allowance().cloned();
        let memory = Allocation::new(self.stream, memory, bytes, ticket, written, drawn);
        name.told(self.stream, ticket);
        Ok(DeviceBuffer::new(memory, len))
    }

    fn claim(&self, op: impl FnOnce() -> Arc<str>, bytes: u64, forced: bool) -> Result<Claim<'s>> {
        let claim = Claim::new(self.stream, bytes, forced, self.allowance())?;
        claim.ok_or_else(|| self.out_of_memory(op(), bytes))
    }

    fn out_of_memory(&self, op: Arc<str>, bytes: u64) -> Error {
        MemoryInfo::out_of_memory(self.stream, op, bytes, self.budget())
    }

    /// The allowance that allocations draw from, unless it belongs to another device.
    fn allowance(&self) -> Option<&'s Arc<Allowance>> {
        let here = self.stream.engine.state.id;
        self.draws.filter(|allowance| allowance.engine().state.id == here)
    }

    fn budget(&self) -> Option<usize> {
        self.allowance().map(|allowance| allowance.number())
    }
}

fn is_short(failed: &SubmitError) -> bool {
    matches!(failed.error.detail(), ErrorDetail::OutOfMemory { .. })
}
