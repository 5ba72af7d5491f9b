// spin: keeps every thread busy for at least `nanoseconds`, by %globaltimer.
//
// Shapes:  none; touches no memory.
// Launch:  any; one block of one thread holds the stream for that long and leaves the device free. Each
//          thread counts from its own first reading, so blocks that wait for a place add their time.
// Args:    nanoseconds  how long; 0 returns at once
//
// %globaltimer advances in steps that differ between devices, so a time shorter than a step is rounded
// up to one, and a clock outside may see up to a step less.
static __device__ __forceinline__ unsigned long long globaltimer_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void spin(unsigned long long nanoseconds) {
    if (nanoseconds == 0) {
        return;
    }
    const unsigned long long start = globaltimer_ns();
    // A difference, so that no value of `nanoseconds` overflows a deadline.
    while (globaltimer_ns() - start < nanoseconds) {
    }
}
