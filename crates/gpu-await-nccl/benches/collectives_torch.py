"""The lines of `collectives.rs` by torch.distributed, a process a GPU.

    torchrun --standalone --nproc-per-node=2 collectives_torch.py

`us` is one call and a `torch.cuda.synchronize()`, median; `bus` a burst that is waited for once, as nccl-tests counts.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist

SIZES = [8, 128, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30]


def effort(size):
    if size <= 1 << 20:
        return 21, 20
    return (11, 10) if size <= 64 << 20 else (6, 4)


def name(size):
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size >> shift}{unit}"
    return f"{size}B"


def main():
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    x = torch.ones(SIZES[-1] // 4, device="cuda")
    y = torch.ones(SIZES[-1] // 4, device="cuda")
    factors = {"all_reduce": 2 * (world - 1) / world, "all_gather": (world - 1) / world, "broadcast": 1.0}
    for op, factor in factors.items():
        for size in SIZES:
            count = size // 4

            def call():
                if op == "all_reduce":
                    dist.all_reduce(y[:count])
                elif op == "all_gather":
                    dist.all_gather_into_tensor(y[: count // world * world], x[: count // world])
                else:
                    dist.broadcast(y[:count], 0)

            rounds, burst = effort(size)
            one, bus = [], []
            for number in range(rounds):
                for _ in range(burst):
                    start = time.perf_counter()
                    call()
                    torch.cuda.synchronize()
                    if number:
                        one.append((time.perf_counter() - start) * 1e6)
                start = time.perf_counter()
                for _ in range(burst):
                    call()
                torch.cuda.synchronize()
                if number:
                    bus.append(size * burst * factor / (time.perf_counter() - start) / 1e9)
            if rank == 0:
                print(f"two_processes.{op}.{name(size)}.torch.us {statistics.median(one):.2f} us")
                print(f"two_processes.{op}.{name(size)}.bus.torch {statistics.median(bus):.2f} GB/s", flush=True)
    dist.destroy_process_group()


main()
