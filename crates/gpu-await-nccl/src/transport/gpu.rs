//! NCCL as a transport.
//!
//! # Blocking communicators, aborted in two steps
//! NCCL's non-blocking communicators start a thread for every call, and return before the work is on its stream; a call would cost
//! some 20 µs more, and its ticket would come before its work. So communicators are blocking: a call returns when the work is on
//! the stream, which takes NCCL 5 µs, or a few milliseconds where it connects ranks that were not connected yet.
//!
//! Where such a call waits for a rank that does not come, an abort must end it without freeing the handle under it. `ncclCommAbort`
//! does both, but inside of a group the second half is left to the end of the group:
//!
//! | step | thread of the abort | a call that is running |
//! |---|---|---|
//! | 1 | group begins; `ncclCommAbort` sets the flags that kernels and connecting threads look at | returns with an error |
//! | 2 | takes the lock that calls are made under, and releases it: none is running | refused from now on: it looks at `ending` under that lock |
//! | 3 | waits for the streams: no kernel has the handle's memory any more | refused |
//! | 4 | when nothing is pending ([`Quiet`](crate::quiet::Quiet)) the group ends: the handle is freed; if graphs have its work, when the last of them is gone | refused |
//!
//! # Invariants
//! 1. A handle is freed once, by the thread that sets `ending`, and after the last call that uses it: calls are made under `calling`, and
//!    check `ending` there.
//! 2. NCCL's threads are asked for errors only while the handle lives: under `freed`.

mod shrink;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use gpu_await::{Device, RawQueue, Stream};

use parking_lot::Mutex;

use super::{CallOwner, LocalRank, Placed, Shrink, Transport};
use crate::call::{Call, Verb};
use crate::error::{CollectiveLost, Error, LostCause, Result};
use crate::exchange::{Inbox, LAST_WORK};
use crate::mesh::Channel;
use crate::nccl::driver::{Current, Driver};
use crate::nccl::{Addresses, Comm, Lane, Nccl, RawId};
use crate::{stats, system};

pub(crate) struct GpuTransport {
    comms: Arc<Comms>,
    world: usize,
    /// The ranks of this process.
    ranks: Vec<usize>,
    group: Option<Peers>,
}

/// The other ranks of a group, whose end NCCL may not see.
struct Peers {
    channel: Arc<Channel>,
    /// The inbox of its first rank: the end of another process is reported to all.
    inbox: Arc<Inbox>,
    /// When the end of one was first seen.
    ended: Mutex<Option<Instant>>,
}

impl Peers {
    fn new(channel: Arc<Channel>, rank: usize) -> Peers {
        let inbox = channel.inbox(rank);
        Peers { channel, inbox, ended: Mutex::default() }
    }

    /// Why pending work will not end.
    fn look(&self) -> Option<LostCause> {
        if let Some(cause) = self.inbox.failed() {
            return Some(cause);
        }
        let cause = self.inbox.ended()?;
        let since = *self.ended.lock().get_or_insert_with(Instant::now);
        (since.elapsed() > LAST_WORK).then_some(cause)
    }
}

/// The handles of the ranks of this process.
struct Comms {
    nccl: &'static Nccl,
    driver: &'static Driver,
    handles: Vec<Comm>,
    /// The contexts of their devices.
    contexts: Vec<u64>,
    _devices: Vec<Device>,
    streams: Vec<Stream>,
    /// Held by the call that is running.
    calling: Mutex<()>,
    /// A thread is freeing the handles, or has.
    ending: AtomicBool,
    /// Held while the handles are used to look for errors, and while they are freed.
    freed: Mutex<bool>,
    /// Each graph with its calls holds a reference.
    graphs: Arc<()>,
}

impl GpuTransport {
    /// Connects the ranks of this process with all others. Blocks until every rank has come.
    pub(crate) fn connect(
        id: RawId,
        world: usize,
        ranks: &[LocalRank],
        contexts: Vec<u64>,
        channel: Option<Arc<Channel>>,
    ) -> Result<GpuTransport> {
        let (nccl, driver) = (Nccl::get()?, Driver::get()?);
        system::wait_at_exit();
        nccl.group_start()?;
        // The handles must not move until the group has ended.
        let mut handles = vec![Comm::NONE; ranks.len()];
        let mut failed = None;
        for ((local, context), handle) in ranks.iter().zip(&contexts).zip(&mut handles) {
            // SAFETY: the device is open, and `ranks` keeps it.
            let made = unsafe { driver.enter(*context) }.and_then(|_current| {
                // SAFETY: the handles are not moved, and are read when the group has ended.
                unsafe { nccl.init_rank(handle, world, id, local.rank) }
            });
            if let Err(error) = made {
                failed = Some(error);
                break;
            }
        }
        let ended = {
            // NCCL leaves the context that it finds; without one it would make one on GPU 0.
            // SAFETY: as above.
            let _current = unsafe { driver.enter(contexts[0]) }?;
            nccl.group_end()
        };
        if let Some(error) = failed.or(ended.err()) {
            // Only NCCL knows what the handles of a failed initialization still hold; nobody uses them.
            return Err(error);
        }
        GpuTransport::of(handles, world, ranks, contexts, channel)
    }

    /// Makes it from connected handles.
    fn of(
        handles: Vec<Comm>,
        world: usize,
        ranks: &[LocalRank],
        contexts: Vec<u64>,
        channel: Option<Arc<Channel>>,
    ) -> Result<GpuTransport> {
        let comms = Comms {
            nccl: Nccl::get()?,
            driver: Driver::get()?,
            handles,
            contexts,
            _devices: ranks.iter().map(|local| local.device.clone()).collect(),
            streams: ranks.iter().map(|local| local.stream.clone()).collect(),
            calling: Mutex::new(()),
            ending: AtomicBool::new(false),
            freed: Mutex::new(false),
            graphs: Arc::default(),
        };
        let group = channel.map(|channel| Peers::new(channel, ranks[0].rank));
        let ranks = ranks.iter().map(|local| local.rank).collect();
        Ok(GpuTransport { comms: Arc::new(comms), world, ranks, group })
    }

    /// Makes one call, or adds it to the group of the thread.
    ///
    /// # Safety
    /// The addresses are of memory that is lent to the stream of the lane, as long as the call says.
    unsafe fn call(&self, lane: Lane, call: &Call) -> Result<()> {
        let nccl = self.comms.nccl;
        let Call { verb, element, count, from, to } = *call;
        let memory = Addresses { from, to };
        match verb {
            Verb::AllReduce(by) => {
                // SAFETY: the caller vouches for the memory; `submit` for the rest.
                unsafe { nccl.all_reduce(lane, memory, count, element, by) }
            }
            Verb::Barrier => {
                let by = crate::element::Reduction::Sum;
                // SAFETY: as above.
                unsafe { nccl.all_reduce(lane, memory, count, element, by) }
            }
            Verb::Reduce(by, root) => {
                // SAFETY: as above.
                unsafe { nccl.reduce(lane, memory, count, element, by, root) }
            }
            Verb::Broadcast(root) => {
                // SAFETY: as above.
                unsafe { nccl.broadcast(lane, memory, count, element, root) }
            }
            // SAFETY: as above.
            Verb::AllGather => unsafe { nccl.all_gather(lane, memory, count, element) },
            Verb::ReduceScatter(by) => {
                // SAFETY: as above.
                unsafe { nccl.reduce_scatter(lane, memory, count, element, by) }
            }
            // SAFETY: as above.
            Verb::Send(peer) => unsafe { nccl.send(lane, memory, count, element, peer) },
            // SAFETY: as above.
            Verb::Receive(peer) => unsafe { nccl.receive(lane, memory, count, element, peer) },
            Verb::AllToAll => (0..self.world).try_for_each(|peer| {
                let share = (peer * call.bytes()) as u64;
                let memory = Addresses { from: from + share, to: to + share };
                // SAFETY: as above; the memory has a share for each rank.
                unsafe { nccl.send(lane, memory, count, element, peer) }?;
                // SAFETY: as above.
                unsafe { nccl.receive(lane, memory, count, element, peer) }
            }),
        }
    }
}

impl Transport for GpuTransport {
    fn operations(&self) -> u64 {
        2
    }

    fn submit(
        &self,
        _ranks: &[LocalRank],
        parts: &[Placed<'_, '_>],
        _owner: &Weak<dyn CallOwner>,
    ) -> Result<(), LostCause> {
        let comms = &*self.comms;
        let Some(first) = parts.first() else { return Ok(()) };
        let _calling = comms.calling.lock();
        if comms.ending.load(Ordering::SeqCst) {
            return Err(LostCause::Aborted);
        }
        // SAFETY: the device is kept beside its context.
        let current = unsafe { comms.driver.enter(comms.contexts[first.at]) };
        let _current = current.map_err(cause_of)?;
        let put = |placed: &Placed<'_, '_>, call: &Call| {
            // The loan of the memory ends after this call.
            let lane = Lane { comm: comms.handles[placed.at], stream: placed.loan.raw_stream() };
            // SAFETY: the memory is lent to the stream of that rank; the handle is live, as calls are refused before it
            // is freed, under the lock that is held here.
            unsafe { self.call(lane, call) }
        };
        if let ([alone], [call]) = (parts, first.calls)
            && call.verb != Verb::AllToAll
        {
            return put(alone, call).map_err(cause_of);
        }
        comms.nccl.group_start().map_err(cause_of)?;
        let put = parts
            .iter()
            .try_for_each(|placed| placed.calls.iter().try_for_each(|call| put(placed, call)));
        // Always: a group left open would swallow the thread's next calls.
        let ended = comms.nccl.group_end();
        put.and(ended).map_err(cause_of)
    }

    fn capture(
        &self,
        (at, _): (usize, &LocalRank),
        queue: &RawQueue<'_>,
        calls: &[Call],
        _owner: &Weak<dyn CallOwner>,
    ) -> Result<()> {
        let comms = &*self.comms;
        let _calling = comms.calling.lock();
        if comms.ending.load(Ordering::SeqCst) {
            return Err(aborted(self.ranks[0]));
        }
        let lane = Lane { comm: comms.handles[at], stream: queue.stream() };
        comms.nccl.group_start()?;
        let put = calls.iter().try_for_each(|call| {
            // SAFETY: the memory is declared, and kept by the graph; the handle is live, as calls are refused before it is
            // freed, under the lock that is held here, and NCCL does not free it while a graph has work of it. The context is
            // current, as that of the stream.
            unsafe { self.call(lane, call) }
        });
        let ended = comms.nccl.group_end();
        put.and(ended)
    }

    fn kept_by_graphs(&self) -> Arc<()> {
        self.comms.graphs.clone()
    }

    fn can_shrink(&self) -> bool {
        self.comms.nccl.can_shrink() && !self.comms.ending.load(Ordering::SeqCst)
    }

    fn shrink(&self, ranks: &[LocalRank], shrink: Shrink<'_>) -> Result<Box<dyn Transport>> {
        Ok(Box::new(self.shrunk(ranks, shrink)?))
    }

    fn refusal(&self) -> Option<LostCause> {
        let inbox = &self.group.as_ref()?.inbox;
        inbox.failed().or_else(|| inbox.ended())
    }

    fn look(&self) -> Option<LostCause> {
        if let Some(cause) = self.group.as_ref().and_then(Peers::look) {
            return Some(cause);
        }
        let freed = self.comms.freed.try_lock()?;
        if *freed {
            return None;
        }
        let comms = &*self.comms;
        let errors = comms.handles.iter().map(|handle| {
            // SAFETY: the handle is live: it is freed under the lock that is held here.
            unsafe { comms.nccl.async_error(*handle) }
        });
        // In progress is not an error.
        let code = errors.into_iter().find(|code| *code != 0 && *code != IN_PROGRESS)?;
        Some(LostCause::Nccl { code, text: comms.nccl.text(code) })
    }

    fn abort(&self, cause: &LostCause) {
        let comms = self.comms.clone();
        stats::on_thread_that_may_be_lost("abort", move || comms.abort());
        if let Some(group) = &self.group {
            group.channel.fail(&self.ranks, cause);
        }
    }

    fn finish(&self) {
        // NCCL's orderly end may wait for a peer that is gone.
        let is_orderly = matches!(self.refusal(), None | Some(LostCause::PeerLeft { .. }));
        let finalized = is_orderly.then(|| self.comms.finalize()).flatten();
        // Before the handles are freed, since that waits for communicators that may wait for a call of these ranks.
        if let Some(group) = &self.group {
            group.channel.leave(&self.ranks);
        }
        match finalized {
            Some(current) => self.comms.destroy(current),
            None => self.comms.abort(),
        }
    }
}

impl Comms {
    fn abort(&self) {
        if self.ending.swap(true, Ordering::SeqCst) {
            return;
        }
        let Some(context) = self.contexts.first() else { return };
        // SAFETY: the device is kept beside its context.
        let Ok(_current) = (unsafe { self.driver.enter(*context) }) else { return };
        *self.freed.lock() = true;
        if self.nccl.group_start().is_err() {
            return;
        }
        for handle in &self.handles {
            // SAFETY: the handle is live, as this is the one who frees it; no call begins any more, and the group ends
            // behind the one that is running.
            let _told = unsafe { self.nccl.abort_in_group(*handle) };
        }
        // Not held until the end, when NCCL waits as long as there are graphs.
        drop(self.calling.lock());
        // Kernels that are told to stop do so when they run, which may be behind other work.
        for stream in &self.streams {
            let _complete = stream.synchronize();
        }
        // NCCL would wait for the graphs in a state in which nothing may begin.
        while Arc::strong_count(&self.graphs) > 1 && !stats::is_ending() {
            thread::sleep(LOOK);
        }
        stats::quiet().free(|| drop(self.nccl.group_end()));
    }

    /// The first half of an orderly end, with the context for the second; `None` if another thread is ending the handles, or has.
    fn finalize(&self) -> Option<Current> {
        if self.ending.swap(true, Ordering::SeqCst) {
            return None;
        }
        // SAFETY: the device is kept beside its context.
        let current = unsafe { self.driver.enter(*self.contexts.first()?) }.ok()?;
        *self.freed.lock() = true;
        self.end_each(Nccl::finalize);
        Some(current)
    }

    fn destroy(&self, _current: Current) {
        stats::quiet().free(|| self.end_each(Nccl::destroy));
    }

    fn end_each(&self, step: unsafe fn(&Nccl, Comm) -> Result<()>) {
        if self.nccl.group_start().is_err() {
            return;
        }
        for handle in &self.handles {
            // SAFETY: nobody calls the communicator any more, and the caller is the one who frees its handles, which are live until the
            // second step.
            let _ended = unsafe { step(self.nccl, *handle) };
        }
        let _ended = self.nccl.group_end();
    }
}

fn aborted(rank: usize) -> Error {
    Error::Lost(CollectiveLost { rank, cause: LostCause::Aborted })
}

/// How often an aborting thread checks whether graphs are gone.
const LOOK: Duration = Duration::from_millis(10);

/// `ncclInProgress`.
const IN_PROGRESS: i32 = 7;

fn cause_of(error: Error) -> LostCause {
    match error {
        Error::Nccl { call, code, text, detail } => {
            let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
            LostCause::Nccl { code, text: format!("{call}: {text}{detail}") }
        }
        Error::Driver { code, .. } => LostCause::Nccl { code, text: error.to_string() },
        error => LostCause::Nccl { code: -1, text: error.to_string() },
    }
}
