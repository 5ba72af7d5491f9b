//! cuBLASLt through cudarc's bindings: the bare call with everything looked up before, and the safe wrapper.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::result;
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtMatmulAlgo_t, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayoutAttribute_t, cudaDataType,
};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

const WORKSPACE_BYTES: usize = 32 << 20;

/// A product of row-major matrices, ready to be launched.
pub(crate) struct BareGemm {
    stream: Arc<CudaStream>,
    handle: sys::cublasLtHandle_t,
    desc: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algo: cublasLtMatmulAlgo_t,
    workspace: CudaSlice<u8>,
}

/// `m`, `n`, `k` and how many.
pub(crate) type Extents = (u64, u64, u64, i32);

impl BareGemm {
    pub(crate) fn new(
        stream: &Arc<CudaStream>,
        (m, n, k, batch): Extents,
        element: cudaDataType,
        compute: cublasComputeType_t,
    ) -> Self {
        stream.context().bind_to_thread().expect("the context is alive");
        let handle = result::create_handle().expect("cuBLASLt");
        let desc = result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F).expect("a desc");
        // `CUBLAS_OP_N`.
        let none = 0_i32;
        for attribute in [
            cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
            cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB,
        ] {
            let value: *const i32 = &raw const none;
            // SAFETY: the attribute is an integer of that size.
            unsafe { result::set_matmul_desc_attribute(desc, attribute, value.cast(), 4) }
                .expect("set");
        }
        let layout = |rows: u64, columns: u64| {
            let layout = result::create_matrix_layout(element, columns, rows, columns as i64);
            let layout = layout.expect("a layout");
            let stride = (rows * columns) as i64;
            let set = |attribute, value: *const c_void, bytes| {
                // SAFETY: the attribute is an integer of that size.
                unsafe { result::set_matrix_layout_attribute(layout, attribute, value, bytes) }
                    .expect("set");
            };
            let (count, offset): (*const i32, *const i64) = (&raw const batch, &raw const stride);
            set(
                cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                count.cast(),
                4,
            );
            set(
                cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                offset.cast(),
                8,
            );
            layout
        };
        let layouts = [layout(k, n), layout(m, k), layout(m, n)];
        let preference = result::create_matmul_pref().expect("a preference");
        let most: *const usize = &raw const WORKSPACE;
        // SAFETY: the attribute is an integer of that size.
        unsafe {
            result::set_matmul_pref_attribute(
                preference,
                cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                most.cast(),
                8,
            )
        }
        .expect("set");
        // SAFETY: all of them live.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                handle, desc, layouts[0], layouts[1], layouts[2], layouts[2], preference,
            )
        };
        let algo = found.expect("an algorithm").algo;
        // SAFETY: nobody reads it.
        let workspace = unsafe { stream.alloc::<u8>(WORKSPACE_BYTES) }.expect("memory");
        BareGemm { stream: stream.clone(), handle, desc, layouts, algo, workspace }
    }

    /// The bare call: `c = a * b`, by addresses.
    pub(crate) fn launch(&self, [a, b, c]: [u64; 3]) {
        let (alpha, beta) = (1.0_f32, 0.0_f32);
        let (alpha, beta): (*const f32, *const f32) = (&raw const alpha, &raw const beta);
        let [left, right, out] = self.layouts;
        let workspace = self.workspace.device_ptr(&self.stream).0;
        // SAFETY: the addresses are those of live matrices of these layouts.
        unsafe {
            result::matmul(
                self.handle,
                self.desc,
                alpha.cast(),
                beta.cast(),
                b as *const c_void,
                left,
                a as *const c_void,
                right,
                c as *const c_void,
                out,
                c as *mut c_void,
                out,
                &raw const self.algo,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                self.stream.cu_stream().cast(),
            )
        }
        .expect("is launched");
    }
}

static WORKSPACE: usize = WORKSPACE_BYTES;
