# SPDX-License-Identifier: Apache-2.0
"""Builds llama2.c's program, as it is and edited, and runs it: what the test and the benchmark share."""
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
INCLUDE = FOLDER.parents[2] / "include"


def adopt(source, out):
    """Writes the edited program and returns how many lines were changed."""
    done = subprocess.run([sys.executable, FOLDER / "adopt.py", source, "--out", out], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return int(re.search(r"(\d+) lines changed", done.stdout)[1])


def library_flags(library):
    """What links a program with the compiled library: a shared one brings its own libraries."""
    if library.suffix == ".a":
        return [library, "-lhwy", "-lstdc++", "-lgomp"]
    return [library, f"-Wl,-rpath,{library.parent}"]


def build(compiler, source, out, flags, library=None):
    more = [f"-I{INCLUDE}"] + library_flags(library) if library else []
    done = subprocess.run([*compiler, *flags, "-o", out, source, *more, "-lm"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{source} does not compile:\n{done.stderr}")
    return out


@dataclass
class Run:
    text: str
    complaint: str  # what it printed to stderr
    status: int
    cache_bytes: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0


def run(program, checkpoint, tokenizer, prompt, steps, *options):
    """The program's greedy answer."""
    done = subprocess.run([program, checkpoint, "-z", tokenizer, "-t", "0", "-n", str(steps), "-i", prompt,
                           *map(str, options)], capture_output=True)
    result = Run(done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"), done.returncode)
    if cache := re.search(r"KV cache: (\d+) bytes, (\d+) tokens", result.complaint):
        result.cache_bytes, result.tokens = int(cache[1]), int(cache[2])
    if speed := re.search(r"achieved tok/s: ([\d.]+)", result.complaint):
        result.tokens_per_second = float(speed[1])
    return result
