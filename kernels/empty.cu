// empty: does nothing. What is left is the cost of a launch, for latency benches.
//
// Shapes:  none; touches no memory.
// Launch:  any.
// Args:    none.
extern "C" __global__ void empty() {}
