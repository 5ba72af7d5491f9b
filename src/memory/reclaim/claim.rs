//! Memory for an allocation that is about to be submitted.
//!
//! | step | takes | waits |
//! |---|---|---|
//! | 0 | a block of the stream's cache; memory freed on the stream in order, and fresh memory | nothing |
//! | 1 | cached blocks: the stream's own, then other streams' whose uses are complete | nothing |
//! | 2 | freed memory whose uses are complete, or on this stream alone | nothing |
//! | 3 | memory pending on other streams, if its uses have events and the device may wait | the stream, on the device |
//! | 4 | memory that graphs keep for their next launches; then steps 0 to 3 again | as above |
//! | 5 | nothing: out of memory | |
//!
//! A step is taken if the ones before it were not enough. Steps 1 to 3 are retried for a while if the missing memory exists but is temporarily out of
//! reach: another thread is moving it, or holds the lock of a stream to wait for ([`Backoff`]). Sizes are rounded so that blocks can be cached
//! ([`block_cache`](gpu_await_protocol::block_cache)); a block that only fits unrounded keeps its exact size and is not cached. The same holds for
//! blocks that draw from a reservation, which is counted in exact sizes. Blocks that are taken over are freed *on the allocating stream*, behind its
//! waits and before the allocation, so the driver's pool can reuse their memory in any division. Any excess is freed there in order.
//!
//! | a claim | its drop |
//! |---|---|
//! | before the driver's allocation | puts everything back: blocks are retired, with their known or possible users |
//! | with memory | frees it on the stream, like a buffer's |
//! | kept | does nothing: a buffer owns the memory |
//!
//! # Invariants
//! 1. Memory taken over for a claim is no longer available to any other (`random_programs_stay_within_the_limit`).
//! 2. It never waits for another stream's lock, and never holds two.
//! 3. Memory moves from place to place under `pressing`: a search under that lock finds all pending memory
//!    (`random_programs_stay_within_the_limit`).
//! 4. A block is freed on a stream that is behind every use of it: the use is complete, the stream's own, or waited for by an event at or
//!    behind it (`a_block_taken_over_waits_for_its_last_use`).
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::allowance::Allowance;
use super::pressure::Pressure;
use super::prospect::{Candidate, From};
use super::retired::{Block, Remnant};
use crate::backend::{DevicePtr, DriverResult};
use crate::error::Result;
use crate::runtime::event_pool::EventHandle;
use crate::runtime::progress::StreamRef;
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, MarkedPoint, Point, Retired, UserList};
use crate::thread::relax::Relax;
use crate::thread::role;
use gpu_await_protocol::account::{block, choose};
use gpu_await_protocol::block_cache;

/// How long an allocation waits for existing memory that another thread's call is moving or keeping locked:
/// such calls take microseconds, unless that thread waits for a core.
const BACKOFF_MOST: Duration = Duration::from_millis(100);

/// The remaining time, which runs from the first pause.
#[derive(Default)]
pub(crate) struct Backoff {
    end: Option<Instant>,
    relax: Relax,
}

impl Backoff {
    /// Lets other threads run; false once the time is over. Growing pauses made no measurable difference.
    pub(crate) fn pause(&mut self) -> bool {
        let now = Instant::now();
        let is_left = now < *self.end.get_or_insert(now + BACKOFF_MOST);
        if is_left {
            self.relax.pause();
        }
        is_left
    }
}

/// Memory for an allocation.
pub(crate) struct Claim<'l> {
    stream: &'l Arc<StreamState>,
    asked: u64,
    block: u64,
    ptr: Option<DevicePtr>,
    /// Pending bytes whose frees are on the stream.
    freed: u64,
    /// Memory whose frees are on streams that are waited for.
    moved: SmallVec<[(StreamRef<StreamState>, u64); 1]>,
    /// Memory whose frees are on the device's private stream, in front of `behind`.
    aside: u64,
    /// Blocks to be freed on the stream in front of the allocation.
    blocks: Vec<Taken>,
    waits: SmallVec<[MarkedPoint; 1]>,
    /// An event behind frees that, as far as the driver knows, may not have run.
    behind: Option<EventHandle>,
    /// How many of the account's pending bytes were claimed for the block.
    claimed: Option<u64>,
    /// The budget that it draws from.
    allowance: Option<&'l Arc<Allowance>>,
    /// Whether a stream with possibly unsubmitted frees was locked by another thread.
    missed: bool,
}

/// A block that was taken over, and its users.
struct Taken {
    ptr: DevicePtr,
    bytes: u64,
    users: UserList,
}

impl<'l> Claim<'l> {
    /// Memory for a buffer of this many bytes; `None` if there is not enough. `forced` if the driver refused
    /// a block that should fit: then the full size is taken over.
    ///
    /// # Errors
    /// The thread may not call the driver; the device is lost or closed; the buffer is more than is left of the allowance.
    pub(crate) fn new(
        stream: &'l Arc<StreamState>,
        bytes: u64,
        forced: bool,
        allowance: Option<&'l Arc<Allowance>>,
    ) -> Result<Option<Self>> {
        let engine = &stream.engine;
        let mut claim = Claim::of_nothing_yet(stream, bytes, allowance)?;
        if !forced {
            claim.ptr = stream.memory.reuse(&engine.memory.account, claim.block, claim.budget());
            if claim.ptr.is_some() || claim.settle() {
                return Ok(Some(claim));
            }
        }
        role::check("allocating device memory")?;
        let mut backoff = Backoff::default();
        let mut is_given_up = false;
        // Takes memory that graphs keep and do not currently use; once per allocation.
        let mut of_graphs =
            || !std::mem::replace(&mut is_given_up, true) && engine.memory.graphs.give_up();
        loop {
            engine.check_open()?;
            let most = engine.memory.account.lock().most(claim.budget());
            if forced || most < claim.block {
                claim.shrink();
            }
            if most < claim.block {
                if of_graphs() {
                    claim = Claim::of_nothing_yet(stream, bytes, allowance)?;
                    continue;
                }
                // The claim would fail anyway, so nothing is taken over.
                return Ok(None);
            }
            engine.look_everywhere();
            // The last handle of a stream must not be dropped under the lock: that wakes.
            let streams = engine.registry.streams();
            let settled = {
                let _pressing = engine.memory.pressing.lock();
                claim.gather(&streams, forced);
                claim.settle() || claim.shrink() && claim.settle()
            };
            if settled {
                return Ok(Some(claim));
            }
            // Not under the lock: its drop puts the blocks back.
            drop(claim);
            // Another thread may hold the missing memory, or the lock of a stream to wait for.
            let budget = allowance.map(|allowance| allowance.number());
            let may_come =
                !forced && engine.is_there(stream, block(bytes), budget) && backoff.pause();
            if !may_come && !of_graphs() {
                return Ok(None);
            }
            claim = Claim::of_nothing_yet(stream, bytes, allowance)?;
        }
    }

    fn of_nothing_yet(
        stream: &'l Arc<StreamState>,
        bytes: u64,
        allowance: Option<&'l Arc<Allowance>>,
    ) -> Result<Self> {
        let claim = Claim {
            stream,
            asked: bytes,
            // A budget counts the bytes requested: a rounded block would take from the next ones.
            block: match allowance {
                Some(_) => block(bytes),
                None => block_bytes(&stream.engine, bytes),
            },
            ptr: None,
            freed: 0,
            moved: SmallVec::new(),
            aside: 0,
            blocks: Vec::new(),
            waits: SmallVec::new(),
            behind: None,
            claimed: None,
            allowance,
            missed: false,
        };
        if let Some(allowance) = allowance {
            let (_, left) = allowance.size_and_left();
            if left < claim.block {
                return Err(allowance.spent(claim.block));
            }
        }
        Ok(claim)
    }

    fn budget(&self) -> Option<usize> {
        self.allowance.map(|allowance| allowance.number())
    }

    /// Reduces the claim to the exact size requested; false if it already was.
    fn shrink(&mut self) -> bool {
        let least = block(self.asked);
        std::mem::replace(&mut self.block, least) > least
    }

    /// Counts an empty buffer.
    pub(crate) fn of_nothing(engine: &Engine) {
        // Zero bytes fit any limit.
        let _ = engine.memory.account.lock().claim(0, 0, None);
    }

    /// The size of the buffer.
    pub(crate) fn asked(&self) -> u64 {
        self.asked
    }

    /// The size to request from the driver.
    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    /// Whether another attempt may succeed.
    pub(crate) fn missed(&self) -> bool {
        self.missed
    }

    /// The memory, if the stream had it cached.
    pub(crate) fn ptr(&self) -> Option<DevicePtr> {
        self.ptr
    }

    /// The points that the stream must wait for first.
    pub(crate) fn take_waits(&mut self) -> SmallVec<[MarkedPoint; 1]> {
        std::mem::take(&mut self.waits)
    }

    /// An event to wait for in front of the allocation.
    pub(crate) fn behind(&self) -> Option<&EventHandle> {
        self.behind.as_ref()
    }

    /// Frees the blocks taken over; the caller puts each free on the stream.
    ///
    /// # Errors
    /// A free is refused: its block is counted as leaked.
    pub(crate) fn free_blocks(
        &mut self,
        free: impl Fn(DevicePtr) -> DriverResult<()>,
    ) -> DriverResult<()> {
        while let Some(Taken { ptr, bytes, .. }) = self.blocks.pop() {
            match free(ptr) {
                Ok(()) => self.freed += bytes,
                Err(code) => {
                    self.unclaim();
                    drop(self.stream.engine.leaked(bytes, code));
                    return Err(code);
                }
            }
        }
        Ok(())
    }

    /// Records the memory from the driver.
    pub(crate) fn allocated(&mut self, ptr: DevicePtr) {
        self.ptr = Some(ptr);
    }

    /// Hands the memory over to a buffer.
    pub(crate) fn keep(mut self) -> Option<(DevicePtr, u64)> {
        let ptr = self.ptr.take()?;
        self.put_rest();
        self.claimed = None;
        Some((ptr, self.block))
    }

    fn taken(&self) -> u64 {
        let blocks = self.blocks.iter().map(|taken| taken.bytes).sum::<u64>();
        self.freed + self.aside + self.moved.iter().map(|(_, bytes)| bytes).sum::<u64>() + blocks
    }

    /// How much is still to be taken over.
    fn lacks(&self, forced: bool) -> u64 {
        let taken = self.taken();
        match forced {
            true => self.block.saturating_sub(taken),
            false => {
                self.stream.engine.memory.account.lock().lacks(self.block, taken, self.budget())
            }
        }
    }

    /// Claims the block from taken and fresh memory; false if that is not enough.
    fn settle(&mut self) -> bool {
        self.freed += self.stream.take_freed(self.block.saturating_sub(self.taken()), None);
        let taken = self.taken();
        let budget = self.budget();
        let claimed = self.stream.engine.memory.account.lock().claim(self.block, taken, budget);
        self.claimed = claimed.then_some(taken);
        claimed
    }

    /// Steps 1 to 3.
    fn gather(&mut self, streams: &[StreamRef<StreamState>], forced: bool) {
        let engine = self.stream.engine.clone();
        let others = streams.iter().map(|stream| &**stream);
        let others = others.filter(|stream| stream.progress.id != self.stream.progress.id);
        for stream in std::iter::once(self.stream).chain(others.clone()) {
            let own = stream.progress.id == self.stream.progress.id;
            let may_go = |block: &Block| own || stream.progress.timeline.is_complete(block.ticket);
            let lacks = self.lacks(forced);
            for block in stream.memory.take_kept(&engine.memory.account, lacks, may_go) {
                self.blocks.push(Taken::of(stream, block));
            }
        }
        let (free, waiting): (Vec<_>, Vec<_>) = engine
            .candidates(streams, self.stream)
            .into_iter()
            .filter(|candidate| !matches!(candidate.from, From::Nobody))
            .partition(|candidate| candidate.waits.is_empty());
        self.take_over(free, forced);
        self.aside = engine.memory.take_freeing(self.lacks(forced));
        if self.aside > 0 || forced {
            self.behind = engine.behind_frees();
        }
        if self.behind.is_none() {
            engine.put_freeing(std::mem::take(&mut self.aside));
        }
        let may_wait = engine.options.on_pressure == Pressure::Wait;
        if may_wait {
            self.take_over(waiting, forced);
        }
        if forced {
            // If not enough was found for all of it, waits for every free that the driver may not have seen run.
            let may_wait = may_wait && self.lacks(forced) > 0;
            for stream in others {
                let Some(ticket) = stream.unproven_free(may_wait) else { continue };
                match stream.try_event_behind(ticket) {
                    Some(marker) => {
                        self.waits.push(MarkedPoint::at(stream.progress.clone(), marker));
                    }
                    None => self.missed = true,
                }
            }
        }
    }

    /// Takes over as many candidates as it needs.
    fn take_over(&mut self, mut candidates: Vec<Candidate>, forced: bool) {
        let mut missed = Vec::new();
        loop {
            let sizes: Vec<u64> = candidates.iter().map(|candidate| candidate.bytes).collect();
            let mut chosen = choose(&sizes, self.lacks(forced));
            if chosen.is_empty() {
                break;
            }
            chosen.sort_unstable();
            for index in chosen.into_iter().rev() {
                let candidate = candidates.swap_remove(index);
                if !self.try_to_take(&candidate, forced) {
                    missed.push(candidate);
                }
            }
        }
        // The lock was held briefly, perhaps by the poller, which served the request for a marker on release.
        for candidate in missed {
            if self.lacks(forced) > 0 {
                self.try_to_take(&candidate, forced);
            }
        }
    }

    /// Takes a candidate over, unless a point that it waits for has no event.
    fn try_to_take(&mut self, candidate: &Candidate, forced: bool) -> bool {
        let mut waits: SmallVec<[MarkedPoint; 2]> = SmallVec::new();
        for used in &candidate.waits {
            let Point { stream, ticket } = used;
            match stream.stream().and_then(|stream| stream.try_event_behind(*ticket)) {
                Some(marker) => waits.push(MarkedPoint::at(stream.clone(), marker)),
                None if used.is_complete() => {}
                None => return false,
            }
        }
        let own = self.stream.progress.id;
        let is_behind = |used: &Point| {
            let waited_for = |MarkedPoint { point, .. }: &MarkedPoint| {
                point.stream == used.stream && point.ticket >= used.ticket
            };
            used.stream.id == own || used.is_complete() || waits.iter().any(waited_for)
        };
        let taken = match &candidate.from {
            From::Kept(stream, block) => {
                let same = |kept: &Block| kept.ptr == block.ptr && kept.ticket == block.ticket;
                let account = &self.stream.engine.memory.account;
                let block = stream.memory.take_kept(account, 1, same).pop();
                block.map(|block| Taken::of(stream, block))
            }
            From::Deferred(stream, block) => {
                let block = stream.memory.take_deferred(block.ptr, block.ticket);
                block.map(|block| Taken::of(stream, block))
            }
            From::Retired(ptr) => self.stream.engine.memory.with_retired(|retired| {
                let index = retired.iter().position(|retired| {
                    matches!(retired.what, Remnant::Memory { ptr: there, .. } if there == *ptr)
                        // The address may have been reused meanwhile.
                        && retired.users.iter().all(is_behind)
                })?;
                let Retired { what, users, .. } = retired.swap_remove(index);
                Some(Taken { ptr: *ptr, bytes: what.bytes(), users })
            }),
            From::Freed(stream, ticket) => {
                let bytes = stream.take_freed(self.lacks(forced), Some(*ticket));
                if bytes > 0 {
                    self.moved.push((stream.clone(), bytes));
                    self.waits.extend(waits);
                }
                return true;
            }
            From::Nobody => None,
        };
        if let Some(taken) = taken {
            self.blocks.push(taken);
            self.waits.extend(waits);
        }
        true
    }

    fn unclaim(&mut self) {
        if let Some(taken) = self.claimed.take() {
            let budget = self.budget();
            self.stream.engine.memory.account.lock().unclaim(self.block, taken, budget);
        }
    }

    /// Gives excess memory that was taken over to the stream, which is behind the frees.
    fn put_rest(&mut self) {
        let taken = self.taken();
        self.moved.clear();
        (self.freed, self.aside) = (0, 0);
        self.stream.put_freed(taken.saturating_sub(self.block));
    }
}

/// The size of the block for a buffer of this many bytes.
fn block_bytes(engine: &Engine, bytes: u64) -> u64 {
    let is_cached = engine.options.block_cache_bytes > 0;
    block_cache::rounded(bytes).filter(|_| is_cached).unwrap_or_else(|| block(bytes))
}

impl Taken {
    /// A block that one stream used exclusively.
    fn of(stream: &StreamState, block: Block) -> Self {
        let Block { ptr, bytes, ticket } = block;
        let users = UserList::from_iter([stream.point(ticket)]);
        Taken { ptr, bytes, users }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let engine = &self.stream.engine;
        if let Some(ptr) = self.ptr.take() {
            if self.claimed.is_some() {
                self.put_rest();
            }
            return self.stream.free_in_order(ptr, self.block, self.budget());
        }
        self.unclaim();
        self.stream.put_freed(std::mem::take(&mut self.freed));
        engine.put_freeing(std::mem::take(&mut self.aside));
        for (stream, bytes) in self.moved.drain(..) {
            stream.put_freed(bytes);
        }
        for Taken { ptr, bytes, users } in self.blocks.drain(..) {
            engine.retire(Remnant::Memory { ptr, bytes }, users);
        }
        engine.memory.moved();
    }
}
