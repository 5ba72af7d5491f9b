// trap: executes the PTX instruction `trap`, a device fault on purpose. The launch completes with an
// error (CUDA_ERROR_LAUNCH_FAILED) and the context of the process is lost, so: tests only, in a child
// process.
//
// Shapes:  none; touches no memory.
// Launch:  any; every thread traps.
// Args:    none.
extern "C" __global__ void trap() {
    asm volatile("trap;");
}
