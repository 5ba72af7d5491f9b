// The element types, what their sums are computed in, and lengths that may be on the device.
//
// An image is compiled for one element type: `-DELEMENT=..` names it as below.
#pragma once

// CUB calls these by their names in CUDA's headers. Nothing, where a kernel was not launched so.
__device__ __forceinline__ void cudaGridDependencySynchronize() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void cudaTriggerProgrammaticLaunchCompletion() { asm volatile("griddepcontrol.launch_dependents;"); }

#include <cuda/std/cstdint>
#include <cuda/std/limits>
#include <cuda/std/type_traits>
#include <cuda/functional>

// A number that `build.py` reads out of the PTX.
#define FACT(NAME, VALUE) asm volatile("// fact " NAME " %0;" ::"n"(int(VALUE)))

namespace gpu_await {
// The first statement of every kernel: all that is before it in its stream is complete behind this. A kernel for capability 9.0 is
// launched while what is before it still ends (programmatic dependent launch), so that its own start is not waited for.
__device__ __forceinline__ void begin() { _CCCL_PDL_GRID_DEPENDENCY_SYNC(); }
// The same, and the next kernel may start as soon as all blocks of this one have: for kernels that leave it room.
__device__ __forceinline__ void begin_and_let_next_start() {
    begin();
    _CCCL_PDL_TRIGGER_NEXT_LAUNCH();
}

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using f32 = float;
using f64 = double;

// 16-bit floats, computed in f32 and rounded once, to nearest even.
struct f16 {
    u16 bits;
    f16() = default;
    __device__ __forceinline__ f16(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    __device__ __forceinline__ operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};

struct bf16 {
    u16 bits;
    bf16() = default;
    __device__ __forceinline__ bf16(float value) {
        u32 word = __float_as_uint(value);
        // A NaN stays one: rounding could carry it into an infinity.
        bits = value != value ? (word >> 16) | 0x40 : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    }
    __device__ __forceinline__ operator float() const { return __uint_as_float(u32(bits) << 16); }
};

// What an element is computed in: itself, but for the 16-bit floats.
template <class T> struct compute { using type = T; };
template <> struct compute<f16> { using type = float; };
template <> struct compute<bf16> { using type = float; };
template <class T> using compute_t = typename compute<T>::type;

// What a sum is computed in and returned as: integers in 64 bits, so that it does not wrap.
template <class T> struct total { using type = compute_t<T>; };
template <> struct total<u8> { using type = u64; };
template <> struct total<u16> { using type = u64; };
template <> struct total<u32> { using type = u64; };
template <> struct total<i8> { using type = i64; };
template <> struct total<i16> { using type = i64; };
template <> struct total<i32> { using type = i64; };
template <class T> using total_t = typename total<T>::type;

template <class T> struct to_compute {
    __device__ __forceinline__ compute_t<T> operator()(T value) const { return compute_t<T>(value); }
};
template <class T> struct to_total {
    __device__ __forceinline__ total_t<T> operator()(T value) const { return total_t<T>(compute_t<T>(value)); }
};

// The least value of a type, and the greatest; of floats the infinities.
template <class T> struct bounds {
    using limits = cuda::std::numeric_limits<T>;
    static __device__ __forceinline__ T least() {
        if constexpr (limits::has_infinity) { return -limits::infinity(); } else { return limits::lowest(); }
    }
    static __device__ __forceinline__ T greatest() {
        if constexpr (limits::has_infinity) { return limits::infinity(); } else { return limits::max(); }
    }
};

// Whether `a` goes before `b`; a NaN goes before all.
template <class T> __device__ __forceinline__ bool is_less(T a, T b) {
    if constexpr (cuda::std::is_floating_point_v<T>) { return a < b || (a != a && b == b); } else { return a < b; }
}
template <class T> __device__ __forceinline__ bool is_greater(T a, T b) {
    if constexpr (cuda::std::is_floating_point_v<T>) { return a > b || (a != a && b == b); } else { return a > b; }
}

// A NaN if one of them is.
struct least_of {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return is_less(b, a) ? b : a; }
    __device__ __forceinline__ float operator()(float a, float b) const {
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
        return a;
    }
};
struct greatest_of {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return is_greater(b, a) ? b : a; }
    __device__ __forceinline__ float operator()(float a, float b) const {
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
        return a;
    }
};

// The length of an array: `most`, or what the device says, which is never more.
__device__ __forceinline__ u64 length(u64 most, const u64* on_device) {
    if (on_device == nullptr) { return most; }
    u64 found = *on_device;
    return found < most ? found : most;
}

// A comparison that is chosen at run time: whether a value is from `from` up to `to`, which is not below that, or whether it is
// not. A NaN is not.
template <class T> struct comparison {
    compute_t<T> from;
    compute_t<T> to;
    bool is_not;
    __device__ __forceinline__ bool operator()(T element) const {
        compute_t<T> value = compute_t<T>(element);
        if constexpr (cuda::std::is_integral_v<T>) {
            using word = cuda::std::make_unsigned_t<T>;
            // One comparison: below `from` the difference is above all others.
            return (word(word(value) - word(from)) <= word(word(to) - word(from))) != is_not;
        } else {
            return (value >= from && value <= to) != is_not;
        }
    }
};
}
