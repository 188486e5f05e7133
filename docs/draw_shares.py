#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what `identify_heads shares` found of a model's heads, a picture each: the share of its rows that a head reads
under a bound, and the share of a later query's attention that falls on rows dropped before the question was known.

  docs/draw_shares.py reference_model/weights/smollm2/shares docs/pictures
"""
import json
import os
import sys

CELL, LEFT, TOP = 25, 58, 62
INK, FAINT = "#222222", "#666666"
LIGHT, DARK = (0xf3, 0xf7, 0xfb), (0x1f, 0x4e, 0x79)
PICTURES = {
    "rows_read": "rows that a head reads in full under a bound of 5 %, in % of its rows in halves",
    "lost": "attention of later queries to rows that a head dropped without a question (256 of 2,048 kept), in %",
}


def means(path):
    """[layer][head], the mean over the texts."""
    with open(path, encoding="utf-8") as file:
        samples = json.load(file)
    table = {}
    for key, values in samples.items():
        layer, head = map(int, key.split("-"))
        table.setdefault(layer, {})[head] = sum(values) / len(values)
    return [[table[layer][head] for head in sorted(table[layer])] for layer in sorted(table)]


def colour(share):
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(LIGHT, DARK))


def draw(table, title, path):
    layers, heads = len(table), len(table[0])
    width, height = LEFT + layers * CELL + 10, TOP + heads * CELL + 10

    def text(x, y, words, size=12, fill=INK, anchor="middle"):
        return (f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="{size}" fill="{fill}" '
                f'text-anchor="{anchor}">{words}</text>')

    parts = [text(10, 20, title, 14, INK, "start"), text(10, TOP - 8, "layer", 11, FAINT, "start")]
    for head in range(heads):
        parts.append(text(10, TOP + head * CELL + 17, f"head {head}", 11, FAINT, "start"))
    for layer in range(layers):
        x = LEFT + layer * CELL
        parts.append(text(x + CELL / 2, TOP - 8, str(layer), 11, FAINT))
        for head in range(heads):
            share, y = table[layer][head], TOP + head * CELL
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{colour(share)}"/>')
            parts.append(text(x + CELL / 2 - 0.5, y + 16, f"{100 * share:.0f}", 11, "#ffffff" if share > 0.5 else INK))
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                   f'viewBox="0 0 {width} {height}">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
                   + "\n".join(parts) + "\n</svg>\n")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    for name, title in PICTURES.items():
        draw(means(os.path.join(sys.argv[1], f"{name}.json")), title, os.path.join(sys.argv[2], f"{name}.svg"))


if __name__ == "__main__":
    main()
