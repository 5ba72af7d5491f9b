//! cuBLASLt: found at run time, its results as plain integers.
//!
//! cuBLASLt is column-major, and a row-major matrix is the transpose of a column-major one. So the transposed product is computed, `c' = b'
//! * a'`, with the operands exchanged.
//!
//! Source: the cuBLAS manual; all entry points exist since 11.0.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Arc, Once, OnceLock};

use gpu_await::bytemuck;
use gpu_await::bytemuck::Pod;
use gpu_await::sibling::{Mutex, Search, once, partition_of, register_again};
use gpu_await::{Error, ErrorDetail, LibraryStatus, RawQueue, Result};

use super::element::Kind;
use super::known_calls::{CallKey, KnownCalls};
use super::shape::{ALIGNMENT, Activation, Matrices, Shape};
use crate::library_object::{LibraryObject, find, open};

const SEARCH: Search = Search {
    variable: "GPU_AWAIT_CUBLASLT",
    names: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
};

type Handle = *mut c_void;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heuristic {
    algo: [u64; 8],
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = {
    // A stream and an address are passed as the pointers that they are.
    assert!(size_of::<u64>() == size_of::<Handle>());
    assert!(size_of::<Heuristic>() == 96);
};

/// The entry points.
#[expect(non_snake_case, reason = "the library's names")]
struct LtCalls {
    cublasLtCreate: unsafe extern "C" fn(*mut Handle) -> c_int,
    cublasLtDestroy: unsafe extern "C" fn(Handle) -> c_int,
    cublasLtMatmulDescCreate: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> c_int,
    cublasLtMatmulDescDestroy: unsafe extern "C" fn(Handle) -> c_int,
    cublasLtMatmulDescSetAttribute:
        unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int,
    cublasLtMatrixLayoutCreate: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> c_int,
    cublasLtMatrixLayoutDestroy: unsafe extern "C" fn(Handle) -> c_int,
    cublasLtMatrixLayoutSetAttribute:
        unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int,
    cublasLtMatmulPreferenceCreate: unsafe extern "C" fn(*mut Handle) -> c_int,
    cublasLtMatmulPreferenceDestroy: unsafe extern "C" fn(Handle) -> c_int,
    cublasLtMatmulPreferenceSetAttribute:
        unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int,
    cublasLtMatmulAlgoGetHeuristic: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Heuristic,
        *mut c_int,
    ) -> c_int,
    cublasLtMatmul: unsafe extern "C" fn(
        Handle,
        Handle,
        *const c_void,
        u64,
        Handle,
        u64,
        Handle,
        *const c_void,
        u64,
        Handle,
        u64,
        Handle,
        *const [u64; 8],
        u64,
        usize,
        u64,
    ) -> c_int,
    /// Never unloaded: the functions above point into it.
    _library: libloading::Library,
}

impl LtCalls {
    /// The library, looked up once per process.
    fn get() -> Result<&'static LtCalls> {
        static API: OnceLock<LtCalls> = OnceLock::new();
        let install = "the CUDA toolkit's cuBLAS, or the package nvidia-cublas";
        once(&API, || find(&SEARCH, ("cuBLASLt", install), LtCalls::open))
    }

    fn open(path: &Path) -> std::result::Result<LtCalls, String> {
        let library = open(path)?;
        macro_rules! symbol {
            ($name:ident) => {
                // SAFETY: the field's type is the entry point's in the cuBLAS manual.
                *unsafe { library.get(concat!(stringify!($name), "\0")) }
                    .map_err(|_| format!("{} has no `{}`", path.display(), stringify!($name)))?
            };
        }
        Ok(LtCalls {
            cublasLtCreate: symbol!(cublasLtCreate),
            cublasLtDestroy: symbol!(cublasLtDestroy),
            cublasLtMatmulDescCreate: symbol!(cublasLtMatmulDescCreate),
            cublasLtMatmulDescDestroy: symbol!(cublasLtMatmulDescDestroy),
            cublasLtMatmulDescSetAttribute: symbol!(cublasLtMatmulDescSetAttribute),
            cublasLtMatrixLayoutCreate: symbol!(cublasLtMatrixLayoutCreate),
            cublasLtMatrixLayoutDestroy: symbol!(cublasLtMatrixLayoutDestroy),
            cublasLtMatrixLayoutSetAttribute: symbol!(cublasLtMatrixLayoutSetAttribute),
            cublasLtMatmulPreferenceCreate: symbol!(cublasLtMatmulPreferenceCreate),
            cublasLtMatmulPreferenceDestroy: symbol!(cublasLtMatmulPreferenceDestroy),
            cublasLtMatmulPreferenceSetAttribute: symbol!(cublasLtMatmulPreferenceSetAttribute),
            cublasLtMatmulAlgoGetHeuristic: symbol!(cublasLtMatmulAlgoGetHeuristic),
            cublasLtMatmul: symbol!(cublasLtMatmul),
            _library: library,
        })
    }
}

/// A call's status.
fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(failed(call, code)) }
}

/// The library's answer where it has no algorithm.
fn not_supported(call: &'static str) -> Error {
    failed(call, 15)
}

/// A call's status as an error.
fn failed(call: &'static str, code: c_int) -> Error {
    let name = match code {
        1 => Some("CUBLAS_STATUS_NOT_INITIALIZED"),
        3 => Some("CUBLAS_STATUS_ALLOC_FAILED"),
        7 => Some("CUBLAS_STATUS_INVALID_VALUE"),
        8 => Some("CUBLAS_STATUS_ARCH_MISMATCH"),
        11 => Some("CUBLAS_STATUS_MAPPING_ERROR"),
        13 => Some("CUBLAS_STATUS_EXECUTION_FAILED"),
        14 => Some("CUBLAS_STATUS_INTERNAL_ERROR"),
        15 => Some("CUBLAS_STATUS_NOT_SUPPORTED"),
        16 => Some("CUBLAS_STATUS_LICENSE_ERROR"),
        _ => None,
    };
    let cause = Arc::new(LibraryStatus { call, code, name }).into();
    ErrorDetail::Foreign { op: "gemm".into(), cause }.into()
}

macro_rules! lt {
    ($api:expr, $call:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: handles are live, and pointers are to live values of the sizes that are said.
        check(stringify!($call), unsafe { ($api.$call)($($arg),*) })
    };
}

/// The library's handle in a device's context.
pub(super) struct Library {
    api: &'static LtCalls,
    handle: Handle,
}

// SAFETY: the handle is a pointer that any thread may use: the manual says so of this library.
unsafe impl Send for Library {}

// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Opens it; the device's context is current.
    pub(super) fn open() -> Result<Self> {
        let api = LtCalls::get()?;
        static FIRST: Once = Once::new();
        let mut handle = null_mut();
        lt!(api, cublasLtCreate(&raw mut handle))?;
        // It brings the library's log and tables, which are freed at the end of the process.
        FIRST.call_once(register_again);
        Ok(Library { api, handle })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        lt!(self.api, cublasLtDestroy(self.handle)).ok();
    }
}

/// A library descriptor, in host memory.
struct Descriptor {
    raw: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
}

// SAFETY: a descriptor is plain memory; it is changed only under exclusive access.
unsafe impl Send for Descriptor {}

// SAFETY: as above; the library reads it, and `bias_turn` is held while it is changed and read.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    fn set<T>(
        &self,
        (call, set): (
            &'static str,
            unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int,
        ),
        attribute: c_int,
        value: &T,
    ) -> Result<()> {
        let value: *const T = value;
        // SAFETY: the descriptor lives; the value is of the attribute's type, and lives for the call.
        check(call, unsafe { set(self.raw, attribute, value.cast(), size_of::<T>()) })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the function's counterpart, and destroyed once.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// A plan: descriptors and algorithms.
pub(super) struct LtPlan {
    library: Arc<LibraryObject<Library>>,
    shape: Shape,
    layouts: Layouts,
    everywhere: Choice,
    /// For partitions with this many multiprocessors, since the first launch in one.
    confined: Mutex<Vec<(u32, Arc<Choice>)>>,
    known: KnownCalls,
}

struct Layouts {
    left: Descriptor,
    right: Descriptor,
    out: Descriptor,
}

/// The algorithm for some number of multiprocessors.
struct Choice {
    operation: Descriptor,
    /// Held during a launch with a bias, whose address is part of the operation.
    bias_turn: Mutex<()>,
    algo: [u64; 8],
    workspace_bytes: usize,
}

/// `CUBLASLT_MATMUL_DESC_BIAS_POINTER`.
const BIAS_POINTER: c_int = 8;

impl LtPlan {
    pub(super) fn new(library: &Arc<LibraryObject<Library>>, shape: &Shape) -> Result<Self> {
        library.device().in_context(|| {
            let layouts = Layouts::new(library.get(), shape)?;
            let everywhere =
                Choice::new(library.get(), shape, &layouts, None, shape.workspace_bytes)?;
            Ok(LtPlan {
                library: library.clone(),
                shape: *shape,
                layouts,
                everywhere,
                confined: Mutex::default(),
                known: KnownCalls::new(),
            })
        })?
    }

    /// The algorithm for launches in a partition of that size; with the context current.
    fn confined(&self, multiprocessors: u32) -> Result<Arc<Choice>> {
        let mut confined = self.confined.lock();
        if let Some((_, choice)) = confined.iter().find(|(size, _)| *size == multiprocessors) {
            return Ok(choice.clone());
        }
        // It gets no more scratch memory than launches outside of partitions.
        let (library, most) = (self.library.get(), self.everywhere.workspace_bytes);
        let choice = Choice::new(library, &self.shape, &self.layouts, Some(multiprocessors), most)?;
        let choice = Arc::new(choice);
        confined.push((multiprocessors, choice.clone()));
        Ok(choice)
    }

    /// An object that must outlive the launches of its products.
    pub(super) fn library(&self) -> Arc<LibraryObject<Library>> {
        self.library.clone()
    }

    pub(super) fn workspace_bytes(&self) -> usize {
        self.everywhere.workspace_bytes
    }

    /// Puts a product on a stream, with the context current: addresses of `a`, `b`, `c` and the rest.
    pub(super) fn multiply<S: Pod>(
        &self,
        queue: &RawQueue<'_>,
        (alpha, beta): (&S, &S),
        [a, b, c]: [u64; 3],
        bias: Option<u64>,
        workspace: u64,
    ) -> Result<()> {
        // All scales have four or eight bytes, and a key belongs to one plan, so they cannot be confused.
        let bits = |scale: &S| {
            let mut bytes = [0; 8];
            bytes[..size_of::<S>()].copy_from_slice(bytemuck::bytes_of(scale));
            u64::from_ne_bytes(bytes)
        };
        let key: CallKey = [a, b, c, bias.unwrap_or(0), workspace, bits(alpha), bits(beta)];
        let confined = partition_of(queue).map(|(_, size)| self.confined(size)).transpose()?;
        let choice = confined.as_deref().unwrap_or(&self.everywhere);
        let call = |stream| self.call(choice, stream, (alpha, beta), [a, b, c], bias, workspace);
        self.known.put(queue, key, || self.library(), call)
    }

    fn call<S>(
        &self,
        choice: &Choice,
        stream: u64,
        (alpha, beta): (&S, &S),
        [a, b, c]: [u64; 3],
        bias: Option<u64>,
        workspace: u64,
    ) -> Result<()> {
        let Library { api, handle } = self.library.get();
        let _turn = match bias {
            Some(bias) => {
                let turn = choice.bias_turn.lock();
                let set = ("cublasLtMatmulDescSetAttribute", api.cublasLtMatmulDescSetAttribute);
                choice.operation.set(set, BIAS_POINTER, &bias)?;
                Some(turn)
            }
            None => None,
        };
        let (alpha, beta): (*const S, *const S) = (alpha, beta);
        let Layouts { left, right, out } = &self.layouts;
        lt!(
            api,
            cublasLtMatmul(
                *handle,
                choice.operation.raw,
                alpha.cast(),
                b,
                left.raw,
                a,
                right.raw,
                beta.cast(),
                c,
                out.raw,
                c,
                out.raw,
                &raw const choice.algo,
                workspace,
                choice.workspace_bytes,
                stream,
            )
        )
    }
}

/// `cudaDataType_t`.
fn data_type(kind: Kind) -> c_int {
    match kind {
        Kind::F16 => 2,
        Kind::Bf16 => 14,
        Kind::F32 => 0,
        Kind::F64 => 1,
    }
}

/// `cudaDataType_t` of scales, `cublasComputeType_t`.
fn types(shape: &Shape) -> (c_int, c_int) {
    match shape.kind {
        Kind::F32 if shape.tf32 => (data_type(Kind::F32), 77),
        Kind::F16 | Kind::Bf16 | Kind::F32 => (data_type(Kind::F32), 68),
        Kind::F64 => (data_type(Kind::F64), 70),
    }
}

impl Layouts {
    fn new(Library { api, .. }: &Library, shape: &Shape) -> Result<Self> {
        let layout = |matrices: Matrices, kind: Kind| -> Result<Descriptor> {
            // A row-major matrix of `rows` x `columns` is a column-major one of `columns` x `rows`.
            const BATCH_COUNT: c_int = 5;
            const STRIDED_BATCH_OFFSET: c_int = 6;
            let Matrices { rows, columns, strides, .. } = matrices;
            let (rows, columns, lead) = (rows as u64, columns as u64, strides.row as i64);
            let (mut raw, element) = (null_mut(), data_type(kind));
            lt!(api, cublasLtMatrixLayoutCreate(&raw mut raw, element, columns, rows, lead))?;
            let layout = Descriptor { raw, destroy: api.cublasLtMatrixLayoutDestroy };
            if shape.batch > 1 {
                let set =
                    ("cublasLtMatrixLayoutSetAttribute", api.cublasLtMatrixLayoutSetAttribute);
                let Ok(count) = c_int::try_from(shape.batch) else {
                    return Err(not_supported("cublasLtMatrixLayoutSetAttribute"));
                };
                layout.set(set, BATCH_COUNT, &count)?;
                layout.set(set, STRIDED_BATCH_OFFSET, &(strides.matrix as i64))?;
            }
            Ok(layout)
        };
        Ok(Layouts {
            left: layout(shape.b(), shape.kind)?,
            right: layout(shape.a(), shape.kind)?,
            out: layout(shape.c(), shape.out)?,
        })
    }
}

impl Choice {
    /// Asks the library for an algorithm: for the whole device, or for this many multiprocessors.
    fn new(
        Library { api, handle }: &Library,
        shape: &Shape,
        Layouts { left, right, out }: &Layouts,
        multiprocessors: Option<u32>,
        workspace_bytes: usize,
    ) -> Result<Self> {
        // `CUBLASLT_MATMUL_DESC_*`.
        const TRANSA: c_int = 3;
        const TRANSB: c_int = 4;
        const EPILOGUE: c_int = 7;
        const SM_COUNT_TARGET: c_int = 15;
        // `CUBLASLT_MATMUL_PREF_*`.
        const MAX_WORKSPACE_BYTES: c_int = 1;
        const MIN_ALIGNMENT: std::ops::RangeInclusive<c_int> = 5..=8;
        let (scale, compute) = types(shape);
        let mut raw = null_mut();
        lt!(api, cublasLtMatmulDescCreate(&raw mut raw, compute, scale))?;
        let operation = Descriptor { raw, destroy: api.cublasLtMatmulDescDestroy };
        let set = ("cublasLtMatmulDescSetAttribute", api.cublasLtMatmulDescSetAttribute);
        // `cublasOperation_t`.
        let transposed = |transposed: bool| c_int::from(transposed);
        operation.set(set, TRANSA, &transposed(shape.transposed_b))?;
        operation.set(set, TRANSB, &transposed(shape.transposed_a))?;
        let epilogue: c_int = match (shape.activation, shape.bias) {
            (Activation::None, false) => 1,
            (Activation::Relu, false) => 2,
            (Activation::None, true) => 4,
            (Activation::Relu, true) => 6,
            (Activation::Gelu, false) => 32,
            (Activation::Gelu, true) => 36,
        };
        operation.set(set, EPILOGUE, &epilogue)?;
        if let Some(multiprocessors) = multiprocessors {
            operation.set(set, SM_COUNT_TARGET, &(multiprocessors as c_int))?;
        }
        let mut raw = null_mut();
        lt!(api, cublasLtMatmulPreferenceCreate(&raw mut raw))?;
        let preference = Descriptor { raw, destroy: api.cublasLtMatmulPreferenceDestroy };
        let set =
            ("cublasLtMatmulPreferenceSetAttribute", api.cublasLtMatmulPreferenceSetAttribute);
        preference.set(set, MAX_WORKSPACE_BYTES, &(workspace_bytes as u64))?;
        for operand in MIN_ALIGNMENT {
            preference.set(set, operand, &(ALIGNMENT as u32))?;
        }
        let mut found =
            Heuristic { algo: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut count = 0;
        let call = "cublasLtMatmulAlgoGetHeuristic";
        lt!(
            api,
            cublasLtMatmulAlgoGetHeuristic(
                *handle,
                operation.raw,
                left.raw,
                right.raw,
                out.raw,
                out.raw,
                preference.raw,
                1,
                &raw mut found,
                &raw mut count,
            )
        )?;
        if count == 0 {
            return Err(not_supported(call));
        }
        check(call, found.state)?;
        Ok(Choice {
            operation,
            bias_turn: Mutex::new(()),
            algo: found.algo,
            workspace_bytes: found.workspace_bytes,
        })
    }
}
