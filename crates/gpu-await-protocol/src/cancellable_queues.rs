//! [`CancellableQueues`]: queues whose entries may leave from anywhere (pure).
//!
//! All entries are in one slab and linked to their neighbours, so a line never searches, and allocates only when it is longer than
//! ever. The memory is in other threads' caches: each operation touches the entry and at most two neighbours.
//!
//! # Invariants
//! 1. A line has its entries in the order in which they came, without those that left (`a_line_is_a_queue`).
#![forbid(unsafe_code)]

use slab::Slab;

/// Queues of entries, each of which may leave from anywhere.
#[derive(Debug)]
pub struct CancellableQueues<T> {
    entries: Slab<LineEntry<T>>,
    lines: Vec<LineEnds>,
}

#[derive(Debug)]
struct LineEntry<T> {
    value: T,
    line: usize,
    before: Option<usize>,
    behind: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default)]
struct LineEnds {
    first: Option<usize>,
    last: Option<usize>,
    len: usize,
}

impl<T> CancellableQueues<T> {
    /// That many empty lines.
    pub fn new(lines: usize) -> Self {
        CancellableQueues { entries: Slab::new(), lines: vec![LineEnds::default(); lines] }
    }

    /// Adds a value at the end of a line; returns its place.
    pub fn push(&mut self, line: usize, value: T) -> usize {
        let of = &mut self.lines[line];
        let entry = LineEntry { value, line, before: of.last, behind: None };
        let place = self.entries.insert(entry);
        match of.last.replace(place) {
            Some(last) => self.entries[last].behind = Some(place),
            None => of.first = Some(place),
        }
        of.len += 1;
        place
    }

    /// Removes an entry; its place may become another's.
    pub fn remove(&mut self, place: usize) -> T {
        let LineEntry { value, line, before, behind } = self.entries.remove(place);
        let of = &mut self.lines[line];
        of.len -= 1;
        match before {
            Some(before) => self.entries[before].behind = behind,
            None => of.first = behind,
        }
        match behind {
            Some(behind) => self.entries[behind].before = before,
            None => of.last = before,
        }
        value
    }

    /// The entry of a place.
    pub fn get(&self, place: usize) -> Option<&T> {
        self.entries.get(place).map(|entry| &entry.value)
    }

    /// The entry with that number.
    pub fn get_mut(&mut self, place: usize) -> Option<&mut T> {
        self.entries.get_mut(place).map(|entry| &mut entry.value)
    }

    /// The oldest entry of a line, and its place.
    pub fn first(&self, line: usize) -> Option<(usize, &T)> {
        let place = self.lines[line].first?;
        Some((place, self.get(place)?))
    }

    /// The newest entry of a line, and its place.
    pub fn last(&self, line: usize) -> Option<(usize, &T)> {
        let place = self.lines[line].last?;
        Some((place, self.get(place)?))
    }

    /// How many wait in a queue.
    pub fn len(&self, line: usize) -> usize {
        self.lines[line].len
    }

    /// All entries.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries.iter_mut().map(|(_, entry)| &mut entry.value)
    }
}
