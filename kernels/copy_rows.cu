// copy_rows: row after row, dst[r * dst_pitch + i] = src[r * src_pitch + i] for r in 0..rows, i in 0..row_bytes.
//
// Shapes:  either side holds its rows; they do not overlap.
// Launch:  2-D grid, 2-D block (grid-stride loops, ends guarded): x goes along a row, y from row to row; no dynamic shared memory.
// Args:    dst, src               device pointers; multiples of unit
//          dst_pitch, src_pitch   from row to row, in bytes: multiples of unit, unless there is one row
//          row_bytes, rows        the extent; 0 touches no memory
//          unit                   1, 2, 4, 8 or 16: bytes that a thread moves at once; 0: 8, where nothing is aligned
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Rows that a thread loads before it stores: the memory is far away, and narrow rows are little to wait for.
#define AT_ONCE 4

struct Rows {
    u8* dst;
    const u8* src;
    u64 dst_pitch, src_pitch, row_bytes, rows;
};

template <typename Unit>
static __device__ void copy_units(const Rows& copy) {
    const u64 across = (u64)gridDim.x * blockDim.x, down = (u64)gridDim.y * blockDim.y;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 units = copy.row_bytes / sizeof(Unit);
    for (u64 row = (u64)blockIdx.y * blockDim.y + threadIdx.y; row < copy.rows; row += AT_ONCE * down) {
        const u8* from[AT_ONCE];
        u8* to[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const u64 at = row + k * down;
            from[k] = at < copy.rows ? copy.src + at * copy.src_pitch : 0;
            to[k] = copy.dst + at * copy.dst_pitch;
        }
        for (u64 i = first; i < units; i += across) {
            Unit moved[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (from[k]) moved[k] = ((const Unit*)from[k])[i];
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (from[k]) ((Unit*)to[k])[i] = moved[k];
            }
        }
        for (u64 i = units * sizeof(Unit) + first; i < copy.row_bytes; i += across) {
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (from[k]) to[k][i] = from[k][i];
            }
        }
    }
}

// Aligned words of the destination, each from the two aligned words of the source that hold it; by bytes where a row begins and ends.
static __device__ void copy_unaligned(const Rows& copy) {
    const u64 across = (u64)gridDim.x * blockDim.x, down = (u64)gridDim.y * blockDim.y;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (u64 row = (u64)blockIdx.y * blockDim.y + threadIdx.y; row < copy.rows; row += down) {
        u8* to = copy.dst + row * copy.dst_pitch;
        const u8* from = copy.src + row * copy.src_pitch;
        const u64 head = (u64)to & 7;
        const u64 words = (head + copy.row_bytes + 7) / 8;
        for (u64 i = first; i < words; i += across) {
            const u64 begin = i == 0 ? 0 : 8 * i - head;
            const u64 end = 8 * (i + 1) - head < copy.row_bytes ? 8 * (i + 1) - head : copy.row_bytes;
            const u64* low = (const u64*)((u64)(from + begin) & ~7ull);
            if (end - begin == 8 && (const u8*)low >= from && (const u8*)(low + 2) <= from + copy.row_bytes) {
                const u32 shift = 8 * ((u32)(u64)(from + begin) & 7);
                *(u64*)(to + begin) = shift == 0 ? low[0] : low[0] >> shift | low[1] << (64 - shift);
            } else {
                for (u64 at = begin; at < end; at++) to[at] = from[at];
            }
        }
    }
}

extern "C" __global__ void copy_rows(u8* dst, const u8* src, u64 dst_pitch, u64 src_pitch, u64 row_bytes, u64 rows,
                                     u32 unit) {
#if __CUDA_ARCH__ >= 900
    // It is launched while what is before it in its stream or graph still ends. The first statement, whatever the arguments.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const Rows copy = {dst, src, dst_pitch, src_pitch, row_bytes, rows};
    switch (unit) {
        case 16: copy_units<ulonglong2>(copy); break;
        case 8: copy_units<u64>(copy); break;
        case 4: copy_units<u32>(copy); break;
        case 2: copy_units<unsigned short>(copy); break;
        case 1: copy_units<u8>(copy); break;
        default: copy_unaligned(copy);
    }
}
