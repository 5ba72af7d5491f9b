//! Memory that waits for a stream: what the host lent to it, with users' values and callbacks for the driver, and device memory that was freed
//! in stream order.
//!
//! | a lent value | when its ticket is complete | when it never will be |
//! |---|---|---|
//! | our own host memory | is dropped | is quarantined: the copy engines may not have stopped |
//! | a callback | is dropped by the reaper | its closure is taken, and both are dropped by the reaper |
//! | a value that the work needs | is dropped by the reaper | is buried with a lost device; otherwise leaked, and counted |
//!
//! At the end of the process the device's work goes on, and what is lent stays where it is.
//!
//! | memory goes | when | is counted as |
//! |---|---|---|
//! | to the stream's block cache | it is small enough and there is room | kept |
//! | from there to the stream's next allocation of about that size | | allocated |
//! | to the driver, behind everything on the stream | otherwise, where a driver call may be made now | pending |
//! | to the driver, by the next submitter or the poller | otherwise | pending |
//! | to the stream's next allocation, through the driver | its free is on the stream | allocated |
//! | to another stream's allocation, which waits for this stream | see [`claim`](crate::memory::reclaim::claim) | allocated |
//! | back to the pool | the stream was seen to have passed it | nothing |
//!
//! # Invariants
//! 1. Memory goes from one buffer to another on its home stream, behind its last use (`what_is_freed_is_used_again_behind_its_last_use`),
//!    or on a stream that waits for that.
//! 2. A block's place and the account agree: one changes under the lock of the other.
#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use gpu_await_protocol::sync::Mutex;
use smallvec::SmallVec;

use super::StreamState;
use super::markers::Counted;
use crate::backend::DevicePtr;
use crate::memory::reclaim::retired::{Block, LentBlock};
use crate::runtime::engine::Engine;
use crate::thread::role::Role;
use crate::thread::{exit, role};
use gpu_await_protocol::account::Account;
use gpu_await_protocol::block_cache;
use gpu_await_protocol::block_cache::BlockCache;
use gpu_await_protocol::timeline::Timeline;

/// A lent value.
pub(crate) enum Payload {
    /// Our own memory: dropping it is cheap and runs no foreign code.
    Memory(Arc<dyn LentBlock>),
    /// A user's callback for the driver: dropped by the reaper.
    Callback(Box<dyn Callback>),
    /// A user's value that the work needs: dropped by the reaper, also after the loss of the device; never
    /// if the stream waits for ever.
    Kept(Box<dyn Any + Send>),
}

/// A share of a callback for the driver; dropped like any other once it was called.
pub(crate) trait Callback: Any + Send {
    /// On a device that makes no progress any more: takes the user's closure, unless it was called. If the
    /// driver calls all the same, nothing happens.
    fn give_up(&self) -> Option<Box<dyn Any + Send>>;
}

/// A value that the device may touch until `ticket` is complete.
struct LentMemory {
    ticket: u64,
    bytes: u64,
    payload: Payload,
}

/// The values lent to a stream, in the order of their tickets.
#[derive(Default)]
pub(super) struct LentQueue {
    queue: Counted<VecDeque<LentMemory>>,
    /// Threads that took memory out, and did not drop it yet.
    takers: AtomicU32,
}

impl LentQueue {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Lends host memory to the device until `ticket` is complete.
    pub(super) fn lend(
        &self,
        engine: &Engine<StreamState>,
        ticket: u64,
        bytes: u64,
        payload: Payload,
    ) {
        // ORDERING: Relaxed: a statistic; added before the thread that takes the memory back subtracts it.
        engine.state.counters.lent_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.queue.lock().push_back(LentMemory { ticket, bytes, payload });
    }

    /// Takes back lent memory that the device has finished with, and sends users' values to be dropped.
    pub(super) fn take_back(&self, engine: &Engine<StreamState>, timeline: &Timeline) {
        // A submitter's concurrent additions are not complete yet.
        while !self.queue.is_empty() {
            let mut blocks: SmallVec<[Arc<dyn LentBlock>; 8]> = SmallVec::new();
            let (mut any, mut bytes) = (false, 0);
            {
                let mut lent = self.queue.lock();
                let completed = timeline.completed();
                while blocks.len() < 8 && lent.front().is_some_and(|l| l.ticket <= completed) {
                    let Some(lent) = lent.pop_front() else { break };
                    any = true;
                    bytes += lent.bytes;
                    match lent.payload {
                        Payload::Memory(memory) => blocks.push(memory),
                        // Under the lock: a thread that finds it empty also finds them sent.
                        Payload::Callback(callback) => engine.background.drop_later(callback),
                        Payload::Kept(value) => engine.background.drop_later(value),
                    }
                }
                if !any {
                    return;
                }
                // ORDERING: Relaxed: under the lock, which a reader takes first.
                self.takers.fetch_add(1, Ordering::Relaxed);
            }
            drop(blocks);
            // ORDERING: Relaxed: a statistic.
            engine.state.counters.lent_bytes.fetch_sub(bytes, Ordering::Relaxed);
            // ORDERING: Release: a thread that sees no takers sees that the memory is back.
            self.takers.fetch_sub(1, Ordering::Release);
        }
    }

    /// Whether a thread is still taking something back.
    pub(super) fn has_takers(&self) -> bool {
        drop(self.queue.lock());
        // ORDERING: Acquire: see above.
        self.takers.load(Ordering::Acquire) > 0
    }

    /// Releases what is left on a lost device, or on a stream that nothing steps any more: memory goes into quarantine.
    pub(super) fn give_up(&self, engine: &Engine<StreamState>) {
        let left = std::mem::take(&mut *self.queue.lock());
        for LentMemory { bytes, payload, .. } in left {
            give_up(engine, payload);
            // ORDERING: Relaxed: a statistic.
            engine.state.counters.lent_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

/// Releases a lent value whose use will never be seen to end. At the end of the process the device may go on, and the
/// value stays.
fn give_up(engine: &Engine<StreamState>, payload: Payload) {
    if exit::begun() {
        return std::mem::forget(payload);
    }
    match payload {
        // The memory holds its device, which must not be kept as well.
        Payload::Memory(memory) => engine.set_aside(&*memory),
        Payload::Callback(callback) => {
            if let Some(function) = callback.give_up() {
                engine.background.drop_later(function);
            }
            engine.background.drop_later(callback);
        }
        Payload::Kept(value) if engine.state.lost().is_some() => engine.background.bury(value),
        Payload::Kept(value) => {
            std::mem::forget(value);
            engine.state.count_unreturned();
        }
    }
}

/// Memory that was freed on a stream, and where it is.
pub(crate) struct FreedMemory {
    block_cache: Mutex<BlockCache<Block>>,
    /// Blocks whose free was put off.
    deferred: Counted<Vec<Block>>,
    in_order: Mutex<FreesInOrder>,
}

/// Frees that are on the stream.
#[derive(Default)]
struct FreesInOrder {
    /// In ticket order.
    queue: VecDeque<InOrder>,
    /// The ticket behind the last one; 0: there was none.
    last: u64,
}

/// Frees behind the same ticket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InOrder {
    pub(crate) bytes: u64,
    /// Once it is complete, the frees wait for nothing.
    pub(crate) ticket: u64,
    /// Waits for this block need to be behind this ticket.
    pub(crate) behind: u64,
}

impl FreedMemory {
    pub(super) fn new(cache_bytes: u64) -> Self {
        FreedMemory {
            block_cache: Mutex::new(BlockCache::new(cache_bytes)),
            deferred: Counted::default(),
            in_order: Mutex::default(),
        }
    }

    /// Caches a block, if it is small enough and there is room. Under the lock `is_closed` is asked: a thread that empties
    /// the cache of a closed device finds every block cached before.
    fn cache(
        &self,
        account: &Mutex<Account>,
        block: Block,
        budget: Option<usize>,
        is_closed: impl FnOnce() -> bool,
    ) -> bool {
        let mut block_cache = self.block_cache.lock();
        let fits = block_cache::rounded(block.bytes) == Some(block.bytes) && !is_closed();
        let kept = fits && block_cache.put(block.bytes, block).is_ok();
        if kept {
            account.lock().keep(block.bytes, budget);
        }
        kept
    }

    /// A block of that size from the cache, for the next submission.
    pub(crate) fn reuse(
        &self,
        account: &Mutex<Account>,
        bytes: u64,
        budget: Option<usize>,
    ) -> Option<DevicePtr> {
        let mut block_cache = self.block_cache.lock();
        let block = block_cache.take(bytes)?;
        if account.lock().reuse(bytes, budget) {
            return Some(block.ptr);
        }
        // There is room again: it was taken out just now.
        block_cache.put(bytes, block).ok();
        None
    }

    /// Takes blocks out of the cache, until they make up `least` bytes: they are pending then.
    pub(crate) fn take_kept(
        &self,
        account: &Mutex<Account>,
        least: u64,
        may_go: impl FnMut(&Block) -> bool,
    ) -> Vec<Block> {
        if least == 0 {
            return Vec::new();
        }
        let mut block_cache = self.block_cache.lock();
        let taken = block_cache.take_out(least, may_go);
        let mut account = account.lock();
        taken.iter().for_each(|(size, _)| account.uncache(*size));
        taken.into_iter().map(|(_, block)| block).collect()
    }

    pub(crate) fn kept_blocks(&self) -> Vec<Block> {
        self.block_cache.lock().iter().copied().collect()
    }

    pub(crate) fn deferred_blocks(&self) -> Vec<Block> {
        self.deferred.read().clone()
    }

    #[inline]
    pub(super) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Takes over a block whose free was put off, if it is still there.
    pub(crate) fn take_deferred(&self, ptr: DevicePtr, ticket: u64) -> Option<Block> {
        let mut deferred = self.deferred.lock();
        let there = |block: &Block| block.ptr == ptr && block.ticket == ticket;
        let index = deferred.iter().position(there)?;
        Some(deferred.swap_remove(index))
    }

    /// Takes the blocks whose free was put off.
    pub(super) fn take_all_deferred(&self) -> Vec<Block> {
        std::mem::take(&mut *self.deferred.lock())
    }

    /// Takes cached blocks, and blocks whose free was put off.
    fn take_blocks(&self, account: &Mutex<Account>, may_go: impl Fn(&Block) -> bool) -> Vec<Block> {
        let mut blocks = self.take_kept(account, u64::MAX, &may_go);
        blocks.extend(self.deferred.lock().extract_if(.., |block| may_go(block)));
        blocks
    }

    /// The frees on the stream that are not known to be complete.
    pub(crate) fn frees_in_order(&self) -> Vec<InOrder> {
        self.in_order.lock().queue.iter().copied().collect()
    }

    /// How much they free.
    pub(crate) fn freed_bytes(&self) -> u64 {
        self.in_order.lock().queue.iter().map(|freed| freed.bytes).sum()
    }

    fn enter(&self, entry: InOrder) {
        let mut freed = self.in_order.lock();
        freed.last = freed.last.max(entry.behind);
        match freed.queue.back_mut() {
            Some(last) if (last.ticket, last.behind) == (entry.ticket, entry.behind) => {
                last.bytes += entry.bytes;
            }
            _ => freed.queue.push_back(entry),
        }
    }

    /// Takes over memory whose free is on the stream, at most `most` bytes; of `ticket` alone, if given.
    fn take_freed(&self, most: u64, ticket: Option<u64>) -> u64 {
        let mut freed = self.in_order.lock();
        let mut taken = 0;
        // Newest first: the oldest are complete soonest.
        for index in (0..freed.queue.len()).rev() {
            let entry = &mut freed.queue[index];
            if ticket.is_none_or(|ticket| entry.ticket == ticket) {
                let part = entry.bytes.min(most - taken);
                entry.bytes -= part;
                taken += part;
            }
        }
        freed.queue.retain(|entry| entry.bytes > 0);
        taken
    }

    /// Takes the frees on the stream whose ticket is one of these.
    fn take_frees(&self, which: impl Fn(u64) -> bool) -> VecDeque<InOrder> {
        let mut freed = self.in_order.lock();
        let (taken, left) =
            std::mem::take(&mut freed.queue).into_iter().partition(|entry| which(entry.ticket));
        freed.queue = left;
        taken
    }

    /// Whether frees on the stream are not known to be complete.
    fn has_frees(&self) -> bool {
        !self.in_order.lock().queue.is_empty()
    }

    /// Moves memory whose free has run back to the pool, in the account; true if there was any.
    fn release(&self, account: &Mutex<Account>, has_run: impl Fn(u64) -> bool) -> bool {
        let mut freed = self.in_order.lock();
        let mut bytes = 0;
        while let Some(entry) = freed.queue.front() {
            if !has_run(entry.ticket) {
                break;
            }
            bytes += entry.bytes;
            freed.queue.pop_front();
        }
        if bytes > 0 {
            account.lock().release(bytes);
        }
        bytes > 0
    }
}

impl StreamState {
    /// Frees a buffer's block behind everything submitted so far, where another allocation may use it; never blocks. The memory returns to its
    /// budget.
    pub(crate) fn free_in_order(
        self: &Arc<Self>,
        ptr: DevicePtr,
        bytes: u64,
        budget: Option<usize>,
    ) {
        let block = Block { ptr, bytes, ticket: self.progress.timeline.submitted() };
        let account = &self.engine.memory.account;
        if !self.memory.cache(account, block, budget, || self.engine.ending.is_closed()) {
            account.lock().retire(bytes, budget);
            self.give_back(block);
        } else if self.engine.options.memory_limit.is_some() {
            // With a limit, others may wait for the block: they must not wait for later work.
            self.want(block.ticket);
        }
        self.engine.memory.moved();
    }

    /// Frees memory behind everything submitted so far; never blocks.
    fn give_back(self: &Arc<Self>, block: Block) {
        let may_free = role::current() == Role::Free;
        let freed = may_free && self.try_with(|turn| turn.free(block)).is_some();
        if !freed {
            self.memory.deferred.lock().push(block);
            self.activate();
            return;
        }
        // ORDERING: SeqCst: pairs with `desert`. Either that sees the free's ticket, or this sees that there is no handle any more: the caller
        // may have the last reference, and the stream must not go before the free has run.
        fence(Ordering::SeqCst);
        if self.is_deserted() && self.has_dues() {
            self.activate();
        }
    }

    /// Takes over memory whose free is on the stream, `most` bytes of it, for work behind that: on the stream
    /// itself, or on one that waits for it. Of a certain ticket, or any.
    pub(crate) fn take_freed(&self, most: u64, ticket: Option<u64>) -> u64 {
        self.collect_freed();
        self.memory.take_freed(most, ticket)
    }

    /// Counts memory whose free is on the stream, or in front of something that it waits for.
    pub(crate) fn put_freed(self: &Arc<Self>, bytes: u64) {
        if bytes > 0 {
            let tail = self.progress.timeline.submitted();
            self.enter_freed(InOrder { bytes, ticket: tail, behind: tail + 1 });
        }
    }

    pub(super) fn enter_freed(self: &Arc<Self>, entry: InOrder) {
        self.memory.enter(entry);
        self.collect_freed();
        self.see_to_frees();
    }

    /// Moves memory freed before the completed ticket back to the pool, in the account.
    pub(crate) fn collect_freed(&self) {
        if self.is_found_stuck() {
            self.give_up_freed();
        }
        let lost = self.engine.state.lost().is_some();
        let has_run = |ticket| lost || self.progress.timeline.is_complete(ticket);
        if self.memory.release(&self.engine.memory.account, has_run) {
            self.engine.memory.moved();
        }
    }

    /// Whether a future waits for memory that frees on the stream may give it: nothing else may ask about them.
    pub(super) fn owes_frees(&self) -> bool {
        self.engine.memory.reclaimers.are_there() && self.memory.has_frees()
    }

    /// Leaves such frees to the poller.
    pub(super) fn see_to_frees(self: &Arc<Self>) {
        if self.owes_frees() {
            self.activate();
        }
    }

    /// Leaks the memory that the stuck stream would have freed: no allocation may take it over or wait for
    /// it.
    #[cold]
    fn give_up_freed(&self) {
        let never = |ticket: u64| !self.progress.timeline.is_complete(ticket);
        let freed: u64 = self.memory.take_frees(never).iter().map(|entry| entry.bytes).sum();
        if freed > 0 {
            self.engine.memory.leak(freed);
        }
        let blocks =
            self.memory.take_blocks(&self.engine.memory.account, |block| never(block.ticket));
        blocks.into_iter().for_each(|block| self.engine.retire_block(&self.progress, block));
    }

    /// The ticket behind the last free, if that was not seen to be complete: the driver may not know either.
    /// A free that waits for something counts only if the caller `may_wait` as well.
    pub(crate) fn unproven_free(&self, may_wait: bool) -> Option<u64> {
        let last = self.memory.in_order.lock().last;
        (last > self.progress.timeline.completed()
            && (may_wait || self.progress.timeline.is_complete(last - 1)))
        .then_some(last)
    }

    /// The remaining blocks of a stream that goes away, whose work is complete or never will be.
    pub(super) fn take_left(&self) -> Vec<Block> {
        // Any other stream completes its work, even when destroyed.
        let runs = self.engine.state.lost().is_some() || !self.is_stuck();
        for InOrder { ticket, bytes, .. } in self.memory.take_frees(|_| true) {
            if runs || self.progress.timeline.is_complete(ticket) {
                self.engine.memory.release(bytes);
            } else {
                // The driver never runs this free.
                self.engine.memory.leak(bytes);
            }
        }
        self.memory.take_blocks(&self.engine.memory.account, |_| true)
    }
}
