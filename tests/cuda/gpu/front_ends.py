#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads every CUDA source of a build as nvcc's host front end does, under CUDA's own headers: what is ambiguous, not to be called
from a host, or not there shows within seconds a file, for no device code is made. (Whether the code that is made links, one
program compiled to its end shows.)

  tests/cuda/gpu/front_ends.py build/ptx                  all of them, two at a time
  tests/cuda/gpu/front_ends.py build/ptx --only bench     those with this in their path
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile


def commands(build):
    """(file, folder, nvcc's command) of each CUDA source, in the order of the build."""
    database = pathlib.Path(build) / "compile_commands.json"
    if not database.is_file():
        sys.exit(f"front_ends.py: there is no {database}; configure the build first (cmake --preset ptx)")
    for entry in json.loads(database.read_text(encoding="utf-8")):
        # What cmake/KvpolicyGpuKernels.cmake writes is one line, which some program compiles to its end.
        if pathlib.Path(entry["command"].split()[0]).name == "nvcc" and "/gpu_kernels/" not in entry["file"]:
            yield entry["file"], entry["directory"], entry["command"]


def front_end(file, folder, command):
    """The errors that the front end finds in the file, or nothing."""
    with tempfile.TemporaryDirectory() as kept:
        planned = subprocess.run(f"{command} --dryrun -keep -keep-dir {kept}", shell=True, cwd=folder, capture_output=True, text=True, check=False)
        # nvcc prints its steps: first the host's preprocessor and front end, then each device's.
        steps = []
        for step in (line[3:] for line in planned.stderr.splitlines() if line.startswith("#$ ")):
            if "-D__CUDA_ARCH__=" in step:
                break
            if "cudafe++" in step or " -E " in step:
                steps.append(step)
        if planned.returncode != 0 or len(steps) != 2:
            return planned.stderr or "nvcc --dryrun printed no step of the host"
        for step in steps:
            done = subprocess.run(step, shell=True, cwd=folder, capture_output=True, text=True, check=False,
                                  env={**os.environ, "PATH": f"{pathlib.Path(command.split()[0]).parent}:{os.environ['PATH']}"})
            if done.returncode != 0:
                return done.stdout + done.stderr
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", help="a configured build with CUDA programs")
    parser.add_argument("--only", default="", help="files with this in their path")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    options = parser.parse_args()
    chosen = [one for one in commands(options.build) if options.only in one[0]]
    if not chosen:
        sys.exit(f"front_ends.py: {options.build} has no CUDA source" + (f" with '{options.only}' in its path" if options.only else ""))
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
        for (file, _, _), errors in zip(chosen, threads.map(lambda one: front_end(*one), chosen)):
            print(f"{file}: {errors or 'passed'}", flush=True)
            failed += bool(errors)
    print(f"{len(chosen) - failed} front ends passed, {failed} failed")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
