//! Chains of kernels that wait first through the bare driver API, with full and with programmatic edges, and by the place of the trigger.

use std::ffi::{CString, c_void};

use cudarc::driver::{CudaContext, sys};

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Where the kernels let the next one start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In front of the wait, which proves nothing for what is behind: here nothing is.
    Front,
    BehindTheWait,
    End,
    /// Nowhere.
    Exit,
}

/// A graph of kernels that each add to one array, one behind the other, and its stream.
pub(crate) struct WaitingChain {
    stream: sys::CUstream,
    exec: sys::CUgraphExec,
}

impl WaitingChain {
    /// On an array of its own; left to the end of the process. In the primary context, which is then current.
    pub(crate) fn new(place: Place, programmatic: bool, nodes: usize, len: u32) -> WaitingChain {
        let context = CudaContext::new(0).expect("a GPU");
        context.bind_to_thread().expect("a context");
        // It lives as long as the process.
        std::mem::forget(context);
        let (mut stream, mut x) = (std::ptr::null_mut(), 0);
        // SAFETY: a context is current and the result is live.
        ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
        // SAFETY: the result is live.
        ok(unsafe { sys::cuMemAllocAsync(&raw mut x, 4 * len as usize, stream) });
        let (mut module, mut func) = (std::ptr::null_mut(), std::ptr::null_mut());
        let ptx = CString::new(text(place)).expect("no zero in it");
        // SAFETY: the text ends with zero, the result is live.
        ok(unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) });
        // SAFETY: likewise, and the module was loaded just now.
        ok(unsafe { sys::cuModuleGetFunction(&raw mut func, module, c"add_one".as_ptr()) });
        let mut graph = std::ptr::null_mut();
        // SAFETY: the result is live.
        ok(unsafe { sys::cuGraphCreate(&raw mut graph, 0) });
        let (mut x, mut count) = (x, len);
        let mut arguments: [*mut c_void; 2] = [(&raw mut x).cast(), (&raw mut count).cast()];
        let params = sys::CUDA_KERNEL_NODE_PARAMS {
            func,
            gridDimX: len.div_ceil(256),
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 256,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: arguments.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
        let (from_port, type_) = if programmatic { (1, 1) } else { (0, 0) };
        let data = sys::CUgraphEdgeData { from_port, to_port: 0, type_, reserved: [0; 5] };
        let mut last: Option<sys::CUgraphNode> = None;
        for _ in 0..nodes {
            let (mut node, none) = (std::ptr::null_mut(), std::ptr::null());
            // SAFETY: the parameters are live, the kernel takes these arguments.
            ok(unsafe {
                sys::cuGraphAddKernelNode_v2(&raw mut node, graph, none, 0, &raw const params)
            });
            if let Some(last) = last {
                let (from, to, data) = (&raw const last, &raw const node, &raw const data);
                // SAFETY: one of each, all of them live.
                ok(unsafe { sys::cuGraphAddDependencies_v2(graph, from, to, data, 1) });
            }
            last = Some(node);
        }
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph is complete.
        ok(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) });
        WaitingChain { stream, exec }
    }

    pub(crate) fn launch(&self) {
        // SAFETY: both live as long as the process.
        ok(unsafe { sys::cuGraphLaunch(self.exec, self.stream) });
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: it lives as long as the process.
        ok(unsafe { sys::cuStreamSynchronize(self.stream) });
    }
}

/// `x[i] += 1`.
fn text(place: Place) -> String {
    let trigger = |at: Place| match at == place {
        true => "griddepcontrol.launch_dependents;",
        false => "",
    };
    let (front, behind, end) =
        (trigger(Place::Front), trigger(Place::BehindTheWait), trigger(Place::End));
    format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry add_one(.param .u64 x, .param .u32 n) {{
        .reg .pred %p; .reg .b32 %r<5>; .reg .b64 %rd<3>; .reg .f32 %f<2>;
        {front}
        griddepcontrol.wait;
        {behind}
        ld.param.u64 %rd0, [x]; ld.param.u32 %r0, [n];
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.s32 %r3, %r1, 256, %r2;
        setp.ge.u32 %p, %r3, %r0; @%p bra DONE;
        mul.wide.u32 %rd1, %r3, 4; add.s64 %rd2, %rd0, %rd1;
        ld.global.f32 %f0, [%rd2]; add.f32 %f1, %f0, 0f3F800000; st.global.f32 [%rd2], %f1;
        DONE: {end}
        ret;
        }}\n"
    )
}
