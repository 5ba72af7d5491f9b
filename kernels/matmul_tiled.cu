// matmul_tiled: C = A B, in f32.
//
//     c[i, j] = acc, where acc = 0.0; for l in 0..k (ascending): acc = fma(a[i, l], b[l, j], acc)
//
// Matches that loop bit for bit (in Rust: `acc = a[i * k + l].mul_add(b[l * n + j], acc)`), whatever
// m, n and k are, subnormals and signed zeros included; only the payload of a NaN may differ. Hence the
// last tile stops at k and is not padded: fma(0, 0, -0.0) is +0.0, so padding would lose the sign of an
// accumulator that has underflowed to -0.0.
//
// Shapes:  a[m, k], b[k, n], c[m, n], row-major without padding. c overlaps neither a nor b.
// Launch:  block_dim (16, 16, 1), exactly; grid_dim (ceil(n / 16), ceil(m / 16), 1), so m is at most
//          65535 * 16; static shared memory only. m = 0 or n = 0 is no launch at all; k = 0 writes zeros.
// Args:    a, b   device pointers, read
//          c      device pointer, written (never read)
//          m, n, k   as above
// Source:  the shared-memory matrix product of the CUDA C++ Programming Guide, section "Shared Memory",
//          with guarded edges and a fixed order of summation.
#define TILE 16

extern "C" __global__ void matmul_tiled(const float* a, const float* b, float* c, unsigned int m,
                                        unsigned int n, unsigned int k) {
    __shared__ float a_tile[TILE][TILE];
    __shared__ float b_tile[TILE][TILE];

    const unsigned int tx = threadIdx.x;
    const unsigned int ty = threadIdx.y;
    const unsigned long long row = (unsigned long long)blockIdx.y * TILE + ty;
    const unsigned long long col = (unsigned long long)blockIdx.x * TILE + tx;

    // No thread returns early: those outside C still load tiles and reach every barrier.
    float acc = 0.0f;
    for (unsigned long long start = 0; start < k; start += TILE) {
        const unsigned long long a_col = start + tx;
        const unsigned long long b_row = start + ty;
        a_tile[ty][tx] = row < m && a_col < k ? a[row * k + a_col] : 0.0f;
        b_tile[ty][tx] = b_row < k && col < n ? b[b_row * n + col] : 0.0f;
        __syncthreads();

        const unsigned long long left = k - start;
        if (left >= TILE) {
#pragma unroll
            for (unsigned int l = 0; l < TILE; ++l) {
                acc = __fmaf_rn(a_tile[ty][l], b_tile[l][tx], acc);
            }
        } else {
#pragma unroll 1
            for (unsigned int l = 0; l < (unsigned int)left; ++l) {
                acc = __fmaf_rn(a_tile[ty][l], b_tile[l][tx], acc);
            }
        }
        __syncthreads();
    }

    if (row < m && col < n) {
        c[row * n + col] = acc;
    }
}
