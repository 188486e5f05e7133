#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what llama_cuda_bench measured: decode latency, memory and prefill over context, full
attention against DuoAttention's split (its figures 9 to 11), one picture for each model.

  bench/plot_cuda.py llama.json --out bench/results

A context that did not fit is extrapolated by a straight line through the measured ones, drawn
hollow and dashed, and written "(extrapolated)" in the table that is printed. Without matplotlib only
the table is printed.
"""
import argparse
import os
import re
import sys

import peers_torch

NAME = re.compile(r"(?P<model>[^/]+)/(?P<policy>full|duo)/(?P<what>decode|prefill)/(?P<tokens>\d+)"
                  r"(/(?P<how>graph|eager))?")


def read(path):
    """{(model, policy, what, how): {tokens: entry}}; an entry without "ms" did not fit."""
    results = peers_torch.load(path)
    series = {}
    for entry in results["benchmarks"]:
        found = NAME.match(entry["name"])
        if not found:
            continue
        key = (found["model"], found["policy"], found["what"], found["how"])
        point = {}
        if not entry.get("error_occurred"):
            point = {"ms": entry.get("ms_per_token", entry.get("seconds", 0) * 1e3),
                     "GiB": entry.get("held_GiB"),
                     "curve": {int(name[5:]): value for name, value in entry.items()
                               if name.startswith("s_at_")}}
        series.setdefault(key, {})[int(found["tokens"])] = point
    return results.get("context", {}), series


def line_through(points):
    """Least squares (a, b) of y = a + b x, or None for fewer than two points."""
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = (sum((x - mean_x) * (y - mean_y) for x, y in points) /
             sum((x - mean_x)**2 for x, _ in points))
    return mean_y - slope * mean_x, slope


def completed(points, key):
    """[(tokens, value, measured)], where values that were not measured are on the line through the others."""
    measured = [(tokens, point[key]) for tokens, point in points.items()
                if point.get(key) is not None]
    line = line_through(measured)
    found = [(tokens, value, True) for tokens, value in measured]
    if line:
        found += [(tokens, line[0] + line[1] * tokens, False) for tokens, point in points.items()
                  if point.get(key) is None]
    return sorted(found)


def print_table(series):
    print("| model | what | tokens | full | duo | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for model, what, how in sorted({(k[0], k[2], k[3] or "") for k in series}):
        for key, unit in (("ms", "ms"), ("GiB", "GiB")):
            sides = [{tokens: (value, measured) for tokens, value, measured in
                      completed(series.get((model, policy, what, how or None), {}), key)}
                     for policy in ("full", "duo")]
            for tokens in sorted(set(sides[0]) & set(sides[1])):
                cells = [f"{value:.1f} {unit}" + ("" if measured else " (extrapolated)")
                         for value, measured in (side[tokens] for side in sides)]
                ratio = sides[0][tokens][0] / sides[1][tokens][0]
                print(f"| {model} | {what} {how} | {tokens:,} | {cells[0]} | {cells[1]} | "
                      f"{ratio:.2f}× |")


def draw(axes, points, key, label, color):
    """Measured points on a line, extrapolated ones hollow on a dashed line."""
    found = completed(points, key)
    measured = [(x, y) for x, y, known in found if known]
    guessed = [(x, y) for x, y, known in found if not known]
    if measured:
        axes.plot(*zip(*measured), "o-", color=color, label=label)
    if guessed:
        axes.plot(*zip(*(measured[-1:] + guessed)), "--", color=color)
        axes.plot(*zip(*guessed), "o", color=color, fillstyle="none",
                  label=label + ", extrapolated")


def plot(context, series, model, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (latency, memory, prefill) = pyplot.subplots(1, 3, figsize=(14, 4.2))
    colors = {"full": "tab:gray", "duo": "tab:blue"}
    for policy in ("full", "duo"):
        decode = series.get((model, policy, "decode", "graph"), {})
        draw(latency, decode, "ms", policy, colors[policy])
        draw(memory, decode, "GiB", policy, colors[policy])
        for entry in series.get((model, policy, "prefill", None), {}).values():
            curve = sorted(entry.get("curve", {}).items())
            if curve:
                prefill.plot(*zip(*curve), "-", color=colors[policy], label=policy)
    for axes, title, unit in ((latency, "decode step (CUDA graph)", "ms"),
                              (memory, "weights, cache, activations", "GiB"),
                              (prefill, "prefill so far", "s")):
        axes.set_title(title)
        axes.set_xlabel("tokens")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.suptitle(f"{model}, {context.get('device', 'unknown device')}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    print(f"drawn: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="JSON of llama_cuda_bench")
    parser.add_argument("--out", default=".", help="folder for the pictures (default: here)")
    args = parser.parse_args()
    context, series = read(args.results)
    if not series:
        sys.exit(f"plot_cuda.py: {args.results} has no case of llama_cuda_bench")
    print_table(series)
    try:
        import matplotlib  # noqa: F401  pylint: disable=unused-import
    except ImportError:
        sys.exit("plot_cuda.py: there is no matplotlib here (pip install matplotlib): no pictures")
    os.makedirs(args.out, exist_ok=True)
    for model in sorted({key[0] for key in series}):
        plot(context, series, model, os.path.join(args.out, f"llama_cuda_{model}.svg"))


if __name__ == "__main__":
    main()
