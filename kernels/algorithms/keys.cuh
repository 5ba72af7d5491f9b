// Keys that are sorted: unsigned words, and how their bits are ordered, which is an argument, so that one image sorts every type
// of a width, up and down.
#pragma once

#include "types.cuh"

#include <cub/block/radix_rank_sort_operations.cuh>
#include <cub/detail/type_traits.cuh>

namespace gpu_await {
// How the bits of a key are ordered: as those of `bits ^ (negative ? ifs_sign : 0) ^ always`.
template <class U> struct order {
    U if_negative;
    U always;
    __device__ __forceinline__ U in(U key) const { return key ^ (sign(key) & if_negative) ^ always; }
    // The sign is not in `if_negative`, so that it tells the same behind as in front.
    __device__ __forceinline__ U out(U word) const {
        U key = word ^ always;
        return key ^ (sign(key) & if_negative);
    }
    static __device__ __forceinline__ U sign(U key) {
        return U(-U(key >> (8 * sizeof(U) - 1)));
    }
};

template <class U> struct key_of { U bits; };
}

namespace cub::detail::radix {
template <class U> struct traits_t<gpu_await::key_of<U>, false> {
    using bit_ordered_type = U;
    struct bit_ordered_conversion_policy {
        static __device__ __forceinline__ U to_bit_ordered(gpu_await::order<U> by, U key) { return by.in(key); }
        static __device__ __forceinline__ U from_bit_ordered(gpu_await::order<U> by, U word) { return by.out(word); }
    };
    struct bit_ordered_inversion_policy {
        static __device__ __forceinline__ U inverse(gpu_await::order<U>, U word) { return ~word; }
    };
    template <class, class> using digit_extractor_t = ShiftDigitExtractor<U>;
    static __device__ __forceinline__ U min_raw_binary_key(gpu_await::order<U> by) { return by.out(U(0)); }
    static __device__ __forceinline__ U max_raw_binary_key(gpu_await::order<U> by) { return by.out(U(~U(0))); }
    static __device__ __forceinline__ int default_end_bit(gpu_await::order<U>) { return 8 * sizeof(U); }
    template <class> static __device__ __forceinline__ ShiftDigitExtractor<U> digit_extractor(int first, int bits, gpu_await::order<U>) {
        return ShiftDigitExtractor<U>(first, bits);
    }
};
}
