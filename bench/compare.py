#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joins two files of results into a table of ratios: before and after a change, two machines, this
library and another (bench/peers_cpu_torch.py).

  bench/compare.py before.json after.json
  bench/compare.py torch.json ours.json --filter 'decode/.*/64Ki'

A ratio above 1 says that the second file's case is faster. Where the middle four fifths of both
cases' samples overlap, the ratio is in brackets, because it may be chance. Cases that only one file has
are counted, not shown. Other files of Google Benchmark can be read, too.
"""
import argparse
import math
import re
import sys

from results_cpu import facts, load, number


def spread(entry):
    low, high = entry.get("ms_p10", entry["ms"]), entry.get("ms_p90", entry["ms"])
    return low, high


def overlap(one, other):
    (low, high), (other_low, other_high) = spread(one), spread(other)
    return low <= other_high and other_low <= high


def rows_of(first, second, pattern):
    """[(case, first entry, second entry, ratio)] of the cases that both files have."""
    rows = []
    for name, entry in first.items():
        other = second.get(name, {})
        if re.search(pattern, name) and "ms" in entry and "ms" in other:
            rows.append((name, entry, other, entry["ms"] / other["ms"]))
    return rows


def cell(entry):
    how = " ".join(entry[key] for key in ("backend", "how") if key in entry)
    low, high = spread(entry)
    between = f" ({number(low)} to {number(high)})" if "ms_p10" in entry else ""
    return number(entry["ms"]) + between + (f" {how}" if how else "")


def table(rows, names):
    lines = [f"| case | {names[0]}, ms (p10 to p90) | {names[1]}, ms (p10 to p90) | ratio |",
             "|---|---:|---:|---:|"]
    for name, one, other, ratio in rows:
        shown = f"{ratio:.2f}"
        lines.append(f"| {name} | {cell(one)} | {cell(other)} | "
                     f"{'(' + shown + ')' if overlap(one, other) else shown} |")
    return lines


def by_kind(rows):
    """Geometric means over cases that differ only in length, shape and threads."""
    kinds = {}
    for name, _, _, ratio in rows:
        kinds.setdefault("/".join(name.split("/")[:2]), []).append(ratio)
    lines = ["| kind | cases | geometric mean | worst | best |", "|---|---:|---:|---:|---:|"]
    for kind, ratios in kinds.items():
        mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
        lines.append(f"| {kind} | {len(ratios)} | {mean:.2f} | {min(ratios):.2f} | "
                     f"{max(ratios):.2f} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", help="JSON that ratios are taken to")
    parser.add_argument("second", help="JSON that is faster where the ratio is above 1")
    parser.add_argument("--filter", default="", help="only cases that this regular expression finds")
    parser.add_argument("--names", nargs=2, default=("first", "second"), metavar=("FIRST", "SECOND"),
                        help="what to call the two")
    parser.add_argument("--table", help="write the tables to this file as well")
    args = parser.parse_args()
    try:
        re.compile(args.filter)
    except re.error as why:
        sys.exit(f"--filter '{args.filter}' is no regular expression: {why}")
    (first_context, first), (second_context, second) = load(args.first), load(args.second)
    rows = rows_of(first, second, args.filter)
    if not rows:
        sys.exit(f"{args.first} and {args.second} have no measured case in common"
                 + (f" that '{args.filter}' finds" if args.filter else ""))
    lines = [f"{args.names[0]}: {facts(first_context, first)}", "",
             f"{args.names[1]}: {facts(second_context, second)}", ""]
    machines = [context.get("cpu") for context in (first_context, second_context)]
    if None not in machines and machines[0] != machines[1]:
        lines += ["**Two machines: the ratios are theirs as well.**", ""]
    lines += table(rows, args.names) + [""] + by_kind(rows)
    alone = [len({name for name in own if re.search(args.filter, name)}) - len(rows)
             for own in (first, second)]
    if any(alone):
        lines += ["", f"Not shown: {alone[0]} cases of {args.names[0]} and {alone[1]} of "
                      f"{args.names[1]} that the other has not, or that were refused."]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.table:
        with open(args.table, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
