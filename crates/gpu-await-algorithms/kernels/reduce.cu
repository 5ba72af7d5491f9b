// Reductions of one array to one value, by CUB's agents: sum, least, greatest, where these are, the sum of products of two
// arrays, how many elements satisfy a comparison; with `COMBINED` product and operators of bits.
//
// Each has three kernels. `NAME_tiles` leaves one value a block in `partials`; `NAME_last` makes one of those that a grid of
// `blocks` left; `NAME_single` does all of it in one block. What has an `init` begins with it.
#include "operators.cuh"

#include <cub/agent/agent_reduce.cuh>
#include <cub/device/dispatch/tuning/tuning_reduce.cuh>
#include <cub/grid/grid_even_share.cuh>

using namespace gpu_await;
using element = ELEMENT;

template <class A, class Op>
struct tuning {
    using selector = cub::detail::reduce::policy_selector_from_types<A, u64, Op>;
    static constexpr auto policy = selector{}(cuda::compute_capability{CAPABILITY});
    static constexpr auto tiles = policy.multi_tile;
    static constexpr auto single = policy.single_tile;
};

template <class A, int Threads, int Items, int Vector, cub::BlockReduceAlgorithm Algorithm, cub::CacheLoadModifier Load>
using agent_policy = cub::detail::agent_reduce_policy<0, 0, A, Vector, Algorithm, Load, cub::detail::NoScaling<Threads, Items, A>>;

template <class A, class Op, class In, class Transform>
__device__ __forceinline__ void reduce_tiles(In in, A* partials, u64 len, Op op, Transform transform) {
    constexpr auto p = tuning<A, Op>::tiles;
    using policy = agent_policy<A, p.threads_per_block, p.items_per_thread, p.vec_size, p.reduce_algorithm, p.load_modifier>;
    using agent = cub::detail::reduce::AgentReduce<policy, In, u64, Op, A, Transform>;
    __shared__ typename agent::TempStorage storage;
    cub::GridEvenShare<u64> share;
    share.DispatchInit(len, static_cast<int>(gridDim.x), p.threads_per_block * p.items_per_thread);
    if (static_cast<int>(blockIdx.x) >= share.grid_size) { return; }
    A of_block = agent(storage, in, op, transform).ConsumeTiles(share);
    if (threadIdx.x == 0) { partials[blockIdx.x] = of_block; }
}

// Of `all`, and what there is; whether the thread has it.
template <class A, class Op, class In, class Transform>
__device__ __forceinline__ bool reduce_in_block(In in, u64 len, Op op, Transform transform, A& all) {
    constexpr auto p = tuning<A, Op>::single;
    using policy = agent_policy<A, p.threads_per_block, p.items_per_thread, p.vec_size, p.reduce_algorithm, p.load_modifier>;
    using agent = cub::detail::reduce::AgentReduce<policy, In, u64, Op, A, Transform>;
    __shared__ typename agent::TempStorage storage;
    if (len == 0) { return threadIdx.x == 0; }
    all = op(all, agent(storage, in, op, transform).ConsumeRange(u64(0), len));
    return threadIdx.x == 0;
}

template <class A, class Op>
__device__ __forceinline__ u64 partials_of(u64 len, u32 blocks) {
    constexpr auto p = tuning<A, Op>::tiles;
    cub::GridEvenShare<u64> share;
    share.DispatchInit(len, static_cast<int>(blocks), p.threads_per_block * p.items_per_thread);
    return share.grid_size;
}

// A value and where it is; the first of equal ones.
template <class T> struct placed {
    T value;
    u64 at;
    __device__ __forceinline__ explicit operator u64() const { return at; }
};
template <class T> struct least_place {
    __device__ __forceinline__ placed<T> operator()(placed<T> a, placed<T> b) const {
        bool second = is_less(b.value, a.value) || (!is_less(a.value, b.value) && b.at < a.at);
        return second ? b : a;
    }
};
template <class T> struct greatest_place {
    __device__ __forceinline__ placed<T> operator()(placed<T> a, placed<T> b) const {
        bool second = is_greater(b.value, a.value) || (!is_greater(a.value, b.value) && b.at < a.at);
        return second ? b : a;
    }
};

// What the agents read arrays through that are not plain ones.
template <class V> struct iterator_of {
    using value_type = V;
    using reference = V;
    using pointer = V*;
    using difference_type = long long;
    using iterator_category = cuda::std::random_access_iterator_tag;
};
template <class T> struct places : iterator_of<placed<compute_t<T>>> {
    const T* in;
    u64 first;
    __device__ __forceinline__ places(const T* in, u64 first = 0) : in(in), first(first) {}
    __device__ __forceinline__ placed<compute_t<T>> operator[](u64 i) const { return {compute_t<T>(in[first + i]), first + i}; }
    __device__ __forceinline__ placed<compute_t<T>> operator*() const { return (*this)[0]; }
    __device__ __forceinline__ places operator+(u64 more) const { return places(in, first + more); }
};
template <class T> struct products : iterator_of<total_t<T>> {
    const T* x;
    const T* y;
    __device__ __forceinline__ products(const T* x, const T* y) : x(x), y(y) {}
    __device__ __forceinline__ total_t<T> operator[](u64 i) const { return to_total<T>()(x[i]) * to_total<T>()(y[i]); }
    __device__ __forceinline__ total_t<T> operator*() const { return (*this)[0]; }
    __device__ __forceinline__ products operator+(u64 more) const { return products(x + more, y + more); }
};
template <class T> struct satisfied {
    comparison<T> holds;
    __device__ __forceinline__ u64 operator()(T value) const { return holds(value) ? 1 : 0; }
};

using plus = cuda::std::plus<>;
using identity = cuda::std::identity;
using computed = compute_t<element>;
using summed = total_t<element>;

// What a launch has to know, for `build.py`.
#define FACTS(NAME, A, OP)                                                                        \
    extern "C" __global__ void NAME##_facts() {                                                   \
        FACT(#NAME "_tiles_threads", (tuning<A, OP>::tiles.threads_per_block));                   \
        FACT(#NAME "_tile", (tuning<A, OP>::tiles.threads_per_block * tuning<A, OP>::tiles.items_per_thread));     \
        FACT(#NAME "_single_threads", (tuning<A, OP>::single.threads_per_block));                 \
        FACT(#NAME "_single_tile", (tuning<A, OP>::single.threads_per_block * tuning<A, OP>::single.items_per_thread)); \
        FACT(#NAME "_partial_bytes", sizeof(A));                                                  \
    }

// `BY`, an `OP` of the parameters `WITH`, combines; `FIRST`, of the parameters in `MORE`, is what all is combined with; `PUT` writes
// that.
#define KERNELS(NAME, A, OP, BY, WITH, INPUT, FROM, TRANSFORM, OUT, FIRST, PUT, MORE)               \
    FACTS(NAME, A, OP)                                                                              \
    extern "C" __global__ void __launch_bounds__(tuning<A, OP>::tiles.threads_per_block)            \
    NAME##_tiles(INPUT, A* partials, u64 most, const u64* len WITH) {                               \
        begin_and_let_next_start();                                                                 \
        reduce_tiles<A>(FROM, partials, length(most, len), BY, TRANSFORM);                        \
    }                                                                                               \
    extern "C" __global__ void __launch_bounds__(tuning<A, OP>::single.threads_per_block, 1)        \
    NAME##_single(INPUT, OUT* out, u64 most, const u64* len MORE WITH) {                            \
        begin();                                                                                    \
        A all = FIRST;                                                                              \
        if (reduce_in_block<A>(FROM, length(most, len), BY, TRANSFORM, all)) { PUT; }             \
    }                                                                                               \
    extern "C" __global__ void __launch_bounds__(tuning<A, OP>::single.threads_per_block, 1)        \
    NAME##_last(const A* partials, OUT* out, u64 most, const u64* len, u32 blocks MORE WITH) {      \
        begin_and_let_next_start();                                                                 \
        A all = FIRST;                                                                              \
        u64 count = partials_of<A, OP>(length(most, len), blocks);                                  \
        if (reduce_in_block<A>(partials, count, BY, identity{}, all)) { PUT; }                    \
    }

#define NOTHING
#define PLAIN const element* x
#define INIT(TYPE) , TYPE init
#define PUT_ELEMENT *out = element(all)

#ifdef COMBINED
using inner = combined_t<element>;
KERNELS(product, inner, times, times{}, NOTHING, PLAIN, x, to_combined<element>{}, element, inner(init), PUT_ELEMENT, INIT(computed))
#ifdef BITS
KERNELS(bits, inner, bitwise<inner>, BITWISE(inner), WITH_BITS, PLAIN, x, to_combined<element>{}, element, inner(init), PUT_ELEMENT, INIT(computed))
#endif
#else
using place = placed<computed>;

// A sum goes out as it is computed, or as an element, rounded once.
#define PUT_SUM if (as_element) { *static_cast<element*>(out) = element(all); } else { *static_cast<summed*>(out) = all; }
#define INIT_SUM INIT(summed), u32 as_element
KERNELS(sum, summed, plus, plus{}, NOTHING, PLAIN, x, to_total<element>{}, void, init, PUT_SUM, INIT_SUM)
KERNELS(min, computed, least_of, least_of{}, NOTHING, PLAIN, x, to_compute<element>{}, element, init, PUT_ELEMENT, INIT(computed))
KERNELS(max, computed, greatest_of, greatest_of{}, NOTHING, PLAIN, x, to_compute<element>{}, element, init, PUT_ELEMENT, INIT(computed))
#define PUT_WORD *out = u64(all)
KERNELS(arg_min, place, least_place<computed>, least_place<computed>{}, NOTHING, PLAIN, places<element>(x), identity{}, u64, (place{bounds<computed>::greatest(), ~0ull}), PUT_WORD, NOTHING)
KERNELS(arg_max, place, greatest_place<computed>, greatest_place<computed>{}, NOTHING, PLAIN, places<element>(x), identity{}, u64, (place{bounds<computed>::least(), ~0ull}), PUT_WORD, NOTHING)
#define PAIR const element* x, const element* y
KERNELS(dot, summed, plus, plus{}, NOTHING, PAIR, (products<element>(x, y)), identity{}, summed, summed(0), *out = all, NOTHING)
#define COMPARED const element* x, computed from, computed to, u32 is_not
KERNELS(count_if, u64, plus, plus{}, NOTHING, COMPARED, x, (satisfied<element>{{from, to, is_not != 0}}), u64, 0ull, PUT_WORD, NOTHING)
#endif
