//! The bare driver API, for baselines in the same process and run. Copies of much memory are in
//! `copies.rs`.
#![allow(dead_code, reason = "each bench uses a part of it")]

use std::ffi::{CString, c_void};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

/// CUDA device 0 and three kernels, without any of this crate.
pub(crate) struct Raw {
    context: Arc<CudaContext>,
    empty: sys::CUfunction,
    scale: sys::CUfunction,
    spin: sys::CUfunction,
}

// SAFETY: function handles may be used by any thread.
unsafe impl Send for Raw {}
// SAFETY: and by several at once.
unsafe impl Sync for Raw {}

/// A stream; destroyed when dropped, its work goes on.
pub(crate) struct RawStream {
    raw: &'static Raw,
    stream: sys::CUstream,
}

// SAFETY: a stream's handle may be used by any thread.
unsafe impl Send for RawStream {}
// SAFETY: and by several at once; the driver orders them.
unsafe impl Sync for RawStream {}

/// An event without timing.
pub(crate) struct RawEvent(sys::CUevent);

// SAFETY: an event's handle may be used by any thread.
unsafe impl Send for RawEvent {}

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

impl Raw {
    /// Loads the kernels into the device's primary context, for the rest of the process.
    pub(crate) fn load() -> &'static Raw {
        let context = CudaContext::new(0).expect("a GPU");
        let function = |ptx: &str, name: &str| {
            let (ptx, name) = (CString::new(ptx).unwrap(), CString::new(name).unwrap());
            let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: a context is current, the strings end with zero, the results are live.
            ok(unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) });
            // SAFETY: likewise, and the module was loaded just now.
            ok(unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) });
            function
        };
        Box::leak(Box::new(Raw {
            empty: function(include_str!("../../kernels/empty.ptx"), "empty"),
            scale: function(include_str!("../../kernels/scale.ptx"), "scale"),
            spin: function(include_str!("../../kernels/spin.ptx"), "spin"),
            context,
        }))
    }

    /// Makes a stream; leaves the context current on the calling thread.
    pub(crate) fn stream(&'static self) -> RawStream {
        self.context.bind_to_thread().expect("the context is alive");
        let mut stream = std::ptr::null_mut();
        // SAFETY: a context is current and the result is live. 1 is `CU_STREAM_NON_BLOCKING`.
        ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
        RawStream { raw: self, stream }
    }

    /// Makes a stream of that priority; leaves the context current on the calling thread.
    pub(crate) fn stream_with_priority(&'static self, priority: i32) -> RawStream {
        self.context.bind_to_thread().expect("the context is alive");
        let mut stream = std::ptr::null_mut();
        // SAFETY: a context is current and the result is live. 1 is `CU_STREAM_NON_BLOCKING`.
        ok(unsafe { sys::cuStreamCreateWithPriority(&raw mut stream, 1, priority) });
        RawStream { raw: self, stream }
    }

    /// A stream of somebody else, who destroys it; leaves the context current on the calling thread.
    pub(crate) fn stream_of(&'static self, handle: u64) -> ManuallyDrop<RawStream> {
        self.context.bind_to_thread().expect("the context is alive");
        ManuallyDrop::new(RawStream { raw: self, stream: handle as sys::CUstream })
    }

    /// Makes an event; leaves the context current on the calling thread.
    pub(crate) fn event(&self) -> RawEvent {
        self.context.bind_to_thread().expect("the context is alive");
        let mut event = std::ptr::null_mut();
        // SAFETY: a context is current and the result is live. 2 is `CU_EVENT_DISABLE_TIMING`.
        ok(unsafe { sys::cuEventCreate(&raw mut event, 2) });
        RawEvent(event)
    }
}

impl RawStream {
    pub(crate) fn launch_empty(&self) {
        let none = std::ptr::null_mut();
        // SAFETY: the function takes no arguments and the stream lives.
        ok(unsafe {
            sys::cuLaunchKernel(self.raw.empty, 1, 1, 1, 1, 1, 1, 0, self.stream, none, none)
        });
    }

    pub(crate) fn launch_spin(&self, mut nanoseconds: u64) {
        let (mut args, none) = ([(&raw mut nanoseconds).cast()], std::ptr::null_mut());
        let args = args.as_mut_ptr();
        // SAFETY: the function takes one 64-bit integer, which is copied by the call.
        ok(unsafe {
            sys::cuLaunchKernel(self.raw.spin, 1, 1, 1, 1, 1, 1, 0, self.stream, args, none)
        });
    }

    /// Launches `spin` with so many blocks and threads.
    pub(crate) fn launch_spinning(&self, blocks: u32, threads: u32, mut nanoseconds: u64) {
        let (mut args, none) = ([(&raw mut nanoseconds).cast()], std::ptr::null_mut());
        let args = args.as_mut_ptr();
        // SAFETY: the function takes one 64-bit integer, which is copied by the call.
        ok(unsafe {
            sys::cuLaunchKernel(
                self.raw.spin,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.stream,
                args,
                none,
            )
        });
    }

    /// Launches `spin`, or `empty` for no time at all.
    pub(crate) fn launch(&self, nanoseconds: u64) {
        if nanoseconds == 0 {
            self.launch_empty();
        } else {
            self.launch_spin(nanoseconds);
        }
    }

    pub(crate) fn record(&self, event: &RawEvent) {
        // SAFETY: both live and are of one context.
        ok(unsafe { sys::cuEventRecord(event.0, self.stream) });
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: the stream lives.
        ok(unsafe { sys::cuStreamSynchronize(self.stream) });
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        // SAFETY: the stream lives, and nobody names it any more.
        ok(unsafe { sys::cuStreamDestroy_v2(self.stream) });
    }
}

impl RawEvent {
    pub(crate) fn is_complete(&self) -> bool {
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => false,
            code => {
                ok(code);
                true
            }
        }
    }

    pub(crate) fn spin(&self) {
        while !self.is_complete() {
            std::hint::spin_loop();
        }
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        // SAFETY: the event lives, and nobody names it any more.
        ok(unsafe { sys::cuEventDestroy_v2(self.0) });
    }
}

/// Which device memory a request uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Its seat's.
    Ready,
    /// Allocated for it.
    Fresh,
}

/// A stream with memory of its own on both sides, for one request at a time. The memory is left to
/// the end of the process.
pub(crate) struct Seat {
    stream: RawStream,
    /// Pinned.
    host: *mut f32,
    device: sys::CUdeviceptr,
    len: usize,
}

// SAFETY: its memory is its own, and may be used by any thread.
unsafe impl Send for Seat {}

impl Seat {
    /// For `len` elements; leaves the context current on the calling thread.
    pub(crate) fn new(raw: &'static Raw, len: usize) -> Seat {
        let stream = raw.stream();
        let (mut host, mut device) = (std::ptr::null_mut(), 0);
        // SAFETY: a context is current and the result is live; flag 0 is the plain kind.
        ok(unsafe { sys::cuMemHostAlloc(&raw mut host, 4 * len, 0) });
        // SAFETY: likewise.
        ok(unsafe { sys::cuMemAlloc_v2(&raw mut device, 4 * len) });
        Seat { stream, host: host.cast(), device, len }
    }

    /// Copies floats up, multiplies them by one factor after the other, copies them down and blocks the thread until that is done;
    /// in device memory of its own, or in some that is allocated and freed in stream order.
    ///
    /// # Panics
    /// If `values` are not as many as the seat is for.
    pub(crate) fn scale(&mut self, factors: &[f32], values: &[u8], memory: Memory) -> Vec<u8> {
        let bytes = 4 * self.len;
        assert_eq!(values.len(), bytes);
        let host = self.host.cast::<u8>();
        // SAFETY: `host` has so many bytes, and nothing uses them: each call waits for its copies.
        unsafe { host.copy_from_nonoverlapping(values.as_ptr(), bytes) };
        self.round_trip(factors, memory);
        self.stream.synchronize();
        // SAFETY: the copy down has ended, and what it wrote lasts until the next call.
        unsafe { std::slice::from_raw_parts(host, bytes) }.to_vec()
    }

    /// Puts a round trip of what the pinned memory has on the stream, and the event behind it.
    pub(crate) fn start(&mut self, factor: f32, event: &RawEvent) {
        self.round_trip(&[factor], Memory::Ready);
        self.stream.record(event);
    }

    /// The copy up, the kernels, the copy down.
    fn round_trip(&mut self, factors: &[f32], memory: Memory) {
        let (bytes, raw, stream) = (4 * self.len, self.stream.raw, self.stream.stream);
        raw.context.bind_to_thread().expect("the context is alive");
        let host = self.host.cast::<u8>();
        let mut device = self.device;
        if memory == Memory::Fresh {
            // SAFETY: the stream is of the current context and the result is live.
            ok(unsafe { sys::cuMemAllocAsync(&raw mut device, bytes, stream) });
        }
        // SAFETY: both ends have so many bytes and live until the stream is synchronized.
        ok(unsafe { sys::cuMemcpyHtoDAsync_v2(device, host.cast(), bytes, stream) });
        let mut len = self.len as u64;
        let blocks = u32::try_from(self.len.div_ceil(256)).expect("a grid");
        for mut factor in factors.iter().copied() {
            let mut args: [*mut c_void; 3] =
                [(&raw mut factor).cast(), (&raw mut device).cast(), (&raw mut len).cast()];
            let (args, none) = (args.as_mut_ptr(), std::ptr::null_mut());
            // SAFETY: the kernel takes a float, an address and a length, which the call copies.
            ok(unsafe {
                sys::cuLaunchKernel(raw.scale, blocks, 1, 1, 256, 1, 1, 0, stream, args, none)
            });
        }
        // SAFETY: as for the copy up.
        ok(unsafe { sys::cuMemcpyDtoHAsync_v2(host.cast(), device, bytes, stream) });
        if memory == Memory::Fresh {
            // SAFETY: it was allocated on this stream, and is freed behind its last use.
            ok(unsafe { sys::cuMemFreeAsync(device, stream) });
        }
    }
}

/// A stream with an event behind each kernel and a bound on how many are in flight.
pub(crate) struct Bounded {
    pub(crate) stream: RawStream,
    events: Vec<RawEvent>,
    window: usize,
    every: usize,
    launched: usize,
}

impl Bounded {
    /// Before every `every`-th launch, it is seen to that at most `window` are in flight.
    pub(crate) fn new(raw: &'static Raw, window: usize, every: usize) -> Self {
        let events = (0..window + every).map(|_| raw.event()).collect();
        Bounded { stream: raw.stream(), events, window, every, launched: 0 }
    }

    /// Spins on the event that must be complete before the next launch, if there is one.
    pub(crate) fn make_room(&self) {
        if self.launched.is_multiple_of(self.every) && self.launched >= self.window {
            self.event(self.launched - self.window).spin();
        }
    }

    /// Whether the next launch keeps to the bound; asks the driver.
    pub(crate) fn has_room(&self) -> bool {
        self.launched < self.window || self.event(self.launched - self.window).is_complete()
    }

    /// Records the event behind a kernel that was launched on the stream.
    pub(crate) fn record(&mut self) {
        self.stream.record(self.event(self.launched));
        self.launched += 1;
    }

    fn event(&self, launch: usize) -> &RawEvent {
        &self.events[launch % self.events.len()]
    }
}
