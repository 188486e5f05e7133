#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows how far methods of finding heads agree: Spearman's rank correlation of the KV heads, and the share of the
heads kept at a sparsity that two methods have in common.

  bench/head_agreement.py reference_model/weights/keyfinder/{duo,duo-profile,headkv/retrieval_heads.json} --kv-heads 4

A folder is a DuoAttention pattern, a file holds HeadKV scores of query heads, whose mean counts for a KV head.
"""
import argparse
import json
from pathlib import Path


def kv_scores(path, kv_heads):
    """One number for each KV head, layer after layer."""
    if path.is_dir():
        lines = (path / "full_attention_heads.tsv").read_text().splitlines()
        return [float(x) for line in lines if line.strip() and not line.startswith("#") for x in line.split()]
    heads = {tuple(map(int, key.split("-"))): sum(scores) / len(scores)
             for key, scores in json.loads(path.read_text()).items()}
    layers = max(layer for layer, _ in heads) + 1
    per_layer = max(head for _, head in heads) + 1
    if kv_heads is None or per_layer % kv_heads:
        raise SystemExit(f"{path}: {per_layer} query heads, --kv-heads must divide them")
    group = per_layer // kv_heads
    return [sum(heads[layer, head * group + i] for i in range(group)) / group
            for layer in range(layers) for head in range(kv_heads)]


def ranks(values):
    """Ranks from 1; equal values have the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    result = [0.0] * len(values)
    first = 0
    while first < len(order):
        end = first
        while end < len(order) and values[order[end]] == values[order[first]]:
            end += 1
        for i in order[first:end]:
            result[i] = (first + 1 + end) / 2
        first = end
    return result


def correlation(a, b):
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    spread = (sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)) ** 0.5
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b)) / spread if spread else float("nan")


def kept(values, sparsity):
    count = round((1 - sparsity) * len(values))  # halves to even, as in plan/duo_gates.hpp
    return set(sorted(range(len(values)), key=lambda i: (-values[i], i))[:count])


def agreement(names, found, sparsity):
    """{"names", "heads", "correlation", "common"}: for each pair the rank correlation, and the share of the kept heads in
    common."""
    keeping = [kept(values, sparsity) for values in found]
    return {"names": names, "heads": len(found[0]), "sparsity": sparsity, "kept": len(keeping[0]),
            "correlation": [[round(correlation(ranks(a), ranks(b)), 4) for b in found] for a in found],
            "common": [[round(len(a & b) / len(a), 4) for b in keeping] for a in keeping]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--kv-heads", type=int, help="of a layer; needed for files of scores")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    arguments = parser.parse_args()
    found = [kv_scores(path, arguments.kv_heads) for path in arguments.paths]
    if len({len(values) for values in found}) > 1:
        raise SystemExit("these are heads of different models: "
                         + ", ".join(f"{path} has {len(v)}" for path, v in zip(arguments.paths, found)))
    names = [path.stem if path.is_file() else path.name for path in arguments.paths]
    result = agreement(names, found, arguments.sparsity)
    if arguments.json:
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
        print("{\n" + ",\n".join(lines) + "\n}")
        return
    print(f"Rank correlation / share of the {result['kept']} kept KV heads in common\n")
    print("| |" + "|".join(names) + "|\n|---|" + "---:|" * len(names))
    for name, correlations, common in zip(names, result["correlation"], result["common"]):
        print(f"| {name} | " + " | ".join(f"{r:.2f} / {c:.0%}" for r, c in zip(correlations, common)) + " |")


if __name__ == "__main__":
    main()
