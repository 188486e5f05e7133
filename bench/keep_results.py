#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Copies the results of a bench to where they are committed: its context says which machine it was, without host
name and paths. The cases of several runs are put into one file. Refuses results of which a case was wrong.

  bench/keep_results.py MEASURED.json [MEASURED.json ...] KEPT.json
"""
import json
import sys
from pathlib import Path


def main():
    *measured, kept = map(Path, sys.argv[1:])
    results, *more = [json.loads(path.read_text(encoding="utf-8")) for path in measured]
    for run in more:
        results["benchmarks"] += run["benchmarks"]
    wrong = [case["name"] for case in results["benchmarks"] if case.get("error_occurred")]
    if wrong:
        sys.exit("wrong, and not kept: " + ", ".join(wrong))
    context = results["context"]
    for key in ("host_name", "executable", "load_avg"):
        context.pop(key, None)
    if "model" in context:
        context["model"] = Path(context["model"]).name
    kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
