# SPDX-License-Identifier: Apache-2.0
"""The tables of low bits in docs/results.md, from what bench/low_bits/measure.py has written."""
import math

import bootstrap
import results

from .markdown import table

LLAMA, UNROTATED, KIVI = "q4_0, rotated (llama.cpp)", "q4_0", "KIVI-2"
# Most bits, of what the KL divergence is to be a part, and that part.
GOALS = [(4.5, LLAMA, 0.6), (3.5, UNROTATED, 1.0), (2.5, KIVI, 0.5)]
SAID = ("Numbers of the numpy reference in `bench/low_bits` (float32 arithmetic, formats as published), not of the library's engines.")


def thousandths(value):
    """Three digits that count, at most three behind the point: 0.032, 4.21, 128."""
    value *= 1000
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def formats_of(run):
    """{name: point} of all formats; "full" is none."""
    return {name: point for name, point in run["points"].items() if name != "full"}


def values(point, key, texts=None):
    """A number of each text, in the same order for all."""
    return [point["texts"][text][key] for text in sorted(texts or point["texts"])]


def without_false_promise(found, texts):
    """(mean, low, high) with bounds that are nan where texts are few."""
    return found if texts >= FEW else (found[0], math.nan, math.nan)


def kl(point):
    """(mean, low, high) of the KL divergence over texts."""
    return without_false_promise(bootstrap.interval([[value] for value in values(point, "kl")]), len(point["texts"]))


FEW = 10  # texts, below which an interval would promise too much


def shown(found):
    """In thousandths of a nat."""
    mean, low, high = found
    return thousandths(mean) if low != low else f"{thousandths(mean)} ({thousandths(low)} to {thousandths(high)})"


def ratio(point, other):
    """(ratio of the mean KL divergences, low, high) on the texts that both were measured on."""
    both = set(point["texts"]) & set(other["texts"])
    return without_false_promise(bootstrap.ratio(values(point, "kl", both), values(other, "kl", both)), len(both))


def difference(run, point):
    """How much more the true tokens surprise than with the full cache, nats a token, with its interval."""
    full = run["points"]["full"]
    return without_false_promise(bootstrap.difference([[value] for value in values(point, "surprise")],
                                                      [[value] for value in values(full, "surprise", point["texts"])]), len(point["texts"]))


def by_bits(points):
    return sorted(points.items(), key=lambda item: (-item[1]["bits"], kl(item[1])[0]))


def as_ratio(found):
    return "{:.2f} ({:.2f} to {:.2f})".format(*found) if found[1] == found[1] else f"{found[0]:.2f}"


def as_difference(found):
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*found) if found[1] == found[1] else f"{found[0]:+.3f}"


def low_bits(path):
    """All formats, by bits."""
    run = results.read(path)
    points = formats_of(run)
    most = max(len(point["texts"]) for point in points.values())
    rows = []
    for name, point in by_bits(points):
        same = bootstrap.interval([[value] for value in values(point, "same")])[0]
        fewer = "" if len(point["texts"]) == most else f" [{len(point['texts'])} texts]"
        rows.append([name + fewer, point["family"], f"{point['bits']:.2f}", f"{point['key_bits']:.2f} / {point['value_bits']:.2f}", shown(kl(point)),
                     as_ratio(ratio(point, points[LLAMA])), as_difference(difference(run, point)), f"{100 * same:.1f}"])
    settings = run["settings"]
    return (f"{SAID} {most} texts (lexicon, manual and code, a third each), {settings['prompt']:,} tokens read exactly, then "
            f"{settings['continued']} compared; bits of a number with its share of scales, zeros and means; mean and 95 % interval over texts. "
            f"Formats with [fewer texts] have none, and are compared with rotated q4_0 on the same texts.\n\n"
            + table(["format", "kind", "bits", "keys / values", "KL, 10⁻³ nats a token", "of rotated q4_0's", "more surprise, nats a token",
                     "same likeliest token, %"], rows, left=2)
            + "\n\n![KL divergence over bits](smollm2_low_bits.png)")


def verdict(found, part):
    if found[2] <= part:
        return "reached"
    return "undecided" if found[1] <= part else "missed"


def goals(path):
    """What is reached at each number of bits: the best formats with at most one bit less, all on the same texts."""
    run = results.read(path)
    points = formats_of(run)
    rows = []
    for bits, other, part in GOALS:
        whole = set(points[other]["texts"])
        # "As published" and other exact rows are not compared with: those are other rows, not another format.
        fitting = {name: point for name, point in points.items() if bits - 1 < point["bits"] <= bits + 1e-9 and set(point["texts"]) == whole
                   and point["family"] != "peers" and (point["sinks"], point["residual"]) == (4, 32)}
        for name, point in sorted(fitting.items(), key=lambda item: kl(item[1])[0])[:4]:
            found = ratio(point, points[other])
            rows.append([f"at {bits:g} bits, at most {part:g} × {other}", name, f"{point['bits']:.2f}", shown(kl(point)), as_ratio(found),
                         verdict(found, part)])
    for name in ("int8", "q8_0"):
        if name in points and len(points[name]["texts"]) >= 30:  # fewer have no interval
            found = difference(run, points[name])
            apart = "reached" if found[1] <= 0 <= found[2] else "missed"
            rows.append(["at 8.5 bits, not to be told from full", name, f"{points[name]['bits']:.2f}", shown(kl(points[name])),
                         "surprise {:+.4f} ({:+.4f} to {:+.4f})".format(*found), apart])
    return f"{SAID}\n\n" + table(["what is asked", "format", "bits", "KL, 10⁻³ nats a token", "ratio of the mean KL divergences", "goal"], rows, left=2)


def variations(path):
    """What was tried on the validation texts, to choose from."""
    run = results.read(path)
    points = formats_of(run)
    kinds = [("novels", "novels"), ("manual and code", ("manual", "code"))]

    def mean(point, kind):
        own = [text["kl"] for name, text in point["texts"].items() if name.startswith(kind)]
        return thousandths(sum(own) / len(own)) if own else ""

    rows = [[name, f"{point['bits']:.2f}", *(mean(point, kind) for _, kind in kinds)] for name, point in by_bits(points)]
    return (f"{SAID} KL in 10⁻³ nats a token, on two texts of each kind that none of the other tables has, {run['settings']['continued']} tokens "
            "compared; too few for intervals. Empty: not tried there.\n\n" + table(["format", "bits", *(kind for kind, _ in kinds)], rows))


TABLES = {"smollm2_low_bits_goals": (["smollm2/low_bits.json"], goals), "smollm2_low_bits": (["smollm2/low_bits.json"], low_bits),
          "smollm2_low_bits_variations": (["smollm2/low_bits_validation.json"], variations)}
