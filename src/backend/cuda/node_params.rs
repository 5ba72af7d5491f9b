//! `CUDA_KERNEL_NODE_PARAMS_v2`, the parameters with which a graph's kernel node is created and updated, and `CUgraphEdgeData`.
#![forbid(unsafe_code)]

use std::ffi::c_void;

use crate::backend::{
    ArgPointers, DriverResult, Function, Grid, KernelCall, NodeLaunch, RawFunction, RawPartition,
};
use crate::error::DriverCode;

const NOT_SUPPORTED: i32 = 801;

/// `CUDA_KERNEL_NODE_PARAMS_v2`: from CUDA 12.0 on.
#[repr(C)]
pub(super) struct NodeParams {
    function: *mut c_void,
    grid_dim: [u32; 3],
    block_dim: [u32; 3],
    shared_mem_bytes: u32,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    kernel: *mut c_void,
    context: *mut c_void,
}

const _: () = {
    use std::mem::offset_of;

    use cudarc::driver::sys::CUDA_KERNEL_NODE_PARAMS_v2_st as Theirs;
    assert!(size_of::<NodeParams>() == size_of::<Theirs>());
    assert!(offset_of!(NodeParams, shared_mem_bytes) == offset_of!(Theirs, sharedMemBytes));
    assert!(offset_of!(NodeParams, params) == offset_of!(Theirs, kernelParams));
    assert!(offset_of!(NodeParams, context) == offset_of!(Theirs, ctx));
};

/// `CUgraphEdgeData`: from CUDA 12.3 on.
#[repr(C)]
pub(super) struct EdgeData {
    from_port: u8,
    to_port: u8,
    kind: u8,
    reserved: [u8; 5],
}

impl EdgeData {
    /// An edge from a kernel, once all its blocks have triggered or ended, to a kernel that waits for it.
    pub(super) const PROGRAMMATIC: EdgeData =
        EdgeData { from_port: 1, to_port: 0, kind: 1, reserved: [0; 5] };
}

const _: () = assert!(size_of::<EdgeData>() == 8);

impl NodeParams {
    /// For the driver, or [`set`](Self::set), to fill in.
    pub(super) fn unset() -> Self {
        let none: *mut c_void = std::ptr::null_mut();
        NodeParams {
            function: none,
            grid_dim: [0; 3],
            block_dim: [0; 3],
            shared_mem_bytes: 0,
            params: none.cast(),
            extra: none.cast(),
            kernel: none,
            context: none,
        }
    }

    /// The filled-in parameters as a launch with these attributes.
    pub(super) fn call(&self, attributes: Box<[[u64; 9]]>) -> KernelCall {
        let NodeParams { grid_dim, block_dim, shared_mem_bytes, .. } = *self;
        // A kernel that is not bound to a context is launched like a function.
        let function = if self.function.is_null() { self.kernel } else { self.function };
        KernelCall {
            function: function as u64,
            grid: Grid { grid_dim, block_dim, cluster_dim: [1; 3], shared_mem_bytes },
            params: self.params as u64,
            extra: self.extra as u64,
            attributes,
        }
    }

    /// Sets them to those of a launch. They point to `params`, which must outlive the call that they are passed to. `home` is the context of the
    /// graph's device, `partition` the graph's, if it has one; a function of another device runs on that device.
    #[inline]
    pub(super) fn set(
        &mut self,
        launch: NodeLaunch<'_>,
        params: &mut ArgPointers,
        home: u64,
        partition: Option<RawPartition>,
    ) -> DriverResult<()> {
        let Function::Device(RawFunction { function, kernel, context, .. }) = *launch.function
        else {
            return Err(DriverCode { call: "cuGraphAddKernelNode", code: NOT_SUPPORTED });
        };
        let grid = &launch.shape.grid;
        // With a function, the driver ignores the context.
        let (function, kernel, context) = match partition {
            _ if context != home => (0, kernel, context),
            Some(RawPartition { context, .. }) => (0, kernel, context),
            None => (function, 0, 0),
        };
        launch.args.point(params);
        self.function = function as *mut c_void;
        self.grid_dim = grid.grid_dim;
        self.block_dim = grid.block_dim;
        self.shared_mem_bytes = grid.shared_mem_bytes;
        self.params = params.as_mut_ptr();
        self.kernel = kernel as *mut c_void;
        self.context = context as *mut c_void;
        Ok(())
    }
}
