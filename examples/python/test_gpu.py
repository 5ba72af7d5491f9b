"""gpu_await_py between PyTorch, CuPy, JAX and NumPy on a GPU: `GPU_AWAIT_DEVICE=cuda:0 python3 test_gpu.py`.

In front of each exchange stands work of some 50 ms, so that whoever does not wait sees old values; and right behind the
call that work must still be under way, or the call waited on the host. Every check runs twice: the first use of a
library loads kernels, which waits for the GPU. Prints a line a check; exit status 0 if all hold. A library that is not
there is a failure.
"""

import asyncio
import gc
import importlib
import os
import random
import subprocess
import sys

os.environ.setdefault("GPU_AWAIT_DEVICE", "cuda:0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # there are others

import numpy as np
import torch

from gpu_await_py import Device

LEN = 1 << 20
SLOW = 100_000_000  # cycles
missing = []


def library(name):
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing.append(name)
        print(f"FAILED import {name}: {type(error).__name__}: {error}")


cupy, jax = library("cupy"), library("jax")
device = Device()
is_warm = False
aside, other, own = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
one, flag = device.full(LEN, 1.0), torch.zeros(1, device="cuda")
torch.cuda.synchronize()


def slow():
    """On PyTorch's current stream; returns the event behind it."""
    torch.cuda._sleep(SLOW)
    return torch.cuda.current_stream().record_event()


def slow_ours():
    """On the device's stream, which waits for one of PyTorch's."""
    with torch.cuda.stream(aside):
        end = slow()
        return end, device.axpy(0.0, device.full(1, 0.0), flag)


def slow_cupy():
    """On CuPy's current stream, which PyTorch is lent for it."""
    handle = cupy.cuda.get_current_stream().ptr
    with torch.cuda.stream(torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()):
        return slow()


def under_way(end):
    assert not (is_warm and end.query()), "the call waited on the host"


def is_full(tensor, value):
    """Read on a stream that nothing orders behind anything."""
    with torch.cuda.stream(other):
        return (tensor == value).all().item()


async def pytorch_goes_in():
    for stream in (torch.cuda.default_stream(), own):
        with torch.cuda.stream(stream):
            x, y = torch.zeros(LEN, device="cuda"), torch.zeros(LEN, device="cuda")
            end = slow()
            x.fill_(2.0)
            y.fill_(1.0)
            future = device.axpy(3.0, x, y)
            under_way(end)
            assert await future is y and is_full(y, 7.0)
            # A part of one, at an offset.
            end = slow()
            y.mul_(2.0)
            future = device.axpy(1.0, x[10:20], y[100:110])
            under_way(end)
            await future
            assert y[99:111].tolist() == [14.0] + [16.0] * 10 + [14.0]


async def pytorch_takes_ours():
    for stream in (torch.cuda.default_stream(), own):
        with torch.cuda.stream(stream):
            copy, ours = torch.zeros(LEN, device="cuda"), device.full(LEN, 5.0)
            end, first = slow_ours()
            second = device.axpy(1.0, one, ours)
            theirs = torch.from_dlpack(ours)
            copy.copy_(theirs)
            under_way(end)
            assert theirs.is_cuda and (copy == 6.0).all().item()
            await asyncio.gather(first, second)
            # The same memory, written by them and then by us.
            end = slow()
            theirs.fill_(1.0)
            future = device.axpy(1.0, one, theirs)
            under_way(end)
            await future
            assert is_full(torch.from_dlpack(ours), 2.0)


async def every_argument_of_an_export():
    for stream in (None, 1, 2, -1, own.cuda_stream):
        for named in ({}, {"max_version": (1, 0)}):
            copy, ours = torch.zeros(LEN, device="cuda"), device.full(LEN, 5.0)
            torch.cuda.synchronize()
            end, first = slow_ours()
            second = device.axpy(1.0, one, ours)
            theirs = torch.from_dlpack(ours.__dlpack__(stream=stream, **named))
            under_way(end)
            if stream == -1:
                # Whoever says so waits.
                await second
            with torch.cuda.stream(own if stream == own.cuda_stream else torch.cuda.default_stream()):
                copy.copy_(theirs)
                assert (copy == 6.0).all().item(), (stream, named)
            await asyncio.gather(first, second)
    for wrong in (0, -2):
        try:
            one.__dlpack__(stream=wrong)
            raise AssertionError(wrong)
        except ValueError:
            pass


async def our_memory_stays_until_pytorch_has_read_it():
    """The tensor goes while a kernel is to read it; others of the same size come behind it."""
    with torch.cuda.stream(own):
        copy = torch.zeros(LEN, device="cuda")
        for n in range(10):
            theirs = torch.from_dlpack(device.full(LEN, float(n)))
            end = slow()
            copy.copy_(theirs)
            del theirs
            under_way(end)
            gc.collect()
            others = [device.full(LEN, -1.0) for _ in range(4)]
            await asyncio.gather(*(device.axpy(1.0, one, y) for y in others))
            assert (copy == float(n)).all().item(), n


async def pytorchs_memory_stays_until_we_have_read_it():
    with torch.cuda.stream(own):
        for n in range(10):
            x, y = torch.full((LEN,), float(n), device="cuda"), device.full(LEN, 0.0)
            own.synchronize()
            end, first = slow_ours()
            second = device.axpy(1.0, x, y)
            del x
            under_way(end)
            gc.collect()
            others = [torch.full((LEN,), -1.0, device="cuda") for _ in range(4)]
            await asyncio.gather(first, second)
            assert is_full(torch.from_dlpack(y), float(n)), n
            del others


async def cupy_goes_in():
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            x, y = cupy.zeros(LEN, dtype=cupy.float32), cupy.zeros(LEN, dtype=cupy.float32)
            end = slow_cupy()
            x.fill(2.0)
            y.fill(1.0)
            future = device.axpy(3.0, x, y)
            under_way(end)
            assert await future is y and bool((y == 7.0).all())


async def cupy_takes_ours():
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            copy, ours = cupy.zeros(LEN, dtype=cupy.float32), device.full(LEN, 5.0)
            end, first = slow_ours()
            second = device.axpy(1.0, one, ours)
            theirs = cupy.from_dlpack(ours)
            cupy.copyto(copy, theirs)
            under_way(end)
            assert bool((copy == 6.0).all())
            await asyncio.gather(first, second)


def slow_jax(x):
    """`x`, behind some products of matrices that are 1 everywhere."""
    ones = jax.numpy.ones((4096, 4096), dtype=jax.numpy.float32)
    product = jax.lax.fori_loop(0, 60, lambda _, product: product @ ones / 4096.0, ones)
    return x + (product[0, 0] - 1.0)


async def jax_goes_in():
    assert jax.devices()[0].platform == "gpu", jax.devices()
    x = jax.numpy.full((LEN,), 2.0, dtype=jax.numpy.float32)
    run = jax.jit(slow_jax)
    run(x).block_until_ready()
    y = torch.ones(LEN, device="cuda")
    torch.cuda.synchronize()
    late = run(x)
    was_ready = late.is_ready()
    future = device.axpy(3.0, late, y)
    if is_warm:
        print(f"#   JAX: ready when asked: {was_ready}, when `axpy` returned: {late.is_ready()}")
    del late
    await future
    assert is_full(y, 7.0)


async def jax_takes_ours():
    for _ in range(3):
        ours = device.full(LEN, 5.0)
        end, first = slow_ours()
        second = device.axpy(1.0, one, ours)
        theirs = jax.dlpack.from_dlpack(ours)
        if is_warm and end.query():
            print("#   JAX waited on the host")
        del ours
        more = theirs + 1.0
        del theirs
        gc.collect()
        assert float(more.max()) == float(more.min()) == 7.0
        await asyncio.gather(first, second)


async def numpy_is_told_that_it_is_elsewhere():
    for x, y in ((np.ones(4, dtype=np.float32), flag), (flag, np.ones(1, dtype=np.float32))):
        try:
            await device.axpy(1.0, x, y)
            raise AssertionError("host memory on a GPU")
        except ValueError as error:
            assert "the CPU, not on cuda:0" in str(error), error
    try:
        np.from_dlpack(one)
        raise AssertionError("a GPU's memory in NumPy")
    except (RuntimeError, BufferError, ValueError):
        pass


async def a_cancelled_future_cancels_nothing():
    y = device.full(LEN, 1.0)
    end, first = slow_ours()
    future = device.axpy(2.0, one, y)
    try:
        await asyncio.wait_for(future, 0.001)
    except asyncio.TimeoutError:
        assert future.cancelled()
    under_way(end)
    await asyncio.gather(first, device.axpy(1.0, one, y))
    assert is_full(torch.from_dlpack(y), 4.0)


async def a_thousand_at_once():
    loop, calls, arrays = asyncio.get_running_loop(), [], [device.full(1024, float(n)) for n in range(1000)]
    x, plain = device.full(1024, 1.0), loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *arguments, **named: (calls.append(1), plain(*arguments, **named))[1]
    threads = len(os.listdir("/proc/self/task"))
    try:
        await asyncio.gather(*(device.axpy(2.0, x, y) for y in arrays))
    finally:
        loop.call_soon_threadsafe = plain
    assert len(os.listdir("/proc/self/task")) <= threads + 8, "a thread a future"
    assert all(is_full(torch.from_dlpack(y), n + 2.0) for n, y in enumerate(arrays))
    assert 1 <= len(calls) < len(arrays), len(calls)
    if is_warm:
        print(f"#   {len(arrays)} futures by {len(calls)} calls")


async def random_orders():
    """One array goes round; each holder adds something, half of them behind slow work; nobody waits on the host."""
    chance = random.Random(7)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(10):
        ours, expected, pending = device.full(LEN, 0.0), 0.0, []
        for _ in range(10):
            who, add = chance.randrange(3), float(chance.randrange(1, 9))
            stream, is_slow = chance.choice(streams), chance.random() < 0.5
            if who == 0:
                pending.append(device.axpy(add, one, ours))
            elif who == 1:
                with torch.cuda.stream(stream):
                    theirs = torch.from_dlpack(ours)
                    if is_slow:
                        slow()
                    theirs.add_(add)
                    # Behind their work: their tensor goes in, in their stream's order.
                    pending.append(device.axpy(0.0, one, theirs))
            else:
                with cupy.cuda.ExternalStream(stream.cuda_stream):
                    theirs = cupy.from_dlpack(ours)
                    if is_slow:
                        slow_cupy()
                    theirs += cupy.float32(add)
                    pending.append(device.axpy(0.0, one, theirs))
            expected += add
        await asyncio.gather(*pending)
        assert is_full(torch.from_dlpack(ours), expected), (turn, expected)


async def nothing_is_kept():
    async def settled(holds):
        for _ in range(100):
            # All of it: what went through asyncio is in circles of every age.
            gc.collect()
            if holds(device.used_bytes()):
                return True
            await asyncio.sleep(0.005)

    # What the checks before it left goes first.
    assert await settled(lambda used: used <= 2 * 4 * LEN), device.used_bytes()
    before = device.used_bytes()
    for _ in range(200):
        theirs = torch.from_dlpack(device.full(LEN, 1.0))
        theirs.add_(1.0)
        del theirs
        # Capsules that nobody takes.
        device.full(LEN, 1.0).__dlpack__(stream=own.cuda_stream, max_version=(1, 0))
        device.full(LEN, 1.0).__dlpack__()
    torch.cuda.synchronize()
    assert await settled(lambda used: used <= before), f"{device.used_bytes()} bytes, before {before}"


# What is under way when a device goes, and its interpreter behind it.
ENDING = """
import asyncio, torch, gpu_await_py

async def main(device):
    x, y = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
    torch.cuda._sleep(200_000_000)
    for _ in range(100):
        device.axpy(1.0, x, y)

asyncio.run(main(gpu_await_py.Device()))
"""


async def an_interpreter_ends_in_order():
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "panicked" not in ended.stderr, ended


async def main():
    global is_warm
    tests = [value for value in globals().values() if asyncio.iscoroutinefunction(value) and value is not main]
    failed = len(missing)
    for test in tests:
        try:
            for is_warm in (False, True):
                await test()
                torch.cuda.synchronize()
            print(f"ok {test.__name__}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED {test.__name__}: {type(error).__name__}: {error}", flush=True)
    versions = ", ".join(f"{name} {sys.modules[name].__version__}" for name in ("torch", "cupy", "jax", "numpy") if name in sys.modules)
    print(f"{len(tests)} checks, {failed} failed, on {device}, {versions}, Python {sys.version.split()[0]}")
    sys.exit(failed > 0)


asyncio.run(main())
