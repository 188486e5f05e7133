#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps what a bench wrote, without the names of host and folders.

  bench/keep_results.py RESULTS.json PART.json...           RESULTS are those of the parts
  bench/keep_results.py --add RESULTS.json PART.json...     the parts' cases replace those of the same name

A part with a case that failed is refused, and so are parts of another machine, model or number of texts than
the rest; RESULTS then stays as it is.
"""
import argparse
import json
import sys

PRIVATE = ("host_name", "executable", "load_avg")
SAME = ("cpu", "model", "texts", "text", "threads")  # what all cases of a file must share
NOISE = ("family_index", "per_family_instance_index", "run_name", "run_type", "repetitions",
         "repetition_index", "threads")


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as why:
        sys.exit(f"{path} is not what a bench writes: {why}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", action="store_true", help="keep the cases that RESULTS has already")
    parser.add_argument("results")
    parser.add_argument("parts", nargs="+")
    arguments = parser.parse_args()
    files = [(path, read(path)) for path in arguments.parts]
    if arguments.add:
        try:
            files.insert(0, (arguments.results, read(arguments.results)))
        except FileNotFoundError:
            pass
    cases = {}
    for path, file in files:
        wrong = [f"{case['name']} ({case.get('error_message')})" for case in file["benchmarks"]
                 if case.get("error_occurred")]
        if wrong:
            sys.exit(f"{path}: wrong, and not kept: " + ", ".join(wrong))
        for key in SAME:
            if file["context"].get(key) != files[-1][1]["context"].get(key):
                sys.exit(f"{path} has another {key} ({file['context'].get(key)}) than {files[-1][0]} "
                         f"({files[-1][1]['context'].get(key)}): they cannot stand in one table; "
                         "without --add, or without the old file, the new ones stand alone")
        for case in file["benchmarks"]:
            cases[case["name"]] = {key: value for key, value in case.items() if key not in NOISE}
    context = {key: value for key, value in files[-1][1]["context"].items() if key not in PRIVATE}
    with open(arguments.results, "w", encoding="utf-8") as file:
        json.dump({"context": context, "benchmarks": list(cases.values())}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
