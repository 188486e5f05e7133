#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes DuoAttention patterns whose gates are drawn at random: the baseline that a method of finding heads must
beat. A seed gives the same gates everywhere.

  bench/random_gates.py --like reference_model/weights/keyfinder/duo --count 10 FOLDER
      writes FOLDER/random-0, FOLDER/random-1, … in the published format
"""
import argparse
import json
import random
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--like", type=Path, required=True, help="a pattern: its shape and its mask")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rows = [len(line.split()) for line in
            (arguments.like / "full_attention_heads.tsv").read_text().splitlines()
            if line.strip() and not line.startswith("#")]
    mask = json.loads((arguments.like / "config.json").read_text())
    for number in range(arguments.count):
        draw = random.Random(arguments.seed * 1000 + number)
        folder = arguments.folder / f"random-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "full_attention_heads.tsv").write_text("".join(
            "\t".join(f"{draw.random():.6f}" for _ in range(heads)) + "\n" for heads in rows))
        (folder / "config.json").write_text(json.dumps({
            "sink_size": mask["sink_size"], "recent_size": mask["recent_size"],
            "method": f"random, seed {arguments.seed}, number {number}"}, indent=2) + "\n")


if __name__ == "__main__":
    main()
