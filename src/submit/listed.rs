//! A [`List`] on a stream.
//!
//! Adding a launch enters its uses in the hazards, with the ticket that the list will have.
//!
//! | a list | its operations |
//! |---|---|
//! | open | have a ticket, but are not submitted |
//! | put on the stream without a graph | were launched one by one, up to the first that the driver refused |
//! | launched as a graph | see [`batch::region`](crate::batch) |
//!
//! An operation that touches only fresh memory is put on the stream in front of the open list, with the list's ticket. That is safe because
//! the list keeps the memory that it touches, so the fresh memory is none of it.
#![forbid(unsafe_code)]

use std::any::Any;
use std::panic::Location;
use std::sync::Arc;

use super::footprint::{Footprint, Name};
use super::kernel_launch::KernelLaunch;
use super::lent::lend;
use super::list::{Interruption, LaunchEntry, List};
use super::outcome::LateOutcomes;
use super::raw::{Raw, Refusal};
use super::traced::{Traced, TracedAs};
use super::{Calls, SubmitError, explain};
use crate::error::{DriverCode, Error};
use crate::memory::accesses::Access;
use crate::memory::allocation::Poison;
use crate::memory::view::Tracking;
use crate::runtime::Engine;
use crate::runtime::stream_state::{Listed, StreamState, Turn};
use gpu_await_protocol::block_hazards::Blocks;

impl List {
    /// Whether a library is notified of each launch of its work in the list.
    pub(crate) fn is_told(&self) -> bool {
        self.code().any(|code| code.is_told())
    }

    /// Notifies the libraries of the launch being submitted.
    pub(crate) fn tell(
        &self,
        raw: &Raw<'_>,
        outcomes: &LateOutcomes,
    ) -> std::result::Result<(), Refusal> {
        self.code().try_for_each(|code| code.tell(raw, outcomes))
    }

    /// Notifies the libraries of a launch that was refused.
    pub(crate) fn tell_refused(&self, error: &Error) {
        self.code().for_each(|code| code.tell_refused(error));
    }

    /// The operation that had the list put on the stream early, if there was one.
    pub(crate) fn interrupted_by(&self) -> Option<&Interruption> {
        self.interrupted_by.as_ref()
    }

    /// Why a part of it was not launched, if so.
    pub(crate) fn refused(&self) -> Option<&Error> {
        self.refused.as_ref()
    }

    /// Launches its operations one by one; an error has the number of the first one that the driver refused.
    pub(crate) fn launch_each(&self, raw: &Raw<'_>) -> Result<(), (usize, DriverCode)> {
        (0..self.len()).try_for_each(|number| {
            let node = self.launch(number);
            raw.launch(node.function, node.shape, node.args).map_err(|code| (number, code))
        })
    }

    /// Has `put` make the list's driver calls for the turn's next ticket; returns their number, including those for
    /// timestamps.
    pub(super) fn traced<R>(
        &self,
        turn: &mut Turn<'_, '_>,
        commands: u32,
        put: impl FnOnce(&List, &Raw<'_>) -> R,
    ) -> (R, u32) {
        let stream = turn.stream;
        let is_on = self.len() > 0 && stream.engine.tracer.is_on();
        let of_list = || Traced::of_list(stream, self.name(0), self.len(), self.at(0));
        let traced = is_on.then(of_list).flatten();
        let commands = commands + if traced.is_some() { Traced::COMMANDS } else { 0 };
        if turn.is_crowded(commands) {
            turn.expect_to_block();
        }
        let Some(traced) = traced else { return (put(self, &Raw::of(turn)), commands) };
        let raw = Raw::noting(turn, traced.note());
        traced.starts(&raw);
        let result = put(self, &raw);
        traced.launched(self.len());
        traced.ends(&raw);
        traced.enter(stream, stream.progress.timeline.submitted() + 1, &[]);
        (result, commands)
    }

    /// Poisons the outputs of the operations from `first` on.
    pub(crate) fn refuse(&mut self, stream: &Arc<StreamState>, first: usize, refusal: Refusal) {
        if first >= self.len() {
            return;
        }
        let name = self.name(first);
        let error = explain(stream, Name::Kernel(name), refusal).called_at(self.at(first));
        let poison = Poison { producer: name.clone(), cause: error.clone() };
        let written = self.accesses(first).filter(|(_, _, mode, _)| mode.writes());
        written
            .for_each(|(memory, range, ..)| memory.poison(&Blocks::Range(range), false, &poison));
        self.refused.get_or_insert(error);
    }
}

impl Listed for List {
    fn put(&mut self, turn: &mut Turn<'_, '_>) -> u32 {
        let (stream, engine) = (turn.stream, &turn.stream.engine);
        if engine.ending.is_closed() {
            self.refuse(stream, 0, Refusal::Closed);
            return 0;
        }
        let commands = self.len() as u32;
        let (put, commands) = self.traced(turn, commands, |list, raw| list.launch_each(raw));
        match put {
            Ok(()) => commands,
            Err((at, code)) => {
                self.refuse(stream, at, code.into());
                at as u32
            }
        }
    }
}

/// Appends a launch that [is plain](Footprint::is_plain) to the owner's list on `stream`, if that is the open one and the thread and the
/// device accept work; returns the list's ticket. After `None`, [`submit_listed`] tells the caller the reason.
#[inline(always)]
pub(crate) fn append(
    stream: &Arc<StreamState>,
    footprint: &Footprint<'_>,
    owner: usize,
    (launch, entry): (&KernelLaunch<'_>, LaunchEntry),
) -> Option<u64> {
    footprint.check_place(stream).ok()?;
    stream.with_list(|turn| {
        let is_open = !turn.stream.engine.ending.is_closed() && turn.has_list_of(owner);
        is_open.then(|| write(turn, (footprint, true), launch, entry))
    })
}

/// Appends a launch to the owner's list on `stream`, as [`submit`](super::submit) would put it there. The flag beside the footprint is
/// [`Footprint::is_plain`]. Returns the list's ticket.
pub(crate) fn submit_listed(
    stream: &Arc<StreamState>,
    (footprint, is_plain): (&mut Footprint<'_>, bool),
    owner: usize,
    fresh: impl FnOnce() -> Box<List>,
    (launch, entry): (&KernelLaunch<'_>, LaunchEntry),
) -> Result<u64, SubmitError> {
    footprint.prepare(stream, is_plain)?;
    in_turn(stream, footprint, |turn, footprint| {
        let ticket = open_list(turn, footprint, (owner, entry.at), fresh)?;
        if !is_plain {
            wait_in_front(turn, footprint)?;
            lend(footprint.take_lent(), turn, ticket);
        }
        Ok(write(turn, (footprint, is_plain), launch, entry))
    })
}

/// Writes a launch to the open list, which belongs to the launch's owner; returns the list's ticket.
#[inline(always)]
fn write(
    turn: &mut Turn<'_, '_>,
    (footprint, is_plain): (&Footprint<'_>, bool),
    launch: &KernelLaunch<'_>,
    entry: LaunchEntry,
) -> u64 {
    let stream = turn.stream;
    let ticket = stream.progress.timeline.submitted() + 1;
    let list = turn.list().and_then(|list| (list as &mut dyn Any).downcast_mut::<List>());
    let Some(list) = list else { unreachable!("the owner opened it") };
    // The list's earlier entries hold if nothing else has used the memory since, or has failed to.
    list.write(launch, footprint, entry, is_plain, |access| {
        if matches!(access.tracking, Tracking::Tracked) {
            access.enter(&stream.progress, ticket);
        }
    });
    ticket
}

/// Puts an operation that touches only fresh memory in front of the owner's list; returns the list's ticket.
pub(crate) fn submit_in_front(
    stream: &Arc<StreamState>,
    footprint: &mut Footprint<'_>,
    owner: (usize, &'static Location<'static>),
    fresh: impl FnOnce() -> Box<List>,
    (commands, calls): (u32, &mut Calls<'_>),
) -> Result<u64, SubmitError> {
    footprint.prepare(stream, false)?;
    in_turn(stream, footprint, |turn, footprint| {
        let ticket = open_list(turn, footprint, owner, fresh)?;
        if footprint.may_block || turn.is_crowded(commands) {
            turn.expect_to_block();
        }
        wait_in_front(turn, footprint)?;
        let result = calls(&Raw::of(turn));
        // The list's first launch comes directly behind it.
        turn.stream.overlap.demand_full(turn.stream.progress.timeline.submitted());
        if !matches!(result, Err(Refusal::OutOfMemory { .. })) {
            lend(footprint.take_lent(), turn, ticket);
        }
        result.map(|()| ticket)
    })
}

/// Records in the open list, if there is one, which operation forces it onto the stream.
#[cold]
pub(super) fn interrupt(
    turn: &mut Turn<'_, '_>,
    footprint: &Footprint<'_>,
    at: &'static Location<'static>,
) {
    let list = turn.list().and_then(|list| (list as &mut dyn Any).downcast_mut::<List>());
    if let Some(list) = list {
        let name = footprint.name.of_kernel().cloned();
        list.interrupted_by = Some(Interruption { name, at });
    }
}

/// Ensures that the owner's list is the open one. Another owner's open list is first put on the stream, and may be refused:
/// its outputs are then poisoned.
fn open_list(
    turn: &mut Turn<'_, '_>,
    footprint: &Footprint<'_>,
    (owner, at): (usize, &'static Location<'static>),
    fresh: impl FnOnce() -> Box<List>,
) -> Result<u64, Refusal> {
    if turn.has_list_of(owner) {
        return Ok(turn.stream.progress.timeline.submitted() + 1);
    }
    interrupt(turn, footprint, at);
    let next = turn.stream.progress.timeline.submitted() + 1;
    let ticket = turn.open_list(owner, || fresh());
    if ticket != next {
        footprint.check_contents().map_err(Refusal::Foreign)?;
    }
    Ok(ticket)
}

/// Adds the waits of the footprint in front of the whole list.
fn wait_in_front(turn: &mut Turn<'_, '_>, footprint: &Footprint<'_>) -> Result<(), Refusal> {
    for edge in footprint.after() {
        let Some(marker) = &edge.marker else { continue };
        turn.wait_for(&edge.point.stream, marker)?;
    }
    Ok(())
}

fn in_turn(
    stream: &Arc<StreamState>,
    footprint: &mut Footprint<'_>,
    put: impl FnOnce(&mut Turn<'_, '_>, &mut Footprint<'_>) -> Result<u64, Refusal>,
) -> Result<u64, SubmitError> {
    let before = footprint.lent().len();
    let submitted = stream.with(|turn| match turn.stream.engine.ending.is_closed() {
        true => Err(Refusal::Closed),
        false => put(turn, footprint),
    });
    submitted.map_err(|refusal| {
        let error = footprint.poison_entered(explain(stream, footprint.name, refusal));
        SubmitError { error, lent: footprint.lent().len() < before }
    })
}

/// Writes a launch to a list that belongs to no stream: its uses are not tracked, only passed to `used` as in [`List::write`].
pub(crate) fn record(
    list: &mut List,
    engine: &Engine,
    footprint: &mut Footprint<'_>,
    (launch, entry): (&KernelLaunch<'_>, LaunchEntry),
    used: impl FnMut(&Access<'_>),
) -> Result<(), SubmitError> {
    if let Err(error) = footprint.validate(engine) {
        return Err(footprint.poison(error).into());
    }
    list.write(launch, footprint, entry, true, used);
    Ok(())
}
