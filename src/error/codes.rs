//! The names of the driver's error codes.
#![forbid(unsafe_code)]

/// Source: `CUresult` in the CUDA driver API's documentation.
pub(super) const NAMES: &[(i32, &str)] = &[
    (1, "CUDA_ERROR_INVALID_VALUE"),
    (2, "CUDA_ERROR_OUT_OF_MEMORY"),
    (3, "CUDA_ERROR_NOT_INITIALIZED"),
    (4, "CUDA_ERROR_DEINITIALIZED"),
    (34, "CUDA_ERROR_STUB_LIBRARY"),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (100, "CUDA_ERROR_NO_DEVICE"),
    (101, "CUDA_ERROR_INVALID_DEVICE"),
    (200, "CUDA_ERROR_INVALID_IMAGE"),
    (201, "CUDA_ERROR_INVALID_CONTEXT"),
    (209, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE"),
    (218, "CUDA_ERROR_INVALID_PTX"),
    (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
    (226, "CUDA_ERROR_CONTAINED"),
    (300, "CUDA_ERROR_INVALID_SOURCE"),
    (301, "CUDA_ERROR_FILE_NOT_FOUND"),
    (304, "CUDA_ERROR_OPERATING_SYSTEM"),
    (400, "CUDA_ERROR_INVALID_HANDLE"),
    (401, "CUDA_ERROR_ILLEGAL_STATE"),
    (500, "CUDA_ERROR_NOT_FOUND"),
    (600, "CUDA_ERROR_NOT_READY"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT"),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    (710, "CUDA_ERROR_ASSERT"),
    (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    (713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS"),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    (718, "CUDA_ERROR_INVALID_PC"),
    (719, "CUDA_ERROR_LAUNCH_FAILED"),
    (720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"),
    (721, "CUDA_ERROR_TENSOR_MEMORY_LEAK"),
    (800, "CUDA_ERROR_NOT_PERMITTED"),
    (801, "CUDA_ERROR_NOT_SUPPORTED"),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY"),
    (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
    (810, "CUDA_ERROR_MPS_CLIENT_TERMINATED"),
    (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
    (906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
    (907, "CUDA_ERROR_CAPTURED_EVENT"),
    (908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"),
    (911, "CUDA_ERROR_EXTERNAL_DEVICE"),
    (914, "CUDA_ERROR_INVALID_RESOURCE_TYPE"),
    (915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"),
    (917, "CUDA_ERROR_STREAM_DETACHED"),
    (999, "CUDA_ERROR_UNKNOWN"),
];

/// The messages of a driver that exists but does not work, with what to do about it.
const BROKEN: &[(i32, &str)] = &[
    (
        3,
        "the driver is not initialized, as in the child of a fork whose parent has used CUDA; open GPUs in one of the two alone, or \
         start the child with `exec`",
    ),
    (
        34,
        "the file is the CUDA toolkit's stub, which programs are linked with; take its folder off the library path, and install \
         NVIDIA's driver",
    ),
    (
        46,
        "another process has the GPU to itself, or its compute mode prohibits contexts; see `nvidia-smi -q -d COMPUTE`, and end that \
         process or change the mode",
    ),
    (
        101,
        "the GPU cannot be used; see which ones `CUDA_VISIBLE_DEVICES` names and `nvidia-smi -L` lists",
    ),
    (
        802,
        "the GPUs are not ready yet; wait for NVIDIA's fabric manager (`systemctl status nvidia-fabricmanager`), or for the GPUs' ready state \
         under confidential computing, and open the device again",
    ),
    (
        803,
        "the library and the kernel module are of different drivers (`cat /proc/driver/nvidia/version`); reload the module or reboot after an \
         update, and give a container the library of its host",
    ),
    (
        804,
        "the library is one for forward compatibility (`cuda-compat`), which this GPU does not support; take it off the library path, or update \
         the driver",
    ),
    (
        999,
        "the driver does not say why; see that `/dev/nvidia*` and the module `nvidia_uvm` are there and open to this user, and `dmesg` \
         for the GPU's faults",
    ),
];

/// What to do about a driver that returns this code when a GPU is opened, if this crate knows.
pub(super) fn what_now(code: i32) -> Option<&'static str> {
    BROKEN.iter().find(|(known, _)| *known == code).map(|(_, what_now)| *what_now)
}
