// fill_bytes: dst[i] = pattern[i % period] for i in 0..bytes, where pattern is lo and hi, lowest byte first.
//
// Shapes:  dst holds bytes; bytes is a multiple of period, which is at most 16. Where period divides 16, the
//          pattern is repeated to its 16 bytes.
// Launch:  1-D grid, 1-D block of at least 32 threads (grid-stride loop, ends guarded); no dynamic shared memory.
// Args:    dst      device pointer, written, aligned to anything
//          bytes    its length; 0 touches no memory
//          lo, hi   the pattern
//          period   how many bytes of it
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u64 shifted(u64 low, u64 high, u32 bytes) {
    return bytes == 0 ? low : bytes == 8 ? high : (low >> (8 * bytes)) | (high << (64 - 8 * bytes));
}

static __device__ u8 byte_at(u64 lo, u64 hi, u32 at) {
    return (u8)(at < 8 ? lo >> (8 * at) : hi >> (8 * (at - 8)));
}

static __device__ u32 word_at(u64 lo, u64 hi, u32 at) {
    return (u32)((at < 2 ? lo : hi) >> (32 * (at & 1)));
}

extern "C" __global__ void fill_bytes(u8* dst, u64 bytes, u64 lo, u64 hi, u32 period) {
#if __CUDA_ARCH__ >= 900
    // It is launched while what is before it in its stream or graph still ends. The first statement, whatever the arguments.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const u64 stride = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (16 % period == 0) {
        u64 head = (16 - ((u64)dst & 15)) & 15;
        if (head > bytes) head = bytes;
        const u64 chunks = (bytes - head) / 16;
        const u32 turn = (u32)head & 7;
        const u64 even = shifted(lo, hi, turn), odd = shifted(hi, lo, turn);
        const ulonglong2 chunk = head < 8 ? make_ulonglong2(even, odd) : make_ulonglong2(odd, even);
        ulonglong2* body = (ulonglong2*)(dst + head);
        for (u64 i = first; i < chunks; i += stride) {
            body[i] = chunk;
        }
        if (first < head) dst[first] = byte_at(lo, hi, (u32)first);
        const u64 tail = head + 16 * chunks + first;
        if (tail < bytes) dst[tail] = byte_at(lo, hi, (u32)(tail & 15));
    } else if (period % 4 == 0 && ((u64)dst & 3) == 0) {
        const u32 words = period / 4, step = (u32)(stride % words);
        u32 at = (u32)(first % words);
        for (u64 i = first; i < bytes / 4; i += stride) {
            ((u32*)dst)[i] = word_at(lo, hi, at);
            at += step;
            if (at >= words) at -= words;
        }
    } else {
        const u32 step = (u32)(stride % period);
        u32 at = (u32)(first % period);
        for (u64 i = first; i < bytes; i += stride) {
            dst[i] = byte_at(lo, hi, at);
            at += step;
            if (at >= period) at -= period;
        }
    }
}
