// fill: x[i] = value for i in 0..n, bit for bit (the payload of a NaN is kept).
//
// Shapes:  x holds at least n elements.
// Launch:  1-D grid, 1-D block, any sizes (grid-stride loop, tail guarded); no dynamic shared memory.
// Args:    value  what every element becomes
//          x      device pointer, written
//          n      number of elements; 0 touches no memory
extern "C" __global__ void fill(float value, float* x, unsigned long long n) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        x[i] = value;
    }
}
