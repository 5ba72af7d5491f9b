// Prefix sums, least and greatest values of prefixes, with `COMBINED` products and operators of bits, by CUB's agent: one pass, each
// tile looks back at those before it.
//
// `scan_init` makes the state of the tiles; `NAME_inclusive` and `NAME_exclusive` scan. The output may be the input.
#include "operators.cuh"

#include <cub/agent/agent_scan.cuh>
#include <cub/agent/single_pass_scan_operators.cuh>
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
#ifdef BITS
KERNELS(bits, bitwise<inner>, BITWISE(inner), WITH_BITS)
#endif
#else
KERNELS(sum, plus, plus{}, NOTHING)
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
