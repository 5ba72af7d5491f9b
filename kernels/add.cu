// add: out[i] = a[i] + b[i] for i in 0..n, rounded to nearest even.
//
// Shapes:  a, b and out hold at least n elements. out may be a or b (or both); any other overlap of
//          out with an input is a race.
// Launch:  1-D grid, 1-D block, any sizes (grid-stride loop, tail guarded); no dynamic shared memory.
// Args:    a, b   device pointers, read
//          out    device pointer, written
//          n      number of elements; 0 touches no memory
extern "C" __global__ void add(const float* a, const float* b, float* out, unsigned long long n) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        out[i] = a[i] + b[i];
    }
}
