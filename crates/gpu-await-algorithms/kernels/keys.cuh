// Keys that are sorted: unsigned words, and how their bits are ordered, which is an argument, so that one image sorts every type
// of a width, up and down.
#pragma once

#include "types.cuh"

#include <cub/block/radix_rank_sort_operations.cuh>
#include <cub/detail/type_traits.cuh>
#include <cub/util_type.cuh>

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

// A key that stays as it is while its digits are taken in order: less to do than to order all of a wide key, and back.
template <class U> struct raw_key { U bits; };

template <class U> struct ordered_digits {
    u32 first;
    u32 mask;
    u32 if_negative;
    u32 always;
    __device__ __forceinline__ ordered_digits(int first, int bits, order<U> by)
        : first(first), mask((1u << bits) - 1), if_negative(u32(by.if_negative >> first) & mask), always(u32(by.always >> first) & mask) {}
    __device__ __forceinline__ u32 Digit(U key) const {
        constexpr int width = 8 * sizeof(U);
        u32 top = width > 32 ? u32(u64(key) >> 32) : u32(key) << (width > 32 ? 0 : 32 - width);
        u32 negative = u32(i32(top) >> 31);
        return ((u32(key >> first) & mask) ^ always) ^ (negative & if_negative);
    }
};

// What goes with a key: a `VALUE`, if one is compiled for.
#ifdef VALUE
using value = VALUE;
#else
using value = cub::NullType;
#endif
constexpr bool has_values = !cuda::std::is_same_v<value, cub::NullType>;
}

namespace cub::detail::radix {
template <class U> struct traits_t<gpu_await::raw_key<U>, false> {
    using bit_ordered_type = U;
    struct bit_ordered_conversion_policy {
        static __device__ __forceinline__ U to_bit_ordered(gpu_await::order<U>, U key) { return key; }
        static __device__ __forceinline__ U from_bit_ordered(gpu_await::order<U>, U word) { return word; }
    };
    struct bit_ordered_inversion_policy {
        static __device__ __forceinline__ U inverse(gpu_await::order<U>, U word) { return ~word; }
    };
    template <class, class> using digit_extractor_t = gpu_await::ordered_digits<U>;
    static __device__ __forceinline__ U min_raw_binary_key(gpu_await::order<U> by) { return by.out(U(0)); }
    static __device__ __forceinline__ U max_raw_binary_key(gpu_await::order<U> by) { return by.out(U(~U(0))); }
    static __device__ __forceinline__ int default_end_bit(gpu_await::order<U>) { return 8 * sizeof(U); }
    template <class> static __device__ __forceinline__ gpu_await::ordered_digits<U> digit_extractor(int first, int bits, gpu_await::order<U> by) {
        return gpu_await::ordered_digits<U>(first, bits, by);
    }
};
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
