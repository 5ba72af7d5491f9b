// Runs of equal elements by CUB's agent: the first of each, and how long it is. One pass, each tile looks back at those before it.
//
// For integers `ELEMENT` is the unsigned type of the width: equal ones have equal bits. `runs_init` makes the state of the tiles.
// Each call of `run_lengths` takes one part of the array, with how many runs ended before it, and how long the run is that goes on
// into it.
#include "parts.cuh"

#include <cub/agent/agent_reduce_by_key.cuh>
#include <cub/agent/single_pass_scan_operators.cuh>
#include <cub/device/dispatch/tuning/tuning_rle_encode.cuh>

using namespace gpu_await;
using element = ELEMENT;
using tile_state = cub::ReduceByKeyScanTileState<u32, int>;

struct equal {
    __device__ __forceinline__ bool operator()(element a, element b) const {
        return compute_t<element>(a) == compute_t<element>(b);
    }
};

// Each element counts once.
struct ones {
    using value_type = u32;
    using reference = u32;
    using pointer = u32*;
    using difference_type = long long;
    using iterator_category = cuda::std::random_access_iterator_tag;
    __device__ __forceinline__ u32 operator[](i64) const { return 1; }
    __device__ __forceinline__ u32 operator*() const { return 1; }
    __device__ __forceinline__ ones operator+(i64) const { return {}; }
};

// Lengths fit 32 bits within a part: the first run that ends in it has what it had before as well.
struct lengths {
    using value_type = u32;
    using reference = u32;
    using pointer = u32*;
    using difference_type = long long;
    using iterator_category = cuda::std::random_access_iterator_tag;
    struct length_of {
        u64* out;
        u64 before;
        __device__ __forceinline__ void operator=(u32 here) const { *out = before + here; }
    };
    u64* out;
    u64 before;
    __device__ __forceinline__ length_of operator[](i64 i) const { return {out + i, i == 0 ? before : 0}; }
    __device__ __forceinline__ lengths operator+(u64 runs) const { return {out + runs, before}; }
};

// What parts leave to the next.
struct part {
    const element* in;
    u64 first;
    bool is_last;
    u64 runs_before;
    u64 open_before;
    u64* runs;
    u64* open;
    __device__ __forceinline__ bool is_first_partition() const { return first == 0; }
    __device__ __forceinline__ bool is_last_partition() const { return is_last; }
    __device__ __forceinline__ element predecessor_key() const { return first == 0 ? in[0] : in[first - 1]; }
    __device__ __forceinline__ u32 prefix() const { return 0; }
    __device__ __forceinline__ void write_prefix(u32 here) const { *open = here; }
    __device__ __forceinline__ u64 num_uniques() const { return runs_before; }
    // The same thread has written how long the open run is in this part, unless the part is the last.
    __device__ __forceinline__ u64 add_num_uniques(int ended) const {
        if (!is_last) {
            if (ended == 0) { *open += open_before; }
            *runs = runs_before + ended;
        }
        return runs_before + ended;
    }
};

// Of 16 bits as of integers: to the tuning a type of its own would be none that it knows.
using tuned = cuda::std::conditional_t<sizeof(element) == 2, u16, element>;
using selector = cub::detail::rle::encode::policy_selector_from_types<u32, tuned, const tuned*, tuned*, u64*, u64*, int>;
constexpr cub::RleEncodePolicy policy = selector{}(cuda::compute_capability{CAPABILITY});
static_assert(policy.algorithm == cub::RleAlgorithm::lookback, "the state is that of tiles that look back");
constexpr auto sweep = policy.lookback;
constexpr int tile = sweep.threads_per_block * sweep.items_per_thread;
using part_of_tiles = part_in_tiles<tile>;

extern "C" __global__ void runs_facts() {
    FACT("run_lengths_threads", sweep.threads_per_block);
    FACT("run_lengths_tile", tile);
    FACT("run_lengths_part", part_of_tiles::most);
    FACT("padding_tiles", tile_state::TILE_STATUS_PADDING);
    FACT("tile_state_bytes", sizeof(typename tile_state::TxnWord));
}

extern "C" __global__ void __launch_bounds__(sweep.threads_per_block)
run_lengths(const element* in, element* keys, u64* counts, void* state, u64 most, const u64* len, place of, const u64* before,
            u64* runs, u64* open) {
    begin();
    using policy_t = cub::detail::agent_reduce_by_key_policy<
        sweep.threads_per_block, sweep.items_per_thread, sweep.load_algorithm, sweep.load_modifier, sweep.scan_algorithm,
        cub::detail::delay_constructor_t<sweep.lookback_delay.kind, sweep.lookback_delay.delay, sweep.lookback_delay.l2_write_latency>>;
    using agent = cub::detail::reduce_by_key::AgentReduceByKey<
        policy_t, const element*, element*, ones, lengths, u64*, equal, cuda::std::plus<>, int, u32, part>;
    __shared__ typename agent::TempStorage storage;
    u64 total = length(most, len);
    int items = part_of_tiles::items(total, of);
    u64 runs_before = before == nullptr ? 0 : before[0];
    u64 open_before = before == nullptr ? 0 : before[1];
    // Nothing goes on into a part that is behind the end, and nothing was left for it.
    if (before != nullptr && items > 0 && is_unwritten(before + 1)) { runs_before = unwritten; }
    if (items == 0 || runs_before == unwritten) {
        if (blockIdx.x == 0 && threadIdx.x == 0) { *runs = runs_before; }
        return;
    }
    tile_state tiles;
    tiles.Init(0, state, 0);
    part here{in, of.first, total - of.first <= of.items, runs_before, open_before, runs, open};
    agent(storage, in + of.first, keys, ones{}, lengths{counts, open_before}, runs, equal{}, cuda::std::plus<>{}, here)
        .ConsumeRange(items, tiles, 0);
}

extern "C" __global__ void __launch_bounds__(128) runs_init(void* state, int tiles) {
    begin_and_let_next_start();
    tile_state all;
    all.Init(0, state, 0);
    all.InitializeStatus(tiles);
}
