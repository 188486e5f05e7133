#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints ours and theirs side by side: what share of the questions each method answered, and what its cache held in memory.

  table.py --ours ours.json ours_text.json --theirs theirs.json        Markdown
  table.py --agreement --ours ours.json --theirs theirs.json           how often both full caches say the same

`--ours`: what `evaluate --out` has written (with --said for --agreement); `--theirs`: what ask.py has. Only points that stand
in both are compared, and a method's row holds the mean over all questions of a column. Memory is a share of what the same
system's full cache holds; in brackets the rows that attention sees, where these are fewer than the memory holds.
"""
import argparse
import json
import statistics
import sys
from fractions import Fraction
from itertools import zip_longest

WHEN = {"text": "before the question", "question": "after the question"}


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def share_name(share):
    return f"1/{round(1 / share)}" if share and share < 1 else ""


def rows_of_ours(files):
    """{(who, method, when rows are dropped, share): {(suite, tokens): [points]}}"""
    rows = {}
    for file in files:
        when = file["settings"].get("compress", "question")
        for point in file["points"]:
            share = float(Fraction(str(point.get("share") or 0)))
            name = ("kvpolicy", point["method"], when if share else "", share_name(share))
            rows.setdefault(name, {}).setdefault((point["suite"], point["tokens"]), []).append(point)
    return rows


def rows_of_theirs(files):
    rows = {}
    for file in files:
        for point in file["points"]:
            who = "transformers" if point["ratio"] == 1 else "kvpress"
            name = (who, point["plan"], point["compress"] if point["ratio"] > 1 else "", share_name(1 / point["ratio"]))
            rows.setdefault(name, {}).setdefault((point["suite"], point["tokens"]), []).append(point)
    return rows


def accuracy(points):
    marks = "".join(point["marks"] for point in points)
    return 100 * marks.count("1") / len(marks)


def cell(points, full):
    if not points:
        return "–"
    if any("refused" in point for point in points):
        return "refused"
    held = statistics.mean(point["kv_bytes"] for point in points)
    text = f"{accuracy(points):.0f} %"
    if full:
        whole = statistics.mean(point["kv_bytes"] for point in full)
        rows = statistics.mean(point["row_bytes"] for point in points)
        whole_rows = statistics.mean(point["row_bytes"] for point in full)
        text += f", {100 * held / whole:.0f} %"
        if rows / whole_rows < 0.97 * held / whole:
            text += f" ({100 * rows / whole_rows:.0f} %)"
    return text


def table(rows):
    columns = sorted({column for found in rows.values() for column in found})
    lines = ["| system | method | rows are dropped | kept | " + " | ".join(f"{suite}, {tokens:,}" for suite, tokens in columns) + " |",
             "|---|---|---|---|" + "---|" * len(columns)]
    for name in sorted(rows, key=lambda name: (name[1] != "full", name[1], name[3].rjust(5), name[2], name[0])):
        who, method, when, share = name
        full = next((rows[key] for key in rows if key[1] == "full" and (key[0] == "kvpolicy") == (who == "kvpolicy")), {})
        cells = [cell(rows[name].get(column), full.get(column)) for column in columns]
        lines.append(f"| {who} | {method} | {WHEN.get(when, '')} | {share} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def agreement(ours, theirs):
    """(questions, equal answers, equal leading tokens, tokens) of the full caches."""
    questions = equal = same = tokens = 0
    mine = {(point["suite"], point["tokens"], point["seed"]): point for file in ours for point in file["points"]
            if point["method"] == "full"}
    for file in theirs:
        for point in file["points"]:
            other = mine.get((point["suite"], point["tokens"], point["seed"]))
            if point["plan"] != "full" or other is None:
                continue
            if "said" not in other:
                sys.exit("table.py: --agreement needs answers; evaluate --said records them")
            for one, two in zip(other["said"], point["said"], strict=True):
                apart = next((i for i, (a, b) in enumerate(zip_longest(one, two)) if a != b), len(one))
                questions, equal = questions + 1, equal + (one == two)
                same, tokens = same + apart, tokens + max(len(one), len(two))
    return questions, equal, same, tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--theirs", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--agreement", action="store_true")
    arguments = parser.parse_args()
    ours, theirs = [load(path) for path in arguments.ours], [load(path) for path in arguments.theirs]
    if arguments.agreement:
        questions, equal, same, tokens = agreement(ours, theirs)
        if questions == 0:
            sys.exit("table.py: no full cache was asked the same questions in both")
        print(f"{equal} of {questions} answers are equal; {same} of {tokens} tokens before the first difference")
        return
    print(table({**rows_of_ours(ours), **rows_of_theirs(theirs)}))


if __name__ == "__main__":
    try:
        main()
    except (OSError, KeyError, ValueError) as why:
        sys.exit(f"table.py: {type(why).__name__}: {why}")
