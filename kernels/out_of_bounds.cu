// out_of_bounds: x[index] = 1.0, unchecked: an illegal address on purpose. With an index far outside
// every allocation the launch completes with an error (CUDA_ERROR_ILLEGAL_ADDRESS) and the context of
// the process is lost, so: tests only, in a child process. An index just past the end may hit another
// allocation or padding and fault nothing; take one that is terabytes away (1 << 40, say).
//
// Shapes:  x is any device pointer, null included.
// Launch:  any; every thread writes the same element.
// Args:    x      device pointer
//          index  element to write, in elements of 4 bytes
extern "C" __global__ void out_of_bounds(float* x, unsigned long long index) {
    x[index] = 1.0f;
}
