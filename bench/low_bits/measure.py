# SPDX-License-Identifier: Apache-2.0
"""Measures what each format of formats.py costs a model. The prompt of 1,856 tokens is read exactly; then its rows, but the
first 4 and the latest 32, become what the format keeps of them, and the text goes on for 192 tokens, whose own rows stay
exact (no format has to decide when a row leaves the exact ones). Compared with the full cache: the KL divergence of what
the model expects after each of these tokens, how much more the true tokens surprise it, and how often the likeliest token
is the same.

  python3 bench/low_bits/measure.py --model models/smollm2 --texts texts --rows /tmp/rows --out bench/results/smollm2/low_bits.json

The file is written after each text, and what it holds is not measured again.
"""
import argparse
import json
import os
import platform
import sys
import time

import numpy as np

import formats
import texts
from model import Model, tokenizer

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def compared(full, found, next_ids):
    """One text's numbers: means over its tokens."""
    divergence = (np.exp(full) * (full - found)).sum(axis=-1, dtype=np.float64)
    rows = np.arange(len(next_ids))
    return {"kl": float(divergence.mean()), "surprise": float(-found[rows, next_ids].mean(dtype=np.float64)),
            "same": float((full.argmax(axis=-1) == found.argmax(axis=-1)).mean())}


def rounded(model, format, keys, values):
    """past(layer) of texts.log_probabilities. `format` has restored(keys, values) or is a function of the layer to one."""
    def past(layer):
        own = format(layer) if callable(format) else format
        if own.before_rope:
            new_keys, new_values = own.restored(keys[layer], values[layer])
            return model.rope(new_keys), new_values
        return own.restored(model.rope(keys[layer]), values[layer])
    return past


def processor():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())


def measure(model, words, arguments, wanted, chosen, points, save):
    """Fills points[format's name]["texts"][text's name] for all `wanted` formats on the `chosen` texts."""
    todo = [(name, i) for name, i in chosen
            if any(f"{name} {i}" not in points.get(format.name, {"texts": {}})["texts"] for format in wanted)]
    begun = time.monotonic()
    for done, (name, i) in enumerate(todo):
        ids, keys, values, full = texts.rows_of(arguments.rows, arguments.texts, model, words, name, i)
        full = full[:arguments.continued]
        next_ids = ids[texts.PROMPT + 1:texts.PROMPT + 1 + arguments.continued]
        for k, format in enumerate(wanted):
            point = points.setdefault(format.name, {"family": format.family, **({"widths": format.widths} if callable(format) else {}),
                                                    "bits": format.bits, "key_bits": format.keys.bits,
                                                    "value_bits": format.values.bits, "sinks": format.sinks,
                                                    "residual": format.residual, "texts": {}})
            point["family"] = format.family
            if f"{name} {i}" not in point["texts"]:
                found = texts.log_probabilities(model, ids, rounded(model, format, keys, values), arguments.continued)
                point["texts"][f"{name} {i}"] = compared(full, found, next_ids)
            print(f"\r{done + 1} of {len(todo)} texts, {k + 1} of {len(wanted)} formats, {time.monotonic() - begun:.0f} s ",
                  end="", file=sys.stderr, flush=True)
        rows = np.arange(len(next_ids))
        points.setdefault("full", {"texts": {}})["texts"][f"{name} {i}"] = {"surprise": float(-full[rows, next_ids].mean(dtype=np.float64))}
        save()
    print(file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts.add_arguments(parser)
    parser.add_argument("--out", required=True, help="the JSON; what it holds is kept")
    parser.add_argument("--sets", nargs="+", choices=[*formats.SETS, "widths"], default=["goals", "widths", "found", "first", "second", "published", "exact_rows"],
                        help="in this order, each on all texts; widths: what bench/low_bits/widths.py has chosen")
    parser.add_argument("--validation", action="store_true", help="the texts that settings are chosen on, instead of those they are judged on")
    parser.add_argument("--continued", type=int, default=texts.CONTINUED, help="tokens that are compared")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these formats of the sets")
    parser.add_argument("--count", type=int, help="only so many texts")
    parser.add_argument("--quick", action="store_true", help="three texts, 32 tokens")
    arguments = parser.parse_args()
    chosen = texts.CHOSEN_ON if arguments.validation else texts.JUDGED
    chosen = chosen[:arguments.count]
    if arguments.quick:
        chosen, arguments.continued = chosen[:3], 32
    import widths  # it measures with this module
    model, words = Model(arguments.model), tokenizer(arguments.model)
    run = {"points": {}}
    if os.path.exists(arguments.out):
        with open(arguments.out, encoding="utf-8") as file:
            run = json.load(file)
    settings = {"prompt": texts.PROMPT, "continued": arguments.continued, "arithmetic": "numpy, float32; formats as published"}
    if run.get("settings", settings) != settings:
        sys.exit(f"error: {arguments.out} was measured with {run['settings']}, not {settings}")
    run["settings"] = settings
    run["machine"] = {"processor": processor(), "threads": 1, "numpy": np.__version__}
    run["command"] = "bench/low_bits/measure.py" + (" --validation" if arguments.validation else "")

    def save():
        with open(f"{arguments.out}.unfinished", "w", encoding="utf-8") as file:
            json.dump(run, file, indent=1)
            file.write("\n")
        os.replace(f"{arguments.out}.unfinished", arguments.out)

    for name in arguments.sets:
        print(f"{name}:", file=sys.stderr)
        wanted = widths.chosen_formats() if name == "widths" else formats.SETS[name]()
        wanted = [format for format in wanted if not arguments.only or format.name in arguments.only]
        measure(model, words, arguments, wanted, chosen, run["points"], save)


if __name__ == "__main__":
    main()
