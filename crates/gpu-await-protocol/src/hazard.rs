//! The last writer and the current readers of each range of an allocation (pure).
//!
//! An allocation is covered by disjoint spans. Each span knows its last writer, the readers since, and whether its content may be read. A
//! new use of a range depends on these:
//!
//! | new use | waits for | leaves behind |
//! |---|---|---|
//! | read | the last writer | itself among the readers |
//! | write | the last writer and all readers | itself as the writer, no readers |
//!
//! Uses on the new use's own stream need no wait: stream order is enough. A buffer that was never split has one span. A complete use no
//! longer orders anything: its entry is removed when another stream is entered beside it, so that entries do not accumulate.
//!
//! # Invariants
//! 1. The spans are sorted, disjoint and cover the allocation.
//! 2. A span has at most one reader entry for a stream, its highest ticket.
//! 3. Before a stream is entered as a reader, complete readers are removed (`readers_that_are_complete_are_forgotten`).
//! 4. Content is `Valid` after an overwrite, whatever it was before; `Unwritten` and `Poisoned` ranges stay so where no write reached.
//!    Every use that may read, writing or not, checks this first (`no_kernel_reads_it`).
//! 5. Clearing poison exposes nothing that was never written (`spans_say_what_every_byte_would`).
//! 6. A range for which [`only_user`](Hazards::only_user) names a stream has no pending dependency on others and is entirely readable
//!    (`the_only_user_waits_for_nothing`).
//! 7. What was cut off is unwritten, even where it is still in use (`spans_say_what_every_byte_would`).
//!
//! Pinned by the property tests in `tests/models/hazard.rs`.
#![forbid(unsafe_code)]

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::timeline::{Point, Track};

/// How an operation uses a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Reads it.
    Read,
    /// Overwrites every byte of the range without reading it.
    Overwrite,
    /// May read and may write any part of the range: all of it has to be readable before, and is after.
    ReadWrite,
}

impl Mode {
    /// Whether it may write.
    #[inline]
    pub fn writes(self) -> bool {
        self != Mode::Read
    }
}

/// Whether a range is worth reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content<P> {
    /// Allocated; nothing has written it.
    Unwritten,
    /// Written, and worth reading.
    Valid,
    /// The operation that should have written it failed.
    Poisoned {
        /// The failure.
        by: P,
        /// All of it was written before, and the failed operation would have updated it and was never entered: there is data
        /// to go back to. (An entered operation is the last writer, whether or not it reached the device; an earlier writer
        /// whose failure is not known yet is then no longer recorded here.)
        has_data: bool,
    },
}

/// A use, with its stream's id, so that streams are told apart without a look at them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Used<S> {
    id: u64,
    at: Point<S>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Tracked<S, P> {
    end: u64,
    writer: Option<Used<S>>,
    readers: SmallVec<[Used<S>; 2]>,
    content: Content<P>,
}

/// The uses of one allocation.
#[derive(Clone, Debug)]
pub struct Hazards<S, P> {
    spans: SmallVec<[Tracked<S, P>; 1]>,
    /// A complete writer is not forgotten: it may have failed, and the range with it.
    pub keeps_writers: bool,
    /// Poison that was replaced. Its drop may run user code, which must not happen under a lock.
    pub replaced: Vec<P>,
}

impl<S: Track + Clone + PartialEq, P: Clone + PartialEq> Hazards<S, P> {
    /// An allocation of `len` bytes; `writer` is the operation that made it.
    #[inline]
    pub fn new(len: u64, writer: Option<Point<S>>, content: Content<P>) -> Self {
        let writer = writer.map(|at| Used { id: at.stream.id(), at });
        Hazards {
            spans: smallvec![Tracked { end: len, writer, readers: SmallVec::new(), content }],
            keeps_writers: false,
            replaced: Vec::new(),
        }
    }

    /// Calls `visit` for each use on another stream than `stream` that a new use must wait for.
    #[inline]
    pub fn dependencies(
        &self,
        range: &Range<u64>,
        mode: Mode,
        stream: u64,
        mut visit: impl FnMut(&Point<S>),
    ) {
        for span in self.overlapping(range) {
            let readers = if mode.writes() { &span.readers[..] } else { &[] };
            let uses = span.writer.iter().chain(readers);
            uses.filter(|used| used.id != stream).for_each(|used| visit(&used.at));
        }
    }

    /// The first part of `range` that is not worth reading.
    #[inline]
    pub fn unreadable(&self, range: &Range<u64>) -> Option<(Range<u64>, &Content<P>)> {
        let mut start = range.start;
        for span in self.overlapping(range) {
            let part = start..span.end.min(range.end);
            if span.content != Content::Valid {
                return Some((part, &span.content));
            }
            start = span.end;
        }
        None
    }

    /// The one stream whose uses of the allocation are not known to be complete, if all of it may be read: the next use there waits
    /// for nothing.
    #[inline]
    pub fn only_user(&self) -> Option<u64> {
        let users = self.spans.iter().flat_map(|span| span.writer.iter().chain(&span.readers));
        let mut pending = users.filter(|used| !used.at.is_complete()).map(|used| used.id);
        let first = pending.next()?;
        let is_valid = |span: &Tracked<S, P>| span.content == Content::Valid;
        (pending.all(|stream| stream == first) && self.spans.iter().all(is_valid)).then_some(first)
    }

    /// Enters a use by `ticket` of `stream`.
    #[inline]
    pub fn record(&mut self, range: &Range<u64>, mode: Mode, stream: &S, ticket: u64) {
        if range.is_empty() {
            return;
        }
        // The common case: the whole buffer, by the stream that used it last.
        if let [span] = self.spans.as_mut_slice()
            && range.start == 0
            && range.end == span.end
        {
            span.record(mode, stream, ticket, self.keeps_writers, &mut self.replaced);
            return;
        }
        let keeps_writer = self.keeps_writers;
        self.change(range, |span, replaced| {
            span.record(mode, stream, ticket, keeps_writer, replaced);
        });
    }

    /// Marks a range as not readable. `leaves_data`: the failed operation was never entered, and would have updated
    /// it.
    #[inline]
    pub fn poison(&mut self, range: &Range<u64>, leaves_data: bool, poison: &P) {
        self.change(range, |span, replaced| {
            let has_data = leaves_data && span.content.has_data();
            span.content.turn_into(Content::Poisoned { by: poison.clone(), has_data }, replaced);
        });
    }

    /// Makes poisoned ranges that have data readable again.
    #[inline]
    pub fn clear_poison(&mut self, range: &Range<u64>) {
        self.change(range, |span, replaced| {
            if span.content.has_data() {
                span.content.turn_into(Content::Valid, replaced);
            }
        });
    }

    /// Whether a ticket of a stream was the last to write a part of the range.
    #[inline]
    pub fn is_written_by(&self, range: &Range<u64>, by: (u64, u64)) -> bool {
        let mut writers = self.overlapping(range).filter_map(|span| span.writer.as_ref());
        writers.any(|writer| (writer.id, writer.at.ticket) == by)
    }

    /// Marks the ranges whose last writer is a ticket of a stream as not readable.
    #[inline]
    pub fn poison_written(&mut self, range: &Range<u64>, by: (u64, u64), poison: &P) {
        self.change(range, |span, replaced| {
            let writer = span.writer.as_ref();
            if writer.is_some_and(|writer| (writer.id, writer.at.ticket) == by) {
                let poisoned = Content::Poisoned { by: poison.clone(), has_data: false };
                span.content.turn_into(poisoned, replaced);
            }
        });
    }

    /// Every stream that used the allocation, with its highest ticket.
    #[inline]
    pub fn users(&self) -> SmallVec<[Point<S>; 2]> {
        let mut users: SmallVec<[Point<S>; 2]> = SmallVec::new();
        for span in &self.spans {
            for Used { id, at } in span.writer.iter().chain(&span.readers) {
                match users.iter_mut().find(|known| known.stream.id() == *id) {
                    Some(known) => known.ticket = known.ticket.max(at.ticket),
                    None => users.push(at.clone()),
                }
            }
        }
        users
    }

    /// Makes everything behind `from` unreadable until it is written again, even where it is still in use. Returns the end of the last part there
    /// that is in use, or `from`.
    pub fn cut_off(&mut self, from: u64) -> u64 {
        let all = from..self.spans.last().map_or(from, |span| span.end);
        self.change(&all, |span, replaced| {
            span.content.turn_into(Content::Unwritten, replaced);
            span.writer.take_if(|writer| writer.at.is_complete());
            span.readers.retain(|reader| !reader.at.is_complete());
        });
        let in_use = |span: &&Tracked<S, P>| span.writer.is_some() || !span.readers.is_empty();
        self.spans.iter().rev().find(in_use).map_or(from, |span| span.end.max(from))
    }

    /// The end of each span.
    #[inline]
    pub fn span_ends(&self) -> impl Iterator<Item = u64> {
        self.spans.iter().map(|span| span.end)
    }

    fn overlapping<'a>(
        &'a self,
        range: &Range<u64>,
    ) -> impl Iterator<Item = &'a Tracked<S, P>> + use<'a, S, P> {
        let first = self.spans.partition_point(|span| span.end <= range.start);
        let Range { mut start, end } = *range;
        self.spans[first..].iter().take_while(move |span| {
            let overlaps = start < end;
            start = span.end;
            overlaps
        })
    }

    /// Changes the spans of a range, split at its ends; does nothing for an empty range.
    fn change(
        &mut self,
        range: &Range<u64>,
        mut change: impl FnMut(&mut Tracked<S, P>, &mut Vec<P>),
    ) {
        if range.is_empty() {
            return;
        }
        let first = self.cut_at(range.start);
        let is_whole = self.spans.get(first).is_some_and(|span| span.end == range.end);
        let last = if is_whole { first + 1 } else { self.cut_at(range.end) };
        let replaced = &mut self.replaced;
        self.spans[first..last].iter_mut().for_each(|span| change(span, replaced));
        self.merge(first, last);
    }

    /// Makes `at` a boundary; returns the index of the span that begins there.
    fn cut_at(&mut self, at: u64) -> usize {
        let index = self.spans.partition_point(|span| span.end <= at);
        let start = if index == 0 { 0 } else { self.spans[index - 1].end };
        if start == at || index == self.spans.len() {
            return index;
        }
        let mut left = self.spans[index].clone();
        left.end = at;
        self.spans.insert(index, left);
        index + 1
    }

    /// Merges equal neighbours, among the changed spans and those beside them.
    fn merge(&mut self, first: usize, last: usize) {
        let behind = (last + 1).min(self.spans.len());
        for index in (first.max(1)..behind).rev() {
            let (left, right) = (&self.spans[index - 1], &self.spans[index]);
            if left.writer == right.writer
                && left.readers == right.readers
                && left.content == right.content
            {
                self.spans.remove(index - 1);
            }
        }
    }
}

impl<P> Content<P> {
    fn turn_into(&mut self, content: Content<P>, replaced: &mut Vec<P>) {
        if let Content::Poisoned { by, .. } = std::mem::replace(self, content) {
            replaced.push(by);
        }
    }

    fn has_data(&self) -> bool {
        matches!(self, Content::Valid | Content::Poisoned { has_data: true, .. })
    }
}

impl<S: Track + Clone, P> Tracked<S, P> {
    fn record(
        &mut self,
        mode: Mode,
        stream: &S,
        ticket: u64,
        keeps_writer: bool,
        replaced: &mut Vec<P>,
    ) {
        let id = stream.id();
        let used = || Used { id, at: Point { stream: stream.clone(), ticket } };
        if mode.writes() {
            match &mut self.writer {
                Some(writer) if writer.id == id => writer.at.ticket = ticket,
                writer => *writer = Some(used()),
            }
            self.readers.clear();
            if mode == Mode::Overwrite {
                self.content.turn_into(Content::Valid, replaced);
            }
            return;
        }
        match self.readers.iter().position(|reader| reader.id == id) {
            Some(0) => self.readers[0].at.ticket = ticket,
            // The removal below looks at each stream: it waits until the first of them has read.
            Some(place) if !self.readers[0].at.is_complete() => {
                self.readers[place].at.ticket = ticket;
            }
            _ => {
                self.readers.retain(|reader| reader.id != id && !reader.at.is_complete());
                self.readers.push(used());
                self.writer.take_if(|writer| !keeps_writer && writer.at.is_complete());
            }
        }
    }
}
