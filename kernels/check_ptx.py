#!/usr/bin/env python3
"""Has NVIDIA's assembler read every kernel that gpu-await-algorithms generates.

    python3 kernels/check_ptx.py        all operations and types, for sm_60, sm_70, sm_80 and sm_90

Needs Linux, Python 3.8, pip and cargo; no GPU. `ptxas` comes from a Python wheel of about 30 MB that is installed once into
target/ptxas-12.8. For developers who changed crates/gpu-await-algorithms/src/elementwise/ptx: CI downloads nothing of that size, and runs the same test
without the assembler.

Exit status: that of the test; 2 if the assembler could not be had.
"""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "target" / "ptxas-12.8"
ASSEMBLER = FOLDER / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
REQUIREMENT = "nvidia-cuda-nvcc-cu12==12.8.*"


def main():
    if not ASSEMBLER.exists() and not install():
        return 2
    environment = dict(os.environ, GPU_AWAIT_PTXAS=str(ASSEMBLER))
    command = ["cargo", "test", "--package", "gpu-await-algorithms", "--lib", "every_kernel_assembles"]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def install():
    print(f"installing {REQUIREMENT} into {FOLDER}", flush=True)
    # Into a folder beside it and then renamed, so that an interrupted install is never taken for a whole one.
    partial = FOLDER.with_name(FOLDER.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run([*command, "--only-binary=:all:", "--target", str(partial), REQUIREMENT])
    if result.returncode != 0:
        print(f"error: pip could not install {REQUIREMENT}", file=sys.stderr)
        return False
    shutil.rmtree(FOLDER, ignore_errors=True)
    os.replace(partial, FOLDER)
    return ASSEMBLER.exists()


if __name__ == "__main__":
    sys.exit(main())
