#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the CPU engine is to reach, and what a file of attention_cpu_bench's results says about it: the
worst case of each row, with all threads. Prints the table of docs/performance.md.

  bench/targets_cpu.py bench/results/cpu_amd_epyc_2core.json
"""
import argparse
import re

from results_cpu import facts, load, number

# (what, cases, counter, limit, a case is good if it is at least (+1) or at most (-1) the limit, unit)
TARGETS = [
    ("bf16 decode, 32/8 heads, 16 Ki to 64 Ki", r"decode/bf16/32x8/(16|64)Ki",
     "percent_of_ceiling", 80, 1, "% of the ceiling"),
    ("bf16 decode, 32/32 heads, 64 Ki", r"decode/bf16/32x32/64Ki", "percent_of_ceiling", 80, 1,
     "% of the ceiling"),
    ("int8 decode, 32/8 heads, 64 Ki, one group a row", r"decode/int8/32x8/64Ki", "speedup", 1.4, 1,
     "x our bf16"),
    ("int4 decode, the same", r"decode/int4/32x8/64Ki", "speedup", 1.8, 1, "x our bf16"),
    ("int2 decode, the same", r"decode/int2/32x8/64Ki", "speedup", 1.8, 1, "x our bf16"),
    ("KIVI layout, int4", r"decode/kivi4/32x8/64Ki", "over_int4", 1.2, -1, "x the time of int4"),
    ("duo, sparsity 0.5, 64 Ki", r"decode/duo/32x8/64Ki", "speedup", 1.9, 1, "x full"),
    ("HeadKV, 4,096 of 64 Ki rows on average", r"decode/headkv/32x8/64Ki", "speedup", 12, 1,
     "x full"),
    ("retrieval, 64 Ki, budget 4,096: score, select, attend", r"decode/retrieval/32x8/64Ki",
     "speedup", 5, 1, "x full"),
    ("the same over a standing selection", r"decode/standing/32x8/64Ki", "speedup", 12, 1, "x full"),
    ("streaming heads at position 1,000,000 against 1,000, best samples",
     r"decode/streaming/32x8/1000000", "best_over_1000", 1.1, -1, "x the time"),
    ("bf16 prefill, 512 of 16 Ki, 32/8 heads", r"prefill/bf16/32x8/16Ki", "GFLOP_per_s", 800, 1,
     "GFLOP/s, with AMX"),
    ("duo prefill in chunks of 512 up to 64 Ki", r"prompt/duo/32x8/64Ki", "speedup", 1.9, 1,
     "x full"),
    ("appending and quantising, of a decode step", r"decode/(?!streaming).*", "append_percent", 10, -1, "%"),
    ("appending and quantising 512 rows, of their prefill step", r"prefill/.*", "append_percent", 10,
     -1, "%"),
    ("selecting, of the step that selects", r"decode/retrieval/.*", "select_percent", 10, -1, "%"),
    ("compressing 16 Ki and 64 Ki rows, of the last chunk's attention", r"compress/.*",
     "compress_percent", 10, -1, "%"),
]


def value_of(cases, name, entry, counter):
    """A counter, or a ratio to a case that stands beside."""
    if counter == "over_int4":
        other = cases.get(name.replace("/kivi4/", "/int4/"), {})
        return entry["ms"] / other["ms"] if "ms" in other else None
    if counter == "best_over_1000":
        other = cases.get(name.replace("/1000000/", "/1000/"), {})
        return entry["ms_best"] / other["ms_best"] if "ms_best" in other else None
    return entry.get(counter)


def table(cases):
    # In one run the largest number of threads is what a target means.
    most = max((int(name.rsplit(":", 1)[1]) for name in cases if "/threads:" in name), default=1)
    lines = ["| what | to reach | reached (worst case) | |", "|---|---|---|---|"]
    for what, pattern, counter, limit, sign, unit in TARGETS:
        judged = []
        for name, entry in cases.items():
            if "ms" in entry and re.fullmatch(rf"{pattern}/threads:{most}", name):
                value = value_of(cases, name, entry, counter)
                if value is not None:
                    judged.append((value, name.rsplit("/", 1)[0]))
        wanted = f"{'at least' if sign > 0 else 'at most'} {limit} {unit}"
        if not judged:
            lines.append(f"| {what} | {wanted} | not measured | |")
            continue
        worst, where = (min if sign > 0 else max)(judged)
        good = worst >= limit if sign > 0 else worst <= limit
        found = number(worst) + (f" ({where})" if len(judged) > 1 else "")
        lines.append(f"| {what} | {wanted} | {found} | {'yes' if good else 'no'} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="JSON of attention_cpu_bench")
    args = parser.parse_args()
    context, cases = load(args.results)
    print(facts(context, cases) + "\n")
    print("\n".join(table(cases)))


if __name__ == "__main__":
    main()
