//! Copies of many pieces as one operation.
//!
//! | the pieces | are copied |
//! |---|---|
//! | on this device, of pinned memory, of a GPU with peer access | by one operation: one driver call per piece, or one launch |
//! | of another GPU | through the host, each as [`copy`](Queue::copy) does it, in front of that operation |
//! | in a recorded list | by launches of at most [`FEW`] pieces, which are passed as arguments |
//!
//! # Invariants
//! 1. No piece touches a byte that another one writes: such copies are refused before anything is submitted (`pieces_that_overlap_are_refused`).
//! 2. If the operation is refused, all destinations count as failed (`a_refused_copy_fails_every_destination`).
#![forbid(unsafe_code)]

use crate::backend::DriverResult;
use crate::batch::queue::Queue;
use crate::error::piece::PieceProblem;
use crate::error::{ErrorDetail, Result};
use crate::memory::Element;
use crate::memory::grouped::{Group, Groups, Last, are_apart};
use crate::memory::pinned::PinnedBuffer;
use crate::memory::view::{Span, View, ViewMut};
use crate::submit::{
    FEW, Footprint, MemoryKernels, PieceWords, Raw, SubmitError, check_is_there, wrong_device,
};
use crate::thread::role;
use gpu_await_protocol::copies::{Mover, Touched, mover, overlap};
use gpu_await_protocol::hazard::Mode;

const OP: &str = "copy_many";
/// The multiprocessors that the kernel takes on a stream without a partition: enough to saturate the bus.
const MULTIPROCESSORS: u32 = 8;

/// How [`Stream::copy_many`](crate::Stream::copy_many) moves the pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CopyBy {
    /// The kernel for four or more pieces of less than 1 MiB on average, and in a recorded list; otherwise the copy engines.
    #[default]
    Auto,
    /// The copy engines, with one driver call per piece. They occupy no multiprocessor, and take at least about 2 µs per piece.
    CopyEngine,
    /// One kernel. It runs beside other kernels, with as many blocks as eight multiprocessors, or the stream's partition, can hold.
    Kernel,
}

/// One piece, with its source and destination.
#[derive(Clone)]
struct CopyPiece<'a> {
    from: Span<'a>,
    to: Span<'a>,
}

/// All pieces: the memory that they touch, and the words of those that are not empty.
struct Pieces<'p, 'a, T> {
    each: &'p [(View<'a, T>, ViewMut<'a, T>)],
    groups: Vec<Group<'p>>,
    words: Vec<PieceWords>,
    /// The first piece whose lengths differ.
    wrong: Option<usize>,
}

impl<'p, 'a, T: Element> Pieces<'p, 'a, T> {
    /// In one pass: otherwise a copy of a thousand pieces would take as long here as on the device.
    fn of(each: &'p [(View<'a, T>, ViewMut<'a, T>)]) -> Self {
        let mut groups = Groups::of(each.len());
        let (mut read, mut written) = (Last::new(Mode::Read), Last::new(Mode::Overwrite));
        let mut words = Vec::with_capacity(each.len());
        let mut wrong = None;
        for (number, (from, to)) in each.iter().enumerate() {
            if from.len() != to.len() {
                wrong = wrong.or(Some(number));
            }
            let (from, to) = (from.whole(), to.whole());
            groups.add(&mut read, &from);
            groups.add(&mut written, &to);
            if !from.range.is_empty() {
                words.push([to.address(), from.address(), to.size_bytes()]);
            }
        }
        Pieces { each, groups: groups.finish(), words, wrong }
    }

    /// The pieces that are not empty, one by one.
    fn spans(&self) -> Vec<CopyPiece<'p>> {
        let spans =
            self.each.iter().map(|(from, to)| CopyPiece { from: from.whole(), to: to.whole() });
        spans.filter(|piece| !piece.from.range.is_empty()).collect()
    }
}

impl Queue<'_> {
    /// See [`Stream::copy_many`](crate::Stream::copy_many).
    ///
    /// # Errors
    /// Those listed there.
    #[track_caller]
    pub fn copy_many<T: Element>(
        &self,
        pieces: Vec<(View<'_, T>, ViewMut<'_, T>)>,
        by: CopyBy,
    ) -> Result<()> {
        self.verb(|| {
            let pieces = Pieces::of(&pieces);
            let mut whole = footprint(&pieces.groups);
            self.copy_pieces(&mut whole, &pieces, by).map_err(|error| whole.poison(error))
        })
    }

    /// `whole` names all pieces.
    fn copy_pieces<T: Element>(
        &self,
        whole: &mut Footprint<'_>,
        pieces: &Pieces<'_, '_, T>,
        by: CopyBy,
    ) -> Result<()> {
        if let Some(piece) = pieces.wrong {
            let (from, to) = &pieces.each[piece];
            let (source_len, destination_len) = (from.len(), to.len());
            return Err(bad(piece, PieceProblem::Lengths { source_len, destination_len }).into());
        }
        let engine = &self.stream.engine;
        for Group { span, mode, .. } in &pieces.groups {
            let theirs = &span.memory.engine;
            if theirs.state.id == engine.state.id {
                continue;
            }
            if mode.writes() {
                return Err(wrong_device("the destination", engine, theirs));
            }
            if span.host().is_some() {
                return Err(wrong_device("the pinned memory", engine, theirs));
            }
        }
        if !are_apart(&pieces.groups) {
            check_overlap(pieces.each)?;
        }
        if pieces.words.is_empty() {
            return self.submit_nothing(whole);
        }
        let sources = pieces.groups.iter().map(|group| &group.span);
        let sources = sources.filter(|span| !span.range.is_empty());
        let mut is_reached = true;
        for span in sources {
            is_reached &= self.is_reached(span)?;
        }
        if is_reached && !self.writes_down() {
            return Ok(self.copy_direct(whole, &pieces.words, || pieces.spans(), by)?);
        }
        let mut direct = Vec::with_capacity(pieces.words.len());
        for piece in pieces.spans() {
            if self.is_reached(&piece.from)? {
                direct.push(piece);
                continue;
            }
            let groups = groups(std::slice::from_ref(&piece));
            self.copy_from_peer(&mut footprint(&groups), &piece.from, &piece.to)?;
        }
        let most = if self.writes_down() { FEW } else { direct.len().max(1) };
        direct.chunks(most).try_for_each(|pieces| {
            let words: Vec<PieceWords> = pieces.iter().map(CopyPiece::words).collect();
            let groups = groups(pieces);
            Ok(self.copy_direct(&mut footprint(&groups), &words, || pieces.to_vec(), by)?)
        })
    }

    /// Whether the device can access the memory directly. Memory of another kind of device counts as accessible, and is refused later.
    fn is_reached(&self, from: &Span<'_>) -> Result<bool> {
        let (engine, source) = (&self.stream.engine, &from.memory.engine);
        if source.state.id == engine.state.id || source.backend.kind() != engine.backend.kind() {
            return Ok(true);
        }
        role::check("submitting work")?;
        check_is_there(engine, source)?;
        self.home.reaches(source)
    }

    /// Copies pieces that the device can access directly and the footprint names.
    fn copy_direct<'p>(
        &self,
        footprint: &mut Footprint<'_>,
        words: &[PieceWords],
        pieces: impl FnOnce() -> Vec<CopyPiece<'p>>,
        by: CopyBy,
    ) -> Result<(), SubmitError> {
        let kernels = MemoryKernels::of(self.home);
        let bytes = words.iter().map(|[_, _, bytes]| bytes).sum();
        let mover = match by {
            CopyBy::CopyEngine => Mover::CopyEngine,
            CopyBy::Auto if !kernels.copies_pieces() => Mover::CopyEngine,
            CopyBy::Auto if !self.writes_down() => mover(words.len(), bytes),
            CopyBy::Auto | CopyBy::Kernel => Mover::Kernel,
        };
        if mover == Mover::CopyEngine {
            let commands = u32::try_from(words.len()).unwrap_or(u32::MAX);
            let pieces = pieces();
            let copied = self.submit(footprint, commands, &mut |raw| {
                Ok(pieces.iter().try_for_each(|piece| piece.copy(raw))?)
            });
            return copied.map(|_| ());
        }
        let mut table = None;
        if words.len() > FEW {
            let mut pinned = PinnedBuffer::<PieceWords>::new(&self.home.pinned, words.len())?;
            pinned.copy_from_slice(words);
            footprint.lends(pinned.block());
            table = Some(pinned.block().device());
        }
        let driver = &self.stream.driver;
        let all = driver.multiprocessors(&*self.stream.engine.backend);
        let multiprocessors = match driver.partition() {
            Some(_) => all,
            None => MULTIPROCESSORS.min(all),
        };
        match kernels.copy_pieces(words, table, multiprocessors) {
            Some(launch) => self.submit_memory_launch(footprint, &launch),
            None => {
                let what = "a copy of many pieces by a kernel, which did not load";
                let device = self.stream.engine.label().to_owned();
                Err(crate::Error::from(ErrorDetail::Unsupported { what, device }).into())
            }
        }
    }
}

impl CopyPiece<'_> {
    fn words(&self) -> PieceWords {
        [self.to.address(), self.from.address(), self.to.size_bytes()]
    }

    fn copy(&self, raw: &Raw<'_>) -> DriverResult<()> {
        let (CopyPiece { from, to }, bytes) = (self, self.to.size_bytes());
        match (from.host(), to.host()) {
            (Some(source), None) => raw.copy_to_device(to.ptr(), source, bytes),
            (None, Some(destination)) => raw.copy_to_host(destination, from.ptr(), bytes),
            _ => raw.copy(to, from),
        }
    }
}

/// The memory that the pieces touch.
fn groups<'a>(pieces: &[CopyPiece<'a>]) -> Vec<Group<'a>> {
    let mut groups = Groups::of(pieces.len());
    let (mut read, mut written) = (Last::new(Mode::Read), Last::new(Mode::Overwrite));
    for CopyPiece { from, to } in pieces {
        groups.add(&mut read, from);
        groups.add(&mut written, to);
    }
    groups.finish()
}

fn footprint<'a>(groups: &'a [Group<'a>]) -> Footprint<'a> {
    let mut footprint = Footprint::new(OP);
    footprint.peers = true;
    groups.iter().for_each(|group| footprint.touches_group(group));
    footprint
}

fn check_overlap<T: Element>(pieces: &[(View<'_, T>, ViewMut<'_, T>)]) -> Result<()> {
    let range = |span: Span<'_>| span.address()..span.address() + span.size_bytes();
    let touched = (0..).zip(pieces).flat_map(|(number, (from, to))| {
        let (from, to) = (range(from.whole()), range(to.whole()));
        [Touched::new(from, number, false), Touched::new(to, number, true)]
    });
    let mut touched: Vec<_> = touched.collect();
    let Some(found) = overlap(&mut touched) else { return Ok(()) };
    let (other, bytes) = (found.first as usize, found.shared.end - found.shared.start);
    Err(bad(found.second as usize, PieceProblem::Overlap { other, bytes }).into())
}

fn bad(piece: usize, problem: PieceProblem) -> ErrorDetail {
    ErrorDetail::BadPiece { op: OP, piece, problem }
}
