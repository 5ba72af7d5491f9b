//! Graphs of `scale` launches through the bare driver API, for baselines in the same process and run. All calls are on CUDA
//! device 0, in its primary context, which is current on the thread that made a [`Graphs`].

use std::ffi::{CString, c_void};

use cudarc::driver::sys;

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Another stream; left to the end of the process.
#[allow(dead_code, reason = "each bench uses a part of it")]
pub(crate) fn stream() -> usize {
    let mut stream = std::ptr::null_mut();
    // SAFETY: a context is current and the result is live.
    ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
    stream.addr()
}

/// A stream, and a chain of launches on one array: with a graph of as many nodes, each behind the one before.
pub(crate) struct Chain {
    stream: sys::CUstream,
    scale: sys::CUfunction,
    x: sys::CUdeviceptr,
    len: u64,
    nodes: Vec<sys::CUgraphNode>,
    exec: sys::CUgraphExec,
    context: sys::CUcontext,
}

// SAFETY: the driver's handles may be used from any thread that has the context.
unsafe impl Sync for Chain {}

impl Chain {
    /// On an array of its own.
    #[allow(dead_code, reason = "each bench uses a part of it")]
    pub(crate) fn new(nodes: usize, len: usize) -> Chain {
        Chain::on(nodes, len, 0)
    }

    /// On the array at that address; on one of its own if it is zero.
    pub(crate) fn on(nodes: usize, len: usize, mut x: sys::CUdeviceptr) -> Chain {
        let context = cudarc::driver::CudaContext::new(0).expect("a GPU");
        // The context lives as long as the process.
        std::mem::forget(context.clone());
        context.bind_to_thread().expect("a context");
        let mut stream = std::ptr::null_mut();
        // SAFETY: a context is current and the result is live.
        ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
        let (mut module, mut scale) = (std::ptr::null_mut(), std::ptr::null_mut());
        let ptx = CString::new(include_str!("../../kernels/scale.ptx")).expect("no zero in it");
        // SAFETY: a context is current, the text ends with zero, the result is live.
        ok(unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) });
        // SAFETY: likewise, and the module was loaded just now.
        ok(unsafe { sys::cuModuleGetFunction(&raw mut scale, module, c"scale".as_ptr()) });
        if x == 0 {
            // SAFETY: the result is live.
            ok(unsafe { sys::cuMemAllocAsync(&raw mut x, 4 * len, stream) });
        }
        let (nodes_made, exec, context) = (Vec::new(), std::ptr::null_mut(), context.cu_ctx());
        let len = len as u64;
        let mut chain = Chain { stream, scale, x, len, nodes: nodes_made, exec, context };
        let mut graph = std::ptr::null_mut();
        // SAFETY: the result is live.
        ok(unsafe { sys::cuGraphCreate(&raw mut graph, 0) });
        for _ in 0..nodes {
            let before = chain.nodes.last().copied();
            let before = before.as_slice();
            let mut node = std::ptr::null_mut();
            chain.with_params(1.5, |params| {
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
            chain.nodes.push(node);
        }
        // SAFETY: the result is live. The graph is left to the end of the process.
        ok(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut chain.exec, graph, 0) });
        chain
    }

    fn with_params(&self, factor: f32, call: impl FnOnce(*const sys::CUDA_KERNEL_NODE_PARAMS)) {
        let (mut factor, mut x, mut len) = (factor, self.x, self.len);
        let mut args: [*mut c_void; 3] =
            [(&raw mut factor).cast(), (&raw mut x).cast(), (&raw mut len).cast()];
        let params = sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.scale,
            gridDimX: u32::try_from(self.len.div_ceil(256)).expect("a grid"),
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 256,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: args.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
        call(&raw const params);
    }

    /// Makes the context current.
    #[allow(dead_code, reason = "each bench uses a part of it")]
    pub(crate) fn bind(&self) {
        // SAFETY: the context lives as long as the process.
        ok(unsafe { sys::cuCtxSetCurrent(self.context) });
    }

    /// One launch after the other.
    pub(crate) fn launches(&self, factor: f32) {
        let (mut factor, mut x, mut len) = (factor, self.x, self.len);
        let blocks = u32::try_from(len.div_ceil(256)).expect("a grid");
        let mut args: [*mut c_void; 3] =
            [(&raw mut factor).cast(), (&raw mut x).cast(), (&raw mut len).cast()];
        let none = std::ptr::null_mut();
        for _ in &self.nodes {
            // SAFETY: the kernel takes a float, an address and a length, which the call copies.
            ok(unsafe {
                sys::cuLaunchKernel(
                    self.scale,
                    blocks,
                    1,
                    1,
                    256,
                    1,
                    1,
                    0,
                    self.stream,
                    args.as_mut_ptr(),
                    none,
                )
            });
        }
    }

    /// Sets every node.
    pub(crate) fn set(&self, factor: f32) {
        for node in &self.nodes {
            self.with_params(factor, |params| {
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
}
