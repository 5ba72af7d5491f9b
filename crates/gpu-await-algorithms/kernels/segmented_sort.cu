// Sorts of each segment of an array, in place and stable, by CUB's collectives: keys of `KEY`'s width, alone and with values.
//
// `sort_warps` has a warp, or some lanes of one, sort a segment that these hold; `sort_blocks` has a block sort one that is
// longer, in registers where it fits these, and otherwise digit by digit, to memory as large as the arrays and back. No offset is
// below the one before it.
#include "keys.cuh"
#include "segments.cuh"

#include <cub/agent/agent_segmented_radix_sort.cuh>
#include <cub/device/dispatch/tuning/tuning_segmented_sort.cuh>
#include <cub/warp/warp_load.cuh>
#include <cub/warp/warp_merge_sort.cuh>
#include <cub/warp/warp_store.cuh>

using namespace gpu_await;

using word = KEY;
using key = key_of<word>;

constexpr cub::SegmentedSortPolicy policy =
    cub::detail::segmented_sort::policy_selector_from_types<word, value>{}(cuda::compute_capability{CAPABILITY});
constexpr auto large = policy.large_segment;
constexpr auto medium = policy.medium_segment;
static_assert(large.load_modifier != cub::LOAD_LDG, "a block reads what it wrote");
// Of a warp, or of a part of one.
constexpr int lanes = medium.threads_per_warp;
constexpr int warp_tile = lanes * medium.items_per_thread;
constexpr int block_tile = large.threads_per_block * large.items_per_thread;

extern "C" __global__ void segmented_sort_facts() {
    FACT("warps_threads", medium.threads_per_block);
    FACT("warps", medium.threads_per_block / lanes);
    FACT("warp_tile", warp_tile);
    FACT("blocks_threads", large.threads_per_block);
}

struct before {
    __device__ __forceinline__ bool operator()(word a, word b) const { return a < b; }
};

#define SEGMENTS u64 most, const u64 *len, const u64 *offsets, u64 offsets_most, const u64 *offsets_len, word if_negative, word always

extern "C" __global__ void __launch_bounds__(medium.threads_per_block) sort_warps(word* keys, value* values, SEGMENTS) {
    begin();
    constexpr int warps = medium.threads_per_block / lanes, items = medium.items_per_thread;
    using sort = cub::WarpMergeSort<word, items, lanes, value>;
    using load_keys = cub::WarpLoad<word, items, medium.load_algorithm, lanes>;
    using load_values = cub::WarpLoad<value, items, medium.load_algorithm, lanes>;
    using store_keys = cub::WarpStore<word, items, medium.store_algorithm, lanes>;
    using store_values = cub::WarpStore<value, items, medium.store_algorithm, lanes>;
    __shared__ union {
        typename sort::TempStorage sorting;
        typename load_keys::TempStorage loading_keys;
        typename load_values::TempStorage loading_values;
        typename store_keys::TempStorage storing_keys;
        typename store_values::TempStorage storing_values;
    } storage[warps];
    u32 warp = threadIdx.x / lanes;
    u32 mine_of_warp = (~0u >> (32 - lanes)) << (threadIdx.x % 32 / lanes * lanes);
    auto& mine = storage[warp];
    segments all(offsets, offsets_most, offsets_len, length(most, len));
    order<word> by{if_negative, always};
    for (u64 segment = u64(blockIdx.x) * warps + warp; segment < all.count; segment += u64(gridDim.x) * warps) {
        u64 begin = all.inside(segment), found = all.inside(segment + 1) - begin;
        if (found < 2 || found > warp_tile) { continue; }
        int count = int(found);
        word words[items];
        value with[items];
        load_keys(mine.loading_keys).Load(keys + begin, words, count, by.out(word(~word(0))));
        __syncwarp(mine_of_warp);
        if constexpr (has_values) {
            load_values(mine.loading_values).Load(values + begin, with, count);
            __syncwarp(mine_of_warp);
        }
        for (int i = 0; i < items; ++i) { words[i] = by.in(words[i]); }
        sort(mine.sorting).Sort(words, with, before{}, count, word(~word(0)));
        __syncwarp(mine_of_warp);
        for (int i = 0; i < items; ++i) { words[i] = by.out(words[i]); }
        store_keys(mine.storing_keys).Store(keys + begin, words, count);
        __syncwarp(mine_of_warp);
        if constexpr (has_values) {
            store_values(mine.storing_values).Store(values + begin, with, count);
            __syncwarp(mine_of_warp);
        }
    }
}

extern "C" __global__ void __launch_bounds__(large.threads_per_block)
sort_blocks(key* keys, value* values, key* other_keys, value* other_values, SEGMENTS) {
    begin();
    using policy_t = cub::detail::agent_radix_sort_downsweep_policy<
        0, 0, void, large.load_algorithm, large.load_modifier, large.rank_algorithm, large.scan_algorithm, large.radix_bits,
        cub::detail::NoScaling<large.threads_per_block, large.items_per_thread>>;
    using agent = cub::detail::radix_sort::AgentSegmentedRadixSort<false, policy_t, key, value, i64, order<word>>;
    constexpr int bits = 8 * sizeof(word);
    __shared__ typename agent::TempStorage storage;
    segments all(offsets, offsets_most, offsets_len, length(most, len));
    order<word> by{if_negative, always};
    for (u64 segment = blockIdx.x; segment < all.count; segment += gridDim.x) {
        u64 begin = all.inside(segment), count = all.inside(segment + 1) - begin;
        if (count <= warp_tile) { continue; }
        u64 of_values = has_values ? begin : 0;
        key *from = keys + begin, *to = other_keys + begin;
        value *values_from = values + of_values, *values_to = other_values + of_values;
        agent sorter(i64(count), storage, by);
        if (count <= block_tile) {
            sorter.ProcessSinglePass(0, bits, from, values_from, from, values_from);
        } else {
            int passes = 0;
            for (int bit = 0; bit < bits; bit += large.radix_bits) {
                int width = large.radix_bits < bits - bit ? large.radix_bits : bits - bit;
                sorter.ProcessIterative(bit, width, from, values_from, to, values_to);
                __syncthreads();
                cuda::std::swap(from, to);
                cuda::std::swap(values_from, values_to);
                ++passes;
            }
            if (passes % 2 == 1) {
                for (u64 i = threadIdx.x; i < count; i += large.threads_per_block) {
                    to[i] = from[i];
                    if constexpr (has_values) { values_to[i] = values_from[i]; }
                }
            }
        }
        __syncthreads();
    }
}
