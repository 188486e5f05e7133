#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what dividing heads among ranks comes to, as `plan shards` counts it. Under DuoAttention patterns: the slowest
ranks of all layers as a multiple of the mean without messages. Under these, HeadKV's budgets and plans that a search
makes: the worst layer's slowest rank over that layer's mean.

  bench/shards/imbalance.py --tool build/release/examples/plan --patterns FOLDER --scores FOLDER > bench/results/shards.json
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPES = {"Llama-2-7B": "llama-2-7b", "Llama-3-8B": "llama-3-8b", "Mistral-7B": "mistral-7b"}
RANKS = [2, 4, 8]


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def shards(tool, shape, plan, context, ranks, *options):
    return run([tool, "shards", "--shape", shape, "--plan", plan, "--context", str(context), "--ranks", str(ranks), "--json", *options])


def layer_plans(arguments, folders, work):
    """[(what a reader calls it, shape, plan)] of the second table."""
    yield from ((f"DuoAttention, {folder.name}", shape, f"duo@{folder}:{arguments.sparsity}") for folder, shape in folders)
    for scores in sorted(arguments.scores.glob("Meta-Llama-3-8B-Instruct_*.json")):
        kind = scores.stem.removeprefix("Meta-Llama-3-8B-Instruct_").replace("_", " ")
        for capacity in (128, 1024):
            yield f"HeadKV, {kind}, {capacity:,} rows a head", "llama-3-8b", f"headkv@{scores}:{capacity}"
        for share in ("1/4", "1/16"):
            plan = work / f"{scores.stem}-{share.replace('/', '-')}.json"
            run([arguments.tool, "search", plan, "--shape", "llama-3-8b", "--scores", scores, "--bytes", share,
                 "--context", str(arguments.context), "--json"])
            yield f"searched, {kind}, {share} of the bytes", "llama-3-8b", str(plan)


def worst_layer(found):
    """The largest of all layers' slowest ranks over that layer's mean."""
    return max(layer["slowest"] / layer["mean"] for layer in found["layers"] if layer["mean"] > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, help="the program `plan`")
    parser.add_argument("--patterns", required=True, type=Path, help="a folder of published patterns")
    parser.add_argument("--scores", required=True, type=Path, help="a folder of published HeadKV scores")
    parser.add_argument("--sparsity", default="0.5")
    parser.add_argument("--context", type=int, default=131072, help="tokens")
    parser.add_argument("--message", default="10", help="microseconds of a part of a cut head")
    arguments = parser.parse_args()
    folders = []
    for folder in sorted(path for path in arguments.patterns.iterdir() if path.is_dir()):
        shape = next((shape for name, shape in SHAPES.items() if folder.name.startswith(name)), None)
        if shape is None:
            sys.exit(f"{folder.name}: its shape is not known here ({', '.join(SHAPES)})")
        folders.append((folder, shape))
    cases = []
    for folder, shape in folders:
        for ranks in RANKS:
            def divided(*options):
                return shards(arguments.tool, shape, f"duo@{folder}:{arguments.sparsity}", arguments.context, ranks, *options)
            free, dear, whole = divided("--message", "0"), divided("--message", arguments.message), divided("--whole")
            heads = max(head for layer in free["layers"] for head in layer["order"]) + 1
            times = {"even": free["even_seconds"], "whole": whole["step_seconds"], "cut": free["step_seconds"],
                     "cut_with_messages": dear["step_seconds"]}
            cases.append({"pattern": folder.name, "kv_heads": heads, "ranks": ranks, "cut_heads": free["cut_heads"],
                          "bandwidth": free["bandwidth"], "mean_seconds": free["ideal_seconds"],
                          "over_mean": {name: seconds / free["ideal_seconds"] for name, seconds in times.items()}})
    layers = []
    with tempfile.TemporaryDirectory() as work:
        for name, shape, plan in layer_plans(arguments, folders, Path(work)):
            print(name, file=sys.stderr)
            for ranks in RANKS:
                found = shards(arguments.tool, shape, plan, arguments.context, ranks, "--message", "0", "--cut-budgets")
                layers.append({"plan": name, "ranks": ranks, "cut_heads": found["cut_heads"], "worst_layer": worst_layer(found)})
    print(json.dumps({"sparsity": float(arguments.sparsity), "context": arguments.context,
                      "message_us": float(arguments.message), "cases": cases, "layers": layers}, indent=1))


if __name__ == "__main__":
    main()
