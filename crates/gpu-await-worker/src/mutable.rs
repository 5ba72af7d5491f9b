//! Which process may write memory that outlives processes, and what the next one learns (pure).
//!
//! | place | meaning | left by |
//! |---|---|---|
//! | absent | there is none | `ask` → `Making`, for the asker |
//! | `Making` | one process makes it, all zeros, and nobody else has it | `made` → `Lent`; `gone` → absent |
//! | `Lent` | this process may write it | `gone`, once it is reaped → `Settling` |
//! | `Settling` | its process is gone, but something else may still have the memory | `settled` → `Free`; `set_aside` → absent |
//! | `Free` | nobody has it | `ask` → `Lent`, for the asker; `forget` → absent |
//!
//! Each entry also has a mark: `writes` sets it when a process begins to write, and clears it when the process ends its writes. A process that goes
//! while it is set leaves its number there, for whoever gets the memory next, until a write succeeds.
//!
//! And it has a worker: the one whose process got it. Until that worker ends (`released`), only its own next process gets the memory.
//!
//! # Invariants
//! 1. At most one process has it, and nobody gets it while something else may still have it: between two processes lie the end of the first
//!    one and a proof that nothing has it (`never_two_writers`).
//! 2. The next process that gets it learns of the last write that did not end, and of no other (`never_two_writers`).
//! 3. A process keeps it until it is gone: nothing that it says gives it to another one (`never_two_writers`).
//! 4. A worker keeps it until it ends: no process of another worker gets it (`never_two_writers`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::Instant;

use crate::kept::{Key, Owner};

/// What a process that asks gets.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Given<'k, D> {
    /// The asker makes it, under this number.
    Make(u64),
    /// The asker may write it, under `generation`; it was made under `made`, and `died` is the number of a process that died while writing.
    Take { generation: u64, made: u64, died: Option<u64>, memory: &'k D },
    /// Another process has it, or may have.
    Wait,
    /// The asker has it already.
    Twice,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place<R> {
    Making { owner: Owner, process: u32 },
    Lent { owner: Owner, process: u32 },
    Settling { since: Instant, remains: R },
    Free,
}

#[derive(Debug)]
struct Entry<D, R> {
    place: Place<R>,
    memory: Option<D>,
    /// The number that it was made under.
    made: u64,
    /// The number of the process that has it, or had it last.
    generation: u64,
    writes: bool,
    /// The number of the process whose write did not end.
    died: Option<u64>,
    /// The worker of that process, until it ends.
    worker: Option<usize>,
}

/// All such memory. What remains of a process (`R`) tells whether that still has the memory.
#[derive(Debug)]
pub(crate) struct Mutable<D, R> {
    entries: BTreeMap<Key, Entry<D, R>>,
    generations: u64,
}

impl<D, R: Clone> Mutable<D, R> {
    pub(crate) const fn new() -> Self {
        Mutable { entries: BTreeMap::new(), generations: 0 }
    }

    /// The process with this number asks for it.
    pub(crate) fn ask(&mut self, key: &Key, asker: Owner, process: u32) -> Given<'_, D> {
        let generation = self.generations + 1;
        if !self.entries.contains_key(key) {
            self.generations = generation;
            let place = Place::Making { owner: asker, process };
            let (memory, writes, died) = (None, false, None);
            let worker = Some(asker.0);
            let entry = Entry { place, memory, made: generation, generation, writes, died, worker };
            self.entries.insert(key.clone(), entry);
            return Given::Make(generation);
        }
        let Some(entry) = self.entries.get_mut(key) else { return Given::Wait };
        match (&entry.place, &entry.memory) {
            (Place::Making { owner, .. } | Place::Lent { owner, .. }, _) if *owner == asker => {
                Given::Twice
            }
            (Place::Free, Some(memory)) if entry.worker.is_none_or(|worker| worker == asker.0) => {
                self.generations = generation;
                entry.worker = Some(asker.0);
                entry.place = Place::Lent { owner: asker, process };
                entry.generation = generation;
                Given::Take { generation, made: entry.made, died: entry.died, memory }
            }
            _ => Given::Wait,
        }
    }

    /// Whether it is for the processes of another worker than this one.
    pub(crate) fn is_of_another(&self, key: &Key, worker: usize) -> bool {
        let owner = self.entries.get(key).and_then(|entry| entry.worker);
        owner.is_some_and(|owner| owner != worker)
    }

    /// A worker has ended: its memory is for whichever asks next. Returns whether it had any.
    pub(crate) fn released(&mut self, worker: usize) -> bool {
        let its = self.entries.values_mut().filter(|entry| entry.worker == Some(worker));
        its.map(|entry| entry.worker = None).count() > 0
    }

    /// The memory, if nobody has it.
    pub(crate) fn free(&self, key: &Key) -> Option<&D> {
        let entry = self.entries.get(key)?;
        entry.memory.as_ref().filter(|_| matches!(entry.place, Place::Free))
    }

    /// A process made it; returns the memory if it was not its to make.
    pub(crate) fn made(&mut self, key: &Key, by: Owner, under: u64, memory: D) -> Result<(), D> {
        let entry = self.entries.get_mut(key).filter(|entry| entry.made == under);
        match entry.map(|entry| (entry.place.clone(), entry)) {
            Some((Place::Making { owner, process }, entry)) if owner == by => {
                entry.place = Place::Lent { owner, process };
                entry.memory = Some(memory);
                Ok(())
            }
            _ => Err(memory),
        }
    }

    /// A process begins to write, or ends; false if it does not have it.
    pub(crate) fn writes(&mut self, key: &Key, by: Owner, begins: bool) -> bool {
        match self.entries.get_mut(key) {
            Some(entry) if matches!(entry.place, Place::Lent { owner, .. } if owner == by) => {
                entry.writes = begins;
                // What was left half written is whole again.
                entry.died = entry.died.filter(|_| begins);
                true
            }
            _ => false,
        }
    }

    /// A process is reaped, and this remains of it; returns whether somebody may have waited. Whatever an `untrusted` one said of its writes is ignored.
    pub(crate) fn gone(&mut self, by: Owner, untrusted: bool, now: Instant, remains: &R) -> bool {
        let before = self.entries.len();
        self.entries
            .retain(|_, entry| !matches!(entry.place, Place::Making { owner, .. } if owner == by));
        let mut is_free = self.entries.len() < before;
        for entry in self.entries.values_mut() {
            if matches!(entry.place, Place::Lent { owner, .. } if owner == by) {
                entry.place = Place::Settling { since: now, remains: remains.clone() };
                if std::mem::take(&mut entry.writes) || untrusted {
                    entry.died = Some(entry.generation);
                }
                is_free = true;
            }
        }
        is_free
    }

    /// A process is given up on: its memory stays its own.
    pub(crate) fn abandon(&mut self, by: Owner) -> Vec<D> {
        self.remove(|_, place| {
            matches!(place, Place::Making { owner, .. } | Place::Lent { owner, .. } if *owner == by)
        })
    }

    /// What remains of the process that had it, and since when, while that may still have the memory.
    pub(crate) fn settling(&self, key: &Key) -> Option<(Instant, &D, &R)> {
        let entry = self.entries.get(key)?;
        match (&entry.place, &entry.memory) {
            (Place::Settling { since, remains }, Some(memory)) => Some((*since, memory, remains)),
            _ => None,
        }
    }

    /// Nothing has it any more.
    pub(crate) fn settled(&mut self, key: &Key) {
        if let Some(entry) = self.entries.get_mut(key)
            && matches!(entry.place, Place::Settling { .. })
        {
            entry.place = Place::Free;
        }
    }

    /// Something keeps it: it is given up, and the next asker makes another.
    pub(crate) fn set_aside(&mut self, key: &Key) -> Vec<D> {
        self.remove(|it, place| it == key && matches!(place, Place::Settling { .. }))
    }

    /// The number of the process that has it.
    pub(crate) fn holder(&self, key: &Key) -> Option<u32> {
        match self.entries.get(key)?.place {
            Place::Making { process, .. } | Place::Lent { process, .. } => Some(process),
            Place::Settling { .. } | Place::Free => None,
        }
    }

    /// Removes memory with a chosen key that no process has.
    pub(crate) fn forget(&mut self, chosen: impl Fn(&Key) -> bool) -> Vec<D> {
        self.remove(|key, place| {
            chosen(key) && matches!(place, Place::Settling { .. } | Place::Free)
        })
    }

    /// All memory.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&Key, &D)> {
        self.entries.iter().filter_map(|(key, entry)| Some((key, entry.memory.as_ref()?)))
    }

    fn remove(&mut self, which: impl Fn(&Key, &Place<R>) -> bool) -> Vec<D> {
        let entries = std::mem::take(&mut self.entries);
        let (removed, kept) = entries.into_iter().partition(|(key, it)| which(key, &it.place));
        self.entries = kept;
        let removed: BTreeMap<Key, Entry<D, R>> = removed;
        removed.into_values().filter_map(|entry| entry.memory).collect()
    }
}
