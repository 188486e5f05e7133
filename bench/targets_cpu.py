#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares a file of attention_cpu_bench's results, with all threads, with the goals of the CPU engine
(bench/targets_cpu.json). bench/tables.py makes the table of docs/performance.md from the same goals and
verdicts.

  bench/targets_cpu.py bench/results/cpu_amd_epyc_2core.json

If a goal covers several cases, the worst one counts; if a file has repetitions, their median counts.
"""
import argparse
import json
import re
import statistics
from pathlib import Path

from results_cpu import facts, load, load_repetitions, number

GOALS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# A missed goal within this share of its limit is "just missed".
NEARLY = 0.05


def sign_of(goal):
    return 1 if "at_least" in goal else -1


def limit_of(goal, context):
    """The limit of a goal; it is lower where the build has only AVX2."""
    if context.get("target") == "AVX2" and "at_least_avx2" in goal:
        return goal["at_least_avx2"]
    return goal["at_least"] if "at_least" in goal else goal["at_most"]


def quantity(value, goal, limit):
    """11.99x, 80.2 %: with enough digits to show the difference from the limit."""
    text = number(value) if number(value) != number(limit) or value == limit else number(value, 4)
    unit = goal["unit"].split(" ")[0]
    return text + (unit if unit == "x" else " " + unit)


def wanted(goal):
    """The goal as text."""
    text = f"at least {number(goal['at_least'])}" if "at_least" in goal else f"at most {number(goal['at_most'])}"
    text += goal["unit"] if goal["unit"].startswith("x") else " " + goal["unit"]
    notes = [f"limit {goal['limit']}"] if "limit" in goal else []
    if "at_least_avx2" in goal:
        notes.append(f"{number(goal['at_least_avx2'])}x where only AVX2 exists")
    if "with" in goal:
        notes.append(f"with {goal['with']}")
    return text + (f" ({'; '.join(notes)})" if notes else "")


def value_of(cases, name, entry, counter):
    """A counter, or a ratio to a case of the same run."""
    if counter.startswith("over_"):  # the time of another policy
        kind, _, rest = name.split("/", 2)
        other = cases.get(f"{kind}/{counter.removeprefix('over_')}/{rest}", {})
        return entry["ms"] / other["ms"] if "ms" in other else None
    if counter == "best_over_1000":
        other = cases.get(name.replace("/1000000/", "/1000/"), {})
        return entry["ms_best"] / other["ms_best"] if "ms_best" in other else None
    return entry.get(counter)


def threads_of(name):
    return int(name.rsplit(":", 1)[1]) if "/threads:" in name else 1


def measured(goal, runs):
    """{case: ([value of each run], [milliseconds of each run])} with the largest number of threads."""
    most = max((threads_of(name) for cases in runs for name in cases), default=1)
    found = {}
    for cases in runs:
        for name, entry in cases.items():
            if "ms" in entry and re.fullmatch(rf"{goal['cases']}/threads:{most}", name):
                value = value_of(cases, name, entry, goal["counter"])
                if value is not None:
                    values, times = found.setdefault(name.rsplit("/", 1)[0], ([], []))
                    values.append(value)
                    times.append(entry["ms"])
    return found


def verdict(goal, value, context):
    if goal.get("with", context.get("prompts_in")) != context.get("prompts_in"):
        return f"not judged, no {goal['with']} here"
    limit, sign = limit_of(goal, context), sign_of(goal)
    if sign * value >= sign * limit:
        return "met"
    return "**just missed**" if abs(value - limit) <= NEARLY * limit else "**missed**"


def milliseconds(time):
    return f"{number(time)} ms" if time < 1000 else f"{number(time / 1000)} s"


def cell(goal, context, runs):
    """How a file's runs meet a goal, as text; None if they did not measure it."""
    found = {case: (statistics.median(values), values, statistics.median(times))
             for case, (values, times) in measured(goal, runs).items()}
    if not found:
        return None
    worst = (min if sign_of(goal) > 0 else max)(found, key=lambda case: found[case][0])
    value, values, time = found[worst]
    text = quantity(value, goal, limit_of(goal, context))
    if len(values) > 1:
        text += f" ({number(min(values))} to {number(max(values))})"
    said = verdict(goal, value, context)
    if len(found) == 1:
        return f"{text}, {milliseconds(time)}: {said}"
    where = worst.split("/", 1)[1]
    misses = sum(verdict(goal, value, context) != "met" for value, _, _ in found.values())
    return f"{text} in the worst of {len(found)} cases ({where}): {said}" + (f" in {misses}" if misses else "")


def table(context, runs):
    lines = ["| what | to reach | reached |", "|---|---|---|"]
    for goal in GOALS:
        lines.append(f"| {goal['what']} | {wanted(goal)} | {cell(goal, context, runs) or 'not measured'} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="JSON of attention_cpu_bench")
    args = parser.parse_args()
    print(facts(*load(args.results)) + "\n")
    print("\n".join(table(*load_repetitions(args.results))))


if __name__ == "__main__":
    main()
