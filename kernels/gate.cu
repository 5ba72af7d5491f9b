// gate: holds its stream until the host opens a word or a time-out passes.
//
//     | word | meaning   | set by                                   |
//     | 0    | closed    | the host, before the launch              |
//     | 1    | open      | the host (any value but 0 and 2 will do) |
//     | 2    | timed out | this kernel                              |
//
// The host opens with a compare-exchange from 0, never with a plain store (which would hide a time-out),
// and takes the word's value after the kernel completed as the outcome: 2 is a time-out. The kernel
// stores it plainly: GPUs without CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED (an H200 in a PCIe
// host) have no atomics on host memory, so an opening in the instant of the time-out may be overwritten
// by 2; the gate has then timed out, and the word says so. Use a fresh word for each launch: a word set
// back to 0 while the kernel runs may close the gate again, unseen.
//
// Shapes:  word is one u32, 4-byte aligned, in mapped pinned host memory, alive until the kernel completed.
// Launch:  grid_dim (1, 1, 1), block_dim (1, 1, 1). In a larger launch thread 0 of block 0 polls and
//          the others return at once.
// Args:    word        device pointer of the word
//          timeout_ns  time-out by %globaltimer, counted from the kernel's first reading; 0 looks once
//
// What the host wrote before it opened the word is visible to whatever follows in the stream.
static __device__ __forceinline__ unsigned long long globaltimer_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void gate(unsigned int* word, unsigned long long timeout_ns) {
    if ((threadIdx.x | threadIdx.y | threadIdx.z | blockIdx.x | blockIdx.y | blockIdx.z) != 0) {
        return;
    }
    const unsigned long long start = globaltimer_ns();
    // A volatile load is a relaxed one of system scope (PTX ISA, "Memory Consistency Model"); the
    // spelled-out form and nanosleep need compute capability 7.0.
    while (*(volatile unsigned int*)word == 0) {
        if (globaltimer_ns() - start >= timeout_ns) {
            *(volatile unsigned int*)word = 2u;
            break;
        }
    }
    __threadfence_system();
}
