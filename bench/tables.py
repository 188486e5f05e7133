#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/results.md, between its <!-- name --> and <!-- /name --> markers, from
what ./scripts/reproduce has measured. Text outside the markers is left alone.

  bench/tables.py --results bench/results --page docs/results.md
"""
import argparse
import math
import re
import statistics
import sys
from pathlib import Path

import results
from results import by, name_of, of, over_seeds, setting_of, share


def cell(mean_and_deviation, unit=100, digits=1, sign=False):
    mean, deviation = mean_and_deviation
    if math.isnan(mean):
        return "-"
    text = f"{mean * unit:{'+' if sign else ''}.{digits}f}"
    return text if math.isnan(deviation) else f"{text} ± {deviation * unit:.{digits}f}"


def table(titles, rows):
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def gates(points):
    """Experiment A: which way of finding retrieval heads finds them."""
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
    return f"{results.questions(keys)} questions a plan and length.\n\n{text}"


def smallest(points):
    """Experiment A: how few retrieval heads are enough."""
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


def needles(points):
    """Experiment B: the grid in numbers."""
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
    return f"{results.questions(grid)} questions a plan and length, % found.\n\n{text}"


def settings(points):
    """The settings that were tried on the validation split, and what became of them."""
    keys = of(points, suite="keys")
    text = []
    for method in ("headkv", "snapkv"):
        own = [p for p in keys if results.parts_of(p["plan"])[0] == method]
        if not own:
            continue
        sizes = sorted({setting_of(p)[0] for p in own})
        chosen = results.chosen_setting(points, method)
        rows = []
        for name, mine in by(own, lambda p: results.named_settings(p["plan"])).items():
            cells = [cell(over_seeds([p for p in mine if setting_of(p) == [size]], share))
                     for size in sizes]
            row = [name.replace("=", " ").replace(",", ", ")] + cells + [cell(over_seeds(mine, share))]
            rows.append([f"**{entry}**" for entry in row] if name == chosen else row)
        text.append(f"{results.METHODS[method]}, keys, % answered exactly on the validation split; "
                    f"{results.questions(own)} questions a point. The chosen setting is bold.\n\n"
                    + table(["setting"] + [f"{size:g} rows" for size in sizes] + ["mean"], rows))
    return "\n\n".join(text)


def budgets(points):
    """Experiment C: rows per head."""
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
        text.append(f"{title}; {results.questions(own)} questions a point.\n\n"
                    + table(["method"] + [f"{size:g} rows" for size in sizes], rows))
    return "\n\n".join(text)


def storage(points):
    """Experiment D: bits."""
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
    return table(["plan", "bits per byte", "more than full", "keys, %", "less full, points",
                  "KV rows kept", "with pages"], rows)


def combined(points):
    """Experiment E: the best at each budget."""
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
    # Methods stand at the budget that their settings were made for, other plans at the one they fit.
    for budget in (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32):
        here = sorted((row for row in rows if budget / 2 * 1.001 < row[0] <= budget * 1.001),
                      key=lambda row: -row[1])
        for _, _, kept, row in here:
            text.append([f"1/{1 / budget:.0f}"] + row + [f"{100 * kept:.2f} %"])
    return table(["bytes, at most", "plan", "keys, %", "less full, points", "KV rows kept"],
                 [["1", "full", cell(over_seeds(full, share)), "", "100 %"]] + text)


TABLES = {"gates": ("gates.json", gates), "smallest": ("gates.json", smallest),
          "needles": ("needles.json", needles), "settings": ("settings.json", settings),
          "budgets": ("budgets.json", budgets),
          "storage": ("storage.json", storage), "combined": ("combined.json", combined)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.ROOT / "bench" / "results")
    parser.add_argument("--page", type=Path, default=results.ROOT / "docs" / "results.md")
    parser.add_argument("--out", type=Path, help="write there instead of over the page")
    arguments = parser.parse_args()
    page = arguments.page.read_text(encoding="utf-8")
    for name, (file, make) in TABLES.items():
        points = results.load(arguments.results / file)
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(page):
            sys.exit(f"{arguments.page} has no <!-- {name} --> … <!-- /{name} -->")
        if points:
            text = make(points)
            page = pattern.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)
    (arguments.out or arguments.page).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
