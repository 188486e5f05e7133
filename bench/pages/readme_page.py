# SPDX-License-Identifier: Apache-2.0
"""The tables of README.md: the demo's, what each method keeps at equal bytes, and times on a CPU."""
import json

import results
from results import by, name_of, of, over_seeds, share
from results_cpu import load_repetitions, number

from .markdown import table
from .performance_page import INTEL, INTEL_TORCH

SHOWN = ["plan search", "HeadKV", "DuoAttention + int4", "DuoAttention", "SnapKV", "Ada-KV", "H2O", "StreamingLLM"]
BUDGETS = [2, 4, 8, 16, 32]


def demo(path):
    """What `compare --json` has written."""
    with open(path, encoding="utf-8") as file:
        run = json.load(file)

    def megabytes(count):
        return f"{count / 1e6:.2f} MB"

    rows = [[f"`{row['plan']}`", row["about"], megabytes(row["kv_bytes"]), f"{row['times_smaller']:.1f}x",
             megabytes(row["kv_bytes_read_per_token"]), f"{row['prefill_ms']:,.0f}", f"{row['decode_ms_per_token']:.2f}",
             f"{row['right']} of {row['questions']}", f"{100 * row['agreement_with_full']:.1f} %"]
            for row in run["plans"]]
    where = f"{run['threads']} threads of {run['cpu']}, {run['date'][:10]}:\n\n" if "cpu" in run else ""
    return where + table(["plan", "what it keeps", "KV cache", "smaller", "read per token", "prefill ms", "decode ms/token",
                          "answers right", "same bytes as full"], rows, left=2)


def frontier(path):
    """% answered exactly at each share of the bytes."""
    run = results.read(path)
    keys = of(run["points"], suite="keys")
    full = of(keys, method="full")
    named = by(keys, name_of)
    rows, deviations = [], []
    # A setting that is not the published one is written out: "HeadKV, kernel 29, beta 2".
    for name in [name for shown in SHOWN for name in named if f"{name}, ".startswith(f"{shown}, ")]:
        row = [name]
        for budget in BUDGETS:
            own = [point for point in named[name] if point.get("share") == 1 / budget]
            mean, deviation = over_seeds(own, share)
            row.append(f"{100 * mean:.0f}" if own else "")
            deviations += [deviation] if own else []
        rows.append(row)
    lengths = " and ".join(f"{tokens:,}" for tokens in sorted({point["tokens"] for point in keys}))
    return (f"{results.questions(keys, run['settings'])}, {lengths} bytes each; % answered exactly. The full cache answers "
            f"{100 * over_seeds(full, share)[0]:.0f} %; the deviation over seeds is up to {100 * max(deviations):.0f} "
            "points.\n\n" + table(["share of the full cache's bytes"] + [f"1/{budget}" for budget in BUDGETS], rows))


def cpu_speed(ours, theirs):
    """A decode step of each kind."""
    (_, (cases,)), (_, (peers,)) = load_repetitions(ours), load_repetitions(theirs)
    kinds = [("every row, bfloat16", "bf16"), ("every row, int4, one group a row", "int4"),
             ("DuoAttention, half of the heads streaming", "duo"), ("retrieval, 4,096 rows read", "retrieval"),
             ("HeadKV, 4,096 rows a head on average", "headkv")]

    def row(what, entry):
        return [what, f"{number(entry['ms'])} ms", f"{number(entry['ms_p10'])} to {number(entry['ms_p90'])} ms"]

    rows = [row(what, cases[f"decode/{kind}/32x8/64Ki/threads:2"]) for what, kind in kinds]
    rows.append(row("PyTorch, every row, bfloat16", peers["decode/bf16/32x8/64Ki/threads:2"]))
    return table(["decode step", "median", "10th to 90th percentile"], rows)


TABLES = {"demo": (["demo.json"], demo), "frontier": (["combined.json"], frontier),
          "cpu_speed": ([INTEL, INTEL_TORCH], cpu_speed)}
