//! Entry points by name.

use std::ffi::c_char;

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
    cuModuleLoadData  cuModuleUnload cuModuleGetFunction
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
    cuMemUnmap cuMemSetAccess cuGetErrorString
}

/// Not written down. `cudarc` prints it behind the name of the number.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorString(_error: Code, text: Out<*const c_char>) -> Code {
    text.put(c"an error of the stand-in driver".as_ptr()).err().unwrap_or(code::SUCCESS)
}
