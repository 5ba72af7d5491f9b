//! Which memory the supervisor keeps for the processes of its workers, and who fills it (pure).
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | absent | nobody has it | `ask` → `Filling`, for the asker |
//! | `Filling` | one process fills it; others that ask wait | `sealed`; `gone` (its death, or its failure) → absent |
//! | `Sealed` | complete: whoever asks gets it | `forget` → absent |
//!
//! # Invariants
//! 1. Memory that a process left half filled is never handed to another one: only the process told to fill it can seal it, under the number
//!    that it was given (`only_what_is_complete_is_kept`).
//! 2. Every waiter is answered once the state changes: it is asked for again then (`only_what_is_complete_is_kept`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// What is kept: for a GPU, under a name.
pub(crate) type Key = (Option<String>, String);

/// A process of a worker: the worker and its incarnation.
pub(crate) type Owner = (usize, u32);

/// What a process that asks gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Asked<'k, D> {
    /// The asker fills it, under this number.
    Fill(u64),
    /// It is complete.
    Sealed(u64, &'k D),
    /// Another process fills it.
    Wait,
}

#[derive(Debug)]
enum Entry<D> {
    Filling { owner: Owner, process: u32, generation: u64 },
    Sealed { generation: u64, memory: D },
}

/// All kept memory.
#[derive(Debug)]
pub(crate) struct Kept<D> {
    entries: BTreeMap<Key, Entry<D>>,
    generations: u64,
}

impl<D> Kept<D> {
    pub(crate) const fn new() -> Self {
        Kept { entries: BTreeMap::new(), generations: 0 }
    }

    /// The process with this number asks for it.
    pub(crate) fn ask(&mut self, key: &Key, asker: Owner, process: u32) -> Asked<'_, D> {
        if !self.entries.contains_key(key) {
            self.generations += 1;
            let generation = self.generations;
            let filling = Entry::Filling { owner: asker, process, generation };
            self.entries.insert(key.clone(), filling);
            return Asked::Fill(self.generations);
        }
        match self.entries.get(key) {
            Some(Entry::Sealed { generation, memory }) => Asked::Sealed(*generation, memory),
            _ => Asked::Wait,
        }
    }

    /// The number of the process that fills it.
    pub(crate) fn filler(&self, key: &Key) -> Option<u32> {
        match self.entries.get(key) {
            Some(Entry::Filling { process, .. }) => Some(*process),
            _ => None,
        }
    }

    /// A process sealed it; returns the memory if it was not its to seal.
    pub(crate) fn sealed(&mut self, key: &Key, by: Owner, under: u64, memory: D) -> Result<(), D> {
        let told = matches!(self.entries.get(key),
            Some(Entry::Filling { owner, generation, .. }) if (*owner, *generation) == (by, under));
        if !told {
            return Err(memory);
        }
        self.entries.insert(key.clone(), Entry::Sealed { generation: under, memory });
        Ok(())
    }

    /// A process is gone, or could not fill it (`only`). Returns whether somebody may have waited for it.
    pub(crate) fn gone(&mut self, owner: Owner, only: Option<&Key>) -> bool {
        let before = self.entries.len();
        self.entries.retain(|key, entry| {
            let concerned = only.is_none_or(|only| only == key);
            let its = matches!(entry, Entry::Filling { owner: filler, .. } if *filler == owner);
            !(concerned && its)
        });
        self.entries.len() < before
    }

    /// Removes complete memory with a chosen key.
    pub(crate) fn forget(&mut self, chosen: impl Fn(&Key) -> bool) -> Vec<D> {
        let keys: Vec<_> = self.sealed_entries().map(|(key, _)| key.clone()).collect();
        let chosen = keys.into_iter().filter(chosen);
        let removed: Vec<_> = chosen.filter_map(|key| self.entries.remove(&key)).collect();
        removed
            .into_iter()
            .filter_map(|entry| match entry {
                Entry::Sealed { memory, .. } => Some(memory),
                Entry::Filling { .. } => None,
            })
            .collect()
    }

    /// The complete memory.
    pub(crate) fn sealed_entries(&self) -> impl Iterator<Item = (&Key, &D)> {
        self.entries.iter().filter_map(|(key, entry)| match entry {
            Entry::Sealed { memory, .. } => Some((key, memory)),
            Entry::Filling { .. } => None,
        })
    }
}
