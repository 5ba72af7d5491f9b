//! How long the bare driver takes to tell of a fault.

use std::ffi::CString;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, sys};

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Launches the kernel `trap` of `ptx`, and blocks until `cuStreamSynchronize` has told of it.
pub(crate) fn until_synchronize_fails(ptx: &str) -> Duration {
    // Kept to the end of the process: nothing can be destroyed behind a fault.
    let context = Box::leak(Box::new(CudaContext::new(0).expect("a GPU")));
    context.bind_to_thread().expect("the context is alive");
    let (ptx, name) = (CString::new(ptx).unwrap(), c"trap");
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a context is current, the string ends with zero, the result is live.
    ok(unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) });
    // SAFETY: likewise, and the module was loaded just now.
    ok(unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) });
    let mut stream = std::ptr::null_mut();
    // SAFETY: a context is current and the result is live. 1 is `CU_STREAM_NON_BLOCKING`.
    ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
    let none = std::ptr::null_mut();
    let start = Instant::now();
    // SAFETY: the function takes no arguments and the stream lives.
    ok(unsafe { sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, none, none) });
    // SAFETY: the stream lives; a trap is told of with a code that the bindings know.
    let _ = unsafe { sys::cuStreamSynchronize(stream) };
    start.elapsed()
}
