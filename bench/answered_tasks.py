#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the tasks that the full cache can do, one on each line: those of which it answers at least half.

  bench/answered_tasks.py bench/results/smollm2/tasks_2048.json

What a model cannot do with all rows says nothing about a cache.
"""
import argparse
import sys
from pathlib import Path

import results


def answered(points, least=0.5):
    """{suite: share}, of the full cache's points over all seeds."""
    found = {suite: results.over_seeds(own, results.share)[0]
             for suite, own in results.by(results.of(points, plan="full"), lambda point: point["suite"]).items()}
    return {suite: share for suite, share in found.items() if share >= least}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what evaluate --plans full has written")
    arguments = parser.parse_args()
    found = answered(results.load(arguments.file))
    if not found:
        sys.exit(1)
    print("\n".join(found))


if __name__ == "__main__":
    main()
