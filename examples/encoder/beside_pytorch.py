#!/usr/bin/env python3
"""The encoder beside `transformers`, on the same weights and the same ids. Needs a GPU, PyTorch and transformers; no network, no Rust.

    python3 beside_pytorch.py --encoder ./encoder [--work DIR] [--texts 1000] [--layer-texts 200] [--rounds 300]

Makes a MiniLM-L6-shaped and a BERT-base-shaped model with random weights, writes both as f32 and f16, and prints `name value unit` lines:

    difference.*     largest difference from `transformers` on the same device, in f32 without TF32, of hidden states (of all layers) and
                     of embeddings; for f16 also that of PyTorch's own f16 model; for f32 also those of both from the model in f64
    spread.*         how much the embeddings of different texts differ: the mean over pairs of their largest difference
    p50.*            one batch of 1 x 128 in f16, awaited: ids on the host to embeddings on the host
    tokens.*         tokens per second, batches of 32 x 128 in f16, one after the other
    first.*          start of the program to the first answer, with the file in the page cache: of Python, after its imports
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

MODELS = {
    "minilm": dict(num_hidden_layers=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536),
    "base": dict(num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=3072),
}
VOCABULARY = 30522


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--encoder", default="./encoder")
    parser.add_argument("--work", default="/tmp/encoder-beside-pytorch")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--layer-texts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--models", default="minilm,base")
    parser.add_argument("--skip", default="", help="of differences,speed,first")
    parser.add_argument("--first-answer-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_answer_of:
        return first_answer(options.first_answer_of)

    import torch

    print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    work = pathlib.Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    skip = options.skip.split(",")
    for name in options.models.split(","):
        folders = make(name, work)
        if "differences" not in skip:
            differences(name, folders, work, options)
        if "speed" not in skip:
            speed(name, folders, options)
        if "first" not in skip:
            first(name, folders, work, options)


def make(name, work):
    """Writes the model in both precisions; returns their folders."""
    import torch
    from transformers import BertConfig, BertModel

    folders = {dtype: work / f"{name}-{dtype}" for dtype in ("f32", "f16")}
    torch.manual_seed(7)
    model = BertModel(BertConfig(vocab_size=VOCABULARY, **MODELS[name]), add_pooling_layer=False).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # As initialised, all texts get nearly the same embedding.
            if "LayerNorm.weight" in key:
                parameter.uniform_(0.5, 1.5)
            elif "bias" in key:
                parameter.normal_(0, 0.1)
            elif "embeddings" in key:
                parameter.normal_(0, 1)
            else:
                parameter.normal_(0, 1.0 / parameter.shape[1] ** 0.5)
            # Exact in either precision, so that both models are the same.
            parameter.copy_(parameter.half().float())
    for dtype, folder in folders.items():
        (model if dtype == "f32" else model.half()).save_pretrained(folder, safe_serialization=True)
    return folders


def texts_of(count, seed=11):
    ids = random.Random(seed)
    # All lengths, the extremes among them.
    lengths = [1, 512] + [ids.randint(1, 512) for _ in range(max(0, count - 2))]
    return [[ids.randrange(VOCABULARY) for _ in range(length)] for length in lengths[:count]]


def load(folder, dtype):
    import torch
    from transformers import BertModel

    kind = torch.float16 if dtype == "f16" else torch.float32
    try:
        model = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=kind)
    except TypeError:
        model = BertModel.from_pretrained(folder, add_pooling_layer=False, torch_dtype=kind)
    return model.eval().cuda()


def pooled(state, mask):
    import torch

    weights = mask.unsqueeze(-1).float()
    mean = (state.float() * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def differences(name, folders, work, options):
    import numpy
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    texts, hidden, layers = texts_of(options.texts), MODELS[name]["hidden_size"], MODELS[name]["num_hidden_layers"] + 1
    some = texts[: options.layer_texts]
    reference, own, exact = load(folders["f32"], "f32"), load(folders["f16"], "f16"), load(folders["f32"], "f32").double()

    def states(model, ids):
        with torch.no_grad():
            batch = torch.tensor([ids], device="cuda")
            return [state[0] for state in model(input_ids=batch, output_hidden_states=True).hidden_states]

    def embedding(state):
        return torch.nn.functional.normalize(state.mean(0), dim=0)

    (work / "texts.json").write_text(json.dumps(texts))
    (work / "some.json").write_text(json.dumps(some))
    expected = torch.stack([embedding(states(reference, ids)[-1]) for ids in texts])
    at = torch.randint(0, len(texts), (2, 2000), device="cuda")
    at = at[:, at[0] != at[1]]
    print(f"spread.{name} {(expected[at[0]] - expected[at[1]]).abs().amax(1).mean():.3f} difference")
    for dtype in ("f32", "f16"):
        command = ["embed", "--model", folders[dtype], "--dtype", dtype]
        run(options, *command, "--ids", work / "texts.json", "--out", work / "rows.bin")
        rows = torch.from_numpy(numpy.fromfile(work / "rows.bin", dtype=numpy.float32).reshape(len(texts), hidden)).cuda()
        print(f"difference.{name}.{dtype}.embeddings {worst(rows, expected):.2e} difference", flush=True)
        run(options, *command, "--ids", work / "some.json", "--out", work / "some.bin", "--layers", work / "layers.bin")
        file = numpy.memmap(work / "layers.bin", dtype=numpy.float32, mode="r")
        first, each, ours, from_exact = 0, [0.0] * layers, 0.0, [0.0, 0.0]
        for ids in some:
            part = torch.from_numpy(numpy.array(file[first : first + layers * len(ids) * hidden])).cuda()
            first += layers * len(ids) * hidden
            wanted = states(reference, ids)
            part = part.reshape(layers, len(ids), hidden)
            for layer, state in enumerate(part):
                each[layer] = max(each[layer], worst(state, wanted[layer]))
            if dtype == "f16":
                ours = max([ours] + [worst(a, b) for a, b in zip(states(own, ids), wanted)])
            else:
                for who, found in enumerate((part, wanted)):
                    from_exact[who] = max([from_exact[who]] + [worst(a, b) for a, b in zip(found, states(exact, ids))])
        assert first == len(file), "the file of hidden states has another length"
        print(f"# {name} {dtype}, a layer each: " + " ".join(f"{x:.1e}" for x in each))
        print(f"difference.{name}.{dtype}.states {max(each):.2e} difference", flush=True)
        if dtype == "f16":
            print(f"difference.{name}.f16.states_of_pytorch {ours:.2e} difference", flush=True)
        else:
            for who, found in zip(("encoder", "pytorch"), from_exact):
                print(f"difference.{name}.f32.states_from_f64.{who} {found:.2e} difference", flush=True)


def worst(a, b):
    difference = (a - b).abs().max().item()
    return difference if difference == difference else float("inf")


def speed(name, folders, options):
    import torch

    for batch, tokens in ((1, 128), (32, 128)):
        shape = f"{name}.{batch}x{tokens}"
        rounds = options.rounds if batch == 1 else max(20, options.rounds // 5)
        ids = torch.randint(0, VOCABULARY, (batch, tokens)).pin_memory()
        for how in ("eager", "compiled"):
            model = load(folders["f16"], "f16")

            def forward(ids, model=model):
                state = model(input_ids=ids).last_hidden_state
                return torch.nn.functional.normalize(state.float().mean(1), dim=1)

            call = torch.compile(forward, mode="reduce-overhead") if how == "compiled" else forward
            times = []
            with torch.inference_mode():
                for round in range(rounds + 20):
                    start = time.perf_counter()
                    call(ids.to("cuda", non_blocking=True)).cpu()
                    times.append(time.perf_counter() - start)
            report(f"pytorch_{how}", shape, batch * tokens, statistics.median(times[20:]))
            del model, call
            torch.cuda.empty_cache()
        output = run(options, "bench", "--model", folders["f16"], "--dtype", "f16", "--batch", batch, "--tokens", tokens, "--rounds", rounds)
        figures = dict(line.split()[:2] for line in output.splitlines() if len(line.split()) == 3)
        report("encoder", shape, batch * tokens, float(figures["p50"]) / 1e6)
        print(f"tokens.{shape}.encoder_two_lanes {float(figures['two_lanes']):.0f} tokens/s", flush=True)


def report(who, shape, tokens, seconds):
    print(f"p50.{shape}.{who} {seconds * 1e6:.1f} us")
    print(f"tokens.{shape}.{who} {tokens / seconds:.0f} tokens/s", flush=True)


def first(name, folders, work, options):
    ids = texts_of(1, seed=3)
    (work / "one.json").write_text(json.dumps(ids))
    for dtype in ("f32", "f16"):
        size = (folders[dtype] / "model.safetensors").stat().st_size
        print(f"file.{name}.{dtype} {size / 1e6:.0f} MB")
        ours, theirs = [], []
        for _ in range(3):
            (folders[dtype] / "model.safetensors").read_bytes()
            command = ["embed", "--model", folders[dtype], "--dtype", dtype, "--ids", work / "one.json", "--out", work / "one.bin"]
            ours.append(float(run(options, *command).split()[1]))
            script = [sys.executable, __file__, "--first-answer-of", f"{folders[dtype]}:{dtype}"]
            theirs.append(float(subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]))
        print(f"first.{name}.{dtype}.encoder {statistics.median(ours):.1f} ms")
        print(f"first.{name}.{dtype}.pytorch {statistics.median(theirs):.1f} ms", flush=True)


def first_answer(what):
    """The time after imports, in a process of its own."""
    folder, dtype = what.rsplit(":", 1)
    import torch
    import transformers  # noqa: F401
    from transformers import BertModel  # noqa: F401

    start = time.perf_counter()
    model = load(folder, dtype)
    with torch.inference_mode():
        ids = torch.tensor(texts_of(1, seed=3), device="cuda")
        state = model(input_ids=ids).last_hidden_state
        pooled(state, torch.ones_like(ids)).cpu()
    print((time.perf_counter() - start) * 1e3)


def environment():
    """This one's, with the cuBLASLt that PyTorch brought along, unless it names another."""
    environment = dict(os.environ)
    if "GPU_AWAIT_CUBLASLT" not in environment:
        spec = importlib.util.find_spec("torch")
        found = sorted(pathlib.Path(spec.origin).parent.parent.glob("nvidia/*/lib/libcublasLt.so.*")) if spec else []
        if found:
            environment["GPU_AWAIT_CUBLASLT"] = str(found[-1])
    return environment


def run(options, command, *arguments):
    line = [options.encoder, command, "--device", "cuda:0", *arguments]
    done = subprocess.run([str(part) for part in line], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, line))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
