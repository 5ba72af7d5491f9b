"""gpu_await_py between PyTorch, CuPy, JAX and NumPy on a GPU: `GPU_AWAIT_DEVICE=cuda:0 python3 test_gpu.py`.

In front of each exchange stands work that takes long, so that whoever does not wait sees old values. Exit status 0 if
all holds; a library that is not there is a failure.
"""

import asyncio
import gc
import random
import sys

import numpy as np
import torch
import cupy
import jax

from gpu_await_py import Device

LEN = 1 << 20
SLOW = 20_000_000  # cycles: some 10 ms
device = Device()


def slow():
    """On PyTorch's current stream."""
    torch.cuda._sleep(SLOW)


def slow_cupy():
    """On CuPy's current stream, which PyTorch is lent for it."""
    with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
        slow()


def slow_ours(ours, times=200):
    """Some milliseconds of kernels of ours that add up to `times`."""
    one = device.full(len(ours), 1.0)
    return [device.axpy(1.0, one, ours) for _ in range(times)]


async def pytorch_goes_in():
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x, y = torch.zeros(LEN, device="cuda"), torch.zeros(LEN, device="cuda")
            slow()
            x.fill_(2.0)
            y.fill_(1.0)
            result = await device.axpy(3.0, x, y)
            assert result is y and (y == 7.0).all().item()
            # Theirs behind ours, which is awaited; and a part of one, at an offset.
            slow()
            y.mul_(2.0)
            await device.axpy(1.0, x[10:20], y[100:110])
            assert y[99:111].tolist() == [14.0] + [16.0] * 10 + [14.0]


async def pytorch_takes_ours():
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            ours = device.full(LEN, 5.0)
            pending = slow_ours(ours)
            theirs = torch.from_dlpack(ours)
            copy = theirs.clone()
            assert theirs.device.type == "cuda" and (copy == 205.0).all().item()
            await asyncio.gather(*pending)
            # The same memory: what they write we see, when their stream is waited for.
            theirs.fill_(1.0)
            stream.synchronize()
            await device.axpy(1.0, device.full(LEN, 1.0), ours)
            assert (theirs == 2.0).all().item()


async def memory_stays_until_pytorch_has_read_it():
    """The tensor goes while a kernel is to read it; ours of the same size come behind it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for n in range(20):
            theirs = torch.from_dlpack(device.full(LEN, float(n)))
            slow()
            copy = theirs.clone()
            del theirs
            gc.collect()
            others = [device.full(LEN, -1.0) for _ in range(4)]
            await asyncio.gather(*(device.axpy(1.0, other, other2) for other, other2 in zip(others[::2], others[1::2])))
            assert (copy == float(n)).all().item(), n


async def cupy_goes_in():
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            x, y = cupy.zeros(LEN, dtype=cupy.float32), cupy.zeros(LEN, dtype=cupy.float32)
            slow_cupy()
            x.fill(2.0)
            y.fill(1.0)
            result = await device.axpy(3.0, x, y)
            assert result is y and bool((y == 7.0).all())


async def cupy_takes_ours():
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            ours = device.full(LEN, 5.0)
            pending = slow_ours(ours)
            theirs = cupy.from_dlpack(ours)
            assert bool((theirs + 1.0 == 206.0).all())
            await asyncio.gather(*pending)


async def jax_goes_in_and_takes_ours():
    x = jax.numpy.full((LEN,), 2.0, dtype=jax.numpy.float32)
    y = torch.ones(LEN, device="cuda")
    await device.axpy(3.0, x, y)
    assert (y == 7.0).all().item()
    ours = device.full(LEN, 5.0)
    pending = slow_ours(ours)
    theirs = jax.dlpack.from_dlpack(ours)
    assert float((theirs + 1.0).max()) == float((theirs + 1.0).min()) == 206.0
    await asyncio.gather(*pending)


async def numpy_is_told_that_it_is_elsewhere():
    try:
        await device.axpy(1.0, np.ones(4, dtype=np.float32), torch.ones(4, device="cuda"))
        raise AssertionError("host memory on a GPU")
    except (ValueError, TypeError, BufferError) as error:
        print(f"#   {type(error).__name__}: {error}")
    try:
        np.from_dlpack(device.full(4, 1.0))
        raise AssertionError("a GPU's memory in NumPy")
    except (RuntimeError, BufferError, ValueError) as error:
        print(f"#   {type(error).__name__}: {error}")


async def random_orders():
    """One array goes round; each holder adds something, half of them behind slow work; nobody waits on the host."""
    chance = random.Random(7)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for round in range(40):
        ours, expected, pending = device.full(LEN, 0.0), 0.0, []
        one = device.full(LEN, 1.0)
        for _ in range(10):
            who, add = chance.randrange(3), float(chance.randrange(1, 9))
            if who == 0:
                pending.append(device.axpy(add, one, ours))
            elif who == 1:
                stream = chance.choice(streams)
                with torch.cuda.stream(stream):
                    theirs = torch.from_dlpack(ours)
                    if chance.random() < 0.5:
                        slow()
                    theirs.add_(add)
                    # Behind their work: their tensor goes in, in their stream's order.
                    pending.append(device.axpy(0.0, one, theirs))
            else:
                stream = cupy.cuda.ExternalStream(chance.choice(streams).cuda_stream)
                with stream:
                    theirs = cupy.from_dlpack(ours)
                    if chance.random() < 0.5:
                        slow_cupy()
                    theirs += cupy.float32(add)
                    pending.append(device.axpy(0.0, one, theirs))
            expected += add
        await asyncio.gather(*pending)
        seen = torch.from_dlpack(ours)
        assert (seen == expected).all().item(), (round, expected, seen[:4])


async def nothing_is_kept():
    await asyncio.sleep(0.1)
    gc.collect()
    before = device.used_bytes()
    for _ in range(200):
        theirs = torch.from_dlpack(device.full(LEN, 1.0))
        theirs.add_(1.0)
        del theirs
        device.full(LEN, 1.0).__dlpack__(stream=torch.cuda.current_stream().cuda_stream or 1, max_version=(1, 0))
    torch.cuda.synchronize()
    for _ in range(2000):
        gc.collect(0)
        if device.used_bytes() <= before:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{device.used_bytes()} bytes, before {before}")


async def main():
    tests = [value for value in globals().values() if asyncio.iscoroutinefunction(value) and value is not main]
    failed = 0
    for test in tests:
        try:
            await test()
            print(f"ok {test.__name__}")
        except Exception as error:
            failed += 1
            print(f"FAILED {test.__name__}: {type(error).__name__}: {error}")
    versions = f"PyTorch {torch.__version__}, CuPy {cupy.__version__}, JAX {jax.__version__}, NumPy {np.__version__}"
    print(f"{len(tests) - failed} of {len(tests)} passed on {device}, {versions}, Python {sys.version.split()[0]}")
    sys.exit(failed > 0)


asyncio.run(main())
