// The kernels of a decoder. The tokens of a step are rows of every matrix: of prompts, one behind the other, or one of each sequence. Sums,
// norms and exponentials are in f32 whatever the elements are.
//
//     embed        x[t] = words[ids[t]] + places[positions[t]]; an id of ~0 stands for the token chosen last
//     norm         y[t] = norm(x[t])
//     norm_last    y[r] = norm(x[t]), for the last token t of sequence r
//     prompt       out[t] = softmax(q[t] k^T / sqrt(d)) v, for each head, over the tokens of t's prompt up to t; keys and values go to the cache
//     next         the same for one token of each sequence, over the keys and values in the cache, to which its own go first
//     choose       a token for each sequence, by its logits
//     product      out[t] = activation(norm(x[t]) * weight + bias), or that added to it, for few tokens
//
// norm(x) = (x - mean) / sqrt(variance + eps) * weight + bias. Each but the last exists for float, `_f32`, and for half, `_f16`.
//
// Rows have `hidden` elements: a multiple of 64, 1024 at most. Arrays are row-major without gaps and aligned to 16 bytes, and what is written
// overlaps nothing else. Indices in memory (ids, slots, starts, tiles, blocks) are checked or clamped: whatever they are, no access leaves its array.
//
// A sequence is `row_len` words: a Sequence, and its table, the numbers of its blocks. A block of the cache has 16 tokens, of all layers: for
// each layer, for keys and then values, for each head, 16 rows of d elements.

#include "../../encoder/src/model.cuh"

struct Sequence {
    u32 slot;              // where its last token is kept; ~0: the row belongs to no sequence
    u32 start, count;      // its tokens in this step
    u32 position;          // of the first of them
    float temperature;     // 0: the most likely token
    u32 top_k;             // 0: all
    u32 seed, more_seed;
};
#define BLOCK 16

// Where a layer's keys and values are, and what they are of.
struct Cached {
    u32 row_len, block_len;  // words of a sequence, elements of a block
    u32 hidden, heads, layer;
};

// A product, and what is in front of it and behind it.
struct Product {
    u32 inputs, outputs;
    u32 norms, gelu, adds;  // 0 or 1
    float eps;
};

// ---- rows ---------------------------------------------------------------------------------------

template <typename T>
__device__ void load_row(float2 (&x)[MAX_PAIRS], const T* row, u32 hidden, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < MAX_PAIRS; ++i)
        if (i < hidden / 64) x[i] = load2(row + 2 * (lane + 32 * i));
}

// `input` has all ids, then all positions, then all slots. Launch: block_dim 128; grid_dim tokens / 4, rounded up.
template <typename T>
__device__ void embed(const u32* input, const u32* chosen, const T* words, const T* places, T* x, u32 tokens, u32 hidden, u32 vocabulary,
                      u32 max_positions, u32 streams) {
    const u32 row = blockIdx.x * ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= tokens) return;
    u32 id = input[row];
    const u32 position = input[tokens + row], slot = input[2 * tokens + row];
    if (id == ~0u) id = chosen[least(slot, streams - 1)];
    float2 word[MAX_PAIRS], place[MAX_PAIRS];
    load_row(word, words + (u64)least(id, vocabulary - 1) * hidden, hidden, lane);
    load_row(place, places + (u64)least(position, max_positions - 1) * hidden, hidden, lane);
#pragma unroll
    for (u32 i = 0; i < MAX_PAIRS; ++i)
        if (i < hidden / 64) store2(x + (u64)row * hidden + 2 * (lane + 32 * i), word[i].x + place[i].x, word[i].y + place[i].y);
}

// Launch: as embed.
template <typename T>
__device__ void norm(const T* x, const T* weight, const T* bias, T* y, u32 tokens, u32 hidden, float eps) {
    const u32 row = blockIdx.x * ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= tokens) return;
    float2 mine[MAX_PAIRS];
    load_row(mine, x + (u64)row * hidden, hidden, lane);
    norm_row(mine, hidden, lane, weight, bias, eps, y + (u64)row * hidden);
}

// Launch: block_dim 128; grid_dim sequences / 4, rounded up. A row of no sequence gives the norm of some token.
template <typename T>
__device__ void norm_last(const T* x, const u32* rows, const T* weight, const T* bias, T* y, u32 sequences, u32 row_len, u32 tokens, u32 hidden,
                          float eps) {
    const u32 row = blockIdx.x * ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= sequences) return;
    const Sequence* sequence = (const Sequence*)(rows + (u64)row * row_len);
    const u32 last = least(sequence->start + sequence->count - 1, tokens - 1);
    float2 mine[MAX_PAIRS];
    load_row(mine, x + (u64)last * hidden, hidden, lane);
    norm_row(mine, hidden, lane, weight, bias, eps, y + (u64)row * hidden);
}

// ---- products of few rows -----------------------------------------------------------------------

template <typename T>
struct __align__(16) Chunk {
    T x[16 / sizeof(T)];
};

__device__ void widen(const Chunk<float>& chunk, float (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = chunk.x[i];
}
__device__ void widen(const Chunk<Half>& chunk, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float2 pair = load2(chunk.x + i);
        to[i] = pair.x;
        to[i + 1] = pair.y;
    }
}

__device__ float load1(const float* p) { return *p; }
__device__ float load1(const Half* p) { return unpacked(*(const unsigned short*)p).x; }

// Of a block of 256 threads; `parts` is free again when all have it.
__device__ float block_sum(float x, float (&parts)[8]) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < 8; ++i) sum += parts[i];
    __syncthreads();
    return sum;
}

__device__ float gelu_of(float x) { return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * fmaf(0.044715f * x * x, x, x))); }

#define COLUMNS 16  // of a block

// A block reads 16 columns of the weights, with all of up to 12 or 16 loads of a thread on their way while it norms the row.
template <typename T, int R>
__device__ void product_of(const T* x, const T* norm_weight, const T* norm_bias, const T* weight, const T* bias, T* out, Product p) {
    const int EACH = 16 / sizeof(T), LANES = COLUMNS / EACH, GROUPS = 256 / LANES, LOADS = sizeof(T) == 2 ? 12 : 16;
    __shared__ float parts[8], sums_of[8][R][COLUMNS];
    const u32 group = threadIdx.x / LANES, column = blockIdx.x * COLUMNS + threadIdx.x % LANES * EACH;
    float sums[R][EACH];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < EACH; ++i) sums[r][i] = 0.0f;
    for (u32 first = 0; first < p.inputs; first += GROUPS * LOADS) {
        Chunk<T> w[LOADS];
        float in[R][LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const u32 k = first + j * GROUPS + group;
            if (k < p.inputs) w[j] = *(const Chunk<T>*)(weight + (u64)k * p.outputs + column);
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                const u32 k = first + j * GROUPS + group;
                in[r][j] = k < p.inputs ? load1(x + (u64)r * p.inputs + k) : 0.0f;
                sum += in[r][j];
            }
            if (!p.norms) continue;
            // Each element is in as many lanes as have columns of it.
            const float mean = block_sum(sum, parts) / (float)(LANES * p.inputs);
            float squares = 0.0f;
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                const u32 k = first + j * GROUPS + group;
                in[r][j] -= mean;
                if (k < p.inputs) squares = fmaf(in[r][j], in[r][j], squares);
            }
            const float scale = 1.0f / sqrtf(block_sum(squares, parts) / (float)(LANES * p.inputs) + p.eps);
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                const u32 k = first + j * GROUPS + group;
                if (k < p.inputs) in[r][j] = fmaf(in[r][j] * scale, load1(norm_weight + k), load1(norm_bias + k));
            }
        }
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (first + j * GROUPS + group >= p.inputs) continue;
            float wide[EACH];
            widen(w[j], wide);
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int i = 0; i < EACH; ++i) sums[r][i] = fmaf(in[r][j], wide[i], sums[r][i]);
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int step = LANES; step < 32; step *= 2) sums[r][i] += __shfl_xor_sync(~0u, sums[r][i], step);
            if (threadIdx.x % 32 < LANES) sums_of[threadIdx.x / 32][r][threadIdx.x % LANES * EACH + i] = sums[r][i];
        }
    __syncthreads();
    const u32 row = threadIdx.x / (COLUMNS / 2), pair = threadIdx.x % (COLUMNS / 2) * 2;
    if (row >= R) return;
    const u32 at = blockIdx.x * COLUMNS + pair;
    float2 sum = load2(bias + at);
    for (int i = 0; i < 8; ++i) {
        sum.x += sums_of[i][row][pair];
        sum.y += sums_of[i][row][pair + 1];
    }
    if (p.gelu) sum = make_float2(gelu_of(sum.x), gelu_of(sum.y));
    T* to = out + (u64)row * p.outputs + at;
    if (p.adds) {
        const float2 there = load2(to);
        sum = make_float2(sum.x + there.x, sum.y + there.y);
    }
    store2(to, sum.x, sum.y);
}

// Launch: block_dim 256; grid_dim outputs / 16. 1 or 2 rows; with a norm 1024 inputs at most.
template <typename T>
__device__ void product(const T* x, const T* norm_weight, const T* norm_bias, const T* weight, const T* bias, T* out, u32 rows, Product p) {
    if (rows == 1) product_of<T, 1>(x, norm_weight, norm_bias, weight, bias, out, p);
    if (rows == 2) product_of<T, 2>(x, norm_weight, norm_bias, weight, bias, out, p);
}

// ---- attention ----------------------------------------------------------------------------------

// The cache of one layer and one head.
template <typename T>
struct Cache {
    T* at;
    u32 blocks, block_len, values;  // `values` elements behind a block's keys are its values

    // The keys of a block; null where the table has none.
    __device__ T* keys(const u32* row, u32 row_len, u32 number) const {
        const u32 entry = sizeof(Sequence) / 4 + number;
        if (entry >= row_len || row[entry] >= blocks) return 0;
        return at + (u64)row[entry] * block_len;
    }
};

template <typename T>
__device__ Cache<T> cache_of(T* slab, u32 blocks, Cached c, u32 head) {
    const u64 layer = (u64)c.layer * 2 * BLOCK * c.hidden;
    Cache<T> cache = {slab + layer + head * BLOCK * (c.hidden / c.heads), blocks, c.block_len, BLOCK * c.hidden};
    return cache;
}

// tiles[2 i] is tile i's sequence, tiles[2 i + 1] its first query. One without queries has len <= first.
__device__ Tile tile_of(const u32* rows, const u32* tiles, u32 tokens, u32 sequences, u32 row_len) {
    Tile tile = {0, 0, tiles[2 * blockIdx.x + 1], 0};
    const u32 row = tiles[2 * blockIdx.x];
    if (row < sequences) {
        const Sequence* sequence = (const Sequence*)(rows + (u64)row * row_len);
        tile.start = least(sequence->start, tokens);
        tile.len = least(sequence->count, tokens - tile.start);
    }
    tile.keys = least(tile.len, tile.first + TILE);
    return tile;
}

// The tile's keys and values to the cache.
template <typename T, int D>
__device__ void keep(const T* qkv, Tile tile, u32 heads, const u32* row, u32 row_len, u32 position, Cache<T> cache) {
    const int each = 16 / sizeof(T);
    const u64 width = (u64)heads * D;
    for (u32 at = each * threadIdx.x; at < TILE * D; at += each * 128) {
        const u32 token = tile.first + at / D, place = position + token;
        T* keys = token < tile.len ? cache.keys(row, row_len, place / BLOCK) : 0;
        if (!keys) continue;
        const T* from = qkv + (tile.start + token) * 3 * width + blockIdx.y * D + at % D;
        T* to = keys + place % BLOCK * D + at % D;
        *(Chunk<T>*)to = *(const Chunk<T>*)(from + width);
        *(Chunk<T>*)(to + cache.values) = *(const Chunk<T>*)(from + 2 * width);
    }
}

// Rows of qkv: the queries of all heads, their keys, their values. Rows of no prompt are left as they are.
// Launch: block_dim 128; grid_dim (tiles, heads). hidden / heads is 16, 32 or 64.
template <typename T, int D>
__device__ void prompt_of(const T* qkv, const u32* row, Tile tile, T* slab, T* out, u32 blocks, Cached cached, char* shared) {
    const u32 position = ((const Sequence*)row)->position;
    keep<T, D>(qkv, tile, cached.heads, row, cached.row_len, position, cache_of(slab, blocks, cached, blockIdx.y));
    attend<D, true>(qkv, out, tile, cached.heads, shared);
}

template <typename T>
__device__ void prompt(const T* qkv, const u32* rows, const u32* tiles, T* slab, T* out, u32 tokens, u32 sequences, u32 blocks, Cached cached) {
    // For f16: two tiles of keys and two of values.
    __shared__ __align__(16) char shared[4 * TILE * (64 + 8) * 2];
    const Tile tile = tile_of(rows, tiles, tokens, sequences, cached.row_len);
    if (tile.first >= tile.len) return;
    const u32* row = rows + (u64)tiles[2 * blockIdx.x] * cached.row_len;
    const u32 d = cached.hidden / cached.heads;
    if (d == 16) prompt_of<T, 16>(qkv, row, tile, slab, out, blocks, cached, shared);
    if (d == 32) prompt_of<T, 32>(qkv, row, tile, slab, out, blocks, cached, shared);
    if (d == 64) prompt_of<T, 64>(qkv, row, tile, slab, out, blocks, cached, shared);
}

// What the warps of a block bring together.
struct Parts {
    float most[16], sum[16], o[16][64];
};

// Each warp has every so manyth block of the cache, all of whose loads are on their way at once. Of a row of keys each lane has 16 bytes.
template <typename T, int D>
__device__ void next_of(const T* qkv, const u32* row, u32 row_len, u32 keys, Cache<T> cache, T* out, u32 heads, Parts& parts) {
    const int EACH = 16 / sizeof(T), LANES = D / EACH, ROWS_AT_ONCE = 32 / LANES, LOADS = BLOCK / ROWS_AT_ONCE;
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32, part = lane % LANES * EACH;
    const u64 width = (u64)heads * D;
    float q[EACH], o[EACH], most = -FULL, sum = 0.0f;
    widen(*(const Chunk<T>*)(qkv + part), q);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        q[i] *= scale_of(D);
        o[i] = 0.0f;
    }
    for (u32 number = warp; number * BLOCK < keys; number += warps) {
        T* block = cache.keys(row, row_len, number);
        if (!block) continue;
        const u32 here = least(keys - number * BLOCK, BLOCK);
        if (number == (keys - 1) / BLOCK) {
            // Its own key and value, for this and for later steps.
            if (lane < LANES) {
                T* to = block + (here - 1) * D + part;
                *(Chunk<T>*)to = *(const Chunk<T>*)(qkv + width + part);
                *(Chunk<T>*)(to + cache.values) = *(const Chunk<T>*)(qkv + 2 * width + part);
            }
            __syncwarp();
        }
        Chunk<T> key[LOADS], value[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            // Behind the last token there is something, which weighs nothing; so the last one is read again.
            const T* at = block + least(j * ROWS_AT_ONCE + lane / LANES, here - 1) * D + part;
            key[j] = *(const Chunk<T>*)at;
            value[j] = *(const Chunk<T>*)(at + cache.values);
        }
        float score[LOADS], now = most;
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            float k[EACH], dot = 0.0f;
            widen(key[j], k);
#pragma unroll
            for (int i = 0; i < EACH; ++i) dot = fmaf(q[i], k[i], dot);
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
            score[j] = j * ROWS_AT_ONCE + lane / LANES < here ? dot : -FULL;
            now = fmaxf(now, score[j]);
        }
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, step));
        const float shrink = exp2_fast(most - now);
        most = now;
        sum *= shrink;
#pragma unroll
        for (int i = 0; i < EACH; ++i) o[i] *= shrink;
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            float v[EACH];
            const float weight = exp2_fast(score[j] - now);
            widen(value[j], v);
            sum += weight;
#pragma unroll
            for (int i = 0; i < EACH; ++i) o[i] = fmaf(weight, v[i], o[i]);
        }
    }
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
        for (int i = 0; i < EACH; ++i) o[i] += __shfl_xor_sync(~0u, o[i], step);
    }
    if (lane < LANES) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) parts.o[warp][part + i] = o[i];
    }
    if (lane == 0) {
        parts.most[warp] = most;
        parts.sum[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= D / 2) return;
    float total = 0.0f, x = 0.0f, y = 0.0f;
    for (u32 i = 0; i < warps; ++i) most = fmaxf(most, parts.most[i]);
    for (u32 i = 0; i < warps; ++i) {
        const float weight = exp2_fast(parts.most[i] - most);
        total = fmaf(weight, parts.sum[i], total);
        x = fmaf(weight, parts.o[i][2 * threadIdx.x], x);
        y = fmaf(weight, parts.o[i][2 * threadIdx.x + 1], y);
    }
    if (total > 0.0f) store2(out + 2 * threadIdx.x, x / total, y / total);
}

// Rows of no sequence are left as they are.
// Launch: block_dim 32 to 512; grid_dim (heads, tokens).
template <typename T>
__device__ void next(const T* qkv, const u32* rows, T* slab, T* out, u32 blocks, Cached cached) {
    __shared__ Parts parts;
    const u32 head = blockIdx.x, heads = cached.heads, d = cached.hidden / heads, row_len = cached.row_len;
    const u32* row = rows + (u64)blockIdx.y * row_len;
    const Sequence* sequence = (const Sequence*)row;
    if (sequence->slot == ~0u || sequence->count == 0) return;
    const u32 keys = least(sequence->position + 1, (row_len - sizeof(Sequence) / 4) * BLOCK);
    const Cache<T> cache = cache_of(slab, blocks, cached, head);
    qkv += (u64)blockIdx.y * 3 * cached.hidden + head * d;
    out += (u64)blockIdx.y * cached.hidden + head * d;
    if (d == 16) next_of<T, 16>(qkv, row, row_len, keys, cache, out, heads, parts);
    if (d == 32) next_of<T, 32>(qkv, row, row_len, keys, cache, out, heads, parts);
    if (d == 64) next_of<T, 64>(qkv, row, row_len, keys, cache, out, heads, parts);
}

// ---- the next token -----------------------------------------------------------------------------

__device__ u32 mixed(u32 x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// Of Gumbel's distribution: the largest of logits, each with such a number added, is a sample of their softmax.
__device__ float noise(u32 id, u32 seed, u32 more_seed, u32 position) {
    const u32 bits = mixed(mixed(mixed(mixed(id + 0x9e3779b9u) ^ seed) ^ more_seed) ^ position);
    return -logf(-logf(((float)(bits >> 9) + 0.5f) / 8388608.0f));
}

// Integers in the order of the numbers.
__device__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Four logits; behind the last one they mean nothing.
struct Four {
    float x[4];
};
__device__ Four four_of(const float* logits, u32 first, u32 vocabulary) {
    Four four = {{0.0f, 0.0f, 0.0f, 0.0f}};
    if (first >= vocabulary) return four;
    const float4 x = *(const float4*)(logits + first);
    four.x[0] = x.x, four.x[1] = x.y, four.x[2] = x.z, four.x[3] = x.w;
    return four;
}

// The k-th largest of the logits, as such an integer: a byte of it after the other.
__device__ u32 kth(const float* logits, u32 vocabulary, u32 k, u32 (&counts)[256], u32 (&found)[2]) {
    u32 prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) counts[threadIdx.x] = 0;
        __syncthreads();
        for (u32 first = 0; first < vocabulary; first += 4 * blockDim.x) {
            const u32 mine = first + 4 * threadIdx.x;
            const Four four = four_of(logits, mine, vocabulary);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 x = ordered(four.x[j]);
                const bool counted = mine + j < vocabulary && (shift == 24 || x >> (shift + 8) == prefix);
                const u32 digit = counted ? x >> shift & 255 : 256;
                // Most logits have the same first byte: one addition for all of a warp.
                const u32 peers = __match_any_sync(~0u, digit);
                if (counted && __ffs(peers) - 1 == threadIdx.x % 32) atomicAdd(&counts[digit], __popc(peers));
            }
        }
        __syncthreads();
        if (threadIdx.x < 256) {
            u32 above = 0;
            for (u32 digit = 255; digit > threadIdx.x; --digit) above += counts[digit];
            if (above < k && k <= above + counts[threadIdx.x]) {
                found[0] = threadIdx.x;
                found[1] = k - above;
            }
        }
        __syncthreads();
        prefix = prefix << 8 | found[0];
        k = found[1];
        __syncthreads();
    }
    return prefix;
}

// Of equal ones the first token; ~0 if a logit is not finite. A row of no sequence gives 0. `stride` is a multiple of 4.
// Launch: block_dim 1024; grid_dim sequences.
extern "C" __global__ void __launch_bounds__(1024)
    choose(const float* logits, const u32* rows, u32* chosen, u32* out, u32 row_len, u32 vocabulary, u32 stride, u32 streams) {
    __shared__ u32 counts[256], found[2];
    __shared__ u64 best_of[32];
    const Sequence* sequence = (const Sequence*)(rows + (u64)blockIdx.x * row_len);
    logits += (u64)blockIdx.x * stride;
    if (sequence->slot == ~0u) {
        if (threadIdx.x == 0) out[blockIdx.x] = 0;
        return;
    }
    const float temperature = sequence->temperature;
    const u32 top_k = sequence->top_k, position = sequence->position + sequence->count;
    u32 least_ordered = 0;
    if (temperature > 0.0f && top_k > 0 && top_k < vocabulary) least_ordered = kth(logits, vocabulary, top_k, counts, found);
    u64 best = 0;
#pragma unroll 4
    for (u32 first = 4 * threadIdx.x; first < vocabulary; first += 4 * blockDim.x) {
        const Four four = four_of(logits, first, vocabulary);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 at = first + j;
            float x = four.x[j];
            if (at >= vocabulary) continue;
            if (!(x - x == 0.0f)) best = ~0ull;
            if (ordered(x) < least_ordered) continue;
            if (temperature > 0.0f) x = x / temperature + noise(at, sequence->seed, sequence->more_seed, position);
            const u64 mine = (u64)ordered(x) << 32 | (u32)~at;
            best = mine > best ? mine : best;
        }
    }
    for (int step = 16; step > 0; step /= 2) {
        const u64 other = __shfl_xor_sync(~0u, best, step);
        best = other > best ? other : best;
    }
    if (threadIdx.x % 32 == 0) best_of[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (u32 i = 1; i < blockDim.x / 32; ++i) best = best_of[i] > best ? best_of[i] : best;
    const u32 token = least(~(u32)best, vocabulary - 1);
    out[blockIdx.x] = best == ~0ull ? ~0u : token;
    if (sequence->slot < streams) chosen[sequence->slot] = token;
}

// ---- entries ------------------------------------------------------------------------------------

#define ENTRIES(T, NAME)                                                                                                                       \
    extern "C" __global__ void embed_##NAME(const u32* input, const u32* chosen, const T* words, const T* places, T* x, u32 tokens,             \
                                            u32 hidden, u32 vocabulary, u32 max_positions, u32 streams) {                                      \
        embed(input, chosen, words, places, x, tokens, hidden, vocabulary, max_positions, streams);                                            \
    }                                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 2) product_##NAME(const T* x, const T* norm_weight, const T* norm_bias, const T* weight,     \
                                                                     const T* bias, T* out, u32 rows, Product p) {                             \
        product(x, norm_weight, norm_bias, weight, bias, out, rows, p);                                                                        \
    }                                                                                                                                          \
    extern "C" __global__ void norm_##NAME(const T* x, const T* weight, const T* bias, T* y, u32 tokens, u32 hidden, float eps) {               \
        norm(x, weight, bias, y, tokens, hidden, eps);                                                                                         \
    }                                                                                                                                          \
    extern "C" __global__ void norm_last_##NAME(const T* x, const u32* rows, const T* weight, const T* bias, T* y, u32 sequences, u32 row_len,  \
                                                u32 tokens, u32 hidden, float eps) {                                                           \
        norm_last(x, rows, weight, bias, y, sequences, row_len, tokens, hidden, eps);                                                          \
    }                                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(128) prompt_##NAME(const T* qkv, const u32* rows, const u32* tiles, T* slab, T* out,           \
                                                                    u32 tokens, u32 sequences, u32 blocks, Cached cached) {                    \
        prompt(qkv, rows, tiles, slab, out, tokens, sequences, blocks, cached);                                                                \
    }                                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(512)                                                                                          \
        next_##NAME(const T* qkv, const u32* rows, T* slab, T* out, u32 blocks, Cached cached) {                                               \
        next(qkv, rows, slab, out, blocks, cached);                                                                                            \
    }

ENTRIES(float, f32)
ENTRIES(Half, f16)
