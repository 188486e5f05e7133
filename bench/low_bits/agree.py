#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares model.py with the reference Llama of this repository on the beginning of a text: the same tokens, and log
probabilities that differ by float32's rounding alone. The programs are those of examples/ in a release build.

  python3 bench/low_bits/agree.py --model models/smollm2 --text texts/manual.txt --programs build/release/examples
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from model import Model, tokenizer


def ran(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {command[0]}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--programs", type=Path, required=True, help="the folder with tokenize and logits")
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")[5000:5000 + 8 * arguments.tokens]
    ids = tokenizer(arguments.model).encode(text).ids
    if ran(arguments.programs / "tokenize", "--model", arguments.model, "--json", text) != ids:
        sys.exit("error: the tokens differ")
    ids = ids[:arguments.tokens]
    rows = ran(arguments.programs / "logits", "--model", arguments.model, "--tokens", ",".join(map(str, ids)), "--all", "--json")["rows"]
    theirs = np.array([row["logits"] for row in rows])
    theirs -= theirs.max(axis=-1, keepdims=True)
    theirs -= np.log(np.exp(theirs).sum(axis=-1, keepdims=True))
    model = Model(arguments.model)
    ours = model.log_probabilities(model.forward(ids))
    apart = float(np.abs(theirs - ours).max())
    divergence = float((np.exp(theirs) * (theirs - ours)).sum(axis=-1).mean())
    print(f"{len(ids)} tokens: log probabilities differ by at most {apart:.1e}, KL divergence {divergence:.1e}, "
          f"same likeliest token {np.mean(theirs.argmax(axis=-1) == ours.argmax(axis=-1)):.1%}")
    if not apart <= 1e-3:
        sys.exit("error: that is more than rounding")


if __name__ == "__main__":
    main()
