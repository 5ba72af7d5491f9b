//! `churn` on a GPU through the bare driver API: a stream, the kernel and two arrays, launched or as a graph's nodes. For baselines in the
//! same process and run.
#![allow(dead_code, reason = "each bench uses a part of it")]

use std::ffi::{CString, c_void};
use std::ptr;

use cudarc::driver::{CudaContext, sys};

pub(crate) fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Left to the end of the process.
pub(crate) struct Churn {
    pub(crate) context: sys::CUcontext,
    pub(crate) stream: sys::CUstream,
    function: sys::CUfunction,
    pub(crate) arrays: [sys::CUdeviceptr; 2],
    len: u64,
}

/// A launch: `y` of `x`.
#[derive(Clone, Copy)]
pub(crate) struct Args {
    pub(crate) x: sys::CUdeviceptr,
    pub(crate) y: sys::CUdeviceptr,
    pub(crate) steps: u32,
    pub(crate) len: u64,
}

impl Args {
    /// Calls with pointers to the arguments, and with how many blocks there are.
    fn with<R>(mut self, call: impl FnOnce(*mut *mut c_void, u32) -> R) -> R {
        let mut args: [*mut c_void; 4] = [
            (&raw mut self.x).cast(),
            (&raw mut self.y).cast(),
            (&raw mut self.steps).cast(),
            (&raw mut self.len).cast(),
        ];
        call(args.as_mut_ptr(), u32::try_from(self.len.div_ceil(256)).expect("a grid"))
    }
}

impl Churn {
    /// On arrays of so many elements, whatever they are; leaves the context current on the calling thread.
    pub(crate) fn new(ordinal: usize, len: usize) -> Churn {
        let owner = CudaContext::new(ordinal).expect("a GPU");
        // It lives as long as the process.
        std::mem::forget(owner.clone());
        owner.bind_to_thread().expect("a context");
        let (mut stream, mut module, mut function) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let ptx = CString::new(include_str!("../../kernels/churn.ptx")).expect("no zero in it");
        // SAFETY: a context is current and the result is live.
        ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
        // SAFETY: a context is current, the text ends with zero, the result is live.
        ok(unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) });
        // SAFETY: likewise, and the module was loaded just now.
        ok(unsafe { sys::cuModuleGetFunction(&raw mut function, module, c"churn".as_ptr()) });
        let mut arrays = [0; 2];
        for array in &mut arrays {
            // SAFETY: the result is live.
            ok(unsafe { sys::cuMemAlloc_v2(array, 4 * len) });
        }
        Churn { context: owner.cu_ctx(), stream, function, arrays, len: len as u64 }
    }

    /// Makes the context current on the calling thread.
    pub(crate) fn bind(&self) {
        // SAFETY: the context lives as long as the process.
        ok(unsafe { sys::cuCtxSetCurrent(self.context) });
    }

    /// The launch of that number in a chain, to and fro between the arrays.
    pub(crate) fn args(&self, number: usize, steps: u32) -> Args {
        let [mut x, mut y] = self.arrays;
        if number % 2 == 1 {
            std::mem::swap(&mut x, &mut y);
        }
        Args { x, y, steps, len: self.len }
    }

    pub(crate) fn launch(&self, args: Args) {
        let (function, stream, none) = (self.function, self.stream, ptr::null_mut());
        args.with(|args, blocks| {
            // SAFETY: the kernel takes two addresses and two numbers, which the call copies.
            ok(unsafe {
                sys::cuLaunchKernel(function, blocks, 1, 1, 256, 1, 1, 0, stream, args, none)
            });
        });
    }

    /// Adds a node of this GPU behind others; leaves its context current.
    pub(crate) fn add(
        &self,
        graph: sys::CUgraph,
        before: &[sys::CUgraphNode],
        args: Args,
    ) -> sys::CUgraphNode {
        // A node is of the context that is current.
        self.bind();
        let mut node = ptr::null_mut();
        self.with_params(args, |params| {
            let (to, behind, count) = (&raw mut node, before.as_ptr(), before.len());
            // SAFETY: the nodes in front are the graph's, and the parameters are live.
            ok(unsafe { sys::cuGraphAddKernelNode_v2(to, graph, behind, count, params) });
        });
        node
    }

    /// Sets a node of a compiled graph.
    pub(crate) fn set(&self, exec: sys::CUgraphExec, node: sys::CUgraphNode, args: Args) {
        self.with_params(args, |params| {
            // SAFETY: the node is that of the graph that this was made of, and the parameters are live.
            ok(unsafe { sys::cuGraphExecKernelNodeSetParams_v2(exec, node, params) });
        });
    }

    pub(crate) fn launch_graph(&self, exec: sys::CUgraphExec) {
        // SAFETY: both live as long as the process.
        ok(unsafe { sys::cuGraphLaunch(exec, self.stream) });
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: the stream lives as long as the process.
        ok(unsafe { sys::cuStreamSynchronize(self.stream) });
    }

    fn with_params(&self, args: Args, call: impl FnOnce(*const sys::CUDA_KERNEL_NODE_PARAMS)) {
        args.with(|args, blocks| {
            let params = sys::CUDA_KERNEL_NODE_PARAMS {
                func: self.function,
                gridDimX: blocks,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: 256,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: 0,
                kernelParams: args,
                extra: ptr::null_mut(),
                kern: ptr::null_mut(),
                ctx: ptr::null_mut(),
            };
            call(&raw const params);
        });
    }
}

/// An empty graph; left to the end of the process.
pub(crate) fn graph() -> sys::CUgraph {
    let mut graph = ptr::null_mut();
    // SAFETY: the result is live.
    ok(unsafe { sys::cuGraphCreate(&raw mut graph, 0) });
    graph
}

pub(crate) fn compiled(graph: sys::CUgraph) -> sys::CUgraphExec {
    let mut exec = ptr::null_mut();
    // SAFETY: the result is live.
    ok(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) });
    exec
}
