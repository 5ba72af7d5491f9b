// softmax: y[r, c] = exp(x[r, c] - max of row r) / (sum over row r of the same), for every row r.
//
// Shapes:  x[rows, cols], y[rows, cols], row-major without padding. x may be y; any other overlap is a race.
// Launch:  any grid and any block: a block takes a row at a time and steps by the grid; threads beyond
//          the first 256 along x only keep the barriers. (rows, 256) is natural. No dynamic shared memory.
// Args:    x            device pointer, read
//          y            device pointer, written
//          rows, cols   as above; 0 of either touches no memory
// Order:   each thread folds its columns in ascending order, then the threads' partial results are folded
//          in a tree of halves: the same bits on every run of the same launch.
// Source:  the shift by the row's maximum is the usual guard against overflow, e.g. Goodfellow, Bengio,
//          Courville, "Deep Learning" (2016), section 4.1; the tree is from Mark Harris, "Optimizing
//          Parallel Reduction in CUDA" (2007).
#define MOST 256

extern "C" __global__ void softmax(const float* x, float* y, unsigned int rows, unsigned int cols) {
    __shared__ float part[MOST];

    const unsigned int team = blockDim.x < MOST ? blockDim.x : MOST;
    const unsigned int t = threadIdx.x;
    const bool works = t < team && threadIdx.y == 0 && threadIdx.z == 0;
    const unsigned long long block =
        blockIdx.x + (unsigned long long)gridDim.x * (blockIdx.y + (unsigned long long)gridDim.y * blockIdx.z);
    const unsigned long long blocks = (unsigned long long)gridDim.x * gridDim.y * gridDim.z;

    for (unsigned long long row = block; row < rows; row += blocks) {
        const unsigned long long start = row * cols;

        // The maximum. A thread without columns brings -infinity, which changes none.
        if (works) {
            float most = -__int_as_float(0x7f800000);
            for (unsigned int c = t; c < cols; c += team) {
                most = fmaxf(most, x[start + c]);
                if (cols - c <= team) break;  // c + team could wrap
            }
            part[t] = most;
        }
        for (unsigned int left = team; left > 1; left = (left + 1) / 2) {
            __syncthreads();
            const unsigned int half = (left + 1) / 2;
            if (works && t + half < left) part[t] = fmaxf(part[t], part[t + half]);
        }
        __syncthreads();
        const float most = part[0];
        __syncthreads();

        // The sum.
        if (works) {
            float sum = 0.0f;
            for (unsigned int c = t; c < cols; c += team) {
                sum += expf(x[start + c] - most);
                if (cols - c <= team) break;
            }
            part[t] = sum;
        }
        for (unsigned int left = team; left > 1; left = (left + 1) / 2) {
            __syncthreads();
            const unsigned int half = (left + 1) / 2;
            if (works && t + half < left) part[t] += part[t + half];
        }
        __syncthreads();
        const float sum = part[0];
        __syncthreads();

        if (works) {
            for (unsigned int c = t; c < cols; c += team) {
                y[start + c] = expf(x[start + c] - most) / sum;
                if (cols - c <= team) break;
            }
        }
    }
}
