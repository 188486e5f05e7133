# SPDX-License-Identifier: Apache-2.0
"""Tables and cells as Markdown, for the pages of bench/tables.py."""
import math


def table(titles, rows, left=1):
    """The first `left` columns are text, the others numbers."""
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * left + "---:|" * (len(titles) - left)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def cell(mean_and_deviation, unit=100, digits=1, sign=False):
    mean, deviation = mean_and_deviation
    if math.isnan(mean):
        return "-"
    text = f"{mean * unit:{'+' if sign else ''}.{digits}f}"
    return text if math.isnan(deviation) else f"{text} ± {deviation * unit:.{digits}f}"
