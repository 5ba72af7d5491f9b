//! Copies, allocations and events through the bare driver API, for baselines in the same process and
//! run. All calls are on CUDA device 0, in its primary context, which is current on the thread that
//! made a [`Copies`].

#![allow(dead_code, reason = "each bench uses a part of it")]

use std::ffi::{CString, c_void};

use cudarc::driver::sys;

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Some streams, and the kernels `scale` and `spin`.
pub(crate) struct Copies {
    pub(crate) streams: Vec<sys::CUstream>,
    scale: sys::CUfunction,
    spin: sys::CUfunction,
}

/// Device memory from the driver's pool; left to the end of the process.
#[derive(Clone, Copy)]
pub(crate) struct Device(pub(crate) sys::CUdeviceptr);

/// Pinned host memory of the driver's; left to the end of the process.
#[derive(Clone, Copy)]
pub(crate) struct Pinned(pub(crate) *mut c_void);

impl Pinned {
    /// The address `bytes` into it.
    pub(crate) fn at(self, bytes: usize) -> *mut c_void {
        self.0.wrapping_byte_add(bytes)
    }
}

impl Copies {
    pub(crate) fn new(streams: usize) -> Copies {
        let context = cudarc::driver::CudaContext::new(0).expect("a GPU");
        // The context lives as long as the process.
        std::mem::forget(context.clone());
        context.bind_to_thread().expect("a context");
        let stream = || {
            let mut stream = std::ptr::null_mut();
            // SAFETY: a context is current and the result is live.
            ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
            stream
        };
        let function = |ptx: &str, name: &str| {
            let ptx = CString::new(ptx).expect("no zero in it");
            let name = CString::new(name).expect("no zero in it");
            let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: a context is current, the text ends with zero, the result is live.
            ok(unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) });
            // SAFETY: likewise, and the module was loaded just now.
            ok(unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) });
            function
        };
        Copies {
            streams: (0..streams).map(|_| stream()).collect(),
            scale: function(include_str!("../../kernels/scale.ptx"), "scale"),
            spin: function(include_str!("../../kernels/spin.ptx"), "spin"),
        }
    }

    /// The same over streams of somebody else's, by their handles.
    pub(crate) fn over(streams: &[u64]) -> Copies {
        let streams = streams.iter().map(|stream| *stream as usize as sys::CUstream).collect();
        Copies { streams, ..Copies::new(0) }
    }

    pub(crate) fn device(&self, bytes: usize) -> Device {
        let mut ptr = 0;
        // SAFETY: the result is live.
        ok(unsafe { sys::cuMemAllocAsync(&raw mut ptr, bytes, self.streams[0]) });
        self.synchronize(0);
        Device(ptr)
    }

    /// Gives memory back.
    pub(crate) fn free(&self, device: Device) {
        // SAFETY: allocated by `device`, and nothing uses it any more.
        ok(unsafe { sys::cuMemFreeAsync(device.0, self.streams[0]) });
        self.synchronize(0);
    }

    pub(crate) fn pinned(&self, bytes: usize) -> Pinned {
        let mut ptr = std::ptr::null_mut();
        // SAFETY: the result is live; flag 0 is the plain kind.
        ok(unsafe { sys::cuMemHostAlloc(&raw mut ptr, bytes, 0) });
        // SAFETY: allocated just now with so many bytes.
        unsafe { ptr.cast::<u8>().write_bytes(1, bytes) };
        Pinned(ptr)
    }

    /// From any host memory, pinned or not.
    pub(crate) fn upload(&self, stream: usize, to: Device, from: *const c_void, bytes: usize) {
        // SAFETY: the callers keep both ends as long as the copy runs.
        ok(unsafe { sys::cuMemcpyHtoDAsync_v2(to.0, from, bytes, self.streams[stream]) });
    }

    /// Into any host memory, pinned or not.
    pub(crate) fn download(&self, stream: usize, to: *mut c_void, from: Device, bytes: usize) {
        // SAFETY: as in `upload`.
        ok(unsafe { sys::cuMemcpyDtoHAsync_v2(to, from.0, bytes, self.streams[stream]) });
    }

    /// The first `row_bytes` of each of `rows` rows that are `pitch` apart, one behind the other.
    pub(crate) fn copy_rows(
        &self,
        stream: usize,
        [from, to]: [Device; 2],
        [row_bytes, rows, pitch]: [usize; 3],
    ) {
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: std::ptr::null(),
            srcDevice: from.0,
            srcArray: std::ptr::null_mut(),
            srcPitch: pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: std::ptr::null_mut(),
            dstDevice: to.0,
            dstArray: std::ptr::null_mut(),
            dstPitch: row_bytes,
            WidthInBytes: row_bytes,
            Height: rows,
        };
        // SAFETY: the callers keep both ends as long as the copy runs.
        ok(unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.streams[stream]) });
    }

    /// `x *= factor` over `len` elements of `f32`, with the geometry of the crate's own kernel.
    pub(crate) fn scale(&self, stream: usize, factor: f32, x: Device, len: usize) {
        let (mut factor, mut x, mut len) = (factor, x.0, len as u64);
        let blocks = u32::try_from(len.div_ceil(256)).expect("a grid");
        let mut args: [*mut c_void; 3] =
            [(&raw mut factor).cast(), (&raw mut x).cast(), (&raw mut len).cast()];
        let none = std::ptr::null_mut();
        let stream = self.streams[stream];
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
                stream,
                args.as_mut_ptr(),
                none,
            )
        });
    }

    /// One thread that is busy for so long.
    pub(crate) fn spin(&self, stream: usize, mut nanoseconds: u64) {
        let mut args: [*mut c_void; 1] = [(&raw mut nanoseconds).cast()];
        let (none, stream) = (std::ptr::null_mut(), self.streams[stream]);
        // SAFETY: the kernel takes a 64-bit integer, which the call copies.
        ok(unsafe {
            sys::cuLaunchKernel(self.spin, 1, 1, 1, 1, 1, 1, 0, stream, args.as_mut_ptr(), none)
        });
    }

    /// Allocates, clears and frees, in stream order.
    pub(crate) fn zeros(&self, bytes: usize) {
        let (mut ptr, stream) = (0, self.streams[0]);
        // SAFETY: the result is live.
        ok(unsafe { sys::cuMemAllocAsync(&raw mut ptr, bytes, stream) });
        // SAFETY: allocated just now on this stream.
        ok(unsafe { sys::cuMemsetD8Async(ptr, 0, bytes, stream) });
        // SAFETY: behind its only use, on the same stream.
        ok(unsafe { sys::cuMemFreeAsync(ptr, stream) });
    }

    pub(crate) fn event(&self) -> sys::CUevent {
        let mut event = std::ptr::null_mut();
        // SAFETY: the result is live; 2 is without timing.
        ok(unsafe { sys::cuEventCreate(&raw mut event, 2) });
        event
    }

    pub(crate) fn record(&self, event: sys::CUevent, stream: usize) {
        // SAFETY: both live.
        ok(unsafe { sys::cuEventRecord(event, self.streams[stream]) });
    }

    pub(crate) fn wait(&self, stream: usize, event: sys::CUevent) {
        // SAFETY: both live.
        ok(unsafe { sys::cuStreamWaitEvent(self.streams[stream], event, 0) });
    }

    pub(crate) fn synchronize_event(&self, event: sys::CUevent) {
        // SAFETY: it lives.
        ok(unsafe { sys::cuEventSynchronize(event) });
    }

    pub(crate) fn destroy(&self, event: sys::CUevent) {
        // SAFETY: nobody uses it any more.
        ok(unsafe { sys::cuEventDestroy_v2(event) });
    }

    pub(crate) fn synchronize(&self, stream: usize) {
        // SAFETY: the stream lives.
        ok(unsafe { sys::cuStreamSynchronize(self.streams[stream]) });
    }
}
