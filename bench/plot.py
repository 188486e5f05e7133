#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of docs/results.md from what ./scripts/reproduce has measured, and from the gates
and scores beside the shipped model's weights.

  needle_grids.png     passkeys found, by length and depth, side by side (DuoAttention's figure 6)
  gate_ablation.png    accuracy over the share of retrieval heads, by how they were found (its 7, 13)
  gates.png            the gates themselves, per layer and head (its 4)
  budget_accuracy.png  accuracy over rows per head (HeadKV's figure 3)
  head_scores.png      how the scores spread over the heads (its 4)
  frontier.png         accuracy over bytes: the best of all against single methods

  bench/plot.py --results bench/results --out docs [--only NAME...]
"""
import argparse
import json
import statistics
import sys
from pathlib import Path

import results
from results import by, name_of, of, over_seeds, setting_of, share

# Okabe and Ito's colours, which colour-blind readers can distinguish; markers differ as well.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"]
MARKERS = "osD^vP*X"


def plain(axes):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def families(names):
    """The colour and marker of a method, and whether its line is dashed because its setting was chosen."""
    first = {}
    return {name: (first.setdefault(name.split(", kernel")[0], len(first)), ", kernel" in name)
            for name in names}


def lines(axes, named, digits_of_x):
    """{name: [(x, mean, deviation)]}"""
    family = families(named)
    for name, points in named.items():
        i, chosen = family[name]
        points = sorted(points)
        x, mean, deviation = ([point[k] for point in points] for k in range(3))
        axes.errorbar(x, [100 * m for m in mean],
                      yerr=[0 if d != d else 100 * d for d in deviation], capsize=2, linewidth=1.6,
                      markersize=max(4, 11 - 1.5 * i), color=COLOURS[i % 8],
                      marker=MARKERS[i % 8], linestyle="--" if chosen else "-",
                      markerfacecolor="white" if chosen else None, label=name)  # sizes: all show where lines meet
    ticks = sorted({point[0] for points in named.values() for point in points})
    axes.set_xticks(ticks, [digits_of_x(tick) for tick in ticks])
    axes.minorticks_off()
    plain(axes)


def needle_grids(plt, folder):
    grid = of(results.load(folder / "needles.json"), suite="passkey")
    if not grid:
        return None
    full = of(grid, method="full")
    lengths = sorted({p["tokens"] for p in grid})
    depths = json.loads((folder / "needles.json").read_text())["settings"]["depths"]
    methods = list(dict.fromkeys(name_of(p) for p in grid if p["method"] != "full"))
    shares = sorted({p["share"] for p in grid if "share" in p}, reverse=True)

    def cells(own):
        """[depth][length]: share found."""
        found = [[[] for _ in lengths] for _ in range(depths)]
        for point in own:
            for i, mark in enumerate(point["marks"]):
                found[i % depths][lengths.index(point["tokens"])].append(mark == "1")
        return [[statistics.fmean(cell) if cell else float("nan") for cell in row] for row in found]

    columns = ["full"] + methods
    figure, axes = plt.subplots(len(shares), len(columns), figsize=(1.75 * len(columns) + 0.8,
                                2.1 * len(shares) + 0.9), sharex=True, sharey=True, squeeze=False)
    image = None
    for r, budget in enumerate(shares):
        for c, method in enumerate(columns):
            side = axes[r][c]
            own = full if method == "full" else [
                p for p in of(grid, name=method) if p.get("share", budget) == budget]
            if not own:
                side.set_axis_off()
                continue
            image = side.imshow([[100 * x for x in row] for row in cells(own)], vmin=0, vmax=100,
                                cmap="cividis", aspect="auto")
            kept = 100 * results.bytes_share(own, full)
            side.set_title(method.replace(", ", ",\n", 1) + f"\n{kept:.0f} % of rows, "
                           f"{100 * over_seeds(own, share)[0]:.0f} % found", fontsize=8)
            side.set_xticks(range(len(lengths)), [f"{length / 1024:g}" for length in lengths],
                            fontsize=7)
            side.set_yticks([0, depths - 1], ["5 %", "95 %"], fontsize=7)
        axes[r][0].set_ylabel("depth in the text", fontsize=8)
    for side in axes[-1]:
        side.set_xlabel("text, Ki bytes", fontsize=8)
    figure.suptitle("Which passkeys are found at equal KV bytes", fontsize=11)
    figure.tight_layout(rect=(0, 0, 0.92, 1))
    bar = figure.colorbar(image, cax=figure.add_axes((0.93, 0.16, 0.012, 0.62)))
    bar.set_label("passkeys found, %", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def gate_ablation(plt, folder):
    keys = of(results.load(folder / "gates.json"), suite="keys")
    if not keys:
        return None
    lengths = sorted({p["tokens"] for p in keys})
    figure, axes = plt.subplots(1, len(lengths), figsize=(4.4 * len(lengths) + 3, 4), sharey=True,
                                squeeze=False)
    for side, length in zip(axes[0], lengths):
        here = of(keys, tokens=length)
        named, chance = {}, {}
        for point in here:
            if not point["method"].startswith("duo@"):
                continue
            heads = 100 * (1 - setting_of(point)[0])
            into = chance if name_of(point).startswith("random") else named
            into.setdefault("random plans" if into is chance else name_of(point), {}) \
                .setdefault(heads, []).append(point)
        lines(side, {name: [(x, *over_seeds(own, share)) for x, own in at.items()]
                     for name, at in named.items()}, lambda x: f"{x:g}")
        for at in chance.values():
            for x, own in at.items():
                side.plot([x] * len(by(own, name_of)), [100 * over_seeds(plan, share)[0]
                          for plan in by(own, name_of).values()], "_", color="#777777",
                          markersize=9, label="random plans, one mark each" if x == max(at) else None)
        side.axhline(100 * over_seeds(of(here, method="full"), share)[0], color="#777777",
                     linewidth=1, linestyle="--", label="full cache")
        side.set_title(f"texts of {length:,} bytes", fontsize=10)
        side.set_xlabel("KV heads that keep the whole text, %")
        side.set_ylim(-2, 103)
        side.tick_params(axis="x", labelrotation=45, labelsize=8)
    axes[0][0].set_ylabel("questions answered exactly, %")
    axes[0][-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle("How few heads have to keep the text, by how they were chosen", fontsize=11)
    figure.tight_layout()
    return figure


def read_gates(path):
    return [[float(x) for x in line.split()] for line in path.read_text().splitlines()
            if line.strip() and not line.startswith("#")]


def gates(plt, _):
    found = {label: read_gates(results.WEIGHTS / folder / "full_attention_heads.tsv")
             for folder, label in results.GATES.items()
             if (results.WEIGHTS / folder / "full_attention_heads.tsv").exists()}
    figure, axes = plt.subplots(1, len(found), figsize=(max(5, 2.05 * len(found) + 1), 2.7), squeeze=False)
    image = None
    for side, (label, table) in zip(axes[0], found.items()):
        image = side.imshow([[min(1, max(0, gate)) for gate in row] for row in table], vmin=0,
                            vmax=1, cmap="cividis")
        for layer, row in enumerate(table):
            for head, gate in enumerate(row):
                side.text(head, layer, f"{min(1, max(0, gate)):.2f}", ha="center", va="center",
                          fontsize=6.5, color="black" if gate > 0.55 else "white")
        side.set_title(label.replace(", ", ",\n"), fontsize=8)
        side.set_xticks(range(len(table[0])))
        side.set_yticks(range(len(table)))
        side.tick_params(labelsize=7)
        side.set_xlabel("KV head", fontsize=8)
    axes[0][0].set_ylabel("layer", fontsize=8)
    figure.suptitle("Gates of the shipped model: 1 keeps the text, 0 streams", fontsize=10)
    figure.tight_layout(rect=(0, 0, 0.94, 1))
    figure.colorbar(image, cax=figure.add_axes((0.95, 0.24, 0.012, 0.45))).ax.tick_params(labelsize=7)
    return figure


def budget_accuracy(plt, folder):
    points = results.load(folder / "budgets.json")
    if not points:
        return None
    panels = [("keys", "1", "keys: answered exactly"),
              ("reasoning", "1o", "two-step: the key of one of the two")]
    panels = [panel for panel in panels if of(points, suite=panel[0])]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels) + 2.2, 4), sharey=True,
                                squeeze=False)
    for side, (suite, marks, title) in zip(axes[0], panels):
        own = of(points, suite=suite)
        value = lambda point: share(point, marks)
        named = {}
        for name, mine in by([p for p in own if len(setting_of(p)) == 1], name_of).items():
            named[name] = [(rows, *over_seeds(at, value))
                           for rows, at in by(mine, lambda p: setting_of(p)[0]).items()]
        side.set_xscale("log", base=2)
        lines(side, named, lambda x: f"{x:g}")
        side.axhline(100 * over_seeds(of(own, method="full"), value)[0], color="#777777",
                     linewidth=1, linestyle="--", label="full cache")
        side.set_title(title, fontsize=10)
        side.set_xlabel("rows kept per KV head, on average")
        side.set_ylim(-2, 103)
    axes[0][0].set_ylabel("questions, %")
    axes[0][-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle("Few rows answer if they go to the heads that look things up", fontsize=11)
    figure.tight_layout()
    return figure


def head_scores(plt, _):
    found = {}
    for stem, label in results.SCORES.items():
        path = results.WEIGHTS / "headkv" / f"{stem}.json"
        if path.exists():
            means = [statistics.fmean(samples) for samples in json.loads(path.read_text()).values()]
            total = sum(means)
            found[label] = sorted((100 * mean / total for mean in means), reverse=True)
    figure, side = plt.subplots(figsize=(6.4, 3.6))
    for i, (label, shares) in enumerate(found.items()):
        side.plot(range(1, len(shares) + 1), shares, color=COLOURS[i], marker=MARKERS[i],
                  markersize=4, linewidth=1.6, label=label)
    side.set_xlabel("query heads, highest score first")
    side.set_ylabel("share of all heads' score, %")
    side.legend(frameon=False, fontsize=9)
    side.set_title("A few of the heads have most of the score", fontsize=11)
    plain(side)
    figure.tight_layout()
    return figure


def frontier(plt, folder):
    keys = of(results.load(folder / "combined.json"), suite="keys")
    if not keys:
        return None
    full = of(keys, method="full")
    named = {}
    for plan, own in by([p for p in keys if p["method"] != "full"],
                        lambda p: (name_of(p), p.get("share"), p["plan"] if "share" not in p
                                   else "")).items():
        named.setdefault(plan[0], []).append((100 * results.bytes_share(own, full),
                                           *over_seeds(own, share)))
    figure, side = plt.subplots(figsize=(8.6, 4.6))
    side.set_xscale("log", base=2)
    order = sorted(named, key=lambda name: name != "plan search")
    family = families(order)
    for name in order:
        i, chosen = family[name]
        points = sorted(named[name])
        strong = name == "plan search"
        side.errorbar([p[0] for p in points], [100 * p[1] for p in points],
                      yerr=[0 if p[2] != p[2] else 100 * p[2] for p in points], capsize=2,
                      color=COLOURS[i % 8], marker=MARKERS[i % 8], markersize=5,
                      markerfacecolor=[COLOURS[i % 8], "white"][i // 8 % 2],
                      linestyle=":" if chosen else ["-", "--"][i // 8 % 2], linewidth=2.6 if strong else 1.3,
                      zorder=3 if strong else 2, label=name)
    side.axhline(100 * over_seeds(full, share)[0], color="#777777", linewidth=1, linestyle=":",
                 label="full cache")
    ticks = [tick for tick in (1.5625, 3.125, 6.25, 12.5, 25, 50, 100)]
    side.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    side.minorticks_off()
    side.set_xlabel("KV rows kept, % of the full cache's bytes")
    side.set_ylabel("questions answered exactly, %")
    side.set_ylim(-2, 103)
    side.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    side.set_title("The searched plan keeps the answers down to a 32nd of the bytes", fontsize=11)
    plain(side)
    figure.tight_layout()
    return figure


FIGURES = {"needle_grids": needle_grids, "gate_ablation": gate_ablation, "gates": gates,
           "budget_accuracy": budget_accuracy, "head_scores": head_scores, "frontier": frontier}


def save(figures, folder):
    """Writes {name: function of pyplot} as PNG; a function that returns None has nothing to draw."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("matplotlib is missing: apt-get install python3-matplotlib, or pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in figures.items():
        figure = make(plt)
        if figure is None:
            continue
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=100, metadata={"Software": None})
        plt.close(figure)
        size = path.stat().st_size
        print(f"wrote {path}, {size / 1000:.0f} kB")
        if size > 150_000:
            sys.exit(f"{path} is larger than 150 kB")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.ROOT / "bench" / "results")
    parser.add_argument("--out", type=Path, default=results.ROOT / "docs")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    arguments = parser.parse_args()
    save({name: lambda plt, make=FIGURES[name]: make(plt, arguments.results) for name in arguments.only}, arguments.out)


if __name__ == "__main__":
    main()
