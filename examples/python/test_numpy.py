"""What gpu_await_py promises, with NumPy on the host device. Run by `python3 test_numpy.py`; exit status 0 if all holds."""

import asyncio
import gc
import os
import resource
import subprocess
import sys
import threading
import time
import weakref

os.environ.setdefault("GPU_AWAIT_DEVICE", "host")

import numpy as np

from gpu_await_py import Device, GpuError

LEN = 1000
device = Device()


async def until(what, holds):
    """The event loop turns meanwhile."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, what
        gc.collect()
        await asyncio.sleep(0.001)


def ones(value=1.0, len=LEN):
    return np.full(len, value, dtype=np.float32)


async def numpy_goes_in_and_is_written_in_place():
    x, y = ones(2.0), ones(1.0)
    result = await device.axpy(3.0, x, y)
    assert result is y and (y == 7.0).all(), y
    # A part of one, with its offset, and any shape whose elements follow each other.
    grid = np.zeros((10, 10), dtype=np.float32)
    await device.axpy(1.0, ones(4.0, 30).reshape(3, 10), grid[2:5])
    assert (grid[2:5] == 4.0).all() and grid.sum() == 120.0


async def ours_is_numpys_without_a_copy():
    ours = device.full(LEN, 5.0)
    assert len(ours) == LEN and ours.__dlpack_device__() == (1, 0)
    theirs = np.from_dlpack(ours)
    assert (theirs == 5.0).all() and theirs.dtype == np.float32
    await device.axpy(1.0, ones(1.0), ours)
    assert (theirs == 6.0).all(), "the same memory"
    assert (ours.numpy() == 6.0).all()
    # Exported while kernels are under way: the export waits.
    pending = [device.axpy(1.0, ones(1.0), ours) for _ in range(50)]
    assert (np.from_dlpack(ours) == 56.0).all()
    await asyncio.gather(*pending)


async def a_thousand_at_once():
    x, arrays = ones(1.0), [ones(float(n)) for n in range(1000)]
    threads = threading.active_count(), len(os.listdir("/proc/self/task"))
    results = await asyncio.gather(*(device.axpy(2.0, x, y) for y in arrays))
    assert all(result is y for result, y in zip(results, arrays))
    assert all((y == n + 2.0).all() for n, y in enumerate(arrays))
    assert len(os.listdir("/proc/self/task")) <= threads[1] + 1, "a thread a future"


async def one_call_a_sweep():
    """Futures that are complete together wake the event loop together."""
    loop, calls = asyncio.get_running_loop(), 0
    plain = loop.call_soon_threadsafe

    def counted(*arguments, **named):
        nonlocal calls
        calls += 1
        return plain(*arguments, **named)

    loop.call_soon_threadsafe = counted
    try:
        arrays = [ones() for _ in range(500)]
        # The loop is busy meanwhile, and so are they complete when it looks again.
        pending = [device.axpy(1.0, arrays[-1], y) for y in arrays[:-1]]
        await asyncio.gather(*pending)
    finally:
        loop.call_soon_threadsafe = plain
    assert 1 <= calls < len(pending), calls
    print(f"#   {len(pending)} futures by {calls} calls")


async def a_cancelled_future_cancels_nothing():
    x, y = ones(1.0), ones(1.0)
    future = device.axpy(2.0, x, y)
    future.cancel()
    try:
        await future
        raise AssertionError("it was cancelled")
    except asyncio.CancelledError:
        pass
    # What comes behind it sees what it did.
    await device.axpy(0.0, x, y)
    assert (y == 3.0).all(), y
    # Also by a time-out, and dropped without a look.
    try:
        await asyncio.wait_for(device.axpy(1.0, x, y), 0)
    except asyncio.TimeoutError:
        pass
    device.axpy(1.0, x, y)
    await device.axpy(0.0, x, y)
    assert (y == 5.0).all(), y


async def nothing_is_kept():
    class Owned(np.ndarray):
        pass

    gone = []
    for n in range(100):
        x, y = ones().view(Owned), ones().view(Owned)
        gone += [weakref.ref(x), weakref.ref(y)]
        future = device.axpy(1.0, x, y)
        if n % 3 == 0:
            future.cancel()
        elif n % 3 == 1:
            await future
        del x, y, future
    await until("arrays that went in", lambda: all(array() is None for array in gone))
    x, y = ones(), ones()
    counts = sys.getrefcount(x), sys.getrefcount(y)
    await device.axpy(1.0, x, y)
    await until("references", lambda: (sys.getrefcount(x), sys.getrefcount(y)) == counts)
    before = device.used_bytes()
    for _ in range(100):
        ours = device.full(LEN, 1.0)
        theirs = np.from_dlpack(ours)
        del ours
        assert theirs[0] == 1.0, "the tensor keeps the memory"
        del theirs
    # A capsule that nobody takes.
    device.full(LEN, 1.0).__dlpack__(max_version=(1, 0))
    device.full(LEN, 1.0).__dlpack__()
    await until("memory of tensors", lambda: device.used_bytes() <= before)


async def what_is_wrong_is_an_exception():
    good = ones()
    frozen = ones()
    frozen.flags.writeable = False

    async def refused(kind, part, x, y):
        try:
            await device.axpy(1.0, x, y)
        except kind as error:
            assert part in str(error), error
            return
        raise AssertionError(f"{part}: no exception")

    await refused(ValueError, "float64", good, np.ones(LEN))
    await refused(ValueError, "int32", np.ones(LEN, dtype=np.int32), good)
    await refused(ValueError, "x.len() == y.len()", good, ones(1.0, 10))
    await refused(ValueError, "not contiguous", good, np.ones((LEN, 2), dtype=np.float32)[:, 0])
    await refused(ValueError, "share memory", good, good)
    await refused(TypeError, "__dlpack__", good, [1.0, 2.0])
    await refused((ValueError, BufferError), "read", good, frozen)

    class Elsewhere:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **_):
            raise AssertionError("asked with a stream that means nothing to it")

    await refused(ValueError, "cuda:0, not on the CPU", Elsewhere(), good)
    # It may be read.
    await device.axpy(1.0, frozen, good)
    assert (good == 2.0).all()
    try:
        device.full(LEN, 1.0).__dlpack__(stream=7)
        raise AssertionError("a stream on the CPU")
    except ValueError:
        pass
    for arguments in ({"copy": True}, {"dl_device": (2, 0)}):
        try:
            device.full(4, 1.0).__dlpack__(**arguments)
            raise AssertionError(arguments)
        except BufferError:
            pass
    assert issubclass(GpuError, RuntimeError)


# What is under way when a device goes, and its interpreter behind it.
ENDING = """
import asyncio, numpy, gpu_await_py

async def main(device):
    x, *arrays = (numpy.ones(2_000_000, dtype=numpy.float32) for _ in range(5))
    for n in range(100):
        device.axpy(1.0, x, arrays[n % 4])

asyncio.run(main(gpu_await_py.Device()))
"""


async def an_interpreter_ends_in_order():
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, ""), ended


async def several_event_loops_on_threads():
    x, errors = ones(1.0), []

    def run():
        async def body():
            y = ones(0.0)
            for n in range(50):
                assert (await device.axpy(1.0, x, y))[0] == n + 1.0

        try:
            asyncio.run(body())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert not errors, errors


async def no_memory_is_lost_over_many():
    x, y = ones(1.0, 100_000), ones(0.0, 100_000)
    for _ in range(200):
        await device.axpy(1.0, x, y)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3000):
        await device.axpy(1.0, x, y)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 20_000, f"{grown} KiB more"


async def main():
    tests = [value for value in globals().values() if asyncio.iscoroutinefunction(value) and value not in (main, until)]
    for test in tests:
        await test()
        print(f"ok {test.__name__}")
    # At the end of the interpreter some are under way.
    y = ones()
    for _ in range(100):
        device.axpy(1.0, ones(), y)
    print(f"{len(tests)} tests passed on {device}, NumPy {np.__version__}, Python {sys.version.split()[0]}")


asyncio.run(main())
