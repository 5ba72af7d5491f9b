// fill_bytes: dst[i] = pattern[i % period] for i in 0..bytes.
//
// Shapes:  dst holds bytes; bytes is a multiple of period, which is 1 to 16.
// Launch:  1-D grid, 1-D block of at least 128 threads, fewer than 2^27 threads in all (grid-stride loop, ends guarded); no dynamic shared memory.
// Args:    dst         device pointer, written, aligned to anything
//          bytes       its length; 0 touches no memory
//          a, b, c, d  the pattern, repeated to 32 bytes, lowest byte first
//          period      its length in bytes
// Method:  from the first line of 128 bytes on, stores of 16 bytes, which are the 32 bytes shifted by where they begin in the pattern.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u8 byte_at(u64 a, u64 b, u32 at) {
    return (u8)((at < 8 ? a : b) >> (8 * (at & 7)));
}

static __device__ u64 shifted(u64 low, u64 high, u32 bytes) {
    return bytes == 0 ? low : (low >> (8 * bytes)) | (high << (64 - 8 * bytes));
}

extern "C" __global__ void fill_bytes(u8* dst, u64 bytes, u64 a, u64 b, u64 c, u64 d, u32 period) {
#if __CUDA_ARCH__ >= 900
    // It is launched while what is before it in its stream or graph still ends. The first statement, whatever the arguments.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const u32 stride = gridDim.x * blockDim.x;
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
    u32 head = (128 - (u32)((u64)dst & 127)) & 127;
    if (head > bytes) head = (u32)bytes;
    const u64 chunks = (bytes - head) / 16;
    if (first < chunks) {
        ulonglong2* body = (ulonglong2*)(dst + head);
        const u32 step = 16 * stride % period;
        u32 at = (head + 16 * first) % period;
        for (u64 i = first; i < chunks; i += stride) {
            const u64 low = at < 8 ? a : b, middle = at < 8 ? b : c, high = at < 8 ? c : d;
            body[i] = make_ulonglong2(shifted(low, middle, at & 7), shifted(middle, high, at & 7));
            at += step;
            if (at >= period) at -= period;
        }
    }
    if (first < head) dst[first] = byte_at(a, b, first % period);
    const u64 tail = head + 16 * chunks + first;
    // Counted from the end, where a pattern ends.
    if (tail < bytes) dst[tail] = byte_at(a, b, (16 * period - (u32)(bytes - tail)) % period);
}
