//! NVIDIA GPUs, through the CUDA driver.
//!
//! `cudarc` opens the device and owns its context (and is the currency of interop). Every call that
//! can run on a hot path or after a fault goes through [`api`], which resolves the driver's entry
//! points itself and takes their results as plain integers: a code newer than the bindings must not
//! become a Rust enum.
//!
//! | calls | need a current context | are bracketed RELAXED |
//! |---|---|---|
//! | launch, copy, memset, record, wait, host function, word | only on the legacy default stream, which is the context's | no |
//! | event and stream query, elapsed time | no | yes |
//! | allocate, free, record everything | yes | yes |
//! | create, register, load, ask or change a function | yes | yes |
//!
//! Seen on an H200 (driver 580) to break another thread's GLOBAL capture outside of a bracket: queries,
//! synchronization, stream-ordered allocation, registering, and what asks or trims the pool.
//!
//! Loading, unloading and unregistering also wait for whatever runs on the GPU: see [`standstill`].
//!
//! The context that was current on the calling thread is current again when a call returns.
//!
//! More than 600 lines: one trait has one `impl`, a function for each driver call.

mod api;
mod launch_ex;
pub(crate) mod nvrtc;
pub(crate) mod standstill;

use std::any::Any;
use std::ffi::{CString, c_int, c_void};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

pub(crate) use api::PoolOptions;
use api::{Api, Handle, IpcHandle, Memcpy2d};
use cudarc::driver::CudaContext;
use launch_ex::{Attribute, RawConfig};
use standstill::Standstill;

use super::{
    ArgBlock, Backend, DeviceKind, DevicePtr, DriverResult, EventOptions, Function, Grid,
    HostCallback, HostPtr, KernelAttributes, LaunchShape, Limits, Pattern, PoolInfo, Query,
    RawEvent, RawFunction, RawModule, RawStream, RowCopy, StreamInfo, StreamOptions,
};
use crate::error::image::ParamLayout;
use crate::error::{DriverCode, ErrorDetail, Result};
use crate::thread::contain;
use crate::thread::exit::UnderWay;
use crate::thread::role;

/// A flag of `cuStreamCreate`.
const NON_BLOCKING: u32 = 1;

const NOT_READY: i32 = 600;
const NOT_SUPPORTED: i32 = 801;
const NOT_FOUND: i32 = 500;

/// One GPU.
pub(crate) struct CudaBackend {
    api: &'static Api,
    /// `None` only inside `drop`.
    context: Option<Arc<CudaContext>>,
    raw_context: usize,
    /// The memory pool, which is this backend's own.
    pool: usize,
    /// The device is gone: the driver is left alone.
    abandoned: AtomicBool,
    ordinal: usize,
    name: String,
    limits: Limits,
}

/// The number of GPUs that the driver sees; 0 without a driver.
///
/// Asked once: it does not change while the process lives, and a host function may not ask.
pub(crate) fn device_count() -> usize {
    if COUNT.get().is_none() && role::may_call_driver() {
        Api::get().and_then(count).ok();
    }
    COUNT.get().copied().unwrap_or(0)
}

static COUNT: OnceLock<usize> = OnceLock::new();

fn count(api: &Api) -> Result<usize> {
    let count = api.device_count()?;
    Ok(*COUNT.get_or_init(|| count))
}

impl CudaBackend {
    /// Opens a GPU through its primary context, and makes a memory pool on it.
    ///
    /// # Errors
    /// No driver, no such GPU, a driver that is too old.
    pub(crate) fn open(ordinal: usize, memory: PoolOptions) -> Result<Self> {
        let api = Api::get()?;
        let count = count(api)?;
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
        let read = |context| Self::read(api, context, ordinal, memory);
        let opened = context.map_err(Into::into).and_then(read);
        // Whichever of these fails, the others are done.
        let (released, restored) = (api.release(device), api.set_context(before));
        released?;
        restored?;
        opened
    }

    /// Reads what the device is; its context is current.
    fn read(
        api: &'static Api,
        context: Arc<CudaContext>,
        ordinal: usize,
        memory: PoolOptions,
    ) -> Result<Self> {
        let device = context.cu_device();
        let attribute = |attribute| -> DriverResult<u32> {
            Ok(u32::try_from(api.device_attribute(attribute, device)?).unwrap_or(0))
        };
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: both are live integers.
        api::check("cuCtxGetStreamPriorityRange", unsafe {
            (api.cuCtxGetStreamPriorityRange)(&raw mut lowest, &raw mut highest)
        })?;
        let limits = Limits {
            threads_per_block: attribute(1)?,
            registers_per_block: attribute(12)?,
            block_dim: [attribute(2)?, attribute(3)?, attribute(4)?],
            grid_dim: [attribute(5)?, attribute(6)?, attribute(7)?],
            shared_mem_bytes: attribute(8)?,
            shared_mem_optin_bytes: attribute(97)?,
            multiprocessors: attribute(16)?,
            warp_size: attribute(10)?,
            compute_capability: (attribute(75)?, attribute(76)?),
            priorities: (lowest, highest),
            words: attribute(122)? != 0,
            cooperative: attribute(95)? != 0,
            clusters: attribute(120)? != 0,
            // Drivers that do not know the attribute do not say so.
            interprocess_events: attribute(125).is_ok_and(|supported| supported != 0),
        };
        let pools = attribute(115)? != 0;
        if !pools {
            let what = "stream-ordered allocation";
            return Err(ErrorDetail::Unsupported { what, device: format!("cuda:{ordinal}") }.into());
        }
        let raw_context = context.cu_ctx() as usize;
        let name = api.device_name(device)?;
        // Last: nothing below it can fail.
        let pool = api.make_pool(device, memory)? as usize;
        let (context, abandoned) = (Some(context), AtomicBool::new(false));
        Ok(CudaBackend { api, context, raw_context, pool, abandoned, ordinal, name, limits })
    }

    /// Makes the device's context current until the guard is dropped.
    fn bind(&self) -> DriverResult<Bound> {
        let before = self.api.current_context()?;
        let restore = if before == self.raw_context {
            None
        } else {
            self.api.set_context(self.raw_context)?;
            Some(before)
        };
        Ok(Bound { api: self.api, restore })
    }

    /// As [`bind`](Self::bind) where the stream is the context's and not one of its own.
    fn bind_for(&self, stream: RawStream) -> DriverResult<Option<Bound>> {
        if stream.0 > RawStream::PER_THREAD.0 { Ok(None) } else { self.bind().map(Some) }
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

fn query(call: &'static str, code: c_int) -> DriverResult<Query> {
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

    fn pool(&self) -> u64 {
        self.pool as u64
    }

    fn cudarc_context(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.context.clone().map(|context| context as Arc<dyn Any + Send + Sync>)
    }

    fn abandon(&self) {
        // ORDERING: Relaxed: read when the last reference is gone, which orders it.
        self.abandoned.store(true, Ordering::Relaxed);
    }

    fn enable_peer(&self, other: &dyn Backend) -> DriverResult<bool> {
        const ALREADY_ENABLED: i32 = 704;
        const TOO_MANY_PEERS: i32 = 711;
        let (here, there) = (self.ordinal, other.ordinal());
        if other.kind() != DeviceKind::Cuda {
            return Ok(false);
        }
        if here == there {
            return Ok(true);
        }
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        if !self.api.can_access_peer(here, there)? {
            return Ok(false);
        }
        match driver!(self.cuCtxEnablePeerAccess(other.context() as Handle, 0)) {
            Ok(()) | Err(DriverCode { code: ALREADY_ENABLED, .. }) => {}
            Err(DriverCode { code: TOO_MANY_PEERS, .. }) => return Ok(false),
            Err(code) => return Err(code),
        }
        self.api.show_pool(other.pool() as Handle, here)?;
        Ok(true)
    }

    fn stream_create(&self, options: StreamOptions) -> DriverResult<RawStream> {
        let flags = if options.blocking { 0 } else { NON_BLOCKING };
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut stream: Handle = std::ptr::null_mut();
        driver!(self.cuStreamCreateWithPriority(&raw mut stream, flags, options.priority))?;
        Ok(RawStream(stream as u64))
    }

    unsafe fn stream_info(&self, stream: RawStream) -> DriverResult<StreamInfo> {
        let stream = stream_handle(stream);
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let (mut priority, mut flags) = (0, 0);
        let mut context: Handle = std::ptr::null_mut();
        driver!(self.cuStreamGetPriority(stream, &raw mut priority))?;
        driver!(self.cuStreamGetFlags(stream, &raw mut flags))?;
        driver!(self.cuStreamGetCtx(stream, &raw mut context))?;
        Ok(StreamInfo { priority, blocking: flags & NON_BLOCKING == 0, context: context as u64 })
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult<()> {
        driver!(self.cuStreamDestroy_v2(stream_handle(stream)))
    }

    unsafe fn stream_query(&self, stream: RawStream) -> DriverResult<Query> {
        let _bound = self.bind_for(stream)?;
        let _relaxed = self.api.relax();
        // SAFETY: the stream lives: the trait's contract.
        query("cuStreamQuery", unsafe { (self.api.cuStreamQuery)(stream_handle(stream)) })
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        driver!(self.cuStreamWaitEvent(stream_handle(stream), event_handle(event), 0))
    }

    fn event_create(&self, options: EventOptions) -> DriverResult<RawEvent> {
        const BLOCKING_SYNC: u32 = 1;
        const DISABLE_TIMING: u32 = 2;
        const INTERPROCESS: u32 = 4;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let flag = |set, flag| if set { flag } else { 0 };
        let flags = flag(options.blocking_sync, BLOCKING_SYNC)
            | flag(!options.timing, DISABLE_TIMING)
            | flag(options.interprocess, INTERPROCESS);
        let mut event: Handle = std::ptr::null_mut();
        driver!(self.cuEventCreate(&raw mut event, flags))?;
        Ok(RawEvent(event as u64))
    }

    unsafe fn event_export(&self, event: RawEvent) -> DriverResult<[u8; 64]> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut handle = IpcHandle([0; 64]);
        driver!(self.cuIpcGetEventHandle(&raw mut handle, event_handle(event)))?;
        Ok(handle.0)
    }

    unsafe fn event_import(&self, handle: &[u8; 64]) -> DriverResult<RawEvent> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut event: Handle = std::ptr::null_mut();
        driver!(self.cuIpcOpenEventHandle(&raw mut event, IpcHandle(*handle)))?;
        Ok(RawEvent(event as u64))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        driver!(self.cuEventDestroy_v2(event_handle(event)))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        driver!(self.cuEventRecord(event_handle(event), stream_handle(stream)))
    }

    unsafe fn event_record_all(&self, event: RawEvent) -> DriverResult<()> {
        const CALL: &str = "cuCtxRecordEvent";
        let Some(record) = self.api.cuCtxRecordEvent else {
            return Err(DriverCode { call: CALL, code: NOT_SUPPORTED });
        };
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        // SAFETY: the context is the device's own, and the event lives: the trait's contract.
        api::check(CALL, unsafe { record(self.raw_context as Handle, event_handle(event)) })
    }

    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<Query> {
        let _relaxed = self.api.relax();
        // SAFETY: the event lives: the trait's contract.
        query("cuEventQuery", unsafe { (self.api.cuEventQuery)(event_handle(event)) })
    }

    unsafe fn event_elapsed_ms(&self, start: RawEvent, end: RawEvent) -> DriverResult<f32> {
        let _relaxed = self.api.relax();
        let mut ms = 0.0;
        driver!(self.cuEventElapsedTime(&raw mut ms, event_handle(start), event_handle(end)))?;
        Ok(ms)
    }

    unsafe fn write_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u64,
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        // Flag 0: with the barrier, so that what was written before is visible first.
        driver!(self.cuStreamWriteValue64_v2(stream_handle(stream), word.0, value, 0))
    }

    unsafe fn host_fn(
        &self,
        stream: RawStream,
        callback: HostCallback,
        data: *mut c_void,
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        driver!(self.cuLaunchHostFunc(stream_handle(stream), callback, data))
    }

    unsafe fn alloc(&self, stream: RawStream, bytes: u64) -> DriverResult<DevicePtr> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut ptr = 0;
        let (pool, stream) = (self.pool as Handle, stream_handle(stream));
        driver!(self.cuMemAllocFromPoolAsync(&raw mut ptr, bytes as usize, pool, stream))?;
        Ok(DevicePtr(ptr))
    }

    unsafe fn free(&self, stream: RawStream, ptr: DevicePtr) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        driver!(self.cuMemFreeAsync(ptr.0, stream_handle(stream)))
    }

    fn memory_info(&self) -> DriverResult<(u64, u64)> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let (mut free, mut total) = (0, 0);
        driver!(self.cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free as u64, total as u64))
    }

    fn pool_info(&self) -> DriverResult<PoolInfo> {
        let _relaxed = self.api.relax();
        // `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` and `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH`.
        let bytes = |attribute| self.api.pool_bytes(self.pool as Handle, attribute);
        Ok(PoolInfo { reserved: bytes(5)?, reserved_peak: bytes(6)? })
    }

    fn pool_trim(&self, keep_bytes: u64) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let keep = usize::try_from(keep_bytes).unwrap_or(usize::MAX);
        driver!(self.cuMemPoolTrimTo(self.pool as Handle, keep))
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize) -> DriverResult<DevicePtr> {
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

    unsafe fn unregister(&self, ptr: HostPtr) -> DriverResult<()> {
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
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        let src = src.0 as *const c_void;
        driver!(self.cuMemcpyHtoDAsync_v2(dst.0, src, bytes as usize, stream_handle(stream)))
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        let dst = dst.0 as *mut c_void;
        driver!(self.cuMemcpyDtoHAsync_v2(dst, src.0, bytes as usize, stream_handle(stream)))
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        driver!(self.cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes as usize, stream_handle(stream)))
    }

    unsafe fn copy_rows(&self, stream: RawStream, copy: &RowCopy) -> DriverResult<()> {
        let copy = Memcpy2d::from(copy);
        driver!(self.cuMemcpy2DAsync_v2(&raw const copy, stream_handle(stream)))
    }

    unsafe fn copy_from_peer(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        src_context: u64,
        bytes: u64,
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
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
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        let stream = stream_handle(stream);
        let short = pattern.shortest();
        let pitch = short.len;
        // Of that pattern.
        let count = pattern.len / pitch * count as usize;
        let is_aligned = |bytes: u64| dst.0.is_multiple_of(bytes);
        match *short.as_slice() {
            [byte] => driver!(self.cuMemsetD8Async(dst.0, byte, count, stream)),
            [a, b] if is_aligned(2) => {
                let value = u16::from_ne_bytes([a, b]);
                driver!(self.cuMemsetD16Async(dst.0, value, count, stream))
            }
            [a, b, c, d] if is_aligned(4) => {
                let value = u32::from_ne_bytes([a, b, c, d]);
                driver!(self.cuMemsetD32Async(dst.0, value, count, stream))
            }
            // Column by column: one strided memset for each word (or byte) of the pattern.
            ref whole if whole.len().is_multiple_of(4) && is_aligned(4) => {
                for (index, word) in whole.chunks_exact(4).enumerate() {
                    let value = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
                    let at = dst.0 + 4 * index as u64;
                    driver!(self.cuMemsetD2D32Async(at, pitch, value, 1, count, stream))?;
                }
                Ok(())
            }
            ref whole => {
                for (index, byte) in whole.iter().enumerate() {
                    let at = dst.0 + index as u64;
                    driver!(self.cuMemsetD2D8Async(at, pitch, *byte, 1, count, stream))?;
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
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        let Function::Device(RawFunction(function)) = *function else {
            return Err(DriverCode { call: "cuLaunchKernel", code: NOT_SUPPORTED });
        };
        let function = function as Handle;
        let [gx, gy, gz] = shape.grid.grid_dim;
        let [bx, by, bz] = shape.grid.block_dim;
        let shared = shape.grid.shared_mem_bytes;
        let stream = stream_handle(stream);
        let mut pointers = args.pointers();
        let (params, extra) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        if shape.grid.has_clusters() {
            let attributes = Attribute::of(shape);
            let config = RawConfig::new(&shape.grid, stream, &attributes);
            return driver!(self.cuLaunchKernelEx(&raw const config, function, params, extra));
        }
        if shape.cooperative {
            return driver!(self.cuLaunchCooperativeKernel(
                function, gx, gy, gz, bx, by, bz, shared, stream, params
            ));
        }
        driver!(
            self.cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
        )
    }

    fn load(&self, image: &[u8], log: &mut String) -> DriverResult<RawModule> {
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

    unsafe fn unload(&self, module: RawModule) -> DriverResult<()> {
        let _standstill = Standstill::begin();
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        driver!(self.cuModuleUnload(module.0 as Handle))
    }

    unsafe fn function(&self, module: RawModule, name: &str) -> DriverResult<RawFunction> {
        const CALL: &str = "cuModuleGetFunction";
        let name = CString::new(name).map_err(|_| DriverCode { call: CALL, code: NOT_FOUND })?;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut function: Handle = std::ptr::null_mut();
        driver!(self.cuModuleGetFunction(&raw mut function, module.0 as Handle, name.as_ptr()))?;
        Ok(RawFunction(function as u64))
    }

    unsafe fn function_attributes(&self, function: RawFunction) -> DriverResult<KernelAttributes> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let attribute = |attribute: c_int| -> DriverResult<u32> {
            let mut value = 0;
            driver!(self.cuFuncGetAttribute(&raw mut value, attribute, function.0 as Handle))?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(KernelAttributes {
            max_threads_per_block: attribute(0)?,
            static_shared_mem_bytes: attribute(1)?,
            const_bytes: attribute(2)?,
            local_bytes: attribute(3)?,
            registers: attribute(4)?,
            ptx_version: attribute(5)?,
            binary_version: attribute(6)?,
            cache_mode_ca: attribute(7)? != 0,
        })
    }

    unsafe fn function_parameters(
        &self,
        function: RawFunction,
    ) -> DriverResult<Option<Vec<ParamLayout>>> {
        const CALL: &str = "cuFuncGetParamInfo";
        const PAST_THE_LAST: i32 = 1;
        let Some(ask) = self.api.cuFuncGetParamInfo else { return Ok(None) };
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let (mut params, mut offset_bytes, mut size_bytes) = (Vec::new(), 0, 0);
        loop {
            let (function, offset, size) =
                (function.0 as Handle, &raw mut offset_bytes, &raw mut size_bytes);
            // SAFETY: the function is loaded: the trait's contract. Both are live integers.
            let code = unsafe { ask(function, params.len(), offset, size) };
            match code {
                PAST_THE_LAST => return Ok(Some(params)),
                NOT_SUPPORTED => return Ok(None),
                code => api::check(CALL, code)?,
            }
            params.push(ParamLayout { offset_bytes, size_bytes });
        }
    }

    unsafe fn allow_shared_mem(&self, function: RawFunction, bytes: u32) -> DriverResult<()> {
        const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        let function = function.0 as Handle;
        driver!(self.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes))
    }

    unsafe fn active_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared: u32,
    ) -> DriverResult<u32> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        let (function, shared) = (function.0 as Handle, shared as usize);
        let mut blocks = 0;
        driver!(self.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &raw mut blocks,
            function,
            threads,
            shared
        ))?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    unsafe fn active_clusters(&self, function: RawFunction, grid: &Grid) -> DriverResult<u32> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let attributes = Attribute::of(&LaunchShape { grid: *grid, cooperative: false });
        let config = RawConfig::new(grid, std::ptr::null_mut(), &attributes);
        let function = function.0 as Handle;
        let mut clusters = 0;
        driver!(self.cuOccupancyMaxActiveClusters(&raw mut clusters, function, &raw const config))?;
        Ok(u32::try_from(clusters).unwrap_or(0))
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let Some(context) = self.context.take() else { return };
        // ORDERING: Relaxed, see `abandon`.
        if crate::thread::exit::begun() || self.abandoned.load(Ordering::Relaxed) {
            // No driver call after `main`, nor on a device that faulted: the context goes with the
            // process.
            std::mem::forget(context);
            return;
        }
        let (api, context, pool) = (self.api, ManuallyDrop::new(context), self.pool);
        let raw_context = self.raw_context;
        let release = move || {
            // Letting go of it makes it current first: give the thread back what it had.
            let before = api.current_context();
            if api.set_context(raw_context).is_ok() {
                let _relaxed = api.relax();
                // What is left in it goes when its free was reached. Refused, it goes with the process.
                api.destroy_pool(pool as Handle).ok();
            }
            drop(ManuallyDrop::into_inner(context));
            if let Ok(before) = before {
                api.set_context(before).ok();
            }
        };
        if role::may_call_driver() {
            return release();
        }
        // The last handle of the device went in a host function. Without a thread, or with the process
        // ending, the context goes with the process.
        let Some(under_way) = UnderWay::begin() else { return };
        let act = move || {
            release();
            drop(under_way);
        };
        contain::spawn("gpu-await-close", act).ok();
    }
}
