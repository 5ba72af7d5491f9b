//! Driver calls for graphs: launches that are built once and launched together repeatedly.

use super::{Arguments, DriverResult, Function, Grid, LaunchShape, RawPartition, RawStream};

/// A compiled graph of launches, or a captured one with neither `exec` nor nodes. `nodes` are the driver's handles, in the order in which
/// the launches were passed.
#[derive(Debug)]
pub(crate) struct RawGraph {
    pub(crate) graph: u64,
    pub(crate) exec: u64,
    pub(crate) nodes: Box<[u64]>,
    /// Its edges overlap, as far as asked for.
    pub(crate) overlaps: bool,
}

/// The second node runs after the first; if the edge `overlaps`, it starts as soon as all blocks of the first have triggered or ended, and
/// itself waits until the first is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GraphEdge {
    pub(crate) first: u32,
    pub(crate) second: u32,
    pub(crate) overlaps: bool,
}

/// A node: one launch, neither cooperative nor with clusters, captured work, or the record of an event.
#[derive(Clone, Copy)]
pub(crate) struct NodeLaunch<'a> {
    pub(crate) function: &'a Function,
    pub(crate) shape: &'a LaunchShape,
    pub(crate) args: Arguments<'a>,
}

/// A kernel of a captured graph, with its captured arguments: they belong to the graph, which outlives this. Handles and
/// addresses as numbers.
#[derive(Debug)]
pub(crate) struct KernelCall {
    pub(crate) function: u64,
    pub(crate) grid: Grid,
    pub(crate) params: u64,
    pub(crate) extra: u64,
    /// The driver's `CUlaunchAttribute`s.
    pub(crate) attributes: Box<[[u64; 9]]>,
}

/// Part of [`Backend`](super::Backend), whose contract the unsafe functions share. A graph is used by one thread at a
/// time; launches in progress keep the arguments that they were launched with.
pub(crate) trait GraphCalls {
    /// Captures what `code` puts on a stream, which nothing else uses in the meantime; `code` must not unwind. A host device captures
    /// nothing: the code itself records what runs.
    unsafe fn graph_capture(
        &self,
        stream: RawStream,
        code: &mut dyn FnMut(),
    ) -> DriverResult<RawGraph>;
    /// The kernels of a captured graph, if it is a chain of kernels.
    unsafe fn graph_kernels(&self, graph: &RawGraph) -> DriverResult<Option<Vec<KernelCall>>>;
    /// Launches one of them on its own.
    unsafe fn launch_call(&self, call: &KernelCall, stream: RawStream) -> DriverResult<()>;
    /// Compiles launches; edges are sorted by their second nodes. If the driver lacks overlapping edges, none overlaps. The nodes belong to
    /// the partition, wherever the graph is launched.
    unsafe fn graph_compile(
        &self,
        nodes: &[NodeLaunch<'_>],
        edges: &[GraphEdge],
        partition: Option<RawPartition>,
    ) -> DriverResult<RawGraph>;
    /// Changes nodes, by index, for later launches; `partition` is the graph's. After an error it is unspecified which have
    /// changed.
    unsafe fn graph_set(
        &self,
        graph: &RawGraph,
        changes: &mut dyn Iterator<Item = (usize, NodeLaunch<'_>)>,
        partition: Option<RawPartition>,
    ) -> DriverResult<()>;
    unsafe fn graph_launch(&self, graph: &RawGraph, stream: RawStream) -> DriverResult<()>;
    /// Requires that none of its launches is pending.
    unsafe fn graph_destroy(&self, graph: &RawGraph) -> DriverResult<()>;
}
