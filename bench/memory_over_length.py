#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what a cache takes under each plan and text length, as `plan memory` computes it, to one JSON file:
{"shape", "contexts", "bytes": {plan: [at each length]}}.

  bench/memory_over_length.py --tool build/release/examples/plan --shape smollm2-135m --contexts 1024 8192 --plans full int4
"""
import argparse
import json
import subprocess
import sys


def cache_bytes(tool, shape, plan, context):
    command = [tool, "memory", "--shape", shape, "--plan", plan, "--context", str(context), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return json.loads(done.stdout)["bytes"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, help="the program `plan`")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", required=True, help="tokens")
    parser.add_argument("--plans", nargs="+", required=True)
    arguments = parser.parse_args()
    lines = [f"    {json.dumps(plan)}: {[cache_bytes(arguments.tool, arguments.shape, plan, n) for n in arguments.contexts]}"
             for plan in arguments.plans]
    print(f'{{\n  "shape": {json.dumps(arguments.shape)},\n  "contexts": {arguments.contexts},\n  "bytes": {{\n'
          + ",\n".join(lines) + "\n  }\n}")


if __name__ == "__main__":
    main()
