// Segments of an array: segment `i` is from `offsets[i]` up to `offsets[i + 1]`, as far as the array goes. How many there are may be
// on the device, as the number of offsets.
#pragma once

#include "types.cuh"

namespace gpu_await {
struct segments {
    const u64* offsets;
    u64 most;
    u64 count;
    __device__ __forceinline__ segments(const u64* offsets, u64 offsets_most, const u64* offsets_len, u64 most)
        : offsets(offsets), most(most) {
        u64 found = length(offsets_most, offsets_len);
        count = found > 0 ? found - 1 : 0;
    }
    // Offsets past the end leave the array nowhere.
    __device__ __forceinline__ u64 inside(u64 at) const { return offsets[at] < most ? offsets[at] : most; }
    // Of a segment that begins there, also if the offsets are in no order.
    __device__ __forceinline__ u64 end(u64 segment, u64 begin) const {
        u64 found = inside(segment + 1);
        return found < begin ? begin : found;
    }
};
}
