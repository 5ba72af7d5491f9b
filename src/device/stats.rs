//! [`Stats`]: what a device is doing, in figures.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use super::Device;
use crate::batch::report::Report;
use crate::error::unfinished::Unfinished;
use crate::runtime::progress::Overlapping;

/// What a device is doing. Each figure was true at some moment of the call: they are read one after another while work goes on, except for those
/// of partitions, which are from the same moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Operations submitted and not known to be complete, on all streams. Launches of other devices' [graphs](Device::graph_across)
    /// with nodes on this device count as well, one for each of their streams. After the loss of the device it
    /// keeps its last value.
    pub in_flight: u64,
    /// Live streams: a handle exists, or their work goes on. A device has some of its own: compare with
    /// an earlier value rather than with 0.
    pub streams: usize,
    /// [Partitions](crate::Partition) that hold multiprocessors of the device.
    pub partitions: u64,
    /// Multiprocessors in no partition, which can be [reserved](Device::reserve_partition).
    pub unreserved_multiprocessors: u32,
    /// While there are partitions: streams in none of them, whose work runs on all multiprocessors. The device's default stream is one,
    /// unless [the whole device](crate::DeviceBuilder::partition) is in one.
    pub streams_outside_partitions: usize,
    /// Host memory lent to operations in flight.
    pub lent_bytes: u64,
    /// Host memory that a lost device may still use and that is therefore never reused: pinned buffers and flags lent to unfinished
    /// operations, and [mapped memory](crate::Mapped) that was in use. Each block is counted once and stays counted, even if its
    /// stream is destroyed. Lent memory is counted when the device is lost, or when a stream that waits for another, lost device is
    /// destroyed; mapped memory is counted when it is dropped. Memory that was not in use also stays mapped, but is not
    /// included: see [`Device::lost`].
    pub quarantined_bytes: u64,
    /// [Loans](crate::Stream::lend_memory) of device memory to other libraries that have not ended;
    /// [`close`](Device::close) waits for them.
    pub loans: u64,
    /// Permits of [stream pools](crate::StreamPool), by weight, that requests hold on streams of the device
    /// or that wait for its work.
    pub permits: u64,
    /// Device memory held by buffers, in whole blocks. This and the next four are the figures of
    /// [`MemoryInfo`](crate::MemoryInfo): together they never exceed the limit.
    pub allocated_bytes: u64,
    /// Freed device memory that waits for device work: other streams use it, or its free is still queued on a
    /// stream.
    pub pending_bytes: u64,
    /// Freed device memory that streams cache for their next allocations.
    pub kept_bytes: u64,
    /// Device memory that is never freed: the driver refused, work that waits for a lost device may still use it, or
    /// a [loan](crate::MemoryLoan::end) of it ended on a thread that must not submit.
    pub leaked_bytes: u64,
    /// Device memory made here [for other processes as well](crate::MemoryInfo::shared_bytes), not included above.
    pub shared_bytes: u64,
    /// Live device buffers, including those of [graphs](crate::Graph): memory that a closure allocated lives as long as its graph.
    pub allocations: u64,
    /// Pinned host memory mapped and registered, in use or pooled. 2 MiB are registered in the background
    /// when the device is opened.
    pub pinned_bytes: u64,
    /// Pinned host memory in use: held by the program, lent, or [quarantined](Self::quarantined_bytes).
    pub pinned_used_bytes: u64,
    /// Futures woken so far because their operation was complete; excludes futures that saw completion
    /// without being woken.
    pub wake_ups: u64,
    /// Graphs that [`Region`](crate::Region)s and [`Graph`](crate::Graph)s have compiled: one for each stream and list.
    /// At most [`graph_limit`](crate::DeviceBuilder::graph_limit).
    pub graphs: u64,
    /// Graphs evicted so far to make room for others; each is compiled again when needed.
    pub graphs_evicted: u64,
    /// The outcomes of the lists of all regions on the device's streams, and of the launches of all graphs made for it: many
    /// `compiled` mean that shapes change all the time, `no_place` that the [limit](crate::DeviceBuilder::graph_limit) is low.
    pub lists: Report,
    /// Resources that leaked because the driver refused them or must not get them back, and values whose drop waits
    /// for a thread that the system refused.
    pub unreturned: u64,
    /// Launches of kernels that wait first, so that they can start while the preceding launch is still ending.
    pub overlaps: Overlaps,
}

/// The outcomes of launches of kernels that wait first, on GPUs of compute capability 9.0: formulas, algorithms, and kernels declared
/// `programmatic`. Each launch that the driver accepted is in one field, and no field ever falls. Cooperative launches, launches with clusters,
/// and kernels without a predecessor in their graph are in no field.
///
/// If there are several reasons, the first of these counts: on a stream `switched_off`, `on_shared_streams`, `timed`, `behind_other_work`; in a graph
/// `switched_off`, `behind_several`, `behind_other_work`, `refused`. A host device counts formulas and algorithms
/// alone, as if it were such a GPU, and runs all launches one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overlaps {
    /// Launched with permission to start early: with the driver's attribute on a stream, behind a programmatic edge in a graph. The driver does not
    /// report whether one did start early. It cannot if the preceding launch is complete by then, or a marker is between the two: one follows each
    /// operation that is awaited, and each whose buffers another stream uses next.
    pub allowed: u64,
    /// Behind anything but a plain launch on the same stream: work of another library, a graph, a copy, a wait for another stream, a
    /// cooperative launch, a launch that the driver refused. The first launch on a stream counts here as well. In a
    /// graph: behind anything but a kernel of the same device.
    pub behind_other_work: u64,
    /// In a graph: behind several launches.
    pub behind_several: u64,
    /// On a stream whose handle others have, or that is ordered with the legacy default stream.
    pub on_shared_streams: u64,
    /// On a stream while the [timeline](crate::Device::timeline) is on.
    pub timed: u64,
    /// In a graph whose programmatic edges the driver does not support: it is older than CUDA 12.3, or refuses them.
    pub refused: u64,
    /// Ruled out by [`DeviceBuilder::overlap`](crate::DeviceBuilder::overlap): on a stream with [`Overlap::Off`](crate::Overlap::Off), in a graph
    /// with anything but [`Overlap::LaunchesAndEdges`](crate::Overlap::LaunchesAndEdges).
    pub switched_off: u64,
}

impl Device {
    /// The device's remaining work.
    pub(crate) fn unfinished(&self) -> Unfinished {
        let mut left = Unfinished::default();
        for stream in self.engine().registry.streams() {
            stream.ask_after_all();
            let operations = stream.progress.timeline.in_flight();
            left.streams += u64::from(operations > 0);
            left.operations += operations;
        }
        let visits = self.visits();
        left.streams += visits;
        left.operations += visits;
        let Stats { loans, permits, pending_bytes, .. } = self.stats();
        // ORDERING: Relaxed: a statistic.
        let drops = self.engine().background.values_to_drop();
        Unfinished { loans, permits, pending_bytes, drops, ..left }
    }

    /// How many streams of other devices have work here.
    fn visits(&self) -> u64 {
        for visit in self.engine().registry.visits() {
            visit.stream.stream().iter().for_each(|stream| stream.ask_after_all());
        }
        self.engine().registry.visits().len() as u64
    }

    /// Returns what the device is doing. Inside a host function this is what is already known; the poller
    /// then queries the device.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let engine = self.engine();
        let streams = engine.registry.streams();
        let mut in_flight = self.visits();
        for stream in &streams {
            stream.ask_after_all();
            in_flight += stream.progress.timeline.in_flight();
        }
        engine.collect_freed();
        let memory = engine.memory.account.lock().figures();
        let counters = &engine.state.counters;
        let (pinned_bytes, pinned_used_bytes) = self.home.pinned.reserved_and_used();
        let (partitions, unreserved_multiprocessors) =
            engine.shares.partitions.figures(engine.limits.multiprocessors);
        // ORDERING: Relaxed: statistics.
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            in_flight,
            streams: self.home.streams(),
            partitions,
            unreserved_multiprocessors,
            streams_outside_partitions: match partitions {
                0 => 0,
                _ => streams.iter().filter(|stream| stream.is_outside()).count(),
            },
            lent_bytes: read(&counters.lent_bytes),
            quarantined_bytes: read(&counters.quarantined_bytes),
            loans: engine.memory.loans.open(),
            permits: read(&engine.state.permits),
            allocated_bytes: memory.of_buffers(),
            pending_bytes: memory.pending,
            kept_bytes: memory.kept,
            leaked_bytes: memory.leaked,
            shared_bytes: memory.shared,
            allocations: memory.buffers,
            pinned_bytes,
            pinned_used_bytes,
            wake_ups: read(&counters.wake_ups),
            graphs: engine.graphs.graphs() as u64,
            graphs_evicted: engine.graphs.evicted(),
            lists: engine.graphs.report(),
            unreturned: read(&counters.unreturned) + engine.background.left_without_a_thread(),
            overlaps: Overlaps {
                allowed: counters.overlaps.of(Overlapping::Overlaps),
                behind_other_work: counters.overlaps.of(Overlapping::BehindOtherWork),
                behind_several: counters.overlaps.of(Overlapping::BehindSeveral),
                on_shared_streams: counters.overlaps.of(Overlapping::Shared),
                timed: counters.overlaps.of(Overlapping::Traced),
                refused: counters.overlaps.of(Overlapping::Refused),
                switched_off: counters.overlaps.of(Overlapping::SwitchedOff),
            },
        }
    }
}
