//! A chain of `churn` launches through the bare driver API, as a graph: one node behind the other, between two arrays. For baselines in
//! the same process and run.

use std::ffi::{CString, c_void};
use std::ptr;

use cudarc::driver::{CudaContext, sys};

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// The compiled graph and its stream; left to the end of the process.
pub(crate) struct Mixed {
    context: sys::CUcontext,
    stream: sys::CUstream,
    churn: sys::CUfunction,
    arrays: [sys::CUdeviceptr; 2],
    len: u64,
    nodes: Vec<sys::CUgraphNode>,
    exec: sys::CUgraphExec,
}

// SAFETY: the driver's handles may be used from any thread that has the context.
unsafe impl Send for Mixed {}

impl Mixed {
    /// A node for each of `steps`, on arrays of its own; leaves the context current on the calling thread.
    pub(crate) fn new(steps: &[u32], len: usize) -> Mixed {
        let owner = CudaContext::new(0).expect("a GPU");
        // It lives as long as the process.
        std::mem::forget(owner.clone());
        owner.bind_to_thread().expect("a context");
        let (mut stream, mut module, mut churn) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let ptx = CString::new(include_str!("../../kernels/churn.ptx")).expect("no zero in it");
        // SAFETY: a context is current and the result is live.
        ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
        // SAFETY: a context is current, the text ends with zero, the result is live.
        ok(unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) });
        // SAFETY: likewise, and the module was loaded just now.
        ok(unsafe { sys::cuModuleGetFunction(&raw mut churn, module, c"churn".as_ptr()) });
        let mut arrays = [0; 2];
        for array in &mut arrays {
            // SAFETY: the result is live.
            ok(unsafe { sys::cuMemAlloc_v2(array, 4 * len) });
        }
        let (context, len) = (owner.cu_ctx(), len as u64);
        let (nodes, exec) = (Vec::new(), ptr::null_mut());
        let mut mixed = Mixed { context, stream, churn, arrays, len, nodes, exec };
        let mut graph = ptr::null_mut();
        // SAFETY: the result is live.
        ok(unsafe { sys::cuGraphCreate(&raw mut graph, 0) });
        for (number, steps) in steps.iter().enumerate() {
            let (before, mut node) = (mixed.nodes.last().copied(), ptr::null_mut());
            let before = before.as_slice();
            mixed.with_params(number, *steps, |params| {
                // SAFETY: the node in front is the graph's, and the parameters are live.
                ok(unsafe {
                    sys::cuGraphAddKernelNode_v2(
                        &raw mut node,
                        graph,
                        before.as_ptr(),
                        before.len(),
                        params,
                    )
                });
            });
            mixed.nodes.push(node);
        }
        // SAFETY: the result is live. The graph is left to the end of the process.
        ok(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut mixed.exec, graph, 0) });
        mixed
    }

    /// Makes the context current on the calling thread.
    pub(crate) fn bind(&self) {
        // SAFETY: the context lives as long as the process.
        ok(unsafe { sys::cuCtxSetCurrent(self.context) });
    }

    /// Sets every node.
    pub(crate) fn set(&self, steps: impl Iterator<Item = u32>) {
        for (number, (node, steps)) in self.nodes.iter().zip(steps).enumerate() {
            self.with_params(number, steps, |params| {
                // SAFETY: the node is that of the graph that this was made of, and the parameters are live.
                ok(unsafe { sys::cuGraphExecKernelNodeSetParams_v2(self.exec, *node, params) });
            });
        }
    }

    pub(crate) fn launch(&self) {
        // SAFETY: both live as long as the process.
        ok(unsafe { sys::cuGraphLaunch(self.exec, self.stream) });
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: the stream lives as long as the process.
        ok(unsafe { sys::cuStreamSynchronize(self.stream) });
    }

    fn with_params(
        &self,
        number: usize,
        mut steps: u32,
        call: impl FnOnce(*const sys::CUDA_KERNEL_NODE_PARAMS),
    ) {
        let [mut x, mut y] = self.arrays;
        if number % 2 == 1 {
            std::mem::swap(&mut x, &mut y);
        }
        let mut len = self.len;
        let mut args: [*mut c_void; 4] = [
            (&raw mut x).cast(),
            (&raw mut y).cast(),
            (&raw mut steps).cast(),
            (&raw mut len).cast(),
        ];
        let params = sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.churn,
            gridDimX: u32::try_from(self.len.div_ceil(256)).expect("a grid"),
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 256,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: args.as_mut_ptr(),
            extra: ptr::null_mut(),
            kern: ptr::null_mut(),
            ctx: ptr::null_mut(),
        };
        call(&raw const params);
    }
}
