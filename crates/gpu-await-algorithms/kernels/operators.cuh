// Products, and operators of bits: what they are computed in. Of integers `ELEMENT` is the unsigned type of the width: the low bits
// of a product do not depend on signs.
#pragma once

#include "types.cuh"

namespace gpu_await {
// Narrow words are combined in 32 bits, of which the low ones go out.
template <class T> struct combined { using type = compute_t<T>; };
template <> struct combined<u8> { using type = u32; };
template <> struct combined<u16> { using type = u32; };
template <class T> using combined_t = typename combined<T>::type;

template <class T> struct to_combined {
    __device__ __forceinline__ combined_t<T> operator()(T value) const { return combined_t<T>(value); }
};

struct times {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a * b; }
};

// And, or, exclusive or, chosen at run time: whether bits are set that both have, and whether those are that one has.
template <class U> struct bitwise {
    U if_both;
    U if_one;
    __device__ __forceinline__ U operator()(U a, U b) const { return (a & b & if_both) | ((a ^ b) & if_one); }
};
}

// An operator of bits is an argument of kernels, behind all others.
#define WITH_BITS , u64 if_both, u64 if_one
#define BITWISE(TYPE) (bitwise<TYPE>{TYPE(if_both), TYPE(if_one)})
