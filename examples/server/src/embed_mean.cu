// embed_mean: for each request the mean of the table rows of its tokens, divided by its Euclidean norm.
//
//     sum[j]    = table[t0, j] + table[t1, j] + ...     one after the other, in the order of the tokens
//     mean[j]   = sum[j] / count
//     out[r, j] = mean[j] / sqrt(squares),  squares = the sum of mean[j]^2, folded in a tree of halves:
//                 j and j + 32 first, then j and j + 16, ... and last 0 and 1
//
// Many requests go in one launch: `starts` says where the tokens of each begin. A request without tokens,
// and one whose mean is zero, gives zeros. Each request's bits are the same whatever it is gathered with.
//
// Shapes:  tokens[n_tokens], starts[requests + 1], table[rows, 64], out[requests, 64], row-major without
//          padding. Request r has the tokens starts[r] .. starts[r + 1]. out overlaps none of the others.
// Launch:  block_dim (64, 1, 1), exactly; grid_dim (requests, 1, 1). Static shared memory only.
// Args:    tokens, starts, table   device pointers, read
//          out                     device pointer, written (never read)
//          n_tokens, rows          as above; rows is 1 or more
//
// It stays inside its arrays whatever is in them: an end beyond n_tokens is n_tokens, a token beyond the
// table is its last row.
#define WIDTH 64

extern "C" __global__ void embed_mean(const unsigned int* tokens, const unsigned int* starts, const float* table,
                                      float* out, unsigned int n_tokens, unsigned int rows) {
    __shared__ float squares[WIDTH];

    const unsigned int request = blockIdx.x;
    const unsigned int j = threadIdx.x;
    const unsigned int start = starts[request];
    const unsigned int end = starts[request + 1] < n_tokens ? starts[request + 1] : n_tokens;

    float sum = 0.0f;
    for (unsigned int i = start; i < end; ++i) {
        const unsigned int row = tokens[i] < rows ? tokens[i] : rows - 1;
        sum += table[(unsigned long long)row * WIDTH + j];
    }
    const float mean = start < end ? sum / (float)(end - start) : 0.0f;

    squares[j] = mean * mean;
    __syncthreads();
    for (unsigned int half = WIDTH / 2; half > 0; half /= 2) {
        if (j < half) {
            squares[j] += squares[j + half];
        }
        __syncthreads();
    }
    const float norm = sqrtf(squares[0]);
    out[(unsigned long long)request * WIDTH + j] = norm > 0.0f ? mean / norm : 0.0f;
}
