#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/smollm2_low_bits.png from what bench/low_bits/measure.py has measured: the KL divergence to the full cache over
the bits of a number, a mark for each kind of format; bars are 95 % intervals by bootstrap over texts.
Formats that were measured on fewer than ten texts are hollow and have none.

  bench/plot_low_bits.py --results bench/results/smollm2 --out docs
"""
import argparse
from pathlib import Path

import results
from pages.low_bits_page import FEW, GOALS, formats_of, kl
from plot import COLOURS, MARKERS, plain, save

# Written beside their marks; the others are in the table.
NAMED = {"q4_0": "q4_0", "q4_0, rotated (llama.cpp)": "q4_0, rotated", "KIVI-2": "KIVI-2", "int8": "int8",
         "TurboQuant, 4 bits": "TurboQuant", "NVFP4": "NVFP4", "MXFP4": "MXFP4",
         "k8, v4": "k8, v4", "k4 per channel, rotated, v4 rotated": "k4 v4", "k3 per channel, rotated, v3 rotated": "k3 v3", "k2 per channel, rotated, v2 rotated; levels for the values": "k2 v2",
         "fp8 e4m3, a scale a head": "fp8", "int2, groups of 32": "int2", "int3": "int3"}


def low_bits(plt, folder):
    run = results.read(folder / "low_bits.json")
    if not run:
        return None
    points = {name: point for name, point in formats_of(run).items() if (point["sinks"], point["residual"]) == (4, 32)
              and "as published" not in name}
    figure, side = plt.subplots(figsize=(8.6, 5.0))
    side.set_yscale("log")
    families = {}
    for name, point in points.items():
        families.setdefault(point["family"], []).append(name)
    for k, (family, names) in enumerate(sorted(families.items())):
        for few in (False, True):
            here = [name for name in names if (len(points[name]["texts"]) < FEW) == few]
            found = [kl(points[name]) for name in here]
            side.errorbar([points[name]["bits"] for name in here], [mean for mean, _, _ in found],
                          yerr=None if few else [[mean - low for mean, low, _ in found], [high - mean for mean, _, high in found]],
                          fmt=MARKERS[k % 8], capsize=2, markersize=6, linewidth=1, color=COLOURS[k % 8], markerfacecolor="white" if few else None,
                          label=None if few and len(here) < len(names) else family if here else None)
    if families.get("widths per head"):
        names = sorted(families["widths per head"], key=lambda name: points[name]["bits"])
        k = sorted(families).index("widths per head")
        side.plot([points[name]["bits"] for name in names], [kl(points[name])[0] for name in names], linewidth=1, linestyle="--", color=COLOURS[k % 8])
    for name, text in NAMED.items():
        if name in points:
            side.annotate(text, (points[name]["bits"], kl(points[name])[0]), xytext=(7, -9) if text == "q4_0, rotated" else (7, 2), textcoords="offset points", fontsize=7, color="#444444")
    for bits, other, part in GOALS:
        if other in points:
            side.plot([bits - 0.28, bits + 0.02], [part * kl(points[other])[0]] * 2, color="#000000", linewidth=2, solid_capstyle="butt",
                      label="goal: below the bar" if bits == GOALS[0][0] else None)
    side.set_xlabel("bits of a number, with scales and zeros")
    side.set_ylabel("KL divergence to the full cache, nats a token")
    side.plot([], [], "o", markerfacecolor="white", color="#777777", label="hollow: 3 to 6 texts, no interval")
    side.legend(frameon=False, fontsize=8, loc="upper right")
    plain(side)
    figure.tight_layout()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.ROOT / "bench" / "results" / "smollm2")
    parser.add_argument("--out", type=Path, default=results.ROOT / "docs")
    arguments = parser.parse_args()
    save({"smollm2_low_bits": lambda plt: low_bits(plt, arguments.results)}, arguments.out)


if __name__ == "__main__":
    main()
