"""The algorithms of `algorithms.rs` by CuPy: `algorithm.NAME.2pN.cupy_us value us`, from the call until the device is done.

Of results that come to the host there (`sum`, `max`, counts of selected elements) the value is read back here as well. CuPy has no
sort by key: `argsort_*` stands for it, whose values are places of 64 bits. `unique_*` sorts first, ours only drops what is equal to its
neighbour. `top_50_*` is a `partition`: the values alone, in no order. There are no run lengths.
"""
import cupy

import peer_timing


def measure(name, power, call, restore=None, rounds=None):
    peer_timing.measure((name, "cupy"), power, call, lambda: cupy.cuda.get_current_stream().synchronize(), restore, rounds)


def random(dtype, size):
    bits = cupy.arange(1, size + 1, dtype=cupy.uint64) * cupy.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> cupy.uint64(29)
    bits *= cupy.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> cupy.uint64(32)
    if dtype == cupy.float32:
        return (bits >> cupy.uint64(40)).astype(cupy.float32) - cupy.float32(1 << 23)
    return bits if dtype == cupy.uint64 else (bits >> cupy.uint64(32)).astype(cupy.uint32)


def of_type(name, dtype, power):
    fresh = random(dtype, 1 << power)
    x = fresh.copy()
    y = cupy.empty_like(x)

    def restore():
        x[...] = fresh

    measure(f"sum_{name}", power, lambda: x.sum().item())
    measure(f"max_{name}", power, lambda: x.max().item())
    measure(f"scan_{name}", power, lambda: cupy.cumsum(x, dtype=dtype, out=y))
    measure(f"sort_{name}", power, x.sort, restore)
    restore()
    middle = dtype(0) if dtype == cupy.float32 else dtype(cupy.iinfo(dtype).max // 2)
    measure(f"select_{name}", power, lambda: x[x < middle])
    measure(f"argsort_{name}", power, lambda: cupy.argsort(x))
    measure(f"unique_{name}", power, lambda: cupy.unique(x))
    measure(f"top_50_{name}", power, lambda: cupy.partition(x, x.size - 50)[-50:])


def histogram(power):
    x = random(cupy.uint32, 1 << power)
    measure("histogram_u32", power, lambda: cupy.histogram(x, bins=256, range=(0, (1 << 32) - 1)))


def main():
    for power in (10, 16, 22, 28):
        for name, dtype in (("f32", cupy.float32), ("u32", cupy.uint32), ("u64", cupy.uint64)):
            of_type(name, dtype, power)
            cupy.get_default_memory_pool().free_all_blocks()
        histogram(power)
        cupy.get_default_memory_pool().free_all_blocks()


main()
