# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/distributed.md, from bench/shards."""
import json

from .markdown import table

DIVISIONS = {"even": "equally many heads, in their order", "whole": "whole heads, divided by cost",
             "cut": "dear heads cut by rows, messages for nothing", "cut_with_messages": "the same, a part's message {message:g} µs"}


def shards(path):
    results = json.loads(path.read_text(encoding="utf-8"))
    cases = results["cases"]
    ranks = sorted({case["ranks"] for case in cases})
    rows = []
    for pattern in dict.fromkeys(case["pattern"] for case in cases):
        own = {case["ranks"]: case for case in cases if case["pattern"] == pattern}
        for division, words in DIVISIONS.items():
            name = f"{pattern}, {own[ranks[0]]['kv_heads']} KV heads" if division == "even" else ""
            rows.append([name, words.format(message=results["message_us"])]
                        + [f"{own[count]['over_mean'][division]:.2f}" for count in ranks])
    context = (f"`bench/shards/imbalance.py`: sparsity {results['sparsity']:g}, {results['context']:,} tokens, "
               f"{cases[0]['bandwidth'] / 1e9:,.0f} GB/s.")
    return context + "\n\n" + table(["pattern", "", *(f"{count} ranks" for count in ranks)], rows, left=2)


TABLES = {"shards": (["shards.json"], shards)}
