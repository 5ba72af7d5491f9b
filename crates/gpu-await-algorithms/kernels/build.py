#!/usr/bin/env python3
"""Rebuilds images.bin and manifest.rs, the kernels of gpu-await-algorithms, from the sources beside it.

    python3 crates/gpu-await-algorithms/kernels/build.py            build all, write what changed
    python3 crates/gpu-await-algorithms/kernels/build.py --check    write nothing; exit 1 unless a fresh build gives the committed files
    python3 crates/gpu-await-algorithms/kernels/build.py reduce_f32 build this one only, and say its sizes

Needs Linux on x86-64, Python 3.9 and pip; no CUDA toolkit and no GPU. What it installs, once, into target/algorithms, is
REQUIREMENTS, each in one version: the same sources give the same bytes everywhere. Takes some minutes.

CUB comes from the wheel `cuda-cccl`; LICENSE-CUB is about what of it is in the images. An image is made twice: as PTX for compute capability 8.0, tuned for that, which the driver compiles for
whatever GPU there is, and as machine code for 9.0, tuned for that. What a launch has to know of a kernel's tuning comes out
of the same PTX (`FACT` in types.cuh), so that no figures meet kernels of another build.

Exit status: 0 done (or nothing differs), 1 something does not compile or --check found differences, 2 a tool could not
be had.
"""

import argparse
import ctypes
import hashlib
import multiprocessing
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TOOLS = HERE.parent.parent.parent / "target" / "algorithms"
REQUIREMENTS = ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-nvcc-cu12==12.9.86", "cuda-cccl==1.2.1", "zstandard==0.23.0"]
# NVRTC writes its own; drivers from 525 on take this one, and ptxas says whether the code is within it.
PTX_ISA = "8.0"
LEVEL = 22

ELEMENTS = ["u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"]
WORDS = ["u8", "u16", "u32", "u64"]
FLOATS = ["f16", "bf16", "f32", "f64"]


def images():
    """Name, source and definitions of every image."""
    # Of floats scans have kernels that add in one order as well.
    rounded = {element: {"ROUNDED": ""} for element in FLOATS}
    for family in ("reduce", "scan", "select", "segmented"):
        for element in ELEMENTS:
            given = rounded.get(element, {}) if family == "scan" else {}
            yield f"{family}_{element}", family, {"ELEMENT": element, **given}
    # Of integers by width: the bits of a product do not depend on signs.
    for element in WORDS + FLOATS:
        bits = {"BITS": ""} if element in WORDS else {}
        for family in ("reduce", "scan", "segmented"):
            given = rounded.get(element, {}) if family == "scan" else {}
            yield f"{family}_combined_{element}", family, {"ELEMENT": element, "COMBINED": "", **bits, **given}
    for element in FLOATS[:3]:
        yield f"rows_{element}", "rows", {"ELEMENT": element}
    for word in WORDS:
        places = {"PLACES": ""} if word == "u8" else {}
        yield f"select_flagged_{word}", "select", {"ELEMENT": word, "FLAGS": "", **places}
    for element in WORDS + FLOATS:
        for family in ("runs", "histogram"):
            yield f"{family}_{element}", family, {"ELEMENT": element}
    for word in WORDS:
        radix = {} if word == "u64" else {"RADIX": ""}
        yield f"top_k_{word}", "top_k", {"ELEMENT": word, **radix}
    for word in WORDS:
        for value in ("", "u32", "u64"):
            name = "_".join(part for part in ("segmented_sort", word, value) if part)
            yield name, "segmented_sort", {"KEY": word, **({"VALUE": value} if value else {})}
    for word in WORDS:
        for value in ("", "u32", "u64"):
            for wide in ("", "wide"):
                name = "_".join(part for part in ("sort", word, value, wide) if part)
                given = {"KEY": word, **({"VALUE": value} if value else {}), **({"WIDE": ""} if wide else {})}
                yield name, "sort", given


class ToolError(Exception):
    """A tool is missing, or is not the one that is asked for."""


class KernelError(Exception):
    """An image does not compile, or compiles to something that must not be committed."""


def main():
    parser = argparse.ArgumentParser(description="Rebuilds the kernels of gpu-await-algorithms.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a committed file is stale")
    parser.add_argument("--afresh", action="store_true", help="compile also what did not change since the last time: say it when this program changed")
    parser.add_argument("only", nargs="*", help="images to build and say the sizes of; nothing is written")
    arguments = parser.parse_args()
    install()
    (TOOLS / "work").mkdir(exist_ok=True)
    if arguments.afresh or arguments.check:
        shutil.rmtree(TOOLS / "work")
        (TOOLS / "work").mkdir()

    wanted = [image for image in images() if not arguments.only or image[0] in arguments.only]
    built = []
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for number, (name, codes) in enumerate(pool.imap(build, wanted), 1):
            sizes = ", ".join(f"{which} {len(code)} -> {len(packed)}" for which, (code, packed, _) in codes.items())
            print(f"[{number:>2}/{len(wanted)}] {name}: {sizes}", flush=True)
            built.append((name, codes))
    if arguments.only:
        return 0

    archive, manifest = assemble(built)
    stale = False
    for name, fresh in (("images.bin", archive), ("manifest.rs", manifest)):
        path = HERE / name
        if path.exists() and path.read_bytes() == fresh:
            print(f"{name}: unchanged ({len(fresh)} bytes)")
        elif arguments.check:
            stale = True
            print(f"{name}: STALE, a fresh build differs")
        else:
            partial = path.with_name(path.name + ".partial")
            partial.write_bytes(fresh)
            os.replace(partial, path)
            print(f"{name}: written ({len(fresh)} bytes)")
    return 1 if stale else 0


def assemble(built):
    """The archive, and the Rust source that says what is where in it."""
    archive = bytearray()
    lines = [
        "// Made by `kernels/build.py` from the sources beside it; not to be edited.",
        f"// sources-sha256: {sources_hash()}",
        "&[",
    ]
    for name, codes in built:
        lines.append(f'    PackedImage {{ name: "{name}",')
        for which, (code, packed, facts) in codes.items():
            start = len(archive)
            archive += packed
            told = ", ".join(f'("{fact}", {value})' for fact, value in sorted(facts.items()))
            lines.append(f"        {which}: PackedCode {{ packed: {start}..{len(archive)}, bytes: {len(code)}, facts: &[{told}] }},")
        lines.append("    },")
    lines.append("]")
    return bytes(archive), ("\n".join(lines) + "\n").encode("ascii")


def sources_hash():
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.cu"), *HERE.glob("*.cuh"), HERE / "build.py"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(image):
    """The name of an image, and its codes: each the bytes, these packed, and its facts."""
    import zstandard

    name, source, definitions = image
    kept = TOOLS / "work" / f"{name}.{image_hash(source, definitions)}.kept"
    if kept.exists():
        return name, pickle.loads(kept.read_bytes())
    nvrtc = Nvrtc.load()
    pack = zstandard.ZstdCompressor(level=LEVEL).compress
    codes = {}
    for which, capability in (("general", 80), ("hopper", 90)):
        options = [
            f"--gpu-architecture=compute_{capability}", "--std=c++17", "-default-device", f"-I{HERE}",
            f"-I{TOOLS / 'cuda' / 'cccl' / 'headers' / 'include'}",
            f"-DCAPABILITY={capability // 10},{capability % 10}",
            *(f"-D{macro}={value}" if value else f"-D{macro}" for macro, value in definitions.items()),
        ]
        ptx, facts = tidied(nvrtc.compile(f"{source}.cu", (HERE / f"{source}.cu").read_bytes(), options))
        if which == "hopper":
            check_waits(name, ptx)
        cubin = assembled(name, ptx, f"sm_{capability}")
        code = ptx.encode("ascii") if which == "general" else cubin
        codes[which] = (code, pack(code), facts)
    for old in kept.parent.glob(f"{name}.*.kept"):
        old.unlink()
    kept.write_bytes(pickle.dumps(codes))
    return name, codes


def image_hash(source, definitions):
    """Of what an image is made from, but for this program."""
    digest = hashlib.sha256(repr((definitions, REQUIREMENTS, PTX_ISA, LEVEL)).encode())
    paths = [HERE / f"{source}.cu"]
    for path in paths:
        text = path.read_bytes()
        digest.update(text)
        included = (HERE / name.decode() for name in re.findall(rb'#include "([^"]+)"', text))
        paths += (path for path in included if path not in paths)
    return digest.hexdigest()[:16]


# A variable outside of functions. The headers have hundreds of constants that no kernel uses.
VARIABLE = re.compile(r"^(?:\.(?:visible|weak|extern) )?\.(?:global|const) .*?([\w$]+)(?:\[\d*\])?(?: = [^;]*)?;")


def tidied(ptx):
    """The PTX without comments and what nothing uses, and the facts that it told."""
    facts = {name: int(value) for name, value in re.findall(r"// fact (\w+) (\d+);", ptx)}
    lines = [line for line in ptx.rstrip("\0").split("\n") if line.strip() and not line.lstrip().startswith("//")]
    # A hint that PTX_ISA does not know.
    lines = [line for line in lines if not line.lstrip().startswith('.pragma "used_bytes_mask')]
    used = {word for line in lines if not VARIABLE.match(line) for word in re.findall(r"[\w$]+", line)}
    kept = [line for line in lines if not (found := VARIABLE.match(line)) or found.group(1) in used]
    kept = [f".version {PTX_ISA}" if line.startswith(".version") else line for line in kept]
    text = "\n".join(kept) + "\n"
    # The kernels that only told facts.
    return re.sub(r"\.visible \.entry \w+_facts\(\)\n\{.*?\n\}\n", "", text, flags=re.DOTALL), facts


# What must not be in front of a kernel's wait: a use of memory, or a way around it.
TOO_EARLY = re.compile(r"\b(?:ld|st)\.(?!param)|\b(?:atom|red|bra|ret|call|exit|cp|griddepcontrol\.launch_dependents)\b")


def check_waits(name, ptx):
    """Every kernel waits for what is before it in its stream, first of all: it is launched while that ends (code.rs)."""
    for entry, body in re.findall(r"\.entry (\w+)\(.*?\n\{(.*?)\n\}\n", ptx, flags=re.DOTALL):
        before, wait, _ = body.partition("griddepcontrol.wait;")
        if not wait or TOO_EARLY.search(before):
            raise KernelError(f"{name}: {entry} does not wait first: its first statement must be begin()")


def assembled(name, ptx, architecture):
    folder = TOOLS / "work"
    source, target = folder / f"{name}.{architecture}.ptx", folder / f"{name}.{architecture}.cubin"
    source.write_text(ptx)
    ptxas = TOOLS / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    command = [str(ptxas), f"-arch={architecture}", "-O3", "-warn-spills", str(source), "-o", str(target)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise KernelError(f"{name}: ptxas says\n{result.stdout}")
    if result.stdout.strip():
        print(f"{name}, {architecture}: {result.stdout.strip()}", file=sys.stderr)
    return target.read_bytes()


class Nvrtc:
    """The few entry points of libnvrtc that this needs, through ctypes."""

    def __init__(self, lib):
        self.lib = lib
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    @classmethod
    def load(cls):
        folder = TOOLS / "nvidia" / "cuda_nvrtc" / "lib"
        # libnvrtc opens its builtins by bare name at the first compile.
        for builtins in folder.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        return cls(ctypes.CDLL(str(folder / "libnvrtc.so.12")))

    def call(self, function, *arguments):
        status = getattr(self.lib, function)(*arguments)
        if status != 0:
            raise ToolError(f"{function}: {self.lib.nvrtcGetErrorString(status).decode()} ({status})")

    def text(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw[: size.value].rstrip(b"\0").decode("utf-8", "replace")

    def compile(self, name, source, options):
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), 0, None, None)
        try:
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self.lib.nvrtcCompileProgram(program, len(options), array) != 0:
                raise KernelError(f"{name} {' '.join(options)}:\n{self.text(program, 'ProgramLog').strip()}")
            return self.text(program, "PTX")
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))


def install():
    if not sys.platform.startswith("linux"):
        raise ToolError(f"this runs on Linux (the platform here is {sys.platform})")
    stamp = TOOLS / "installed.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(REQUIREMENTS):
        print(f"installing {', '.join(REQUIREMENTS)} into {TOOLS}", flush=True)
        # Into a folder beside it and then renamed, so that an interrupted install is never taken for a whole one.
        partial = TOOLS.with_name(TOOLS.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--target", str(partial), *REQUIREMENTS]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            raise ToolError(f"pip could not install them (status {result.returncode}):\n{result.stdout.strip()}")
        (partial / "nvidia" / "cuda_nvcc" / "bin" / "ptxas").chmod(0o755)
        (partial / stamp.name).write_text("\n".join(REQUIREMENTS))
        shutil.rmtree(TOOLS, ignore_errors=True)
        os.replace(partial, TOOLS)
    sys.path.insert(0, str(TOOLS))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KernelError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
