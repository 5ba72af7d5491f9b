// Softmax, layer norm, sums and places of the greatest of each row of a matrix without gaps: `NAME_blocks` has a block work on a row,
// `NAME_warps` a warp. Elements are 16-bit floats or `f32`; all is computed in `f32`.
#include "types.cuh"

using namespace gpu_await;
using element = ELEMENT;

constexpr u32 ALL_LANES = 0xffffffff;
constexpr u32 WARP = 32;
// Threads of a block that works on a row, and of one whose warps do.
constexpr u32 BLOCK_THREADS = 512;
constexpr u32 WARPS_THREADS = 256;
// Rows of no more elements are for a warp.
constexpr u64 WARP_COLUMNS = 1024;
// Elements that are loaded and stored at once, where all rows are aligned to that.
constexpr u32 VECTOR = 16 / sizeof(element);

__device__ __forceinline__ float across(float value, u32 by) { return __shfl_xor_sync(ALL_LANES, value, by); }

// What threads of a row combine. Both lanes of a pair get the same bits, so nothing is contracted.
struct added {
    float sum = 0.0f;
    __device__ __forceinline__ added of_lane(u32 by) const { return {across(sum, by)}; }
    __device__ __forceinline__ added with(added other) const { return {__fadd_rn(sum, other.sum)}; }
};

// The first of the greatest, or the first NaN; of nothing the place is behind all others.
struct greatest {
    float value = bounds<float>::least();
    u64 at = ~u64(0);
    __device__ __forceinline__ greatest of_lane(u32 by) const { return {across(value, by), __shfl_xor_sync(ALL_LANES, at, by)}; }
    __device__ __forceinline__ greatest with(greatest other) const {
        bool is_other = is_greater(other.value, value) || (!is_greater(value, other.value) && other.at < at);
        return is_other ? other : *this;
    }
};

// The greatest, or a NaN, and the sum of all `exp(x - most)`, which is 0 as long as there is nothing above negative infinity.
struct exponentials {
    float most = bounds<float>::least();
    float sum = 0.0f;
    __device__ __forceinline__ exponentials of_lane(u32 by) const { return {across(most, by), across(sum, by)}; }
    __device__ __forceinline__ exponentials with(exponentials other) const {
        float both = greatest_of{}(most, other.most);
        if (both == bounds<float>::least()) { return {both, 0.0f}; }
        return {both, __fadd_rn(__fmul_rn(sum, expf(most - both)), __fmul_rn(other.sum, expf(other.most - both)))};
    }
};

// Those who work on a row together.
template <bool BLOCK> struct team {
    static constexpr u32 size = BLOCK ? BLOCK_THREADS : WARP;
    static constexpr u32 of_block = BLOCK ? 1 : WARPS_THREADS / WARP;

    static __device__ __forceinline__ u32 rank() { return BLOCK ? threadIdx.x : threadIdx.x % WARP; }
    static __device__ __forceinline__ u64 first_row() { return u64(blockIdx.x) * of_block + (BLOCK ? 0 : threadIdx.x / WARP); }
    static __device__ __forceinline__ u64 row_step() { return u64(gridDim.x) * of_block; }

    // All of theirs, for each of them.
    template <class T> static __device__ __forceinline__ T combined(T mine) {
        for (u32 by = WARP / 2; by > 0; by /= 2) { mine = mine.with(mine.of_lane(by)); }
        if constexpr (BLOCK) {
            constexpr u32 warps = BLOCK_THREADS / WARP;
            __shared__ alignas(T) char parts[warps * sizeof(T)];
            T* part = reinterpret_cast<T*>(parts);
            if (threadIdx.x % WARP == 0) { part[threadIdx.x / WARP] = mine; }
            __syncthreads();
            mine = part[threadIdx.x % warps];
            for (u32 by = warps / 2; by > 0; by /= 2) { mine = mine.with(mine.of_lane(by)); }
            // The parts are overwritten the next time.
            __syncthreads();
        }
        return mine;
    }
};

// Elements that are one after the other, in `f32`.
template <u32 COUNT> struct values {
    float of[COUNT];

    __device__ __forceinline__ explicit values(const element* from) {
        if constexpr (COUNT == 1) {
            of[0] = float(*from);
        } else {
            alignas(16) element each[COUNT];
            *reinterpret_cast<uint4*>(each) = *reinterpret_cast<const uint4*>(from);
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) { of[i] = float(each[i]); }
        }
    }
    __device__ __forceinline__ void store(element* to) const {
        if constexpr (COUNT == 1) {
            *to = element(of[0]);
        } else {
            alignas(16) element each[COUNT];
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) { each[i] = element(of[i]); }
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(each);
        }
    }
};

// The places in a row, of `COUNT` elements each, that a thread takes.
template <class Team, u32 COUNT, class F> __device__ __forceinline__ void each(u64 columns, F f) {
    for (u64 at = u64(Team::rank()) * COUNT; at < columns; at += u64(Team::size) * COUNT) { f(at); }
}

template <class Team, u32 COUNT>
__device__ __forceinline__ void sum(const element* x, u64 rows, u64 columns, float* out) {
    for (u64 row = Team::first_row(); row < rows; row += Team::row_step()) {
        const element* from = x + row * columns;
        added mine;
        each<Team, COUNT>(columns, [&](u64 at) {
            values<COUNT> v(from + at);
#pragma unroll
            for (float value : v.of) { mine.sum += value; }
        });
        mine = Team::combined(mine);
        if (Team::rank() == 0) { out[row] = mine.sum; }
    }
}

template <class Team, u32 COUNT>
__device__ __forceinline__ void arg_max(const element* x, u64 rows, u64 columns, u64* out) {
    for (u64 row = Team::first_row(); row < rows; row += Team::row_step()) {
        const element* from = x + row * columns;
        greatest mine;
        each<Team, COUNT>(columns, [&](u64 at) {
            values<COUNT> v(from + at);
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) { mine = mine.with({v.of[i], at + i}); }
        });
        mine = Team::combined(mine);
        if (Team::rank() == 0) { out[row] = mine.at; }
    }
}

template <class Team, u32 COUNT>
__device__ __forceinline__ void softmax(const element* x, u64 rows, u64 columns, element* out) {
    for (u64 row = Team::first_row(); row < rows; row += Team::row_step()) {
        const element* from = x + row * columns;
        element* to = out + row * columns;
        exponentials mine;
        each<Team, COUNT>(columns, [&](u64 at) {
            values<COUNT> v(from + at);
            float most = mine.most;
#pragma unroll
            for (float value : v.of) { most = greatest_of{}(most, value); }
            if (most == bounds<float>::least()) { return; }
            float sum = mine.sum * expf(mine.most - most);
#pragma unroll
            for (float value : v.of) { sum += expf(value - most); }
            mine = {most, sum};
        });
        mine = Team::combined(mine);
        float scale = 1.0f / mine.sum;
        each<Team, COUNT>(columns, [&](u64 at) {
            values<COUNT> v(from + at);
#pragma unroll
            for (float& value : v.of) { value = expf(value - mine.most) * scale; }
            v.store(to + at);
        });
    }
}

template <class Team, u32 COUNT>
__device__ __forceinline__ void layer_norm(
    const element* x, u64 rows, u64 columns, const element* gamma, const element* beta, float epsilon, element* out) {
    for (u64 row = Team::first_row(); row < rows; row += Team::row_step()) {
        const element* from = x + row * columns;
        element* to = out + row * columns;
        added mine;
        each<Team, COUNT>(columns, [&](u64 at) {
            values<COUNT> v(from + at);
#pragma unroll
            for (float value : v.of) { mine.sum += value; }
        });
        float mean = Team::combined(mine).sum / float(columns);
        // Around the mean, and not as a difference of large sums.
        added squares;
        each<Team, COUNT>(columns, [&](u64 at) {
            values<COUNT> v(from + at);
#pragma unroll
            for (float value : v.of) { squares.sum += (value - mean) * (value - mean); }
        });
        float scale = 1.0f / sqrtf(Team::combined(squares).sum / float(columns) + epsilon);
        each<Team, COUNT>(columns, [&](u64 at) {
            values<COUNT> v(from + at), by(gamma + at), plus(beta + at);
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) { v.of[i] = (v.of[i] - mean) * scale * by.of[i] + plus.of[i]; }
            v.store(to + at);
        });
    }
}

template <class... At> __device__ __forceinline__ bool are_aligned(u64 columns, At*... at) {
    return ((columns % VECTOR == 0) && ... && (reinterpret_cast<u64>(at) % 16 == 0));
}

extern "C" __global__ void rows_facts() {
    FACT("blocks_threads", BLOCK_THREADS);
    FACT("warps_threads", WARPS_THREADS);
    FACT("warp_columns", WARP_COLUMNS);
}

// Which width depends on addresses, so it is chosen in the kernel.
#define KERNEL(NAME, BLOCK, THREADS, PARAMETERS, ALIGNED, ...)                       \
    extern "C" __global__ void __launch_bounds__(THREADS) PARAMETERS {               \
        begin();                                                                     \
        if (are_aligned ALIGNED) {                                                   \
            NAME<team<BLOCK>, VECTOR>(__VA_ARGS__);                                  \
        } else {                                                                     \
            NAME<team<BLOCK>, 1>(__VA_ARGS__);                                       \
        }                                                                            \
    }
#define KERNELS(NAME, PARAMETERS, ALIGNED, ...)                                      \
    KERNEL(NAME, true, BLOCK_THREADS, NAME##_blocks PARAMETERS, ALIGNED, __VA_ARGS__) \
    KERNEL(NAME, false, WARPS_THREADS, NAME##_warps PARAMETERS, ALIGNED, __VA_ARGS__)

KERNELS(sum, (const element* x, u64 rows, u64 columns, float* out), (columns, x), x, rows, columns, out)
KERNELS(arg_max, (const element* x, u64 rows, u64 columns, u64* out), (columns, x), x, rows, columns, out)
KERNELS(softmax, (const element* x, u64 rows, u64 columns, element* out), (columns, x, out), x, rows, columns, out)
KERNELS(layer_norm,
        (const element* x, u64 rows, u64 columns, const element* gamma, const element* beta, float epsilon, element* out),
        (columns, x, gamma, beta, out), x, rows, columns, gamma, beta, epsilon, out)
