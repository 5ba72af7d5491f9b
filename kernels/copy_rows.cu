// copy_rows: row after row, dst[r * dst_pitch + i] = src[r * src_pitch + i] for r in 0..rows, i in 0..row_bytes.
//
// Shapes:  either side holds its rows; they do not overlap.
// Launch:  2-D grid, 1-D block of at least 32 threads (grid-stride loops, ends guarded); no dynamic shared memory.
// Args:    dst, src               device pointers; multiples of unit
//          dst_pitch, src_pitch   from row to row, in bytes: multiples of unit, unless there is one row
//          row_bytes, rows        the extent; 0 touches no memory
//          unit                   1, 2, 4, 8 or 16: bytes that a thread moves at once
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

template <typename Unit>
static __device__ void copy_row(u8* dst, const u8* src, u64 bytes) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 units = bytes / sizeof(Unit);
    for (u64 i = first; i < units; i += stride) {
        ((Unit*)dst)[i] = ((const Unit*)src)[i];
    }
    const u64 tail = units * sizeof(Unit) + first;
    if (tail < bytes) dst[tail] = src[tail];
}

extern "C" __global__ void copy_rows(u8* dst, const u8* src, u64 dst_pitch, u64 src_pitch, u64 row_bytes, u64 rows,
                                     u32 unit) {
#if __CUDA_ARCH__ >= 900
    // It is launched while what is before it in its stream or graph still ends. The first statement, whatever the arguments.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
        u8* to = dst + row * dst_pitch;
        const u8* from = src + row * src_pitch;
        switch (unit) {
            case 16: copy_row<ulonglong2>(to, from, row_bytes); break;
            case 8: copy_row<u64>(to, from, row_bytes); break;
            case 4: copy_row<u32>(to, from, row_bytes); break;
            case 2: copy_row<unsigned short>(to, from, row_bytes); break;
            default: copy_row<u8>(to, from, row_bytes);
        }
    }
}
