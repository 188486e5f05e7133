# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/results.md, from the measurements of ./scripts/reproduce."""
import math
import statistics

import results
from results import by, name_of, of, over_seeds, setting_of, share

from . import real_results_page
from .markdown import cell, table

SHOWN_IN_SHORT = ["plan search", "HeadKV", "DuoAttention + int4", "DuoAttention", "SnapKV", "Ada-KV", "H2O", "StreamingLLM"]
BUDGETS_IN_SHORT = [2, 4, 8, 16, 32]


def gates(path):
    """Experiment A: which methods find the retrieval heads."""
    run = results.read(path)
    points = run["points"]
    keys = of(points, suite="keys")
    full = of(keys, method="full")
    rows = [["full"] + [cell(over_seeds(full, share))] * 2 + ["", ""]]
    kinds = by([p for p in keys if p["method"].startswith("duo@")], name_of)
    chance = {name: own for name, own in kinds.items() if name.startswith("random")}
    for name, own in kinds.items():
        if name in chance:
            continue
        values, losses = [], []
        for sparsity in (0.5, 0.75):
            at = [p for p in own if setting_of(p) == [sparsity]]
            values.append(cell(over_seeds(at, share)))
            losses.append(cell(results.against(at, full, share), sign=True) if at else "-")
        rows.append([name] + values + losses)
    if chance:
        row, rest = [f"{len(chance)} random plans, mean ± deviation (worst to best)"], []
        for sparsity in (0.5, 0.75):
            each = [over_seeds([p for p in own if setting_of(p) == [sparsity]], share)[0]
                    for own in chance.values()]
            row.append(f"{100 * statistics.fmean(each):.1f} ± {100 * statistics.stdev(each):.1f} "
                       f"({100 * min(each):.1f} to {100 * max(each):.1f})")
            rest.append(f"{100 * (statistics.fmean(each) - over_seeds(full, share)[0]):+.1f}")
        rows.append(row + rest)
    text = table(["gates", "sparsity 0.5, %", "sparsity 0.75, %", "less full at 0.5, points",
                  "less full at 0.75, points"], rows)
    return f"{results.questions(keys, run['settings'])}, the same for each plan.\n\n{text}"


def smallest(path):
    """Experiment A: how few retrieval heads are enough."""
    points = results.load(path)
    keys = of(points, suite="keys")
    full = of(keys, method="full")
    rows = []
    for name, own in by([p for p in keys if p["method"].startswith("duo@")], name_of).items():
        if name.startswith("random"):
            continue
        enough = "none measured"
        for (sparsity,), at in sorted(by(own, lambda p: tuple(setting_of(p))).items()):
            loss = -results.against(at, full, share)[0]
            if loss > 0.02 + 1e-9:
                break
            enough = (f"{100 * (1 - sparsity):.4g} % of the heads | "
                      f"{100 * results.bytes_share(at, full):.1f} %")
        rows.append([name] + enough.split(" | ") + ([] if "|" in enough else ["-"]))
    return table(["gates", "fewest retrieval heads within 2 points of full", "KV rows kept"], rows)


def needles(path):
    """Experiment B: the grid in numbers."""
    run = results.read(path)
    points = run["points"]
    grid = of(points, suite="passkey")
    full = of(grid, method="full")
    lengths = sorted({p["tokens"] for p in grid})
    rows = []
    order = by(grid, lambda p: (p.get("share", 1.0), name_of(p), p["plan"] if "share" not in p else ""))
    for (budget, name, _), own in sorted(order.items(), key=lambda item: -item[0][0]):
        label = name if budget == 1.0 else f"{name}, {100 * budget:g} %"
        if budget == 1.0 and setting_of(own[0]):
            label += " (" + ", ".join(f"{number:g}" for number in setting_of(own[0])) + ")"
        rows.append([label] + [cell(over_seeds(of(own, tokens=length), share)) for length in lengths]
                    + [cell(results.against(own, full, share), sign=True),
                       f"{100 * results.bytes_share(own, full):.1f} %"])
    text = table(["method"] + [f"{length:,}" for length in lengths]
                 + ["less full, points", "KV rows kept"], rows)
    return f"{results.questions(grid, run['settings'])}, the same for each plan and length; % found.\n\n{text}"


def settings(path):
    """The settings that were tried on the validation split, and their results."""
    run = results.read(path)
    keys = of(run["points"], suite="keys")
    text = []
    for method in ("headkv", "snapkv"):
        own = [p for p in keys if results.parts_of(p["plan"])[0] == method]
        if not own:
            continue
        sizes = sorted({setting_of(p)[0] for p in own})
        chosen = results.chosen_setting(run["points"], method)
        rows = []
        for name, mine in by(own, lambda p: results.named_settings(p["plan"])).items():
            cells = [cell(over_seeds([p for p in mine if setting_of(p) == [size]], share))
                     for size in sizes]
            row = [name.replace("=", " ").replace(",", ", ")] + cells + [cell(over_seeds(mine, share))]
            rows.append([f"**{entry}**" for entry in row] if name == chosen else row)
        text.append(f"{results.METHODS[method]}, keys, % answered exactly on the validation split; "
                    f"{results.questions(own, run['settings'])}. The chosen setting is bold.\n\n"
                    + table(["setting"] + [f"{size:g} rows" for size in sizes] + ["mean"], rows))
    return "\n\n".join(text)


def budgets(path):
    """Experiment C: rows per head."""
    run = results.read(path)
    points = run["points"]
    text = []
    for suite, marks, title in (("keys", "1", "Keys, % answered exactly"),
                                ("reasoning", "1o", "Two-step questions, % that give the key of "
                                 "one of the two names"),
                                ("reasoning", "1", "Two-step questions, % answered exactly")):
        own = of(points, suite=suite)
        capped = [p for p in own if len(setting_of(p)) == 1]
        if not capped:
            continue
        sizes = sorted({setting_of(p)[0] for p in capped})
        value = lambda point: share(point, marks)
        rows = [["full"] + [""] * (len(sizes) - 1) + [cell(over_seeds(of(own, method="full"), value))]]
        for name, mine in by(capped, name_of).items():
            rows.append([name] + [cell(over_seeds([p for p in mine if setting_of(p) == [size]], value))
                                  for size in sizes])
        text.append(f"{title}; {results.questions(own, run['settings'])}.\n\n"
                    + table(["method"] + [f"{size:g} rows" for size in sizes], rows))
    return "\n\n".join(text)


def headkv(*paths):
    """Which settings HeadKV ran with in the tables."""
    settings = {}
    for run in map(results.read, paths):
        for point in run["points"]:
            if point["method"].startswith("headkv") and "settings" in point:
                fixed = {key: value for key, value in point["settings"].items() if key != "capacity"}
                settings[name_of(point)] = ", ".join(f"{key} {value}" for key, value in fixed.items())
    return table(["plan", "settings"], [[name, text] for name, text in settings.items()], left=2)


def kivi_against_tokens(rows):
    """The loss on text with keys quantised per channel and per token, with equal numbers of exact rows."""
    loss = {row[0]: row[2] for row in rows}
    return (f"With 2 bits and at least 32 exact rows, text costs {loss['`kivi2:32,flush=steady`']} bits per byte more by keys per channel "
            f"and {loss['`int2:32`']} by groups per token.")


def storage(path):
    """Experiment D: bits."""
    points = results.load(path)
    full = of(points, plan="full")
    rows = []
    for plan, own in by(points, lambda p: p["plan"]).items():
        text = of(own, suite="perplexity")
        keys = of(own, suite="keys")
        bits = lambda point: results.mean_over(point, "nats") * math.log2(math.e)
        rows.append([f"`{plan}`", cell(over_seeds(text, bits), 1, 4),
                     cell(results.against(text, full, bits), 1, 4, sign=True),
                     cell(over_seeds(keys, share)),
                     cell(results.against(keys, full, share), sign=True),
                     f"{100 * results.bytes_share(own, full):.1f} %",
                     f"{100 * results.bytes_share(own, full, 'kv_bytes'):.1f} %"])
    text = table(["plan", "bits per byte", "more than full", "keys, %", "less full, points",
                  "KV rows kept", "with pages"], rows)
    return f"{text}\n\n{kivi_against_tokens(rows)}"


def combined(path):
    """Experiment E: the best at each budget."""
    points = results.load(path)
    keys = of(points, suite="keys")
    full = of(keys, method="full")
    rows = []
    for _, own in by([p for p in keys if p["plan"] != "full"],
                     lambda p: (p["method"], p.get("share"), p["plan"] if "share" not in p else "")).items():
        rows.append((own[0].get("share", results.bytes_share(own, full)),
                     over_seeds(own, share)[0], results.bytes_share(own, full),
                     [name_of(own[0]), cell(over_seeds(own, share)),
                      cell(results.against(own, full, share), sign=True)]))
    text = []
    # A method's points are at the budget that their settings were made for, other plans at the one
    # they fit.
    for budget in (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32):
        here = sorted((row for row in rows if budget / 2 * 1.001 < row[0] <= budget * 1.001),
                      key=lambda row: -row[1])
        for _, _, kept, row in here:
            text.append([f"1/{1 / budget:.0f}"] + row + [f"{100 * kept:.2f} %"])
    return table(["bytes, at most", "plan", "keys, %", "less full, points", "KV rows kept"],
                 [["1", "full", cell(over_seeds(full, share)), "", "100 %"]] + text)


def frontier(path):
    """% answered exactly at each share of the bytes."""
    run = results.read(path)
    keys = of(run["points"], suite="keys")
    full = of(keys, method="full")
    named = by(keys, name_of)
    rows, deviations = [], []
    # A setting that is not the published one is written out: "HeadKV, kernel 29, beta 2".
    for name in [name for shown in SHOWN_IN_SHORT for name in named if f"{name}, ".startswith(f"{shown}, ")]:
        row = [name]
        for budget in BUDGETS_IN_SHORT:
            own = [point for point in named[name] if point.get("share") == 1 / budget]
            mean, deviation = over_seeds(own, share)
            row.append(f"{100 * mean:.0f}" if own else "")
            deviations += [deviation] if own else []
        rows.append(row)
    lengths = " and ".join(f"{tokens:,}" for tokens in sorted({point["tokens"] for point in keys}))
    return (f"{results.questions(keys, run['settings'])}, {lengths} bytes each; % answered exactly. The full cache answers "
            f"{100 * over_seeds(full, share)[0]:.0f} %; the deviation over seeds is up to {100 * max(deviations):.0f} "
            "points.\n\n" + table(["share of the full cache's bytes"] + [f"1/{budget}" for budget in BUDGETS_IN_SHORT], rows))


TABLES = {"frontier": (["combined.json"], frontier), "gates": (["gates.json"], gates),
          "smallest": (["gates.json"], smallest),
          "headkv": (["budgets.json", "combined.json"], headkv), "needles": (["needles.json"], needles), 
          "settings": (["settings.json"], settings), "budgets": (["budgets.json"], budgets),
          "storage": (["storage.json"], storage), "unasked": (["unasked.json"], real_results_page.unasked), "combined": (["combined.json"], combined)}
