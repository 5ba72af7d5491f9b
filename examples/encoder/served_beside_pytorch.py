#!/usr/bin/env python3
"""The encoder's server beside a PyTorch server, under the same clients. Needs a GPU, PyTorch and transformers; no network, no Rust.

    python3 served_beside_pytorch.py --encoder ./encoder [--model minilm] [--clients 16,32,64,..] [--seconds 6] [--work DIR]
    python3 served_beside_pytorch.py --encoder ./encoder --steps          # the encoder alone: what each way of serving gains
    python3 served_beside_pytorch.py --encoder ./encoder --soak 1200      # the encoder alone, under clients that leave and that have little time

Both servers have the same batching rule: whenever one of two batches is free, what waits by then, up to 8,192 tokens and 64 texts. Weights are the
same (`beside_pytorch.py` makes them), in f16. The clients are `encoder load`, with a quarter of the cores; the server has the others. Answers are
raw numbers, as a Python program takes longer to write 384 of them in JSON than a GPU takes to compute them.

The PyTorch server pads texts to the longest of the batch. Its HTTP is written by hand on asyncio (uvloop and orjson, where they are there), in a
thread of its own. Variants, of which the one with the most requests a second at 64 clients is compared:

    eager       the model as it is
    compiled    torch.compile(dynamic=True)
    captured    the compiled model in a CUDA graph for each shape: texts rounded up to 8, 16, 32 or 64, tokens to a multiple of 64

Prints `name value unit` lines: requests a second, p50 and p99 at 64 clients; the most requests a second with a p99 of at most 20 ms (`within_20_ms.*`)
over all numbers of clients; answers that were wrong, refused or failed. Lines with `#` in front are what else the programs said.
"""

import argparse
import collections
import gc
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time

import beside_pytorch

MAX_TOKENS, MAX_TEXTS, LANES = 8192, 64, 2
VARIANTS = ("captured", "compiled", "eager")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--encoder", default="./encoder")
    parser.add_argument("--model", default="minilm", choices=beside_pytorch.MODELS)
    parser.add_argument("--work", default="/tmp/encoder-beside-pytorch")
    parser.add_argument("--clients", default="16,32,64,96,128,192,256,384,512,768")
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--soak", type=int, help="seconds")
    parser.add_argument("--device", default="cuda:0", help="of the encoder, and of its clients")
    parser.add_argument("--folder", help="a model that is there, instead of one that is made")
    parser.add_argument("--serve", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.folder, options.serve)

    work = pathlib.Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    folder = options.folder or beside_pytorch.make(options.model, work)["f16"]
    ours = [options.encoder, "serve", "--addr", "127.0.0.1:0", "--device", options.device, "--model", folder]
    if options.soak:
        with Server(ours) as server:
            extra = ["--leaving", 5, "--timeout", 40, "--pid", server.process.pid]
            load(options, folder, server, "soak", 64, options.soak, *extra)
        return
    if options.steps:
        return steps(options, folder, ours)
    theirs = {how: [sys.executable, __file__, "--folder", folder, "--serve", how] for how in options.variants.split(",") if how}
    best = None
    for how, command in theirs.items():
        try:
            with Server(command) as server:
                seen = load(options, folder, server, f"{options.model}.pytorch_{how}", 64, options.seconds)
        except Exception as error:  # One that does not run with this version of PyTorch is not the best.
            print(f"# {how}: {error}".replace("\n", "\n# "), flush=True)
            continue
        if best is None or seen["requests.64"] > best[0]:
            best = (seen["requests.64"], how)
    results = {}
    for who, command in [("encoder", ours)] + ([(f"pytorch_{best[1]}", theirs[best[1]])] if best else []):
        with Server(command) as server:
            results[who] = load(options, folder, server, f"{options.model}.{who}", options.clients, options.seconds)
    if best:
        encoder, pytorch = results["encoder"], results[f"pytorch_{best[1]}"]
        for name in ("requests.64", "within_20_ms"):
            if pytorch.get(name) and name in encoder:
                print(f"ratio.{options.model}.{name} {encoder[name] / pytorch[name]:.2f} times")


def steps(options, folder, ours):
    """What the guide's page builds, one after the other; then queries of one client beside 64 clients, without and with a partition."""
    one_by_one = ["--without-graphs", "--max-texts", 1, "--lanes", 8]
    for step, how in (("blocking", [*one_by_one, "--blocking"]), ("await", one_by_one), ("batch", ["--without-graphs"]), ("graph", [])):
        with Server(ours + how) as server:
            load(options, folder, server, f"step.{options.model}.{step}", 64, options.seconds)
    for step, how in (("shared", []), ("partition", ["--interactive", 16])):
        with Server(ours + how) as server:
            beside = (options, folder, server, f"step.{options.model}.{step}.others", 64, options.seconds + 12)
            others = threading.Thread(target=load, args=beside)
            others.start()
            time.sleep(6)
            load(options, folder, server, f"step.{options.model}.{step}.interactive", 1, options.seconds, "--interactive")
            others.join()


def cores():
    """Those of the server, those of the clients."""
    all_cores = sorted(os.sched_getaffinity(0))
    clients = max(1, len(all_cores) // 4)
    return all_cores[:-clients] or all_cores, all_cores[-clients:]


class Server:
    """A process that says `listening on http://HOST:PORT`; its other lines go to the output as remarks."""

    def __init__(self, command):
        self.command = [str(part) for part in command]

    def __enter__(self):
        pin = lambda: os.sched_setaffinity(0, cores()[0])
        self.process = subprocess.Popen(
            self.command, env=beside_pytorch.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=pin
        )
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            found = re.search(r"listening on http://(\S+)", line)
            if found:
                self.address = found[1]
                threading.Thread(target=self.drain, daemon=True).start()
                return self
        raise RuntimeError(f"the server ended with {self.process.wait()}:\n{''.join(lines[-30:])}")

    def drain(self):
        for line in self.process.stdout:
            print(f"# {line.rstrip()}", flush=True)

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def load(options, folder, server, name, clients, seconds, *extra):
    """Runs clients; prints what they saw, and returns it."""
    command = [options.encoder, "load", "--addr", server.address, "--model", folder, "--dtype", "f32", "--device", options.device]
    command += ["--clients", clients, "--seconds", seconds, *extra]
    mine = cores()[1]
    environment = dict(beside_pytorch.environment(), TOKIO_WORKER_THREADS=str(len(mine)))
    clients = subprocess.Popen(
        [str(part) for part in command], env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, mine)
    )
    seen = {}
    for line in clients.stdout:
        parts = line.split()
        if len(parts) == 3 and parts[0] != "#":
            seen[parts[0]] = float(parts[1])
            what, dot, count = parts[0].partition(".")
            print(f"{what}.{name}{dot}{count} {parts[1]} {parts[2]}", flush=True)
        else:
            print(line.rstrip(), flush=True)
    if clients.wait() != 0:
        raise RuntimeError(f"the clients ended with {clients.returncode}")
    return seen


# ---- the PyTorch server -------------------------------------------------------------------------


class Waiting:
    """Requests that are in no batch yet: (ids, connection)."""

    def __init__(self):
        self.requests, self.changed = collections.deque(), threading.Condition()

    def add(self, ids, connection):
        with self.changed:
            self.requests.append((ids, connection))
            self.changed.notify()

    def take(self):
        """The next batch, once there is a request."""
        with self.changed:
            while not self.requests:
                self.changed.wait()
            batch, tokens = [], 0
            while self.requests and len(batch) < MAX_TEXTS and tokens + len(self.requests[0][0]) <= MAX_TOKENS:
                batch.append(self.requests.popleft())
                tokens += len(batch[-1][0])
            return batch


def listen(waiting, listening):
    """HTTP/1.1 on a loop, in the thread that calls this."""
    import asyncio

    try:
        import uvloop as loops
    except ImportError:
        loops = asyncio
    try:
        from orjson import loads
    except ImportError:
        from json import loads

    content_length = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

    class Connection(asyncio.Protocol):
        """Kept alive, one request after the other."""

        def connection_made(self, transport):
            self.transport, self.buffer = transport, b""

        def data_received(self, data):
            self.buffer += data
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            length = content_length.search(self.buffer, 0, end)
            if length is None:  # The clients ask first whether it serves.
                self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                self.transport.close()
                return
            rest = end + 4 + int(length[1])
            if len(self.buffer) >= rest:
                ids = loads(self.buffer[end + 4 : rest])["ids"][0]
                self.buffer = self.buffer[rest:]
                waiting.add(ids, self)

        def answer(self, row):
            if not self.transport.is_closing():
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: %d\r\n\r\n" % len(row)
                self.transport.write(head + row)

    async def run():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=4096)
        listening(loop, server.sockets[0].getsockname()[1])
        await server.serve_forever()

    loop = loops.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(run())


def serve(folder, how):
    """The model in the main thread, as what `torch.compile` keeps is a thread's; HTTP in a second, ends of batches in a third."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"  # The processor for a try without a GPU.
    with torch.inference_mode():
        model = Model(folder, how, device)
        waiting, loop = Waiting(), queue.Queue()
        threading.Thread(target=listen, args=(waiting, lambda *at: loop.put(at)), daemon=True).start()
        loop, port = loop.get()
        free, started = queue.Queue(), queue.Queue()
        for _ in range(LANES):
            free.put(Lane(model))

        def deliver(batch, rows):
            for (_, connection), row in zip(batch, rows):
                connection.answer(row)

        def finish():
            while True:
                lane, batch = started.get()
                rows = lane.rows(len(batch))
                free.put(lane)
                loop.call_soon_threadsafe(deliver, batch, rows)

        threading.Thread(target=finish, daemon=True).start()
        # The default lets a thread wait for 5 ms behind another that computes.
        sys.setswitchinterval(0.0005)
        gc.collect()
        gc.freeze()
        print(f"listening on http://127.0.0.1:{port}", flush=True)
        while True:
            lane = free.get()
            batch = waiting.take()
            lane.start([ids for ids, _ in batch])
            started.put((lane, batch))


class Model:
    """`ids` and `lengths` are where a batch's are on the device, `out` is where its embeddings are to be."""

    def __init__(self, folder, how, device):
        import torch
        from transformers import BertModel

        try:
            model = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float16)
        except TypeError:
            model = BertModel.from_pretrained(folder, add_pooling_layer=False, torch_dtype=torch.float16)
        model = model.eval().to(device)
        self.device, self.hidden, self.is_captured = device, model.config.hidden_size, how == "captured"
        self.ids = torch.zeros(MAX_TEXTS * 512, dtype=torch.int64, device=device)
        self.lengths = torch.ones(MAX_TEXTS, dtype=torch.int64, device=device)
        self.out = torch.zeros(MAX_TEXTS, self.hidden, dtype=torch.float32, device=device)

        def forward(ids, lengths):
            mask = torch.arange(ids.shape[1], device=ids.device)[None, :] < lengths[:, None]
            state = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
            mean = (state * mask[:, :, None]).sum(1) / lengths[:, None]
            return torch.nn.functional.normalize(mean, dim=1)

        start = time.perf_counter()
        self.forward = forward if how == "eager" else torch.compile(forward, dynamic=True)
        # So that no request compiles: shapes of one row or of few are other ones to `torch.compile`.
        for texts, tokens in ((64, 512), (1, 64), (2, 8), (1, 8), (1, 512), (7, 40)):
            for _ in range(2):
                self.call(texts, tokens)
        self.graphs = {}
        if self.is_captured:
            pool = torch.cuda.graph_pool_handle()
            for texts in (64, 32, 16, 8):
                for tokens in range(512, 0, -64):
                    for _ in range(2):
                        self.call(texts, tokens)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        self.call(texts, tokens)
                    self.graphs[texts, tokens] = graph
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"{how}: ready in {time.perf_counter() - start:.1f} s", flush=True)

    def shape(self, texts, tokens):
        """Of the batch that is computed for so many texts, of which the longest has so many tokens."""
        if self.is_captured:
            return max(8, 1 << (texts - 1).bit_length()), -(-tokens // 64) * 64
        return texts, -(-tokens // 8) * 8

    def call(self, texts, tokens):
        self.out[:texts].copy_(self.forward(self.ids[: texts * tokens].view(texts, tokens), self.lengths[:texts]))

    def run(self, texts, tokens):
        graph = self.graphs.get((texts, tokens))
        graph.replay() if graph else self.call(texts, tokens)


class Lane:
    """Pinned memory of one batch at a time."""

    def __init__(self, model):
        import torch

        self.model, self.is_cuda = model, model.device == "cuda"
        new = lambda *shape, dtype: torch.zeros(*shape, dtype=dtype, pin_memory=self.is_cuda)
        self.ids = new(MAX_TEXTS * 512, dtype=torch.int64)
        self.lengths = new(MAX_TEXTS, dtype=torch.int64)
        self.out = new(MAX_TEXTS, model.hidden, dtype=torch.float32)
        # The same memory.
        self.ids_here, self.lengths_here, self.out_here = self.ids.numpy(), self.lengths.numpy(), self.out.numpy()
        self.done = torch.cuda.Event() if self.is_cuda else None

    def start(self, texts):
        model = self.model
        rows, width = model.shape(len(texts), max(map(len, texts)))
        ids, lengths = self.ids_here[: rows * width].reshape(rows, width), self.lengths_here
        ids[:] = 0
        lengths[:] = 1
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
            lengths[row] = len(text)
        model.ids[: rows * width].copy_(self.ids[: rows * width], non_blocking=True)
        model.lengths[:rows].copy_(self.lengths[:rows], non_blocking=True)
        model.run(rows, width)
        self.out[:rows].copy_(model.out[:rows], non_blocking=True)
        if self.is_cuda:
            self.done.record()

    def rows(self, count):
        """The bytes of each embedding, when they are there."""
        if self.is_cuda:
            self.done.synchronize()
        return [row.tobytes() for row in self.out_here[:count]]


if __name__ == "__main__":
    main()
