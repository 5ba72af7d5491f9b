// axpy: y[i] = a * x[i] + y[i] for i in 0..n, in one rounding (f32::mul_add(a, x[i], y[i])).
//
// Shapes:  x and y hold at least n elements. x may be y; any other overlap is a race.
// Launch:  1-D grid, 1-D block, any sizes (grid-stride loop, tail guarded); no dynamic shared memory.
// Args:    a   factor
//          x   device pointer, read
//          y   device pointer, read and written
//          n   number of elements; 0 touches no memory
// Source:  SAXPY of the level 1 BLAS (Lawson, Hanson, Kincaid, Krogh, 1979); the grid-stride loop is
//          from Mark Harris, "CUDA Pro Tip: Write Flexible Kernels with Grid-Stride Loops" (2013).
extern "C" __global__ void axpy(float a, const float* x, float* y, unsigned long long n) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        y[i] = __fmaf_rn(a, x[i], y[i]);
    }
}
