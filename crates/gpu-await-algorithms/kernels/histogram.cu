// Histograms by CUB's agent: how many elements fall into each bin, of even ones over a range or between given levels.
//
// For integers `ELEMENT` is the unsigned type of the width: what is in a range is told by differences, which wrap, and how levels
// are ordered by bits that are flipped first.
//
// `NAME_shared` counts in shared memory, block by block, and takes at most `shared_bins` bins; `NAME_global` counts where the
// result is. `histogram_init` zeroes that.
#include "types.cuh"

#include <cub/agent/agent_histogram.cuh>
#include <cub/device/dispatch/tuning/tuning_histogram.cuh>

using namespace gpu_await;
using element = ELEMENT;
using computed = compute_t<element>;
constexpr bool is_integer = cuda::std::is_integral_v<element>;
constexpr int shared_bins = 2048;

// The bins of a range, of the same width; its ends are in it.
struct even {
    computed lower;
    // The upper end of floats; of integers how far that is from the lower one.
    computed upper;
    // Bins for 1, of floats.
    computed scale;
    u32 bins;
    template <cub::CacheLoadModifier> __device__ __forceinline__ void BinSelect(element sample, int& bin, bool valid) const {
        computed x = computed(sample);
        if constexpr (is_integer) {
            computed at = x - lower;
            if (valid && at <= upper) { bin = int(bin_of(at)); }
        } else {
            // A NaN is in no range.
            if (valid && x >= lower && x <= upper) {
                u32 found = u32((x - lower) * scale);
                bin = int(found < bins ? found : bins - 1);
            }
        }
    }
    // at * bins / (upper + 1), rounded down.
    __device__ __forceinline__ u32 bin_of(computed at) const {
        if constexpr (sizeof(computed) < 8) {
            return u32(u64(at) * bins / (u64(upper) + 1));
        } else {
            // The product takes 96 bits: f64 is out by one at most, and the products say which way.
            double width = double(u64(upper)) + 1.0;
            u64 found = u64(double(u64(at)) * double(bins) / width);
            if (found >= bins) { found = bins - 1; }
            u64 low = u64(at) * bins, high = __umul64hi(u64(at), u64(bins));
            if (is_above(found, low, high)) {
                found -= 1;
            } else if (found + 1 < bins && !is_above(found + 1, low, high)) {
                found += 1;
            }
            return u32(found);
        }
    }
    // Whether bin * (upper + 1) is above a product.
    __device__ __forceinline__ bool is_above(u64 bin, u64 low, u64 high) const {
        u64 by_low = bin * u64(upper), by_high = __umul64hi(bin, u64(upper));
        by_low += bin;
        by_high += by_low < bin;
        return by_high != high ? by_high > high : by_low > low;
    }
};

// The bins between levels, of which each is not below the one before it. The last level is in the last bin.
struct between {
    const element* levels;
    u32 bins;
    // Of integers with a sign, that.
    element flip;
    template <cub::CacheLoadModifier> __device__ __forceinline__ void BinSelect(element sample, int& bin, bool valid) const {
        if (!valid) { return; }
        computed x = ordered(sample);
        if (!(x >= ordered(levels[0]) && x <= ordered(levels[bins]))) { return; }
        // How many levels are not above it, of those from 1 on.
        u32 from = 0, to = bins - 1;
        while (from < to) {
            u32 middle = from + (to - from) / 2;
            if (ordered(levels[middle + 1]) <= x) { from = middle + 1; } else { to = middle; }
        }
        bin = int(from);
    }
    template <class T> __device__ __forceinline__ compute_t<T> ordered(T x) const {
        if constexpr (is_integer) { return x ^ flip; } else { return compute_t<T>(x); }
    }
};

using tuned = cuda::std::conditional_t<sizeof(element) == 2, u16, element>;
template <bool IsEven> struct tuning {
    static constexpr cub::HistogramPolicy policy =
        cub::detail::histogram::policy_selector_from_types<tuned, u32, 1, 1, IsEven>{}(cuda::compute_capability{CAPABILITY});
    static constexpr int tile = policy.threads_per_block * policy.pixels_per_thread;
};

template <class Bins, bool IsEven>
__device__ __forceinline__ void count_in_shared(const element* in, u64* counts, u64 len, Bins bins) {
    constexpr auto p = tuning<IsEven>::policy;
    using policy = cub::detail::agent_histogram_policy<
        p.threads_per_block, p.pixels_per_thread, p.load_algorithm, p.load_modifier, p.rle_compress, cub::SMEM, false, p.vec_size>;
    using agent = cub::detail::histogram::AgentHistogram<policy, shared_bins, 1, 1, const element*, u32, Bins, Bins, i64>;
    __shared__ typename agent::TempStorage storage;
    int count_of_bins = int(bins.bins);
    u32* none[1] = {nullptr};
    agent counter(storage, in, &count_of_bins, &count_of_bins, none, none, &bins, &bins);
    counter.InitBinCounters();
    counter.ConsumeTiles(i64(len), 1, i64(len), 0, cub::GridQueue<int>{});
    __syncthreads();
    // The agent would add in 32 bits.
    for (int bin = threadIdx.x; bin < count_of_bins; bin += p.threads_per_block) {
        u32 count = storage.Alias().histograms[0][bin];
        if (count > 0) { atomicAdd(counts + bin, u64(count)); }
    }
}

template <class Bins>
__device__ __forceinline__ void count_in_global(const element* in, u64* counts, u64 len, Bins bins) {
    u64 stride = u64(blockDim.x) * gridDim.x;
    u32 lane = threadIdx.x & 31;
    // Whole warps: those that are in the same bin count at once.
    for (u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x - lane; first < len; first += stride) {
        int bin = -1;
        if (first + lane < len) { bins.template BinSelect<cub::LOAD_DEFAULT>(in[first + lane], bin, true); }
        u32 same = __match_any_sync(~0u, bin);
        if (bin >= 0 && lane == __ffs(same) - 1) { atomicAdd(counts + bin, u64(__popc(same))); }
    }
}

#define KERNELS(NAME, BINS, IS_EVEN, PARAMETERS, MADE)                                                            \
    extern "C" __global__ void NAME##_facts() {                                                                   \
        FACT(#NAME "_threads", tuning<IS_EVEN>::policy.threads_per_block);                                        \
        FACT(#NAME "_tile", tuning<IS_EVEN>::tile);                                                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(tuning<IS_EVEN>::policy.threads_per_block)                       \
    NAME##_shared(const element* in, PARAMETERS, u32 bins, u64* counts, u64 most, const u64* len) {               \
        begin();                                                                                                  \
        count_in_shared<BINS, IS_EVEN>(in, counts, length(most, len), MADE);                                      \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(tuning<IS_EVEN>::policy.threads_per_block)                       \
    NAME##_global(const element* in, PARAMETERS, u32 bins, u64* counts, u64 most, const u64* len) {               \
        begin();                                                                                                  \
        count_in_global<BINS>(in, counts, length(most, len), MADE);                                               \
    }

#define COMMA ,
KERNELS(even, even, true, computed lower COMMA computed upper COMMA computed scale, (even{lower, upper, scale, bins}))
KERNELS(between, between, false, const element* levels COMMA element flip, (between{levels, bins, flip}))

extern "C" __global__ void __launch_bounds__(256) histogram_init(u64* counts, u64 bins) {
    begin_and_let_next_start();
    u64 stride = u64(blockDim.x) * gridDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < bins; i += stride) { counts[i] = 0; }
}

extern "C" __global__ void histogram_facts() { FACT("shared_bins", shared_bins); }
