//! [`Hub`]: the ranks of one process, and how they come together.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::{Arrival, Gathered, Inbox, Message, Patience, Wire};
use crate::error::{Error, LostCause, Result};
use crate::process::PerProcess;
use crate::unique_id::UniqueId;

/// The ranks of one process.
pub(crate) struct Hub {
    inboxes: Vec<Arc<Inbox>>,
    lobby: Mutex<Lobby>,
    changed: Condvar,
    children: Mutex<Vec<Child>>,
}

/// Who has come. Once all have, nobody gives up any more: they see it at the same time.
#[derive(Default)]
struct Lobby {
    hellos: Vec<Arrival>,
    here: Vec<bool>,
    /// All of them.
    complete: Option<Arc<[Arrival]>>,
}

/// A hub for some ranks of one, until each of them has taken it.
struct Child {
    hub: Arc<Hub>,
    excluded: Vec<usize>,
    /// Who has not taken it.
    absent: Vec<usize>,
}

/// Communicators that are coming together in this process, by their ids.
static HUBS: PerProcess<Mutex<HashMap<UniqueId, Arc<Hub>>>> = PerProcess::new(Mutex::default);

impl Hub {
    pub(crate) fn new(world: usize) -> Arc<Hub> {
        let inboxes = (0..world).map(|_| Inbox::new()).collect();
        let lobby = Lobby { here: vec![false; world], ..Lobby::default() };
        let (lobby, changed) = (Mutex::new(lobby), Condvar::new());
        Arc::new(Hub { inboxes, lobby, changed, children: Mutex::default() })
    }

    /// Waits until every rank of an id has come.
    pub(crate) fn join(
        id: UniqueId,
        world: usize,
        hello: Arrival,
        patience: &Patience,
    ) -> Result<Gathered> {
        let hub = {
            let mut hubs = HUBS.get().lock();
            hubs.entry(id).or_insert_with(|| Hub::new(world)).clone()
        };
        let (expected, rank) = (hub.inboxes.len(), hello.ranks[0]);
        if expected != world {
            return Err(Error::WrongWorld { rank, expected, found: world });
        }
        let gathered = hub.clone().gather(hello, patience);
        let mut hubs = HUBS.get().lock();
        let lobby = hub.lobby.lock();
        // An id is good for one communicator; one that nobody waits for is forgotten.
        let is_over = lobby.complete.is_some() || lobby.hellos.is_empty();
        if is_over && hubs.get(&id).is_some_and(|known| Arc::ptr_eq(known, &hub)) {
            hubs.remove(&id);
        }
        gathered
    }

    fn others(&self, own: &[usize]) -> impl Iterator<Item = &Arc<Inbox>> {
        let own: HashSet<usize> = own.iter().copied().collect();
        let others = self.inboxes.iter().enumerate();
        others.filter(move |(rank, _)| !own.contains(rank)).map(|(_, to)| to)
    }
}

impl Wire for Hub {
    fn gather(self: Arc<Self>, hello: Arrival, patience: &Patience) -> Result<Gathered> {
        let mut lobby = self.lobby.lock();
        if let Some(rank) = hello.ranks.iter().find(|rank| lobby.here[**rank]) {
            return Err(Error::DuplicateRank { rank: *rank });
        }
        hello.ranks.iter().for_each(|rank| lobby.here[*rank] = true);
        lobby.hellos.push(hello.clone());
        if !lobby.here.contains(&false) {
            lobby.complete = Some(std::mem::take(&mut lobby.hellos).into());
            self.changed.notify_all();
        }
        while lobby.complete.is_none() {
            if patience.is_over() {
                let world = self.inboxes.len();
                let missing = (0..world).filter(|rank| !lobby.here[*rank]).collect();
                // They may try again.
                hello.ranks.iter().for_each(|rank| lobby.here[*rank] = false);
                lobby.hellos.retain(|other| *other != hello);
                let (limit, refused) = (patience.limit, Vec::new());
                return Err(Error::MissingRanks { missing, world, limit, refused });
            }
            self.changed.wait_until(&mut lobby, patience.next_look());
        }
        let hellos = lobby.complete.clone().unwrap_or_default();
        drop(lobby);
        Ok(Gathered { hellos, wire: self })
    }

    fn inbox(&self, rank: usize) -> Arc<Inbox> {
        self.inboxes[rank].clone()
    }

    fn send(&self, from: usize, to: usize, message: Message) -> std::result::Result<(), LostCause> {
        self.inboxes[to].push(from, message);
        Ok(())
    }

    fn taken(&self, by: usize, from: usize, bytes: u64) {
        self.inboxes[from].took(by, bytes);
    }

    fn fail(&self, own: &[usize], cause: &LostCause) {
        let cause = cause.told(own[0]);
        self.others(own).for_each(|to| to.fail(cause.clone()));
    }

    fn leave(&self, own: &[usize]) {
        let calls = |rank: usize| self.inboxes[rank].calls();
        for to in self.others(own) {
            for rank in own {
                let (cause, calls) = (LostCause::PeerLeft { rank: *rank }, calls(*rank));
                to.end_of(*rank, cause, Some(calls));
            }
        }
    }

    fn without(&self, excluded: &[usize], ranks: &[usize]) -> Arc<dyn Wire> {
        let mut children = self.children.lock();
        let is_next = |child: &Child| {
            child.excluded == excluded && ranks.iter().all(|rank| child.absent.contains(rank))
        };
        let at = children.iter().position(is_next).unwrap_or_else(|| {
            let left = (0..self.inboxes.len()).filter(|rank| !excluded.contains(rank));
            let absent: Vec<usize> = left.collect();
            let (hub, excluded) = (Hub::new(absent.len()), excluded.to_vec());
            children.push(Child { hub, excluded, absent });
            children.len() - 1
        });
        let child = &mut children[at];
        let hub = child.hub.clone();
        child.absent.retain(|rank| !ranks.contains(rank));
        if child.absent.is_empty() {
            children.remove(at);
        }
        hub
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("world", &self.inboxes.len()).finish()
    }
}
