# SPDX-License-Identifier: Apache-2.0
"""The table of docs/install.md that says what compiling costs, from scripts/compile-cost --consumers --out."""
import json

from .markdown import table


def compile_cost(path):
    results = json.loads(path.read_text(encoding="utf-8"))
    context = results["context"]
    rows = [[case["name"], f"[`{case['source'].removeprefix('tests/consumer/')}`](../{case['source']})", f"`{case['flags']}`",
             f"{case['seconds']:.1f} s", f"{case['mb']} MB"] for case in results["cases"]]
    return (f"{context['compiler']} on {context['cpu']}, {context['date']}.\n\n"
            + table(["a file with", "source", "flags", "user seconds", "peak memory"], rows, left=3))


TABLES = {"compile_cost": (["compile_cost.json"], compile_cost)}
