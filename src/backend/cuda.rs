//! NVIDIA GPUs, through the CUDA driver.
//!
//! `cudarc` opens the device and owns its context (and is the currency of interop). Every call that
//! can run on a hot path or after a fault goes through [`api`], which resolves the driver's entry
//! points itself and takes their results as plain integers: a code newer than the bindings must not
//! become a Rust enum.
//!
//! | calls | need a current context | are bracketed RELAXED |
//! |---|---|---|
//! | launch, copy, memset, record, wait, host function, word | no: they name a stream | no |
//! | event and stream query | no | yes: they would break another thread's capture |
//! | allocate, free | yes | no |
//! | create, register, load | yes | yes |
//!
//! Loading, unloading and unregistering also wait for whatever runs on the GPU: see [`standstill`].
//!
//! The context that was current on the calling thread is current again when a call returns.

mod api;
pub(crate) mod standstill;

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use api::{Api, Handle};
use cudarc::driver::CudaContext;
use standstill::Standstill;

use super::{
    ArgBlock, Backend, Call, DeviceKind, DevicePtr, EventOptions, Function, FunctionInfo,
    HostCallback, HostPtr, LaunchShape, Limits, Pattern, Query, RawEvent, RawFunction, RawModule,
    RawStream, StreamOptions,
};
use crate::error::{DriverCode, ErrorDetail, Result};

const NOT_READY: i32 = 600;
const NOT_SUPPORTED: i32 = 801;
const NOT_FOUND: i32 = 500;

/// One GPU.
pub(crate) struct CudaBackend {
    api: &'static Api,
    /// `None` only inside `drop`.
    context: Option<Arc<CudaContext>>,
    raw_context: usize,
    /// The device is gone: the driver is left alone.
    abandoned: AtomicBool,
    ordinal: usize,
    name: String,
    limits: Limits,
}

/// The number of GPUs that the driver sees; 0 without a driver.
pub(crate) fn device_count() -> usize {
    match Api::get() {
        Ok(api) => api.device_count().unwrap_or(0),
        Err(_) => 0,
    }
}

impl CudaBackend {
    /// Opens a GPU through its primary context.
    ///
    /// # Errors
    /// No driver, no such GPU, a driver that is too old.
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        let api = Api::get()?;
        let count = api.device_count()?;
        if ordinal >= count {
            return Err(ErrorDetail::NoSuchDevice { ordinal, count }.into());
        }
        // Opening makes the context current: give the thread back what it had.
        let before = api.current_context()?;
        // Retained by ourselves first: what fails here fails with a number, not with an enum that
        // may not have it.
        let device = api.retain(ordinal)?;
        let context = CudaContext::new(ordinal)
            .map_err(|error| DriverCode { call: "cuDevicePrimaryCtxRetain", code: error.0 as i32 });
        let opened =
            context.map_err(Into::into).and_then(|context| Self::read(api, context, ordinal));
        // Whichever of these fails, the others are done.
        let (released, restored) = (api.release(device), api.set_context(before));
        released?;
        restored?;
        opened
    }

    /// Reads what the device is; its context is current.
    fn read(api: &'static Api, context: Arc<CudaContext>, ordinal: usize) -> Result<Self> {
        let device = context.cu_device();
        let attribute = |attribute| -> Call<u32> {
            Ok(u32::try_from(api.device_attribute(attribute, device)?).unwrap_or(0))
        };
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: both are live integers.
        api::check("cuCtxGetStreamPriorityRange", unsafe {
            (api.cuCtxGetStreamPriorityRange)(&raw mut lowest, &raw mut highest)
        })?;
        let limits = Limits {
            threads_per_block: attribute(1)?,
            block_dim: [attribute(2)?, attribute(3)?, attribute(4)?],
            grid_dim: [attribute(5)?, attribute(6)?, attribute(7)?],
            shared_mem_bytes: attribute(8)?,
            shared_mem_optin_bytes: attribute(97)?,
            multiprocessors: attribute(16)?,
            warp_size: attribute(10)?,
            compute_capability: (attribute(75)?, attribute(76)?),
            priorities: (lowest, highest),
            words: attribute(122)? != 0,
        };
        let pools = attribute(115)? != 0;
        if !pools {
            let what = "stream-ordered allocation";
            return Err(ErrorDetail::Unsupported { what, device: format!("cuda:{ordinal}") }.into());
        }
        api.set_up_pool(device)?;
        let raw_context = context.cu_ctx() as usize;
        let name = api.device_name(device)?;
        let (context, abandoned) = (Some(context), AtomicBool::new(false));
        Ok(CudaBackend { api, context, raw_context, abandoned, ordinal, name, limits })
    }

    /// Makes the device's context current until the guard is dropped.
    fn bind(&self) -> Call<Bound> {
        let before = self.api.current_context()?;
        let restore = if before == self.raw_context {
            None
        } else {
            self.api.set_context(self.raw_context)?;
            Some(before)
        };
        Ok(Bound { api: self.api, restore })
    }
}

/// A context made current for a call.
struct Bound {
    api: &'static Api,
    restore: Option<usize>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(before) = self.restore {
            let _ = self.api.set_context(before);
        }
    }
}

fn stream_handle(stream: RawStream) -> Handle {
    stream.0 as Handle
}

fn event_handle(event: RawEvent) -> Handle {
    event.0 as Handle
}

fn query(call: &'static str, code: c_int) -> Call<Query> {
    match code {
        0 => Ok(Query::Complete),
        NOT_READY => Ok(Query::Pending),
        code => Err(DriverCode { call, code }),
    }
}

macro_rules! driver {
    ($self:ident.$call:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the callers of `Backend` keep its contract: live handles, live memory.
        api::check(stringify!($call), unsafe { ($self.api.$call)($($arg),*) })
    };
}

impl Backend for CudaBackend {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn ordinal(&self) -> usize {
        self.ordinal
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn context(&self) -> u64 {
        self.raw_context as u64
    }

    fn abandon(&self) {
        // ORDERING: Relaxed: read when the last reference is gone, which orders it.
        self.abandoned.store(true, Ordering::Relaxed);
    }

    fn stream_create(&self, options: StreamOptions) -> Call<RawStream> {
        const NON_BLOCKING: u32 = 1;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut stream: Handle = std::ptr::null_mut();
        driver!(self.cuStreamCreateWithPriority(&raw mut stream, NON_BLOCKING, options.priority))?;
        Ok(RawStream(stream as u64))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Call<()> {
        driver!(self.cuStreamDestroy_v2(stream_handle(stream)))
    }

    unsafe fn stream_query(&self, stream: RawStream) -> Call<Query> {
        let _relaxed = self.api.relax();
        // SAFETY: the stream lives: the trait's contract.
        query("cuStreamQuery", unsafe { (self.api.cuStreamQuery)(stream_handle(stream)) })
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Call<()> {
        driver!(self.cuStreamWaitEvent(stream_handle(stream), event_handle(event), 0))
    }

    fn event_create(&self, options: EventOptions) -> Call<RawEvent> {
        const DISABLE_TIMING: u32 = 2;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let flags = if options.timing { 0 } else { DISABLE_TIMING };
        let mut event: Handle = std::ptr::null_mut();
        driver!(self.cuEventCreate(&raw mut event, flags))?;
        Ok(RawEvent(event as u64))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Call<()> {
        driver!(self.cuEventDestroy_v2(event_handle(event)))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Call<()> {
        driver!(self.cuEventRecord(event_handle(event), stream_handle(stream)))
    }

    unsafe fn event_query(&self, event: RawEvent) -> Call<Query> {
        let _relaxed = self.api.relax();
        // SAFETY: the event lives: the trait's contract.
        query("cuEventQuery", unsafe { (self.api.cuEventQuery)(event_handle(event)) })
    }

    unsafe fn event_elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Call<f32> {
        let mut ms = 0.0;
        driver!(self.cuEventElapsedTime(&raw mut ms, event_handle(start), event_handle(end)))?;
        Ok(ms)
    }

    unsafe fn write_word(&self, stream: RawStream, word: DevicePtr, value: u64) -> Call<()> {
        // Flag 0: with the barrier, so that what was written before is visible first.
        driver!(self.cuStreamWriteValue64_v2(stream_handle(stream), word.0, value, 0))
    }

    unsafe fn host_fn(
        &self,
        stream: RawStream,
        callback: HostCallback,
        data: *mut c_void,
    ) -> Call<()> {
        driver!(self.cuLaunchHostFunc(stream_handle(stream), callback, data))
    }

    unsafe fn alloc(&self, stream: RawStream, bytes: u64) -> Call<DevicePtr> {
        let _bound = self.bind()?;
        let mut ptr = 0;
        driver!(self.cuMemAllocAsync(&raw mut ptr, bytes as usize, stream_handle(stream)))?;
        Ok(DevicePtr(ptr))
    }

    unsafe fn free(&self, stream: RawStream, ptr: DevicePtr) -> Call<()> {
        let _bound = self.bind()?;
        driver!(self.cuMemFreeAsync(ptr.0, stream_handle(stream)))
    }

    fn memory_info(&self) -> Call<(u64, u64)> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let (mut free, mut total) = (0, 0);
        driver!(self.cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free as u64, total as u64))
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize) -> Call<DevicePtr> {
        const PORTABLE_AND_MAPPED: u32 = 1 | 2;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let host = ptr.0 as *mut c_void;
        driver!(self.cuMemHostRegister_v2(host, bytes, PORTABLE_AND_MAPPED))?;
        let mut device = 0;
        match driver!(self.cuMemHostGetDevicePointer_v2(&raw mut device, host, 0)) {
            Ok(()) => Ok(DevicePtr(device)),
            Err(code) => {
                // The caller unmaps what it could not register.
                let _ = driver!(self.cuMemHostUnregister(host));
                Err(code)
            }
        }
    }

    unsafe fn unregister(&self, ptr: HostPtr) -> Call<()> {
        let _standstill = Standstill::begin();
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        driver!(self.cuMemHostUnregister(ptr.0 as *mut c_void))
    }

    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
    ) -> Call<()> {
        let src = src.0 as *const c_void;
        driver!(self.cuMemcpyHtoDAsync_v2(dst.0, src, bytes as usize, stream_handle(stream)))
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
    ) -> Call<()> {
        let dst = dst.0 as *mut c_void;
        driver!(self.cuMemcpyDtoHAsync_v2(dst, src.0, bytes as usize, stream_handle(stream)))
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    ) -> Call<()> {
        driver!(self.cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes as usize, stream_handle(stream)))
    }

    unsafe fn copy_from_peer(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        src_context: u64,
        bytes: u64,
    ) -> Call<()> {
        let (here, there) = (self.raw_context as Handle, src_context as Handle);
        driver!(self.cuMemcpyPeerAsync(
            dst.0,
            here,
            src.0,
            there,
            bytes as usize,
            stream_handle(stream)
        ))
    }

    unsafe fn fill(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        pattern: Pattern,
        count: u64,
    ) -> Call<()> {
        let stream = stream_handle(stream);
        let bytes = pattern.len * count as usize;
        let short = pattern.shortest();
        match *short.as_slice() {
            [byte] => driver!(self.cuMemsetD8Async(dst.0, byte, bytes, stream)),
            [a, b] => {
                let value = u16::from_ne_bytes([a, b]);
                driver!(self.cuMemsetD16Async(dst.0, value, bytes / 2, stream))
            }
            [a, b, c, d] => {
                let value = u32::from_ne_bytes([a, b, c, d]);
                driver!(self.cuMemsetD32Async(dst.0, value, bytes / 4, stream))
            }
            // Column by column: one strided memset for each word (or byte) of the pattern.
            ref whole if whole.len().is_multiple_of(4) => {
                for (index, word) in whole.chunks_exact(4).enumerate() {
                    let value = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
                    let at = dst.0 + 4 * index as u64;
                    let pitch = pattern.len;
                    driver!(self.cuMemsetD2D32Async(at, pitch, value, 1, count as usize, stream))?;
                }
                Ok(())
            }
            ref whole => {
                for (index, byte) in whole.iter().enumerate() {
                    let at = dst.0 + index as u64;
                    let pitch = pattern.len;
                    driver!(self.cuMemsetD2D8Async(at, pitch, *byte, 1, count as usize, stream))?;
                }
                Ok(())
            }
        }
    }

    unsafe fn launch(
        &self,
        stream: RawStream,
        function: &Function,
        shape: &LaunchShape,
        args: &ArgBlock,
    ) -> Call<()> {
        let Function::Device(RawFunction(function)) = *function else {
            return Err(DriverCode { call: "cuLaunchKernel", code: NOT_SUPPORTED });
        };
        let function = function as Handle;
        let [gx, gy, gz] = shape.grid.grid_dim;
        let [bx, by, bz] = shape.grid.block_dim;
        let shared = shape.grid.shared_mem_bytes;
        let stream = stream_handle(stream);
        let mut pointers = args.pointers();
        let params = pointers.as_mut_ptr();
        if shape.cooperative {
            return driver!(self.cuLaunchCooperativeKernel(
                function, gx, gy, gz, bx, by, bz, shared, stream, params
            ));
        }
        let extra = std::ptr::null_mut();
        driver!(
            self.cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
        )
    }

    fn load(&self, image: &[u8], log: &mut String) -> Call<RawModule> {
        const ERROR_LOG: c_int = 5;
        const ERROR_LOG_BYTES: c_int = 6;
        let _standstill = Standstill::begin();
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut buffer = vec![0_u8; 16 << 10];
        let mut options = [ERROR_LOG, ERROR_LOG_BYTES];
        let mut values: [*mut c_void; 2] =
            [buffer.as_mut_ptr().cast(), std::ptr::without_provenance_mut(buffer.len())];
        let mut module: Handle = std::ptr::null_mut();
        let loaded = driver!(self.cuModuleLoadDataEx(
            &raw mut module,
            image.as_ptr().cast(),
            2,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        ));
        let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
        log.push_str(&String::from_utf8_lossy(&buffer[..end]));
        loaded?;
        Ok(RawModule(module as u64))
    }

    unsafe fn unload(&self, module: RawModule) -> Call<()> {
        let _standstill = Standstill::begin();
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        driver!(self.cuModuleUnload(module.0 as Handle))
    }

    unsafe fn function(&self, module: RawModule, name: &str) -> Call<RawFunction> {
        const CALL: &str = "cuModuleGetFunction";
        let name = CString::new(name).map_err(|_| DriverCode { call: CALL, code: NOT_FOUND })?;
        let _bound = self.bind()?;
        let mut function: Handle = std::ptr::null_mut();
        driver!(self.cuModuleGetFunction(&raw mut function, module.0 as Handle, name.as_ptr()))?;
        Ok(RawFunction(function as u64))
    }

    unsafe fn function_info(&self, function: RawFunction) -> Call<FunctionInfo> {
        let _bound = self.bind()?;
        let attribute = |attribute: c_int| -> Call<u32> {
            let mut value = 0;
            driver!(self.cuFuncGetAttribute(&raw mut value, attribute, function.0 as Handle))?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(FunctionInfo {
            threads_per_block: attribute(0)?,
            static_shared_mem_bytes: attribute(1)?,
            registers: attribute(4)?,
            local_bytes: attribute(3)?,
        })
    }

    unsafe fn allow_shared_mem(&self, function: RawFunction, bytes: u32) -> Call<()> {
        const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
        let _bound = self.bind()?;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        let function = function.0 as Handle;
        driver!(self.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes))
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let Some(context) = self.context.take() else { return };
        // ORDERING: Relaxed, see `abandon`.
        if crate::at_exit::begun() || self.abandoned.load(Ordering::Relaxed) {
            // No driver call after `main`, nor on a device that faulted: the context goes with the
            // process.
            std::mem::forget(context);
            return;
        }
        // Letting go of it makes it current first: give the thread back what it had.
        let before = self.api.current_context();
        drop(context);
        if let Ok(before) = before {
            self.api.set_context(before).ok();
        }
    }
}
