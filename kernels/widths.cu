// widths: out[0..10] = the ten values after it, each as a double: arguments of every width arrive as they
// were passed.
//
// Shapes:  out holds at least 10 elements.
// Launch:  any; every thread writes the same.
// Args:    out       device pointer, written
//          u8..u64   unsigned integers of 1, 2, 4 and 8 bytes
//          i8..i64   signed integers of 1, 2, 4 and 8 bytes
//          f32, f64  floating point
extern "C" __global__ void widths(double* out, unsigned char u8, unsigned short u16, unsigned int u32,
                                  unsigned long long u64, signed char i8, short i16, int i32, long long i64,
                                  float f32, double f64) {
    out[0] = u8;
    out[1] = u16;
    out[2] = u32;
    out[3] = u64;
    out[4] = i8;
    out[5] = i16;
    out[6] = i32;
    out[7] = i64;
    out[8] = f32;
    out[9] = f64;
}
