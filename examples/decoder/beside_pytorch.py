#!/usr/bin/env python3
"""The decoder beside `transformers`, on the same weights and the same ids. Needs a GPU, PyTorch and transformers; no network, no Rust.

    python3 beside_pytorch.py --decoder ./decoder [--work DIR] [--prompts 24] [--new 256] [--rounds 5] [--skip greedy,speed]

Makes a GPT-2-small-shaped model with random weights, writes it as f32 and f16, and prints `name value unit` lines:

    greedy.*        prompts whose most likely tokens are those of `transformers` in f32, without TF32, on the same device: of the decoder in f32, in f16,
                    and of PyTorch's own f16 model; where they first differ, by how much `transformers` preferred its own token, at most
    tokens.*        tokens a second of 1 and of 64 sequences at once, prompts of 128 tokens included; f16
    behind_first.*  the same behind the first token
    between.*       time between two tokens of a sequence, both on the host
    first_token.*   prompts on the host to first token on the host

PyTorch decodes with a static cache, one call of `torch.compile(mode="reduce-overhead")` a step, and reads tokens one step behind (`compiled`), or waits for each
(`compiled_awaited`); `eager` if it cannot compile.
"""

import argparse
import glob
import inspect
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

VOCABULARY = 50257
PROMPT = 128


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--decoder", default="./decoder")
    parser.add_argument("--work", default="/tmp/decoder-beside-pytorch")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", default="1,64")
    parser.add_argument("--skip", default="", help="of greedy,speed,pytorch")
    options = parser.parse_args()

    import torch
    import transformers

    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, transformers {transformers.__version__}")
    torch.backends.cuda.matmul.allow_tf32 = False
    work = pathlib.Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    folders, skip = make(work), options.skip.split(",")
    with torch.inference_mode():
        if "greedy" not in skip:
            greedy(folders, work, options)
        if "speed" not in skip:
            for streams in map(int, options.streams.split(",")):
                speed(streams, folders, options, "pytorch" not in skip)


def make(work):
    """Writes the model in both precisions; returns their folders."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folders = {dtype: work / f"gpt2-{dtype}" for dtype in ("f32", "f16")}
    torch.manual_seed(7)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".ln_" in key and "weight" in key:
                parameter.uniform_(0.5, 1.5)
            elif "bias" in key:
                parameter.normal_(0, 0.1)
            elif "wte" in key:
                # Small beside what layers add: as it is the output's weights too, each token would only repeat itself.
                parameter.normal_(0, 0.2)
            elif "wpe" in key:
                # As large as what layers add, of which much is alike for all tokens: without it one token would follow any text.
                parameter.normal_(0, 2.0)
            else:
                # Stored with a row for each input.
                parameter.normal_(0, 1.0 / parameter.shape[0] ** 0.5)
            # Exact in either precision, so that both models are the same.
            parameter.copy_(parameter.half().float())
    for dtype, folder in folders.items():
        (model if dtype == "f32" else model.half()).save_pretrained(folder, safe_serialization=True)
    return folders


def load(folder, dtype):
    import torch
    from transformers import GPT2LMHeadModel

    kind = torch.float16 if dtype == "f16" else torch.float32
    try:
        model = GPT2LMHeadModel.from_pretrained(folder, dtype=kind)
    except TypeError:
        model = GPT2LMHeadModel.from_pretrained(folder, torch_dtype=kind)
    return model.eval().cuda()


# ---- the same tokens ----------------------------------------------------------------------------


def greedy(folders, work, options):
    import torch

    ids, new = random.Random(11), 64
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 960][: options.prompts]
    lengths += [ids.randint(1, 900) for _ in range(options.prompts - len(lengths))]
    prompts = [[ids.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    (work / "prompts.json").write_text(json.dumps(prompts))

    def tokens_of(model):
        tokens, gaps = [], []
        for prompt in prompts:
            mine, gap, past, given = [], [], None, torch.tensor([prompt], device="cuda")
            for _ in range(new):
                out = model(input_ids=given, use_cache=True, **{cache_name(model): past})
                logits, past = out.logits[0, -1].float(), out[cache_name(model)]
                given = logits.argmax().view(1, 1)
                mine.append(given.item())
                gap.append(logits)
            tokens.append(mine)
            gaps.append(gap)
        return tokens, gaps

    expected, logits = tokens_of(load(folders["f32"], "f32"))
    distinct = statistics.mean(len(set(mine)) for mine in expected)
    print(f"greedy.distinct {distinct:.1f} tokens of {new}")

    def compare(name, found):
        assert [len(mine) for mine in found] == [new] * len(prompts), "another number of tokens"
        equal, alike, gap = 0, [], 0.0
        for mine, theirs, logits_of in zip(found, expected, logits):
            first = next((at for at in range(new) if mine[at] != theirs[at]), new)
            equal += first == new
            alike.append(first)
            if first < new:
                gap = max(gap, (logits_of[first][theirs[first]] - logits_of[first][mine[first]]).item())
        print(f"greedy.{name}.equal {equal} prompts of {len(prompts)}")
        print(f"greedy.{name}.alike {statistics.mean(alike):.1f} tokens of {new}")
        print(f"greedy.{name}.preferred_by {gap:.2e} logits", flush=True)

    for dtype in ("f32", "f16"):
        for streams in (1, 64):
            # One after the other, and all at once, which join as there is room.
            command = ["generate", "--model", folders[dtype], "--dtype", dtype, "--ids", work / "prompts.json", "--new", new, "--streams", streams]
            lines = run(options, *command).splitlines()
            compare(f"{dtype}.decoder_{streams}", [json.loads(line) for line in lines])
    compare("f16.pytorch", tokens_of(load(folders["f16"], "f16"))[0])


# ---- speed --------------------------------------------------------------------------------------


def speed(streams, folders, options, with_pytorch):
    if with_pytorch:
        model = load(folders["f16"], "f16")
        for how in ("compiled", "compiled_awaited", "eager"):
            try:
                measure_pytorch(model, streams, how, options)
            except Exception as error:  # whatever the versions make of it
                print(f"# PyTorch, {how}: {type(error).__name__}: {str(error).splitlines()[:1]}")
        del model
        import torch

        torch.cuda.empty_cache()
    for name, more in (("decoder", []), ("decoder_sampled", ["--temperature", 1, "--top-k", 50])):
        command = ["bench", "--model", folders["f16"], "--dtype", "f16", "--streams", streams, "--prompt", PROMPT, "--new", options.new]
        for line in run(options, *command, "--rounds", options.rounds, *more).splitlines():
            figure, value, unit = line.split()
            print(f"{figure}.{streams}.{name} {value} {unit}", flush=True)


def cache_name(model):
    """How this version of transformers calls it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def static_cache(model, streams, length):
    import torch
    from transformers import StaticCache

    tries = [
        dict(max_cache_len=length),
        dict(max_batch_size=streams, max_cache_len=length, device="cuda", dtype=torch.float16),
        dict(batch_size=streams, max_cache_len=length, device="cuda", dtype=torch.float16),
    ]
    for arguments in tries[:-1]:
        try:
            return StaticCache(config=model.config, **arguments)
        except TypeError:
            pass
    return StaticCache(config=model.config, **tries[-1])


def measure_pytorch(model, streams, how, options):
    import torch

    torch._dynamo.reset()
    new = options.new
    cache = static_cache(model, streams, PROMPT + new)
    knows = set(inspect.signature(model.forward).parameters)
    positions = torch.arange(PROMPT + new, device="cuda")
    same = {cache_name(model): cache, **({"logits_to_keep": 1} if "logits_to_keep" in knows else {})}

    def forward(ids, at):
        return model(input_ids=ids, use_cache=True, **same, **({"cache_position": at} if "cache_position" in knows else {})).logits[:, -1].argmax(-1, keepdim=True)

    step = forward if how == "eager" else torch.compile(forward, mode="reduce-overhead", dynamic=False)
    prompt = torch.randint(0, VOCABULARY, (streams, PROMPT)).pin_memory()
    landed = [torch.empty((streams, 1), dtype=torch.long).pin_memory() for _ in range(2)]
    events = [torch.cuda.Event(), torch.cuda.Event()]

    def round_of():
        """Times at which tokens are on the host."""
        cache.reset()
        torch.cuda.synchronize()
        times, start = [], time.perf_counter()
        tokens = forward(prompt.to("cuda", non_blocking=True), positions[:PROMPT])
        for number in range(new):
            half = number % 2
            landed[half].copy_(tokens, non_blocking=True)
            events[half].record()
            if number + 1 < new:
                if how == "compiled_awaited":
                    events[half].synchronize()
                    landed[half].tolist()
                    times.append(time.perf_counter() - start)
                at = positions[PROMPT + number : PROMPT + number + 1]
                if how != "eager":
                    torch.compiler.cudagraph_mark_step_begin()
                # What a graph returns is overwritten by its next launch.
                tokens = step(tokens, at).clone()
                if how != "compiled_awaited" and number > 0:
                    events[1 - half].synchronize()
                    landed[1 - half].tolist()
                    times.append(time.perf_counter() - start)
        behind = [(new - 1) % 2] if how == "compiled_awaited" else [new % 2, (new - 1) % 2]
        for half in behind:
            events[half].synchronize()
            landed[half].tolist()
            times.append(time.perf_counter() - start)
        assert len(times) == new, (len(times), new)
        return times

    for _ in range(3):
        round_of()
    rounds = [round_of() for _ in range(options.rounds)]
    name = f"{streams}.pytorch_{how}"
    gaps = sorted(b - a for times in rounds for a, b in zip(times, times[1:]))
    firsts = sorted(times[0] for times in rounds)
    print(f"tokens.{name} {statistics.median(streams * new / times[-1] for times in rounds):.0f} tokens/s")
    print(f"behind_first.{name} {statistics.median(streams * (new - 1) / (times[-1] - times[0]) for times in rounds):.0f} tokens/s")
    for figure, times in (("between", gaps), ("first_token", firsts)):
        for percent in (50, 99):
            print(f"{figure}.p{percent}.{name} {times[(len(times) - 1) * percent // 100] * 1e6:.1f} us", flush=True)


def run(options, command, *arguments):
    """Runs the program; its cuBLASLt is the one that PyTorch brought along, unless the environment names another."""
    environment = dict(os.environ)
    if "GPU_AWAIT_CUBLASLT" not in environment:
        import torch

        packages = pathlib.Path(torch.__file__).parent.parent
        found = sorted(glob.glob(str(packages / "nvidia" / "*" / "lib" / "libcublasLt.so.*")))
        if found:
            environment["GPU_AWAIT_CUBLASLT"] = found[-1]
    line = [options.decoder, command, "--device", "cuda:0", *arguments]
    done = subprocess.run([str(part) for part in line], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, line))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
