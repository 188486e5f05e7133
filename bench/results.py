# SPDX-License-Identifier: Apache-2.0
"""Reads what `evaluate` has written, for bench/tables.py and bench/plot.py. Standard library only."""
import json
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "reference_model" / "weights" / "keyfinder"

# The kinds of gates, by their folder beside the weights; the first is what the paper proposes.
GATES = {"duo": "optimised", "duo-ablation": "single-head ablation",
         "duo-profile": "attention profiling", "duo-lm": "language-modelling loss",
         "duo-lm-passkeys": "language-modelling loss, passkeys alone",
         "duo-sinks": "optimised, mask of sinks only", "duo-recent": "optimised, mask of recent only",
         "razor": "RazorAttention", "kvzip": "DuoAttention, KVzip's gates"}

SCORES = {"retrieval_heads": "HeadKV-R (retrieval)", "enhanced_heads": "HeadKV-ER (enhanced)",
          "retrieval_reasoning_heads": "HeadKV-R2 (reasoning)", "echo_heads": "RazorAttention (echo)",
          "induction_heads": "RazorAttention (induction)"}

METHODS = {"full": "full", "duo": "DuoAttention", "streaming_llm": "StreamingLLM", "h2o": "H2O",
           "tova": "TOVA", "fastgen": "FastGen", "snapkv": "SnapKV", "pyramid": "PyramidKV", "headkv": "HeadKV",
           "adakv": "Ada-KV", "keynorm": "key norm", "keydiff": "KeyDiff", "kvzip": "KVzip", "expected": "Expected Attention", "sink_recent": "sink + recent",
           "razor": "RazorAttention", "search": "plan search"}


def read(path):
    """Reads a file of evaluate: its settings and points; None, and a line on stderr, if it does not exist."""
    try:
        with open(path, encoding="utf-8") as file:
            run = json.load(file)
            run["points"], run["settings"]  # pylint: disable=pointless-statement  # raises if it is another file
            return run
    except FileNotFoundError:
        print(f"{path} is not there: what is made of it stays as it is", file=sys.stderr)
        return None
    except (ValueError, KeyError, TypeError) as why:
        sys.exit(f"{path} is not what evaluate writes: {type(why).__name__}: {why}")


def load(path):
    """The points of a file; none if it does not exist."""
    run = read(path)
    return run["points"] if run else []


def parts_of(plan):
    """("headkv@FILE", ["128"], ["kernel=29"]) of "headkv@FILE:128,kernel=29"."""
    colon = plan.find(":", plan.rfind("/") + 1)
    if colon < 0:
        return plan, [], []
    values = plan[colon + 1:].split(",")
    return (plan[:colon], [value for value in values if "=" not in value],
            [value for value in values if "=" in value])


def name_of(point):
    """The name for readers; settings that are not the published ones are part of it."""
    method, _, settings = parts_of(point["method"])
    return "".join([plain_name(method)] + [", " + setting.replace("=", " ") for setting in settings])


def plain_name(method):
    for part in ("duo@", "headkv@"):
        if method.startswith(part):
            rest, plus, storage = method[len(part):].partition("+")
            stem = Path(rest).stem
            known = GATES if part == "duo@" else SCORES
            return known.get(stem, stem) + (f" + {storage}" if plus else "")
    plain, plus, storage = method.partition("+")
    name, at, _ = plain.partition("@")
    if at and name in METHODS:
        return f"{METHODS[name]}, rows by head"
    if "/" in plain:
        return Path(plain).stem
    return METHODS.get(plain, plain) + (f" + {storage}" if plus else "")


def by_gates(points):
    """The points of each kind of gates, random ones last; for tables that hold nothing else."""
    kinds = by(points, lambda point: name_of(point).removeprefix("DuoAttention, "))
    return dict(sorted(kinds.items(), key=lambda kind: kind[0].startswith("random")))


def setting_of(point):
    """The numbers after the name: "duo:0.5" has [0.5]."""
    return [float(number) for number in parts_of(point["plan"])[1]]


def named_settings(plan):
    """"kernel=29,beta=2" of "headkv:128,kernel=29,beta=2"."""
    return ",".join(parts_of(plan)[2])


def chosen_setting(points, method):
    """The setting of a method with the most right answers, over all row counts; the first of equal ones,
    so that the published setting comes first. None if none were tried."""
    tried = by([p for p in points if parts_of(p["plan"])[0] == method],
               lambda p: named_settings(p["plan"]))
    return max(tried, key=lambda name: over_seeds(tried[name], share)[0], default=None)


def of(points, **wanted):
    """The points whose fields are as wanted; for a set or list, equal to one of its elements."""
    def fits(point):
        for key, value in wanted.items():
            own = name_of(point) if key == "name" else point.get(key)
            if own not in value if isinstance(value, (set, list, tuple)) else own != value:
                return False
        return True
    return [point for point in points if fits(point)]


def by(points, key):
    """{key(point): points}, in the order they come."""
    groups = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    return groups


def share(point, marks="1"):
    return sum(mark in marks for mark in point["marks"]) / len(point["marks"])


def mean_over(point, measure):
    return statistics.fmean(point[measure])


def over_seeds(points, value):
    """Mean and standard deviation of the seeds' means, each over its points (lengths)."""
    seeds = [statistics.fmean(value(point) for point in own)
             for own in by(points, lambda point: point["seed"]).values()]
    if not seeds:
        return math.nan, math.nan
    return statistics.fmean(seeds), statistics.stdev(seeds) if len(seeds) > 1 else math.nan


def against(points, others, value):
    """The same for the differences from the points of `others` with the same tasks."""
    tasks = {(point["suite"], point["tokens"], point["seed"]): point for point in others}
    def difference(point):
        return value(point) - value(tasks[point["suite"], point["tokens"], point["seed"]])
    return over_seeds(points, difference)


def bytes_share(points, full, field="row_bytes"):
    """Kept bytes as a share of the full cache's, mean over lengths."""
    whole = {(point["suite"], point["tokens"]): point[field] for point in full}
    return statistics.fmean(point[field] / whole[point["suite"], point["tokens"]]
                            for point in points)


def texts_of(point, settings):
    """How many texts the questions of a point are spread over (examples/evaluate/suite.cpp)."""
    if "questions_per_text" in point:
        return len(point["questions_per_text"])
    facts = min(max(point["tokens"] // 128, 4), 32)
    per_text = {"passkey": settings["depths"],
                "reasoning": min(settings["per_text"], facts // 4),
                "keys": min(settings["per_text"], facts)}[point["suite"]]
    return math.ceil(len(point["marks"]) / per_text)


def questions(points, settings):
    """How many questions and texts a plan's point has over all seeds: "102 questions on 6 texts (2 of each of 3 seeds)"."""
    said = set()
    for own in by(points, lambda point: (point["suite"], point["tokens"], point["plan"], point.get("share"))).values():
        texts = [texts_of(point, settings) for point in own]
        seeds = f" ({texts[0]} of each of {len(own)} seeds)" if len(own) > 1 else ""
        said.add(f"{sum(len(point['marks']) for point in own)} questions on {sum(texts)} texts{seeds}")
    return " or ".join(sorted(said))
