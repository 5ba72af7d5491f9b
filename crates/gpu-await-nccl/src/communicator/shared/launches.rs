//! Launches of graphs with calls of a communicator.
//!
//! | a launch | is |
//! |---|---|
//! | is submitted | entered as pending, before its work; refused if the communicator is lost |
//! | is refused because its input failed | the end of the communicator: the other ranks would take the next call for it |
//! | is pending when the communicator is lost | failed with it |
//! | is known to be complete | forgotten |

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::channel::oneshot;
use gpu_await::{DeviceBuffer, Queue, RawQueue, Uses, WorkOutcome};
use parking_lot::{Mutex, MutexGuard};

use super::{ORDER, OfParts, Pending, PendingPart, Shared};
use crate::call::Call;
use crate::error::Error;
use crate::stats;

/// How often a thread checks whether launches are complete.
const LOOK: Duration = Duration::from_millis(1);

/// Orders the calls of a rank that are in graphs, among themselves and with others: NCCL's kernels of one communicator must not run
/// concurrently, nor may the twin's functions. Each call declares that it overwrites this memory: so no call is an input of another, even if it
/// is refused and its outputs count as failed.
pub(super) struct InOrder {
    memory: Mutex<DeviceBuffer<u8>>,
    /// Some call is in a graph: the others need it too.
    is_needed: AtomicBool,
}

impl InOrder {
    pub(super) fn by(memory: DeviceBuffer<u8>) -> Self {
        InOrder { memory: Mutex::new(memory), is_needed: AtomicBool::new(false) }
    }
}

impl Shared {
    /// Orders the stream of a rank with the graphs that contain its calls, both before and after a call.
    pub(super) fn stay_in_order(&self, at: usize) -> gpu_await::Result<()> {
        let order = &self.order[at];
        if order.is_needed.load(Ordering::SeqCst) {
            let mut memory = order.memory.lock();
            let uses = Uses::new("in order").writes(&mut *memory);
            // SAFETY: nothing is put on the stream.
            unsafe { self.ranks[at].stream.enqueue(uses, |_, _| Ok::<(), Error>(())) }.queued()?;
        }
        Ok(())
    }

    /// The memory that a rank's call in a graph overwrites.
    fn in_order(&self, at: usize) -> gpu_await::Result<MutexGuard<'_, DeviceBuffer<u8>>> {
        let order = &self.order[at];
        if !order.is_needed.swap(true, Ordering::SeqCst) {
            // Calls made earlier come first.
            self.stay_in_order(at)?;
        }
        Ok(order.memory.lock())
    }

    /// Has calls of a rank captured together in the graph of a queue. They use the memory of all of them and what is
    /// [in order](Self::in_order), and keep the communicator. Nothing is captured if one was refused.
    pub(crate) fn capture(
        &self,
        (at, op): (usize, &'static str),
        queue: &Queue<'_>,
        parts: Uses<'_>,
        calls: gpu_await::Result<OfParts<Call>>,
    ) -> gpu_await::Result<()> {
        let calls = match calls {
            Ok(calls) if calls.is_empty() => return Ok(()),
            Ok(calls) => calls,
            Err(error) => {
                let mut uses = Uses::new(op).can_be_captured();
                uses.includes(parts);
                let refuse = |_: &RawQueue<'_>, ()| Err(error);
                // SAFETY: nothing is put on the stream.
                return unsafe { queue.enqueue(uses, refuse) };
            }
        };
        let local = &self.ranks[at];
        let mut order = self.in_order(at)?;
        let mut uses = Uses::new(op).can_be_captured().writes(&mut *order);
        uses.includes(parts);
        let (this, kept) = (self.this.clone(), self.transport.kept_by_graphs());
        let launched = move |outcome| {
            let _kept = &kept;
            this.upgrade().map_or(Ok(()), |shared| shared.launched(at, outcome))
        };
        let put = |queue: &RawQueue<'_>| -> Result<(), Error> {
            queue.each_launch(launched)?;
            let _order = ORDER.get().lock();
            self.begin_call()?;
            let captured = self.transport.capture((at, local), queue, &calls, &self.owner());
            self.end_call();
            // If it was told to stop, say why.
            captured.map_err(|error| self.lost().unwrap_or(error))
        };
        let capture = |queue: &RawQueue<'_>, _| put(queue).map_err(Error::into_source);
        // SAFETY: the work touches what the verbs declare, on that stream. It may run again, as NCCL's may that is captured, while
        // the communicator is there, which is kept; each launch is refused once it is lost. All work of a rank that is in graphs
        // overwrites one range, and so do other calls of its: none runs beside another.
        let captured = unsafe { queue.enqueue(uses, capture) };
        captured.inspect_err(|error| self.not_made(at, error))
    }

    /// A graph with a call of this communicator is being launched, or is refused.
    fn launched(&self, at: usize, outcome: WorkOutcome) -> Result<(), Error> {
        if let Some(refused) = outcome.failure() {
            self.not_made(at, &refused);
            return Ok(());
        }
        let parts = OfParts::from_iter([PendingPart { at, ticket: None, outcome }]);
        let pending = Pending { since: Instant::now(), parts, launch: Some(Arc::default()) };
        match self.enter_unless_lost(pending) {
            None => Ok(()),
            Some((cause, _)) => Err(self.error(cause)),
        }
    }

    /// Waits until launches of graphs are complete, on streams that are not the communicator's.
    pub(crate) async fn launches_end(&self) -> Result<(), Error> {
        let this = self.this.clone();
        let has_any = move || this.upgrade().is_some_and(|shared| shared.has_launches());
        if has_any() {
            let (send, receive) = oneshot::channel();
            drop(stats::spawn("launches", move || {
                while has_any() {
                    std::thread::sleep(LOOK);
                }
                // The receiver may be gone.
                send.send(()).ok();
            })?);
            receive.await.ok();
        }
        Ok(())
    }

    fn has_launches(&self) -> bool {
        self.ask_launches();
        let mut state = self.state.lock();
        self.forget_complete(&mut state);
        state.pending.iter().any(|pending| pending.launch.is_some())
    }

    /// Polls the devices, outside the lock, in the order in which launches are forgotten.
    pub(super) fn ask_launches(&self) {
        let launches: Vec<_> = {
            let state = self.state.lock();
            let launch = |pending: &Pending| {
                Some((pending.parts.first()?.outcome.clone(), pending.launch.clone()?))
            };
            state.pending.iter().filter_map(launch).collect()
        };
        for (outcome, is_complete) in launches {
            if !is_complete.load(Ordering::SeqCst) && outcome.is_complete() {
                is_complete.store(true, Ordering::SeqCst);
            }
        }
    }
}
