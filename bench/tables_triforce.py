#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/triforce.md, between its <!-- name --> and <!-- /name --> markers, from what
./scripts/bench-triforce has measured, with its picture where that lies beside the page. Text outside the
markers is left alone; what was not measured stays as it is.

  bench/tables_triforce.py --results bench/results --page docs/triforce.md
"""
import argparse
import json
import re
import sys
from pathlib import Path

from tables import table

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"prose": "goes on with a text", "needles": "answers questions about it"}
SHIPPED = re.compile(r"structure/(?P<structure>[^/]+)/(?P<kind>[^/]+)/t(?P<temperature>[\d.]+)")
SHAPES = re.compile(r"shapes/target:(?P<target>\d+)/middle:(?P<middle>\d+)/length:(?P<length>\d+)")


def machine(context):
    name = re.sub(r"\s+", " ", context.get("cpu", "an unknown processor"))
    return f"{name}, {context['num_cpus']} cores, {context['date'][:10]}"


def cases(results, pattern):
    """(what the name says, counters) of each case that was measured."""
    for case in results["benchmarks"]:
        found = pattern.match(case["name"])
        if found and "speedup" in case:
            yield found.groupdict(), case


def times(case):
    """What a token took, and how many times as fast that is: median, range, prediction."""
    return [f"{case['plain_ms']:.2f}", f"{case['ms']:.2f}",
            f"{case['speedup']:.2f} ({case['speedup_min']:.2f} to {case['speedup_max']:.2f})",
            f"{case['predicted']:.2f}"]


TIMES = ["plain, ms a token", "with guesses", "times as fast (range)", "predicted"]


def shipped(results):
    rows = []
    for name, case in cases(results, SHIPPED):
        middle = case.get("middle_acceptance")
        rows.append([f"`{name['structure']}`", KINDS[name["kind"]], name["temperature"],
                     f"{case['acceptance']:.3f}", "" if middle is None else f"{middle:.3f}",
                     f"{case['tokens_per_verification']:.2f}"] + times(case))
    titles = ["structure", "text", "temperature", "accepted", "of the small draft's", "tokens a pass"]
    text = int(results["context"]["text"])
    return (f"Behind {text:,} bytes; {machine(results['context'])}.\n\n" + table(titles + TIMES, rows))


def shapes(results):
    rows = []
    for name, case in cases(results, SHAPES):
        middle = int(name["middle"])
        rows.append([f"{int(name['target']) / 1000:.3f}",
                     f"{middle / 1000:.2f}" if middle else "no small draft", name["length"],
                     f"{case['tokens_per_verification']:.2f}"] + times(case))
    context = results["context"]
    titles = ["target accepts", "middle level accepts", "γ", "tokens a pass"]
    return (f"Behind {int(context['context']):,} rows, {int(context['budget']):,} of them selected; "
            f"{machine(context)}.\n\n" + table(titles + TIMES, rows))


PICTURE = "triforce_acceptance.png"
CAPTION = ("How often the target accepts what it guessed itself over selected rows, by how many these are and "
           "by how many stand together")

TABLES = {"triforce-shipped": ("triforce_shipped.json", shipped),
          "triforce-shapes": ("triforce_shapes.json", shapes)}


def load(path):
    """None, and a line on stderr, if it is not there."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        print(f"{path} is not there: what is made of it stays as it is", file=sys.stderr)
        return None
    except ValueError as why:
        sys.exit(f"{path} is not what a bench writes: {why}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "triforce.md")
    parser.add_argument("--out", type=Path, help="write there instead of over the page")
    arguments = parser.parse_args()
    page = arguments.page.read_text(encoding="utf-8")
    for name, (file, make) in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(page):
            sys.exit(f"{arguments.page} has no <!-- {name} --> … <!-- /{name} -->")
        results = load(arguments.results / file)
        if results is not None:
            text = make(results)
            if make is shipped and (arguments.page.parent / PICTURE).exists():
                text += f"\n\n![{CAPTION}]({PICTURE})"
            page = pattern.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)
    (arguments.out or arguments.page).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
