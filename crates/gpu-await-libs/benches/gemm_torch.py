"""The products of `gemm.rs` by PyTorch's `matmul`: `gemm.SHAPE.torch.tflops value TFLOP/s`."""
import time

import torch


def speed(name, a, b, launches, rounds=11):
    c = torch.empty(a.shape[:-1] + b.shape[-1:], dtype=a.dtype, device="cuda")
    speeds = []
    for turn in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            torch.matmul(a, b, out=c)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if turn >= 2:
            speeds.append(2.0 * a.numel() * b.shape[-1] * launches / seconds / 1e12)
    print(f"gemm.{name}.torch.tflops {sorted(speeds)[rounds // 2]:.3f} TFLOP/s")


def call(rounds=200, burst=100):
    a = torch.full((64, 64), 0.5, device="cuda")
    c = torch.empty_like(a)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(burst):
            torch.matmul(a, a, out=c)
        times.append((time.perf_counter() - start) / burst * 1e6)
        torch.cuda.synchronize()
    print(f"gemm.call.torch.us {sorted(times)[rounds // 2]:.3f} us")


def full(*shape, dtype, value):
    return torch.full(shape, value, dtype=dtype, device="cuda")


with torch.no_grad():
    call()
    bf16, f32 = torch.bfloat16, torch.float32
    n = 8192
    speed("bf16_8192", full(n, n, dtype=bf16, value=0.5), full(n, n, dtype=bf16, value=0.25), 10)
    n = 1024
    a, b = full(n, n, dtype=f32, value=0.5), full(n, n, dtype=f32, value=0.25)
    torch.backends.cuda.matmul.allow_tf32 = False
    speed("f32_1024", a, b, 200)
    torch.backends.cuda.matmul.allow_tf32 = True
    speed("f32_tf32_1024", a, b, 200)
    a, b = full(64, 256, 256, dtype=bf16, value=0.5), full(64, 256, 256, dtype=bf16, value=0.25)
    speed("bf16_256x64", a, b, 200)
