//! The bare driver API, for baselines in the same process and run.

use std::ffi::CString;

use cudarc::driver::sys;

/// A stream and two kernels, without any of this crate.
pub(crate) struct Raw {
    pub(crate) stream: sys::CUstream,
    empty: sys::CUfunction,
    spin: sys::CUfunction,
}

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

impl Raw {
    /// On CUDA device 0, in its primary context.
    pub(crate) fn new() -> Raw {
        let context = cudarc::driver::CudaContext::new(0).expect("a GPU");
        // The context lives as long as the process.
        std::mem::forget(context.clone());
        let function = |ptx: &str, name: &str| {
            let (ptx, name) = (CString::new(ptx).unwrap(), CString::new(name).unwrap());
            let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: a context is current, the strings end with zero, the results are live.
            ok(unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) });
            // SAFETY: likewise, and the module was loaded just now.
            ok(unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) });
            function
        };
        let mut stream = std::ptr::null_mut();
        // SAFETY: a context is current and the result is live.
        unsafe { ok(sys::cuStreamCreate(&raw mut stream, 1)) };
        Raw {
            stream,
            empty: function(include_str!("../../kernels/empty.ptx"), "empty"),
            spin: function(include_str!("../../kernels/spin.ptx"), "spin"),
        }
    }

    pub(crate) fn launch_empty(&self) {
        // SAFETY: the function takes no arguments and the stream lives.
        ok(unsafe {
            let none = std::ptr::null_mut();
            sys::cuLaunchKernel(self.empty, 1, 1, 1, 1, 1, 1, 0, self.stream, none, none)
        });
    }

    pub(crate) fn launch_spin(&self, mut nanoseconds: u64) {
        let mut args = [(&raw mut nanoseconds).cast()];
        // SAFETY: the function takes one 64-bit integer, which is copied by the call.
        ok(unsafe {
            let none = std::ptr::null_mut();
            sys::cuLaunchKernel(
                self.spin,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                self.stream,
                args.as_mut_ptr(),
                none,
            )
        });
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: the stream lives.
        ok(unsafe { sys::cuStreamSynchronize(self.stream) });
    }
}
