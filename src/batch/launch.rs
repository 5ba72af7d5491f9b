//! Launches, which replayed batches and graphs record, and the handling of other operations between them.
#![forbid(unsafe_code)]

use std::panic::Location;
use std::sync::Arc;

use crate::backend::{DevicePtr, Pattern, RowCopy};
use crate::batch::graph_list;
use crate::batch::graph_list::{GraphList, Writer};
use crate::batch::queue::Queue;
use crate::batch::region::Run;
use crate::batch::report::{ListOutcome, OpSite};
use crate::device::home::Home;
use crate::error::Result;
use crate::error::refused::AtLine;
use crate::event::Event;
use crate::runtime::stream_state::StreamHandle;
use crate::submit::{
    Calls, Footprint, KernelLaunch, MemoryKernels, MemoryLaunch, Name, Raw, Recorder, Refusal,
    SubmitError, capture, submit_nothing,
};

/// While it exists, operations put on the queue are parts of one verb. On drop it restores the line where the queue was opened.
struct InVerb<'q, 's>(&'q Queue<'s>, &'static Location<'static>);

impl Drop for InVerb<'_, '_> {
    fn drop(&mut self) {
        self.0.in_verb.set(false);
        self.0.at.set(self.1);
    }
}

impl<'s> Queue<'s> {
    /// A queue whose launches are recorded in the lists of a run.
    pub(crate) fn listing(self, run: &'s Run<'s>) -> Self {
        Queue { writer: Some(Writer::Replay(run)), ..self }
    }

    /// A queue of the same stream whose launches are recorded in a graph's list.
    pub(crate) fn recording<'d>(&'d self, graph_list: &'d GraphList) -> Queue<'d> {
        self.recorded_by(Some(Writer::Graph(graph_list)), self.handle, self.home)
    }

    /// A queue of another stream that records its launches in the same place as this one.
    pub(crate) fn beside<'d>(
        &'d self,
        handle: &'d Arc<StreamHandle>,
        home: &'d Arc<Home>,
    ) -> Queue<'d> {
        self.recorded_by(self.writer, handle, home)
    }

    /// Reports the same line as this queue.
    fn recorded_by<'d>(
        &'d self,
        writer: Option<Writer<'d>>,
        handle: &'d Arc<StreamHandle>,
        home: &'d Arc<Home>,
    ) -> Queue<'d> {
        let queue = Queue::new(handle, home, None, None, false).drawing_from(self.draws);
        Queue { writer, at: self.at.clone(), ..queue }
    }

    /// Whether launches are recorded before they are put on the stream.
    pub(super) fn writes_down(&self) -> bool {
        self.writer.is_some()
    }

    /// Fills memory of the footprint with `count` patterns; as a launch where launches are recorded, and where no memset is as fast.
    pub(super) fn submit_fill(
        &self,
        footprint: &mut Footprint<'_>,
        to: DevicePtr,
        pattern: Pattern,
        count: u64,
    ) -> Result<(), SubmitError> {
        let is_launch = self.writes_down() || !pattern.is_word(to);
        let kernels = is_launch.then(|| MemoryKernels::of(self.home));
        match kernels.as_deref().and_then(|kernels| kernels.fill(to, pattern, count)) {
            Some(fill) => self.submit_memory_launch(footprint, &fill),
            None => {
                self.submit(footprint, 1, &mut |raw| Ok(raw.fill(to, pattern, count)?)).map(|_| ())
            }
        }
    }

    /// Fills memory that an operation allocates; as a launch where no memset is as fast.
    pub(super) fn put_fill(
        &self,
        raw: &Raw<'_>,
        to: DevicePtr,
        pattern: Pattern,
        count: u64,
    ) -> Result<(), Refusal> {
        let kernels = (!pattern.is_word(to)).then(|| MemoryKernels::of(self.home));
        match kernels.as_deref().and_then(|kernels| kernels.fill(to, pattern, count)) {
            Some(fill) => fill.put(raw)?,
            None => raw.fill(to, pattern, count)?,
        }
        Ok(())
    }

    /// Copies rows between memory of the footprint, all of it on this device; as a launch where launches are recorded, and where there are
    /// gaps between rows, with which the driver takes up to a hundred times as long.
    pub(super) fn submit_copy(
        &self,
        footprint: &mut Footprint<'_>,
        copy: &RowCopy,
    ) -> Result<(), SubmitError> {
        let is_recorded = self.writes_down();
        let is_launch = is_recorded || !copy.is_contiguous();
        let kernels = is_launch.then(|| MemoryKernels::of(self.home));
        match kernels.as_deref().and_then(|kernels| kernels.copy(copy, is_recorded)) {
            Some(launch) => self.submit_memory_launch(footprint, &launch),
            None => self.submit(footprint, 1, &mut |raw| Ok(raw.copy_rows(copy)?)).map(|_| ()),
        }
    }

    pub(super) fn submit_memory_launch(
        &self,
        footprint: &mut Footprint<'_>,
        launch: &MemoryLaunch<'_>,
    ) -> Result<(), SubmitError> {
        match self.writer {
            Some(writer) => self.launch_in(writer, footprint, &launch.launch()),
            None => self.launch_now(footprint, &mut |raw| Ok(launch.put(raw)?)),
        }
    }

    /// Whether its launches are the list of a graph.
    pub(crate) fn is_recording_graph(&self) -> bool {
        matches!(self.writer, Some(Writer::Graph(_)))
    }

    /// Adds an ordering that the data does not imply: the next launch runs after everything before it and
    /// before everything after it, whatever they touch.
    ///
    /// For [replayed batches](crate::Stream::replay) and [graphs](crate::Graph), whose launches run side by
    /// side where they touch different memory. Elsewhere the order of the stream is enough.
    pub fn barrier(&self) {
        match self.writer {
            Some(Writer::Replay(run)) => run.barrier.set(true),
            Some(Writer::Graph(graph_list)) => graph_list.barrier.set(true),
            None => {}
        }
    }

    /// Runs a verb and adds the line that called it to its error. A verb that another verb calls is a part of that one.
    #[track_caller]
    #[inline]
    pub(crate) fn verb<R, E: AtLine>(
        &self,
        put: impl FnOnce() -> std::result::Result<R, E>,
    ) -> std::result::Result<R, E> {
        let at = Location::caller();
        if self.in_verb.replace(true) {
            return put();
        }
        let _outermost = InVerb(self, self.at.replace(at));
        // The uses of an `enqueue` may name another line.
        put().map_err(|error| error.at_line(self.at.get()))
    }

    /// Runs `put` as a part of the call for which the user opened the queue.
    pub(crate) fn part<R>(&self, put: impl FnOnce() -> R) -> R {
        let _part = InVerb(self, self.at.get());
        self.in_verb.set(true);
        put()
    }

    /// Submits or records a launch.
    #[inline(always)]
    pub(crate) fn submit_launch(
        &self,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
    ) -> Result<(), SubmitError> {
        match self.writer {
            Some(writer) => self.launch_in(writer, footprint, launch),
            None => {
                let KernelLaunch { function, shape, args, .. } = launch;
                let calls =
                    &mut |raw: &Raw<'_>| Ok(raw.launch(function, shape, args.arguments())?);
                self.launch_now(footprint, calls)
            }
        }
    }

    /// The checks of [`submit_launch`](Self::submit_launch) and [`submit`](Self::submit), for an operation that has nothing
    /// to put on the stream: it counts as done only after them. Memory passed to a graph's closure has no contents yet.
    #[cold]
    pub(crate) fn submit_nothing(&self, footprint: &Footprint<'_>) -> Result<()> {
        let engine = &self.stream.engine;
        let checked = match (self.refused, self.writer) {
            (Some(error), _) => Err(error.without_line()),
            (None, None) => submit_nothing(self.stream, self.at.get(), footprint),
            (None, Some(Writer::Graph(_))) => footprint.validate(engine),
            // The outputs of the recorded list count as written, and the list continues.
            (None, Some(Writer::Replay(_))) => {
                footprint.validate(engine).and_then(|()| footprint.check_contents())
            }
        };
        checked.map_err(|error| footprint.poison(error))
    }

    /// [`submit`](Self::submit) for a launch where nothing is recorded; compiled separately, because it is the most frequent operation.
    #[inline]
    fn launch_now(
        &self,
        footprint: &mut Footprint<'_>,
        calls: &mut impl FnMut(&Raw<'_>) -> Result<(), Refusal>,
    ) -> Result<(), SubmitError> {
        if let Some(error) = self.refused {
            return Err(footprint.poison(error.without_line()).into());
        }
        let op = footprint.name();
        let ticket = self.note(self.submit_now::<true>(footprint, 1, calls))?;
        op.told(self.stream, ticket);
        Ok(())
    }

    /// Records a launch: called for each node of a list, and usually finds it unchanged and in its place.
    #[inline(never)]
    fn launch_in(
        &self,
        writer: Writer<'_>,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
    ) -> Result<(), SubmitError> {
        let run = match writer {
            Writer::Replay(run) => run,
            Writer::Graph(graph_list) => {
                return graph_list.write(&self.stream.engine, footprint, launch, self.at.get());
            }
        };
        let can_be_appended = run.is_open()
            && self.refused.is_none()
            && footprint.is_simple()
            && launch.can_be_listed()
            && !self.outcomes.is_used()
            && footprint.is_plain(self.stream);
        if can_be_appended && let Some(ticket) = run.append(footprint, launch, self.at.get()) {
            self.note_ticket(ticket);
            footprint.name().told(self.stream, ticket);
            return Ok(());
        }
        self.launch_in_run(run, footprint, launch)
    }

    /// Records a launch that may be the first of a list or an unusual one; puts it on the stream if it cannot be in a list.
    #[inline(never)]
    fn launch_in_run(
        &self,
        run: &Run<'_>,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
    ) -> Result<(), SubmitError> {
        if !launch.can_be_listed()
            || !footprint.can_be_listed()
            || self.stream.engine.options.verify
        {
            return self.launch_unlisted(run, footprint, launch);
        }
        if let Some(error) = self.refused {
            return Err(footprint.poison(error.without_line()).into());
        }
        if !run.is_open() {
            self.release_last();
        }
        let (op, at) = (footprint.name(), self.at.get());
        let is_plain = self.outcomes.look(footprint, self.stream);
        let written = run.write((footprint, is_plain), launch, at);
        self.outcomes.enter(footprint, self.stream, &written, at);
        let ticket = self.note(written)?;
        op.told(self.stream, ticket);
        Ok(())
    }

    /// Puts a launch that cannot be in a list on the stream.
    #[cold]
    #[inline(never)]
    fn launch_unlisted(
        &self,
        run: &Run<'_>,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
    ) -> Result<(), SubmitError> {
        let site = site(footprint.name(), self.at.get());
        let outcome = match footprint.may_block {
            true => ListOutcome::FirstLaunch(site),
            false => ListOutcome::Unlisted(site),
        };
        let KernelLaunch { function, shape, args, .. } = launch;
        let mut calls = |raw: &Raw<'_>| Ok(raw.launch(function, shape, args.arguments())?);
        self.submit(footprint, 1, &mut calls)?;
        run.enter_unlisted(outcome);
        Ok(())
    }

    /// Submits the recorded list of a replayed batch, if there is one: the operation must not run before it.
    #[cold]
    pub(crate) fn end_list(&self, operation: Name<'_>) -> bool {
        let Some(Writer::Replay(run)) = self.writer else { return false };
        let was_open = run.is_open();
        run.submit(|| Some(site(operation, self.at.get())));
        was_open
    }

    /// Captures another library's work into the list of the graph.
    #[cold]
    pub(crate) fn record_captured(
        &self,
        footprint: &mut Footprint<'_>,
        recorder: &Recorder,
        calls: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<(), SubmitError> {
        let Some(Writer::Graph(graph_list)) = self.writer else {
            return Err(graph_list::refused(footprint));
        };
        let work = capture(self.stream, footprint, recorder, calls)?;
        graph_list.write(&self.stream.engine, footprint, &work.launch(), self.at.get())
    }

    /// Records an event; in a graph, through the graph's list.
    #[cold]
    pub(crate) fn record_event(&self, event: &Event) -> Result<()> {
        match self.writer {
            Some(Writer::Graph(graph_list)) => {
                graph_list.record(&self.stream.engine, event, self.at.get())
            }
            _ => event.record_in(self),
        }
    }

    /// Submits an operation in front of the recorded list if the two are independent, and behind it otherwise.
    #[cold]
    pub(super) fn submit_beside(
        &self,
        writer: Writer<'_>,
        footprint: &mut Footprint<'_>,
        commands: u32,
        calls: &mut Calls<'_>,
    ) -> Result<u64, SubmitError> {
        match writer {
            Writer::Replay(run) if run.is_open() && footprint.can_be_in_front() => {
                return run.write_in_front(footprint, self.at.get(), (commands, calls));
            }
            Writer::Replay(_) => {
                self.end_list(footprint.name());
            }
            Writer::Graph(_) if footprint.only_makes_a_buffer() => {}
            Writer::Graph(_) => return Err(graph_list::refused(footprint)),
        }
        self.submit_now::<false>(footprint, commands, calls)
    }
}

fn site(operation: Name<'_>, at: &'static Location<'static>) -> OpSite {
    match operation.of_kernel() {
        Ok(kernel) => OpSite::kernel(kernel, at),
        Err(verb) => OpSite::verb(verb, at),
    }
}
