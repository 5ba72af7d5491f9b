// rotate: x[i] = x[(i + by) % n] for i in 0..n, in place, in one launch: every thread reads before any
// thread writes, with a barrier of the whole grid in between.
//
// Shapes:  x holds n elements; barrier holds two, zeros before the first launch. A launch leaves the
//          barrier ready for the next one, of any grid. x and barrier do not overlap.
// Launch:  cooperative: the barrier needs all blocks resident at once. Any grid and any block with at
//          least n threads in all (elements beyond them are left as they are); no dynamic shared memory.
// Args:    x         device pointer, read and written
//          by        how far to the left
//          n         number of elements; 0 touches only the barrier
//          barrier   device pointer, read and written: blocks that arrived, barriers that opened
//
// A block waits at the barrier for at most five seconds by %globaltimer and then goes on, so that a barrier
// that was not zeros, or a launch that was not cooperative, gives wrong numbers and not a kernel without end.
// Source:  the counting barrier whose last arrival opens it: Mellor-Crummey and Scott, "Algorithms for
//          Scalable Synchronization on Shared-Memory Multiprocessors" (1991), section 3.1, with a generation
//          for the sense.
#define LIMIT_NS 5000000000ull

static __device__ __forceinline__ unsigned long long globaltimer_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

static __device__ void grid_barrier(volatile unsigned int* barrier, unsigned int blocks) {
    __syncthreads();
    if ((threadIdx.x | threadIdx.y | threadIdx.z) == 0) {
        const unsigned int generation = barrier[1];
        // What this block read and wrote comes before its arrival.
        __threadfence();
        if (atomicAdd((unsigned int*)barrier, 1u) == blocks - 1) {
            barrier[0] = 0;
            __threadfence();
            barrier[1] = generation + 1;
        } else {
            const unsigned long long start = globaltimer_ns();
            while (barrier[1] == generation && globaltimer_ns() - start < LIMIT_NS) {
            }
        }
        __threadfence();
    }
    __syncthreads();
}

extern "C" __global__ void rotate(unsigned int* x, unsigned int by, unsigned long long n, unsigned int* barrier) {
    const unsigned int blocks = gridDim.x * gridDim.y * gridDim.z;
    const unsigned long long block =
        blockIdx.x + (unsigned long long)gridDim.x * (blockIdx.y + (unsigned long long)gridDim.y * blockIdx.z);
    const unsigned int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned long long i = block * (blockDim.x * blockDim.y * blockDim.z) + thread;

    unsigned int value = 0;
    if (i < n) {
        value = x[(i + by) % n];
    }
    grid_barrier(barrier, blocks);
    if (i < n) {
        x[i] = value;
    }
}
