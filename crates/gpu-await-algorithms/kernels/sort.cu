// Radix sorts of keys, alone and with values, by CUB's agents. Keys are unsigned words of `KEY`'s width.
//
// Lengths from 2^32 on take an image that is compiled with `WIDE`.
//
// `sort_small` sorts one tile. `sort_init` zeroes the counts of `sort_count`, which counts the digits of all passes;
// `sort_offsets` sums them up; `sort_pass` orders by one digit.
#include "keys.cuh"

#include <cub/agent/agent_radix_sort_histogram.cuh>
#include <cub/agent/agent_radix_sort_onesweep.cuh>
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/dispatch/tuning/tuning_radix_sort.cuh>

using namespace gpu_await;

using word = KEY;
using key = key_of<word>;
// What counts and places of elements are kept in.
#ifdef WIDE
using place = u64;
#else
using place = u32;
#endif

namespace radix_sort = cub::detail::radix_sort;
constexpr cub::RadixSortPolicy policy =
    radix_sort::policy_selector_from_types<word, value, place>{}(cuda::compute_capability{CAPABILITY});
constexpr auto pass = policy.onesweep;
constexpr auto count = policy.histogram;
constexpr auto small = policy.single_tile;
constexpr int radix_bits = pass.radix_bits;
static_assert(radix_bits == 8 && count.radix_bits == 8, "a digit is a byte");
constexpr int digits = 1 << radix_bits;
constexpr int offsets_threads = policy.exclusive_sum.threads_per_block;

extern "C" __global__ void sort_facts() {
    FACT("place_bytes", sizeof(place));
    FACT("pass_threads", pass.threads_per_block);
    FACT("pass_tile", pass.threads_per_block * pass.items_per_thread);
    FACT("count_threads", count.threads_per_block);
    FACT("count_tile", count.threads_per_block * count.items_per_thread);
    FACT("offsets_threads", offsets_threads);
    FACT("small_threads", small.threads_per_block);
    FACT("small_tile", small.threads_per_block * small.items_per_thread);
}

extern "C" __global__ void __launch_bounds__(256) sort_init(uint4* words, u64 count_of_words) {
    begin_and_let_next_start();
    u64 stride = u64(blockDim.x) * gridDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count_of_words; i += stride) { words[i] = uint4{0, 0, 0, 0}; }
}

extern "C" __global__ void __launch_bounds__(count.threads_per_block)
sort_count(place* bins, const key* keys, u64 most, const u64* len, word if_negative, word always) {
    begin();
    using policy_t = cub::detail::agent_radix_sort_histogram_policy<
        count.threads_per_block, count.items_per_thread, count.private_partitions, void, count.radix_bits>;
    using agent = radix_sort::AgentRadixSortHistogram<policy_t, false, key, place, order<word>>;
    __shared__ typename agent::TempStorage storage;
    agent(storage, bins, keys, place(length(most, len)), 0, 8 * sizeof(word), order<word>{if_negative, always}).Process();
}

extern "C" __global__ void __launch_bounds__(offsets_threads) sort_offsets(place* bins) {
    begin_and_let_next_start();
    constexpr int per_thread = (digits + offsets_threads - 1) / offsets_threads;
    using scan = cub::BlockScan<place, offsets_threads>;
    __shared__ typename scan::TempStorage storage;
    place* mine = bins + u64(blockIdx.x) * digits;
    place sums[per_thread];
    for (int u = 0; u < per_thread; ++u) {
        int bin = threadIdx.x * per_thread + u;
        sums[u] = bin < digits ? mine[bin] : 0;
    }
    scan(storage).ExclusiveSum(sums, sums);
    for (int u = 0; u < per_thread; ++u) {
        int bin = threadIdx.x * per_thread + u;
        if (bin < digits) { mine[bin] = sums[u]; }
    }
}

// What a pass is about: a portion of the keys, the first bit of a digit, and how the bits of keys are ordered.
struct portion {
    u64 first;
    u64 if_negative;
    u64 always;
    int items;
    int bit;
};

// Orders a portion of the keys by a digit. Its last block leaves in `next` where the next portion goes on.
// With values, two blocks of a multiprocessor: in as many registers as the compiler takes by itself there is one, and pairs
// take half as long again. Keys alone fit three times, if nothing is said.
#ifdef VALUE
#define PASS_BOUNDS __launch_bounds__(pass.threads_per_block, 2)
#else
#define PASS_BOUNDS __launch_bounds__(pass.threads_per_block)
#endif
// Wide keys alone take fewer instructions so. Narrow ones take more registers, and two blocks fit instead of three; pairs of 32
// bits each take a hundredth longer.
using pass_key = cuda::std::conditional_t<!has_values && sizeof(word) == 8, raw_key<word>, key>;
extern "C" __global__ void PASS_BOUNDS
sort_pass(int* lookback, int* counter, place* next, const place* bins, pass_key* keys_out, const pass_key* keys_in,
          value* values_out, const value* values_in, u64 most, const u64* len, portion of) {
    begin();
    using policy_t = cub::detail::agent_radix_sort_onesweep_policy<
        0, 0, void, pass.rank_private_partitions, pass.rank_algorithm, pass.scan_algorithm, pass.store_algorithm,
        pass.radix_bits, cub::detail::NoScaling<pass.threads_per_block, pass.items_per_thread>>;
    using agent = radix_sort::AgentRadixSortOnesweep<policy_t, false, pass_key, value, place, int, order<word>>;
    __shared__ typename agent::TempStorage storage;
    u64 total = length(most, len);
    u64 left = total > of.first ? total - of.first : 0;
    int items = left < u64(of.items) ? int(left) : of.items;
    agent sorter(storage, lookback, counter, next, bins, keys_out, keys_in + of.first, values_out,
                 values_in + (has_values ? of.first : 0), items, of.bit, radix_bits, order<word>{word(of.if_negative), word(of.always)});
    if (sorter.block_idx * agent::TILE_ITEMS >= items) { return; }
    sorter.Process();
}

extern "C" __global__ void __launch_bounds__(small.threads_per_block, 1)
sort_small(key* keys_out, const key* keys_in, value* values_out, const value* values_in, u64 most, const u64* len,
           word if_negative, word always) {
    begin();
    constexpr int threads = small.threads_per_block, items = small.items_per_thread;
    using sort = cub::BlockRadixSort<key, threads, items, value, small.radix_bits,
                                     (small.rank_algorithm == cub::RADIX_RANK_MEMOIZE), small.scan_algorithm>;
    using load_keys = cub::BlockLoad<word, threads, items, small.load_algorithm>;
    using load_values = cub::BlockLoad<value, threads, items, small.load_algorithm>;
    __shared__ union {
        typename sort::TempStorage sorting;
        typename load_keys::TempStorage loading_keys;
        typename load_values::TempStorage loading_values;
    } storage;
    order<word> by{if_negative, always};
    int count = int(length(most, len));
    key keys[items];
    value values[items];
    word words[items];
    load_keys(storage.loading_keys).Load(reinterpret_cast<const word*>(keys_in), words, count, by.out(word(~word(0))));
    for (int i = 0; i < items; ++i) { keys[i].bits = words[i]; }
    __syncthreads();
    if constexpr (has_values) {
        load_values(storage.loading_values).Load(values_in, values, count);
        __syncthreads();
    }
    sort(storage.sorting).SortBlockedToStriped(keys, values, 0, 8 * sizeof(word), cub::detail::bool_constant_v<false>,
                                               cub::detail::bool_constant_v<!has_values>, by);
    for (int i = 0; i < items; ++i) {
        int at = i * threads + threadIdx.x;
        if (at < count) {
            keys_out[at] = keys[i];
            if constexpr (has_values) { values_out[at] = values[i]; }
        }
    }
}
