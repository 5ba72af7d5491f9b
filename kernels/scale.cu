// scale: x[i] = x[i] * a for i in 0..n, rounded to nearest even.
//
// Shapes:  x holds at least n elements.
// Launch:  1-D grid, 1-D block, any sizes (grid-stride loop, tail guarded); no dynamic shared memory.
// Args:    a   factor
//          x   device pointer, read and written
//          n   number of elements; 0 touches no memory
// Source:  SSCAL of the level 1 BLAS.
extern "C" __global__ void scale(float a, float* x, unsigned long long n) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        x[i] *= a;
    }
}
