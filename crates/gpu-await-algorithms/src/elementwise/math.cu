// Functions of the CUDA library for elementwise formulas, as functions and not inlined: generated kernels take along those that they
// call (math.rs). No kernel is in this file.
//
// gpu_await_NAME_f32, gpu_await_NAME_f64: the function NAME of one or two numbers. The names are those of Rust; fmod is exact.
// Source: the CUDA Math API, whose documentation has the largest errors. No fast-math: nothing is an approximate instruction alone.

#define OF_ONE(name, single, twice)                                                                             \
    extern "C" __device__ __noinline__ float gpu_await_##name##_f32(float x) { return single(x); }              \
    extern "C" __device__ __noinline__ double gpu_await_##name##_f64(double x) { return twice(x); }

#define OF_TWO(name, single, twice)                                                                             \
    extern "C" __device__ __noinline__ float gpu_await_##name##_f32(float x, float y) { return single(x, y); }  \
    extern "C" __device__ __noinline__ double gpu_await_##name##_f64(double x, double y) { return twice(x, y); }

OF_ONE(exp, expf, exp)
OF_ONE(ln, logf, log)
OF_ONE(sin, sinf, sin)
OF_ONE(cos, cosf, cos)
OF_ONE(tanh, tanhf, tanh)
OF_TWO(powf, powf, pow)
OF_TWO(rem, fmodf, fmod)
