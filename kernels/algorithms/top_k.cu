// The first elements of a sorted array, and where they were. Keys are unsigned words of `ELEMENT`'s width, as sorts have them.
//
// `number_*` copies the keys and numbers them, for a sort to order both; `take` and `take_*` hand out the first of what came of it.
#include "types.cuh"

using namespace gpu_await;
using element = ELEMENT;

template <class Index> __device__ __forceinline__ void number(const element* in, element* keys, Index* indices, u64 most) {
    u64 stride = u64(blockDim.x) * gridDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < most; i += stride) {
        keys[i] = in[i];
        indices[i] = Index(i);
    }
}

// As many as are wanted, and there.
template <class Index>
__device__ __forceinline__ void take(const element* keys, const Index* indices, element* out, u64* out_indices, u64 k, u64 len) {
    u64 count = len < k ? len : k;
    u64 stride = u64(blockDim.x) * gridDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
        out[i] = keys[i];
        if (indices != nullptr) { out_indices[i] = indices[i]; }
    }
}

#define KERNELS(INDEX)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) number_##INDEX(const element* in, element* keys, INDEX* indices, u64 most) { \
        number(in, keys, indices, most);                                                                                   \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) take_##INDEX(const element* keys, const INDEX* indices, element* out,  \
                                                                   u64* out_indices, u64 k, u64 most, const u64* len) {    \
        take(keys, indices, out, out_indices, k, length(most, len));                                                       \
    }

KERNELS(u32)
KERNELS(u64)

extern "C" __global__ void __launch_bounds__(256) take(const element* keys, element* out, u64 k, u64 most, const u64* len) {
    take(keys, static_cast<const u32*>(nullptr), out, nullptr, k, length(most, len));
}
