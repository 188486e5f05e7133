#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what `shards_bench predict` predicts for Llama-3-70B and 405B on 1 to 64 ranks: a step of eight texts (strong
scaling), and the tokens a second of as many texts as fit into the ranks' memory.

  bench/plot_shards.py bench/results/shards_predicted.json --out docs/shards_predicted.png
"""
import argparse
import io
import json
import os
import sys

PLANS = {"full": ("full", "#000000", "o"), "duo": ("duo", "#D55E00", "s"), "duo+int4": ("duo + int4", "#0072B2", "^")}
DIVISIONS = {"equal heads": ("equally many heads", ":"), "balanced": ("balanced by cost", "-")}


def chosen(cases, **wanted):
    return [case for case in cases if all(case[key] == value for key, value in wanted.items())]


def lines(side, cases, model, value):
    for plan, (label, colour, marker) in PLANS.items():
        for division, (words, dashes) in DIVISIONS.items():
            # Nodes of eight: where all ranks share NVLink there is a second case.
            own = [case for case in chosen(cases, model=model, plan=plan, division=division, rows_by="bytes")
                   if case["node"] == min(case["ranks"], 8)]
            points = [(case["ranks"], value(case)) for case in own if value(case) is not None]
            if points:
                side.plot(*zip(*points), color=colour, marker=marker, markersize=4, linestyle=dashes, linewidth=1.5,
                          label=f"{label}, {words}")


def draw(plt, context, cases):
    from matplotlib.ticker import LogLocator
    models = list(dict.fromkeys(case["model"] for case in cases))
    figure, axes = plt.subplots(2, len(models), figsize=(5.2 * len(models) + 2.4, 7.6), squeeze=False)
    ranks = sorted({case["ranks"] for case in cases})
    for column, model in enumerate(models):
        lines(axes[0][column], cases, model, lambda case: 1e3 * case["strong"]["seconds"])
        axes[0][column].set_title(f"{model}: a step of {context['strong_texts']} texts", fontsize=10)
        axes[0][column].set_ylabel("predicted ms")
        lines(axes[1][column], cases, model,
              lambda case: case["full_memory"]["tokens_per_second"] if "full_memory" in case else None)
        axes[1][column].set_title(f"{model}: texts that fit into {context['device_memory'] / 1e9:g} GB a rank", fontsize=10)
        axes[1][column].set_ylabel("predicted tokens/s")
        for side in (axes[0][column], axes[1][column]):
            side.set_xscale("log", base=2)
            side.set_yscale("log")
            side.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            side.minorticks_off()
            side.set_xticks(ranks, [str(count) for count in ranks])
            side.set_xlim(ranks[0] / 1.2, ranks[-1] * 1.2)
            side.axvline(8, color="#999999", linewidth=0.8, linestyle="--")
            side.set_xlabel("ranks (dashed: one node, and one KV head a rank)")
            side.spines[["top", "right"]].set_visible(False)
            side.grid(alpha=0.25)
    axes[0][-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.suptitle(f"PREDICTED, not measured: {context['tokens']:,} tokens a text, {context['device']}, "
                    "nodes of eight with NVLink, 400 Gb/s between them;\nrows take their bytes at the memory's bandwidth",
                    fontsize=11)
    figure.tight_layout()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="JSON of shards_bench predict")
    parser.add_argument("--out", default="shards_predicted.png", help="default: %(default)s")
    arguments = parser.parse_args()
    with open(arguments.results, encoding="utf-8") as file:
        results = json.load(file)
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_shards.py: matplotlib is missing: apt-get install python3-matplotlib, or pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image  # comes with matplotlib
    picture = io.BytesIO()
    draw(plt, results["context"], results["cases"]).savefig(picture, format="png", dpi=100)
    # Few colours and their way to white: a third of the bytes.
    Image.open(picture).convert("RGB").quantize(48, dither=Image.Dither.NONE).save(arguments.out, optimize=True)
    size = os.path.getsize(arguments.out)
    print(f"wrote {arguments.out}, {size / 1000:.0f} kB")
    if size > 150_000:
        sys.exit(f"{arguments.out} is larger than 150 kB")


if __name__ == "__main__":
    main()
