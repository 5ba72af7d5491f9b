//! cuFFT: found at run time, its results as plain integers.
//!
//! Source: the cuFFT manual; all entry points exist since 8.0.

use std::ffi::{c_int, c_longlong, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use gpu_await::sibling::{Mutex, Search, once};
use gpu_await::{ErrorDetail, LibraryStatus, Result};

use super::shape::FftShape;
use crate::library_object::{find, open};

const SEARCH: Search = Search {
    variable: "GPU_AWAIT_CUFFT",
    names: &["libcufft.so.12", "libcufft.so.11", "libcufft.so"],
};

/// The entry points.
#[expect(non_snake_case, reason = "the library's names")]
struct FftCalls {
    cufftCreate: unsafe extern "C" fn(*mut c_int) -> c_int,
    cufftDestroy: unsafe extern "C" fn(c_int) -> c_int,
    cufftSetAutoAllocation: unsafe extern "C" fn(c_int, c_int) -> c_int,
    cufftMakePlanMany64: unsafe extern "C" fn(
        c_int,
        c_int,
        *mut c_longlong,
        *mut c_longlong,
        c_longlong,
        c_longlong,
        *mut c_longlong,
        c_longlong,
        c_longlong,
        c_int,
        c_longlong,
        *mut usize,
    ) -> c_int,
    cufftSetStream: unsafe extern "C" fn(c_int, u64) -> c_int,
    cufftSetWorkArea: unsafe extern "C" fn(c_int, u64) -> c_int,
    cufftExecC2C: unsafe extern "C" fn(c_int, u64, u64, c_int) -> c_int,
    cufftExecZ2Z: unsafe extern "C" fn(c_int, u64, u64, c_int) -> c_int,
    cufftExecR2C: unsafe extern "C" fn(c_int, u64, u64) -> c_int,
    cufftExecD2Z: unsafe extern "C" fn(c_int, u64, u64) -> c_int,
    cufftExecC2R: unsafe extern "C" fn(c_int, u64, u64) -> c_int,
    cufftExecZ2D: unsafe extern "C" fn(c_int, u64, u64) -> c_int,
    /// Never unloaded: the functions above point into it.
    _library: libloading::Library,
}

// A stream and an address are passed as the pointers that they are.
const _: () = assert!(size_of::<u64>() == size_of::<*mut c_void>());

impl FftCalls {
    /// The library, looked up once per process.
    fn get() -> Result<&'static FftCalls> {
        static CALLS: OnceLock<FftCalls> = OnceLock::new();
        let install = "the CUDA toolkit's cuFFT, or the package nvidia-cufft";
        once(&CALLS, || find(&SEARCH, ("cuFFT", install), FftCalls::open))
    }

    fn open(path: &Path) -> std::result::Result<FftCalls, String> {
        let library = open(path)?;
        macro_rules! symbol {
            ($name:ident) => {
                // SAFETY: the field's type is the entry point's in the cuFFT manual.
                *unsafe { library.get(concat!(stringify!($name), "\0")) }
                    .map_err(|_| format!("{} has no `{}`", path.display(), stringify!($name)))?
            };
        }
        Ok(FftCalls {
            cufftCreate: symbol!(cufftCreate),
            cufftDestroy: symbol!(cufftDestroy),
            cufftSetAutoAllocation: symbol!(cufftSetAutoAllocation),
            cufftMakePlanMany64: symbol!(cufftMakePlanMany64),
            cufftSetStream: symbol!(cufftSetStream),
            cufftSetWorkArea: symbol!(cufftSetWorkArea),
            cufftExecC2C: symbol!(cufftExecC2C),
            cufftExecZ2Z: symbol!(cufftExecZ2Z),
            cufftExecR2C: symbol!(cufftExecR2C),
            cufftExecD2Z: symbol!(cufftExecD2Z),
            cufftExecC2R: symbol!(cufftExecC2R),
            cufftExecZ2D: symbol!(cufftExecZ2D),
            _library: library,
        })
    }
}

/// Looks for the library.
pub(super) fn load() -> Result<()> {
    FftCalls::get().map(drop)
}

/// A call's status as an error of an operation.
fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let name = match code {
        1 => Some("CUFFT_INVALID_PLAN"),
        2 => Some("CUFFT_ALLOC_FAILED"),
        4 => Some("CUFFT_INVALID_VALUE"),
        5 => Some("CUFFT_INTERNAL_ERROR"),
        6 => Some("CUFFT_EXEC_FAILED"),
        7 => Some("CUFFT_SETUP_FAILED"),
        8 => Some("CUFFT_INVALID_SIZE"),
        11 => Some("CUFFT_INVALID_DEVICE"),
        16 => Some("CUFFT_NOT_SUPPORTED"),
        _ => None,
    };
    let cause = Arc::new(LibraryStatus { call, code, name }).into();
    Err(ErrorDetail::Foreign { op: "fft".into(), cause }.into())
}

macro_rules! fft {
    ($calls:expr, $call:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the plan is live, and pointers are to live values or, as addresses, to declared memory.
        check(stringify!($call), unsafe { ($calls.$call)($($arg),*) })
    };
}

/// A plan of the library, for one kind of transform.
struct PlanHandle {
    calls: &'static FftCalls,
    plan: c_int,
    work_bytes: usize,
}

impl PlanHandle {
    fn new(calls: &'static FftCalls, shape: &FftShape, kind: c_int) -> Result<Self> {
        let mut plan = 0;
        fft!(calls, cufftCreate(&raw mut plan))?;
        let mut made = PlanHandle { calls, plan, work_bytes: 0 };
        fft!(calls, cufftSetAutoAllocation(plan, 0))?;
        let mut extents: Vec<c_longlong> =
            shape.extents.iter().map(|extent| *extent as c_longlong).collect();
        let (rank, batch) = (extents.len() as c_int, shape.batch as c_longlong);
        // Contiguous, where no layouts are given.
        let (none, extents) = (null_mut(), extents.as_mut_ptr());
        let bytes = &raw mut made.work_bytes;
        fft!(
            calls,
            cufftMakePlanMany64(plan, rank, extents, none, 1, 0, none, 1, 0, kind, batch, bytes)
        )?;
        Ok(made)
    }
}

impl Drop for PlanHandle {
    fn drop(&mut self) {
        fft!(self.calls, cufftDestroy(self.plan)).ok();
    }
}

/// The library's plans for both directions.
pub(super) struct CufftPlan {
    forward: PlanHandle,
    /// For real signals; for complex ones the forward plan does both.
    inverse: Option<PlanHandle>,
    is_double: bool,
    /// Held during a launch: stream and work area are the plan's.
    turn: Mutex<()>,
}

impl CufftPlan {
    /// Makes them; the device's context is current.
    pub(super) fn new(shape: &FftShape) -> Result<Self> {
        // `cufftType` for single precision, and the offset to double precision.
        const R2C: c_int = 0x2a;
        const C2R: c_int = 0x2c;
        const C2C: c_int = 0x29;
        const DOUBLE: c_int = 0x40;
        let calls = FftCalls::get()?;
        let of = |kind: c_int| if shape.is_double { kind + DOUBLE } else { kind };
        let (forward, inverse) = match shape.is_real {
            true => (of(R2C), Some(of(C2R))),
            false => (of(C2C), None),
        };
        Ok(CufftPlan {
            forward: PlanHandle::new(calls, shape, forward)?,
            inverse: inverse.map(|kind| PlanHandle::new(calls, shape, kind)).transpose()?,
            is_double: shape.is_double,
            turn: Mutex::new(()),
        })
    }

    pub(super) fn work_bytes(&self) -> usize {
        let inverse = self.inverse.as_ref().map_or(0, |plan| plan.work_bytes);
        self.forward.work_bytes.max(inverse)
    }

    /// Puts a transform on a stream, with the context current.
    pub(super) fn execute(
        &self,
        stream: u64,
        forward: bool,
        [from, to]: [u64; 2],
        work: u64,
    ) -> Result<()> {
        let handle = self.inverse.as_ref().filter(|_| !forward).unwrap_or(&self.forward);
        let (calls, plan) = (handle.calls, handle.plan);
        let direction = if forward { -1 } else { 1 };
        let _turn = self.turn.lock();
        fft!(calls, cufftSetStream(plan, stream))?;
        if handle.work_bytes > 0 {
            fft!(calls, cufftSetWorkArea(plan, work))?;
        }
        match (self.inverse.is_some(), self.is_double, forward) {
            (false, false, _) => fft!(calls, cufftExecC2C(plan, from, to, direction)),
            (false, true, _) => fft!(calls, cufftExecZ2Z(plan, from, to, direction)),
            (true, false, true) => fft!(calls, cufftExecR2C(plan, from, to)),
            (true, true, true) => fft!(calls, cufftExecD2Z(plan, from, to)),
            (true, false, false) => fft!(calls, cufftExecC2R(plan, from, to)),
            (true, true, false) => fft!(calls, cufftExecZ2D(plan, from, to)),
        }
    }
}
