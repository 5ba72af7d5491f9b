//! Graphs of a host device: stored launches that are put on a stream together.
//!
//! A graph launch is one command of its stream, as on a GPU. Its nodes run one after another, as far from program order as their edges
//! allow, so that a missing edge shows. An overlapping edge orders nothing, unless its second node waits first and has no other predecessor.

use std::collections::BinaryHeap;

use gpu_await_protocol::lock::Mutex;

use super::run::{Command, GraphStep, Launch};
use super::{HostBackend, NOT_SUPPORTED, permitted};
use crate::backend::{
    DriverResult, Function, GraphCalls, GraphEdge, KernelCall, NodeLaunch, RawEvent, RawGraph,
    RawPartition, RawStream,
};
use crate::error::DriverCode;

/// The object behind a graph's handle.
struct HostGraph {
    nodes: Mutex<Vec<HostNode>>,
    order: Vec<usize>,
}

#[derive(Clone)]
enum HostNode {
    Launch(Box<Launch>),
    Record(RawEvent),
}

impl GraphCalls for HostBackend {
    unsafe fn graph_capture(
        &self,
        _stream: RawStream,
        code: &mut dyn FnMut(),
    ) -> DriverResult<RawGraph> {
        self.shared.healthy("graph_capture")?;
        code();
        Ok(RawGraph { graph: 0, exec: 0, nodes: Box::default(), overlaps: false })
    }

    unsafe fn graph_kernels(&self, _graph: &RawGraph) -> DriverResult<Option<Vec<KernelCall>>> {
        Ok(None)
    }

    unsafe fn launch_call(&self, _call: &KernelCall, _stream: RawStream) -> DriverResult<()> {
        Err(DriverCode { call: "launch_call", code: NOT_SUPPORTED })
    }

    unsafe fn graph_compile(
        &self,
        nodes: &[NodeLaunch<'_>],
        edges: &[GraphEdge],
        _partition: Option<RawPartition>,
    ) -> DriverResult<RawGraph> {
        const CALL: &str = "graph_compile";
        self.shared.healthy(CALL)?;
        let orders = |edge: &&GraphEdge| {
            let second = |other: &&GraphEdge| other.second == edge.second;
            !edge.overlaps
                || (nodes[edge.second as usize].function.waits_first()
                    && edges.iter().filter(second).count() == 1)
        };
        let overlaps = edges.iter().any(|edge| edge.overlaps);
        let edges: Vec<GraphEdge> = edges.iter().filter(orders).copied().collect();
        let kept: DriverResult<Vec<HostNode>> =
            nodes.iter().map(|node| kept(CALL, *node)).collect();
        let nodes = kept?;
        let order = last_first(nodes.len(), &edges);
        let graph = HostGraph { nodes: Mutex::new(nodes), order };
        let exec = Box::into_raw(Box::new(graph)) as u64;
        Ok(RawGraph { graph: 0, exec, nodes: Box::default(), overlaps })
    }

    unsafe fn graph_set(
        &self,
        graph: &RawGraph,
        changes: &mut dyn Iterator<Item = (usize, NodeLaunch<'_>)>,
        _partition: Option<RawPartition>,
    ) -> DriverResult<()> {
        const CALL: &str = "graph_set";
        self.shared.healthy(CALL)?;
        // SAFETY: the caller's handle, which is not destroyed.
        let graph = unsafe { host_graph(graph) };
        let mut nodes = graph.nodes.lock();
        for (node, launch) in changes {
            let invalid = DriverCode { call: CALL, code: DriverCode::INVALID_HANDLE };
            *nodes.get_mut(node).ok_or(invalid)? = kept(CALL, launch)?;
        }
        Ok(())
    }

    unsafe fn graph_launch(&self, graph: &RawGraph, stream: RawStream) -> DriverResult<()> {
        const CALL: &str = "graph_launch";
        let on = self.stream(stream, CALL)?;
        // SAFETY: as above.
        let graph = unsafe { host_graph(graph) };
        // Not under the lock: a full queue blocks.
        let nodes = graph.nodes.lock().clone();
        let steps = graph.order.iter().map(|node| match &nodes[*node] {
            HostNode::Launch(launch) => Ok(GraphStep::Launch(launch.clone())),
            HostNode::Record(event) => {
                let (event, generation) = self.next_record(*event, &on);
                Ok(GraphStep::Record { event, generation })
            }
        });
        let steps: DriverResult<Vec<GraphStep>> = steps.collect();
        self.put(stream, &on, CALL, Command::Graph(steps?))
    }

    unsafe fn graph_destroy(&self, graph: &RawGraph) -> DriverResult<()> {
        permitted("graph_destroy")?;
        if graph.exec == 0 {
            return Ok(());
        }
        // SAFETY: `graph_compile` made it, and nothing uses it any more.
        drop(unsafe { Box::from_raw(graph.exec as *mut HostGraph) });
        Ok(())
    }
}

/// # Safety
/// The graph is not destroyed while the result is used.
unsafe fn host_graph<'a>(graph: &RawGraph) -> &'a HostGraph {
    // SAFETY: `graph_compile` made it; the caller keeps it.
    unsafe { &*(graph.exec as *const HostGraph) }
}

fn kept(call: &'static str, node: NodeLaunch<'_>) -> DriverResult<HostNode> {
    let (function, kernel) = match node.function {
        Function::Host { twin, kernel, .. } => (twin.clone(), kernel.clone()),
        Function::Record(event) => return Ok(HostNode::Record(*event)),
        _ => return Err(DriverCode { call, code: NOT_SUPPORTED }),
    };
    let launch = Launch { function, kernel, shape: *node.shape, args: node.args.to_block() };
    Ok(HostNode::Launch(Box::new(launch)))
}

/// An order that respects the edges, in which nodes that were added later run as early as possible.
fn last_first(nodes: usize, edges: &[GraphEdge]) -> Vec<usize> {
    let mut waits_for = vec![0; nodes];
    edges.iter().for_each(|edge| waits_for[edge.second as usize] += 1);
    let mut edges = edges.to_vec();
    edges.sort_unstable_by_key(|edge| edge.first);
    let mut order = Vec::with_capacity(nodes);
    let mut ready: BinaryHeap<usize> = (0..nodes).filter(|node| waits_for[*node] == 0).collect();
    while let Some(next) = ready.pop() {
        order.push(next);
        let behind = edges.partition_point(|edge| (edge.first as usize) < next);
        for edge in edges[behind..].iter().take_while(|edge| edge.first as usize == next) {
            let second = edge.second as usize;
            waits_for[second] -= 1;
            if waits_for[second] == 0 {
                ready.push(second);
            }
        }
    }
    order
}
