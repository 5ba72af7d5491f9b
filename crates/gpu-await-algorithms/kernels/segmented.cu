// Reductions of each segment of an array by CUB's agents, to one element a segment: sum, least, greatest; with `COMBINED` product
// and operators of bits. `NAME_blocks` has a block reduce a segment, `NAME_warps` a warp.
#include "operators.cuh"
#include "segments.cuh"

#include <cub/agent/agent_reduce.cuh>
#include <cub/device/dispatch/tuning/tuning_segmented_reduce.cuh>

using namespace gpu_await;
using element = ELEMENT;
using computed = compute_t<element>;
using summed = total_t<element>;
using plus = cuda::std::plus<>;

template <class A, class Op> struct tuning {
    using selector = cub::detail::segmented_reduce::policy_selector_from_types<A, u64, Op>;
    static constexpr cub::SegmentedReducePolicy policy = selector{}(cuda::compute_capability{CAPABILITY});
    static constexpr auto blocks = policy.large_reduce;
    static constexpr auto warps = policy.medium_reduce;
    static constexpr int warps_of_block = warps.threads_per_block / 32;
    static_assert(warps.threads_per_warp == 32, "the lanes that wait for each other are a warp");
};

template <class A, class Op, class Transform>
__device__ __forceinline__ void reduce_by_blocks(const element* x, segments all, element* out, Op op, Transform transform, A init) {
    constexpr auto p = tuning<A, Op>::blocks;
    using policy = cub::detail::agent_reduce_policy<
        0, 0, A, p.vec_size, p.reduce_algorithm, p.load_modifier, cub::detail::NoScaling<p.threads_per_block, p.items_per_thread, A>>;
    using agent = cub::detail::reduce::AgentReduce<policy, const element*, u64, Op, A, Transform>;
    __shared__ typename agent::TempStorage storage;
    for (u64 segment = blockIdx.x; segment < all.count; segment += gridDim.x) {
        u64 begin = all.inside(segment), end = all.end(segment, begin);
        A reduced = init;
        if (begin < end) { reduced = op(init, agent(storage, x, op, transform).ConsumeRange(begin, end)); }
        if (threadIdx.x == 0) { out[segment] = element(reduced); }
        __syncthreads();
    }
}

template <class A, class Op, class Transform>
__device__ __forceinline__ void reduce_by_warps(const element* x, segments all, element* out, Op op, Transform transform, A init) {
    constexpr auto p = tuning<A, Op>::warps;
    constexpr int warps = tuning<A, Op>::warps_of_block;
    using policy = cub::detail::agent_warp_reduce_policy<
        p.threads_per_block, p.threads_per_warp, p.items_per_thread, void, p.vec_size, p.load_modifier>;
    using agent = cub::detail::reduce::AgentWarpReduce<policy, const element*, u64, Op, A, Transform>;
    __shared__ typename agent::TempStorage storage[warps];
    u32 warp = threadIdx.x / 32;
    for (u64 segment = u64(blockIdx.x) * warps + warp; segment < all.count; segment += u64(gridDim.x) * warps) {
        u64 begin = all.inside(segment), end = all.end(segment, begin);
        A reduced = init;
        if (begin < end) { reduced = op(init, agent(storage[warp], x, op, transform).ConsumeRange(begin, end)); }
        if (threadIdx.x % 32 == 0) { out[segment] = element(reduced); }
        __syncwarp();
    }
}

#define KERNELS(NAME, A, OP, BY, WITH, TRANSFORM, INIT)                                                                       \
    extern "C" __global__ void NAME##_facts() {                                                                               \
        FACT(#NAME "_blocks_threads", (tuning<A, OP>::blocks.threads_per_block));                                             \
        FACT(#NAME "_warps_threads", (tuning<A, OP>::warps.threads_per_block));                                               \
        FACT(#NAME "_warp_tile", (32 * tuning<A, OP>::warps.items_per_thread));                                               \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(tuning<A, OP>::blocks.threads_per_block)                                     \
    NAME##_blocks(const element* x, u64 most, const u64* len, const u64* offsets, element* out, u64 offsets_most,             \
                  const u64* offsets_len, INIT init WITH) {                                                                   \
        begin();                                                                                                              \
        reduce_by_blocks<A>(x, segments(offsets, offsets_most, offsets_len, length(most, len)), out, BY, TRANSFORM, A(init)); \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(tuning<A, OP>::warps.threads_per_block)                                      \
    NAME##_warps(const element* x, u64 most, const u64* len, const u64* offsets, element* out, u64 offsets_most,              \
                 const u64* offsets_len, INIT init WITH) {                                                                    \
        begin();                                                                                                              \
        reduce_by_warps<A>(x, segments(offsets, offsets_most, offsets_len, length(most, len)), out, BY, TRANSFORM, A(init));  \
    }

#define NOTHING
#ifdef COMBINED
using inner = combined_t<element>;
KERNELS(product, inner, times, times{}, NOTHING, to_combined<element>{}, computed)
#ifdef BITS
KERNELS(bits, inner, bitwise<inner>, BITWISE(inner), WITH_BITS, to_combined<element>{}, computed)
#endif
#else
KERNELS(sum, summed, plus, plus{}, NOTHING, to_total<element>{}, summed)
KERNELS(min, computed, least_of, least_of{}, NOTHING, to_compute<element>{}, computed)
KERNELS(max, computed, greatest_of, greatest_of{}, NOTHING, to_compute<element>{}, computed)
#endif
