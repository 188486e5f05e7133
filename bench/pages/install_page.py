# SPDX-License-Identifier: Apache-2.0
"""The table of docs/install.md that says what compiling costs, from scripts/compile-cost --consumers --out."""
import json

from .markdown import table


def compile_cost(path):
    results = json.loads(path.read_text(encoding="utf-8"))
    context = results["context"]
    beside = context.get("beside")
    rows = [[f"[{case['name']}](../{case['source']})", f"`{case['flags']}`", f"{case['seconds']:.1f} s", f"{case['mb']} MB",
             *before(case, beside)] for case in results["cases"]]
    heads = ["a file with", "flags", "user seconds", "peak memory"] + ([f"all in it at {beside}"] if beside else [])
    in_turn = f"; a file as it is, in turn with the headers of {beside}" if beside else ""
    return (f"{context['compiler']} on {context['cpu']}, {context['date']}: medians of {context['runs']} and the most memory{in_turn}."
            f"\n\n" + table(heads, rows, left=2))


def before(case, beside):
    if not beside:
        return []
    if "before" not in case:
        return [""]
    return [f"{case['before']['seconds']:.1f} s, {case['before']['mb']} MB: {case['ratio']:.2f}"]


TABLES = {"compile_cost": (["compile_cost.json"], compile_cost)}
