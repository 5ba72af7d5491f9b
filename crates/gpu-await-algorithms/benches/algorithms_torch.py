"""The algorithms of `algorithms.rs` by PyTorch: `algorithm.NAME.2pN.torch_us value us`, from the call until the device is done.

PyTorch computes little with unsigned types: `u32` and `u64` stand for `int32` and `int64` here, as lines of the same width. Its `sort` returns
places beside the values, so `sort_*` is a sort of pairs whose values are 64 bits wide. Of results that come to the host in `algorithms.rs`
the value is read back here as well. `unique_*` drops what is equal to its neighbour (`unique_consecutive`), as there; `histogram_u32`
counts floats (`histc`), which it has no integers for on a GPU in all versions.
"""
import torch

import peer_timing


def measure(name, power, call, restore=None, rounds=None):
    peer_timing.measure((name, "torch"), power, call, torch.cuda.synchronize, restore, rounds)


def random(dtype, size):
    if dtype == torch.float32:
        return torch.randint(-(1 << 23), 1 << 23, (size,), device="cuda", dtype=torch.int32).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (size,), device="cuda", dtype=dtype)


def of_type(name, dtype, power):
    x = random(dtype, 1 << power)
    y = torch.empty_like(x)
    measure(f"sum_{name}", power, lambda: x.sum().item())
    measure(f"max_{name}", power, lambda: x.max().item())
    measure(f"scan_{name}", power, lambda: torch.cumsum(x, 0, dtype=dtype, out=y))
    sorted_x, places = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64, device="cuda")
    measure(f"sort_{name}", power, lambda: torch.sort(x, out=(sorted_x, places)))
    del sorted_x, places
    measure(f"select_{name}", power, lambda: torch.masked_select(x, x < 0))
    measure(f"unique_{name}", power, lambda: torch.unique_consecutive(x))
    measure(f"top_50_{name}", power, lambda: torch.topk(x, 50))


def histogram(power):
    x = random(torch.int32, 1 << power).to(torch.float32)
    limits = torch.iinfo(torch.int32)
    measure("histogram_u32", power, lambda: torch.histc(x, bins=256, min=limits.min, max=limits.max))


def main():
    torch.manual_seed(1)
    with torch.no_grad():
        for power in (10, 16, 22, 28):
            for name, dtype in (("f32", torch.float32), ("u32", torch.int32), ("u64", torch.int64)):
                of_type(name, dtype, power)
                torch.cuda.empty_cache()
            histogram(power)
            torch.cuda.empty_cache()


main()
