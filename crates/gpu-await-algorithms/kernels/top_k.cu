// The first elements of a sorted array, and where they were. Keys are unsigned words of `ELEMENT`'s width, as sorts have them.
//
// `number_*` copies the keys and numbers them, for a sort to order both; `take` and `take_*` hand out the first of what came of it.
#include "keys.cuh"

#ifdef RADIX
#include <cub/agent/agent_topk.cuh>
#include <cub/device/dispatch/tuning/tuning_topk.cuh>
#endif

using namespace gpu_await;
using element = ELEMENT;

// An element and its place as a word, from the top: the element's bits in their order, then 32 of the place.
template <class U> struct words_of {
    using value_type = u64;
    using reference = u64;
    using pointer = u64*;
    using difference_type = long long;
    using iterator_category = cuda::std::random_access_iterator_tag;
    static constexpr int element_bit = 64 - 8 * int(sizeof(U)), place_bit = element_bit - 32;
    const U* in;
    u32 first;
    order<U> by;
    __device__ __forceinline__ u64 operator[](u32 i) const {
        u32 place = first + i;
        return u64(by.in(in[place])) << element_bit | u64(place) << place_bit;
    }
    __device__ __forceinline__ u64 operator*() const { return (*this)[0]; }
    __device__ __forceinline__ words_of operator+(u32 more) const { return {in, first + more, by}; }
    static __device__ __forceinline__ U element_of(u64 word) { return U(word >> element_bit); }
    static __device__ __forceinline__ u64 place_of(u64 word) { return u32(word >> place_bit); }
};

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
        begin();                                                                                                           \
        number(in, keys, indices, most);                                                                                   \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) take_##INDEX(const element* keys, const INDEX* indices, element* out,  \
                                                                   u64* out_indices, u64 k, u64 most, const u64* len) {    \
        begin();                                                                                                           \
        take(keys, indices, out, out_indices, k, length(most, len));                                                       \
    }

KERNELS(u32)
KERNELS(u64)

extern "C" __global__ void __launch_bounds__(256) take(const element* keys, element* out, u64 k, u64 most, const u64* len) {
    begin();
    take(keys, static_cast<const u32*>(nullptr), out, nullptr, k, length(most, len));
}

#ifdef RADIX
// The first `k` of many, by CUB's radix select: of an element and its place a word of 64 bits is made, in the order that is asked
// for, so that no two are equal and the `k` least are always the same ones. A sort of those is left to do.
//
// `top_init` zeroes what `top_count` counts in: the first digit of each. `top_filter` goes on with the elements whose digits so
// far are those of the last one that is taken; `top_last` takes what is left. `top_unpack` makes elements and places of the words.
namespace topk = cub::detail::topk;
using input = words_of<element>;
constexpr cub::detail::topk::topk_policy policy =
    topk::policy_selector_from_types<u64, cub::NullType, u32, u32>{}(cuda::compute_capability{CAPABILITY});
using policy_t = topk::agent_topk_policy<
    policy.threads_per_block, policy.items_per_thread, policy.bits_per_pass, policy.load_algorithm, policy.scan_algorithm>;
constexpr int significant_bits = 8 * sizeof(element) + 32;
constexpr int passes = (significant_bits + policy.bits_per_pass - 1) / policy.bits_per_pass;
using counter_t = topk::Counter<u64, u32, u32>;

// A digit of a word, the first one from the top.
struct extract {
    int bit;
    u32 mask;
    __device__ __forceinline__ explicit extract(int pass) : bit(topk::calc_start_bit<u64, policy.bits_per_pass>(pass)) {
        mask = (1u << (topk::calc_start_bit<u64, policy.bits_per_pass>(pass - 1) - bit)) - 1;
    }
    __device__ __forceinline__ int operator()(u64 word) const { return int(u32(word >> bit) & mask); }
};

// How the digits of the passes before compare with those of the last word that is taken.
struct identify {
    const u64* last;
    int bit;
    __device__ __forceinline__ identify(counter_t& counter, int pass)
        : last(&counter.kth_key_bits.bits), bit(topk::calc_start_bit<u64, policy.bits_per_pass>(pass - 1)) {}
    __device__ __forceinline__ topk::candidate_class operator()(u64 word) const {
        u64 digits = word >> bit << bit;
        return digits < *last ? topk::candidate_class::selected
             : digits == *last ? topk::candidate_class::candidate
                               : topk::candidate_class::rejected;
    }
};

template <class Extract, class Identify>
using agent_of = topk::AgentTopK<policy_t, input, u64*, cub::NullType*, cub::NullType*, Extract, Identify, u32, u32>;

struct state {
    counter_t counter;
    u32 histogram[1 << policy.bits_per_pass];
};

extern "C" __global__ void top_facts() {
    FACT("passes", passes);
    FACT("state_bytes", sizeof(state));
    FACT("threads", policy.threads_per_block);
    FACT("tile", policy.threads_per_block * policy.items_per_thread);
}

struct selection {
    u64 if_negative;
    u64 always;
    u32 k;
    u32 buffer_items;
    int pass;
    __device__ __forceinline__ order<element> by() const { return {element(if_negative), element(always)}; }
};

extern "C" __global__ void __launch_bounds__(256) top_init(u32* words, u64 count) {
    begin_and_let_next_start();
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(blockDim.x) * gridDim.x) { words[i] = 0; }
}

extern "C" __global__ void __launch_bounds__(policy.threads_per_block)
top_count(const element* in, state* all, u64 most, const u64* len, selection of) {
    begin();
    using agent = agent_of<extract, cub::NullType>;
    __shared__ typename agent::TempStorage storage;
    u32 items = u32(length(most, len));
    u32 k = of.k < items ? of.k : items;
    if (k == 0) { return; }
    agent(storage, input{in, 0, of.by()}, nullptr, nullptr, nullptr, items, k, of.buffer_items, extract(0), {})
        .invoke_histogram_only(&all->counter, all->histogram, 0, passes == 1);
}

extern "C" __global__ void __launch_bounds__(policy.threads_per_block)
top_filter(const element* in, u64* found, u64* buffers, state* all, u64 most, const u64* len, selection of) {
    begin();
    using agent = agent_of<extract, identify>;
    __shared__ typename agent::TempStorage storage;
    u32 items = u32(length(most, len));
    u32 k = of.k < items ? of.k : items;
    if (k == 0) { return; }
    u64* read = buffers + (of.pass % 2 == 0 ? 0 : of.buffer_items);
    u64* written = buffers + (of.pass % 2 == 0 ? of.buffer_items : 0);
    agent(storage, input{in, 0, of.by()}, found, nullptr, nullptr, items, k, of.buffer_items, extract(of.pass),
          identify(all->counter, of.pass))
        .invoke_filter_and_histogram(read, nullptr, written, nullptr, &all->counter, all->histogram, of.pass, of.pass == passes - 1);
}

extern "C" __global__ void __launch_bounds__(policy.threads_per_block)
top_last(const element* in, u64* found, u64* buffers, state* all, u64 most, const u64* len, selection of) {
    begin();
    using agent = agent_of<cub::NullType, identify>;
    __shared__ typename agent::TempStorage storage;
    u32 items = u32(length(most, len));
    u32 k = of.k < items ? of.k : items;
    if (k == 0) { return; }
    u64* read = buffers + (of.pass % 2 == 0 ? 0 : of.buffer_items);
    agent(storage, input{in, 0, of.by()}, found, nullptr, nullptr, items, k, of.buffer_items, {},
          identify(all->counter, of.pass))
        .invoke_last_filter(read, nullptr, &all->counter, k, of.pass);
}

extern "C" __global__ void __launch_bounds__(256)
top_unpack(const u64* found, element* out, u64* places, u64 most, const u64* len, selection of) {
    begin();
    u64 items = length(most, len);
    u64 count = of.k < items ? of.k : items;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(blockDim.x) * gridDim.x) {
        out[i] = of.by().out(input::element_of(found[i]));
        if (places != nullptr) { places[i] = input::place_of(found[i]); }
    }
}
#endif
