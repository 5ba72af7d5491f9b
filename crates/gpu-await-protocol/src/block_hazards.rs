//! The last writer and the current readers of each block of a slab (pure): [`hazard`](super::hazard) for memory whose uses are blocks of
//! one size, named by the hundred.
//!
//! | a use of | is entered | waits for |
//! |---|---|---|
//! | named blocks, a range | at each block that it touches: 16 bytes are written | the uses of these blocks, and those of the whole slab |
//! | the whole slab | once, and supersedes what the blocks have | the highest ticket of each stream |
//!
//! A use that names no block still keeps the slab: its operation was given the address of all of it.
//!
//! A use names its stream by a number of 16 bits, which the stream has here until all its uses are complete, and its ticket by 47 bits.
//!
//! The block is the unit: a use of a part of one orders like a use of all of it, and a failure of a part fails all of it. A write of a part
//! heals nothing. A slab has been written as a whole when it is made, so no block is unwritten.
//!
//! # Invariants
//! 1. A use waits for every pending one that touches a block of its own, if one of the two writes (`blocks_say_what_a_list_of_all_uses_would`).
//! 2. It waits for nothing that never touched one of its blocks, or that only read where it only reads (likewise).
//! 3. A block is readable unless the last operation that was to write it failed, and nothing has overwritten all of it since (likewise).
//! 4. The only user waits for nothing (likewise).
//! 5. Streams that come and go leave nothing behind (`streams_that_go_are_forgotten`).
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::hazard::{Content, Mode};
use super::timeline::{Point, Track};

/// How many streams a slab remembers before it looks for some to forget.
const STREAMS: usize = 32;

/// The most streams that a slab remembers: as many as have numbers.
const MOST_STREAMS: usize = u16::MAX as usize;

/// The blocks that a use touches.
#[derive(Clone, Debug)]
pub enum Blocks<'a> {
    /// All that the range, in bytes, touches.
    Range(&'a Range<u64>),
    /// All of these, each by its number.
    Named(&'a [u32]),
}

/// The uses of a slab.
#[derive(Clone, Debug)]
pub struct BlockHazards<S, P> {
    block_bytes: u64,
    blocks: Box<[Block]>,
    /// The last write of the whole slab, and the reads of it since.
    writer: Use,
    readers: SmallVec<[Use; 2]>,
    /// Indexed by the numbers of the uses, minus one.
    streams: Vec<Option<Stream<S>>>,
    most_streams: usize,
    /// Readers of a block besides the first.
    more: HashMap<u32, SmallVec<[Use; 2]>>,
    /// The blocks that are not readable.
    failed: HashMap<u32, Content<P>>,
    /// A complete writer is not forgotten: it may have failed, and the blocks with it.
    pub keeps_writers: bool,
    /// Poison that was replaced. Its drop may run user code, which must not happen under a lock.
    pub replaced: Vec<P>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    writer: Use,
    reader: Use,
}

/// The number of a stream, 0 for none, above a ticket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Use(u64);

#[derive(Clone, Debug)]
struct Stream<S> {
    stream: S,
    /// Its last use.
    last: u64,
    /// Its last uses of blocks, since the slab was written as a whole; 0 if there are none.
    write: u64,
    read: u64,
    /// Its last use when the slab was written as a whole.
    superseded: u64,
}

impl Use {
    const NONE: Use = Use(0);
    /// There are more readers of the block.
    const MORE: u64 = 1 << 63;
    const TICKET_BITS: u32 = 47;

    fn new(number: usize, ticket: u64) -> Self {
        assert!(ticket >> Self::TICKET_BITS == 0 && number <= MOST_STREAMS, "no room for the use");
        Use((number as u64) << Self::TICKET_BITS | ticket)
    }

    #[inline]
    fn number(self) -> usize {
        ((self.0 & !Self::MORE) >> Self::TICKET_BITS) as usize
    }

    #[inline]
    fn ticket(self) -> u64 {
        self.0 & ((1 << Self::TICKET_BITS) - 1)
    }

    #[inline]
    fn has_more(self) -> bool {
        self.0 & Self::MORE != 0
    }
}

impl<S: Track + Clone, P: Clone> BlockHazards<S, P> {
    /// A slab of this many blocks, which `writer` wrote when it was made.
    pub fn new(blocks: usize, block_bytes: u64, writer: Option<Point<S>>) -> Self {
        let mut made = BlockHazards {
            block_bytes,
            blocks: vec![Block::default(); blocks].into(),
            writer: Use::NONE,
            readers: SmallVec::new(),
            streams: Vec::new(),
            most_streams: STREAMS,
            more: HashMap::new(),
            failed: HashMap::new(),
            keeps_writers: false,
            replaced: Vec::new(),
        };
        if let Some(Point { stream, ticket }) = writer {
            made.record(&Blocks::Range(&made.all()), Mode::Overwrite, &stream, ticket);
        }
        made
    }

    fn all(&self) -> Range<u64> {
        0..self.blocks.len() as u64 * self.block_bytes
    }

    /// The blocks that a range touches, by their numbers.
    fn touched(&self, range: &Range<u64>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        let (first, end) = (range.start / self.block_bytes, range.end.div_ceil(self.block_bytes));
        first as usize..(end as usize).min(self.blocks.len())
    }

    fn is_whole(&self, blocks: &Blocks<'_>) -> bool {
        matches!(blocks, Blocks::Range(range) if self.touched(range).len() == self.blocks.len())
    }

    /// Calls `f` for each block, with whether all of it is touched.
    #[inline]
    fn each(&self, blocks: &Blocks<'_>, mut f: impl FnMut(u32, bool)) {
        match blocks {
            Blocks::Named(named) => named.iter().for_each(|number| f(*number, true)),
            Blocks::Range(range) => self.touched(range).for_each(|number| {
                let start = number as u64 * self.block_bytes;
                let is_all = range.start <= start && start + self.block_bytes <= range.end;
                f(number as u32, is_all);
            }),
        }
    }

    /// The number of a stream, 0 if it has none.
    fn number(&self, stream: u64) -> usize {
        let is_it = |known: &Option<Stream<S>>| {
            known.as_ref().is_some_and(|known| known.stream.id() == stream)
        };
        self.streams.iter().position(is_it).map_or(0, |at| at + 1)
    }

    /// Calls `visit` for each use on another stream than `stream` that a new use must wait for: the last one of each.
    pub fn dependencies(
        &self,
        blocks: &Blocks<'_>,
        mode: Mode,
        stream: u64,
        mut visit: impl FnMut(&Point<S>),
    ) {
        if matches!(blocks, Blocks::Range(range) if range.is_empty()) {
            return;
        }
        // The highest ticket of each stream, by its number.
        let mut highest: SmallVec<[u64; 16]> = smallvec![0; self.streams.len() + 1];
        let add = |highest: &mut [u64], used: Use| {
            let known = &mut highest[used.number()];
            *known = (*known).max(used.ticket());
        };
        if self.is_whole(blocks) {
            for (known, highest) in self.streams.iter().zip(&mut highest[1..]) {
                let Some(known) = known else { continue };
                *highest = if mode.writes() { known.write.max(known.read) } else { known.write };
            }
        } else {
            let uses = &self.blocks;
            let mut last = Block::default();
            self.each(blocks, |number, _| {
                let block = uses[number as usize];
                // Neighbours are often equal.
                if block.writer != last.writer {
                    add(&mut highest, block.writer);
                }
                if mode.writes() && block.reader != last.reader {
                    add(&mut highest, block.reader);
                    if block.reader.has_more() {
                        self.more[&number].iter().for_each(|used| add(&mut highest, *used));
                    }
                }
                last = if block.reader.has_more() { Block::default() } else { block };
            });
            for (known, highest) in self.streams.iter().zip(&mut highest[1..]) {
                if known.as_ref().is_none_or(|known| *highest <= known.superseded) {
                    *highest = 0;
                }
            }
        }
        add(&mut highest, self.writer);
        if mode.writes() {
            self.readers.iter().for_each(|used| add(&mut highest, *used));
        }
        for (known, ticket) in self.streams.iter().zip(&highest[1..]) {
            let Some(known) = known.as_ref().filter(|known| known.stream.id() != stream) else {
                continue;
            };
            if *ticket > 0 {
                visit(&Point { stream: known.stream.clone(), ticket: *ticket });
            }
        }
    }

    /// The first block that is not worth reading, as a range of bytes.
    pub fn unreadable(&self, blocks: &Blocks<'_>) -> Option<(Range<u64>, &Content<P>)> {
        if self.failed.is_empty() {
            return None;
        }
        let mut first = None;
        self.each(blocks, |number, _| {
            if first.is_none() && self.failed.contains_key(&number) {
                first = Some(number);
            }
        });
        let number = first?;
        let start = u64::from(number) * self.block_bytes;
        Some((start..start + self.block_bytes, &self.failed[&number]))
    }

    /// The one stream whose uses of the slab are not known to be complete, if all of it may be read.
    pub fn only_user(&self) -> Option<u64> {
        let mut pending = self.streams.iter().flatten();
        let mut pending = pending.by_ref().filter(|known| !known.stream.is_complete(known.last));
        let only = pending.next()?;
        (pending.next().is_none() && self.failed.is_empty()).then(|| only.stream.id())
    }

    /// Enters a use by `ticket` of `stream`.
    pub fn record(&mut self, blocks: &Blocks<'_>, mode: Mode, stream: &S, ticket: u64) {
        if matches!(blocks, Blocks::Range(range) if range.is_empty()) {
            return;
        }
        let number = self.enter(stream, ticket);
        let used = Use::new(number, ticket);
        if matches!(blocks, Blocks::Named([])) {
            return;
        }
        if mode == Mode::Overwrite {
            self.heal(blocks);
        }
        if self.is_whole(blocks) {
            return self.record_whole(mode, used);
        }
        let known = self.streams[number - 1].as_mut().expect("it was entered just now");
        if !mode.writes() {
            known.read = known.read.max(ticket);
            return self.record_readers(blocks, used);
        }
        known.write = known.write.max(ticket);
        let (uses, more) = (&mut *self.blocks, &mut self.more);
        let mut write = |number: u32| {
            let block = &mut uses[number as usize];
            if block.reader.has_more() {
                more.remove(&number);
            }
            *block = Block { writer: used, reader: Use::NONE };
        };
        match blocks {
            Blocks::Named(named) => named.iter().for_each(|number| write(*number)),
            Blocks::Range(range) => {
                let (first, end) =
                    (range.start / self.block_bytes, range.end.div_ceil(self.block_bytes));
                (first..end).for_each(|number| write(number as u32));
            }
        }
    }

    fn record_whole(&mut self, mode: Mode, used: Use) {
        if mode.writes() {
            self.writer = used;
            self.readers.clear();
            for known in self.streams.iter_mut().flatten() {
                (known.superseded, known.write, known.read) = (known.last, 0, 0);
            }
            return;
        }
        let streams = &self.streams;
        self.readers
            .retain(|known| known.number() != used.number() && !is_complete(streams, *known));
        self.readers.push(used);
    }

    fn record_readers(&mut self, blocks: &Blocks<'_>, used: Use) {
        let numbers: SmallVec<[u32; 8]> = match blocks {
            Blocks::Named(_) => SmallVec::new(),
            Blocks::Range(range) => self.touched(range).map(|number| number as u32).collect(),
        };
        let named = if let Blocks::Named(named) = blocks { named } else { &numbers[..] };
        for number in named {
            let block = &mut self.blocks[*number as usize];
            let known = block.reader;
            let is_replaced = known.number() == used.number() || known == Use::NONE || {
                !known.has_more() && is_complete(&self.streams, known)
            };
            if is_replaced {
                block.reader = Use(used.0 | known.0 & Use::MORE);
                continue;
            }
            block.reader = Use(known.0 | Use::MORE);
            let (streams, more) = (&self.streams, self.more.entry(*number).or_default());
            more.retain(|known| known.number() != used.number() && !is_complete(streams, *known));
            more.push(used);
        }
    }

    /// Gives the stream a number, and enters its last use.
    fn enter(&mut self, stream: &S, ticket: u64) -> usize {
        let mut number = self.number(stream.id());
        if number == 0 {
            if self.streams.len() >= self.most_streams {
                self.forget_streams();
            }
            let fresh =
                Stream { stream: stream.clone(), last: 0, write: 0, read: 0, superseded: 0 };
            let free = self.streams.iter().position(Option::is_none);
            let at = free.unwrap_or_else(|| {
                self.streams.push(None);
                self.streams.len() - 1
            });
            self.streams[at] = Some(fresh);
            number = at + 1;
        }
        if let Some(known) = &mut self.streams[number - 1] {
            known.last = known.last.max(ticket);
        }
        number
    }

    /// Forgets the streams whose uses are complete. Looks at all blocks, so it runs only after many new streams.
    #[cold]
    fn forget_streams(&mut self) {
        if !self.keeps_writers || self.streams.len() >= MOST_STREAMS {
            let is_over = |known: &Stream<S>| known.stream.is_complete(known.last);
            self.streams.iter_mut().for_each(|known| drop(known.take_if(|known| is_over(known))));
            let streams = &self.streams;
            let is_known = |used: Use| used.number() > 0 && streams[used.number() - 1].is_some();
            let kept = |used: Use| if is_known(used) { used } else { Use::NONE };
            for (number, block) in (0..).zip(&mut self.blocks) {
                block.writer = kept(block.writer);
                if !block.reader.has_more() {
                    block.reader = kept(block.reader);
                    continue;
                }
                let mut readers: SmallVec<[Use; 2]> = self.more.remove(&number).unwrap_or_default();
                readers.push(Use(block.reader.0 & !Use::MORE));
                readers.retain(|used| is_known(*used));
                block.reader = readers.pop().unwrap_or_default();
                if !readers.is_empty() {
                    block.reader.0 |= Use::MORE;
                    self.more.insert(number, readers);
                }
            }
            self.writer = kept(self.writer);
            self.readers.retain(|used| is_known(*used));
        }
        let left = self.streams.iter().flatten().count();
        self.most_streams = (2 * left).clamp(STREAMS, MOST_STREAMS);
        let end = self.streams.iter().rposition(Option::is_some).map_or(0, |at| at + 1);
        self.streams.truncate(end);
    }

    /// Makes blocks readable that are overwritten as a whole.
    fn heal(&mut self, blocks: &Blocks<'_>) {
        if self.failed.is_empty() {
            return;
        }
        let mut healed: SmallVec<[u32; 8]> = SmallVec::new();
        self.each(blocks, |number, is_all| {
            if is_all {
                healed.push(number);
            }
        });
        for number in healed {
            if let Some(Content::Poisoned { by, .. }) = self.failed.remove(&number) {
                self.replaced.push(by);
            }
        }
    }

    /// Marks blocks as not readable. `leaves_data`: the failed operation was never entered, and would have updated them.
    pub fn poison(&mut self, blocks: &Blocks<'_>, leaves_data: bool, poison: &P) {
        let mut failing: SmallVec<[u32; 8]> = SmallVec::new();
        self.each(blocks, |number, _| failing.push(number));
        failing.into_iter().for_each(|number| self.fail(number, leaves_data, poison));
    }

    fn fail(&mut self, number: u32, leaves_data: bool, poison: &P) {
        let had_data = match self.failed.get(&number) {
            None => true,
            Some(content) => matches!(content, Content::Poisoned { has_data: true, .. }),
        };
        let poisoned = Content::Poisoned { by: poison.clone(), has_data: leaves_data && had_data };
        if let Some(Content::Poisoned { by, .. }) = self.failed.insert(number, poisoned) {
            self.replaced.push(by);
        }
    }

    /// Makes failed blocks that have data readable again.
    pub fn clear_poison(&mut self, blocks: &Blocks<'_>) {
        let mut cleared: SmallVec<[u32; 8]> = SmallVec::new();
        self.each(blocks, |number, _| {
            if matches!(self.failed.get(&number), Some(Content::Poisoned { has_data: true, .. })) {
                cleared.push(number);
            }
        });
        for number in cleared {
            if let Some(Content::Poisoned { by, .. }) = self.failed.remove(&number) {
                self.replaced.push(by);
            }
        }
    }

    /// Whether a ticket of a stream was the last to write one of the blocks.
    pub fn is_written_by(&self, blocks: &Blocks<'_>, by: (u64, u64)) -> bool {
        let mut is_written = false;
        self.each(blocks, |number, _| is_written |= self.is_writer(number, by));
        is_written
    }

    /// Marks the blocks whose last writer is a ticket of a stream as not readable.
    pub fn poison_written(&mut self, blocks: &Blocks<'_>, by: (u64, u64), poison: &P) {
        let mut failing: SmallVec<[u32; 8]> = SmallVec::new();
        self.each(blocks, |number, _| {
            if self.is_writer(number, by) {
                failing.push(number);
            }
        });
        failing.into_iter().for_each(|number| self.fail(number, false, poison));
    }

    fn is_writer(&self, number: u32, (stream, ticket): (u64, u64)) -> bool {
        let of_block = self.blocks[number as usize].writer;
        let known = |used: Use| self.streams.get(used.number().wrapping_sub(1))?.as_ref();
        let is_newer =
            |used: Use| known(used).is_some_and(|known| used.ticket() > known.superseded);
        let writer = if is_newer(of_block) { of_block } else { self.writer };
        writer.ticket() == ticket && known(writer).is_some_and(|known| known.stream.id() == stream)
    }

    /// Every stream that is known to have used the slab, with its highest ticket.
    pub fn users(&self) -> SmallVec<[Point<S>; 2]> {
        let point = |known: &Stream<S>| Point { stream: known.stream.clone(), ticket: known.last };
        self.streams.iter().flatten().map(point).collect()
    }
}

fn is_complete<S: Track>(streams: &[Option<Stream<S>>], used: Use) -> bool {
    let known = streams.get(used.number().wrapping_sub(1)).and_then(Option::as_ref);
    known.is_none_or(|known| known.stream.is_complete(used.ticket()))
}
