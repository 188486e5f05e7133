#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws attention_cpu_bench's results: a decode step's time over the length of the text under every
policy, and the bytes that it reads; below them prefill.

  bench/plot_cpu.py bench/results/cpu_amd_epyc_2core.json --out docs/cpu_attention.png

With a file of bench/peers_cpu_torch.py (--peers) PyTorch's times are drawn as well.
"""
import argparse
import io
import os
import re
import sys

from results_cpu import facts, load

# Okabe and Ito's colours, as in plot.py, for each policy: label, colour, marker, dashes.
STYLES = {
    "bf16": ("full, bfloat16", "#000000", "o", "-"),
    "bf16_float": ("full, bfloat16; float queries", "#000000", "+", ":"),
    "f16": ("full, half", "#000000", "x", ":"),
    "f32": ("full, float", "#999999", "h", ":"),
    "int8": ("8 bits", "#0072B2", "s", "-"),
    "int4": ("4 bits", "#0072B2", "^", "-"),
    "int2": ("2 bits", "#0072B2", "v", "-"),
    "kivi4": ("4 bits, keys per channel", "#56B4E9", "^", "--"),
    "duo": ("duo, half of the heads streaming", "#D55E00", "D", "-"),
    "headkv": ("HeadKV, a 16th of the rows", "#CC79A7", "P", "-"),
    "retrieval": ("retrieval of 4,096 rows, each step", "#009E73", "*", "-"),
    "standing": ("the same, a standing selection", "#009E73", "*", "--"),
}
PEER = "#E69F00"
NAME = re.compile(r"(?P<what>decode|prefill)/(?P<policy>\w+)/(?P<shape>\d+x\d+)/(?P<rows>\d+)Ki"
                  r"/threads:(?P<threads>\d+)")


def series_of(cases, what, shape, threads, counter):
    """{policy: [(Ki rows, value)]}"""
    series = {}
    for name, entry in cases.items():
        found = NAME.fullmatch(name)
        if not found or "ms" not in entry or counter not in entry:
            continue
        if (found["what"], found["shape"], int(found["threads"])) == (what, shape, threads):
            series.setdefault(found["policy"], []).append((int(found["rows"]), entry[counter]))
    return {policy: sorted(points) for policy, points in series.items()}


def lines(side, series, peer=False):
    for policy, (label, colour, marker, dashes) in STYLES.items():
        points = series.get(policy, [])
        if not points:
            continue
        side.plot(*zip(*points), color=PEER if peer else colour, marker=marker, markersize=5,
                  linestyle=":" if peer else dashes, linewidth=1.5,
                  label=f"PyTorch: {label}" if peer else label)


def axes_of(side, title, unit, ticks):
    from matplotlib.ticker import LogLocator
    side.set_xscale("log", base=2)
    side.set_yscale("log")
    side.set_xticks(ticks, [f"{tick} Ki" for tick in ticks])
    side.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    side.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    side.minorticks_off()
    side.set_title(title, fontsize=10)
    side.set_ylabel(unit)
    side.spines[["top", "right"]].set_visible(False)
    side.grid(alpha=0.25)


def draw(plt, context, cases, peers):
    found = [match for match in map(NAME.fullmatch, cases) if match]
    shapes = sorted({match["shape"] for match in found if match["what"] == "decode"},
                    key=lambda shape: int(shape.split("x")[1]))
    threads = max(int(match["threads"]) for match in found)
    prefills = {shape: series_of(cases, "prefill", shape, threads, "ms") for shape in shapes}
    columns = 3 if any(prefills.values()) else 2
    figure, axes = plt.subplots(len(shapes), columns, squeeze=False,
                                figsize=(4.3 * columns + 2.6, 3.7 * len(shapes)))
    for row, shape in zip(axes, shapes):
        decode = series_of(cases, "decode", shape, threads, "ms")
        ticks = sorted({rows for points in decode.values() for rows, _ in points})
        heads = shape.replace("x", "/")
        lines(row[0], decode)
        lines(row[0], series_of(peers, "decode", shape, threads, "ms"), peer=True)
        axes_of(row[0], f"a decode step, {heads} heads", "ms", ticks)
        megabytes = {policy: [(rows, bytes_ / 1e6) for rows, bytes_ in points] for policy, points in
                     series_of(cases, "decode", shape, threads, "bytes").items()}
        lines(row[1], megabytes)
        axes_of(row[1], f"bytes that it reads, {heads} heads", "MB", ticks)
        if columns == 3:
            lines(row[2], prefills[shape])
            lines(row[2], series_of(peers, "prefill", shape, threads, "ms"), peer=True)
            axes_of(row[2], f"prefill, the last 512 tokens, {heads} heads", "ms",
                    sorted({rows for points in prefills[shape].values() for rows, _ in points}))
        for side in row:
            side.set_xlabel("rows of the text")
    named = {}
    for side in axes.flat:
        for handle, label in zip(*side.get_legend_handles_labels()):
            named.setdefault(label, handle)
    axes[0][-1].legend(named.values(), named.keys(), frameon=False, fontsize=8, loc="upper left",
                       bbox_to_anchor=(1.02, 1.0))
    figure.suptitle(f"Attention of one layer, {context.get('cpu', 'unknown processor')}, {threads} "
                    f"thread{'s' if threads > 1 else ''}, cold caches, medians", fontsize=11)
    figure.tight_layout()
    return figure


def save(figure, path):
    """With the colours that are used and their way to white: a third of the bytes."""
    from PIL import Image  # comes with matplotlib
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    palette = []
    for colour in sorted({style[1] for style in STYLES.values()} | {PEER}):
        channels = [int(colour[i:i + 2], 16) for i in (1, 3, 5)]
        for step in range(16):
            palette += [round(c + (255 - c) * step / 15) for c in channels]
    own = Image.new("P", (1, 1))
    own.putpalette(palette + [255] * (768 - len(palette)))
    few = Image.open(picture).convert("RGB").quantize(palette=own, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="JSON of attention_cpu_bench")
    parser.add_argument("--peers", help="JSON of peers_cpu_torch.py")
    parser.add_argument("--out", default="cpu_attention.png", help="default: %(default)s")
    args = parser.parse_args()
    context, cases = load(args.results)
    if not any(map(NAME.fullmatch, cases)):
        sys.exit(f"plot_cpu.py: {args.results} has no decode/ or prefill/ case")
    print(facts(context, cases))
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_cpu.py: matplotlib is missing: apt-get install python3-matplotlib, "
                 "or pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure = draw(plt, context, cases, load(args.peers)[1] if args.peers else {})
    save(figure, args.out)
    size = os.path.getsize(args.out)
    print(f"wrote {args.out}, {size / 1000:.0f} kB")
    if size > 150_000:
        sys.exit(f"{args.out} is larger than 150 kB")


if __name__ == "__main__":
    main()
