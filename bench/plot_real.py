#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the first part of docs/results.md, on SmolLM2, from what ./scripts/reproduce --model smollm2 has
measured. Bars and bands are 95 % intervals by bootstrap over texts.

  smollm2_heads.png     the KV heads that each method of finding heads would keep, layer by layer
  smollm2_gates.png     pass keys found by kind of gates, against random ones
  smollm2_needles.png   pass keys found, by length and depth, side by side
  smollm2_budgets.png   answers over rows per head
  smollm2_frontier.png  answers over bytes
  smollm2_language.png  KL divergence to the full cache, on prose and on code
  smollm2_rows.png      rows that heads read under a bound, over the length of a text
  smollm2_memory.png    memory over the length of a text and the number of texts, time of a token over the length

  bench/plot_real.py --results bench/results/smollm2 --weights reference_model/weights/smollm2 --out docs [--only NAME...]
"""
import argparse
import json
import statistics
from pathlib import Path

import head_agreement
import results
from pages.real_results_page import found_by, interval, kinds_of_heads, label, plan_name, shares_of
from plot import COLOURS, MARKERS, plain, save
from results import by, by_gates, name_of, of, setting_of


def bars(found):
    """[(mean, low, high)] in %, as errorbar takes them."""
    means = [100 * mean for mean, _, _ in found]
    low = [max(0, 100 * (mean - low)) if low == low else 0 for mean, low, _ in found]
    high = [max(0, 100 * (high - mean)) if high == high else 0 for mean, _, high in found]
    return means, [low, high]


def line(side, x, found, i, name, dashed=False):
    means, errors = bars(found)
    side.errorbar(x, means, yerr=errors, capsize=2, linewidth=1.4, markersize=5, color=COLOURS[i % 8], marker=MARKERS[i % 8],
                  linestyle="--" if dashed else "-", markerfacecolor="white" if dashed else None, label=name)


def full_line(side, found, vertical=False):
    low, high = (100 * bound for bound in found[1:])
    draw, fill = (side.axvline, side.axvspan) if vertical else (side.axhline, side.axhspan)
    draw(100 * found[0], color="#777777", linewidth=1, linestyle=":", label="full cache")
    if low == low:
        fill(low, high, color="#777777", alpha=0.12, linewidth=0)


def families(names):
    """A colour for each method, which its tuned setting shares."""
    first = {}
    return {name: (first.setdefault(name.split(", tuned")[0], len(first)), ", tuned" in name) for name in names}


def heads(plt, folder, weights):
    paths = [path for names in ("duo*", "razor/*_heads.json", "headkv/*.json") for path in sorted(weights.glob(names))]
    if not (folder / "heads.json").exists():
        return None
    figure, axes = plt.subplots(len(paths), 1, figsize=(8.6, 0.72 * len(paths) + 1.1), sharex=True, squeeze=False)
    for side, path in zip(axes[:, 0], paths):
        scores = head_agreement.kv_scores(path, 3)
        place = head_agreement.ranks(scores)
        layers = len(scores) // 3
        side.imshow([[(place[layer * 3 + head] - 1) / (len(scores) - 1) for layer in range(layers)] for head in range(3)],
                    cmap="cividis", vmin=0, vmax=1, aspect="auto")
        kept = head_agreement.kept(scores, 0.5)
        side.plot([i // 3 for i in kept], [i % 3 for i in kept], "s", markersize=3, color="white", markeredgewidth=0)
        name = found_by(path.stem if path.is_file() else path.name)
        side.set_ylabel(name.replace(" (", "\n(").replace("-head", "-\nhead"), fontsize=7, rotation=0, ha="right", va="center")
        side.set_yticks([])
        side.set_xticks(range(0, layers, 2))
        side.tick_params(labelsize=7)
    axes[-1][0].set_xlabel("layer", fontsize=8)
    figure.suptitle("90 KV heads by rank (bright: high); a white square: kept when half of them stream", fontsize=10)
    figure.tight_layout()
    return figure


def gates(plt, folder, _):
    points = results.load(folder / "gates.json")
    if not points:
        return None
    full = of(points, plan="full")
    kinds = by_gates([point for point in points if point["plan"] != "full"])
    sparsities = sorted({setting_of(point)[0] for point in points if setting_of(point)})
    figure, axes = plt.subplots(1, len(sparsities), figsize=(4.2 * len(sparsities) + 1, 0.36 * len(kinds) + 1.4), sharey=True,
                                squeeze=False)
    for side, sparsity in zip(axes[0], sparsities):
        for y, (name, own) in enumerate(kinds.items()):
            means, errors = bars([interval([point for point in own if setting_of(point) == [sparsity]])])
            side.errorbar(means, [y], xerr=errors, fmt="o", capsize=2,
                          color="#777777" if name.startswith("random") else COLOURS[0])
        full_line(side, interval(full), vertical=True)
        side.set_title(f"{100 * sparsity:g} % of the heads stream", fontsize=10)
        side.set_xlabel("pass keys found, %")
        side.set_xlim(-2, 103)
        plain(side)
    axes[0][0].set_yticks(range(len(kinds)), list(kinds), fontsize=8)
    axes[0][0].invert_yaxis()
    axes[0][-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    return figure


def needles(plt, folder, _):
    run = results.read(folder / "needles.json")
    if not run:
        return None
    grid, depths = run["points"], run["settings"]["depths"]
    lengths = sorted({point["tokens"] for point in grid})
    full = of(grid, plan="full")
    columns = ["full", *by([point for point in grid if point["plan"] != "full"], label)]
    shares = sorted({point["share"] for point in grid if "share" in point}, reverse=True)

    def cells(own):
        """[depth][length]: % found. The texts of a point, with a pass key each, take the depths in turn."""
        found = [[[] for _ in lengths] for _ in range(depths)]
        for point in own:
            for i, mark in enumerate(point["marks"]):
                found[i % depths][lengths.index(point["tokens"])].append(100 * (mark == "1"))
        return [[statistics.fmean(cell) if cell else float("nan") for cell in row] for row in found]

    figure, axes = plt.subplots(len(shares), len(columns), figsize=(1.4 * len(columns) + 0.9, 1.9 * len(shares) + 0.9), sharex=True,
                                sharey=True, squeeze=False)
    for row, budget in zip(axes, shares):
        for side, method in zip(row, columns):
            own = full if method == "full" else [point for point in grid if label(point) == method and point.get("share") == budget]
            if not own:
                side.set_axis_off()
                continue
            image = side.imshow(cells(own), vmin=0, vmax=100, cmap="cividis", aspect="auto")
            side.set_title(f"{method}\n{100 * results.bytes_share(own, full):.0f} % of rows, {100 * interval(own)[0]:.0f} % found",
                           fontsize=7.5)
            side.set_xticks(range(len(lengths)), [f"{length / 1024:g}" for length in lengths], fontsize=7)
            side.set_yticks([0, depths - 1], ["5 %", "95 %"], fontsize=7)
        row[0].set_ylabel("depth in the text", fontsize=8)
    for side in axes[-1]:
        side.set_xlabel("Ki tokens", fontsize=8)
    figure.tight_layout(rect=(0, 0, 0.93, 1))
    bar = figure.colorbar(image, cax=figure.add_axes((0.94, 0.16, 0.01, 0.62)))
    bar.set_label("pass keys found, %", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def budgets(plt, folder, _):
    points = results.load(folder / "budgets.json")
    if not points:
        return None
    figure, side = plt.subplots(figsize=(8.2, 4.2))
    named = by([point for point in points if point["plan"] != "full"], label)
    side.set_xscale("log", base=2)
    colours = families(named)
    for k, (name, own) in enumerate(named.items()):
        sizes = by(own, lambda point: setting_of(point)[0])
        # Points of one size stand side by side, so that their intervals can be told apart.
        line(side, [size * 2 ** (0.05 * (k - len(named) / 2)) for size in sizes], [interval(at) for at in sizes.values()],
             colours[name][0], name, dashed=colours[name][1])
    full_line(side, interval(of(points, plan="full")))
    ticks = sorted({setting_of(point)[0] for point in points if setting_of(point)})
    side.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    side.minorticks_off()
    side.set_xlabel("rows kept per KV head, on average")
    side.set_ylabel("questions answered, %")
    side.set_ylim(-2, 103)
    side.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    plain(side)
    figure.tight_layout()
    return figure


def frontier(plt, folder, _):
    points = results.load(folder / "combined.json")
    if not points:
        return None
    full = of(points, plan="full")
    named = by([point for point in points if "share" in point], label)
    # Two panels, because so many lines in one could not be told apart.
    def by_head(name):
        return named[name][0]["method"].startswith(("duo", "headkv", "search"))

    figure, axes = plt.subplots(1, 2, figsize=(10.4, 4.5), sharey=True)
    for side, title, here in ((axes[0], "heads treated by what they do", [name for name in named if by_head(name)]),
                              (axes[1], "one rule for all heads", [name for name in named if not by_head(name)])):
        side.set_xscale("log", base=2)
        colours = families(here)
        for k, name in enumerate(here):
            shares = by(named[name], lambda point: point["share"])
            line(side, [100 * share * 2 ** (0.05 * (k - len(here) / 2)) for share in shares],
                 [interval(at) for at in shares.values()], colours[name][0], name, dashed=colours[name][1])
        full_line(side, interval(full))
        ticks = sorted({100 * point["share"] for own in named.values() for point in own})
        side.set_xticks(ticks, [f"1/{100 / tick:.0f}" for tick in ticks])
        side.minorticks_off()
        side.set_title(title, fontsize=10)
        side.set_xlabel("KV rows kept, of the full cache's bytes")
        side.set_ylim(-2, 103)
        side.legend(frameon=False, fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=3)
        plain(side)
    axes[0].set_ylabel("questions answered, %")
    figure.tight_layout()
    return figure


def language(plt, folder, _):
    runs = [results.read(path) for path in sorted(folder.glob("language_*.json"))]
    if not runs:
        return None
    named = {}
    for run in runs:
        named.setdefault(run["settings"]["text"], []).extend(point for point in run["points"] if "text_kl" in point)
    lengths = sorted({point["tokens"] for points in named.values() for point in points})
    plans = list(by([point for points in named.values() for point in points if point["plan"] != "full"], lambda point: point["plan"]))
    figure, axes = plt.subplots(1, len(lengths), figsize=(4.6 * len(lengths) + 1.4, 0.32 * len(plans) + 1.6), sharex=True, sharey=True,
                                squeeze=False)
    for side, length in zip(axes[0], lengths):
        for i, (name, points) in enumerate(sorted(named.items(), key=lambda item: (item[0] == "code", item[0]))):
            for y, plan in enumerate(plans):
                own = of(points, tokens=length, plan=plan)
                if not own:
                    continue
                mean, low, high = interval(own, lambda point: point["text_kl"])
                mean, low, high = (max(value, 1e-6) for value in (mean, low if low == low else mean, high if high == high else mean))
                side.errorbar([mean], [y + 0.16 * (i - 1.5)], xerr=[[mean - low], [high - mean]], fmt=MARKERS[i], capsize=2,
                              markersize=4, color=COLOURS[i], label=name if length == lengths[-1] and y == 0 else None)
        side.set_xscale("log")
        side.set_title(f"after texts of {length:,} tokens", fontsize=10)
        side.set_xlabel("KL divergence to the full cache, nats a token")
        plain(side)
    axes[0][0].set_yticks(range(len(plans)), plans, fontsize=8)
    axes[0][0].invert_yaxis()
    axes[0][-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    return figure


def rows(plt, folder, _):
    """A side for each bound: the medians of kinds of heads, and bands that hold eight of ten heads."""
    if not (folder / "rows_by_head.json").exists():
        return None
    found = json.loads((folder / "rows_by_head.json").read_text(encoding="utf-8"))
    epsilons = sorted({point["epsilon"] for point in found["points"]}, reverse=True)
    figure, axes = plt.subplots(1, len(epsilons), figsize=(4.4 * len(epsilons), 3.9), sharey=True, squeeze=False)
    kinds = [kind for kind in kinds_of_heads(found["gates"]).items() if kind[0] != "all"]
    for side, epsilon in zip(axes[0], epsilons):
        points = sorted(of(found["points"], epsilon=epsilon), key=lambda point: point["length"])
        lengths = [point["length"] for point in points]
        for i, (name, heads) in enumerate(kinds):
            tenths = [statistics.quantiles(shares_of(point, heads), n=10) for point in points]
            side.fill_between(lengths, [100 * cuts[0] for cuts in tenths], [100 * cuts[-1] for cuts in tenths], color=COLOURS[i],
                              alpha=0.15, linewidth=0)
            side.plot(lengths, [100 * statistics.median(shares_of(point, heads)) for point in points], color=COLOURS[i],
                      marker=MARKERS[i], markersize=5, linewidth=2, label=name)
        side.set_xscale("log", base=2)
        side.set_xticks(lengths, [f"{length / 1024:g}" for length in lengths])
        side.minorticks_off()
        side.set_xlabel("text, Ki tokens")
        side.set_title(f"at most {100 * epsilon:g} % of a query's attention unread", fontsize=10)
        plain(side)
    axes[0][0].set_ylim(0, 100)
    axes[0][0].set_ylabel("rows read, %")
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.tight_layout()
    return figure


def memory(plt, folder, _):
    """Bytes over length and over texts, and the time of a token over length as measured in examples/adopters."""
    if not (folder / "memory.json").exists():
        return None
    found = json.loads((folder / "memory.json").read_text(encoding="utf-8"))
    measured = folder.parent / "llama2c_smollm2.json"
    timed = json.loads(measured.read_text(encoding="utf-8"))["benchmarks"] if measured.exists() else []
    contexts = found["contexts"]
    texts = [1, 4, 16, 64, 256]
    figure, axes = plt.subplots(1, 3 if timed else 2, figsize=(11 if timed else 7.5, 3.9), squeeze=False)
    looks = {}
    for i, (plan, sizes) in enumerate(found["bytes"].items()):
        looks[plan_name(plan)] = {"color": COLOURS[i % 8], "marker": MARKERS[i % 8], "markersize": 5, "linewidth": 1.4}
        axes[0][0].plot(contexts, [size / 1e6 for size in sizes], **looks[plan_name(plan)], label=plan_name(plan))
        axes[0][1].plot(texts, [count * sizes[-1] / 1e9 for count in texts], **looks[plan_name(plan)])
    axes[0][0].set_xscale("log", base=2)
    axes[0][0].set_xticks(contexts, [f"{context / 1024:g}" for context in contexts])
    axes[0][0].set_xlabel("text, Ki tokens")
    axes[0][0].set_ylabel("cache of a text, MB")
    axes[0][0].legend(frameon=False, fontsize=8, loc="upper left")
    axes[0][1].set_xscale("log", base=2)
    axes[0][1].set_yscale("log")
    axes[0][1].set_xticks(texts, [f"{count}" for count in texts])
    axes[0][1].axhline(16, color="#777777", linewidth=1, linestyle=":")
    axes[0][1].annotate("16 GB", (texts[0], 16), xytext=(0, 3), textcoords="offset points", fontsize=8, color="#777777")
    axes[0][1].set_xlabel(f"texts of {contexts[-1]:,} tokens at once")
    axes[0][1].set_ylabel("caches together, GB")
    for name, plan in TIMED.items() if timed else ():
        own = sorted((case["rows"], case["ms"], case["ms_p10"], case["ms_p90"]) for case in timed
                     if case["name"] == name and case["rows"] > 0)
        axes[0][2].errorbar([rows for rows, *_ in own], [ms for _, ms, *_ in own], capsize=2, **looks.get(plan, {}),
                            yerr=[[ms - low for _, ms, low, _ in own], [high - ms for _, ms, _, high in own]])
        axes[0][2].set_xticks([rows for rows, *_ in own], [f"{rows:,}" for rows, *_ in own])
        axes[0][2].set_xlabel("text, tokens")
        axes[0][2].set_ylabel("time of a token, ms")
        axes[0][2].set_title("llama2.c with our cache, two cores", fontsize=9)
    for side in axes[0]:
        side.minorticks_off()
        plain(side)
    axes[0][-1].set_ylim(bottom=0 if timed else None)
    figure.tight_layout()
    return figure


# The cases of examples/adopters/llama2.c, and the plans they are.
TIMED = {"every row": "full", "int8": "int8", "int4": "int4", "duo": "duo:0.5", "duo, int4": "duo+int4:0.5"}

FIGURES = {"heads": heads, "gates": gates, "needles": needles, "budgets": budgets, "frontier": frontier, "language": language,
           "rows": rows, "memory": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.ROOT / "bench" / "results" / "smollm2")
    parser.add_argument("--weights", type=Path, default=results.ROOT / "reference_model" / "weights" / "smollm2")
    parser.add_argument("--out", type=Path, default=results.ROOT / "docs")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    arguments = parser.parse_args()
    save({f"smollm2_{name}": lambda plt, make=FIGURES[name]: make(plt, arguments.results, arguments.weights)
          for name in arguments.only}, arguments.out)


if __name__ == "__main__":
    main()
