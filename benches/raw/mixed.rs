//! A chain of `churn` launches through the bare driver API, as a graph: one node behind the other, between two arrays.

use cudarc::driver::sys;

use super::raw_churn::{Churn, compiled, graph};

/// The compiled graph and its stream; left to the end of the process.
pub(crate) struct Mixed {
    churn: Churn,
    nodes: Vec<sys::CUgraphNode>,
    exec: sys::CUgraphExec,
}

// SAFETY: the driver's handles may be used from any thread that has the context.
unsafe impl Send for Mixed {}

impl Mixed {
    /// A node for each of `steps`, on arrays of its own; leaves the context current on the calling thread.
    pub(crate) fn new(steps: &[u32], len: usize) -> Mixed {
        let (churn, graph) = (Churn::new(0, len), graph());
        let mut nodes: Vec<sys::CUgraphNode> = Vec::new();
        for (number, steps) in steps.iter().enumerate() {
            let before = nodes.last().copied();
            nodes.push(churn.add(graph, before.as_slice(), churn.args(number, *steps)));
        }
        Mixed { churn, nodes, exec: compiled(graph) }
    }

    /// Makes the context current on the calling thread.
    pub(crate) fn bind(&self) {
        self.churn.bind();
    }

    /// Sets every node.
    pub(crate) fn set(&self, steps: impl Iterator<Item = u32>) {
        for (number, (node, steps)) in self.nodes.iter().zip(steps).enumerate() {
            self.churn.set(self.exec, *node, self.churn.args(number, steps));
        }
    }

    pub(crate) fn launch(&self) {
        self.churn.launch_graph(self.exec);
    }

    pub(crate) fn synchronize(&self) {
        self.churn.synchronize();
    }
}
