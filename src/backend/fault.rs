//! A backend that wraps another: records its calls, makes them fail, loses the device.
//!
//! It sits between the runtime and a real backend, so tests exercise the runtime that users run. Public as
//! [`testing::faults`](crate::testing::faults).

use std::any::Any;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use gpu_await_protocol::lock::Mutex;

use super::{
    Arguments, Backend, DeviceKind, DevicePtr, DriverResult, EventCalls, EventOptions, Function,
    GraphCalls, GraphEdge, Grid, HostCallback, HostPtr, KernelAttributes, KernelCall, LaunchShape,
    Limits, MemoryAt, MemoryCalls, ModuleCalls, NodeLaunch, PartitionCalls, Pattern, PeerMemory,
    PoolInfo, Query, RangeCalls, RawEvent, RawFunction, RawGraph, RawModule, RawPartition,
    RawStream, RowCopy, StreamCalls, StreamInfo, StreamOptions,
};
#[cfg(target_os = "linux")]
use super::{SharedCalls, SharedMapping};
use crate::error::image::ParamLayout;
use crate::error::{DriverCode, LossCause};
use gpu_await_protocol::grains::GrainSet;

/// A backend that records and fails the calls of another.
pub(crate) struct Wrapper {
    inner: Arc<dyn Backend>,
    control: Arc<Control>,
}

/// The wrapper's state and decisions.
#[derive(Default)]
pub(crate) struct Control {
    log: Mutex<Option<Vec<&'static str>>>,
    faults: Mutex<Vec<Fault>>,
    lost: OnceLock<String>,
    unreachable: AtomicBool,
}

struct Fault {
    call: &'static str,
    /// Calls until this one fails; 1 is the next.
    countdown: u64,
    code: i32,
    after_effect: bool,
}

impl Control {
    /// Starts a fresh record of calls.
    pub(crate) fn record(&self) {
        *self.log.lock() = Some(Vec::new());
    }

    /// The calls since [`record`](Self::record).
    pub(crate) fn calls(&self) -> Vec<&'static str> {
        self.log.lock().clone().unwrap_or_default()
    }

    pub(crate) fn fail(&self, call: &'static str, nth: u64, code: i32, after_effect: bool) {
        self.faults.lock().push(Fault { call, countdown: nth.max(1), code, after_effect });
    }

    /// Makes peer access to every other device fail.
    pub(crate) fn refuse_peers(&self) {
        // ORDERING: Relaxed, see `enable_peer`.
        self.unreachable.store(true, Ordering::Relaxed);
    }

    pub(crate) fn lose(&self, what: &str) {
        // The first cause is kept.
        self.lost.get_or_init(|| what.to_owned());
    }

    /// Enters a call; `Some` if it is to fail, with whether it takes effect first.
    fn enter(&self, call: &'static str) -> Option<(DriverCode, bool)> {
        if let Some(log) = &mut *self.log.lock() {
            log.push(call);
        }
        if self.lost.get().is_some() {
            return Some((DriverCode { call, code: 719 }, false));
        }
        let mut faults = self.faults.lock();
        let mut hit = None;
        faults.retain_mut(|fault| {
            if fault.call != call {
                return true;
            }
            fault.countdown -= 1;
            if fault.countdown == 0 && hit.is_none() {
                hit = Some((DriverCode { call, code: fault.code }, fault.after_effect));
            }
            fault.countdown > 0
        });
        hit
    }
}

impl Wrapper {
    pub(crate) fn new(inner: Arc<dyn Backend>, control: Arc<Control>) -> Self {
        Wrapper { inner, control }
    }

    fn call<R>(
        &self,
        name: &'static str,
        inner: impl FnOnce(&dyn Backend) -> DriverResult<R>,
    ) -> DriverResult<R> {
        match self.control.enter(name) {
            None => inner(&*self.inner),
            Some((code, false)) => Err(code),
            Some((code, true)) => inner(&*self.inner).and(Err(code)),
        }
    }
}

macro_rules! watched {
    ($($(#[$unsafe:ident])? fn $name:ident(&self $(, $arg:ident: $type:ty)*) -> $result:ty;)+) => {
        $(watched! { @one [$($unsafe)?] $name ($($arg: $type),*) $result })+
    };
    (@one [contract] $name:ident ($($arg:ident: $type:ty),*) $result:ty) => {
        unsafe fn $name(&self, $($arg: $type),*) -> $result {
            // SAFETY: the caller keeps the trait's contract, which is the inner backend's.
            self.call(stringify!($name), |inner| unsafe { inner.$name($($arg),*) })
        }
    };
    (@one [] $name:ident ($($arg:ident: $type:ty),*) $result:ty) => {
        fn $name(&self, $($arg: $type),*) -> $result {
            self.call(stringify!($name), |inner| inner.$name($($arg),*))
        }
    };
}

impl Backend for Wrapper {
    fn kind(&self) -> DeviceKind {
        self.inner.kind()
    }

    fn ordinal(&self) -> usize {
        self.inner.ordinal()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn loss_cause(&self, code: DriverCode) -> LossCause {
        match self.control.lost.get() {
            Some(what) => LossCause::Injected(what.clone()),
            None => self.inner.loss_cause(code),
        }
    }

    fn ready_thread(&self) {
        self.inner.ready_thread();
    }

    fn abandon(&self) {
        self.inner.abandon();
    }

    fn step(&self, choose: usize) -> bool {
        self.inner.step(choose)
    }

    fn context(&self) -> u64 {
        self.inner.context()
    }

    fn pool(&self) -> u64 {
        self.inner.pool()
    }

    fn enable_peer(&self, other: &dyn Backend) -> DriverResult<bool> {
        let reached = self.call("enable_peer", |inner| inner.enable_peer(other))?;
        // ORDERING: Relaxed: set by the test before it uses the device.
        Ok(reached && !self.control.unreachable.load(Ordering::Relaxed))
    }

    fn begin_peer_access(&self) -> Option<Weak<dyn PeerMemory>> {
        self.inner.begin_peer_access()
    }

    fn cudarc_context(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.inner.cudarc_context()
    }
}

impl StreamCalls for Wrapper {
    watched! {
        fn stream_create(&self, options: StreamOptions) -> DriverResult<RawStream>;
        #[contract] fn stream_destroy(&self, stream: RawStream) -> DriverResult<()>;
        #[contract] fn stream_info(&self, stream: RawStream) -> DriverResult<StreamInfo>;
        #[contract] fn stream_query(&self, stream: RawStream) -> DriverResult<Query>;
        #[contract] fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult<()>;
        #[contract] fn write_word(&self, stream: RawStream, word: DevicePtr, value: u64) -> DriverResult<()>;
        #[contract] fn host_fn(&self, stream: RawStream, callback: HostCallback, data: *mut c_void) -> DriverResult<()>;
        #[contract] fn foreign(&self, stream: RawStream, code: &mut dyn FnMut()) -> DriverResult<()>;
    }
}

impl GraphCalls for Wrapper {
    watched! {
        #[contract] fn graph_capture(&self, stream: RawStream, code: &mut dyn FnMut()) -> DriverResult<RawGraph>;
        #[contract] fn graph_compile(&self, nodes: &[NodeLaunch<'_>], edges: &[GraphEdge], partition: Option<RawPartition>) -> DriverResult<RawGraph>;
        #[contract] fn graph_set(&self, graph: &RawGraph, changes: &mut dyn Iterator<Item = (usize, NodeLaunch<'_>)>, partition: Option<RawPartition>) -> DriverResult<()>;
        #[contract] fn graph_launch(&self, graph: &RawGraph, stream: RawStream) -> DriverResult<()>;
        #[contract] fn graph_destroy(&self, graph: &RawGraph) -> DriverResult<()>;
        #[contract] fn graph_kernels(&self, graph: &RawGraph) -> DriverResult<Option<Vec<KernelCall>>>;
        #[contract] fn launch_call(&self, call: &KernelCall, stream: RawStream) -> DriverResult<()>;
    }
}

impl PartitionCalls for Wrapper {
    watched! {
        fn grains(&self) -> DriverResult<Vec<u32>>;
        fn partition_create(&self, grains: GrainSet) -> DriverResult<RawPartition>;
        #[contract] fn partition_destroy(&self, partition: RawPartition) -> DriverResult<()>;
    }
}

impl RangeCalls for Wrapper {
    watched! {
        fn range_granularity(&self) -> DriverResult<u64>;
        fn range_reserve(&self, bytes: u64) -> DriverResult<DevicePtr>;
        #[contract] fn range_commit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()>;
        #[contract] fn range_decommit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()>;
        #[contract] fn range_free(&self, at: DevicePtr, bytes: u64) -> DriverResult<()>;
    }
}

#[cfg(target_os = "linux")]
impl SharedCalls for Wrapper {
    watched! {
        fn uuid(&self) -> DriverResult<[u8; 16]>;
        fn shared_granularity(&self) -> DriverResult<u64>;
        fn shared_create(&self, bytes: u64) -> DriverResult<(SharedMapping, i32)>;
        fn shared_import(&self, descriptor: i32, bytes: u64, writes: bool) -> DriverResult<SharedMapping>;
        #[contract] fn shared_protect(&self, mapping: &SharedMapping, descriptor: i32) -> DriverResult<()>;
        #[contract] fn shared_unmap(&self, mapping: &SharedMapping) -> DriverResult<()>;
    }
}

impl EventCalls for Wrapper {
    watched! {
        fn event_create(&self, options: EventOptions) -> DriverResult<RawEvent>;
        #[contract] fn event_export(&self, event: RawEvent) -> DriverResult<[u8; 64]>;
        #[contract] fn event_import(&self, handle: &[u8; 64]) -> DriverResult<RawEvent>;
        #[contract] fn event_destroy(&self, event: RawEvent) -> DriverResult<()>;
        #[contract] fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()>;
        #[contract] fn event_record_all(&self, event: RawEvent) -> DriverResult<()>;
        #[contract] fn event_query(&self, event: RawEvent) -> DriverResult<Query>;
        #[contract] fn event_elapsed_ms(&self, start: RawEvent, end: RawEvent) -> DriverResult<f32>;
    }
}

impl MemoryCalls for Wrapper {
    unsafe fn adopt(&self, ptr: DevicePtr, bytes: u64) {
        // SAFETY: the caller keeps the trait's contract, which is the inner backend's.
        unsafe { self.inner.adopt(ptr, bytes) }
    }

    unsafe fn disown(&self, ptr: DevicePtr, bytes: u64) {
        // SAFETY: as above.
        unsafe { self.inner.disown(ptr, bytes) }
    }

    fn bury(&self, value: Box<dyn Any + Send>) -> Option<Box<dyn Any + Send>> {
        self.inner.bury(value)
    }

    watched! {
        #[contract] fn alloc(&self, stream: RawStream, bytes: u64) -> DriverResult<DevicePtr>;
        #[contract] fn free(&self, stream: RawStream, ptr: DevicePtr) -> DriverResult<()>;
        fn memory_info(&self) -> DriverResult<(u64, u64)>;
        fn pool_info(&self) -> DriverResult<PoolInfo>;
        fn pool_trim(&self, keep_bytes: u64) -> DriverResult<()>;
        fn memory_at(&self, ptr: DevicePtr) -> DriverResult<MemoryAt>;
        #[contract] fn register(&self, ptr: HostPtr, bytes: usize) -> DriverResult<DevicePtr>;
        #[contract] fn unregister(&self, ptr: HostPtr) -> DriverResult<()>;
        #[contract] fn copy_to_device(&self, stream: RawStream, dst: DevicePtr, src: HostPtr, bytes: u64) -> DriverResult<()>;
        #[contract] fn copy_to_host(&self, stream: RawStream, dst: HostPtr, src: DevicePtr, bytes: u64) -> DriverResult<()>;
        #[contract] fn copy_on_device(&self, stream: RawStream, dst: DevicePtr, src: DevicePtr, bytes: u64) -> DriverResult<()>;
        #[contract] fn copy_rows(&self, stream: RawStream, copy: &RowCopy) -> DriverResult<()>;
        #[contract] fn copy_from_peer(&self, stream: RawStream, dst: DevicePtr, src: DevicePtr, src_context: u64, bytes: u64) -> DriverResult<()>;
        #[contract] fn fill(&self, stream: RawStream, dst: DevicePtr, pattern: Pattern, count: u64) -> DriverResult<()>;
    }
}

impl ModuleCalls for Wrapper {
    watched! {
        #[contract] fn launch(&self, stream: RawStream, function: &Function, shape: &LaunchShape, args: Arguments<'_>) -> DriverResult<()>;
        fn load(&self, image: &[u8], log: &mut String) -> DriverResult<RawModule>;
        #[contract] fn unload(&self, module: RawModule) -> DriverResult<()>;
        #[contract] fn function(&self, module: RawModule, name: &str) -> DriverResult<RawFunction>;
        #[contract] fn function_attributes(&self, function: RawFunction) -> DriverResult<KernelAttributes>;
        #[contract] fn function_parameters(&self, function: RawFunction) -> DriverResult<Option<Vec<ParamLayout>>>;
        #[contract] fn allow_shared_mem(&self, function: RawFunction, bytes: u32) -> DriverResult<()>;
        #[contract] fn active_blocks(&self, function: RawFunction, threads: u32, shared: u32) -> DriverResult<u32>;
        #[contract] fn active_clusters(&self, function: RawFunction, grid: &Grid, stream: Option<RawStream>) -> DriverResult<u32>;
    }
}
