#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what one KV head keeps and what each query reads, under each policy: a row of the picture is a
query, a column is a row of the cache, both in the order of the text. And how segments come together.

  docs/draw_policies.py docs/pictures
"""
import os
import random
import sys
from xml.sax.saxutils import escape

TOKENS, PROMPT, CELL = 48, 32, 9
LEFT, TOP, SIDE = 46, 40, 250
# Told apart in grey as well; the darker, the more of a row is read.
READ, CODES, KEPT, GONE = "#1f4e79", "#5b9bd5", "#d6e6f5", "#ffffff"
INK, FAINT, MARK = "#222222", "#e4e4e4", "#c0392b"


class Picture:
    def __init__(self, width, height):
        self.width, self.height, self.parts = width, height, []

    def text(self, x, y, words, size=13, fill=INK, anchor="start", turn=None):
        turned = f' transform="rotate({turn} {x} {y})"' if turn is not None else ""
        self.parts.append(f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="{size}" fill="{fill}" '
                          f'text-anchor="{anchor}"{turned}>{escape(words)}</text>')

    def box(self, x, y, width, height, fill, edge=None):
        stroke = f' stroke="{edge}"' if edge else ""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"{stroke}/>')

    def line(self, x1, y1, x2, y2, stroke=INK, dash=None, arrow=False):
        extra = (f' stroke-dasharray="{dash}"' if dash else "") + (' marker-end="url(#arrow)"' if arrow else "")
        self.parts.append(f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{stroke}" fill="none"{extra}/>')

    def save(self, path):
        arrow = ('<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                 f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>')
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
                       f'viewBox="0 0 {self.width} {self.height}">\n{arrow}\n'
                       '<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(self.parts) + "\n</svg>\n")


def draw(path, title, state_of, legend, marks=()):
    """`state_of(query, row)` is a colour."""
    span = TOKENS * CELL
    picture = Picture(LEFT + span + SIDE, TOP + span + 16)
    picture.text(LEFT, 22, "rows of the text, oldest first", 12, "#666666")
    picture.text(LEFT - 30, TOP + span / 2, "queries, one a token", 12, "#666666", "middle", -90)
    cells = {}
    for query in range(TOKENS):
        for row in range(query + 1):
            corner = f"M{LEFT + row * CELL} {TOP + query * CELL}"
            cells.setdefault(state_of(query, row), []).append(f"{corner}h{CELL - 1}v{CELL - 1}h{1 - CELL}z")
    for colour, paths in cells.items():
        edge = f' stroke="{FAINT}"' if colour == GONE else ""
        picture.parts.append(f'<path fill="{colour}"{edge} d="{"".join(paths)}"/>')
    picture.line(LEFT - 8, TOP + PROMPT * CELL - 0.5, LEFT + span, TOP + PROMPT * CELL - 0.5, MARK, "4 3")
    picture.text(LEFT + span + 4, TOP + PROMPT * CELL + 4, "the prompt ends", 12, MARK)
    x, y = LEFT + 0.56 * span, TOP + 4
    for i, words in enumerate(title):
        picture.text(x, y + 18 * i + 12, words, 15 if i == 0 else 13)
    y = TOP + 18 * len(title) + 16
    for colour, words in legend:
        picture.box(x, y, 13, 13, colour, "#bbbbbb")
        picture.text(x + 20, y + 11, words)
        y += 20
    for query, words in marks:
        picture.text(LEFT + span + 4, TOP + query * CELL + 8, "← " + words, 12)
    picture.save(path)


def full(query, row):
    return READ


def sink_recent(query, row):
    return READ if row < 3 or row > query - 8 else GONE


def kept_by_budget(random_seed=4):
    """Rows that the last queries of the prompt look at: a few places, smoothed along the text."""
    generator = random.Random(random_seed)
    score = [generator.random() ** 6 for _ in range(PROMPT)]
    score[0] = 2.0
    pooled = [max(score[max(0, i - 1):i + 2]) for i in range(PROMPT)]
    best = sorted(range(PROMPT - 4), key=lambda row: -pooled[row])[:9]
    return set(best) | set(range(PROMPT - 4, PROMPT))


SURVIVORS = kept_by_budget()


def head_budget(query, row):
    return READ if query < PROMPT or row >= PROMPT or row in SURVIVORS else GONE


def chunk_retrieval(query, row):
    if query < PROMPT:
        return READ
    chosen = {0, 3, 5} if query < PROMPT + 9 else {0, 2, 8}
    since = PROMPT if query < PROMPT + 9 else PROMPT + 8
    return READ if row // 4 in chosen or row >= since else KEPT


def quantized(query, row):
    return READ if row > query - 9 else CODES


def segments(path):
    heads = [("full", [(150, 150, READ)], "one run of pages"),
             ("sinks and recent", [(150, 16, READ), (260, 40, READ)], "two runs, and how far each query reaches"),
             ("budget", [(150, 8, READ), (172, 6, READ), (204, 14, READ), (240, 60, READ)], "rows with a position each"),
             ("chunk retrieval", [(150, 24, READ), (196, 24, READ), (280, 20, READ)], "the chosen chunks, not copied"),
             ("quantised", [(150, 112, CODES), (264, 36, READ)], "two runs in two formats")]
    picture = Picture(940, 330)
    picture.text(16, 24, "each KV head's policy", 13, "#666666")
    picture.text(180, 24, "shows segments,", 13, "#666666")
    picture.text(690, 24, "an engine reads them", 13, "#666666")
    for i, (name, runs, words) in enumerate(heads):
        y = 44 + 40 * i
        picture.text(16, y + 14, name, 14)
        picture.box(180, y, 150, 20, GONE, FAINT)
        for x, width, colour in runs:
            picture.box(x + 30, y, width, 20, colour)
        picture.text(342, y + 14, words, 12, "#666666")
        picture.line(612, y + 10, 688, 126 + 7 * i, INK, None, True)
    picture.box(690, 100, 120, 80, "#f4f4f4", INK)
    picture.text(750, 136, "one engine,", 14, INK, "middle")
    picture.text(750, 154, "one softmax", 14, INK, "middle")
    picture.line(810, 140, 854, 140, INK, None, True)
    picture.text(862, 145, "out", 14)
    picture.text(16, 268, "the cache itself", 14)
    picture.box(180, 254, 64, 20, KEPT, "#bbbbbb")
    picture.text(190, 268, "tail", 12)
    picture.box(252, 254, 64, 20, KEPT, "#bbbbbb")
    picture.text(258, 268, "this call", 12)
    picture.text(342, 268, "rows that may still be taken back", 12, "#666666")
    picture.line(612, 264, 716, 184, INK, None, True)
    picture.text(16, 312, "Rows that leave the tail are committed: the policy keeps, quantises, summarises or drops them, "
                 "and never undoes it.", 13)
    picture.save(path)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    to = lambda name: os.path.join(folder, name + ".svg")
    draw(to("full"), ["Full:", "every row stays", "and is read"], full, [(READ, "kept and read")])
    draw(to("sink_recent"), ["Sinks and recent rows:", "memory does not grow"], sink_recent,
         [(READ, "kept and read"), (GONE, "gone, or out of reach")])
    draw(to("head_budget"), ["A budget:", "the prompt shrinks once,", "to what it looks at"], head_budget,
         [(READ, "kept and read"), (GONE, "gone")], [(PROMPT + 1, "compress()")])
    draw(to("chunk_retrieval"), ["Chunk retrieval:", "all is kept, little is read"], chunk_retrieval,
         [(READ, "kept and read"), (KEPT, "kept, not read")],
         [(PROMPT + 1, "chunks are chosen"), (PROMPT + 9, "and chosen again")])
    draw(to("quantized_residual"), ["Quantised, with a residual:", "all is read, few bits each"], quantized,
         [(READ, "exact"), (CODES, "2 to 8 bits")])
    segments(to("segments"))


if __name__ == "__main__":
    main()
