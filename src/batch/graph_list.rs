//! [`Writer`]: where a queue records launches; [`GraphList`]: the list of a graph while its closure runs.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use crate::batch::region::Run;
use crate::error::{ErrorDetail, Result};
use crate::event::Event;
use crate::memory::allocation::{Allocation, KeptByGraph};
use crate::memory::view::Span;
use crate::runtime::Engine;
use crate::submit::{Footprint, KernelLaunch, LaunchEntry, List, SubmitError, record};

/// Where launches are recorded before they are put on the stream.
#[derive(Clone, Copy)]
pub(super) enum Writer<'s> {
    /// The lists of a replayed batch.
    Replay(&'s Run<'s>),
    /// The list of a graph, which this queue never puts on a stream.
    Graph(&'s GraphList),
}

#[derive(Default)]
pub(crate) struct GraphList {
    list: RefCell<List>,
    /// The id of the device whose streams launch it.
    home: u64,
    /// The parts of memory passed as arguments, which the caller borrows; allocations are identified by the address of their reference count.
    passed: Vec<(usize, Range<u64>)>,
    /// Other memory that the list touches; it is not available for other uses, even once the closure no longer
    /// borrows it.
    kept: RefCell<Vec<KeptByGraph>>,
    /// The events that each launch of the graph records.
    events: RefCell<Vec<Event>>,
    /// Whether the next launch is a barrier.
    pub(super) barrier: Cell<bool>,
}

/// A list, the values that keep its memory until its uses are summarized, and its events.
pub(crate) type FinishedList = (List, Vec<KeptByGraph>, Vec<Event>);

impl GraphList {
    /// Rewrites `list` for a launch on a stream of device `home` with the arguments `passed`.
    pub(crate) fn of<'a>(
        mut list: List,
        home: &Engine,
        passed: impl Iterator<Item = &'a Span<'a>>,
    ) -> Self {
        let part = |span: &Span<'_>| (Arc::as_ptr(span.memory).addr(), span.range.clone());
        list.begin();
        let (list, passed) = (RefCell::new(list), passed.map(part).collect());
        GraphList { list, home: home.state.id, passed, ..GraphList::default() }
    }

    /// Records a launch of a device.
    pub(super) fn write(
        &self,
        engine: &Engine,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
        at: &'static Location<'static>,
    ) -> std::result::Result<(), SubmitError> {
        if !launch.can_be_listed() || footprint.is_lent() {
            return Err(refused(footprint));
        }
        let is_passed = |memory: &Arc<Allocation>, touched: &Range<u64>| {
            self.passed.iter().any(|(passed, range)| {
                *passed == Arc::as_ptr(memory).addr()
                    && range.start <= touched.start
                    && touched.end <= range.end
            })
        };
        footprint.part_blocks(is_passed);
        let (mut list, mut kept) = (self.list.borrow_mut(), self.kept.borrow_mut());
        let entry = LaunchEntry { at, is_barrier: self.barrier.replace(false) };
        let mut is_across = engine.state.id != self.home;
        record(&mut list, engine, footprint, (launch, entry), |access| {
            is_across |= access.memory.engine.state.id != self.home;
            if !is_passed(access.memory, &access.range) {
                let mut part = KeptByGraph::new(access.memory);
                part.keep(&access.range);
                kept.push(part);
            }
        })?;
        if is_across {
            list.goes_across();
        }
        Ok(())
    }

    /// Records the recording of an event.
    pub(super) fn record(
        &self,
        engine: &Engine,
        event: &Event,
        at: &'static Location<'static>,
    ) -> Result<()> {
        let mut footprint = Footprint::new("record");
        if event.shared().is_some() {
            return Err(refused(&footprint).into());
        }
        if let Some(node) = event.node()? {
            self.barrier.set(true);
            self.write(engine, &mut footprint, &node.launch(), at)?;
        }
        self.events.borrow_mut().push(event.clone());
        Ok(())
    }

    pub(crate) fn finish(self) -> FinishedList {
        (self.list.into_inner(), self.kept.into_inner(), self.events.into_inner())
    }
}

/// The error for an operation that cannot be part of a graph.
pub(super) fn refused(footprint: &Footprint<'_>) -> SubmitError {
    let op = footprint.name().to_arc();
    footprint.poison(ErrorDetail::NotInGraph { op }.into()).into()
}
