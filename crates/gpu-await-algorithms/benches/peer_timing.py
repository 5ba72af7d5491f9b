"""How long a call of another library takes until the device is done, as lines of `algorithms.rs`."""
import time


def measure(line, power, call, synchronize, restore=None, rounds=None):
    """Prints the median of `rounds` calls as `algorithm.NAME.2pN.WHO_us`, where `line` is `(NAME, WHO)`."""
    name, who = line
    rounds = rounds or (9 if power > 24 else 25)
    times = []
    for turn in range(rounds + 3):
        if restore is not None:
            restore()
        synchronize()
        start = time.perf_counter()
        result = call()
        synchronize()
        # The first ones load or compile kernels and fill the library's memory pool.
        if turn >= 3:
            times.append((time.perf_counter() - start) * 1e6)
        del result
    print(f"algorithm.{name}.2p{power}.{who}_us {sorted(times)[len(times) // 2]:.2f} us", flush=True)
