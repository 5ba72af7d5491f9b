//! The driver's graph calls.

use std::ffi::c_int;

use super::api::Handle;
use super::node_params::{EdgeData, NodeParams};
use super::{CudaBackend, driver, event_handle, newer, stream_handle};
use crate::backend::{
    DriverResult, Function, GraphCalls, GraphEdge, KernelCall, NO_ARGS, NodeLaunch, RawGraph,
    RawPartition, RawStream,
};
use crate::error::DriverCode;

impl CudaBackend {
    /// A graph of launches. With `overlaps`, the edges that ask for it overlap.
    fn new_graph(
        &self,
        launches: &[NodeLaunch<'_>],
        edges: &[GraphEdge],
        partition: Option<RawPartition>,
        overlaps: bool,
    ) -> DriverResult<RawGraph> {
        let mut graph: Handle = std::ptr::null_mut();
        driver!(self.cuGraphCreate(&raw mut graph, 0))?;
        self.fill_graph(graph, launches, edges, partition, overlaps).inspect_err(|_| {
            driver!(self.cuGraphDestroy(graph)).ok();
        })
    }

    /// Adds launches to an empty graph, and compiles it.
    fn fill_graph(
        &self,
        graph: Handle,
        launches: &[NodeLaunch<'_>],
        edges: &[GraphEdge],
        partition: Option<RawPartition>,
        overlaps: bool,
    ) -> DriverResult<RawGraph> {
        let mut nodes: Vec<Handle> = Vec::with_capacity(launches.len());
        let (mut before, mut early) = (Vec::new(), Vec::new());
        let mut edges = edges.iter().peekable();
        let (mut params, mut pointers) = (NodeParams::unset(), NO_ARGS);
        for &launch in launches {
            before.clear();
            early.clear();
            let number = nodes.len() as u32;
            while let Some(edge) = edges.next_if(|edge| edge.second == number) {
                let waits_for = if overlaps && edge.overlaps { &mut early } else { &mut before };
                waits_for.push(nodes[edge.first as usize]);
            }
            let mut node: Handle = std::ptr::null_mut();
            let (waits_for, count) = (before.as_ptr(), before.len());
            let to = &raw mut node;
            match *launch.function {
                Function::Captured(work) => {
                    let work = work as Handle;
                    driver!(self.cuGraphAddChildGraphNode(to, graph, waits_for, count, work))
                }
                Function::Record(event) => {
                    let event = event_handle(event);
                    driver!(self.cuGraphAddEventRecordNode(to, graph, waits_for, count, event))
                }
                _ => {
                    params.set(launch, &mut pointers, self.raw_context as u64, partition)?;
                    let params = &raw const params;
                    driver!(self.cuGraphAddKernelNode_v2(to, graph, waits_for, count, params))
                }
            }?;
            for from in &early {
                let data = EdgeData::PROGRAMMATIC;
                let (from, to, data) = (&raw const *from, &raw const node, &raw const data);
                newer!(self.cuGraphAddDependencies_v2(graph, from, to, data, 1))?;
            }
            nodes.push(node);
        }
        let mut exec: Handle = std::ptr::null_mut();
        driver!(self.cuGraphInstantiateWithFlags(&raw mut exec, graph, 0))?;
        let nodes = nodes.into_iter().map(|node| node as u64).collect();
        Ok(RawGraph { graph: graph as u64, exec: exec as u64, nodes, overlaps })
    }
}

/// Whether a refused graph should be built again with full edges, because the driver lacks the others. Any other error is transient, or would recur.
fn is_about_edges(code: DriverCode) -> bool {
    code.is_not_known_here()
        && matches!(code.call, "cuGraphAddDependencies_v2" | "cuGraphInstantiateWithFlags")
}

impl GraphCalls for CudaBackend {
    unsafe fn graph_capture(
        &self,
        stream: RawStream,
        code: &mut dyn FnMut(),
    ) -> DriverResult<RawGraph> {
        const RELAXED: c_int = 2;
        let _bound = self.bind()?;
        let stream = stream_handle(stream);
        driver!(self.cuStreamBeginCapture_v2(stream, RELAXED))?;
        code();
        let mut graph: Handle = std::ptr::null_mut();
        driver!(self.cuStreamEndCapture(stream, &raw mut graph))?;
        let (nodes, overlaps) = (Box::default(), false);
        Ok(RawGraph { graph: graph as u64, exec: 0, nodes, overlaps })
    }

    unsafe fn graph_kernels(&self, graph: &RawGraph) -> DriverResult<Option<Vec<KernelCall>>> {
        self.kernel_chain(graph.graph as Handle)
    }

    unsafe fn launch_call(&self, call: &KernelCall, stream: RawStream) -> DriverResult<()> {
        self.launch_again(call, stream)
    }

    unsafe fn graph_compile(
        &self,
        nodes: &[NodeLaunch<'_>],
        edges: &[GraphEdge],
        partition: Option<RawPartition>,
    ) -> DriverResult<RawGraph> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let is_known = self.api.cuGraphAddDependencies_v2.is_some();
        if is_known && edges.iter().any(|edge| edge.overlaps) {
            match self.new_graph(nodes, edges, partition, true) {
                Err(code) if is_about_edges(code) => {}
                made => return made,
            }
        }
        self.new_graph(nodes, edges, partition, false)
    }

    unsafe fn graph_set(
        &self,
        graph: &RawGraph,
        changes: &mut dyn Iterator<Item = (usize, NodeLaunch<'_>)>,
        partition: Option<RawPartition>,
    ) -> DriverResult<()> {
        // Driver 580 kills the process if no context is current.
        let _bound = self.bind()?;
        let (mut params, mut pointers) = (NodeParams::unset(), NO_ARGS);
        for (node, launch) in changes {
            params.set(launch, &mut pointers, self.raw_context as u64, partition)?;
            let (exec, node) = (graph.exec as Handle, graph.nodes[node] as Handle);
            driver!(self.cuGraphExecKernelNodeSetParams_v2(exec, node, &raw const params))?;
        }
        Ok(())
    }

    unsafe fn graph_launch(&self, graph: &RawGraph, stream: RawStream) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        driver!(self.cuGraphLaunch(graph.exec as Handle, stream_handle(stream)))
    }

    unsafe fn graph_destroy(&self, graph: &RawGraph) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let exec = match graph.exec as Handle {
            none if none.is_null() => Ok(()),
            exec => driver!(self.cuGraphExecDestroy(exec)),
        };
        let graph = driver!(self.cuGraphDestroy(graph.graph as Handle));
        exec.and(graph)
    }
}
