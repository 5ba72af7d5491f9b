// churn: y[i] = x[i] after `steps` fused multiply-adds v = v * 0.999 + 0.001, one behind the other: a load
// whose length is chosen, in blocks that all take as long.
//
// Shapes:  x and y hold at least n elements, and do not overlap.
// Launch:  1-D grid, 1-D block, any sizes. A thread beyond n works on x[i % n] as well, so that its block
//          takes as long as the others, and writes nothing; elements beyond the threads are left as they are.
//          No dynamic shared memory.
// Args:    x       device pointer, read
//          y       device pointer, written
//          steps   multiply-adds a thread
//          n       number of elements; 0 touches no memory
extern "C" __global__ void churn(const float* x, float* y, unsigned int steps, unsigned long long n) {
    if (n == 0) {
        return;
    }
    const unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    float v = x[i % n];
#pragma unroll 1
    for (unsigned int step = 0; step < steps; ++step) {
        v = __fmaf_rn(v, 0.999f, 0.001f);
    }
    // The empty statement reads v, so that no compiler skips the work of a thread that writes nothing.
    asm volatile("" : : "f"(v));
    if (i < n) {
        y[i] = v;
    }
}
