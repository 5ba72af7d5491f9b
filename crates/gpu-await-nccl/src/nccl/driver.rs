//! The two calls of NVIDIA's driver that NCCL's callers need: getting a thread's current context, and setting it.
//!
//! NCCL takes its device from the thread's current context, and leaves that as it found it. A thread without a context
//! would get one on GPU 0.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use gpu_await::sibling::once;

use crate::error::{Error, Result};

type Context = *mut c_void;

pub(crate) struct Driver {
    get: unsafe extern "C" fn(*mut Context) -> c_int,
    set: unsafe extern "C" fn(Context) -> c_int,
    _library: libloading::Library,
}

/// A context that is current until this is dropped.
pub(crate) struct Current {
    driver: &'static Driver,
    before: usize,
    restores: bool,
}

impl Driver {
    pub(crate) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        once(&DRIVER, Self::open)
    }

    fn open() -> Result<Driver> {
        // SAFETY: the driver's initializers have no preconditions.
        let library = unsafe { libloading::Library::new("libcuda.so.1") };
        let library = library.map_err(|_| missing("libcuda.so.1"))?;
        // SAFETY: the type is the entry point's in the driver API's documentation.
        let get = *unsafe { library.get(b"cuCtxGetCurrent\0") }
            .map_err(|_| missing("cuCtxGetCurrent"))?;
        // SAFETY: as above.
        let set = *unsafe { library.get(b"cuCtxSetCurrent\0") }
            .map_err(|_| missing("cuCtxSetCurrent"))?;
        Ok(Driver { get, set, _library: library })
    }

    /// Makes a device's context current.
    ///
    /// # Safety
    /// The context is live and stays so until what this returns is dropped, on this thread.
    pub(crate) unsafe fn enter(&'static self, context: u64) -> Result<Current> {
        let mut before: Context = std::ptr::null_mut();
        // SAFETY: the pointer is to a handle that lives.
        let code = unsafe { (self.get)(&raw mut before) };
        check("cuCtxGetCurrent", code)?;
        let restores = before as u64 != context;
        if restores {
            // SAFETY: the caller vouches for the context.
            let code = unsafe { (self.set)(context as Context) };
            check("cuCtxSetCurrent", code)?;
        }
        Ok(Current { driver: self, before: before as usize, restores })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.restores {
            // SAFETY: it was current on this thread, or there was none.
            unsafe { (self.driver.set)(self.before as Context) };
        }
    }
}

fn missing(symbol: &'static str) -> Error {
    Error::MissingSymbol { library: "the CUDA driver", symbol }
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Error::Driver { call, code }) }
}
