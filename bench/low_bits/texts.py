# SPDX-License-Identifier: Apache-2.0
"""The texts that low bits are judged on, and those that widths are chosen on, as token ids; and the model's exact rows for
each, kept in a folder because reading a prompt takes longer than judging a format.

  python3 bench/low_bits/texts.py --model models/smollm2 --texts texts --rows /tmp/rows     reads all prompts
"""
import argparse
import sys
import time
from pathlib import Path

import numpy as np

from model import Model, tokenizer

PROMPT, CONTINUED = 1856, 192
JUDGED = [(name, i) for i in range(10) for name in ("lexicon", "manual", "code")]  # in turn, so that a few are of all kinds
# Formats and widths are chosen on the first 30 % of the novels, the validation split of docs/results.md, and, because prose
# alone misleads, on a place of the manual and of the code that lies between those that are judged.
CHOSEN_ON = [("novels", 0), ("novels", 1), ("manual", 10), ("code", 10)]


def begin_of(name, i, size):
    """Where a text begins in its file."""
    if (name, i) in JUDGED:
        return int(size * (i + 0.5) / 10)
    return int(size * 0.3 * (i + 0.25) / 4) if name == "novels" else int(size * 0.3)


def ids_of(folder, words, name, i):
    """PROMPT + CONTINUED + 1 tokens, from the beginning of a line."""
    text = (folder / f"{name}.txt").read_text(encoding="utf-8")
    begin = text.index("\n", begin_of(name, i, len(text))) + 1
    ids = words.encode(text[begin:begin + 8 * (PROMPT + CONTINUED)]).ids
    return np.array(ids[:PROMPT + CONTINUED + 1])


def rows_of(rows, folder, model, words, name, i):
    """(ids, keys before RoPE, values, log probabilities of the full cache); read once, then kept in the folder `rows`."""
    path = rows / f"{name}_{i}"
    ids = ids_of(folder, words, name, i)
    if not path.with_suffix(".full.npy").exists():
        rows.mkdir(parents=True, exist_ok=True)
        keys, values = model.read(ids[:PROMPT])
        full = log_probabilities(model, ids, lambda layer: (model.rope(keys[layer]), values[layer]))
        for ending, array in (("ids", ids), ("keys", keys), ("values", values), ("full", full)):
            np.save(path.with_suffix(f".{ending}.npy"), array)
    kept, keys, values, full = (np.load(path.with_suffix(f".{ending}.npy")) for ending in ("ids", "keys", "values", "full"))
    if not np.array_equal(kept, ids):
        raise ValueError(f"{path}: the rows there are of another text; remove them")
    return ids, keys, values, full


def log_probabilities(model, ids, past, continued=CONTINUED):
    """What the model expects after each of the next tokens, with past(layer) as the rows of the prompt."""
    return model.log_probabilities(model.forward(ids[PROMPT:PROMPT + continued], PROMPT, past))


def add_arguments(parser):
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json, model.safetensors, tokenizer.json")
    parser.add_argument("--texts", type=Path, required=True, help="the folder that scripts/fetch-texts fills")
    parser.add_argument("--rows", type=Path, required=True, help="a folder for exact rows: 130 MB a text")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    model, words = Model(arguments.model), tokenizer(arguments.model)
    every = JUDGED + CHOSEN_ON
    begun = time.monotonic()
    for done, (name, i) in enumerate(every, 1):
        rows_of(arguments.rows, arguments.texts, model, words, name, i)
        print(f"{done} of {len(every)} prompts, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
