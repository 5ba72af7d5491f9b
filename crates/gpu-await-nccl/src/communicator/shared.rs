//! [`Shared`]: a communicator, as its handles, the watchdog and its work share it.
//!
//! | state | calls | left by |
//! |---|---|---|
//! | works | are submitted, and pending until their tickets are complete | a failure: the first one counts |
//! | lost | are refused with the cause; those that are pending fail with it when the transport has ended their work | – |
//!
//! # Invariants
//! 1. Every operation that was pending when the communicator was lost fails, and every later one (`abort_while_pending`): an operation is
//!    entered under the same lock as the loss, or sees the loss.
//! 2. One order of calls for all communicators of the process: [`ORDER`] (`random_collectives`).
//! 3. An outcome is reported before the work ends: the transport aborts afterwards.
//! 4. No call waits for a full stream while it holds [`ORDER`]: it waits for room before, and a loss ends that
//!    (`a_full_communicator_blocks_no_other`).
//! 5. A launch of a graph with calls of the communicator is entered before its work, or refused (`an_abort_fails_a_launch`).
//! 6. Calls of a rank run one after another, in graphs and outside of them (`in_order_with_other_calls`).
//! 7. Whatever ends pending work also ends a call that does not return because it waits for other ranks
//!    (`a_limit_ends_a_call_that_waits`, `a_limit_ends_a_capture_that_waits`).

mod launches;
mod pending_calls;
#[cfg(test)]
mod stuck;
pub(crate) mod watched;

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Wake};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use futures::channel::oneshot;
use futures::future::{self, Either};
use gpu_await::{
    DeviceBuffer, ErrorDetail, ErrorKind, Loss, MemoryLoan, Op, Stream, Uses, WorkOutcome, join_all,
};
use parking_lot::Mutex;
use smallvec::SmallVec;

use self::launches::InOrder;
pub(crate) use self::pending_calls::PendingCalls;
use self::watched::Watched;
use crate::call::Call;
use crate::error::{CollectiveLost, Error, LostCause};
use crate::mesh::Channel;
use crate::stats::{self, COUNTS, Counted};
use crate::transport::{LocalRank, Placed, Transport};
use crate::watchdog::LookedAfter;
use gpu_await::sibling::PerProcess;

/// Held while a call's work is put on its streams, for all communicators: ranks of two communicators that share GPUs
/// see one order, and cannot wait for one another in a cycle.
static ORDER: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);

/// Calls of a rank that may be pending when it makes another: with their waits and marks they fit into a stream's queue of about a
/// thousand commands.
pub(crate) const MOST_PENDING: u64 = 250;

/// What NCCL may put on a stream for a call: a kernel, with waits and records around it.
const COMMANDS: u32 = 4;

pub(crate) struct Shared {
    pub(crate) world: usize,
    pub(crate) ranks: Vec<LocalRank>,
    transport: Box<dyn Transport>,
    pub(crate) origin: Origin,
    /// In nanoseconds, plus one; 0 is none.
    limit_ns: AtomicU64,
    /// For barriers: memory that only the rank's own stream uses.
    scratch: Vec<DeviceBuffer<f32>>,
    order: Vec<InOrder>,
    state: Mutex<State>,
    this: Weak<Shared>,
    /// One for each of its devices; each wakes the watchdog when the device is lost.
    losses: Mutex<Vec<Loss>>,
    _counted: Counted,
}

/// How a communicator came together, for one that is made from it.
#[derive(Clone)]
pub(crate) struct Origin {
    /// How its ranks reach one another; `None` for NCCL without a group.
    pub(crate) channel: Option<Arc<Channel>>,
    pub(crate) connect_limit: Duration,
    pub(crate) pairs: bool,
}

#[derive(Default)]
struct State {
    lost: Option<LostCause>,
    /// When the call that the transport has not returned from was made: it may wait for other ranks.
    calling: Option<Instant>,
    pending: VecDeque<Pending>,
    /// An input of a call failed after the call was made: the communicator is lost at the watchdog's next look.
    input_failed: Option<LostCause>,
    /// Each is dropped on its own when the communicator is lost: that wakes foreign code, whose panic must not keep the others from being woken.
    waiters: Vec<oneshot::Sender<()>>,
    /// The watchdog looks after it.
    watched: Option<Watched>,
}

/// Work that nobody has seen complete.
struct Pending {
    since: Instant,
    parts: OfParts<PendingPart>,
    /// For a launch of a graph, on a stream of its own: whether that is known to be complete.
    launch: Option<Arc<AtomicBool>>,
}

/// A rank's part of pending work.
struct PendingPart {
    /// The rank's index.
    at: usize,
    /// On the stream of the rank, unless it is a launch.
    ticket: Option<u64>,
    outcome: WorkOutcome,
}

/// One for each part of a call: a process rarely has more than a few ranks.
pub(crate) type OfParts<T> = SmallVec<[T; 2]>;

/// Calls of a rank whose memory is lent to its stream.
struct Part<'a> {
    at: usize,
    calls: OfParts<Call>,
    loan: MemoryLoan<'a, ()>,
}

impl<'a> Part<'a> {
    fn placed(&self) -> Placed<'_, 'a> {
        Placed { at: self.at, calls: &self.calls, loan: &self.loan }
    }
}

impl Shared {
    pub(crate) fn new(
        world: usize,
        ranks: Vec<LocalRank>,
        (transport, origin): (Box<dyn Transport>, Origin),
        (scratch, order): (Vec<DeviceBuffer<f32>>, Vec<DeviceBuffer<u8>>),
    ) -> Arc<Shared> {
        let order = order.into_iter().map(InOrder::by).collect();
        let shared = Arc::new_cyclic(|this| Shared {
            world,
            ranks,
            transport,
            origin,
            limit_ns: AtomicU64::new(0),
            scratch,
            order,
            state: Mutex::default(),
            this: this.clone(),
            losses: Mutex::default(),
            _counted: Counted::one(&COUNTS.get().communicators),
        });
        shared.await_losses();
        shared
    }

    pub(crate) fn set_limit(&self, limit: Option<Duration>) {
        // A limit that does not fit exceeds 584 years, and is as good as none.
        let ns = limit.and_then(|limit| u64::try_from(limit.as_nanos()).ok()?.checked_add(1));
        let ns = ns.unwrap_or(0);
        // ORDERING: Relaxed: only its value counts.
        self.limit_ns.store(ns, Ordering::Relaxed);
    }

    pub(crate) fn limit(&self) -> Option<Duration> {
        // ORDERING: Relaxed: only its value counts.
        let ns = self.limit_ns.load(Ordering::Relaxed);
        ns.checked_sub(1).map(Duration::from_nanos)
    }

    /// The memory of a rank's barriers.
    pub(crate) fn scratch(&self, at: usize) -> u64 {
        self.scratch[at].device_ptr()
    }

    /// Why it was lost, if it was.
    pub(crate) fn lost(&self) -> Option<Error> {
        self.state.lock().lost.clone().map(|cause| self.error(cause))
    }

    fn error(&self, cause: LostCause) -> Error {
        Error::Lost(CollectiveLost { rank: self.ranks[0].rank, cause })
    }

    /// Lends the memory of each rank's calls, by the rank's index, for calls that are made together; lends none if one was refused.
    fn lend<'a>(
        &self,
        pending: impl IntoIterator<Item = PendingCalls<'a>>,
        written: gpu_await::Result<()>,
    ) -> Result<OfParts<Part<'a>>, Error> {
        let mut refused = written.err().map(Error::Runtime).or_else(|| self.lost());
        let mut parts = OfParts::new();
        for (at, pending) in pending.into_iter().enumerate() {
            match &refused {
                Some(error) => pending.refuse(&self.ranks[at], error),
                None => match self.lend_to(at, pending) {
                    Ok(part) => parts.extend(part),
                    Err(error) => refused = Some(Error::Runtime(error)),
                },
            }
        }
        match refused {
            None => Ok(parts),
            Some(error) => Err(not_made(parts, error)),
        }
    }

    fn lend_to<'a>(
        &self,
        at: usize,
        PendingCalls { uses, calls, .. }: PendingCalls<'a>,
    ) -> gpu_await::Result<Option<Part<'a>>> {
        let Some(uses) = uses else { return Ok(None) };
        let commands = COMMANDS.saturating_mul(u32::try_from(calls.len()).unwrap_or(u32::MAX));
        let loan = self.stay_in_order(at).and_then(|()| {
            // SAFETY: what the transport does with the memory is what the verbs declared, on that stream alone, and the loan
            // ends when it is there: `put` ends it, or its drop. On a host device it is a function of that stream.
            unsafe { self.ranks[at].stream.lend_memory(uses.commands(commands)) }
        });
        let loan = loan.inspect_err(|error| self.not_made(at, error))?;
        Ok(Some(Part { at, calls, loan }))
    }

    /// Loses the communicator if a call was refused because its input failed, or its device is lost or closed: the other ranks would wait
    /// for that call.
    pub(super) fn not_made(&self, at: usize, error: &gpu_await::Error) {
        if let ErrorDetail::Upstream { .. } = error.detail() {
            self.fail(self.of_input(at, error));
        } else if let ErrorKind::DeviceLost | ErrorKind::Closed = error.kind() {
            self.fail(LostCause::DeviceLost { rank: self.ranks[at].rank, error: error.clone() });
        }
    }

    fn of_input(&self, at: usize, error: &gpu_await::Error) -> LostCause {
        LostCause::InputFailed { rank: self.ranks[at].rank, reason: error.to_string() }
    }

    /// Makes an operation that is refused.
    pub(crate) fn refused(&self, op: &'static str, error: Error) -> Op<()> {
        refuse(&self.ranks[0], Uses::new(op), error)
    }

    /// Blocks until its ranks' streams have room for another call, or it is lost, which the call then finds.
    pub(crate) fn wait_for_room(&self) {
        let most = self.operations_of(MOST_PENDING);
        for local in &self.ranks {
            let pending = local.stream.submitted().saturating_sub(local.stream.completed());
            if pending > most && local.stream.backlog() > most {
                self.block_on_room(&local.stream);
            }
        }
    }

    #[cold]
    fn block_on_room(&self, stream: &Stream) {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Arc::new(Unpark(thread::current())).into();
        let mut room = pin!(self.room(stream, MOST_PENDING));
        // An executor's `block_on` may not be called inside another executor.
        while room.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            thread::park();
        }
    }

    /// Resolves when at most `most` calls are pending on the stream, or the communicator or the device is lost.
    async fn room(&self, stream: &Stream, most: u64) -> gpu_await::Result<()> {
        let room = pin!(stream.throttle(self.operations_of(most)));
        let loss = self.state.lock().loss();
        match future::select(room, loss).await {
            Either::Left((room, _)) => room,
            Either::Right(_) => Ok(()),
        }
    }

    /// How many operations on a stream this many calls make.
    fn operations_of(&self, calls: u64) -> u64 {
        calls.saturating_mul(self.transport.operations())
    }

    /// Resolves when each of its ranks has at most `most` pending calls.
    pub(crate) async fn throttle(&self, most: u64) -> Result<(), Error> {
        for local in &self.ranks {
            let room = self.room(&local.stream, most).await;
            if let Some(lost) = self.lost() {
                return Err(lost);
            }
            room?;
        }
        Ok(())
    }

    /// Puts the calls of each rank on its stream, as one operation; puts none if one was refused.
    pub(crate) fn run<'a>(
        &self,
        op: &'static str,
        pending: impl IntoIterator<Item = PendingCalls<'a>>,
        written: gpu_await::Result<()>,
    ) -> Op<()> {
        let parts = match self.lend(pending, written) {
            Ok(parts) => parts,
            Err(error) => return self.refused(op, error),
        };
        let order = ORDER.get().lock();
        let done = self.put(op, parts);
        drop(order);
        // Outside that lock, which a captured call takes inside the locks of these. Refused where the operation has failed.
        (0..self.ranks.len()).for_each(|at| drop(self.stay_in_order(at)));
        done
    }

    /// [`run`](Self::run) while the communicator connects: its ranks may wait for others that wait for ranks of other
    /// communicators.
    pub(crate) fn run_out_of_order<'a>(
        &self,
        op: &'static str,
        pending: impl IntoIterator<Item = PendingCalls<'a>>,
    ) -> Op<()> {
        match self.lend(pending, Ok(())) {
            Ok(parts) => self.put(op, parts),
            Err(error) => self.refused(op, error),
        }
    }

    fn put(&self, op: &'static str, parts: OfParts<Part<'_>>) -> Op<()> {
        let since = match self.begin_call() {
            Ok(since) => since,
            Err(lost) => return self.refused(op, not_made(parts, lost)),
        };
        let placed: OfParts<_> = parts.iter().map(Part::placed).collect();
        let submitted = self.transport.submit(&self.ranks, &placed, &self.owner());
        drop(placed);
        self.share_inputs(&parts);
        // A part may already be on a stream: the loans last until it is complete.
        let failed = submitted.err().map(|cause| self.error(self.fail(cause)));
        let (mut pending, mut ops) = (OfParts::new(), OfParts::<Op<()>>::new());
        for Part { at, loan, .. } in parts {
            let outcome = loan.outcome();
            if let Some(error) = &failed {
                outcome.fail(error.clone());
            }
            ops.push(loan.complete());
            let ticket = Some(self.ranks[at].stream.submitted());
            pending.push(PendingPart { at, ticket, outcome });
        }
        self.enter(Pending { since, parts: pending, launch: None });
        match ops.pop() {
            Some(only) if ops.is_empty() => only,
            last => {
                ops.extend(last);
                join_all(ops).without_value()
            }
        }
    }

    /// An input of a rank that fails late also fails the outputs of the ranks in this process that get data from that rank.
    fn share_inputs(&self, parts: &[Part<'_>]) {
        let rank = |part: &Part<'_>| self.ranks[part.at].rank;
        for to in parts {
            let gets_data = |from: &&Part<'_>| {
                let (own, other) = (rank(to), rank(from));
                own != other && to.calls.iter().any(|call| call.gets_data(own, other))
            };
            let from = parts.iter().filter(gets_data);
            from.for_each(|from| to.loan.reads_inputs_of(&from.loan));
        }
    }

    /// Has the watchdog look after the work of a call, or fails the work if the communicator was lost meanwhile.
    fn enter(&self, pending: Pending) {
        if let Some((cause, pending)) = self.enter_unless_lost(pending) {
            let error = self.error(cause);
            pending.parts.iter().for_each(|part| part.outcome.fail(error.clone()));
        }
    }

    /// Hands the work back if the communicator was lost.
    fn enter_unless_lost(&self, pending: Pending) -> Option<(LostCause, Pending)> {
        let mut state = self.state.lock();
        if pending.launch.is_none() {
            state.calling = None;
        }
        if let Some(cause) = state.lost.clone() {
            return Some((cause, pending));
        }
        self.forget_complete(&mut state);
        state.pending.push_back(pending);
        self.watch(state);
        None
    }

    fn forget_complete(&self, state: &mut State) {
        let is_complete = |pending: &Pending| {
            let launch = pending.launch.as_ref();
            let is_over = |PendingPart { at, ticket, .. }: &PendingPart| {
                ticket.is_none_or(|ticket| self.ranks[*at].stream.completed() >= ticket)
            };
            launch.is_none_or(|is_complete| is_complete.load(Ordering::SeqCst))
                && pending.parts.iter().all(is_over)
        };
        while state.pending.front().is_some_and(is_complete) {
            let Some(pending) = state.pending.pop_front() else { return };
            for PendingPart { at, outcome, .. } in pending.parts {
                if let Some(error) = outcome.failure().filter(|_| state.lost.is_none()) {
                    state.input_failed = Some(self.of_input(at, &error));
                }
            }
        }
    }

    /// Loses the communicator, unless it is lost already; returns the cause that counts.
    pub(crate) fn fail(&self, cause: LostCause) -> LostCause {
        match self.lose(cause) {
            Ok(cause) => {
                self.transport.abort(&cause);
                cause
            }
            Err(first) => first,
        }
    }

    /// [`fail`](Self::fail), where the caller ends the work on streams. An error means that it was lost already.
    pub(crate) fn lose(&self, cause: LostCause) -> Result<LostCause, LostCause> {
        let (pending, waiters) = {
            let mut state = self.state.lock();
            if let Some(first) = &state.lost {
                return Err(first.clone());
            }
            state.lost = Some(cause.clone());
            (std::mem::take(&mut state.pending), std::mem::take(&mut state.waiters))
        };
        // ORDERING: Relaxed: a statistic.
        COUNTS.get().lost.fetch_add(1, Ordering::Relaxed);
        let error = self.error(cause.clone());
        for part in pending.iter().flat_map(|pending| &pending.parts) {
            part.outcome.fail(error.clone());
        }
        for waiter in waiters {
            stats::contain(|| drop(waiter));
        }
        self.tell(&cause);
        Ok(cause)
    }

    /// Reports the loss to subscribers.
    fn tell(&self, cause: &LostCause) {
        let (rank, world) = (self.ranks[0].rank, self.world);
        // A subscriber is foreign code.
        stats::contain(|| match cause {
            LostCause::Aborted => {
                tracing::info!(target: "gpu_await_nccl", rank, world, %cause, "communicator lost");
            }
            _ => tracing::warn!(target: "gpu_await_nccl", rank, world, %cause, "communicator lost"),
        });
    }

    pub(crate) fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    /// Frees it once its work is complete; nobody calls it any more.
    pub(crate) fn end(self: Arc<Self>) {
        stats::on_thread_that_may_be_lost("end", move || {
            for local in &self.ranks {
                // Complete, or on a device that is lost.
                let _complete = local.stream.synchronize();
            }
            // The last look: others learn why it is lost, if it is.
            self.look();
            self.transport.finish();
        });
    }
}

/// The outputs of these calls count as failed.
fn not_made(parts: OfParts<Part<'_>>, error: Error) -> Error {
    for Part { loan, .. } in parts {
        drop(loan.fail(error.clone().into_source()));
    }
    error
}

fn refuse<P>(local: &LocalRank, uses: Uses<'_, P>, error: Error) -> Op<()> {
    // SAFETY: nothing is put on the stream.
    unsafe { local.stream.enqueue(uses, |_, _| Err::<(), _>(error.into_source())) }
}
