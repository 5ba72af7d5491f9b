// digest: adds to *sum the sum, modulo 2^64, of mixed(word i of x, i) over the words of 8 bytes of x, lowest byte first, the last one
// filled up with zeros.
//
// Shapes:  x holds bytes; sum is one element.
// Launch:  1-D grid, 1-D block of a multiple of 32 threads (grid-stride loop, ends guarded); no dynamic shared memory.
// Args:    x        device pointer, read, aligned to anything
//          sum      device pointer, updated, aligned to 8
//          bytes    the length of x; 0 touches no memory of it
// Order:   an addition of integers, so the result is always the same.
// Source:  the mixing function of splitmix64.
typedef unsigned char u8;
typedef unsigned long long u64;

static __device__ u64 mixed(u64 word, u64 at) {
    u64 z = word ^ ((at + 1) * 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static __device__ u64 bytewise(const u8* x, u64 bytes, u64 at) {
    u64 word = 0;
    for (u64 i = 8 * at; i < bytes && i < 8 * at + 8; i++) {
        word |= (u64)x[i] << (8 * (i & 7));
    }
    return word;
}

extern "C" __global__ void digest(const u8* x, u64* sum, u64 bytes) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 whole = ((u64)x & 7) == 0 ? bytes / 8 : 0, words = bytes / 8 + (bytes % 8 != 0);
    u64 total = 0, i = first;
#pragma unroll 4
    for (; i < whole; i += stride) {
        total += mixed(((const u64*)x)[i], i);
    }
    for (; i < words; i += stride) {
        total += mixed(bytewise(x, bytes, i), i);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        total += __shfl_down_sync(0xFFFFFFFFu, total, lanes);
    }
    if (threadIdx.x % 32 == 0) atomicAdd(sum, total);
}
