//! Copies of many pieces as one operation.
//!
//! | the pieces | are copied |
//! |---|---|
//! | on this device, of pinned memory, of a GPU that this one reaches | by one operation: a call of the driver each, or one launch |
//! | of another GPU | through the host, each as [`copy`](Queue::copy) does, in front of that operation |
//! | in a recorded list | by launches of [`FEW`] pieces at most, which name the pieces as arguments |
//!
//! # Invariants
//! 1. No byte that a piece writes is touched by another: refused before anything is submitted (`pieces_that_overlap_are_refused`).
//! 2. If the operation is refused, all destinations count as failed (`a_refused_copy_fails_every_destination`).
#![forbid(unsafe_code)]

use crate::backend::DriverResult;
use crate::batch::queue::Queue;
use crate::error::piece::PieceProblem;
use crate::error::{ErrorDetail, Result};
use crate::memory::Element;
use crate::memory::grouped::{Group, are_apart, grouped};
use crate::memory::pinned::PinnedBuffer;
use crate::memory::view::{Span, View, ViewMut};
use crate::submit::{
    FEW, Footprint, MemoryKernels, PieceWords, Raw, SubmitError, check_is_there, wrong_device,
};
use crate::thread::role;
use gpu_await_protocol::copies::{Mover, Touched, mover, overlap};
use gpu_await_protocol::hazard::Mode;

const OP: &str = "copy_many";
/// The multiprocessors that the kernel takes on a stream without a partition: enough for the bus.
const MULTIPROCESSORS: u32 = 8;

/// What moves the pieces of [`Stream::copy_many`](crate::Stream::copy_many).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CopyBy {
    /// The kernel for four pieces or more of less than 1 MiB on average, the copy engines for others. In a recorded list: the kernel.
    #[default]
    Auto,
    /// The copy engines, with one call of the driver a piece. They take no multiprocessor, and some 2 µs a piece whatever its size.
    CopyEngine,
    /// One kernel. It takes as many blocks as eight multiprocessors hold, or as the stream's partition holds, beside other kernels.
    Kernel,
}

/// One piece.
struct CopyPiece<'a> {
    from: Span<'a>,
    to: Span<'a>,
}

impl Queue<'_> {
    /// See [`Stream::copy_many`](crate::Stream::copy_many).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn copy_many<T: Element>(
        &self,
        pieces: Vec<(View<'_, T>, ViewMut<'_, T>)>,
        by: CopyBy,
    ) -> Result<()> {
        self.verb(|| {
            let wrong = pieces.iter().position(|(from, to)| from.len() != to.len());
            let wrong = wrong.map(|piece| {
                let (source_len, destination_len) = (pieces[piece].0.len(), pieces[piece].1.len());
                bad(piece, PieceProblem::Lengths { source_len, destination_len })
            });
            let spans =
                pieces.iter().map(|(from, to)| CopyPiece { from: from.whole(), to: to.whole() });
            let spans: Vec<_> = spans.collect();
            let groups = groups(&spans);
            let mut whole = footprint(&groups);
            let copied = match wrong {
                Some(error) => Err(error.into()),
                None => self.copy_pieces(&mut whole, (&spans, are_apart(&groups)), by),
            };
            copied.map_err(|error| whole.poison(error))
        })
    }

    /// `whole` names all pieces. The flag beside them: it is known that they do not overlap.
    fn copy_pieces(
        &self,
        whole: &mut Footprint<'_>,
        (pieces, are_apart): (&[CopyPiece<'_>], bool),
        by: CopyBy,
    ) -> Result<()> {
        let engine = self.stream.engine();
        for CopyPiece { from, to } in pieces {
            if to.memory.engine().state.id != engine.state.id {
                return Err(wrong_device("the destination", engine, to.memory.engine()));
            }
            if from.memory.engine().state.id != engine.state.id && from.host().is_some() {
                return Err(wrong_device("the pinned memory", engine, from.memory.engine()));
            }
        }
        if !are_apart {
            check_overlap(pieces)?;
        }
        let mut direct = Vec::with_capacity(pieces.len());
        for piece in pieces.iter().filter(|piece| !piece.from.range.is_empty()) {
            if self.is_reached(&piece.from)? {
                direct.push(piece);
                continue;
            }
            let groups = groups([piece]);
            let mut footprint = footprint(&groups);
            self.copy_from_peer(&mut footprint, &piece.from, &piece.to)?;
        }
        if pieces.iter().all(|piece| piece.from.range.is_empty()) {
            return self.submit_nothing(whole);
        }
        if direct.is_empty() {
            return Ok(());
        }
        if direct.len() == pieces.len() && !self.writes_down() {
            return Ok(self.copy_direct(whole, &direct, by)?);
        }
        let most = if self.writes_down() { FEW } else { direct.len() };
        direct.chunks(most).try_for_each(|pieces| {
            let groups = groups(pieces.iter().copied());
            Ok(self.copy_direct(&mut footprint(&groups), pieces, by)?)
        })
    }

    /// Whether the device reaches the memory itself; another kind of device's counts as reached, and is refused later.
    fn is_reached(&self, from: &Span<'_>) -> Result<bool> {
        let (engine, source) = (self.stream.engine(), from.memory.engine());
        if source.state.id == engine.state.id || source.backend.kind() != engine.backend.kind() {
            return Ok(true);
        }
        role::check("submitting work")?;
        check_is_there(engine, source)?;
        self.home.reaches(source)
    }

    /// Copies pieces that the device reaches, which the footprint names.
    fn copy_direct(
        &self,
        footprint: &mut Footprint<'_>,
        pieces: &[&CopyPiece<'_>],
        by: CopyBy,
    ) -> Result<(), SubmitError> {
        let kernels = MemoryKernels::of(self.home);
        let bytes = pieces.iter().map(|piece| piece.to.size_bytes()).sum();
        let mover = match by {
            CopyBy::CopyEngine => Mover::CopyEngine,
            CopyBy::Auto if !kernels.copies_pieces() => Mover::CopyEngine,
            CopyBy::Auto if !self.writes_down() => mover(pieces.len(), bytes),
            CopyBy::Auto | CopyBy::Kernel => Mover::Kernel,
        };
        if mover == Mover::CopyEngine {
            let commands = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
            let copied = self.submit(footprint, commands, &mut |raw| {
                Ok(pieces.iter().try_for_each(|piece| piece.copy(raw))?)
            });
            return copied.map(|_| ());
        }
        let words: Vec<PieceWords> = pieces.iter().map(|piece| piece.words()).collect();
        let mut table = None;
        if words.len() > FEW {
            let mut pinned = PinnedBuffer::<PieceWords>::new(&self.home.pinned, words.len())?;
            pinned.copy_from_slice(&words);
            footprint.lends(pinned.block());
            table = Some(pinned.block().device());
        }
        let driver = &self.stream.driver;
        let all = driver.multiprocessors(&*self.stream.engine().backend);
        let multiprocessors = match driver.partition() {
            Some(_) => all,
            None => MULTIPROCESSORS.min(all),
        };
        match kernels.copy_pieces(&words, table, multiprocessors) {
            Some(launch) => self.submit_launch(footprint, &launch.launch()),
            None => {
                let what = "a copy of many pieces by a kernel, which did not load";
                let device = self.stream.engine().label().to_owned();
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

/// What the pieces touch.
fn groups<'p: 'a, 'a>(pieces: impl IntoIterator<Item = &'a CopyPiece<'p>>) -> Vec<Group<'a>> {
    grouped(pieces.into_iter().flat_map(|CopyPiece { from, to }| {
        [(from.clone(), Mode::Read), (to.clone(), Mode::Overwrite)]
    }))
}

fn footprint<'a>(groups: &'a [Group<'a>]) -> Footprint<'a> {
    let mut footprint = Footprint::new(OP);
    footprint.peers = true;
    groups.iter().for_each(|group| footprint.touches_group(group));
    footprint
}

fn check_overlap(pieces: &[CopyPiece<'_>]) -> Result<()> {
    let range = |span: &Span<'_>| span.address()..span.address() + span.size_bytes();
    let touched = (0..).zip(pieces).flat_map(|(number, CopyPiece { from, to })| {
        [Touched::new(range(from), number, false), Touched::new(range(to), number, true)]
    });
    let mut touched: Vec<_> = touched.collect();
    let Some(found) = overlap(&mut touched) else { return Ok(()) };
    let (other, bytes) = (found.first as usize, found.shared.end - found.shared.start);
    Err(bad(found.second as usize, PieceProblem::Overlap { other, bytes }).into())
}

fn bad(piece: usize, problem: PieceProblem) -> ErrorDetail {
    ErrorDetail::BadPiece { op: OP, piece, problem }
}
