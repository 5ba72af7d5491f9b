// The same algorithms by CUB itself, for `algorithms`: built where nvcc is, and loaded by that bench.
//
//     nvcc -O3 -std=c++17 -arch=native -shared -Xcompiler -fPIC -o cub.so benches/raw/cub.cu
//
// `cub_measure` calls one of them again and again: microseconds of the device, and until cudaStreamSynchronize returns; the
// medians. Keys are put back before each call, which is not counted. Elements are counted in 32 bits, as CUB is quicker then; but runs,
// whose lengths of 64 bits fit into `v`, as there is a run for eight elements. From `to_host` on, the element at `w` is copied to pinned
// memory behind it.
#include <cub/cub.cuh>
#if __has_include(<cub/device/device_transform.cuh>)
#include <cub/device/device_transform.cuh>
#endif
#include <cuda/std/tuple>

#include <algorithm>
#include <chrono>
#include <vector>

struct axpy {
    __host__ __device__ float operator()(float x, float v) const { return 2.0f * x + v; }
};

struct less_than {
    unsigned limit;
    __host__ __device__ bool operator()(unsigned value) const { return value < limit; }
};

template <class K, class V>
static cudaError_t pairs(void* temp, size_t& bytes, void* x, void* y, void* v, void* w, size_t n, cudaStream_t stream) {
    cub::DoubleBuffer<K> keys((K*)x, (K*)y);
    cub::DoubleBuffer<V> values((V*)v, (V*)w);
    return cub::DeviceRadixSort::SortPairs(temp, bytes, keys, values, (int)n, 0, 8 * sizeof(K), stream);
}

template <class K> static cudaError_t keys(void* temp, size_t& bytes, void* x, void* y, size_t n, cudaStream_t stream) {
    cub::DoubleBuffer<K> keys((K*)x, (K*)y);
    return cub::DeviceRadixSort::SortKeys(temp, bytes, keys, (int)n, 0, 8 * sizeof(K), stream);
}

constexpr int to_host = 100;

static cudaError_t call(int which, void* temp, size_t& bytes, void* x, void* y, void* v, void* w, size_t n, cudaStream_t stream) {
    switch (which) {
        case 0: return cub::DeviceReduce::Sum(temp, bytes, (float*)x, (float*)w, (int)n, stream);
        case 1: return cub::DeviceScan::ExclusiveSum(temp, bytes, (unsigned*)x, (unsigned*)y, (int)n, stream);
        case 2: return cub::DeviceSelect::If(temp, bytes, (unsigned*)x, (unsigned*)y, (unsigned*)w, (int)n, less_than{1u << 31}, stream);
        case 3: return keys<unsigned>(temp, bytes, x, y, n, stream);
        case 4: return pairs<unsigned, unsigned>(temp, bytes, x, y, v, w, n, stream);
        case 5: return keys<unsigned long long>(temp, bytes, x, y, n, stream);
        case 6: return keys<float>(temp, bytes, x, y, n, stream);
        case 9:
            return cub::DeviceHistogram::HistogramEven(temp, bytes, (unsigned*)x, (unsigned long long*)w, 257, 0u, ~0u, (int)n, stream);
        case 10:
            return cub::DeviceRunLengthEncode::Encode(temp, bytes, (unsigned*)x, (unsigned*)y, (long long*)v, (long long*)w, (long long)n,
                                                      stream);
        case 11:
            return cub::DeviceRunLengthEncode::Encode(temp, bytes, (unsigned*)x, (unsigned*)y, (unsigned*)v, (unsigned*)w, (int)n, stream);
#if __has_include(<cub/device/device_transform.cuh>)
        case 8:
            bytes = 1;
            if (temp == nullptr) { return cudaSuccess; }
            return cub::DeviceTransform::Transform(cuda::std::make_tuple((float*)x, (float*)v), (float*)y, n, axpy{}, stream);
#endif
        default: return cub::DeviceReduce::Max(temp, bytes, (unsigned*)x, (unsigned*)w, (int)n, stream);
    }
}

static cudaError_t call_and_copy(int which, void* temp, size_t& bytes, void* x, void* y, void* v, void* w, size_t n, void* host,
                                 cudaStream_t stream) {
    cudaError_t status = call(which % to_host, temp, bytes, x, y, v, w, n, stream);
    if (status != cudaSuccess || which < to_host || temp == nullptr) { return status; }
    return cudaMemcpyAsync(host, w, 4, cudaMemcpyDeviceToHost, stream);
}

static float median(std::vector<float>& all) {
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
}

// `fresh` is what the `bytes_of_keys` at `x` are before each call. Memory at `y`, `v` and `w` is as large.
extern "C" int cub_measure(int which, void* fresh, void* x, void* y, void* v, void* w, size_t n, size_t bytes_of_keys, int rounds,
                           float* device_us, float* total_us) {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) { return 1; }
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    size_t bytes = 0;
    void* temp = nullptr;
    void* host = nullptr;
    if (cudaMallocHost(&host, 4) != cudaSuccess) { return 2; }
    call_and_copy(which, nullptr, bytes, x, y, v, w, n, host, stream);
    if (cudaMalloc(&temp, bytes + 1) != cudaSuccess) { return 2; }
    std::vector<float> device, total;
    for (int round = 0; round < rounds; ++round) {
        cudaMemcpyAsync(x, fresh, bytes_of_keys, cudaMemcpyDeviceToDevice, stream);
        cudaEventRecord(begin, stream);
        if (call_and_copy(which, temp, bytes, x, y, v, w, n, host, stream) != cudaSuccess) { return 3; }
        cudaEventRecord(end, stream);
        cudaStreamSynchronize(stream);
        float ms = 0;
        cudaEventElapsedTime(&ms, begin, end);
        device.push_back(1000 * ms);
        cudaMemcpyAsync(x, fresh, bytes_of_keys, cudaMemcpyDeviceToDevice, stream);
        cudaStreamSynchronize(stream);
        auto before = std::chrono::steady_clock::now();
        call_and_copy(which, temp, bytes, x, y, v, w, n, host, stream);
        cudaStreamSynchronize(stream);
        total.push_back(std::chrono::duration<float, std::micro>(std::chrono::steady_clock::now() - before).count());
    }
    *device_us = median(device);
    *total_us = median(total);
    cudaFree(temp);
    cudaFreeHost(host);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
    return cudaGetLastError() == cudaSuccess ? 0 : 4;
}
