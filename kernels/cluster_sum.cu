// cluster_sum: out[b] = the sum of x over the blocks of b's cluster, for every block b < n: each block puts
// its element into its shared memory and reads that of its peers.
//
// Shapes:  x and out hold at least n elements; a block is numbered along x first, then y, then z. Blocks
//          beyond n bring 0 and write nothing. out may be x.
// Launch:  any grid, any block and any cluster (none is a cluster of one block); static shared memory only.
// Args:    x     device pointer, read
//          out   device pointer, written
//          n     number of elements; 0 touches no memory
// Target:  compute capability 9.0: clusters, and shared memory across them, are not there before.
static __device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive;\n\tbarrier.cluster.wait;" ::: "memory");
}

extern "C" __global__ void cluster_sum(const unsigned int* x, unsigned int* out, unsigned long long n) {
    __shared__ unsigned int mine;
    const bool first = (threadIdx.x | threadIdx.y | threadIdx.z) == 0;
    const unsigned long long block =
        blockIdx.x + (unsigned long long)gridDim.x * (blockIdx.y + (unsigned long long)gridDim.y * blockIdx.z);

    if (first) {
        mine = block < n ? x[block] : 0u;
    }
    cluster_barrier();
    unsigned int sum = 0;
    if (first) {
        unsigned int blocks;
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
        const unsigned int here = (unsigned int)__cvta_generic_to_shared(&mine);
        for (unsigned int rank = 0; rank < blocks; ++rank) {
            unsigned int there, value;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
            asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
            sum += value;
        }
    }
    // A block must not end while a peer reads its shared memory.
    cluster_barrier();
    if (first && block < n) {
        out[block] = sum;
    }
}
