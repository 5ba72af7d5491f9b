//! NVIDIA GPUs, through the CUDA driver.
//!
//! `cudarc` opens the device and owns its context; its types are also those of interop. Every call that can run on a hot path or after a
//! fault goes through [`api`], which resolves the driver's entry points itself and takes their results as plain integers: a code newer than
//! the bindings must not become a Rust enum.
//!
//! | calls | need a current context | are bracketed RELAXED |
//! |---|---|---|
//! | launch, copy, memset, record, wait, host function, word | only on the legacy default stream, which is the context's | no |
//! | event and stream query, elapsed time | no | yes |
//! | allocate, free, record everything | yes | yes |
//! | create, register, map, load, query or change a function | yes | yes |
//!
//! On an H200 (driver 580), these calls broke another thread's GLOBAL capture when made outside a bracket: queries, synchronization,
//! stream-ordered allocation, registering memory, and querying or trimming the pool.
//!
//! Loading, unloading and unregistering also wait for everything that runs on the GPU: see [`standstill`].
//!
//! The calling thread's current context is restored before a call returns.
//!
//! The calls are in the files below, one per kind of object.

mod api;
mod dev_resource;
mod event;
mod exclusive;
mod graph;
mod kernel_chain;
mod launch_ex;
mod memory;
mod module;
mod node_params;
pub(crate) mod nvrtc;
mod partition;
mod range;
#[cfg(target_os = "linux")]
mod shared;
pub(crate) mod standstill;
mod stream;

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use api::{Api, Handle};
use cudarc::driver::CudaContext;
use gpu_await_protocol::sync::Mutex;

use super::{Backend, DeviceKind, DriverResult, Limits, NOT_READY, Query, RawEvent, RawStream};
use crate::error::{DriverCode, ErrorDetail, Result};
use crate::thread::exit::ExitGuard;
use crate::thread::process::Process;
use crate::thread::{role, worker};

/// A flag of `cuStreamCreate`.
const NON_BLOCKING: u32 = 1;

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
    /// The only process in which the driver works.
    process: Process,
    ordinal: usize,
    name: String,
    limits: Limits,
    /// The log buffers of modules, by handle: the driver may write to them again when it compiles a module's PTX for another context.
    logs: Mutex<HashMap<u64, Vec<u8>>>,
    /// The grains that partitions are made of, once the device has been divided.
    grains: OnceLock<Vec<dev_resource::DevResource>>,
}

/// The number of GPUs that the driver sees; 0 without a driver.
///
/// Queried once: it does not change during the life of the process, and a host function must not query it.
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
    /// No driver, no such GPU, a driver that is too old or broken.
    pub(crate) fn open(ordinal: usize, release_threshold_bytes: Option<u64>) -> Result<Self> {
        let api = Api::get()?;
        Self::open_with(api, ordinal, release_threshold_bytes).map_err(|error| api.explained(error))
    }

    fn open_with(
        api: &'static Api,
        ordinal: usize,
        release_threshold_bytes: Option<u64>,
    ) -> Result<Self> {
        let count = count(api)?;
        if ordinal >= count {
            return Err(ErrorDetail::NoSuchDevice { ordinal, count }.into());
        }
        let _relaxed = api.relax();
        // Opening makes the context current: restore the thread's context afterwards.
        let before = api.current_context()?;
        // Retained here first: a failure is then an integer, not an enum that may lack the code.
        let device = api.retain(ordinal)?;
        let context = CudaContext::new(ordinal)
            .map_err(|error| DriverCode { call: "cuDevicePrimaryCtxRetain", code: error.0 as i32 });
        let read = |context| Self::read(api, context, ordinal, release_threshold_bytes);
        let opened = context.map_err(Into::into).and_then(read);
        // Both are done, even if one fails.
        let (released, restored) = (api.release(device), api.set_context(before));
        released?;
        restored?;
        opened
    }

    /// Opens the GPU of the caller's context, and makes a memory pool on it.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn over(
        context: Arc<CudaContext>,
        release_threshold_bytes: Option<u64>,
    ) -> Result<Self> {
        let api = Api::get()?;
        let _relaxed = api.relax();
        let before = api.current_context()?;
        api.set_context(context.cu_ctx() as usize)?;
        let ordinal = context.ordinal();
        let opened = Self::read(api, context, ordinal, release_threshold_bytes);
        api.set_context(before)?;
        opened
    }

    /// Reads the device's properties; its context is current.
    fn read(
        api: &'static Api,
        context: Arc<CudaContext>,
        ordinal: usize,
        release_threshold_bytes: Option<u64>,
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
            // Drivers without this attribute return an error.
            interprocess_events: attribute(125).is_ok_and(|supported| supported != 0),
        };
        let pools = attribute(115)? != 0;
        if !pools {
            let what = "opening a GPU";
            let requirement = "memory pools (CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED), as most GPUs have, and many profiles of vGPU \
                               have not: pass the whole GPU through, or use a profile with unified memory";
            let device = format!("cuda:{ordinal} ({})", api.device_name(device)?);
            return Err(ErrorDetail::Requires { what, requirement, device }.into());
        }
        let raw_context = context.cu_ctx() as usize;
        let name = api.device_name(device)?;
        // Last: nothing below it can fail.
        let pool = api.make_pool(device, release_threshold_bytes)? as usize;
        let (context, abandoned) = (Some(context), AtomicBool::new(false));
        let process = Process::this();
        Ok(CudaBackend {
            api,
            context,
            raw_context,
            pool,
            abandoned,
            process,
            ordinal,
            name,
            limits,
            logs: Mutex::default(),
            grains: OnceLock::new(),
        })
    }

    /// The driver's handle of the device.
    fn device(&self) -> DriverResult<c_int> {
        let ordinal = c_int::try_from(self.ordinal).unwrap_or(c_int::MAX);
        let mut device = 0;
        driver!(self.cuDeviceGet(&raw mut device, ordinal))?;
        Ok(device)
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

    /// For calls on a stream: like [`bind`](Self::bind), but only for the default streams, which depend on the current context.
    fn bind_for(&self, stream: RawStream) -> DriverResult<Option<Bound>> {
        exclusive::give_way();
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
        $crate::backend::cuda::api::check(stringify!($call), unsafe { ($self.api.$call)($($arg),*) })
    };
}
use driver;

/// [`driver`] for a call that older drivers lack.
macro_rules! newer {
    ($self:ident.$call:ident($($arg:expr),* $(,)?)) => {
        match &$self.api.$call {
            Some(call) => {
                // SAFETY: the callers of `Backend` keep its contract: live handles, live memory.
                $crate::backend::cuda::api::check(stringify!($call), unsafe { call($($arg),*) })
            }
            None => Err($crate::error::DriverCode {
                call: stringify!($call),
                code: $crate::backend::cuda::NOT_SUPPORTED,
            }),
        }
    };
}
use newer;

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

    fn ready_thread(&self) {
        // If this fails, the code finds no context, as on any other thread.
        self.api.set_context(self.raw_context).ok();
        // Never restored: the thread is the crate's.
        std::mem::forget(self.api.relax());
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
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let Some(context) = self.context.take() else { return };
        // The process does not exit before the drop has finished, on whichever thread it runs.
        // ORDERING: Relaxed, see `abandon`.
        let is_gone = self.abandoned.load(Ordering::Relaxed) || self.process != Process::this();
        let Some(in_driver) = ExitGuard::in_driver().filter(|_| !is_gone) else {
            // No driver call after `main`, on a device that faulted, or in the child of a fork: the context goes with the process.
            std::mem::forget(context);
            return;
        };
        let (api, context, pool) = (self.api, ManuallyDrop::new(context), self.pool);
        let raw_context = self.raw_context;
        let release = move || {
            let _relaxed = api.relax();
            // Releasing it makes it current first: restore the thread's context afterwards.
            let before = api.current_context();
            if api.set_context(raw_context).is_ok() {
                // Memory that is still allocated is freed when its free runs. If this call fails, the pool goes with the process.
                api.destroy_pool(pool as Handle).ok();
            }
            drop(ManuallyDrop::into_inner(context));
            // This context may be destroyed by now; if it was current before, it stays current.
            if let Ok(before) = before
                && before != raw_context
            {
                api.set_context(before).ok();
            }
            drop(in_driver);
        };
        if role::may_call_driver() {
            return release();
        }
        // The last handle of the device was dropped in a host function. If no thread can be started, or the process is
        // exiting, the context goes with the process.
        worker::last_act(release);
    }
}
