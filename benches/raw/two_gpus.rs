//! A step on two GPUs through the bare driver API: a chain of `churn` launches on each, then a halo each way. One by one on two streams,
//! ordered by events, and as one graph.

use std::ptr;

use cudarc::driver::{CudaContext, sys};

use super::raw_churn::{Args, Churn, compiled, graph, ok};

/// What one GPU has; left to the end of the process.
struct Half {
    churn: Churn,
    /// Behind its chain, and behind its copy.
    computed: sys::CUevent,
    copied: sys::CUevent,
}

pub(crate) struct TwoGpus {
    halves: [Half; 2],
    exec: sys::CUgraphExec,
    kernels: usize,
    steps: u32,
    len: u64,
    halo: u64,
}

impl Half {
    fn new(ordinal: usize, len: usize) -> Half {
        let churn = Churn::new(ordinal, len);
        let event = || {
            let mut event = ptr::null_mut();
            // SAFETY: a context is current and the result is live. 2 is `CU_EVENT_DISABLE_TIMING`.
            ok(unsafe { sys::cuEventCreate(&raw mut event, 2) });
            event
        };
        let (computed, copied) = (event(), event());
        Half { churn, computed, copied }
    }
}

impl TwoGpus {
    /// So many launches of so many steps on each; `None` with one GPU, or if they do not reach each other.
    pub(crate) fn new(kernels: usize, steps: u32, len: usize, halo: usize) -> Option<TwoGpus> {
        if CudaContext::device_count().ok()? < 2 {
            return None;
        }
        let halves = [0, 1].map(|ordinal| Half::new(ordinal, len));
        for (here, there) in [(0, 1), (1, 0)] {
            halves[here].churn.bind();
            // SAFETY: both contexts live.
            let code = unsafe { sys::cuCtxEnablePeerAccess(halves[there].churn.context, 0) };
            let is_known = code == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
            if code != sys::CUresult::CUDA_SUCCESS && !is_known {
                return None;
            }
        }
        let (len, halo, exec) = (len as u64, halo as u64, ptr::null_mut());
        let mut two = TwoGpus { halves, exec, kernels, steps, len, halo };
        two.exec = two.compile();
        Some(two)
    }

    /// The end of the other's array, and the beginning of this one's.
    fn halo(&self, gpu: usize) -> (sys::CUdeviceptr, sys::CUdeviceptr) {
        let [here, there] = [gpu, 1 - gpu].map(|gpu| self.halves[gpu].churn.arrays[0]);
        (there + 4 * (self.len - self.halo), here)
    }

    fn compile(&self) -> sys::CUgraphExec {
        let graph = graph();
        let ends = self.halves.each_ref().map(|Half { churn, .. }| {
            (0..self.kernels).fold(None::<sys::CUgraphNode>, |before, number| {
                Some(churn.add(graph, before.as_slice(), churn.args(number, self.steps)))
            })
        });
        let ends: Vec<_> = ends.into_iter().flatten().collect();
        for (gpu, Half { churn, .. }) in self.halves.iter().enumerate() {
            let (x, y) = self.halo(gpu);
            // No step: it copies.
            churn.add(graph, &ends, Args { x, y, steps: 0, len: self.halo });
        }
        compiled(graph)
    }

    /// All of it by one launch.
    pub(crate) fn graph(&self) {
        let churn = &self.halves[0].churn;
        churn.launch_graph(self.exec);
        churn.synchronize();
    }

    /// One by one.
    pub(crate) fn launches(&self) {
        for number in 0..self.kernels {
            for Half { churn, .. } in &self.halves {
                churn.launch(churn.args(number, self.steps));
            }
        }
        for Half { churn, computed, .. } in &self.halves {
            // SAFETY: both live as long as the process.
            ok(unsafe { sys::cuEventRecord(*computed, churn.stream) });
        }
        for gpu in 0..2 {
            let (half, other) = (&self.halves[gpu], &self.halves[1 - gpu]);
            let (stream, ends) = (half.churn.stream, [half.churn.context, other.churn.context]);
            // SAFETY: both live as long as the process.
            ok(unsafe { sys::cuStreamWaitEvent(stream, other.computed, 0) });
            let ((from, to), bytes) = (self.halo(gpu), 4 * self.halo as usize);
            // SAFETY: both ends have so many bytes, and live as long as the process.
            ok(unsafe { sys::cuMemcpyPeerAsync(to, ends[0], from, ends[1], bytes, stream) });
            // SAFETY: both live as long as the process.
            ok(unsafe { sys::cuEventRecord(half.copied, stream) });
        }
        for gpu in 0..2 {
            let (half, other) = (&self.halves[gpu], &self.halves[1 - gpu]);
            // SAFETY: both live as long as the process.
            ok(unsafe { sys::cuStreamWaitEvent(half.churn.stream, other.copied, 0) });
        }
        self.halves.iter().for_each(|half| half.churn.synchronize());
    }
}
