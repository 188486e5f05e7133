# SPDX-License-Identifier: Apache-2.0
"""A width for each head: the keys and the values of each KV head get the bits that they need most. How much each costs alone,
rounded to 2 bits while all others stay exact, is measured on two validation texts; a greedy choice then spends the bits,
where they take away most damage for a bit, until the mean is what was asked for. It is judged on other texts.

  python3 bench/low_bits/widths.py --model models/smollm2 --texts texts --rows /tmp/rows --out bench/results/smollm2/low_bits_widths.json
"""
import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import measure
import texts
from coders import Coder, affine, less_mean, levels
from formats import HEAD_DIM, Format
from model import Model, tokenizer

KEPT = Path(__file__).resolve().parent.parent / "results" / "smollm2" / "low_bits_widths.json"
WIDTHS = (1, 2, 3, 4, 5)
PROBED_ON, ERRORS_ON = texts.CHOSEN_ON[:2], texts.CHOSEN_ON[1:]  # two novels; one text of each kind


def key_coder(bits):
    """Rotated channels were best on texts of every kind (measure.py --validation); one bit has no room for equal steps."""
    return less_mean(levels(1, HEAD_DIM, rotated=True), 64) if bits == 1 else affine(bits, 64, "channel", rotated=True)


def value_coder(bits):
    return levels(bits, HEAD_DIM, rotated=True)


CODERS = {"keys": key_coder, "values": value_coder}
# What is done to the head that is probed: two bits, for which these were best on the novels.
PROBES = {"keys": less_mean(levels(2, HEAD_DIM, rotated=True), 128), "values": value_coder(2)}


@dataclass(frozen=True)
class HeadWidths:
    """A Format with a width for each head of each layer; calling it gives a layer's."""
    name: str
    widths: dict  # {"keys": [layers][heads], "values": ...}
    family: str = "widths per head"
    sinks: int = 4
    residual: int = 32

    @property
    def keys(self):
        return Coder(float(np.mean([key_coder(bits).bits for layer in self.widths["keys"] for bits in layer])), None)

    @property
    def values(self):
        return Coder(float(np.mean([value_coder(bits).bits for layer in self.widths["values"] for bits in layer])), None)

    @property
    def bits(self):
        return (self.keys.bits + self.values.bits) / 2

    def __call__(self, layer):
        def by_head(side):
            own = [CODERS[side](bits) for bits in self.widths[side][layer]]
            return Coder(0, lambda rows: np.concatenate([coder.restore(rows[h:h + 1]) for h, coder in enumerate(own)]))
        return Format(self.name, self.family, by_head("keys"), by_head("values"), sinks=self.sinks,
                      residual=self.residual)


def square_error(rows, restored):
    return float(((rows - restored) ** 2).mean())


def probe(model, words, arguments, kept, save):
    """Adds to kept["damage"][text's name]: for each side, layer and head the KL divergence with it alone rounded, over the mean
    square error of its numbers. `save` is called after each layer, and what is there is not measured again."""
    begun = time.monotonic()
    for t, (name, i) in enumerate(PROBED_ON):
        own = kept["damage"].setdefault(f"{name} {i}", {side: [] for side in CODERS})
        if len(own["keys"]) >= arguments.layers:
            continue
        ids, keys, values, full = texts.rows_of(arguments.rows, arguments.texts, model, words, name, i)
        full = full[:arguments.continued]
        exact = [{"keys": model.rope(keys[layer]), "values": values[layer]} for layer in range(model.layers)]
        # A layer does not depend on later layers' rows, so each probe begins where the exact run stands.
        streams = []
        tokens = ids[texts.PROMPT:texts.PROMPT + arguments.continued]
        model.forward(tokens, texts.PROMPT, lambda layer: tuple(exact[layer].values()), streams=streams)
        for layer in range(len(own["keys"]), arguments.layers):
            for side, coder in PROBES.items():
                found = []
                for head in range(model.kv_heads):
                    rows = exact[layer][side][head:head + 1, 4:-32]
                    changed = {**exact[layer], side: exact[layer][side].copy()}
                    changed[side][head:head + 1, 4:-32] = coder.restore(rows)
                    x = model.forward(tokens, texts.PROMPT, lambda at: tuple((changed if at == layer else exact[at]).values()),
                                      begin=(layer, streams[layer]))
                    divergence = measure.compared(full, model.log_probabilities(x), tokens)["kl"]
                    found.append(max(divergence, 0) / square_error(rows, changed[side][head:head + 1, 4:-32]))
                own[side].append(found)
            save()
            print(f"\r{t + 1} of {len(PROBED_ON)} texts, {layer + 1} of {arguments.layers} layers, {time.monotonic() - begun:.0f} s ",
                  end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def errors_of(model, words, arguments):
    """The mean square error at each of WIDTHS, of each side, layer and head, over texts of every kind."""
    found = {side: np.zeros((model.layers, model.kv_heads, len(WIDTHS))) for side in CODERS}
    for t, (name, i) in enumerate(ERRORS_ON):
        _, keys, values, _ = texts.rows_of(arguments.rows, arguments.texts, model, words, name, i)
        for layer in range(model.layers):
            for side, rows in (("keys", model.rope(keys[layer])[:, 4:-32]), ("values", values[layer][:, 4:-32])):
                for k, bits in enumerate(WIDTHS):
                    error = ((rows - CODERS[side](bits).restore(rows)) ** 2).mean(axis=(1, 2))
                    found[side][layer, :, k] += error / len(ERRORS_ON)
            print(f"\rerrors: {t + 1} of {len(ERRORS_ON)} texts, {layer + 1} of {model.layers} layers ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {side: own.tolist() for side, own in found.items()}


def choose(damage, errors, bits):
    """The widths whose mean with scales is at most `bits`. A head's damage is taken to follow the mean square error of its numbers."""
    sides = list(CODERS)
    per_error = np.mean([[own[side] for side in sides] for own in damage.values()], axis=0)
    found = per_error[..., None] * np.array([errors[side] for side in sides])  # [side, layer, head, width]
    price = np.array([[CODERS[side](width).bits for width in WIDTHS] for side in sides])
    at = np.zeros(found.shape[:-1], int)
    room = (bits - price[:, 0].mean()) * at.size
    while True:
        best, cost = None, 0
        for unit in np.ndindex(at.shape):
            if at[unit] + 1 < len(WIDTHS):
                more = price[unit[0], at[unit] + 1] - price[unit[0], at[unit]]
                gain = (found[unit][at[unit]] - found[unit][at[unit] + 1]) / more
                if more <= room + 1e-9 and (best is None or gain > best_gain):
                    best, best_gain, cost = unit, gain, more
        if best is None:
            break
        at[best] += 1
        room -= cost
    return {side: np.array(WIDTHS)[at[i]].tolist() for i, side in enumerate(sides)}


def chosen_formats(path=KEPT, every=(3.5, 2.5, 4.5, 3.0)):
    if not path.exists():
        return []
    kept = json.loads(path.read_text(encoding="utf-8"))
    return [HeadWidths(f"widths per head, {bits:g} bits", choose(kept["damage"], kept["errors"], bits)) for bits in every]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts.add_arguments(parser)
    parser.add_argument("--out", type=Path, default=KEPT)
    parser.add_argument("--continued", type=int, default=32, help="tokens that are compared")
    parser.add_argument("--quick", action="store_true", help="two layers, and no choice")
    arguments = parser.parse_args()
    model, words = Model(arguments.model), tokenizer(arguments.model)
    arguments.layers = 2 if arguments.quick else model.layers
    kept = {"command": "bench/low_bits/widths.py", "continued": arguments.continued, "widths": WIDTHS, "damage": {}}
    if arguments.out.exists():
        kept = json.loads(arguments.out.read_text(encoding="utf-8"))

    def save():
        unfinished = arguments.out.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        unfinished.replace(arguments.out)

    if "errors" not in kept:
        probe(model, words, arguments, kept, save)
        if arguments.quick:
            return
        kept["errors_on"] = [f"{name} {i}" for name, i in ERRORS_ON]
        kept["errors"] = errors_of(model, words, arguments)
        save()
    for format in chosen_formats(arguments.out):
        print(f"{format.bits:.3f} bits (keys {format.keys.bits:.3f}, values {format.values.bits:.3f}): "
              + ", ".join(f"{side} {np.bincount(np.ravel(own), minlength=6)[1:].tolist()}" for side, own in format.widths.items())
              + " heads with 1, 2, 3, 4, 5 bits")


if __name__ == "__main__":
    main()
