//! Entry points by name, and the texts of errors.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::abi::{Code, Out, code};
use crate::copy_calls::*;
use crate::device_calls::*;
use crate::event_calls::*;
use crate::graph_calls::*;
use crate::kernel_calls::*;
use crate::library_calls::*;
use crate::memory_calls::*;
use crate::module_calls::*;
use crate::partition_calls::*;
use crate::shared_calls::*;
use crate::stream_calls::*;

macro_rules! entry_points {
    ($($name:ident)*) => {
        /// Whether there is a driver function of this name.
        pub(crate) fn is_entry_point(name: &str) -> bool {
            match name {
                $(stringify!($name) => {
                    // It is there.
                    _ = $name;
                    true
                })*
                _ => false,
            }
        }
    };
}

entry_points! {
    cuInit cuDriverGetVersion cuDeviceGet cuDeviceGetCount cuDeviceGetName cuDeviceGetUuid_v2
    cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxGetCurrent
    cuCtxSetCurrent cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxSynchronize
    cuCtxGetStreamPriorityRange cuDeviceCanAccessPeer cuCtxEnablePeerAccess
    cuThreadExchangeStreamCaptureMode cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuMemPoolCreate
    cuMemPoolDestroy cuMemAllocFromPoolAsync cuStreamCreate cuStreamCreateWithPriority
    cuStreamDestroy_v2 cuStreamQuery cuStreamSynchronize cuStreamWaitEvent cuStreamGetPriority
    cuStreamGetFlags cuStreamGetCtx cuStreamWriteValue64_v2 cuLaunchHostFunc cuStreamIsCapturing
    cuStreamBeginCapture_v2 cuStreamEndCapture cuEventCreate cuEventRecord cuEventQuery
    cuEventSynchronize cuEventElapsedTime cuCtxRecordEvent cuEventDestroy_v2 cuIpcGetEventHandle
    cuIpcOpenEventHandle cuMemAlloc_v2 cuMemFree_v2 cuMemAllocAsync cuMemFreeAsync cuMemGetInfo_v2
    cuMemPoolSetAttribute cuMemPoolGetAttribute cuMemPoolTrimTo cuMemPoolSetAccess cuMemHostAlloc
    cuMemHostRegister_v2 cuMemHostUnregister cuMemHostGetDevicePointer_v2 cuPointerGetAttribute
    cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemcpy2DAsync_v2
    cuMemcpyPeerAsync cuMemsetD8Async cuMemsetD16Async cuMemsetD32Async cuMemsetD2D8Async
    cuMemsetD2D32Async cuModuleLoadData cuModuleLoadDataEx cuModuleUnload cuModuleGetFunction
    cuFuncGetAttribute cuFuncGetParamInfo cuFuncSetAttribute
    cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxActiveClusters cuLaunchKernel
    cuLaunchKernelEx cuLaunchCooperativeKernel cuGraphCreate cuGraphAddDependencies_v2
    cuGraphAddKernelNode_v2 cuGraphAddChildGraphNode cuGraphAddEventRecordNode
    cuGraphInstantiateWithFlags cuGraphExecKernelNodeSetParams_v2 cuGraphLaunch cuGraphExecDestroy
    cuGraphDestroy cuLibraryLoadData cuLibraryUnload cuLibraryGetModule cuLibraryGetKernel
    cuKernelGetFunction cuDeviceGetDevResource cuDevSmResourceSplitByCount cuDevResourceGenerateDesc
    cuGreenCtxCreate cuGreenCtxDestroy cuCtxFromGreenCtx cuGreenCtxStreamCreate cuStreamGetCtx_v2
    cuMemGetAllocationGranularity cuMemCreate cuMemExportToShareableHandle
    cuMemImportFromShareableHandle cuMemRelease cuMemAddressReserve cuMemAddressFree cuMemMap
    cuMemUnmap cuMemSetAccess cuGetErrorName cuGetErrorString
}

/// Not written down.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorName(error: Code, name: Out<*const c_char>) -> Code {
    error_text(name, describe(error).map(|(name, _)| name))
}

/// Not written down.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorString(error: Code, text: Out<*const c_char>) -> Code {
    error_text(text, describe(error).map(|(_, text)| text))
}

fn error_text(out: Out<*const c_char>, text: Option<&'static CStr>) -> Code {
    match out.put(text.map_or(std::ptr::null(), CStr::as_ptr)) {
        Ok(()) if text.is_some() => code::SUCCESS,
        _ => code::INVALID_VALUE,
    }
}

fn describe(error: Code) -> Option<(&'static CStr, &'static CStr)> {
    Some(match error {
        code::SUCCESS => (c"CUDA_SUCCESS", c"no error"),
        code::INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        code::OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        code::NOT_INITIALIZED => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        code::INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        code::INVALID_IMAGE => (c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
        code::INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        code::PEER_ACCESS_UNSUPPORTED => (
            c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
            c"peer access is not supported between these two devices",
        ),
        code::INVALID_PTX => (c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
        code::OPERATING_SYSTEM => (
            c"CUDA_ERROR_OPERATING_SYSTEM",
            c"OS call failed or operation not supported on this OS",
        ),
        code::INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        code::NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
        code::NOT_READY => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        code::ILLEGAL_ADDRESS => {
            (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered")
        }
        code::PEER_ACCESS_ALREADY_ENABLED => {
            (c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled")
        }
        code::CONTEXT_IS_DESTROYED => (c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
        917 => (c"CUDA_ERROR_STREAM_DETACHED", c"stream is detached from its context"),
        code::INVALID_RESOURCE_TYPE => {
            (c"CUDA_ERROR_INVALID_RESOURCE_TYPE", c"invalid resource type")
        }
        code::INVALID_RESOURCE_CONFIGURATION => {
            (c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", c"invalid resource configuration")
        }
        code::HOST_MEMORY_ALREADY_REGISTERED => (
            c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            c"part or all of the requested memory range is already mapped",
        ),
        code::HOST_MEMORY_NOT_REGISTERED => (
            c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            c"pointer does not correspond to a registered memory region",
        ),
        code::LAUNCH_FAILED => (c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
        code::COOPERATIVE_LAUNCH_TOO_LARGE => {
            (c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", c"too many blocks in cooperative launch")
        }
        code::NOT_PERMITTED => (c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
        code::NOT_SUPPORTED => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        999 => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
        _ => return None,
    })
}

/// Keeps this library mapped for the life of the process: its workers must not lose their code when
/// a handle is closed.
#[cfg(target_os = "linux")]
pub(crate) fn stay_loaded() {
    use std::sync::Once;

    #[repr(C)]
    struct DlInfo {
        file: *const c_char,
        base: *mut c_void,
        symbol: *const c_char,
        address: *mut c_void,
    }
    unsafe extern "C" {
        fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
        fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    }
    const RTLD_NOW: c_int = 0x2;
    const RTLD_NOLOAD: c_int = 0x4;
    const RTLD_NODELETE: c_int = 0x1000;

    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let null = std::ptr::null();
        let mut info = DlInfo {
            file: null,
            base: null.cast_mut().cast(),
            symbol: null,
            address: null.cast_mut().cast(),
        };
        // SAFETY: the address is any; `info` is a `Dl_info` that may be written.
        let found = unsafe { dladdr(cuInit as *const c_void, &raw mut info) };
        if found != 0 {
            // SAFETY: the name is the loader's own string for this library; NOLOAD opens nothing
            // new. The handle that comes back is kept for ever on purpose.
            unsafe { dlopen(info.file, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE) };
        }
    });
}

/// Elsewhere the library is not unloaded by the tests.
#[cfg(not(target_os = "linux"))]
pub(crate) fn stay_loaded() {}
