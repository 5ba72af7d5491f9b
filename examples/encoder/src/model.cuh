// What the kernels of an encoder and of a decoder share: fragments of matrices in inline PTX, norms of rows, and attention of a tile of queries.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Half {
    unsigned short bits;
};

// ---- inline PTX, and loads and stores of two elements -------------------------------------------

__device__ float2 unpacked(u32 pair) {
    float2 x;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(x.x), "=f"(x.y) : "r"(pair));
    return x;
}

__device__ u32 packed(float x, float y) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// d += a b, for a of 16 x 16, b of 16 x 8: PTX's m16n8k16, whose fragments are spread over a warp.
__device__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ u32 shared_address(const void* p) {
    u32 address;
    asm("{.reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a;}" : "=r"(address) : "l"(p));
    return address;
}

// Four matrices of 8 x 8 from shared memory; lane 8 i + r has the address of row r of matrix i.
__device__ void load_matrices(u32 (&m)[4], const Half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}

__device__ void load_transposed(u32 (&m)[4], const Half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}

// Starts a copy of 16 bytes to shared memory: of zeros unless `there`, and then nothing is read.
__device__ void start_copy(Half* to, const Half* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Ends a group of copies; waits until at most `Later` groups of this thread are on their way.
__device__ void end_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int Later>
__device__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(Later) : "memory");
}

// ---- end of inline PTX --------------------------------------------------------------------------

__device__ float2 load2(const float* p) { return *(const float2*)p; }
__device__ float2 load2(const Half* p) { return unpacked(*(const u32*)p); }
__device__ void store2(float* p, float x, float y) { *(float2*)p = make_float2(x, y); }
__device__ void store2(Half* p, float x, float y) { *(u32*)p = packed(x, y); }

__device__ u32 least(u32 a, u32 b) { return a < b ? a : b; }

__device__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// ---- rows ---------------------------------------------------------------------------------------

#define FULL 1e30f
#define MAX_PAIRS 16  // of a row in a lane: 1024 elements
#define ROWS 4        // of a block, a warp each

// Lane l of a warp has the elements 2 (l + 32 i) and the one behind it.
template <typename T>
__device__ void norm_row(float2 (&x)[MAX_PAIRS], u32 hidden, u32 lane, const T* weight, const T* bias, float eps, T* out) {
    const u32 pairs = hidden / 64;
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < MAX_PAIRS; ++i)
        if (i < pairs) sum += x[i].x + x[i].y;
    const float mean = warp_sum(sum) / (float)hidden;
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < MAX_PAIRS; ++i)
        if (i < pairs) {
            x[i].x -= mean;
            x[i].y -= mean;
            squares = fmaf(x[i].x, x[i].x, fmaf(x[i].y, x[i].y, squares));
        }
    const float scale = 1.0f / sqrtf(warp_sum(squares) / (float)hidden + eps);
#pragma unroll
    for (u32 i = 0; i < MAX_PAIRS; ++i)
        if (i < pairs) {
            const u32 at = 2 * (lane + 32 * i);
            const float2 w = load2(weight + at), b = load2(bias + at);
            store2(out + at, fmaf(x[i].x * scale, w.x, b.x), fmaf(x[i].y * scale, w.y, b.y));
        }
}

// ---- attention ----------------------------------------------------------------------------------

#define TILE 64  // queries of a block, and keys that it has in shared memory at once

// What a block works on: 64 queries of one text or prompt, for one head.
struct Tile {
    u32 start, len, first;  // its first token, its number of tokens, the tile's first query in it
    u32 keys;               // which are read: all, or up to the tile's last query
};

// Of scores, for powers of 2: log2(e) / sqrt(d).
__device__ float scale_of(int d) { return 1.4426950408889634f / sqrtf((float)d); }

// Attention of each query over all keys, or `CAUSAL`, over those up to it. In f32: two threads a query, each with half of its elements.
template <int D, bool CAUSAL>
__device__ void attend(const float* qkv, float* out, Tile tile, u32 heads, char* shared) {
    float* keys = (float*)shared;
    float* values = keys + TILE * D;
    const u32 head = blockIdx.y, half = threadIdx.x % 2, query = tile.first + threadIdx.x / 2;
    const u64 width = (u64)heads * D, stride = 3 * width;
    const float* base = qkv + tile.start * stride + head * D;
    float q[D / 2], o[D / 2], most = -FULL, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
        const float2 p = query < tile.len ? load2(base + query * stride + half * (D / 2) + i) : make_float2(0.0f, 0.0f);
        q[i] = p.x * scale_of(D);
        q[i + 1] = p.y * scale_of(D);
        o[i] = o[i + 1] = 0.0f;
    }
    for (u32 first = 0; first < tile.keys; first += TILE) {
        const u32 here = least(tile.keys - first, TILE);
        __syncthreads();
        for (u32 at = 2 * threadIdx.x; at < TILE * D; at += 256) {
            const bool there = at / D < here;
            const float* row = base + (first + at / D) * stride + at % D;
            *(float2*)(keys + at) = there ? load2(row + width) : make_float2(0.0f, 0.0f);
            *(float2*)(values + at) = there ? load2(row + 2 * width) : make_float2(0.0f, 0.0f);
        }
        __syncthreads();
        for (u32 key = 0; key < here; key += 4) {
            float score[4], now = most;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const float* row = keys + (key + j) * D + half * (D / 2);
                float dot = 0.0f;
#pragma unroll
                for (int i = 0; i < D / 2; ++i) dot = fmaf(q[i], row[i], dot);
                dot += __shfl_xor_sync(~0u, dot, 1);
                score[j] = key + j < here && (!CAUSAL || first + key + j <= query) ? dot : -FULL;
                now = fmaxf(now, score[j]);
            }
            const float shrink = exp2_fast(most - now);
            most = now;
            sum *= shrink;
#pragma unroll
            for (int i = 0; i < D / 2; ++i) o[i] *= shrink;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const float weight = exp2_fast(score[j] - now);
                const float* row = values + (key + j) * D + half * (D / 2);
                sum += weight;
#pragma unroll
                for (int i = 0; i < D / 2; ++i) o[i] = fmaf(weight, row[i], o[i]);
            }
        }
    }
    if (query >= tile.len) return;
    float* row = out + (tile.start + query) * width + head * D + half * (D / 2);
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) store2(row + i, o[i] / sum, o[i + 1] / sum);
}

// Of the next 64 keys and values, on their way to shared memory.
template <int D>
__device__ void start_tile(Half* keys, Half* values, const Half* base, u64 width, u32 first, u32 len) {
    for (u32 at = 8 * threadIdx.x; at < TILE * D; at += 8 * 128) {
        const u32 key = first + at / D, to = at / D * (D + 8) + at % D;
        // What is not there is not read, and its address is one that is.
        const Half* row = base + (key < len ? key : 0) * 3 * width + at % D;
        start_copy(keys + to, row + width, key < len);
        start_copy(values + to, row + 2 * width, key < len);
    }
    end_copies();
}

// In f16, on tensor cores: a warp has 16 queries. Lane 4 g + t has of each product's rows g and g + 8 the columns 2 t and 2 t + 1.
// Two tiles of keys and values are in shared memory, one on its way; rows have 8 elements more, so that matrices come without conflicts.
template <int D, bool CAUSAL>
__device__ void attend(const Half* qkv, Half* out, Tile tile, u32 heads, char* shared) {
    Half* memory = (Half*)shared;
    const u32 head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u64 width = (u64)heads * D;
    const Half* base = qkv + tile.start * 3 * width + head * D;
    start_tile<D>(memory, memory + TILE * (D + 8), base, width, 0, tile.keys);

    const u32 query[2] = {tile.first + 16 * warp + g, tile.first + 16 * warp + g + 8};
    u32 q[D / 16][4];
    float o[D / 8][4], most[2] = {-FULL, -FULL}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Half* row = base + query[j % 2] * 3 * width + 16 * i + 8 * (j / 2) + 2 * t;
            q[i][j] = query[j % 2] < tile.len ? *(const u32*)row : 0;
        }
#pragma unroll
    for (int i = 0; i < D / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;

    u32 turn = 0;
    for (u32 first = 0; first < tile.keys; first += TILE, turn ^= 1) {
        Half* keys = memory + turn * 2 * TILE * (D + 8);
        Half* values = keys + TILE * (D + 8);
        if (first + TILE < tile.keys) {
            Half* next = memory + (turn ^ 1) * 2 * TILE * (D + 8);
            start_tile<D>(next, next + TILE * (D + 8), base, width, first + TILE, tile.keys);
            await_copies<1>();
        } else {
            await_copies<0>();
        }
        __syncthreads();

        float s[8][4];
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
            s[n + 1][0] = s[n + 1][1] = s[n + 1][2] = s[n + 1][3] = 0.0f;
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                u32 k[4];
                load_matrices(k, keys + (8 * n + lane / 16 * 8 + lane % 8) * (D + 8) + 16 * i + lane / 8 % 2 * 8);
                multiply(s[n], q[i], k[0], k[1]);
                multiply(s[n + 1], q[i], k[2], k[3]);
            }
        }
        float now[2] = {most[0], most[1]};
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 key = first + 8 * n + 2 * t + j % 2;
                const bool there = CAUSAL ? key <= query[j / 2] : key < tile.keys;
                s[n][j] = there ? s[n][j] * scale_of(D) : -FULL;
                now[j / 2] = fmaxf(now[j / 2], s[n][j]);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
            now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
            const float shrink = exp2_fast(most[r] - now[r]);
            most[r] = now[r];
            sum[r] *= shrink;
#pragma unroll
            for (int i = 0; i < D / 8; ++i) {
                o[i][2 * r] *= shrink;
                o[i][2 * r + 1] *= shrink;
            }
        }
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s[n][j] = exp2_fast(s[n][j] - now[j / 2]);
                sum[j / 2] += s[n][j];
            }
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            const u32 p[4] = {packed(s[n][0], s[n][1]), packed(s[n][2], s[n][3]), packed(s[n + 1][0], s[n + 1][1]),
                              packed(s[n + 1][2], s[n + 1][3])};
#pragma unroll
            for (int i = 0; i < D / 8; i += 2) {
                u32 v[4];
                load_transposed(v, values + (8 * n + lane % 16) * (D + 8) + 8 * i + lane / 16 * 8);
                multiply(o[i], p, v[0], v[1]);
                multiply(o[i + 1], p, v[2], v[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        if (query[r] >= tile.len) continue;
        Half* row = out + (tile.start + query[r]) * width + head * D + 2 * t;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) store2(row + 8 * i, o[i][2 * r] / sum[r], o[i][2 * r + 1] / sum[r]);
    }
}
