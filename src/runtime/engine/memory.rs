//! Where a device's memory is: in the account, retired, or on its way back to the pool.
//!
//! | memory is | counted as | until |
//! |---|---|---|
//! | retired | pending | all its users are complete |
//! | freed on the private stream, with a memory limit | pending | the event behind the free was reached |
//! | never freed: refused, or its users never end | leaked | |

use std::collections::VecDeque;
use std::sync::Arc;

use crossbeam_utils::CachePadded;
use gpu_await_protocol::sync::Mutex;

use super::DeviceStream;
use crate::backend::{Backend, Query};
use crate::memory::reclaim::reclaimers::Reclaimers;
use crate::memory::reclaim::retired::{Remnant, Retired, UserList};
use crate::runtime::attention::Attention;
use crate::runtime::event_pool::EventHandle;
use crate::runtime::graph_memory::GraphMemory;
use crate::runtime::loans::Loans;
use crate::runtime::progress::DeviceState;
use crate::thread::{contain, role};
use gpu_await_protocol::account::Account;
use gpu_await_protocol::timeline::Point;

pub(crate) struct DeviceMemory<S> {
    state: Arc<DeviceState>,
    attention: Arc<Attention>,
    pub(crate) account: CachePadded<Mutex<Account>>,
    /// Held while memory is taken over from others, and while pending memory moves from one place to
    /// another. Its holder waits for no stream's lock.
    pub(crate) pressing: Mutex<()>,
    retired: Mutex<Vec<Retired<S>>>,
    /// Frees of retired memory, each with an event behind it; used with a memory limit.
    freeing: Mutex<VecDeque<(EventHandle, u64)>>,
    /// Futures that wait for memory.
    pub(crate) reclaimers: Reclaimers,
    /// What graphs keep for their next launches.
    pub(crate) graphs: GraphMemory,
    /// Loans to other libraries, which `close` waits for.
    pub(crate) loans: Arc<Loans>,
}

impl<S: DeviceStream> DeviceMemory<S> {
    pub(super) fn new(
        account: Account,
        state: &Arc<DeviceState>,
        attention: &Arc<Attention>,
    ) -> Self {
        DeviceMemory {
            state: state.clone(),
            attention: attention.clone(),
            account: CachePadded::new(Mutex::new(account)),
            pressing: Mutex::default(),
            retired: Mutex::default(),
            freeing: Mutex::default(),
            reclaimers: Reclaimers::default(),
            graphs: GraphMemory::default(),
            loans: Arc::default(),
        }
    }

    /// Counts memory that is never freed here.
    pub(crate) fn give_up(&self, bytes: u64) {
        if self.state.lost().is_some() {
            // It was freed with the device.
            self.release(bytes);
        } else {
            self.leak(bytes);
        }
    }

    /// Counts pending memory, or a module, that is never freed.
    pub(crate) fn leak(&self, bytes: u64) {
        if bytes > 0 {
            self.account.lock().leak(bytes);
        }
        self.state.count_unreturned();
        self.moved();
    }

    /// Returns pending bytes to the pool.
    pub(crate) fn release(&self, bytes: u64) {
        self.account.lock().release(bytes);
        self.moved();
    }

    /// Called when memory was freed, or is free again: a future may be waiting for it.
    pub(crate) fn moved(&self) {
        if self.reclaimers.are_there() {
            self.attention.call();
        }
    }

    /// Wakes the futures that wait for memory, if any was freed or came free.
    pub(crate) fn wake_reclaimers(&self) {
        if self.reclaimers.are_there() {
            let version = self.account.lock().version();
            self.reclaimers.take_older(version).into_iter().for_each(contain::wake);
        }
    }

    /// Wakes the futures that wait for a reservation, which look and see the loss or the close.
    pub(super) fn wake_reservers(&self) {
        let wakers = self.account.lock().reservations.take_wakers();
        wakers.into_iter().for_each(contain::wake);
    }

    /// Lets `look` inspect the retired values.
    pub(crate) fn with_retired<R>(&self, look: impl FnOnce(&mut Vec<Retired<S>>) -> R) -> R {
        look(&mut self.retired.lock())
    }

    /// Whether something is to be freed when work is complete.
    pub(crate) fn has_retired(&self) -> bool {
        !self.retired.lock().is_empty() || !self.freeing.lock().is_empty()
    }

    /// Whether something is to be freed that no other device's stream uses.
    pub(crate) fn owes_frees(&self) -> bool {
        // What a sweep took is then free, or sent to be dropped and counted.
        let _pressing = self.pressing.lock();
        let mut used_elsewhere = 0;
        for Retired { what, users, .. } in &*self.retired.lock() {
            if users.iter().all(|used| used.stream.device().id == self.state.id) {
                return true;
            }
            used_elsewhere += what.bytes();
        }
        // Read after that: memory is counted from before it is retired until it is free.
        self.account.lock().figures().pending > used_elsewhere
    }

    pub(super) fn has_retired_module(&self) -> bool {
        self.retired.lock().iter().any(|retired| matches!(retired.what, Remnant::Module(_)))
    }

    /// Asks about the streams that retired values wait for: nothing else may ask.
    pub(super) fn press_users(&self) {
        let mut users: UserList<S> = UserList::new();
        for retired in &*self.retired.lock() {
            for used in &retired.users {
                match users.iter_mut().find(|known| known.stream == used.stream) {
                    Some(known) => known.ticket = known.ticket.max(used.ticket),
                    None => users.push(used.clone()),
                }
            }
        }
        users.iter().for_each(|Point { stream, ticket }| stream.ask(*ticket));
    }

    /// Takes over memory whose free is on the private stream, for a stream that waits for the
    /// engine's `behind_frees`.
    pub(crate) fn take_freeing(&self, most: u64) -> u64 {
        let mut taken = 0;
        let mut freeing = self.freeing.lock();
        while let Some((_, bytes)) = freeing.back_mut().filter(|_| taken < most) {
            let part = (*bytes).min(most - taken);
            taken += part;
            *bytes -= part;
            if *bytes == 0 {
                // It may still be pending: its event is not lent again.
                freeing.pop_back().inspect(|(event, _)| event.spoil());
            }
        }
        taken
    }

    /// How much memory's free is on the private stream.
    pub(crate) fn freeing_bytes(&self) -> u64 {
        self.freeing.lock().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Moves memory whose free on the private stream has run back to the pool, in the account; true if there
    /// was any.
    pub(super) fn collect_freeing(&self, backend: &dyn Backend) -> bool {
        let lost = self.state.lost().is_some();
        if !lost && !role::may_call_driver() {
            return false;
        }
        let mut freed = 0;
        {
            let mut freeing = self.freeing.lock();
            while let Some((event, bytes)) = freeing.front() {
                // SAFETY: the handle keeps the event.
                let answer = (!lost).then(|| unsafe { backend.event_query(event.raw()) });
                match answer {
                    None | Some(Ok(Query::Complete)) => freed += bytes,
                    Some(Ok(Query::Pending) | Err(_)) => break,
                }
                freeing.pop_front();
            }
            if freed > 0 {
                self.account.lock().release(freed);
            }
        }
        if freed > 0 {
            self.moved();
        }
        freed > 0
    }

    /// Enters memory whose free is on the private stream, in front of `event`.
    pub(super) fn enter_freeing(&self, event: EventHandle, bytes: u64) {
        self.freeing.lock().push_back((event, bytes));
        self.attention.call();
    }

    /// Releases the events, before the pool that they come from.
    pub(super) fn clear(&mut self) {
        self.freeing.get_mut().clear();
    }
}
