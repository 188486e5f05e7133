#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled with nvcc's --use_fast_math are refused by name, and those compiled without it are not, optimised or for a
debugger: with it codes would not have the bits that the host gives them (refuse_fast_math in kernels/simt.cuh).

  tests/cuda/gpu/fast_math.py nvcc
"""
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
SOURCE = """#include <kvpolicy/cuda/kernels/quantize_rows.cuh>

__global__ void kernel(float* x, std::uint32_t* out) { *out = kvpolicy::gpu::grid_covering(x[0], x[1], 15.0F); }
"""
NAME = "kvpolicy_is_not_to_be_compiled_with_use_fast_math"


def compiled(nvcc, folder, *flags):
    """nvcc's exit status and what it said."""
    source = pathlib.Path(folder) / "kernel.cu"
    source.write_text(SOURCE, encoding="utf-8")
    done = subprocess.run([nvcc, "-std=c++20", "-arch=sm_80", f"-I{ROOT / 'include'}", f"-I{ROOT / 'kernels'}", *flags, "-cubin", "-o",
                           f"{folder}/kernel.cubin", source], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for flags, refused in ((("-O3",), False), (("-G",), False), (("-O3", "--use_fast_math"), True), (("-O3", "-ftz=true"), True)):
            status, said = compiled(sys.argv[1], folder, *flags)
            if (status != 0) != refused or (refused and NAME not in said):
                print(f"nvcc {' '.join(flags)}: {'refused' if status else 'not refused'}\n{said}")
                wrong += 1
    print(f"{4 - wrong} ways to compile passed, {wrong} failed")
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()
