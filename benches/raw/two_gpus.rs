//! A step on two GPUs through the bare driver API: a chain of `churn` launches on each, then a halo each way. One by one on two streams,
//! ordered by events, and as one graph. For baselines in the same process and run.

use std::ffi::{CString, c_void};
use std::ptr;

use cudarc::driver::{CudaContext, sys};

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// What one GPU has; left to the end of the process.
struct Half {
    context: sys::CUcontext,
    stream: sys::CUstream,
    churn: sys::CUfunction,
    arrays: [sys::CUdeviceptr; 2],
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
        let owner = CudaContext::new(ordinal).expect("a GPU");
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
            // SAFETY: the array has so many words.
            ok(unsafe { sys::cuMemsetD32_v2(*array, 0, len) });
        }
        let event = || {
            let mut event = ptr::null_mut();
            // SAFETY: a context is current and the result is live. 2 is `CU_EVENT_DISABLE_TIMING`.
            ok(unsafe { sys::cuEventCreate(&raw mut event, 2) });
            event
        };
        let (computed, copied) = (event(), event());
        Half { context: owner.cu_ctx(), stream, churn, arrays, computed, copied }
    }

    fn bind(&self) {
        // SAFETY: the context lives as long as the process.
        ok(unsafe { sys::cuCtxSetCurrent(self.context) });
    }
}

/// Arguments of a launch.
#[derive(Clone, Copy)]
struct Args {
    x: sys::CUdeviceptr,
    y: sys::CUdeviceptr,
    steps: u32,
    len: u64,
}

impl Args {
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

impl TwoGpus {
    /// So many launches of so many steps on each; `None` with one GPU, or if they do not reach each other.
    pub(crate) fn new(kernels: usize, steps: u32, len: usize, halo: usize) -> Option<TwoGpus> {
        if CudaContext::device_count().ok()? < 2 {
            return None;
        }
        let halves = [0, 1].map(|ordinal| Half::new(ordinal, len));
        for (here, there) in [(0, 1), (1, 0)] {
            halves[here].bind();
            // SAFETY: both contexts live.
            let code = unsafe { sys::cuCtxEnablePeerAccess(halves[there].context, 0) };
            let is_known = code == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
            if code != sys::CUresult::CUDA_SUCCESS && !is_known {
                return None;
            }
        }
        let (len, halo, exec) = (len as u64, halo as u64, ptr::null_mut());
        let mut two = TwoGpus { halves, exec, kernels, steps, len, halo };
        two.compile();
        Some(two)
    }

    fn args(&self, gpu: usize, number: usize) -> Args {
        let [mut x, mut y] = self.halves[gpu].arrays;
        if number % 2 == 1 {
            std::mem::swap(&mut x, &mut y);
        }
        Args { x, y, steps: self.steps, len: self.len }
    }

    /// The end of the other's array, and the beginning of this one's.
    fn halo(&self, gpu: usize) -> (sys::CUdeviceptr, sys::CUdeviceptr) {
        (self.halves[1 - gpu].arrays[0] + 4 * (self.len - self.halo), self.halves[gpu].arrays[0])
    }

    fn compile(&mut self) {
        let mut graph = ptr::null_mut();
        // SAFETY: the result is live.
        ok(unsafe { sys::cuGraphCreate(&raw mut graph, 0) });
        let add = |gpu: usize, before: &[sys::CUgraphNode], args: Args| {
            let half = &self.halves[gpu];
            // A node is of the context that is current.
            half.bind();
            let mut node = ptr::null_mut();
            args.with(|args, blocks| {
                let params = sys::CUDA_KERNEL_NODE_PARAMS {
                    func: half.churn,
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
                let (to, behind, count) = (&raw mut node, before.as_ptr(), before.len());
                let params = &raw const params;
                // SAFETY: the nodes in front are the graph's, and the parameters are live.
                ok(unsafe { sys::cuGraphAddKernelNode_v2(to, graph, behind, count, params) });
            });
            node
        };
        let ends = [0, 1].map(|gpu| {
            (0..self.kernels).fold(None::<sys::CUgraphNode>, |before, number| {
                Some(add(gpu, before.as_slice(), self.args(gpu, number)))
            })
        });
        let ends: Vec<_> = ends.into_iter().flatten().collect();
        for gpu in 0..2 {
            let (x, y) = self.halo(gpu);
            // No step: it copies.
            add(gpu, &ends, Args { x, y, steps: 0, len: self.halo });
        }
        // SAFETY: the result is live. The graph is left to the end of the process.
        ok(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut self.exec, graph, 0) });
    }

    /// All of it by one launch.
    pub(crate) fn graph(&self) {
        let stream = self.halves[0].stream;
        // SAFETY: both live as long as the process.
        ok(unsafe { sys::cuGraphLaunch(self.exec, stream) });
        // SAFETY: the stream lives as long as the process.
        ok(unsafe { sys::cuStreamSynchronize(stream) });
    }

    /// One by one.
    pub(crate) fn launches(&self) {
        for number in 0..self.kernels {
            for (gpu, half) in self.halves.iter().enumerate() {
                let Half { stream, churn, .. } = *half;
                let none = ptr::null_mut();
                self.args(gpu, number).with(|args, blocks| {
                    // SAFETY: the kernel takes two addresses and two numbers, which the call copies.
                    ok(unsafe {
                        sys::cuLaunchKernel(churn, blocks, 1, 1, 256, 1, 1, 0, stream, args, none)
                    });
                });
            }
        }
        for Half { stream, computed, .. } in &self.halves {
            // SAFETY: both live as long as the process.
            ok(unsafe { sys::cuEventRecord(*computed, *stream) });
        }
        for gpu in 0..2 {
            let (half, other) = (&self.halves[gpu], &self.halves[1 - gpu]);
            // SAFETY: both live as long as the process.
            ok(unsafe { sys::cuStreamWaitEvent(half.stream, other.computed, 0) });
            let ((from, to), bytes) = (self.halo(gpu), 4 * self.halo as usize);
            // SAFETY: both ends have so many bytes, and live as long as the process.
            ok(unsafe {
                sys::cuMemcpyPeerAsync(to, half.context, from, other.context, bytes, half.stream)
            });
            // SAFETY: both live as long as the process.
            ok(unsafe { sys::cuEventRecord(half.copied, half.stream) });
        }
        for gpu in 0..2 {
            // SAFETY: both live as long as the process.
            ok(unsafe {
                sys::cuStreamWaitEvent(self.halves[gpu].stream, self.halves[1 - gpu].copied, 0)
            });
        }
        for half in &self.halves {
            // SAFETY: the stream lives as long as the process.
            ok(unsafe { sys::cuStreamSynchronize(half.stream) });
        }
    }
}
