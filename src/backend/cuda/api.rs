//! The driver's entry points, as plain integers.
//!
//! Looked up once, all at once: a driver that lacks one is a typed error before anything runs.
//! Source: the CUDA driver API's documentation; versions are those that every driver since 525 has.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::backend::{Call, HostCallback};
use crate::error::{DriverCode, Error, ErrorDetail, Result};

/// A driver object.
pub(super) type Handle = *mut c_void;

macro_rules! entry_points {
    ($($name:ident($($type:ty),*);)+) => {
        /// The entry points that this crate calls.
        #[expect(non_snake_case, reason = "the driver's names")]
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> c_int,)+
            /// Never unloaded: the functions above point into it.
            _library: libloading::Library,
        }

        impl Api {
            fn load(library: libloading::Library) -> Result<Api> {
                Ok(Api {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0");
                        // SAFETY: the type is the entry point's in the driver API's documentation.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($type),*) -> c_int>(symbol)
                        };
                        *found.map_err(|_| ErrorDetail::MissingSymbol { symbol: stringify!($name) })?
                    },)+
                    _library: library,
                })
            }
        }
    };
}

entry_points! {
    cuInit(u32);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut c_int, c_int);
    cuDevicePrimaryCtxRetain(*mut Handle, c_int);
    cuDevicePrimaryCtxRelease_v2(c_int);
    cuDeviceGetName(*mut c_char, c_int, c_int);
    cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    cuDeviceGetDefaultMemPool(*mut Handle, c_int);
    cuMemPoolSetAttribute(Handle, c_int, *mut c_void);
    cuCtxGetCurrent(*mut Handle);
    cuCtxSetCurrent(Handle);
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuThreadExchangeStreamCaptureMode(*mut c_int);
    cuStreamCreateWithPriority(*mut Handle, u32, c_int);
    cuStreamDestroy_v2(Handle);
    cuStreamQuery(Handle);
    cuStreamWaitEvent(Handle, Handle, u32);
    cuStreamWriteValue64_v2(Handle, u64, u64, u32);
    cuLaunchHostFunc(Handle, HostCallback, *mut c_void);
    cuEventCreate(*mut Handle, u32);
    cuEventDestroy_v2(Handle);
    cuEventRecord(Handle, Handle);
    cuEventQuery(Handle);
    cuEventElapsedTime(*mut f32, Handle, Handle);
    cuMemAllocAsync(*mut u64, usize, Handle);
    cuMemFreeAsync(u64, Handle);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemHostRegister_v2(*mut c_void, usize, u32);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut u64, *mut c_void, u32);
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
    cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
    cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
    cuMemcpyPeerAsync(u64, Handle, u64, Handle, usize, Handle);
    cuMemsetD8Async(u64, u8, usize, Handle);
    cuMemsetD16Async(u64, u16, usize, Handle);
    cuMemsetD32Async(u64, u32, usize, Handle);
    cuMemsetD2D8Async(u64, usize, u8, usize, usize, Handle);
    cuMemsetD2D32Async(u64, usize, u32, usize, usize, Handle);
    cuModuleLoadDataEx(*mut Handle, *const c_void, u32, *mut c_int, *mut *mut c_void);
    cuModuleUnload(Handle);
    cuModuleGetFunction(*mut Handle, Handle, *const c_char);
    cuFuncGetAttribute(*mut c_int, c_int, Handle);
    cuFuncSetAttribute(Handle, c_int, c_int);
    cuLaunchKernel(
        Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void
    );
    cuLaunchCooperativeKernel(
        Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void
    );
}

/// The result of a call.
pub(super) fn check(call: &'static str, code: c_int) -> Call<()> {
    if code == 0 { Ok(()) } else { Err(DriverCode { call, code }) }
}

impl Api {
    /// The driver, initialized; looked for once in the life of the process.
    pub(super) fn get() -> Result<&'static Api> {
        static API: OnceLock<Result<Api, Error>> = OnceLock::new();
        API.get_or_init(Self::find).as_ref().map_err(Error::clone)
    }

    fn find() -> Result<Api> {
        let name = "libcuda.so.1";
        // SAFETY: the driver's library runs only its own initializers.
        let library = unsafe { libloading::Library::new(name) };
        let library = library.map_err(|error| {
            // The loader's own words, where it has any.
            let why =
                std::error::Error::source(&error).map_or(error.to_string(), |s| s.to_string());
            let reason = if why.contains(name) { why } else { format!("{name}: {why}") };
            ErrorDetail::NoDriver { reason }
        })?;
        let api = Api::load(library)?;
        // SAFETY: 0 is the only flag that there is.
        check("cuInit", unsafe { (api.cuInit)(0) }).map_err(|code| match code.code {
            // A driver without a GPU is no driver to us.
            100 => Error::from(ErrorDetail::NoDriver { reason: code.to_string() }),
            _ => code.into(),
        })?;
        Ok(api)
    }

    pub(super) fn device_count(&self) -> Call<usize> {
        let mut count = 0;
        // SAFETY: `count` is a live integer.
        check("cuDeviceGetCount", unsafe { (self.cuDeviceGetCount)(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(super) fn device_name(&self, device: c_int) -> Call<String> {
        let mut name = [0_u8; 256];
        // SAFETY: `name` has room for 256 bytes, the last of which stays zero.
        check("cuDeviceGetName", unsafe {
            (self.cuDeviceGetName)(name.as_mut_ptr().cast(), 255, device)
        })?;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    pub(super) fn device_attribute(&self, attribute: c_int, device: c_int) -> Call<c_int> {
        let mut value = 0;
        // SAFETY: `value` is a live integer.
        check("cuDeviceGetAttribute", unsafe {
            (self.cuDeviceGetAttribute)(&raw mut value, attribute, device)
        })?;
        Ok(value)
    }

    /// Lets the device's pool keep what is freed, so that allocating again is quick, and keeps it
    /// from making a stream wait: by default an allocation may take memory whose free is still
    /// queued on another stream, and orders its stream behind that (seen to dead-lock on an H200).
    pub(super) fn set_up_pool(&self, device: c_int) -> Call<()> {
        const REUSE_ALLOW_INTERNAL_DEPENDENCIES: c_int = 3;
        const RELEASE_THRESHOLD: c_int = 4;
        let mut pool: Handle = std::ptr::null_mut();
        // SAFETY: `pool` is a live handle.
        check("cuDeviceGetDefaultMemPool", unsafe {
            (self.cuDeviceGetDefaultMemPool)(&raw mut pool, device)
        })?;
        let mut never: c_int = 0;
        let mut threshold = u64::MAX;
        // SAFETY: the attribute's value is an integer, and this one lives.
        check("cuMemPoolSetAttribute", unsafe {
            let value = (&raw mut never).cast();
            (self.cuMemPoolSetAttribute)(pool, REUSE_ALLOW_INTERNAL_DEPENDENCIES, value)
        })?;
        // SAFETY: the attribute's value is a 64-bit integer, and this one lives.
        check("cuMemPoolSetAttribute", unsafe {
            (self.cuMemPoolSetAttribute)(pool, RELEASE_THRESHOLD, (&raw mut threshold).cast())
        })
    }

    /// Retains a device's primary context, and returns the device for [`release`](Self::release).
    pub(super) fn retain(&self, ordinal: usize) -> Call<c_int> {
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let mut device = 0;
        // SAFETY: `device` is a live integer.
        check("cuDeviceGet", unsafe { (self.cuDeviceGet)(&raw mut device, ordinal) })?;
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: `context` is a live handle.
        check("cuDevicePrimaryCtxRetain", unsafe {
            (self.cuDevicePrimaryCtxRetain)(&raw mut context, device)
        })?;
        Ok(device)
    }

    /// Gives up what [`retain`](Self::retain) retained.
    pub(super) fn release(&self, device: c_int) -> Call<()> {
        // SAFETY: the caller retained the device's context once more than it released it.
        check("cuDevicePrimaryCtxRelease", unsafe { (self.cuDevicePrimaryCtxRelease_v2)(device) })
    }

    pub(super) fn current_context(&self) -> Call<usize> {
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: `context` is a live handle.
        check("cuCtxGetCurrent", unsafe { (self.cuCtxGetCurrent)(&raw mut context) })?;
        Ok(context as usize)
    }

    pub(super) fn set_context(&self, context: usize) -> Call<()> {
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
