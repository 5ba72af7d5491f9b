// Elements that are selected, in their order, by CUB's agent: by flags, by a comparison, or the first of each run of equal ones.
//
// `FLAGS` is compiled for a width: `select_flagged`, `partition_flagged`, which writes the others elsewhere, and
// `select_places`, which writes where the flagged ones are. Else it is for a type: `select_if`, `partition_if`, `unique`.
// Each call takes one part of the array, and how many elements parts before it selected.
#include "parts.cuh"

#include <cub/agent/agent_select_if.cuh>
#include <cub/agent/single_pass_scan_operators.cuh>
#include <cub/device/dispatch/dispatch_common.cuh>
#include <cub/device/dispatch/tuning/tuning_select_if.cuh>

using namespace gpu_await;
using element = ELEMENT;
using tile_state = cub::ScanTileState<int>;
using none = cub::NullType;

// Where a part is, and what parts before it selected.
struct part {
    using total_num_items_t = u64;
    u64 first;
    const u64* before;
    u64* after;
    __device__ __forceinline__ u64 input_offset() const { return first; }
    __device__ __forceinline__ u64 is_first_partition() const { return first == 0; }
    __device__ __forceinline__ u64 num_previously_selected() const { return before == nullptr ? 0 : *before; }
    __device__ __forceinline__ u64 num_previously_rejected() const { return before == nullptr ? 0 : first - *before; }
    template <class N> __device__ __forceinline__ u64 num_total_items(N) const { return 0; }
    template <class It, class N> __device__ __forceinline__ void update_num_selected(It, N selected) const {
        *after = num_previously_selected() + u64(selected);
    }
};

// The numbers from 0 on.
struct counting {
    using value_type = u64;
    using reference = u64;
    using pointer = u64*;
    using difference_type = long long;
    using iterator_category = cuda::std::random_access_iterator_tag;
    u64 first;
    __device__ __forceinline__ u64 operator[](i64 i) const { return first + i; }
    __device__ __forceinline__ u64 operator*() const { return first; }
    __device__ __forceinline__ counting operator+(i64 more) const { return {first + more}; }
};

// Any byte that is not 0.
struct is_set {
    __device__ __forceinline__ bool operator()(u8 flag) const { return flag != 0; }
};

struct equal {
    __device__ __forceinline__ bool operator()(element a, element b) const {
        return compute_t<element>(a) == compute_t<element>(b);
    }
};

template <class In, class Flags, class Out, cub::SelectImpl Which> struct tuning {
    using selector = cub::detail::select::policy_selector_from_types<In, Flags, Out, int, Which>;
    static constexpr cub::SelectPolicy policy = selector{}(cuda::compute_capability{CAPABILITY});
    static_assert(policy.algorithm == cub::SelectAlgorithm::lookback, "the state is that of tiles that look back");
    static constexpr auto sweep = policy.lookback;
    static constexpr int tile = sweep.threads_per_block * sweep.items_per_thread;
    using part = part_in_tiles<tile>;
};

template <class Tuning, cub::SelectImpl Which, class In, class Flags, class Out, class If, class Equal>
__device__ __forceinline__ void select(In in, Flags flags, Out out, void* state, u64 most, const u64* len, place of, const u64* before, u64* after, If chosen, Equal same) {
    constexpr auto p = Tuning::sweep;
    using policy = cub::detail::agent_select_if_policy<
        p.threads_per_block, p.items_per_thread, p.load_algorithm, p.load_modifier, p.scan_algorithm,
        cub::detail::delay_constructor_t<p.lookback_delay.kind, p.lookback_delay.delay, p.lookback_delay.l2_write_latency>,
        p._load_prefetch>;
    using agent = cub::detail::select::AgentSelectIf<policy, In, Flags, Out, If, Equal, int, part, Which>;
    __shared__ typename agent::TempStorage storage;
    part where{of.first, before, after};
    int items = is_unwritten(before) ? 0 : Tuning::part::items(length(most, len), of);
    if (items == 0) {
        if (blockIdx.x == 0 && threadIdx.x == 0) { *after = where.num_previously_selected(); }
        return;
    }
    int tiles = Tuning::part::tiles(items);
    if (int(blockIdx.x) >= tiles) { return; }
    tile_state status;
    status.Init(0, state, 0);
    agent(storage, in, flags, out, chosen, same, items, where).ConsumeRange(tiles, status, where.after);
}

#define PART void *state, u64 most, const u64 *len, place of, const u64 *before, u64 *after
#define PASSED state, most, len, of, before, after

#define KERNEL(NAME, IN, FLAGS_T, OUT, WHICH, PARAMETERS, FROM, BY, TO, IF_T, IF, EQUAL_T)                    \
    using NAME##_tuning = tuning<IN, FLAGS_T, OUT, cub::SelectImpl::WHICH>;                                  \
    extern "C" __global__ void NAME##_facts() {                                                              \
        FACT(#NAME "_threads", NAME##_tuning::sweep.threads_per_block);                                      \
        FACT(#NAME "_tile", NAME##_tuning::tile);                                                            \
        FACT(#NAME "_part", NAME##_tuning::part::most);                                                      \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(NAME##_tuning::sweep.threads_per_block) NAME(PARAMETERS, PART) { \
        begin();                                                                                             \
        select<NAME##_tuning, cub::SelectImpl::WHICH>(FROM, BY, TO, PASSED, IF, EQUAL_T{});                  \
    }

template <class T> using apart = cub::detail::select::partition_distinct_output_t<T*, T*>;
#define COMMA ,

#ifdef FLAGS
KERNEL(select_flagged, const element*, const u8*, element*, Select,
       const element* in COMMA const u8* flags COMMA element* out, in, flags, out, is_set, is_set{}, none)
KERNEL(partition_flagged, const element*, const u8*, apart<element>, Partition,
       const element* in COMMA const u8* flags COMMA element* out COMMA element* others, in, flags, (apart<element>{out, others}), is_set, is_set{}, none)
#ifdef PLACES
KERNEL(select_places, counting, const u8*, u64*, Select,
       const u8* flags COMMA u64* out, counting{0}, flags, out, is_set, is_set{}, none)
#endif
#else
using compared = comparison<element>;
KERNEL(select_if, const element*, none*, element*, Select,
       const element* in COMMA element* out COMMA compute_t<element> from COMMA compute_t<element> to COMMA u32 is_not, in, (none*)nullptr, out, compared, (compared{from, to, is_not != 0}), none)
KERNEL(partition_if, const element*, none*, apart<element>, Partition,
       const element* in COMMA element* out COMMA element* others COMMA compute_t<element> from COMMA compute_t<element> to COMMA u32 is_not, in, (none*)nullptr, (apart<element>{out, others}), compared, (compared{from, to, is_not != 0}), none)
KERNEL(unique, const element*, none*, element*, Select,
       const element* in COMMA element* out, in, (none*)nullptr, out, none, none{}, equal)
#endif

extern "C" __global__ void __launch_bounds__(128) select_init(void* state, int tiles) {
    begin_and_let_next_start();
    tile_state all;
    all.Init(0, state, 0);
    all.InitializeStatus(tiles);
}

extern "C" __global__ void select_facts() {
    FACT("padding_tiles", tile_state::TILE_STATUS_PADDING);
    FACT("tile_state_bytes", sizeof(typename tile_state::TxnWord));
}
