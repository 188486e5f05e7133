#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Says which CUDA sources of a build the target cuda_programs has left out: a program that is not in it would be compiled by nobody
until there is a GPU.

  tests/cuda/gpu/all_compiled.py build/ptx
"""
import json
import pathlib
import shlex
import sys


def objects(build):
    """What nvcc makes in a build."""
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        command = shlex.split(entry["command"])
        if any(pathlib.Path(word).name == "nvcc" for word in command):
            yield pathlib.Path(entry["directory"]) / command[command.index("-o") + 1]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    made = list(objects(pathlib.Path(sys.argv[1])))
    missing = [str(path) for path in made if not path.is_file()]
    if missing or not made:
        sys.exit("all_compiled.py: not of cuda_programs (add_dependencies): " + (", ".join(missing) or "anything"))
    print(f"{len(made)} CUDA sources are compiled")


if __name__ == "__main__":
    main()
