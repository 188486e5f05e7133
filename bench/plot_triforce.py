#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what the benches of speculative decoding measured.

  bench/plot_triforce.py bench/results/triforce_shipped.json --out docs/triforce_acceptance.png
      how often the full cache agrees with what the target guessed over its selected rows, over the budget and
      over the size of a chunk (TriForce's figure 6)
  bench/plot_triforce.py bench/results/triforce_model.json --out docs/triforce_model.png
      the same for a pretrained model, and how much of its attention few rows get, now and later (section 3)

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


# Cases of a pretrained model. Their points are means over the texts.
MODEL_NAME = re.compile(r"(?P<what>budget|attention)/(?P<kind>[a-z-]+)/[^/]+/(?P<context>\d+)/(?P<rows>\d+)/")
MODEL_KINDS = {"continues-bounds": ("-", "goes on with a text"), "repeats-bounds": ("--", "quotes the text")}
CONTEXT_COLOURS = ["#7fb8da", "#1b6ca8", "#0b2545", "#d1495b"]


def cases_of(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)["benchmarks"]
    except (OSError, ValueError, KeyError) as why:
        sys.exit(f"plot_triforce.py: {path} cannot be read: {why}")


def read(entries):
    """{(what, kind): [(rows, acceptance)]}"""
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


def read_model(entries):
    """{(context, what): [(rows or queries, mean over the texts)]}"""
    values = {}
    for entry in entries:
        found = MODEL_NAME.match(entry["name"])
        if not found:
            continue
        context, rows, kind = int(found["context"]), int(found["rows"]), found["kind"]
        if found["what"] == "budget" and kind in MODEL_KINDS and "acceptance" in entry:
            values.setdefault((context, kind), {}).setdefault(rows, []).append(entry["acceptance"])
        if found["what"] == "attention" and kind == "bounds":
            for what in ("best", "chosen", "latest"):
                values.setdefault((context, what), {}).setdefault(rows, []).append(entry[what])
            for key, value in entry.items():
                what, _, lag = key.partition("_")
                if what in ("overlap", "fixed") and rows * 8 == context:
                    values.setdefault((context, what), {}).setdefault(int(lag), []).append(value)
    # Points of a line are means over the same texts.
    texts = {key: max(len(all_) for all_ in points.values()) for key, points in values.items()}
    return {key: sorted((at, sum(all_) / len(all_)) for at, all_ in points.items() if len(all_) == texts[key])
            for key, points in values.items()}


def draw_model(series, out):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, sides = plt.subplots(1, 3, figsize=(13, 4))
    contexts = sorted({context for context, _ in series})
    panels = [("rows that the draft reads", "guesses accepted",
               {kind: (style, 1, label) for kind, (style, label) in MODEL_KINDS.items()}),
              ("rows", "share of the attention", {"best": ("-", 1, "the best rows"),
               "chosen": ("--", 1, "chosen chunks"), "latest": (":", 1, "first 16 and latest rows")}),
              ("queries after the choice of an eighth of the rows", "share",
               {"fixed": ("-", 1, "of the attention"), "overlap": ("--", 1, "of rows chosen again")})]
    for side, (xlabel, ylabel, lines) in zip(sides, panels):
        for what, (style, width, label) in lines.items():
            for colour, context in zip(CONTEXT_COLOURS, contexts):
                points = series.get((context, what), [])
                if not points:
                    continue
                side.plot([at for at, _ in points], [share for _, share in points], style, color=colour,
                          linewidth=width + 0.5, marker="o", markersize=3,
                          label=f"{label}, {context:,} tokens")
        side.set_xscale("log", base=2)
        ticks = sorted({at for what in lines for context in contexts for at, _ in series.get((context, what), [])})
        side.set_xticks(ticks, [str(tick) for tick in ticks])
        side.set_xlabel(xlabel)
        side.set_ylabel(ylabel)
        side.set_ylim(0, 1.02)
        side.grid(alpha=0.3)
        side.spines[["top", "right"]].set_visible(False)
        if side.get_lines():
            side.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--out", default="triforce_acceptance.png")
    arguments = parser.parse_args()
    entries = cases_of(arguments.results)
    series, draw_it = (read(entries), draw)
    if not series:
        series, draw_it = (read_model(entries), draw_model)
    if not series:
        sys.exit("plot_triforce.py: no budget/, chunk/ or attention/ case in the file")
    for key, points in sorted(series.items()):
        print(f"{' '.join(str(part) for part in key):26}" +
              "  ".join(f"{at}: {share:.3f}" for at, share in points))
    try:
        draw_it(series, arguments.out)
        print(f"wrote {arguments.out}")
    except ImportError:
        print("matplotlib is missing: no picture")


if __name__ == "__main__":
    main()
