// The kernels of a transformer encoder. Texts are packed: the tokens of text s are the rows starts[s] .. starts[s + 1] of every matrix, so
// that no row is padding. Sums, norms and exponentials are in f32 whatever the elements are.
//
//     embed_norm   out[t] = norm(words[ids[t]] + places[positions[t]])
//     attention    out[t] = softmax(q[t] k^T / sqrt(d)) v, for each head, over the tokens of t's text
//     gelu         x = x / 2 * (1 + erf(x / sqrt(2)))
//     add_norm     out[t] = norm(x[t] + residual[t])
//     pool         out[s] = mean of the rows of text s, divided by its Euclidean norm
//
// norm(x) = (x - mean) / sqrt(variance + eps) * weight + bias. Each kernel exists for float, `_f32`, and for half, `_f16`.
//
// Rows have `hidden` elements: a multiple of 64, 1024 at most. Arrays are row-major without gaps and aligned to 16 bytes, and what is written
// overlaps nothing else. Indices in memory (ids, positions, starts, tiles) are clamped: whatever they are, no access leaves its array.

#include "model.cuh"

template <typename T>
struct __align__(16) Eight {
    T x[8];
};

// ---- rows ---------------------------------------------------------------------------------------

template <typename T>
__device__ void sum_and_norm(const T* a, const T* b, u32 hidden, const T* weight, const T* bias, float eps, T* out) {
    const u32 lane = threadIdx.x % 32, pairs = hidden / 64;
    float2 x[MAX_PAIRS];
#pragma unroll
    for (u32 i = 0; i < MAX_PAIRS; ++i)
        if (i < pairs) {
            const float2 p = load2(a + 2 * (lane + 32 * i)), q = load2(b + 2 * (lane + 32 * i));
            x[i] = make_float2(p.x + q.x, p.y + q.y);
        }
    norm_row(x, hidden, lane, weight, bias, eps, out);
}

// Launch: block_dim 128; grid_dim tokens / 4, rounded up.
template <typename T>
__device__ void embed_norm(const u32* ids, const u32* positions, const T* words, const T* places, const T* weight, const T* bias,
                           T* out, u32 tokens, u32 hidden, u32 vocabulary, u32 max_positions, float eps) {
    const u32 row = blockIdx.x * ROWS + threadIdx.x / 32;
    if (row >= tokens) return;
    const T* word = words + (u64)least(ids[row], vocabulary - 1) * hidden;
    const T* place = places + (u64)least(positions[row], max_positions - 1) * hidden;
    sum_and_norm(word, place, hidden, weight, bias, eps, out + (u64)row * hidden);
}

// Launch: as embed_norm.
template <typename T>
__device__ void add_norm(const T* x, const T* residual, const T* weight, const T* bias, T* out, u32 tokens, u32 hidden, float eps) {
    const u32 row = blockIdx.x * ROWS + threadIdx.x / 32;
    if (row >= tokens) return;
    const u64 at = (u64)row * hidden;
    sum_and_norm(x + at, residual + at, hidden, weight, bias, eps, out + at);
}

__device__ float gelu_of(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }

// Launch: a thread for eight elements; `eights` is their number.
template <typename T>
__device__ void gelu(T* x, u64 eights) {
    const u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i >= eights) return;
    Eight<T> eight = ((const Eight<T>*)x)[i];
#pragma unroll
    for (u32 j = 0; j < 8; j += 2) {
        const float2 p = load2(eight.x + j);
        store2(eight.x + j, gelu_of(p.x), gelu_of(p.y));
    }
    ((Eight<T>*)x)[i] = eight;
}

// Launch: block_dim 512; grid_dim texts. A text without tokens, and one whose mean is 0, gives zeros.
template <typename T>
__device__ void pool(const T* x, const u32* starts, float* out, u32 tokens, u32 hidden) {
    __shared__ float sums[64 * MAX_PAIRS];
    __shared__ float squares[16];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = hidden / 64;
    const u32 end = least(starts[blockIdx.x + 1], tokens), start = least(starts[blockIdx.x], end);
    float2 sum[MAX_PAIRS];
#pragma unroll
    for (u32 i = 0; i < MAX_PAIRS; ++i) sum[i] = make_float2(0.0f, 0.0f);
    for (u32 row = start + warp; row < end; row += 16) {
#pragma unroll
        for (u32 i = 0; i < MAX_PAIRS; ++i)
            if (i < pairs) {
                const float2 p = load2(x + (u64)row * hidden + 2 * (lane + 32 * i));
                sum[i].x += p.x;
                sum[i].y += p.y;
            }
    }
    for (u32 at = threadIdx.x; at < hidden; at += 512) sums[at] = 0.0f;
    // One warp after the other, so that the sum's order is the same every time.
    for (u32 turn = 0; turn < 16; ++turn) {
        __syncthreads();
        if (turn == warp) {
#pragma unroll
            for (u32 i = 0; i < MAX_PAIRS; ++i)
                if (i < pairs) {
                    sums[2 * (lane + 32 * i)] += sum[i].x;
                    sums[2 * (lane + 32 * i) + 1] += sum[i].y;
                }
        }
    }
    __syncthreads();
    const float count = start < end ? (float)(end - start) : 1.0f;
    float part = 0.0f;
    for (u32 at = threadIdx.x; at < hidden; at += 512) {
        const float mean = sums[at] / count;
        part = fmaf(mean, mean, part);
    }
    part = warp_sum(part);
    if (lane == 0) squares[warp] = part;
    __syncthreads();
    float total = 0.0f;
    for (u32 i = 0; i < 16; ++i) total += squares[i];
    const float norm = sqrtf(total);
    for (u32 at = threadIdx.x; at < hidden; at += 512)
        out[(u64)blockIdx.x * hidden + at] = norm > 0.0f ? sums[at] / count / norm : 0.0f;
}

// ---- attention ----------------------------------------------------------------------------------

// tiles[2 i] is tile i's text, tiles[2 i + 1] its first query. One without queries has len <= first.
__device__ Tile tile_of(const u32* starts, const u32* tiles, u32 tokens, u32 texts) {
    Tile tile = {0, 0, tiles[2 * blockIdx.x + 1], 0};
    const u32 text = tiles[2 * blockIdx.x];
    if (text < texts) {
        const u32 end = least(starts[text + 1], tokens);
        tile.start = least(starts[text], end);
        tile.len = tile.keys = end - tile.start;
    }
    return tile;
}

// Rows of qkv: the queries of all heads, their keys, their values. Rows of no text are left as they are.
// Launch: block_dim 128; grid_dim (tiles, heads). hidden / heads is 16, 32 or 64.
template <typename T>
__device__ void attention(const T* qkv, const u32* starts, const u32* tiles, T* out, u32 tokens, u32 texts, u32 hidden, u32 heads) {
    // For f16: two tiles of keys and two of values.
    __shared__ __align__(16) char shared[4 * TILE * (64 + 8) * 2];
    const Tile tile = tile_of(starts, tiles, tokens, texts);
    if (tile.first >= tile.len) return;
    if (hidden == 16 * heads) attend<16, false>(qkv, out, tile, heads, shared);
    if (hidden == 32 * heads) attend<32, false>(qkv, out, tile, heads, shared);
    if (hidden == 64 * heads) attend<64, false>(qkv, out, tile, heads, shared);
}

// ---- entries ------------------------------------------------------------------------------------

#define ENTRIES(T, NAME)                                                                                                                  \
    extern "C" __global__ void embed_norm_##NAME(const u32* ids, const u32* positions, const T* words, const T* places, const T* weight,   \
                                                 const T* bias, T* out, u32 tokens, u32 hidden, u32 vocabulary, u32 max_positions,         \
                                                 float eps) {                                                                             \
        embed_norm(ids, positions, words, places, weight, bias, out, tokens, hidden, vocabulary, max_positions, eps);                     \
    }                                                                                                                                     \
    extern "C" __global__ void add_norm_##NAME(const T* x, const T* residual, const T* weight, const T* bias, T* out, u32 tokens,          \
                                               u32 hidden, float eps) {                                                                   \
        add_norm(x, residual, weight, bias, out, tokens, hidden, eps);                                                                    \
    }                                                                                                                                     \
    extern "C" __global__ void gelu_##NAME(T* x, u64 eights) { gelu(x, eights); }                                                         \
    extern "C" __global__ void pool_##NAME(const T* x, const u32* starts, float* out, u32 tokens, u32 hidden) {                            \
        pool(x, starts, out, tokens, hidden);                                                                                             \
    }                                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(128)                                                                                     \
        attention_##NAME(const T* qkv, const u32* starts, const u32* tiles, T* out, u32 tokens, u32 texts, u32 hidden, u32 heads) {        \
        attention(qkv, starts, tiles, out, tokens, texts, hidden, heads);                                                                 \
    }

ENTRIES(float, f32)
ENTRIES(Half, f16)
