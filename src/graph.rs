//! [`Graph`]: operations that are recorded once and launched together repeatedly.
//!
//! The closure that records them captures nothing: everything it uses belongs to the graph or is passed to each launch. So equal arguments
//! give equal launches, the closure needs to run only when an argument changes, and no argument can be stale.
//!
//! | module | decides |
//! |---|---|
//! | [`across`] | a graph of several devices |
//! | [`slots`] | the arguments that may be passed |
//! | [`instance`] | a graph on one stream: when the closure runs, and when the graph is compiled |
#![forbid(unsafe_code)]

mod across;
mod instance;
pub(crate) mod slots;

use std::fmt;
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::Mutex;

use crate::batch::graph_list::GraphList;
use crate::batch::queue::Queue;
use crate::batch::report;
use crate::batch::report::Report;
use crate::device::Device;
use crate::error::{Error, ErrorDetail, Result};
use crate::kernel::LaunchOn;
use crate::memory::accesses;
use crate::memory::view::Span;
use crate::runtime::Engine;
use crate::runtime::graph_memory::KeepsMemory;
use crate::runtime::stream_state::{OfStream, StreamHandle};
use crate::submit::{Footprint, Kept, Name, wrong_device};
use crate::thread::role;
use gpu_await_protocol::hazard::Mode;
use instance::{Instance, Untold};
use slots::{GraphArgs, GraphSlots, Passed, Seal};

/// Operations that are recorded once and launched together as one CUDA graph, with slots for the buffers and
/// values that change.
///
/// [`Device::graph`] makes it from a closure that puts launches on a [`Queue`]. A launch takes one argument
/// for each slot, is an operation like any other ([`Op`](crate::Op)), and puts one command on its stream,
/// however many nodes it has. The first launch on a stream runs the closure and compiles the graph there. A
/// launch with arguments other than those of the last one on that stream (another buffer, another part,
/// another value) runs the closure again and updates the nodes that differ; if kernels or their order differ
/// too, the graph is compiled again. A launch with the same arguments does nothing but launch the graph.
/// [`replay`](crate::Stream::replay) runs the closure each time, and takes closures that capture.
///
/// Fills and copies within the device count as launches, as do the fills of `zeros`, `ones` and `full`.
/// Matrix products, Fourier transforms, and work of other libraries that [can be
/// captured](crate::Uses::can_be_captured) are captured when the closure runs: with other arguments the graph
/// is compiled again.
///
/// [`Event::record_in`](crate::Event::record_in) records an event at a place in the graph, for its time.
///
/// Nodes that touch different memory run side by side, in whatever order they were recorded.
/// [`Device::graph_across`] makes a graph with nodes on several devices.
///
/// Clones are the same graph. Each stream has its own compiled graph, so launches on several streams overlap.
///
/// # Ownership
/// A graph owns its immutable state (kernels, weights) and, for each stream, the memory that its closure
/// allocated; it keeps none of the arguments of a launch. An allocation that finds no other memory takes
/// memory that closures allocated, behind the launches that use it, and the next launch runs the closure
/// again. A graph keeps no stream open: its data for a stream is dropped with the stream's last other handle.
/// If the graph is dropped in flight, everything stays until the launches are complete, and is then dropped
/// by a thread of this crate.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// use gpu_await::{Device, In, InOut, kernels};
/// let device = Device::host();
/// let axpy = kernels::axpy::load(&device).await?;
/// // y += a * x, twice.
/// let twice = device.graph::<(In<f32>, InOut<f32>, f32), _, _>(axpy, |q, axpy, (x, mut y, a)| {
///     axpy.launch(q, a, &x, &mut y)?;
///     axpy.launch(q, a, &x, &mut y)
/// });
/// let stream = device.stream()?;
/// let (x, mut y) = (stream.full(4, 1.0f32).queued()?, stream.full(4, 0.0f32).queued()?);
/// for step in 0..3 {
///     twice.launch(&stream, (&x, &mut y, step as f32)).await?;
/// }
/// assert_eq!(stream.download(&y).await?, [6.0; 4]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
/// Slots have one dimension. A function that makes rows from a [`View`](crate::View) and a
/// [`ViewMut`](crate::ViewMut) works with a stream, in the closures of `batch` and `replay`, and in a graph:
/// ```
/// # use gpu_await::{Device, Grid, LaunchConfig, Slice2, SliceMut2, kernel};
/// # kernel! {
/// #     unsafe fn transpose(x: &[[f32]], y: &mut [[f32]])
/// #     where x.rows() == y.columns(), x.columns() == y.rows();
/// #     launch = LaunchConfig::for_elements(y.rows() * y.columns());
/// #     host = transpose_twin;
/// # }
/// # fn transpose_twin(_: &Grid, x: Slice2<'_, f32>, mut y: SliceMut2<'_, f32>) {
/// #     for (i, row) in x.iter().enumerate() { for (j, x) in row.iter().enumerate() { y[(j, i)] = *x; } }
/// # }
/// # futures::executor::block_on(async {
/// # let device = Device::host();
/// # let stream = device.stream()?;
/// use gpu_await::{In, InOut, Queue, Result, View, ViewMut};
///
/// fn transposed(q: &Queue<'_>, k: &transpose, n: usize, x: &View<'_, f32>, y: &mut ViewMut<'_, f32>) -> Result<()> {
///     let m = x.len() / n;
///     k.launch(q, &x.rows_of(n)?, &mut y.slice_mut(..)?.rows_of_mut(m)?)
/// }
///
/// let state = (transpose::load(&device).await?, 3);
/// let graph = device.graph::<(In<f32>, InOut<f32>), _, _>(state, |q, (k, n), (x, mut y)| {
///     transposed(q, k, *n, &x, &mut y)
/// });
/// let (x, mut y) = (stream.upload(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]).queued()?, stream.zeros(6).queued()?);
/// graph.launch(&stream, (&x, &mut y)).await?;
/// assert_eq!(stream.download(&y).await?, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
pub struct Graph<S: GraphSlots> {
    definition: Arc<dyn Definition<S>>,
    /// The definition, as a value for compiled graphs to keep.
    kept: Kept,
    engine: Arc<Engine>,
    instances: Arc<Mutex<Vec<OnOneStream>>>,
    /// Never held over a driver call.
    report: Arc<Mutex<Report>>,
}

/// The instance of the graph on one stream.
struct OnOneStream {
    stream: Weak<StreamHandle>,
    instance: Arc<Mutex<Instance>>,
}

impl OnOneStream {
    /// Whether the stream has no handles left. The instance is then empty.
    fn is_gone(&self) -> bool {
        self.stream.strong_count() == 0
    }
}

/// Records a graph's list.
trait Definition<S: GraphSlots>: Send + Sync {
    fn record(&self, queue: &Queue<'_>, slots: S::Of<'_>) -> Result<()>;

    /// The other devices that its launches run on.
    fn others(&self) -> &[Device] {
        &[]
    }
}

/// The graph's state and closure.
struct Closure<State, F> {
    state: State,
    closure: F,
}

impl<S, State, F> Definition<S> for Closure<State, F>
where
    S: GraphSlots,
    State: Send + Sync,
    F: for<'a> Fn(&Queue<'_>, &State, S::Of<'a>) -> Result<()> + Send + Sync,
{
    fn record(&self, queue: &Queue<'_>, slots: S::Of<'_>) -> Result<()> {
        (self.closure)(queue, &self.state, slots)
    }
}

const NAME: &str = "a graph";

impl Device {
    /// Makes a graph of the launches that `closure` puts on the queue; see [`Graph`].
    ///
    /// The closure does not run on each launch, only on one with new arguments; its side effects happen only
    /// then. It captures nothing: it gets the queue, `state`, which the graph owns, and the argument for each
    /// slot, so none of its inputs can change unnoticed. A closure that captures does not compile; `cargo
    /// build` reports that, `cargo check` may not, because it is known only after monomorphization. The last
    /// note of the error names the line of the call.
    ///
    /// The queue accepts launches, fills and copies within the device, fresh memory (which the graph keeps),
    /// events by [`Event::record_in`](crate::Event::record_in), and work that [can be
    /// captured](crate::Uses::can_be_captured). Everything else is [`ErrorDetail::NotInGraph`]. Work that the
    /// closure puts on a stream directly is not part of the graph: it runs in front of the whole launch, and
    /// only when the closure runs.
    pub fn graph<S, State, F>(&self, state: State, closure: F) -> Graph<S>
    where
        S: GraphSlots,
        State: Send + Sync + 'static,
        F: for<'a> Fn(&Queue<'_>, &State, S::Of<'a>) -> Result<()> + Send + Sync + 'static,
    {
        const {
            assert!(
                size_of::<F>() == 0,
                "the closure of a graph captures nothing: pass what it uses as the first argument of `graph`, or for a slot"
            );
        }
        Graph::of(self, Closure { state, closure })
    }
}

impl<S: GraphSlots> Graph<S> {
    fn of(device: &Device, definition: impl Definition<S> + 'static) -> Self {
        let definition = Arc::new(definition);
        let (engine, instances, report) = (device.engine().clone(), Arc::default(), Arc::default());
        Graph { kept: definition.clone(), definition, engine, instances, report }
    }

    /// Launches the graph with one argument for each slot: `&` of a buffer or view for an [`In`](crate::In), `&mut`
    /// of one for an [`InOut`](crate::InOut) or [`Out`](crate::Out), a number for a number.
    ///
    /// Ready proves that all operations of the graph are *complete on the device*.
    ///
    /// # Blocking
    /// The first launch on a stream, and each that compiles again, takes 0.1 to 1 ms for 100 to 1,000 nodes. Nothing else compiles the graph:
    /// before serving, launch it once on each stream, with dummy arguments. If the driver needs more memory for graphs than ever before, the
    /// compilation waits for all running kernels and delays launches of other threads. A launch also waits while another thread launches the
    /// same graph on the same stream.
    ///
    /// # Errors
    /// The error that the closure returns; [`ErrorDetail::NotInGraph`]; memory that would be read but was never written or whose producer
    /// failed; [`ErrorDetail::WrongDevice`]; a lost or closed device. Arguments for `InOut` and `Out` then count as failed. If the closure
    /// ignores the error of a call, the outputs of that call count as failed, and if other launches of the list use any of that argument, the
    /// whole launch fails. A graph that the driver does not compile is launched operation by operation ([`report`](Self::report)).
    ///
    /// # Panics
    /// If the closure panics; nothing is launched, and the arguments are unchanged.
    ///
    /// # Source
    /// `cuGraphInstantiate`, `cuGraphExecKernelNodeSetParams`, `cuGraphLaunch`.
    #[track_caller]
    pub fn launch<'k, O: LaunchOn>(&self, on: &O, arguments: impl GraphArgs<'k, S>) -> O::Launched {
        let slots = arguments.slots(Seal(()));
        on.batch_of_one(|queue| self.put(queue, slots))
    }

    /// Returns the outcomes of its launches so far, on all streams.
    #[must_use]
    pub fn report(&self) -> Report {
        *self.report.lock()
    }

    /// Draws the compiled graphs in the DOT language: for each stream the launches, with their configurations
    /// and memory ranges, and which of them wait for which. A stream on which the graph is being launched
    /// right now, or whose last launch failed in its closure, is left out.
    #[must_use]
    pub fn dot(&self) -> String {
        let (mut clusters, mut first) = (String::new(), 0);
        let instances = self.instances.lock();
        for (stream, on) in instances.iter().filter(|on| !on.is_gone()).enumerate() {
            let Some(instance) = on.instance.try_lock() else { continue };
            let title = format!("stream {stream}");
            first += instance.write_dot(&mut clusters, &title, first);
        }
        report::dot(&clusters)
    }

    fn put(&self, queue: &Queue<'_>, slots: S::Of<'_>) -> Result<()> {
        let mut passed = Passed::default();
        S::enter(&slots, &mut passed);
        role::check("submitting work").map_err(|error| self.refuse(&passed, error))?;
        let engine = &queue.stream.engine;
        if engine.state.id != self.engine.state.id {
            return Err(self.refuse(&passed, wrong_device(NAME, engine, &self.engine)));
        }
        if queue.is_recording_graph() {
            return Err(self.refuse(&passed, ErrorDetail::NotInGraph { op: NAME.into() }.into()));
        }
        across::check_all_are_there(engine, self.definition.others())
            .map_err(|error| self.refuse(&passed, error))?;
        // Not under the instance's lock: this drops the values that the list kept.
        queue.end_list(Name::Verb(NAME));
        let instance = self.instance(queue.handle);
        let submitted = {
            let mut instance = instance.lock();
            match instance.is_recorded_for(&passed) {
                true => Ok(self.submit(&mut instance, queue, &passed)),
                false => Err((instance.release_memory(), instance.take_recorded())),
            }
        };
        let (released, mut recorded) = match submitted {
            Ok(submitted) => return self.tell(queue, submitted),
            Err(taken) => taken,
        };
        // Not under the lock: the drop may free memory, and the closure may launch other graphs elsewhere.
        drop(released);
        let spans = passed.arrays.iter().map(|(span, _)| span);
        let graph_list = GraphList::of(std::mem::take(&mut recorded.list), engine, spans);
        let recording = queue.recording(&graph_list);
        let failures = accesses::failures();
        let closure = self.definition.record(&recording, slots);
        recording.release_last();
        let (list, shares, events) = graph_list.finish();
        recorded.list = list;
        // A refused call whose error the closure ignores fails its outputs, and if the list uses them, the launch.
        let closure = closure.and_then(|()| {
            if accesses::failures() == failures {
                return Ok(());
            }
            let used = |(array, _): &(&Span<'_>, _)| recorded.list.uses(array.memory, &array.range);
            failed(&passed).find(used).map_or(Ok(()), |(_, error)| Err(error))
        });
        if let Err(error) = closure {
            // The list was not compared to its end, so the compiled graph does not match it.
            drop((recorded, shares));
            return Err(self.refuse(&passed, error));
        }
        // If outputs have failed, the next launch must run the closure again, which fails them again.
        let is_whole = failed(&passed).next().is_none();
        let recorded = Instance::new(recorded, events, &passed, is_whole);
        let outdated;
        let submitted = {
            let mut instance = instance.lock();
            outdated = recorded.replaces(&mut instance);
            self.submit(&mut instance, queue, &passed)
        };
        drop((outdated, shares));
        self.tell(queue, submitted)
    }

    /// Counts a launch that submitted nothing, and poisons its outputs.
    fn refuse(&self, passed: &Passed<'_>, error: Error) -> Error {
        self.count(Report { failed: 1, ..Report::default() });
        poisoned(passed, error)
    }

    fn submit(
        &self,
        instance: &mut Instance,
        queue: &Queue<'_>,
        passed: &Passed<'_>,
    ) -> (Report, Result<Untold>) {
        let mut report = Report::default();
        let submitted = instance.submit(queue, passed, &self.kept, &mut report);
        if let Ok(Untold::Launch(ticket)) = submitted {
            across::enter(queue.stream, ticket, self.definition.others());
        }
        (report, submitted.map_err(|error| poisoned(passed, error)))
    }

    /// Counts a launch, and notifies subscribers: foreign code, so under no lock.
    fn tell(&self, queue: &Queue<'_>, launch: (Report, Result<Untold>)) -> Result<()> {
        let (report, submitted) = launch;
        self.count(report);
        match submitted? {
            Untold::Launch(ticket) => Name::Verb(NAME).told(queue.stream, ticket),
            Untold::Events(events) => events.iter().try_for_each(|event| event.record_in(queue))?,
        }
        Ok(())
    }

    fn count(&self, launch: Report) {
        *self.report.lock() += launch;
        report::count(&self.engine, &launch);
    }

    /// The graph's instance on the stream. Removes instances of streams that no longer exist.
    fn instance(&self, stream: &Arc<StreamHandle>) -> Arc<Mutex<Instance>> {
        let mut instances = self.instances.lock();
        let is_its = |on: &&OnOneStream| std::ptr::eq(on.stream.as_ptr(), Arc::as_ptr(stream));
        if let Some(known) = instances.iter().find(is_its) {
            return known.instance.clone();
        }
        let gone = instances.extract_if(.., |on| on.is_gone());
        let gone: Vec<OnOneStream> = gone.collect();
        let instance: Arc<Mutex<Instance>> = Arc::default();
        instances
            .push(OnOneStream { stream: Arc::downgrade(stream), instance: Arc::clone(&instance) });
        drop(instances);
        let weak: Weak<dyn OfStream> = Arc::<Mutex<Instance>>::downgrade(&instance);
        stream.has(weak);
        let weak: Weak<dyn KeepsMemory> = Arc::<Mutex<Instance>>::downgrade(&instance);
        for engine in self.definition.others().iter().map(Device::engine).chain([&self.engine]) {
            engine.memory.graphs.enter(weak.clone());
        }
        drop(gone);
        instance
    }
}

/// The writable arguments that have failed, with their errors.
fn failed<'p>(passed: &'p Passed<'_>) -> impl Iterator<Item = (&'p Span<'p>, Error)> {
    let written = passed.arrays.iter().filter(|(_, written)| *written);
    written.filter_map(|(array, _)| Some((array, array.memory.failure(&array.range, NAME)?)))
}

/// Poisons every writable argument, and returns the error.
fn poisoned(passed: &Passed<'_>, error: Error) -> Error {
    let mut footprint = Footprint::new(NAME);
    let written = passed.arrays.iter().filter(|(_, written)| *written);
    written.for_each(|(array, _)| footprint.touches(array, Mode::Overwrite));
    footprint.poison(error)
}

impl<S: GraphSlots> Clone for Graph<S> {
    fn clone(&self) -> Self {
        Graph {
            definition: self.definition.clone(),
            kept: self.kept.clone(),
            engine: self.engine.clone(),
            instances: self.instances.clone(),
            report: self.report.clone(),
        }
    }
}

impl<S: GraphSlots> fmt::Debug for Graph<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let streams = self.instances.lock().iter().filter(|on| !on.is_gone()).count();
        write!(f, "Graph(on {}, {streams} streams)", self.engine.label())
    }
}
