#!/usr/bin/env python3
"""Rebuilds every .ptx of kernels/, of formulas in gpu-await-algorithms and of the examples server, encoder and decoder from the .cu beside it.

    python3 kernels/build.py            build every kernel, write the .ptx files that changed
    python3 kernels/build.py --check    write nothing; exit 1 unless every committed .ptx is what a
                                        fresh build gives and carries the hash of its source

Needs Linux, Python 3.8 and pip; no CUDA toolkit and no GPU. The compiler is NVRTC 12.0, from a Python
wheel that is installed once into target/nvrtc-12.0. 12.0 on purpose: it writes PTX ISA 8.0, which every
driver from 525 on loads, and the target compute_60 is compiled further by the driver for each GPU from
Pascal on; the few kernels in ARCHITECTURES need a newer one. The 12.0 series is closed, so the same sources give the same bytes everywhere.

Exit status: 0 done (or nothing differs), 1 a kernel does not compile or --check found differences,
2 the compiler could not be had.
"""

import argparse
import ctypes
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

KERNELS = pathlib.Path(__file__).resolve().parent
ROOT = KERNELS.parent
EXAMPLES = [ROOT / "examples" / name / "src" for name in ("server", "encoder", "decoder")]
FOLDERS = [KERNELS, ROOT / "crates" / "gpu-await-algorithms" / "src" / "elementwise", *EXAMPLES]
NVRTC_DIR = ROOT / "target" / "nvrtc-12.0"
REQUIREMENT = "nvidia-cuda-nvrtc-cu12==12.0.*"
MAX_PTX_ISA = (8, 0)
# --fmad=false: a fused multiply-add is in the PTX where the source says __fmaf_rn, and nowhere else
# (sums and products come out as add.rn and mul.rn, which the driver may not fuse either).
# --std=c++03: from C++11 on NVRTC puts 40 unused globals of its <nv/target> into every PTX.
OPTIONS = ["--std=c++03", "--fmad=false", "--ftz=false"]
ARCHITECTURE = "compute_60"
# What these use is not in older GPUs: there, loading them fails and nothing else does.
ARCHITECTURES = {"cluster_sum": "compute_90", "encoder": "compute_80", "decoder": "compute_80"}
# Loaded whenever a GPU is opened: as machine code too, so that nobody waits for the driver's compiler.
BINARIES = {name: ["sm_70", "sm_80", "sm_90"] for name in ("copy_pieces", "copy_rows", "fill_bytes")}
# Its kernels are launched while what is before them in their stream still ends.
WAITING = "sm_90"
# What must not be in front of a kernel's wait: a use of memory, or a way around it; as in crates/gpu-await-algorithms/kernels/build.py.
TOO_EARLY = re.compile(r"\b(?:ld|st)\.(?!param)|\b(?:atom|red|bra|ret|call|exit|cp|griddepcontrol\.launch_dependents)\b")
# Functions and no kernel: what the library puts into the text of kernels that it generates.
FUNCTIONS = {"math"}
# Several kernels, named for what they do and not for the file.
SEVERAL = {"encoder", "decoder"}


class ToolError(Exception):
    """The compiler is missing, or is not the one that is asked for."""


class KernelError(Exception):
    """One kernel does not compile, or compiles to something that must not be committed."""


def main():
    parser = argparse.ArgumentParser(description="Rebuilds .ptx files from the .cu beside them with NVRTC 12.0.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a committed .ptx is stale")
    check = parser.parse_args().check

    sources = []
    for folder in FOLDERS:
        found = sorted(folder.glob("*.cu"))
        if not found:
            raise ToolError(f"no .cu file in {folder}")
        sources += found
    nvrtc = Nvrtc.load()

    failed = False
    for index, path in enumerate(sources, 1):
        try:
            verdict, good = process(nvrtc, path, check)
        except KernelError as error:
            verdict, good = f"FAILED\n{error}", False
        failed |= not good
        print(f"[{index:>{len(str(len(sources)))}}/{len(sources)}] {path.stem}: {verdict}", flush=True)

    built = sorted(path for folder in FOLDERS for kind in ("*.ptx", "*.cubin") for path in folder.glob(kind))
    for orphan in built:
        source = orphan.with_name(orphan.name.split(".")[0] + ".cu")
        if not source.exists() or (orphan.suffix == ".cubin" and source.stem not in BINARIES):
            failed = True
            print(f"{orphan.name}: is not built from {source.name}; remove it or restore the source")
    if failed and check:
        print("the committed PTX is stale: run `python3 kernels/build.py` and commit the result", file=sys.stderr)
    return 1 if failed else 0


def process(nvrtc, source_path, check):
    """Builds one kernel; returns what to print and whether all is well."""
    source, (digest, headers) = source_path.read_bytes(), inputs_of(source_path)
    for architecture in BINARIES.get(source_path.stem, []):
        path = source_path.with_suffix(f".{architecture}.cubin")
        fresh = nvrtc.compile(source_path.name, source, [f"--gpu-architecture={architecture}", *OPTIONS], "CUBIN")
        if architecture == WAITING:
            options = [f"--gpu-architecture={architecture.replace('sm', 'compute')}", *OPTIONS]
            check_waits(source_path.stem, nvrtc.compile(source_path.name, source, options))
        if path.exists() and path.read_bytes() == fresh:
            continue
        if check:
            return f"STALE: {path.name} differs from a fresh build", False
        write(path, fresh)
    ptx_path = source_path.with_suffix(".ptx")
    old = ptx_path.read_bytes() if ptx_path.exists() else None
    fresh = build(nvrtc, source_path.stem, source, digest, headers)
    if old == fresh:
        return "unchanged", True
    if not check:
        write(ptx_path, fresh)
        return f"written ({len(fresh)} bytes)", True
    if old is None:
        return f"STALE: {ptx_path.name} is missing", False
    first_line = old.split(b"\n", 1)[0].decode("utf-8", "replace")
    if first_line != f"// source-sha256: {digest}":
        return f"STALE: its first line is `{first_line}`, but the source's hash is {digest}", False
    return "STALE: the source's hash is right, but a fresh build differs", False


def check_waits(name, ptx):
    """Every kernel waits first of all, and reads nothing as data that nobody writes meanwhile: what is in front of it may."""
    for entry, body in re.findall(r"\.entry (\w+)\(.*?\n\{(.*?)\n\}\n", ptx + "\n", flags=re.DOTALL):
        before, wait, _ = body.partition("griddepcontrol.wait;")
        if not wait or TOO_EARLY.search(before) or "ld.global.nc" in body:
            raise KernelError(f"{name}: {entry} does not wait first, or reads constants")


def write(path, contents):
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(contents)
    os.replace(partial, path)


def inputs_of(source_path):
    """The hash of a source and of what it includes, as gpu-await-build makes it; and the headers, by the names that they are included by."""
    files, every, headers = [source_path], "", {}
    for path in files:
        text = path.read_text()
        every += hashlib.sha256(text.encode()).hexdigest()
        for name in re.findall(r'^#include "(.+)"$', text, flags=re.MULTILINE):
            header = (path.parent / name).resolve()
            files += [] if header in files else [header]
            headers[name] = header.read_text()
            every += f"  {files.index(header)}"
        every += "\n"
    whole = source_path.read_text() if len(files) == 1 else every
    return hashlib.sha256(whole.encode()).hexdigest(), headers


def build(nvrtc, name, source, digest, headers):
    """Returns the bytes of the .ptx file."""
    options = [f"--gpu-architecture={ARCHITECTURES.get(name, ARCHITECTURE)}", *OPTIONS]
    if name in FUNCTIONS:
        options.append("--relocatable-device-code=true")
    ptx = nvrtc.compile(f"{name}.cu", source, options, headers=headers)

    version = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
    if not version or tuple(map(int, version.groups())) > MAX_PTX_ISA:
        found = version.group(0) if version else "no .version"
        raise KernelError(f"{name}.cu: {found} in the PTX; drivers from 525 on load at most 8.0")
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    expected = [] if name in FUNCTIONS else [name]
    if not entries if name in SEVERAL else entries != expected:
        raise KernelError(f"{name}.cu: its kernels are {entries}, and should be {expected}")
    release = re.search(r"^// Cuda compilation tools, release \S+, V(\S+)$", ptx, re.MULTILINE)
    if not release:
        raise KernelError(f"{name}.cu: the PTX does not name its compiler")

    # The form of gpu-await-build, which takes what this writes.
    body = "".join(line.rstrip() + "\n" for line in ptx.strip().splitlines())
    header = f"// source-sha256: {digest}\n// compiler: NVRTC {release.group(1)} {' '.join(options)}\n"
    header += f"// ptx-sha256: {hashlib.sha256(body.encode('ascii')).hexdigest()}\n"
    return (header + body).encode("ascii")


class Nvrtc:
    """The few entry points of libnvrtc that this needs, through ctypes."""

    def __init__(self, lib):
        self.lib = lib
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    @classmethod
    def load(cls):
        path = find_library() or install()
        try:
            # libnvrtc opens its builtins by bare name at the first compile; having them loaded makes
            # that work whatever its run path is.
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            nvrtc = cls(ctypes.CDLL(str(path)))
        except OSError as error:
            raise ToolError(f"cannot load {path}: {error}\nremove {NVRTC_DIR} to install it afresh")
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvrtc.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        if (major.value, minor.value) != (12, 0):
            raise ToolError(
                f"{path} is NVRTC {major.value}.{minor.value}, not 12.0\nremove {NVRTC_DIR} to install it afresh"
            )
        return nvrtc

    def call(self, function, *arguments):
        status = getattr(self.lib, function)(*arguments)
        if status != 0:
            raise ToolError(f"{function}: {self.lib.nvrtcGetErrorString(status).decode()} ({status})")

    def get(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw[: size.value]

    def text(self, program, what):
        return self.get(program, what).rstrip(b"\0").decode("utf-8", "replace")

    def compile(self, name, source, options, what="PTX", headers={}):
        program, names = ctypes.c_void_p(), ctypes.c_char_p * len(headers)
        texts = names(*(text.encode() for text in headers.values()))
        names = names(*(name.encode() for name in headers))
        self.call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), len(headers), texts, names)
        try:
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self.lib.nvrtcCompileProgram(program, len(options), array)
            log = self.text(program, "ProgramLog").strip()
            if status != 0:
                reason = self.lib.nvrtcGetErrorString(status).decode()
                raise KernelError(f"{name}: {reason} ({status}); the compiler's log:\n{log}")
            if log:
                print(log, file=sys.stderr)
            return self.text(program, what) if what == "PTX" else self.get(program, what)
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))


def find_library():
    path = NVRTC_DIR / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    return path if path.exists() else None


def install():
    if not sys.platform.startswith("linux"):
        raise ToolError(f"this runs on Linux (the platform here is {sys.platform})")
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
        raise ToolError(f"`{sys.executable} -m pip` does not work: install pip for this Python and run this again")

    print(f"installing {REQUIREMENT} into {NVRTC_DIR}", flush=True)
    # Into a folder beside it and then renamed, so that an interrupted install is never taken for a whole one.
    partial = NVRTC_DIR.with_name(NVRTC_DIR.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [*pip, "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--target", str(partial), REQUIREMENT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        raise ToolError(f"pip could not install {REQUIREMENT} (status {result.returncode}):\n{result.stdout.strip()}")
    shutil.rmtree(NVRTC_DIR, ignore_errors=True)
    os.replace(partial, NVRTC_DIR)
    path = find_library()
    if path is None:
        raise ToolError(f"{REQUIREMENT} holds no libnvrtc.so.12 where expected, under {NVRTC_DIR}")
    return path


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
