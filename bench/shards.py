#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what dividing heads among ranks comes to under DuoAttention patterns, as `plan shards` counts it: for each
pattern and number of ranks, the slowest ranks of all layers as a multiple of the mean without messages.

  bench/shards.py --tool build/release/examples/plan --patterns FOLDER > bench/results/shards.json
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

SHAPES = {"Llama-2-7B": "llama-2-7b", "Llama-3-8B": "llama-3-8b", "Mistral-7B": "mistral-7b"}
RANKS = [2, 4, 8]


def shards(tool, shape, plan, context, ranks, *options):
    command = [tool, "shards", "--shape", shape, "--plan", plan, "--context", str(context), "--ranks", str(ranks), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, help="the program `plan`")
    parser.add_argument("--patterns", required=True, type=Path, help="a folder of published patterns")
    parser.add_argument("--sparsity", default="0.5")
    parser.add_argument("--context", type=int, default=131072, help="tokens")
    parser.add_argument("--message", default="10", help="microseconds of a part of a cut head")
    arguments = parser.parse_args()
    cases = []
    for folder in sorted(path for path in arguments.patterns.iterdir() if path.is_dir()):
        shape = next((shape for name, shape in SHAPES.items() if folder.name.startswith(name)), None)
        if shape is None:
            sys.exit(f"{folder.name}: its shape is not known here ({', '.join(SHAPES)})")
        for ranks in RANKS:
            def run(*options):
                return shards(arguments.tool, shape, f"duo@{folder}:{arguments.sparsity}", arguments.context, ranks, *options)
            free, dear, whole = run("--message", "0"), run("--message", arguments.message), run("--whole")
            heads = max(head for layer in free["layers"] for head in layer["order"]) + 1
            times = {"even": free["even_seconds"], "whole": whole["step_seconds"], "cut": free["step_seconds"],
                     "cut_with_messages": dear["step_seconds"]}
            cases.append({"pattern": folder.name, "kv_heads": heads, "ranks": ranks, "cut_heads": free["cut_heads"],
                          "bandwidth": free["bandwidth"], "mean_seconds": free["ideal_seconds"],
                          "over_mean": {name: seconds / free["ideal_seconds"] for name, seconds in times.items()}})
    print(json.dumps({"sparsity": float(arguments.sparsity), "context": arguments.context,
                      "message_us": float(arguments.message), "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
