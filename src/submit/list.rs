//! [`List`]: launches recorded but not yet submitted, in flat arrays that the next run of the closure rewrites.
//!
//! | array | one entry |
//! |---|---|
//! | `operations` | a launch: its kernel and configuration, and its parts of the next three arrays |
//! | `words`, `slots` | a value; an argument's offset and size |
//! | `touches` | an access: its piece and mode |
//! | `pieces` | a range of an allocation: kept, and entered in the hazards, once per list |
//!
//! A list is written from its beginning each time. Each launch is compared with the one in its place:
//!
//! | the new launch has | the list |
//! |---|---|
//! | the same arguments, configuration and pieces | is left as it is |
//! | other arguments or another configuration | is rewritten there; the launch counts as [changed](List::changed) |
//! | a piece at another address | the same; the edges have [moved](EdgesAre::Moved) |
//! | another piece, another mode, a barrier added or removed | the same; the edges are [open](EdgesAre::Open) |
//! | another kernel, or no launch in its place | is cut off there, and continues with the new launches; likewise |
//!
//! At the [end](List::finish) the edges are kept or recomputed:
//!
//! | the edges | at the end |
//! |---|---|
//! | hold | are kept |
//! | moved | are kept if no two pieces overlap, then or now; otherwise recomputed |
//! | open | are recomputed, and compared with the last ones |
//!
//! Per launch, computing the edges costs 550 instructions, entering the uses 230, and making, comparing and dropping a copy 450: a launch that is
//! unchanged and in its place pays for none of these.
//!
//! The **shape** of a list is its kernels, in order, and the edges between them. The list keeps the code of the kernels, and the memory
//! until it is [released](List::release), because the caller may drop both in the meantime.
//!
//! # Invariants
//! 1. A launch that differs from the one in its place by anything that a graph's node holds counts as changed
//!    (`arguments_are_never_stale`).
//! 2. The edges are those that [`Edges`] computes for the addresses of the pieces (`rewritten_as_written_anew`).
//! 3. All memory that a launch touches is entered with the list's ticket once the launch is in the list. A piece is entered again when it is first
//!    written, and when anything but this list has used its allocation, or has failed to (`arguments_are_never_stale`,
//!    `an_overwrite_in_a_list_heals`). For a slab, the blocks that a launch names are entered, unless the last launch that touched it in the same
//!    mode named the same blocks (`rewritten_as_written_anew`).
//! 4. The outputs of an operation that was not launched are poisoned.
//!
//! More than 500 lines: the arrays change together.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use super::edges::{Edge, EdgeKind, Edges, Node, kinds};
use super::footprint::Footprint;
use super::kernel_launch::{KernelCode, KernelLaunch};
use crate::backend::{ArgSlot, Arguments, Function, LaunchShape, NodeLaunch};
use crate::error::Error;
use crate::memory::accesses::Access;
use crate::memory::allocation::{Allocation, BlockSet};
use crate::memory::view::Tracking;
use gpu_await_protocol::hazard::Mode;

#[derive(Default)]
pub(crate) struct List {
    operations: Vec<Operation>,
    words: Vec<u64>,
    slots: Vec<ArgSlot>,
    touches: Vec<Touch>,
    pieces: Vec<Piece>,
    /// The kernels, kept loaded.
    kernels: Vec<ListedKernel>,
    /// How many operations this run has written.
    written: usize,
    /// How many operations there were before this run.
    known: usize,
    /// The first operation that was not in its place.
    cut_at: Option<usize>,
    /// Operations that differ from those that were [noted](Self::note_changes) last, by their numbers.
    changed: Vec<u32>,
    edges: Vec<Edge>,
    edges_are: EdgesAre,
    /// No two pieces overlapped when the edges were computed.
    are_apart: bool,
    /// A number that changes with the shape.
    shape: u64,
    /// Some of it belongs to a device other than the stream's.
    is_across: bool,
    scratch: Scratch,
    pub(super) refused: Option<Error>,
    pub(super) interrupted_by: Option<Interruption>,
}

/// How a launch was recorded.
#[derive(Clone, Copy)]
pub(crate) struct LaunchEntry {
    pub(crate) at: &'static Location<'static>,
    /// It runs behind everything before it and in front of everything after it, whatever they touch.
    pub(crate) is_barrier: bool,
}

/// An operation that used the stream while a list was open.
pub(crate) struct Interruption {
    /// The kernel's name, or, as an error, the operation's.
    pub(crate) name: Result<Arc<str>, &'static str>,
    pub(crate) at: &'static Location<'static>,
}

/// How a list differs from the one that it replaces. Numbers are those of the first operation that differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListShape {
    Same,
    First,
    Differs(usize),
    Reordered(usize),
    Longer(usize),
    Shorter,
}

struct Operation {
    kernel: u32,
    is_barrier: bool,
    is_changed: bool,
    shape: LaunchShape,
    words: Stretch,
    slots: Stretch,
    touches: Stretch,
    /// The line that called it.
    at: &'static Location<'static>,
}

struct ListedKernel {
    code: Arc<dyn KernelCode>,
    /// The address of the code.
    address: usize,
    function: Function,
}

#[derive(Clone, Copy)]
struct Touch {
    piece: u32,
    mode: Mode,
    tracking: Tracking,
}

struct Piece {
    /// Set once this run has touched it.
    memory: Option<Arc<Allocation>>,
    range: Range<u64>,
    tracking: Tracking,
    /// Whether this run has written it.
    is_written: bool,
    /// Where it is, or was in the last run.
    addresses: Range<u64>,
    /// For a slab: the blocks named last, for each mode.
    named: Vec<SharedBlocks>,
}

/// Blocks that a launch named.
struct SharedBlocks {
    mode: Mode,
    blocks: Vec<u32>,
    /// Whether a launch of this run named them.
    is_entered: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum EdgesAre {
    #[default]
    Holding,
    Moved,
    Open,
}

/// Used where the shape changes.
#[derive(Default)]
struct Scratch {
    builder: Edges,
    /// The pieces that this run has touched, by allocation, range and tracking.
    index: HashMap<Key, u32>,
    is_indexed: bool,
    order: Vec<u32>,
    /// Kernels that no operation launches any more.
    unused: Vec<ListedKernel>,
}

type Key = (usize, u64, u64, Tracking);

fn key(memory: &Arc<Allocation>, range: &Range<u64>, tracking: Tracking) -> Key {
    (Arc::as_ptr(memory).addr(), range.start, range.end, tracking)
}

/// No piece.
const NONE: u32 = u32::MAX;

/// An operation's part of an array.
#[derive(Clone, Copy)]
struct Stretch {
    start: u32,
    len: u32,
}

impl Stretch {
    #[inline]
    fn range(self) -> Range<usize> {
        let start = self.start as usize;
        start..start + self.len as usize
    }

    /// Whether it has as many entries.
    #[inline]
    fn is_as_long<T>(self, as_these: &[T]) -> bool {
        self.len as usize == as_these.len()
    }
}

impl List {
    /// How many operations this run has written.
    pub(crate) fn len(&self) -> usize {
        self.written
    }

    /// How many operations it remembers.
    pub(crate) fn known_len(&self) -> usize {
        self.operations.len()
    }

    #[cfg(test)]
    fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// Whether this run touches any part of the range.
    pub(crate) fn uses(&self, memory: &Arc<Allocation>, range: &Range<u64>) -> bool {
        self.pieces.iter().any(|piece| {
            let is_there = piece.memory.as_ref().is_some_and(|its| Arc::ptr_eq(its, memory));
            is_there && piece.range.start < range.end && range.start < piece.range.end
        })
    }

    /// Whether the edges are up to date: not until a run that changed the list is [finished](Self::finish).
    pub(crate) fn is_settled(&self) -> bool {
        self.edges_are == EdgesAre::Holding
    }

    /// The edges, with their kinds.
    pub(crate) fn edge_kinds(&self) -> impl Iterator<Item = (Edge, EdgeKind)> + '_ {
        kinds(&self.edges, |number| {
            let NodeLaunch { function, shape, .. } = self.launch(number as usize);
            let kernel_of = match function {
                _ if shape.cooperative => None,
                Function::Device(function) => Some(function.context),
                Function::Host { .. } => Some(0),
                Function::Captured(_) | Function::Record(_) => None,
            };
            Node { kernel_of, waits_first: function.waits_first() }
        })
    }

    /// A number that stays equal as long as the shape does.
    pub(crate) fn shape(&self) -> u64 {
        self.shape
    }

    /// An operation's launch.
    #[inline]
    pub(crate) fn launch(&self, number: usize) -> NodeLaunch<'_> {
        let operation = &self.operations[number];
        let args = Arguments {
            words: &self.words[operation.words.range()],
            slots: &self.slots[operation.slots.range()],
        };
        let function = &self.kernels[operation.kernel as usize].function;
        NodeLaunch { function, shape: &operation.shape, args }
    }

    /// The name of its kernel.
    pub(crate) fn name(&self, number: usize) -> &Arc<str> {
        self.kernels[self.operations[number].kernel as usize].code.name()
    }

    /// The line that called it.
    pub(crate) fn at(&self, number: usize) -> &'static Location<'static> {
        self.operations[number].at
    }

    /// The code of its kernels.
    pub(crate) fn code(&self) -> impl Iterator<Item = &Arc<dyn KernelCode>> {
        self.kernels.iter().map(|kernel| &kernel.code)
    }

    /// Notes that this run uses a device other than the stream's.
    pub(crate) fn goes_across(&mut self) {
        self.is_across = true;
    }

    /// Whether this run uses a device other than the stream's.
    pub(crate) fn is_across(&self) -> bool {
        self.is_across
    }

    /// Whether it contains work that only a graph can run.
    pub(crate) fn needs_graph(&self) -> bool {
        let needs = |kernel: &ListedKernel| {
            matches!(kernel.function, Function::Captured(_) | Function::Record(_))
        };
        self.is_across || self.kernels.iter().any(needs)
    }

    /// Operations that differ from those that were noted last, by their numbers.
    pub(crate) fn changed(&self) -> &[u32] {
        &self.changed
    }

    /// Makes the current operations the ones that [`changed`](Self::changed) compares with.
    pub(crate) fn note_changes(&mut self) {
        for number in self.changed.drain(..) {
            self.operations[number as usize].is_changed = false;
        }
    }

    /// Whether it has the shape of the list that it replaces: then all of its operations count as changed.
    pub(crate) fn takes_place_of(&mut self, other: &List) -> bool {
        let kernels = |list: &List| -> Vec<usize> {
            let address = |known: &Operation| list.kernels[known.kernel as usize].address;
            list.operations.iter().map(address).collect()
        };
        let is_same = self.edges == other.edges && kernels(self) == kernels(other);
        if is_same {
            self.changed = (0..self.operations.len() as u32).collect();
            self.operations.iter_mut().for_each(|operation| operation.is_changed = true);
        }
        is_same
    }

    /// The accesses of the operations that this run has written, from number `first` on, in order.
    pub(crate) fn accesses(
        &self,
        first: usize,
    ) -> impl Iterator<Item = (&Arc<Allocation>, &Range<u64>, Mode, Tracking)> {
        let written = &self.operations[..self.written];
        let start = written.get(first).map_or(0, |operation| operation.touches.start as usize);
        let end = written.last().map_or(0, |operation| operation.touches.range().end);
        self.touches[start.min(end)..end].iter().filter_map(|touch| {
            let piece = &self.pieces[touch.piece as usize];
            let memory = piece.memory.as_ref()?;
            Some((memory, &piece.range, touch.mode, touch.tracking))
        })
    }

    /// Writes the next launch. `used` is called for each new access: the first of this run that touches its piece, writes it, or names these
    /// blocks of it; and for the others too, unless `holds`: the list's earlier entries are still valid.
    #[inline(always)]
    pub(super) fn write(
        &mut self,
        launch: &KernelLaunch<'_>,
        footprint: &Footprint<'_>,
        LaunchEntry { at, mut is_barrier }: LaunchEntry,
        holds: bool,
        mut used: impl FnMut(&Access<'_>),
    ) {
        let (args, accesses) = (launch.args.arguments(), &footprint.accesses.all[..]);
        let number = self.written;
        if !self.is_in_place(launch.address, args, accesses) {
            self.cut();
            self.push(launch, footprint, at);
        }
        self.written += 1;
        let List { operations, words, slots, touches, pieces, .. } = self;
        let operation = &mut operations[number];
        operation.at = at;
        let words = &mut words[operation.words.range()];
        let slots = &mut slots[operation.slots.range()];
        let has_words = are_same(words, args.words);
        if !has_words {
            words.copy_from_slice(args.words);
        }
        let has_slots =
            are_same::<u32>(bytemuck::cast_slice(slots), bytemuck::cast_slice(args.slots));
        if !has_slots {
            slots.copy_from_slice(args.slots);
        }
        let has_changed = !has_words | !has_slots | (operation.shape != launch.shape);
        if has_changed {
            operation.shape = launch.shape;
            if !operation.is_changed {
                operation.is_changed = true;
                self.changed.push(number as u32);
            }
        }
        let (was_barrier, places) = (operation.is_barrier, operation.touches.range());
        let mut found = 0;
        for (touch, access) in touches[places.clone()].iter().zip(accesses) {
            let is_known = |piece: &Piece| {
                touch.mode == access.mode
                    && access.named.is_none()
                    && (piece.is_written || !access.mode.writes())
                    && piece.is(access)
            };
            if !pieces.get(touch.piece as usize).is_some_and(is_known) {
                break;
            }
            // The caller relies on the stream's order.
            is_barrier |= matches!(access.tracking, Tracking::ByCaller);
            found += 1;
            if !holds {
                used(access);
            }
        }
        if found < accesses.len() {
            for (at, access) in accesses.iter().enumerate().skip(found) {
                is_barrier |= matches!(access.tracking, Tracking::ByCaller);
                if self.touch(places.start + at, access) || !holds {
                    used(access);
                }
            }
        }
        if is_barrier != was_barrier {
            self.operations[number].is_barrier = is_barrier;
            self.edges_are = EdgesAre::Open;
        }
    }

    /// Whether the next operation launches the kernel with that address, with as many arguments and accesses.
    #[inline]
    fn is_in_place(&self, address: usize, args: Arguments<'_>, accesses: &[Access<'_>]) -> bool {
        self.operations.get(self.written).is_some_and(|known| {
            self.kernels[known.kernel as usize].address == address
                && known.words.is_as_long(args.words)
                && known.slots.is_as_long(args.slots)
                && known.touches.is_as_long(accesses)
        })
    }

    /// Forgets the operations that this run has not written.
    #[cold]
    fn cut(&mut self) {
        if self.cut_at.is_none() {
            self.cut_at = Some(self.written);
            self.shape += 1;
        }
        self.edges_are = EdgesAre::Open;
        if let Some(operation) = self.operations.get(self.written) {
            self.words.truncate(operation.words.start as usize);
            self.slots.truncate(operation.slots.start as usize);
            self.touches.truncate(operation.touches.start as usize);
            self.operations.truncate(self.written);
            self.changed.retain(|number| (*number as usize) < self.written);
        }
    }

    /// Adds a launch whose pieces are not known yet.
    #[cold]
    fn push(
        &mut self,
        launch: &KernelLaunch<'_>,
        footprint: &Footprint<'_>,
        at: &'static Location<'static>,
    ) {
        fn extended<T: Clone>(all: &mut Vec<T>, more: impl Iterator<Item = T>) -> Stretch {
            let start = all.len() as u32;
            all.extend(more);
            Stretch { start, len: all.len() as u32 - start }
        }
        let address = launch.address;
        let is_it = |known: &ListedKernel| known.address == address;
        let kernel = self.kernels.iter().position(is_it).unwrap_or_else(|| {
            let function = launch.function.clone();
            self.kernels.push(ListedKernel { code: launch.code.share(), address, function });
            self.kernels.len() - 1
        });
        let args = launch.args.arguments();
        let touches = footprint.accesses.all.iter().map(|access| {
            let Access { mode, tracking, .. } = *access;
            Touch { piece: NONE, mode, tracking }
        });
        self.operations.push(Operation {
            kernel: kernel as u32,
            is_barrier: false,
            is_changed: false,
            shape: launch.shape,
            words: extended(&mut self.words, args.words.iter().copied()),
            slots: extended(&mut self.slots, args.slots.iter().copied()),
            touches: extended(&mut self.touches, touches),
            at,
        });
    }

    /// Enters an access that differs from the one in its place, or names blocks. Returns whether it is the first of this run that touches its
    /// piece, writes it, or names these blocks of it.
    fn touch(&mut self, place: usize, access: &Access<'_>) -> bool {
        let touch = &mut self.touches[place];
        if touch.mode != access.mode || touch.tracking != access.tracking {
            (touch.mode, touch.tracking) = (access.mode, access.tracking);
            self.edges_are = EdgesAre::Open;
        }
        let writes = access.mode.writes();
        let is_new = match self.pieces.get_mut(touch.piece as usize) {
            Some(piece) if piece.is(access) => false,
            Some(piece) if piece.memory.is_none() && piece.tracking == access.tracking => {
                self.edges_are = self.edges_are.max(piece.find(access));
                true
            }
            _ => self.relink(place, access),
        };
        let piece = &mut self.pieces[self.touches[place].piece as usize];
        let is_first_write = writes && !piece.is_written;
        piece.is_written |= writes;
        is_new | is_first_write | piece.names_others(access)
    }

    /// Finds another piece for an access; returns whether it is new in this run.
    #[cold]
    fn relink(&mut self, place: usize, access: &Access<'_>) -> bool {
        self.edges_are = EdgesAre::Open;
        if !self.scratch.is_indexed {
            self.index();
        }
        let next = self.pieces.len() as u32;
        let key = key(access.memory, &access.range, access.tracking);
        let number = *self.scratch.index.entry(key).or_insert(next);
        self.touches[place].piece = number;
        if number == next {
            self.pieces.push(Piece::of(access));
        }
        number == next
    }

    /// Indexes the pieces that this run has touched; returns, for each piece, the first that equals it.
    fn index(&mut self) -> Vec<u32> {
        let Scratch { index, is_indexed, .. } = &mut self.scratch;
        *is_indexed = true;
        index.clear();
        let numbered = self.pieces.iter().enumerate().map(|(number, piece)| {
            let number = number as u32;
            let Some(memory) = &piece.memory else { return number };
            *index.entry(key(memory, &piece.range, piece.tracking)).or_insert(number)
        });
        numbered.collect()
    }

    /// Ends this run and completes the edges; returns how the list differs from the last one.
    pub(crate) fn finish(&mut self) -> ListShape {
        let (len, known) = (self.written, self.known);
        if len < self.operations.len() {
            self.cut();
        }
        self.forget_kernels();
        let edge = self.settle();
        if edge.is_some() && self.cut_at.is_none() {
            self.shape += 1;
        }
        if known == 0 {
            return ListShape::First;
        }
        if edge.is_none() && self.cut_at.is_none() {
            return ListShape::Same;
        }
        let other = self.cut_at.filter(|number| *number < known && *number < len);
        match other.into_iter().chain(edge).min().unwrap_or(known) {
            first if first >= len => ListShape::Shorter,
            first if first >= known => ListShape::Longer(first),
            first if Some(first) == other => ListShape::Differs(first),
            first => ListShape::Reordered(first),
        }
    }

    /// Recomputes the edges if they may have changed; returns the first operation whose edges differ.
    fn settle(&mut self) -> Option<usize> {
        match std::mem::take(&mut self.edges_are) {
            EdgesAre::Holding => return None,
            // The same pieces have the same edges at any addresses, if no two overlap.
            EdgesAre::Moved if self.are_apart && self.find_whether_apart(|_| true) => return None,
            EdgesAre::Moved | EdgesAre::Open => {}
        }
        // Two pieces of the last run may have become the same.
        let numbers = self.index();
        self.touches.iter_mut().for_each(|touch| touch.piece = numbers[touch.piece as usize]);
        let List { operations, touches, pieces, edges, .. } = self;
        let builder = &mut self.scratch.builder;
        builder.clear();
        for operation in &*operations {
            if operation.is_barrier {
                builder.add_barrier();
                continue;
            }
            let tracked = touches[operation.touches.range()].iter();
            let tracked = tracked.filter(|touch| matches!(touch.tracking, Tracking::Tracked));
            builder.add(tracked.map(|touch| {
                (pieces[touch.piece as usize].addresses.clone(), touch.mode.writes())
            }));
        }
        let new = builder.edges();
        let differing = edges.iter().zip(new).find(|(known, new)| known != new);
        // Edges are sorted by the waiting operation.
        let first = differing.map(|(known, new)| known.1.min(new.1));
        let first = first.or_else(|| {
            let more = edges.get(new.len()).or(new.get(edges.len()));
            more.map(|edge| edge.1)
        });
        if first.is_some() {
            builder.swap_edges(edges);
        }
        self.are_apart = self.find_whether_apart(|number| numbers[number] as usize == number);
        first.map(|number| number as usize)
    }

    /// Whether no two tracked pieces overlap. `counts` selects the pieces to look at.
    fn find_whether_apart(&mut self, counts: impl Fn(usize) -> bool) -> bool {
        let (pieces, order) = (&self.pieces, &mut self.scratch.order);
        let tracked = pieces.iter().enumerate().filter(|(number, piece)| {
            counts(*number)
                && piece.memory.is_some()
                && matches!(piece.tracking, Tracking::Tracked)
                && !piece.addresses.is_empty()
        });
        order.clear();
        order.extend(tracked.map(|(number, _)| number as u32));
        let addresses = |number: u32| &pieces[number as usize].addresses;
        order.sort_unstable_by_key(|number| addresses(*number).start);
        order.windows(2).all(|pair| addresses(pair[0]).end <= addresses(pair[1]).start)
    }

    /// Removes kernels that no operation launches any more. They are dropped later: the caller may hold a lock.
    fn forget_kernels(&mut self) {
        if self.cut_at.is_none() {
            return;
        }
        for number in (0..self.kernels.len() as u32).rev() {
            if self.operations.iter().any(|operation| operation.kernel == number) {
                continue;
            }
            self.scratch.unused.push(self.kernels.remove(number as usize));
            let behind = self.operations.iter_mut().filter(|operation| operation.kernel > number);
            behind.for_each(|operation| operation.kernel -= 1);
        }
    }

    /// Begins the next run.
    pub(crate) fn begin(&mut self) {
        (self.known, self.written) = (self.operations.len(), 0);
        (self.cut_at, self.is_across) = (None, false);
    }

    /// Releases the memory that this run touched; not to be called under a lock.
    pub(crate) fn release(&mut self) {
        // Last piece first, so that the next run gets blocks from the stream's cache in the same order and few
        // operations change.
        for piece in self.pieces.iter_mut().rev() {
            (piece.memory, piece.is_written) = (None, false);
            piece.named.iter_mut().for_each(|named| named.is_entered = false);
        }
        if std::mem::take(&mut self.scratch.is_indexed) || self.cut_at.is_some() {
            self.scratch.index.clear();
            self.forget_pieces();
        }
        self.forget_kernels();
        self.scratch.unused.clear();
        (self.refused, self.interrupted_by) = (None, None);
    }

    /// Drops the pieces that no operation touches any more.
    fn forget_pieces(&mut self) {
        let mut numbers = vec![NONE; self.pieces.len()];
        for touch in &self.touches {
            numbers[touch.piece as usize] = 0;
        }
        let (mut at, mut kept) = (0, 0);
        self.pieces.retain(|_| {
            let number = &mut numbers[at];
            at += 1;
            let is_used = *number != NONE;
            if is_used {
                *number = kept;
                kept += 1;
            }
            is_used
        });
        for touch in &mut self.touches {
            touch.piece = numbers[touch.piece as usize];
        }
    }
}

/// Whether the numbers are the same. There are only a few: a call of `memcmp` would cost more.
#[inline(always)]
fn are_same<T: PartialEq + Copy>(known: &[T], new: &[T]) -> bool {
    let new = &new[..known.len()];
    let ((known, last), (new, new_last)) = (known.as_chunks::<4>(), new.as_chunks::<4>());
    known.iter().zip(new).all(|(known, new)| known == new)
        && last.iter().zip(new_last).all(|(known, new)| known == new)
}

impl Piece {
    fn of(access: &Access<'_>) -> Self {
        let mut piece = Piece {
            memory: None,
            range: 0..0,
            tracking: access.tracking,
            is_written: false,
            addresses: 0..0,
            named: Vec::new(),
        };
        piece.find(access);
        piece
    }

    /// Whether the access is to this piece and this run has touched the piece.
    #[inline]
    fn is(&self, access: &Access<'_>) -> bool {
        self.memory.as_ref().is_some_and(|memory| Arc::ptr_eq(memory, access.memory))
            && self.range == access.range
            && self.tracking == access.tracking
    }

    /// Whether the access names other blocks than the last access of this run with the same mode.
    fn names_others(&mut self, access: &Access<'_>) -> bool {
        let Some(BlockSet(blocks)) = access.named else { return false };
        let mode = access.mode;
        let at = self.named.iter().position(|named| named.mode == mode).unwrap_or_else(|| {
            self.named.push(SharedBlocks { mode, blocks: Vec::new(), is_entered: false });
            self.named.len() - 1
        });
        let SharedBlocks { blocks: known, is_entered, .. } = &mut self.named[at];
        // There are many blocks: comparing them is much cheaper than entering them.
        if std::mem::replace(is_entered, true) && known == blocks {
            return false;
        }
        known.clone_from(blocks);
        true
    }

    /// Moves the piece to the access's memory; returns what that means for the edges.
    fn find(&mut self, access: &Access<'_>) -> EdgesAre {
        let Access { memory, range, .. } = access;
        let base = memory.ptr;
        let addresses = base.offset(range.start).0..base.offset(range.end).0;
        (self.memory, self.range) = (Some(Arc::clone(memory)), range.clone());
        if addresses == self.addresses {
            return EdgesAre::Holding;
        }
        let was_empty = std::mem::replace(&mut self.addresses, addresses).is_empty();
        // An empty piece has no edges.
        if was_empty == self.addresses.is_empty() { EdgesAre::Moved } else { EdgesAre::Open }
    }
}

#[cfg(test)]
mod tests;
