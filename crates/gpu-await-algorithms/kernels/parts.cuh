// Parts of an array, one for each launch: how long one may be, and what it hands on to the next.
#pragma once

#include "types.cuh"

namespace gpu_await {
// Where a part begins, and how long it is at most.
struct place {
    u64 first;
    u64 items;
};

// What `int` counts in a part, which is cut into tiles. At most 2^30 elements, so that neither the end of a tile that begins in a part
// nor a sum of a part and a tile leaves `int`; and whole tiles, so that the next part begins where a tile ends.
template <int Tile> struct part_in_tiles {
    static constexpr int most = (1 << 30) / Tile * Tile;
    static_assert(Tile > 0 && most > 0 && most <= cuda::std::numeric_limits<int>::max() - Tile, "a tile leaves int");
    // How many elements of a part there are, if the array ends at `total`.
    static __device__ __forceinline__ int items(u64 total, place of) {
        u64 left = total > of.first ? total - of.first : 0;
        return int(left < of.items ? left : of.items);
    }
    static __device__ __forceinline__ int tiles(int items) { return (items + Tile - 1) / Tile; }
};

// What stands where parts leave their counts until they do. A part that finds it leaves it behind as its own count: an error, and
// never a wrong number.
constexpr u64 unwritten = ~0ull;
// Its upper half says it: in a register less than the count.
__device__ __forceinline__ bool is_unwritten(const u64* count) {
    return count != nullptr && reinterpret_cast<const u32*>(count)[1] == ~0u;
}
}
