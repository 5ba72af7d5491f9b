//! The driver's entry points, with results as plain integers.
//!
//! All are looked up at once, the first time: a driver that lacks one is a typed error before anything runs. Entry points that only newer
//! drivers have are optional, and their users have a fallback. Source: the CUDA driver API's documentation; the versions are those that
//! every driver since 525 has.
//!
//! More than 500 lines: the table of entry points, and the types that they take.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::ops::Deref;
use std::path::Path;
use std::sync::OnceLock;

use super::dev_resource::DevResource;
use super::launch_ex::RawConfig;
use super::node_params::{EdgeData, NodeParams};
use crate::backend::{DriverResult, HostCallback, Place, RowCopy};
use crate::error::{DriverCode, Error, ErrorDetail, Result};
use crate::system;
use crate::system::library;
use crate::thread::process;

/// A driver object.
pub(super) type Handle = *mut c_void;

/// `CUmemAccessDesc`: who may use memory, and how.
#[repr(C)]
pub(super) struct MemAccess {
    location_type: c_int,
    location_id: c_int,
    flags: c_int,
}

impl MemAccess {
    /// Access for `device`: reading, or with `writes` also writing.
    pub(super) fn of(device: c_int, writes: bool) -> Self {
        const DEVICE: c_int = 1;
        const READ: c_int = 1;
        const READ_AND_WRITE: c_int = 3;
        let flags = if writes { READ_AND_WRITE } else { READ };
        MemAccess { location_type: DEVICE, location_id: device, flags }
    }
}

const _: () = {
    use cudarc::driver::sys::CUmemAccessDesc as Theirs;
    assert!(size_of::<MemAccess>() == size_of::<Theirs>());
    assert!(std::mem::offset_of!(MemAccess, flags) == std::mem::offset_of!(Theirs, flags));
};

/// `CUmemPoolProps`.
#[repr(C)]
pub(super) struct MemPoolProps {
    alloc_type: c_int,
    handle_types: c_int,
    location_type: c_int,
    location_id: c_int,
    win32_security_attributes: Handle,
    /// 0: no limit. The driver counts whole chunks, holes included, and would refuse allocations that fit.
    max_bytes: usize,
    reserved: [u8; 56],
}

const _: () = {
    use cudarc::driver::sys::CUmemPoolProps_st as Theirs;
    assert!(size_of::<MemPoolProps>() == size_of::<Theirs>());
    assert!(
        std::mem::offset_of!(MemPoolProps, location_type) == std::mem::offset_of!(Theirs, location)
    );
    assert!(
        std::mem::offset_of!(MemPoolProps, win32_security_attributes)
            == std::mem::offset_of!(Theirs, win32SecurityAttributes)
    );
};

/// `CUmemAllocationProp`.
#[repr(C)]
pub(super) struct AllocationProp {
    alloc_type: c_int,
    handle_types: c_int,
    location_type: c_int,
    location_id: c_int,
    win32_meta_data: Handle,
    flags: [u8; 8],
}

const _: () = {
    use cudarc::driver::sys::CUmemAllocationProp as Theirs;
    assert!(size_of::<AllocationProp>() == size_of::<Theirs>());
    assert!(
        std::mem::offset_of!(AllocationProp, location_type)
            == std::mem::offset_of!(Theirs, location)
    );
    assert!(
        std::mem::offset_of!(AllocationProp, flags) == std::mem::offset_of!(Theirs, allocFlags)
    );
};

impl AllocationProp {
    /// Device memory that has a file descriptor.
    #[cfg(target_os = "linux")]
    pub(super) fn with_descriptor(device: c_int) -> Self {
        const POSIX_FILE_DESCRIPTOR: c_int = 1;
        AllocationProp { handle_types: POSIX_FILE_DESCRIPTOR, ..AllocationProp::of(device) }
    }

    /// Device memory that is not shared with other processes.
    pub(super) fn of(device: c_int) -> Self {
        const PINNED: c_int = 1;
        const DEVICE: c_int = 1;
        AllocationProp {
            alloc_type: PINNED,
            handle_types: 0,
            location_type: DEVICE,
            location_id: device,
            win32_meta_data: std::ptr::null_mut(),
            flags: [0; 8],
        }
    }
}

/// `CUDA_MEMCPY2D`, with its memory type as the integer that it is.
#[repr(C)]
pub(super) struct Memcpy2d {
    src_x_bytes: usize,
    src_y: usize,
    src_type: u32,
    src_host: *const c_void,
    src_device: u64,
    src_array: Handle,
    src_pitch: usize,
    dst_x_bytes: usize,
    dst_y: usize,
    dst_type: u32,
    dst_host: *mut c_void,
    dst_device: u64,
    dst_array: Handle,
    dst_pitch: usize,
    width_bytes: usize,
    height: usize,
}

const _: () = {
    use cudarc::driver::sys::CUDA_MEMCPY2D_st as Theirs;
    assert!(size_of::<Memcpy2d>() == size_of::<Theirs>());
    assert!(std::mem::offset_of!(Memcpy2d, src_pitch) == std::mem::offset_of!(Theirs, srcPitch));
    assert!(std::mem::offset_of!(Memcpy2d, dst_device) == std::mem::offset_of!(Theirs, dstDevice));
    assert!(std::mem::offset_of!(Memcpy2d, height) == std::mem::offset_of!(Theirs, Height));
};

impl From<&RowCopy> for Memcpy2d {
    fn from(copy: &RowCopy) -> Self {
        // CU_MEMORYTYPE_HOST and CU_MEMORYTYPE_DEVICE; the driver ignores the address of the other kind.
        let place = |place| match place {
            Place::Host(ptr) => (1, ptr.0 as *mut c_void, 0),
            Place::Device(ptr) => (2, std::ptr::null_mut(), ptr.0),
        };
        let (src_type, src_host, src_device) = place(copy.from);
        let (dst_type, dst_host, dst_device) = place(copy.to);
        Memcpy2d {
            src_x_bytes: 0,
            src_y: 0,
            src_type,
            src_host,
            src_device,
            src_array: std::ptr::null_mut(),
            src_pitch: copy.from_pitch as usize,
            dst_x_bytes: 0,
            dst_y: 0,
            dst_type,
            dst_host,
            dst_device,
            dst_array: std::ptr::null_mut(),
            dst_pitch: copy.to_pitch as usize,
            width_bytes: copy.row_bytes as usize,
            height: copy.rows as usize,
        }
    }
}

/// `CUipcEventHandle`: passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcHandle(pub(super) [u8; 64]);

/// `CUDA_ERROR_NOT_INITIALIZED`.
const NOT_INITIALIZED: c_int = 3;

/// An entry point of the driver, callable like the function itself.
///
/// In the child of a fork it fails without a call: the child has a copy of the driver's memory but shares its mappings, so that even a query
/// (`cuStreamQuery`) writes to what the parent uses, and the parent's work then never completes (`a_child_makes_no_call`).
pub(super) struct EntryPoint<F> {
    function: UnsafeCell<F>,
    refuses: F,
}

// SAFETY: it is written by `leave_to_the_parent` alone, when the process has one thread.
unsafe impl<F: Sync> Sync for EntryPoint<F> {}

impl<F: Copy> EntryPoint<F> {
    /// # Safety
    /// The process has one thread, which is in no deref.
    unsafe fn leave_to_the_parent(&self) {
        // SAFETY: nobody else is there to read it, by this function's contract.
        unsafe { *self.function.get() = self.refuses };
    }
}

impl<F> Deref for EntryPoint<F> {
    type Target = F;

    #[inline(always)]
    fn deref(&self) -> &F {
        // SAFETY: it is written while no other thread exists, and this one, which was forked in another place, has no reference.
        unsafe { &*self.function.get() }
    }
}

macro_rules! entry_points {
    (
        newer { $($(#[$newer_if:meta])* $newer:ident($($newer_type:ty),*);)+ }
        $($name:ident($($type:ty),*);)+
    ) => {
        /// The entry points that this crate calls.
        #[expect(non_snake_case, reason = "the driver's names")]
        pub(super) struct Api {
            $(pub(super) $name: EntryPoint<unsafe extern "C" fn($($type),*) -> c_int>,)+
            $($(#[$newer_if])* pub(super) $newer: Option<EntryPoint<unsafe extern "C" fn($($newer_type),*) -> c_int>>,)+
            /// The file that it was loaded from.
            file: String,
        }

        impl Api {
            /// The library is never unloaded: the functions point into it.
            fn load(library: &'static libloading::Library) -> Result<Api> {
                Ok(Api {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0");
                        // SAFETY: the type is the entry point's in the driver API's documentation.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($type),*) -> c_int>(symbol)
                        };
                        let found = *found.map_err(|_| ErrorDetail::MissingSymbol { symbol: stringify!($name) })?;
                        unsafe extern "C" fn refused($(_: $type),*) -> c_int { NOT_INITIALIZED }
                        EntryPoint { function: UnsafeCell::new(found), refuses: refused }
                    },)+
                    $($(#[$newer_if])* $newer: {
                        let symbol = concat!(stringify!($newer), "\0");
                        // SAFETY: as above.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($newer_type),*) -> c_int>(symbol)
                        };
                        unsafe extern "C" fn refused($(_: $newer_type),*) -> c_int { NOT_INITIALIZED }
                        found.ok().map(|found| EntryPoint { function: UnsafeCell::new(*found), refuses: refused })
                    },)+
                    file: file_of(library),
                })
            }

            /// # Safety
            /// The process has one thread, which is in no call of the driver.
            unsafe fn leave_to_the_parent(&self) {
                // SAFETY: by this function's contract.
                $(unsafe { self.$name.leave_to_the_parent() };)+
                $($(#[$newer_if])* if let Some(newer) = &self.$newer {
                    // SAFETY: by this function's contract.
                    unsafe { newer.leave_to_the_parent() };
                })+
            }
        }
    };
}

entry_points! {
    newer {
        // From CUDA 12.5 on.
        cuCtxRecordEvent(Handle, Handle);
        // From CUDA 12.4 on.
        cuFuncGetParamInfo(Handle, usize, *mut usize, *mut usize);
        cuDeviceGetDevResource(c_int, *mut DevResource, c_int);
        cuDevSmResourceSplitByCount(
            *mut DevResource, *mut u32, *const DevResource, *mut DevResource, u32, u32
        );
        cuDevResourceGenerateDesc(*mut Handle, *mut DevResource, u32);
        cuGreenCtxCreate(*mut Handle, Handle, c_int, u32);
        cuGreenCtxDestroy(Handle);
        cuCtxFromGreenCtx(*mut Handle, Handle);
        // From CUDA 12.5 on.
        cuGreenCtxStreamCreate(*mut Handle, Handle, u32, c_int);
        // From CUDA 12.6 on.
        cuStreamGetCtx_v2(Handle, *mut Handle, *mut Handle);
        // From CUDA 12.3 on. Without it no node of a graph overlaps with its predecessor.
        cuGraphAddDependencies_v2(Handle, *const Handle, *const Handle, *const EdgeData, usize);
        // Without these, library calls are made again instead of replayed.
        cuGraphGetNodes(Handle, *mut Handle, *mut usize);
        cuGraphNodeGetDependencies(Handle, *mut Handle, *mut usize);
        cuGraphNodeGetType(Handle, *mut c_int);
        cuGraphKernelNodeGetParams_v2(Handle, *mut NodeParams);
        cuGraphKernelNodeGetAttribute(Handle, c_int, *mut c_void);
        // For memory that grows, and memory that several processes share.
        cuMemGetAllocationGranularity(*mut usize, *const AllocationProp, c_int);
        cuMemCreate(*mut u64, usize, *const AllocationProp, u64);
        cuMemAddressReserve(*mut u64, usize, usize, u64, u64);
        cuMemMap(u64, usize, usize, u64, u64);
        cuMemSetAccess(u64, usize, *const MemAccess, usize);
        cuMemUnmap(u64, usize);
        cuMemAddressFree(u64, usize);
        cuMemRelease(u64);
        #[cfg(target_os = "linux")]
        cuDeviceGetUuid_v2(*mut [u8; 16], c_int);
        #[cfg(target_os = "linux")]
        cuMemExportToShareableHandle(*mut c_void, u64, c_int, u64);
        #[cfg(target_os = "linux")]
        cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_int);
    }
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut c_int, c_int);
    cuDevicePrimaryCtxRetain(*mut Handle, c_int);
    cuDevicePrimaryCtxRelease_v2(c_int);
    cuDeviceGetName(*mut c_char, c_int, c_int);
    cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    cuMemPoolCreate(*mut Handle, *const MemPoolProps);
    cuMemPoolDestroy(Handle);
    cuMemPoolSetAttribute(Handle, c_int, *mut c_void);
    cuMemPoolGetAttribute(Handle, c_int, *mut c_void);
    cuMemPoolTrimTo(Handle, usize);
    cuMemPoolSetAccess(Handle, *const MemAccess, usize);
    cuDeviceCanAccessPeer(*mut c_int, c_int, c_int);
    cuCtxEnablePeerAccess(Handle, u32);
    cuCtxGetCurrent(*mut Handle);
    cuCtxSetCurrent(Handle);
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuThreadExchangeStreamCaptureMode(*mut c_int);
    cuStreamCreateWithPriority(*mut Handle, u32, c_int);
    cuStreamDestroy_v2(Handle);
    cuStreamQuery(Handle);
    cuStreamGetPriority(Handle, *mut c_int);
    cuStreamGetFlags(Handle, *mut u32);
    cuStreamGetCtx(Handle, *mut Handle);
    cuStreamWaitEvent(Handle, Handle, u32);
    cuStreamWriteValue64_v2(Handle, u64, u64, u32);
    cuLaunchHostFunc(Handle, HostCallback, *mut c_void);
    cuEventCreate(*mut Handle, u32);
    cuEventDestroy_v2(Handle);
    cuEventRecord(Handle, Handle);
    cuEventQuery(Handle);
    cuEventElapsedTime(*mut f32, Handle, Handle);
    cuIpcGetEventHandle(*mut IpcHandle, Handle);
    cuIpcOpenEventHandle(*mut Handle, IpcHandle);
    cuMemAllocFromPoolAsync(*mut u64, usize, Handle, Handle);
    cuMemFreeAsync(u64, Handle);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemHostRegister_v2(*mut c_void, usize, u32);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut u64, *mut c_void, u32);
    cuPointerGetAttribute(*mut c_void, c_int, u64);
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
    cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
    cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
    cuMemcpy2DAsync_v2(*const Memcpy2d, Handle);
    cuMemcpyPeerAsync(u64, Handle, u64, Handle, usize, Handle);
    cuMemsetD8Async(u64, u8, usize, Handle);
    cuMemsetD16Async(u64, u16, usize, Handle);
    cuMemsetD32Async(u64, u32, usize, Handle);
    cuMemsetD2D8Async(u64, usize, u8, usize, usize, Handle);
    cuLibraryLoadData(
        *mut Handle, *const c_void, *mut c_int, *mut *mut c_void, u32, *mut c_int, *mut *mut c_void, u32
    );
    cuLibraryUnload(Handle);
    cuLibraryGetModule(*mut Handle, Handle);
    cuLibraryGetKernel(*mut Handle, Handle, *const c_char);
    cuKernelGetFunction(*mut Handle, Handle);
    cuFuncGetAttribute(*mut c_int, c_int, Handle);
    cuFuncSetAttribute(Handle, c_int, c_int);
    cuLaunchKernel(
        Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void
    );
    cuLaunchCooperativeKernel(
        Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void
    );
    cuLaunchKernelEx(*const RawConfig, Handle, *mut *mut c_void, *mut *mut c_void);
    cuStreamBeginCapture_v2(Handle, c_int);
    cuStreamEndCapture(Handle, *mut Handle);
    cuGraphCreate(*mut Handle, u32);
    cuGraphAddChildGraphNode(*mut Handle, Handle, *const Handle, usize, Handle);
    cuGraphAddEventRecordNode(*mut Handle, Handle, *const Handle, usize, Handle);
    cuGraphAddKernelNode_v2(*mut Handle, Handle, *const Handle, usize, *const NodeParams);
    cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
    cuGraphExecKernelNodeSetParams_v2(Handle, Handle, *const NodeParams);
    cuGraphLaunch(Handle, Handle);
    cuGraphExecDestroy(Handle);
    cuGraphDestroy(Handle);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, Handle, c_int, usize);
    cuOccupancyMaxActiveClusters(*mut c_int, Handle, *const RawConfig);
}

/// The driver's library.
const NAME: &str = "libcuda.so.1";

/// The error for a driver that does not work. One that finds no GPU counts as no driver.
fn broken(library: String, code: DriverCode) -> Error {
    match code.code {
        100 => ErrorDetail::NoDriver { reason: format!("{library} finds no GPU: {code}") },
        _ => ErrorDetail::BrokenDriver { library, code },
    }
    .into()
}

/// The file that the library was loaded from.
fn file_of(library: &libloading::Library) -> String {
    // SAFETY: the type is the entry point's in the driver API's documentation.
    let symbol = unsafe { library.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit\0") };
    let file = symbol.ok().and_then(|symbol| system::file_of(*symbol as *const c_void));
    file.map_or_else(|| NAME.to_owned(), |file| file.display().to_string())
}

/// The result of a call.
pub(super) fn check(call: &'static str, code: c_int) -> DriverResult<()> {
    if code == 0 { Ok(()) } else { Err(DriverCode { call, code }) }
}

static API: OnceLock<Api> = OnceLock::new();

/// Runs in the child of a fork.
fn leave_to_the_parent() {
    if let Some(api) = API.get() {
        // SAFETY: a child begins with one thread, and runs this before its own code. A call of the driver that forks has copied its pointer.
        unsafe { api.leave_to_the_parent() };
    }
}

impl Api {
    /// The driver, initialized once per process. A failure is not cached: the driver may become ready later.
    pub(super) fn get() -> Result<&'static Api> {
        static LIBRARY: OnceLock<libloading::Library> = OnceLock::new();
        // Never unloaded, even if the driver does not work: its initializers may have left state behind.
        let library = library::once(&LIBRARY, Self::find)?;
        library::once(&API, || {
            // First of all: this is where a stub or an old driver fails.
            Self::initialize(library)?;
            process::in_child(leave_to_the_parent);
            Api::load(library)
        })
    }

    fn find() -> Result<libloading::Library> {
        library::open(Path::new(NAME)).map_err(|why| {
            // The loader's own message, if it names the library.
            let reason = if why.contains(NAME) { why } else { format!("{NAME}: {why}") };
            ErrorDetail::NoDriver { reason }.into()
        })
    }

    fn initialize(library: &libloading::Library) -> Result<()> {
        // SAFETY: the type is the entry point's in the driver API's documentation.
        let init = unsafe { library.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit\0") };
        let init = init.map_err(|_| ErrorDetail::MissingSymbol { symbol: "cuInit" })?;
        // SAFETY: 0 is the only valid flag.
        check("cuInit", unsafe { init(0) }).map_err(|code| broken(file_of(library), code))
    }

    /// The error of a call that opens a device, turned into that of a broken driver where it means that.
    pub(super) fn explained(&self, error: Error) -> Error {
        match error.detail() {
            ErrorDetail::Driver { op: None, code } if code.says_that_the_driver_is_broken() => {
                broken(self.file.clone(), *code)
            }
            _ => error,
        }
    }

    pub(super) fn device_count(&self) -> DriverResult<usize> {
        let mut count = 0;
        // SAFETY: `count` is a live integer.
        check("cuDeviceGetCount", unsafe { (self.cuDeviceGetCount)(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(super) fn device_name(&self, device: c_int) -> DriverResult<String> {
        let mut name = [0_u8; 256];
        // SAFETY: `name` has room for 256 bytes, the last of which stays zero.
        check("cuDeviceGetName", unsafe {
            (self.cuDeviceGetName)(name.as_mut_ptr().cast(), 255, device)
        })?;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    pub(super) fn device_attribute(&self, attribute: c_int, device: c_int) -> DriverResult<c_int> {
        let mut value = 0;
        // SAFETY: `value` is a live integer.
        check("cuDeviceGetAttribute", unsafe {
            (self.cuDeviceGetAttribute)(&raw mut value, attribute, device)
        })?;
        Ok(value)
    }

    /// Makes a memory pool on the device, which keeps `release_threshold_bytes` of freed memory; all of it if `None`. The
    /// default one belongs to the whole process.
    pub(super) fn make_pool(
        &self,
        device: c_int,
        release_threshold_bytes: Option<u64>,
    ) -> DriverResult<Handle> {
        const PINNED: c_int = 1;
        const DEVICE: c_int = 1;
        let props = MemPoolProps {
            alloc_type: PINNED,
            handle_types: 0,
            location_type: DEVICE,
            location_id: device,
            win32_security_attributes: std::ptr::null_mut(),
            max_bytes: 0,
            reserved: [0; 56],
        };
        let mut pool: Handle = std::ptr::null_mut();
        // SAFETY: `pool` is a live handle, and the properties live.
        check("cuMemPoolCreate", unsafe {
            (self.cuMemPoolCreate)(&raw mut pool, &raw const props)
        })?;
        self.set_up_pool(pool, release_threshold_bytes).inspect_err(|_| {
            self.destroy_pool(pool).ok();
        })?;
        Ok(pool)
    }

    /// Destroys a pool's handle.
    pub(super) fn destroy_pool(&self, pool: Handle) -> DriverResult<()> {
        // SAFETY: the pool was made by `make_pool`, and the caller destroys it once. Memory allocated from it
        // stays until it is freed.
        check("cuMemPoolDestroy", unsafe { (self.cuMemPoolDestroy)(pool) })
    }

    /// Lets a pool keep freed memory, so that allocating again is fast, and keeps it from ordering streams by itself: by
    /// default an allocation may reuse memory whose free is still queued on another stream, and then orders its stream
    /// behind that free (seen to deadlock on an H200).
    fn set_up_pool(&self, pool: Handle, release_threshold_bytes: Option<u64>) -> DriverResult<()> {
        const REUSE_ALLOW_INTERNAL_DEPENDENCIES: c_int = 3;
        const RELEASE_THRESHOLD: c_int = 4;
        let mut never: c_int = 0;
        // SAFETY: the attribute's value is an integer, and this one lives.
        check("cuMemPoolSetAttribute", unsafe {
            let value = (&raw mut never).cast();
            (self.cuMemPoolSetAttribute)(pool, REUSE_ALLOW_INTERNAL_DEPENDENCIES, value)
        })?;
        let mut bytes = release_threshold_bytes.unwrap_or(u64::MAX);
        // SAFETY: the attribute's value is a 64-bit integer, and this one lives.
        check("cuMemPoolSetAttribute", unsafe {
            (self.cuMemPoolSetAttribute)(pool, RELEASE_THRESHOLD, (&raw mut bytes).cast())
        })
    }

    /// One of a pool's byte counts.
    pub(super) fn pool_bytes(&self, pool: Handle, attribute: c_int) -> DriverResult<u64> {
        let mut bytes = 0_u64;
        // SAFETY: these attributes' values are 64-bit integers, and this one lives.
        check("cuMemPoolGetAttribute", unsafe {
            (self.cuMemPoolGetAttribute)(pool, attribute, (&raw mut bytes).cast())
        })?;
        Ok(bytes)
    }

    fn device(&self, ordinal: usize) -> DriverResult<c_int> {
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let mut device = 0;
        // SAFETY: `device` is a live integer.
        check("cuDeviceGet", unsafe { (self.cuDeviceGet)(&raw mut device, ordinal) })?;
        Ok(device)
    }

    /// Whether one device can reach another one's memory.
    pub(super) fn can_access_peer(&self, device: usize, peer: usize) -> DriverResult<bool> {
        let (device, peer) = (self.device(device)?, self.device(peer)?);
        let mut can = 0;
        // SAFETY: `can` is a live integer.
        check("cuDeviceCanAccessPeer", unsafe {
            (self.cuDeviceCanAccessPeer)(&raw mut can, device, peer)
        })?;
        Ok(can != 0)
    }

    /// Makes the memory of another device's pool accessible to `device`: peer access between contexts does
    /// not include pools.
    pub(super) fn show_pool(&self, pool: Handle, device: usize) -> DriverResult<()> {
        let access = MemAccess::of(self.device(device)?, true);
        // SAFETY: one description, which lives, for a pool that lives as long as its backend, which the
        // caller has.
        check("cuMemPoolSetAccess", unsafe {
            (self.cuMemPoolSetAccess)(pool, &raw const access, 1)
        })
    }

    /// Retains a device's primary context, and returns the device for [`release`](Self::release).
    pub(super) fn retain(&self, ordinal: usize) -> DriverResult<c_int> {
        let device = self.device(ordinal)?;
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: `context` is a live handle.
        check("cuDevicePrimaryCtxRetain", unsafe {
            (self.cuDevicePrimaryCtxRetain)(&raw mut context, device)
        })?;
        Ok(device)
    }

    /// Releases the context that [`retain`](Self::retain) retained.
    pub(super) fn release(&self, device: c_int) -> DriverResult<()> {
        // SAFETY: the caller retained the device's context once more than it released it.
        check("cuDevicePrimaryCtxRelease", unsafe { (self.cuDevicePrimaryCtxRelease_v2)(device) })
    }

    pub(super) fn current_context(&self) -> DriverResult<usize> {
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: `context` is a live handle.
        check("cuCtxGetCurrent", unsafe { (self.cuCtxGetCurrent)(&raw mut context) })?;
        Ok(context as usize)
    }

    pub(super) fn set_context(&self, context: usize) -> DriverResult<()> {
        // SAFETY: a context that was current, or the device's own, which it retains.
        check("cuCtxSetCurrent", unsafe { (self.cuCtxSetCurrent)(context as Handle) })
    }

    /// Puts the thread's capture mode to RELAXED until the guard is dropped.
    pub(super) fn relax(&self) -> Relaxed<'_> {
        const RELAXED: c_int = 2;
        Relaxed { api: self, before: self.exchange_mode(RELAXED) }
    }

    fn exchange_mode(&self, mode: c_int) -> c_int {
        let mut mode = mode;
        // SAFETY: `mode` is a live integer. The call cannot fail with a valid mode, and if it does
        // `mode` is unchanged, so that the way back changes nothing either.
        let _ = unsafe { (self.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        mode
    }
}

/// The thread's capture mode, to be put back.
pub(super) struct Relaxed<'a> {
    api: &'a Api,
    before: c_int,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        self.api.exchange_mode(self.before);
    }
}
