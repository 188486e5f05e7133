# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/triforce.md, from the measurements of ./scripts/bench-triforce."""
import json
import re
import sys

from .markdown import table

KINDS = {"prose": "goes on with a text", "needles": "answers questions about it"}
SHIPPED = re.compile(r"structure/(?P<structure>[^/]+)/(?P<kind>[^/]+)/t(?P<temperature>[\d.]+)")
SHAPES = re.compile(r"shapes/target:(?P<target>\d+)/middle:(?P<middle>\d+)/length:(?P<length>\d+)")


def load(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as why:
        sys.exit(f"{path} is not what a bench writes: {why}")


def machine(context):
    name = re.sub(r"\s+", " ", context.get("cpu", "an unknown processor"))
    return f"{name}, {context['num_cpus']} cores, {context['date'][:10]}"


def cases(results, pattern):
    """(fields of the name, counters) of each case that was measured."""
    for case in results["benchmarks"]:
        found = pattern.match(case["name"])
        if found and "speedup" in case:
            yield found.groupdict(), case


def times(case):
    """The time of a token, and the speedup: median, range, prediction."""
    return [f"{case['plain_ms']:.2f}", f"{case['ms']:.2f}",
            f"{case['speedup']:.2f} ({case['speedup_min']:.2f} to {case['speedup_max']:.2f})",
            f"{case['predicted']:.2f}"]


TIMES = ["plain, ms a token", "with guesses", "times as fast (range)", "predicted"]


def shipped(path):
    """The shipped model with every structure of drafts."""
    results = load(path)
    rows = []
    for name, case in cases(results, SHIPPED):
        middle = case.get("middle_acceptance")
        rows.append([f"`{name['structure']}`", KINDS[name["kind"]], name["temperature"],
                     f"{case['acceptance']:.3f}", "" if middle is None else f"{middle:.3f}",
                     f"{case['tokens_per_verification']:.2f}"] + times(case))
    titles = ["structure", "text", "temperature", "accepted", "of the small draft's", "tokens a pass"]
    text = int(results["context"]["text"])
    return (f"After {text:,} bytes; {machine(results['context'])}.\n\n" + table(titles + TIMES, rows))


def shapes(path):
    """A model of Llama-2-7B's proportions, whose draft tokens are accepted at random."""
    results = load(path)
    rows = []
    for name, case in cases(results, SHAPES):
        middle = int(name["middle"])
        rows.append([f"{int(name['target']) / 1000:.3f}",
                     f"{middle / 1000:.2f}" if middle else "no small draft", name["length"],
                     f"{case['tokens_per_verification']:.2f}"] + times(case))
    context = results["context"]
    titles = ["target accepts", "middle level accepts", "γ", "tokens a pass"]
    return (f"After {int(context['context']):,} rows, {int(context['budget']):,} of them selected; "
            f"{machine(context)}.\n\n" + table(titles + TIMES, rows))


TABLES = {"triforce_shipped": (["triforce_shipped.json"], shipped),
          "triforce_shapes": (["triforce_shapes.json"], shapes)}
