#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a run of triforce_generate: each token in the colour of who proposed it, and a bracket
below the tokens that one pass of the target over all rows let stand.

  build/release/examples/triforce_generate --json > run.json
  docs/draw_tokens.py run.json docs/triforce_run.svg
"""
import json
import sys
from xml.sax.saxutils import escape

WIDTH, MARGIN = 880, 16
CELL, LINE, GAP = 11, 38, 6
# From the target to the lowest draft; told apart in grey as well.
SHADES = ["#8c2d6e", "#f0b93a", "#cfe6f5"]
PROPOSERS = {"draft": "proposed by the draft", "selected": "by the target over selected rows",
             "target": "the target's own"}
INK = ["#ffffff", "#222222", "#222222"]


def shade_of(level, proposers):
    """The target, the lowest draft, or who stands between them."""
    return 0 if level == 0 else 2 if level == proposers - 1 else 1


class Picture:
    def __init__(self):
        self.parts = []
        self.y = MARGIN

    def text(self, x, y, string, fill="#222222", size=14, family="sans-serif"):
        self.parts.append(f'<text x="{x}" y="{y}" font-family="{family}" font-size="{size}" '
                          f'fill="{fill}" xml:space="preserve">{escape(string)}</text>')

    def box(self, x, y, width, height, fill):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>')

    def legend(self, proposers):
        x = MARGIN
        for level in reversed(range(len(proposers))):
            self.box(x, self.y, 16, 16, SHADES[shade_of(level, len(proposers))])
            self.text(x + 22, self.y + 13, PROPOSERS.get(proposers[level], proposers[level]))
            x += 50 + 7 * len(PROPOSERS.get(proposers[level], proposers[level]))
        self.parts.append(f'<path d="M{x} {self.y + 4} v4 h60 v-4" fill="none" stroke="#222222"/>')
        self.text(x + 68, self.y + 13, "one pass over all rows")
        self.y += 38

    def steps(self, steps, proposers):
        x = MARGIN
        for step in steps:
            width = CELL * len(step["tokens"])
            if x + width > WIDTH - MARGIN:
                x, self.y = MARGIN, self.y + LINE
            for place, (token, level) in enumerate(zip(step["tokens"], step["levels"])):
                shade = shade_of(level, proposers)
                self.box(x + CELL * place, self.y, CELL - 1, 20, SHADES[shade])
                shown = chr(token) if 32 < token < 127 else " "
                self.text(x + CELL * place + 1, self.y + 15, shown, INK[shade], 15, "monospace")
            self.parts.append(f'<path d="M{x} {self.y + 23} v4 h{width - 1} v-4" fill="none" '
                              'stroke="#222222"/>')
            x += width + GAP
        self.y += LINE

    def svg(self):
        height = self.y + MARGIN
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
                f'viewBox="0 0 {WIDTH} {height}">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
                + "\n".join(self.parts) + "\n</svg>\n")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        run = json.load(file)
    picture = Picture()
    picture.legend(run["proposers"])
    for turn in run["turns"]:
        said = turn.get("question") or f"... {turn['prompt_tokens']:,} bytes of text, which goes on:"
        picture.text(MARGIN, picture.y + 12, said.strip(), "#666666", 14)
        picture.y += 22
        picture.steps(turn["steps"], len(run["proposers"]))
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(picture.svg())


if __name__ == "__main__":
    main()
