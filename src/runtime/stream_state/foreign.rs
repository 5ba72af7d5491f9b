//! What a stream waits for on other devices, and what follows when one of these is lost: the stream makes no further progress. The same goes for an
//! adopted stream whose context its makers destroyed.
//!
//! | the stream | |
//! |---|---|
//! | is stuck | what waits for its work resolves with the loss; nothing is submitted to it any more ([`check_moves`](StreamState::check_moves)) |
//! | is stuck, and that was reported | a ticket that is not complete by then never is, whatever a marker says later |
//! | is stuck, and its full queue blocks a thread | on a host device the call fails with the loss ([`find_lost_dependency`](StreamState::find_lost_dependency)); a GPU's driver keeps the thread |
//! | is detached: the driver no longer knows its context ([`refused`](StreamState::refused)) | what is not known to be complete resolves with that error; the driver refuses new work |
//! | is on the same device, and an operation would wait for such a stream | the operation is refused, and the stream goes on |
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock};

use gpu_await_protocol::sync::Mutex;
use smallvec::SmallVec;

use super::{Point, StreamState};
use crate::error::{DriverCode, Error, ErrorDetail, Result};
use crate::runtime::progress::Progress;
use crate::runtime::progress::any_lost;
use crate::thread::role;
use gpu_await_protocol::timeline::Track;

/// A ticket that no stream ever issues. Work that waits for it fails only if the device of that stream is lost.
const NEVER: u64 = u64::MAX;

/// What a stream waits for on other devices, and whether it is detached.
pub(crate) struct ForeignWaits {
    progress: Arc<Progress<StreamState>>,
    /// Tickets that wait, with all behind them, for another device: for a stream of it, or for one of this
    /// device that does.
    waits: Mutex<Vec<(u64, Point)>>,
    /// Set once the driver no longer knows the context of a stream that others made.
    detached: OnceLock<Error>,
}

impl ForeignWaits {
    pub(super) fn new(progress: &Arc<Progress<StreamState>>) -> Self {
        let (waits, detached) = (Mutex::default(), OnceLock::new());
        ForeignWaits { progress: progress.clone(), waits, detached }
    }

    /// The loss of another device that `ticket` waits for, if any, directly or through other streams.
    pub(crate) fn dependency_lost(&self, ticket: u64) -> Option<Error> {
        if !self.progress.waits_for_others() {
            return None;
        }
        let detached = self.detached.get().filter(|_| !self.progress.is_complete(ticket)).cloned();
        detached.or_else(|| self.visit(ticket, |on| on.stream.lost_before(on.ticket)))
    }

    pub(super) fn is_detached(&self) -> bool {
        self.detached.get().is_some()
    }

    /// Records that the driver no longer knows the stream's context; returns the error of the first such call.
    fn detach(&self, error: impl FnOnce() -> Error) -> Error {
        let detached = self.detached.get_or_init(error).clone();
        // Kept for futures that ask after the stream is gone.
        self.progress.stuck.set(detached.clone()).ok();
        self.progress.set_waits_for_others(true);
        detached
    }

    /// Enters that `ticket` waits for these.
    pub(super) fn add(&self, ticket: u64, on: impl IntoIterator<Item = Point>) {
        let mut waits = self.waits.lock();
        waits.extend(on.into_iter().map(|on| (ticket, on)));
        self.note(!waits.is_empty());
    }

    /// Enters that `ticket` completes only if the devices of these streams survive until then.
    pub(crate) fn is_lost_with(
        &self,
        ticket: u64,
        streams: impl Iterator<Item = Arc<Progress<StreamState>>>,
    ) {
        self.add(ticket, streams.map(|stream| Point { stream, ticket: NEVER }));
    }

    /// Calls `look` for the points on other devices that `ticket` waits for, directly or indirectly, until it
    /// finds something.
    pub(super) fn visit<R>(
        &self,
        ticket: u64,
        mut look: impl FnMut(&Point) -> Option<R>,
    ) -> Option<R> {
        if !self.progress.waits_for_others() {
            return None;
        }
        self.forget();
        // Up to which ticket each stream was seen: streams may wait for each other to and fro. No two of
        // their locks are held at once.
        let mut seen: SmallVec<[Point; 4]> = SmallVec::new();
        let mut next = 0;
        self.collect(ticket, &mut seen);
        while let Some(on) = seen.get(next).cloned() {
            next += 1;
            if let Some(found) = look(&on) {
                return Some(found);
            }
            if on.stream.waits_for_others()
                && let Some(stream) = on.stream.stream()
            {
                stream.foreign.collect(on.ticket, &mut seen);
            }
        }
        None
    }

    /// The first ticket up to this one that needs a lost device and so is not complete, whatever the driver says.
    fn not_whole(&self, ticket: u64) -> Option<u64> {
        let waits = self.waits.lock();
        let goes_with =
            |(_, on): &&(u64, Point)| on.ticket == NEVER && on.stream.device().lost().is_some();
        let found = waits.iter().filter(goes_with).map(|(of, _)| *of);
        found.filter(|of| *of <= ticket && !self.progress.is_complete(*of)).min()
    }

    /// Adds the unseen points that `ticket` waits for.
    fn collect(&self, ticket: u64, seen: &mut SmallVec<[Point; 4]>) {
        let waits = self.waits.lock();
        // The newest first: a stream's earlier tickets are seen with it.
        for (_, on) in waits.iter().rev().filter(|(of, _)| *of <= ticket) {
            if !seen.iter().any(|s| s.stream.id == on.stream.id && s.ticket >= on.ticket) {
                seen.push(on.clone());
            }
        }
    }

    /// Forgets the streams of other devices that nothing here waits for any more.
    pub(super) fn forget(&self) {
        if !self.progress.waits_for_others() {
            return;
        }
        let mut waits = self.waits.lock();
        // After the loss of this device the others are not asked.
        let lost = self.progress.device.lost().is_some();
        waits.retain(|(ticket, _)| !lost && !self.progress.is_complete(*ticket));
        self.note(!waits.is_empty());
    }

    /// A detached stream counts as one that waits for something.
    fn note(&self, waits: bool) {
        self.progress.set_waits_for_others(waits || self.is_detached());
    }
}

impl StreamState {
    /// The error of a call on this stream, as [`Engine::refused`](crate::runtime::Engine::refused): the caller may hold a submission lock.
    pub(crate) fn refused(&self, code: DriverCode) -> Error {
        let error = self.engine.refused(code);
        let is_detached =
            code.may_be_of_a_stream() && !self.driver.is_owned() && !error.is_device_lost();
        if is_detached { self.detach(code) } else { error }
    }

    /// Interprets a failed query of this stream: the loss of the device, or of the stream's context.
    #[cold]
    #[inline(never)]
    pub(super) fn judge(
        &self,
        first: DriverCode,
        mut question: impl FnMut() -> std::result::Result<(), DriverCode>,
    ) -> Result<()> {
        if first.may_be_of_a_stream() && !self.driver.is_owned() {
            let error = self.refused(first);
            return if error.is_device_lost() { Err(error) } else { Ok(()) };
        }
        let mut first = Some(first);
        self.engine.judged(|| first.take().map_or_else(&mut question, Err))
    }

    #[cold]
    fn detach(&self, code: DriverCode) -> Error {
        let device = self.engine.label().to_owned();
        let error = || ErrorDetail::StreamDetached { device, code }.into();
        let detached = self.foreign.detach(error);
        self.engine.pacing.attention.call();
        detached
    }

    /// Takes a marker's word that `ticket` is complete; true if that changed anything. Work of several devices is not complete if one of them is lost
    /// by then: its part there may not have run.
    pub(super) fn complete(&self, ticket: u64) -> bool {
        let timeline = &self.progress.timeline;
        if any_lost()
            && self.progress.waits_for_others()
            && let Some(first) = self.foreign.not_whole(ticket)
        {
            let moved = timeline.complete(first - 1);
            timeline.give_up(first);
            return moved;
        }
        timeline.complete(ticket)
    }

    /// The loss of another device that work on the stream waits for. Asks those devices first, since the loss may have gone unnoticed.
    #[cold]
    pub(crate) fn find_lost_dependency(&self) -> Option<Error> {
        self.foreign.visit(u64::MAX, |on| {
            if let Some(other) = on.stream.stream() {
                // The loss is found below.
                other.engine.check_health().ok();
            }
            on.stream.lost_before(on.ticket)
        })
    }

    /// Refuses work that would never run, because work in front of it waits for a lost device. Otherwise the stream would accept work until its queue
    /// is full, and then block the caller for ever.
    #[inline]
    pub(crate) fn check_moves(&self) -> Result<()> {
        if any_lost() { self.check_moves_beside_a_loss() } else { Ok(()) }
    }

    #[cold]
    #[inline(never)]
    fn check_moves_beside_a_loss(&self) -> Result<()> {
        let tail = self.progress.timeline.submitted();
        if self.foreign.dependency_lost(tail).is_some() && role::may_call_driver() {
            // It may be complete without anything having looked.
            self.ask_quietly();
        }
        match self
            .foreign
            .dependency_lost(tail)
            .filter(|_| !self.progress.timeline.is_complete(tail))
        {
            Some(lost) => Err(lost),
            None => Ok(()),
        }
    }

    /// Whether the next work on the stream waits for a lost device: as far as is known, the stream makes no
    /// progress any more.
    pub(crate) fn is_stuck(&self) -> bool {
        if !self.progress.waits_for_others() {
            return false;
        }
        // Only a ticket with a marker in front of the wait can ever be seen complete.
        let next = self
            .markers
            .next(self.progress.timeline.completed())
            .unwrap_or_else(|| self.progress.timeline.submitted());
        // Kept for futures that ask after the stream is gone.
        let why = self
            .foreign
            .dependency_lost(next)
            .filter(|_| !self.progress.timeline.is_complete(next));
        why.map(|why| self.progress.stuck.set(why)).is_some()
    }

    /// [`is_stuck`](Self::is_stuck), asking the device first where a driver call may be made, since the
    /// answer depends on what is known to be complete.
    pub(super) fn is_found_stuck(&self) -> bool {
        if !self.progress.waits_for_others() {
            return false;
        }
        if role::may_call_driver() {
            self.ask_quietly();
        }
        self.is_stuck()
    }
}
