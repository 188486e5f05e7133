#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what triforce_shipped_bench measured: how often the full cache agrees with what the target
guessed over its selected rows, over the budget and over the size of a chunk (TriForce's figure 6).

  bench/plot_triforce.py bench/results/triforce_shipped.json --out docs/triforce_acceptance.png

Without matplotlib the numbers are printed only.
"""
import argparse
import json
import re
import sys

NAME = re.compile(r"(?P<what>budget|chunk)/(?P<kind>(prose|needles)-(means|bounds))/(?P<rows>\d+)")
LABELS = {"prose-means": "goes on with a text, mean keys",
          "prose-bounds": "goes on with a text, min/max keys",
          "needles-means": "answers questions about it, mean keys",
          "needles-bounds": "answers questions about it, min/max keys"}
STYLES = {"prose-means": ("#1b6ca8", "-"), "prose-bounds": ("#1b6ca8", "--"),
          "needles-means": ("#d1495b", "-"), "needles-bounds": ("#d1495b", "--")}


def read(path):
    """{(what, kind): [(rows, acceptance)]}"""
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)["benchmarks"]
    except (OSError, ValueError, KeyError) as why:
        sys.exit(f"plot_triforce.py: {path} cannot be read: {why}")
    series = {}
    for entry in entries:
        found = NAME.match(entry["name"])
        if found and "acceptance" in entry:
            key = (found["what"], found["kind"])
            series.setdefault(key, []).append((int(found["rows"]), entry["acceptance"]))
    return {key: sorted(points) for key, points in series.items()}


def draw(series, out):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, sides = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    titles = {"budget": "rows selected, in chunks of 8", "chunk": "rows of a chunk, 512 selected"}
    for side, (what, title) in zip(sides, titles.items()):
        for kind in LABELS:
            points = series.get((what, kind), [])
            side.plot([rows for rows, _ in points], [share for _, share in points], marker="o",
                      markersize=4, color=STYLES[kind][0], linestyle=STYLES[kind][1],
                      label=LABELS[kind])
        side.set_xscale("log", base=2)
        ticks = sorted({rows for kind in LABELS for rows, _ in series.get((what, kind), [])})
        side.set_xticks(ticks, [str(tick) for tick in ticks])
        side.set_xlabel(title)
        side.set_ylim(0, 1.02)
        side.grid(alpha=0.3)
        side.spines[["top", "right"]].set_visible(False)
    sides[0].set_ylabel("guesses accepted")
    sides[0].legend(frameon=False, loc="lower right", fontsize=8)
    figure.suptitle("What the target says over few selected rows, it mostly says over all 7,680")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--out", default="triforce_acceptance.png")
    arguments = parser.parse_args()
    series = read(arguments.results)
    if not series:
        sys.exit("plot_triforce.py: no budget/ or chunk/ case in the file")
    for (what, kind), points in sorted(series.items()):
        print(f"{what:7}{kind:9}" + "  ".join(f"{rows}: {share:.3f}" for rows, share in points))
    try:
        draw(series, arguments.out)
        print(f"wrote {arguments.out}")
    except ImportError:
        print("matplotlib is missing: no picture")


if __name__ == "__main__":
    main()
