// copy_pieces: for each of `count` pieces, to[i] = from[i] for i in 0..bytes.
//
// Shapes:  no byte that a piece writes belongs to another piece, or to its own source.
// Launch:  1-D grid, 1-D block (grid-stride loops, ends guarded); no dynamic shared memory.
// Args:    table      device pointer to the pieces, which the kernel only reads; 0: they are `few`
//          count      how many pieces; with `few` at most 170
//          parts      parts of 16 KiB that the longest piece has
//          few        the pieces themselves: with the others this fills the 4,096 bytes that every GPU takes
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Piece {
    u64 to, from, bytes;
};

struct Few {
    Piece pieces[170];
};

static const u64 PART = 16384;

template <typename Unit>
static __device__ void copy_part(u8* dst, const u8* src, u64 bytes) {
    Unit* to = (Unit*)dst;
    const Unit* from = (const Unit*)src;
    const u64 threads = blockDim.x;
    const u64 units = bytes / sizeof(Unit);
    u64 i = threadIdx.x;
    // Four loads in flight: the source may be behind a bus.
    for (; i + 3 * threads < units; i += 4 * threads) {
        const Unit a = from[i], b = from[i + threads], c = from[i + 2 * threads], d = from[i + 3 * threads];
        to[i] = a;
        to[i + threads] = b;
        to[i + 2 * threads] = c;
        to[i + 3 * threads] = d;
    }
    for (; i < units; i += threads) to[i] = from[i];
    for (u64 tail = units * sizeof(Unit) + threadIdx.x; tail < bytes; tail += threads) dst[tail] = src[tail];
}

extern "C" __global__ void copy_pieces(const Piece* table, u32 count, u32 parts, Few few) {
#if __CUDA_ARCH__ >= 900
    // It is launched while what is before it in its stream or graph still ends. The first statement, whatever the arguments.
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const u64 all = (u64)count * parts;
    for (u64 item = blockIdx.x; item < all; item += gridDim.x) {
        const u32 at = (u32)(item / parts);
        const Piece piece = table ? table[at] : few.pieces[at];
        const u64 start = item % parts * PART;
        if (start >= piece.bytes) continue;
        const u64 rest = piece.bytes - start;
        const u64 bytes = rest < PART ? rest : PART;
        u8* to = (u8*)(piece.to + start);
        const u8* from = (const u8*)(piece.from + start);
        switch ((piece.to | piece.from) & 15) {
            case 0: copy_part<ulonglong2>(to, from, bytes); break;
            case 8: copy_part<u64>(to, from, bytes); break;
            case 4:
            case 12: copy_part<u32>(to, from, bytes); break;
            default: copy_part<u8>(to, from, bytes);
        }
    }
}
