"""The transforms of `fft.rs` by CuPy, with plans made before: `fft.SHAPE.cupy.us value us`."""
import time

import cupy
from cupyx.scipy import fft


def speed(name, shape, axes, launches, rounds=11):
    x = cupy.full(shape, 0.5 + 0.25j, dtype=cupy.complex64)
    times = []
    with fft.get_fft_plan(x, axes=axes) as plan:
        y = cupy.empty_like(x)
        for turn in range(rounds + 2):
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(launches):
                plan.fft(x, y, cupy.cuda.cufft.CUFFT_FORWARD)
            cupy.cuda.Device().synchronize()
            if turn >= 2:
                times.append((time.perf_counter() - start) / launches * 1e6)
    print(f"fft.{name}.cupy.us {sorted(times)[rounds // 2]:.2f} us")


def call():
    x = cupy.full((64,), 0.5 + 0.25j, dtype=cupy.complex64)
    times = []
    with fft.get_fft_plan(x) as plan:
        y = cupy.empty_like(x)
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(100):
                plan.fft(x, y, cupy.cuda.cufft.CUFFT_FORWARD)
            times.append((time.perf_counter() - start) / 100 * 1e6)
            cupy.cuda.Device().synchronize()
    print(f"fft.call.cupy.us {sorted(times)[100]:.2f} us")


speed("1m", (1 << 20,), (0,), 200)
speed("4096x64", (64, 4096), (1,), 200)
speed("256_256_256", (256, 256, 256), (0, 1, 2), 50)
call()
