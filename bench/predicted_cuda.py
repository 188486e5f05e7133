# SPDX-License-Identifier: Apache-2.0
"""What decoding should take on an H100, by the instructions of the kernels' loops (docs/gpu_instructions.md) and the bytes
that a case reads. A prediction: no device has confirmed it, and it says nothing of kernels whose loops are not counted.

A launch takes a fixed time and that of its loop, which is the longer one of two: rows come at a share of the memory's
nominal rate, and the loop's instructions fill a share of the issue slots. Each of the three is a range, from published
kernels of this kind; the ends of a prediction have all of them at the same end."""
import re
from pathlib import Path

GB_PER_S = 3352  # nominal
# (pessimistic, optimistic)
FIXED_US = (9, 4)
SHARE_OF_RATE = (0.88, 0.94)
SHARE_OF_SLOTS = (0.60, 0.75)


def loops(page=Path(__file__).parent.parent / "docs" / "gpu_instructions.md"):
    """{loop: (bytes of a row, share of the issue slots at the nominal rate)}, with one tile of columns on an H100"""
    found, columns = {}, None
    section = page.read_text(encoding="utf-8").split("## sm_90, decode, 1 tile", 1)[1].split("\n## ", 1)[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| loop"):
            columns = {name: at for at, name in enumerate(cells)}
        elif columns and len(cells) == len(columns) and not line.startswith("|--"):
            slots = float(re.match(r"([\d.]+) %", cells[columns["H100"]])[1]) / 100
            found[cells[0]] = (int(cells[columns["bytes"]]) / int(cells[columns["rows"]]), slots)
    return found


def microseconds(case, loop, end):
    """Of a case, [[heads, rows], ...], at the pessimistic (0) or optimistic (1) end; and at the nominal rate."""
    row_bytes, slots = loop
    nominal = sum(heads * rows for heads, rows in case) * row_bytes / GB_PER_S / 1000
    return FIXED_US[end] + nominal * max(1 / SHARE_OF_RATE[end], slots / SHARE_OF_SLOTS[end]), nominal


def predicted(goal, counted=None):
    """A cell of the table of goals; empty if the goal has no prediction."""
    if "predicted" not in goal:
        return ""
    asked, counted = goal["predicted"], counted or loops()
    ends = []
    for end in (0, 1):
        for case in asked["cases"]:
            taken, nominal = microseconds(case, counted[asked["loop"]], end)
            if "against" in asked:
                other = asked["against"]
                ends.append(microseconds(other["case"], counted[other["loop"]], end)[0] / taken)
            else:
                ends.append(100 * nominal / taken)
    unit = "x" if "against" in asked else " % of nominal"
    low, high = (f"{bound:.2f}" if "against" in asked else f"{bound:.0f}" for bound in (min(ends), max(ends)))
    return f"{low} to {high}{unit}"
