#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps what `compare --json` prints as bench/results/demo.json, for the table of README.md: with the processor and
the date, without the folder that it ran in.

  compare --json | bench/keep_demo.py
"""
import datetime
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main():
    run = json.load(sys.stdin)
    run["model"] = Path(run["model"]).name
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    run["cpu"] = cpu[1] if cpu else "an unknown processor"
    run["date"] = datetime.date.today().isoformat()
    for row in run["plans"]:
        del row["answers"]
    with open(ROOT / "bench" / "results" / "demo.json", "w", encoding="utf-8") as file:
        json.dump(run, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
