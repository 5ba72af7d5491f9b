// Prefix sums, least and greatest values of prefixes, with `COMBINED` products and operators of bits, by CUB's agent: one pass, each
// tile looks back at those before it.
//
// `scan_init` makes the state of the tiles; `NAME_inclusive` and `NAME_exclusive` scan. The output may be the input.
//
// How far a tile looks back depends on when the others are done, and with it the order in which numbers are combined. With `ROUNDED`
// sums and products have kernels that combine in one order as well, in three passes: `NAME_tiles` combines each tile that another one
// follows, `NAME_prefixes` makes of these what is before each tile, `NAME_inclusive_behind` and `NAME_exclusive_behind` scan each tile
// behind that.
#include "operators.cuh"

#include <cub/agent/agent_scan.cuh>
#include <cub/agent/single_pass_scan_operators.cuh>
#include <cub/block/block_load.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <cub/device/dispatch/tuning/tuning_scan.cuh>

using namespace gpu_await;
using element = ELEMENT;
using computed = compute_t<element>;
#ifdef COMBINED
using inner = combined_t<element>;
#else
using inner = computed;
#endif
using tile_state = cub::ScanTileState<inner>;
using plus = cuda::std::plus<>;

template <class Op> struct tuning {
    using selector =
        cub::detail::scan::policy_selector_from_types<const inner*, inner*, inner, u64, Op>;
    static constexpr cub::ScanPolicy policy = selector{}(cuda::compute_capability{CAPABILITY});
    static_assert(policy.algorithm == cub::ScanAlgorithm::lookback, "the state is that of tiles that look back");
    static constexpr auto scan = policy.lookback;
};

template <class Op, class Init>
__device__ __forceinline__ void scan(const element* in, element* out, void* state, u64 len, Op op, Init init) {
    constexpr auto p = tuning<Op>::scan;
    using policy = cub::detail::agent_scan_policy<
        0, 0, void, p.load_algorithm, p.load_modifier, p.store_algorithm, p.scan_algorithm,
        cub::detail::NoScaling<p.threads_per_block, p.items_per_thread>,
        cub::detail::delay_constructor_t<p.lookback_delay.kind, p.lookback_delay.delay, p.lookback_delay.l2_write_latency>>;
    using agent = cub::detail::scan::AgentScan<policy, const element*, element*, Op, Init, u64, inner, false, true>;
    __shared__ typename agent::TempStorage storage;
    if (u64(blockIdx.x) * agent::TILE_ITEMS >= len) { return; }
    tile_state tiles;
    tiles.Init(0, state, 0);
    agent(storage, in, out, op, init).ConsumeRange(len, tiles, 0);
}

// A tile that its block has to itself.
template <class Op> struct whole {
    static constexpr auto p = tuning<Op>::scan;
    static constexpr int threads = p.threads_per_block, items = p.items_per_thread, tile = threads * items;
    using load = cub::BlockLoad<inner, threads, items, p.load_algorithm>;
    using store = cub::BlockStore<inner, threads, items, p.store_algorithm>;
    using scan = cub::BlockScan<inner, threads, p.scan_algorithm>;
    using reduce = cub::BlockReduce<inner, threads>;
    union storage {
        typename load::TempStorage loading;
        typename store::TempStorage storing;
        typename scan::TempStorage scanning;
        typename reduce::TempStorage reducing;
    };
    // How many of its elements there are, of at least one.
    static __device__ __forceinline__ int there(u64 first, u64 len) { return len - first < u64(tile) ? int(len - first) : tile; }
};

template <class Op> __device__ __forceinline__ void combine_tiles(const element* in, inner* tiles, u64 len, Op op) {
    using of = whole<Op>;
    __shared__ typename of::storage storage;
    u64 first = u64(blockIdx.x) * of::tile;
    // Nothing follows the last one.
    if (len <= first || len - first <= u64(of::tile)) { return; }
    inner items[of::items];
    typename of::load(storage.loading).Load(in + first, items);
    __syncthreads();
    inner all = typename of::reduce(storage.reducing).Reduce(items, op);
    if (threadIdx.x == 0) { tiles[blockIdx.x] = all; }
}

// In one block.
template <class Op> __device__ __forceinline__ void scan_tiles(inner* tiles, u64 len, Op op) {
    using of = whole<Op>;
    __shared__ typename of::storage storage;
    u64 count = len == 0 ? 0 : (len - 1) / of::tile;
    cub::BlockScanRunningPrefixOp<inner, Op> before(op);
    for (u64 first = 0; first < count; first += of::tile) {
        int there = of::there(first, count);
        inner items[of::items];
        typename of::load(storage.loading).Load(tiles + first, items, there, tiles[first]);
        __syncthreads();
        if (first == 0) {
            typename of::scan(storage.scanning).InclusiveScan(items, items, op, before.running_total);
        } else {
            typename of::scan(storage.scanning).InclusiveScan(items, items, op, before);
        }
        __syncthreads();
        typename of::store(storage.storing).Store(tiles + first, items, there);
        __syncthreads();
    }
}

// `init` is before all of an exclusive scan.
template <bool IsInclusive, class Op>
__device__ __forceinline__ void scan_behind(const element* in, element* out, const inner* prefixes, u64 len, Op op, inner init) {
    using of = whole<Op>;
    __shared__ typename of::storage storage;
    u64 first = u64(blockIdx.x) * of::tile;
    if (first >= len) { return; }
    int there = of::there(first, len);
    inner items[of::items];
    if (there == of::tile) {
        typename of::load(storage.loading).Load(in + first, items);
    } else {
        typename of::load(storage.loading).Load(in + first, items, there, inner(in[first]));
    }
    __syncthreads();
    typename of::scan scanned(storage.scanning);
    if constexpr (IsInclusive) {
        if (blockIdx.x == 0) {
            scanned.InclusiveScan(items, items, op);
        } else {
            scanned.InclusiveScan(items, items, prefixes[blockIdx.x - 1], op);
        }
    } else {
        scanned.ExclusiveScan(items, items, blockIdx.x == 0 ? init : op(init, prefixes[blockIdx.x - 1]), op);
    }
    __syncthreads();
    if (there == of::tile) {
        typename of::store(storage.storing).Store(out + first, items);
    } else {
        typename of::store(storage.storing).Store(out + first, items, there);
    }
}

#ifdef ROUNDED
#define IN_ORDER(NAME, OP)                                                                                    \
    extern "C" __global__ void __launch_bounds__(tuning<OP>::scan.threads_per_block)                          \
    NAME##_tiles(const element* in, inner* tiles, u64 most, const u64* len) {                                 \
        begin();                                                                                              \
        combine_tiles(in, tiles, length(most, len), OP{});                                                    \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(tuning<OP>::scan.threads_per_block)                          \
    NAME##_prefixes(inner* tiles, u64 most, const u64* len) {                                                 \
        begin_and_let_next_start();                                                                           \
        scan_tiles(tiles, length(most, len), OP{});                                                           \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(tuning<OP>::scan.threads_per_block)                          \
    NAME##_inclusive_behind(const element* in, element* out, const inner* prefixes, u64 most, const u64* len) { \
        begin();                                                                                              \
        scan_behind<true>(in, out, prefixes, length(most, len), OP{}, inner{});                               \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(tuning<OP>::scan.threads_per_block)                          \
    NAME##_exclusive_behind(const element* in, element* out, const inner* prefixes, u64 most, const u64* len, computed init) { \
        begin();                                                                                              \
        scan_behind<false>(in, out, prefixes, length(most, len), OP{}, inner(init));                          \
    }
#else
#define IN_ORDER(NAME, OP)
#endif

#define KERNELS(NAME, OP, BY, WITH)                                                                           \
    extern "C" __global__ void NAME##_facts() {                                                               \
        FACT(#NAME "_threads", tuning<OP>::scan.threads_per_block);                                           \
        FACT(#NAME "_tile", (tuning<OP>::scan.threads_per_block * tuning<OP>::scan.items_per_thread));        \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(tuning<OP>::scan.threads_per_block)                          \
    NAME##_inclusive(const element* in, element* out, void* state, u64 most, const u64* len WITH) {           \
        begin();                                                                                              \
        scan(in, out, state, length(most, len), BY, cub::NullType{});                                         \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(tuning<OP>::scan.threads_per_block)                          \
    NAME##_exclusive(const element* in, element* out, void* state, u64 most, const u64* len, computed init WITH) { \
        begin();                                                                                              \
        scan(in, out, state, length(most, len), BY, inner(init));                                             \
    }

#define NOTHING
#ifdef COMBINED
KERNELS(product, times, times{}, NOTHING)
IN_ORDER(product, times)
#ifdef BITS
KERNELS(bits, bitwise<inner>, BITWISE(inner), WITH_BITS)
#endif
#else
KERNELS(sum, plus, plus{}, NOTHING)
IN_ORDER(sum, plus)
KERNELS(min, least_of, least_of{}, NOTHING)
KERNELS(max, greatest_of, greatest_of{}, NOTHING)
#endif

extern "C" __global__ void __launch_bounds__(128) scan_init(void* state, int tiles) {
    begin_and_let_next_start();
    tile_state all;
    all.Init(0, state, 0);
    all.InitializeStatus(tiles);
}

extern "C" __global__ void scan_facts() {
    FACT("padding_tiles", tile_state::TILE_STATUS_PADDING);
    FACT("tile_state_bytes", sizeof(typename tile_state::TxnWord));
}
