#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps of the small reference model over 1, 2 and 4 processes on this machine, measured, beside what the parts of each
rank, measured one rank at a time, and measured messages predict for them: in each stretch between two messages all
wait for the slowest rank.

  bench/shards/measured.py --program build/release/bench/shards/shards_mpi > bench/results/shards_measured.json
"""
import argparse
import json
import os
import subprocess
import sys

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
               "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def composed(segments, messages):
    """Seconds of a step from [rank][stretch] seconds: of each stretch the slowest rank's, and the messages."""
    return sum(max(rank[i] for rank in segments) for i in range(len(segments[0]))) + messages


def run(command):
    print(" ".join(str(word) for word in command), file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT})
    if done.returncode:
        sys.exit(f"failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def cpu():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown processor")


def cases_of(alone, together):
    """What was measured of each plan and division, and what the parts predict."""
    message = {name: together[name]["median"] if name in together else 0.0 for name in ("sum", "gather")}
    for own, all_ranks in zip(alone["cases"], together["cases"], strict=True):
        key = {name: own[name] for name in ("plan", "division")}
        if key != {name: all_ranks[name] for name in key}:
            sys.exit(f"the runs have other cases: {key} and {all_ranks}")
        messages = own["sums"] * message["sum"] + own["gathers"] * message["gather"]
        yield {"ranks": alone["ranks"], **key, "gathers": own["gathers"],
               "predicted": {"parts": composed(own["segments"], 0.0), "messages": messages},
               "measured": {name: all_ranks[name] for name in ("median", "p10", "p90")}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="shards_mpi")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=4096, help="of the text; default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="that are timed; default: %(default)s")
    arguments = parser.parse_args()
    options = ["--tokens", str(arguments.tokens), "--steps", str(arguments.steps)]
    cases, messages, others = [], [], []
    for ranks in arguments.ranks:
        alone = run([arguments.program, "--alone", str(ranks), *options])
        together = run([arguments.mpirun, "-n", str(ranks), arguments.program, *options])
        cases += cases_of(alone, together)
        messages += [{"ranks": ranks, **{name: together[name] for name in ("sum", "gather")}}] if ranks > 1 else []
        others.append(alone["others_percent"])  # together, the other ranks would count
    context = {"cpu": cpu(), "cores": os.cpu_count(), "tokens": arguments.tokens, "steps": arguments.steps,
               "most_others_percent": max(others)}
    print(json.dumps({"context": context, "messages": messages, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
