# SPDX-License-Identifier: Apache-2.0
"""Finds which heads retrieve, by restricting one at a time to sinks and recent rows.

    python ablate_heads.py ../weights/keyfinder

The loss of the answers' digits rises if the restricted head was needed. From the rises it writes
  duo/full_attention_heads.tsv    a gate from 0 to 1 per KV head, a line per layer (DuoAttention)
  duo/config.json                 the sinks and recent rows that the gates were measured with
  headkv/retrieval_heads.json     "layer-head" of each query head to its scores (HeadKV)
Gates are the rises on a logarithmic scale between the least and the greatest. DuoAttention trains
its gates instead; for a model of a few heads, measuring each one is exact enough and quicker.
"""
import argparse
import json
import math
from pathlib import Path

import torch

import data
from checkpoint import load
from evaluate import Attend, draw, measure, streaming_heads


def loss_with(model, samples, streaming, sinks, recent):
    """(share exact, digit loss) with one flag per layer and query head: whether it is restricted."""
    attends = [Attend(torch.tensor(row), sinks, recent) for row in streaming]
    exact, _, asked, loss = measure(model, samples, attends)
    return exact / asked, loss


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="a saved folder; the results go into it")
    p.add_argument("--length", type=int, default=1536)
    p.add_argument("--questions", type=int, default=96)
    p.add_argument("--sinks", type=int, default=16)
    p.add_argument("--recent", type=int, default=128)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--text", help="a file with the King James text; default: the program `bible`")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    model = load(a.model)
    s = model.shape
    group = s.query_heads // s.kv_heads
    # Training text, because the held-out part is for evaluating the choice.
    text, _ = data.split(data.read_kjv(a.text))
    # The facts are farther back than the windows of all layers together reach.
    earliest = max(256, a.length - s.layers * a.recent - 256)
    samples = draw(text, a.length, a.questions, a.seed, earliest=earliest)
    nobody = [[False] * s.query_heads for _ in range(s.layers)]
    exact, base = loss_with(model, samples, nobody, a.sinks, a.recent)
    print(f"no head restricted: {100 * exact:.1f} % exact, loss of a digit {base:.4f}", flush=True)

    def rises(heads, heads_of, texts):
        floor = loss_with(model, samples[:texts], nobody, a.sinks, a.recent)[1]
        table = []
        for layer in range(s.layers):
            row = []
            for head in range(heads):
                streaming = [list(flags) for flags in nobody]
                for q in heads_of(head):
                    streaming[layer][q] = True
                exact, loss = loss_with(model, samples[:texts], streaming, a.sinks, a.recent)
                row.append(max(0.0, loss - floor))
                print(f"layer {layer} head {head}: {100 * exact:5.1f} % exact, loss {loss:.4f}", flush=True)
            table.append(row)
        return table

    print("KV heads", flush=True)
    kv = rises(s.kv_heads, lambda h: range(h * group, (h + 1) * group), len(samples))
    print("query heads", flush=True)
    query = rises(s.query_heads, lambda h: [h], max(1, len(samples) // 2))

    logs = [[math.log(r + 1e-5) for r in row] for row in kv]
    low, high = min(map(min, logs)), max(map(max, logs))
    gates = [[(x - low) / (high - low) for x in row] for row in logs]
    folder = Path(a.model)
    (folder / "duo").mkdir(exist_ok=True)
    (folder / "duo" / "full_attention_heads.tsv").write_text(
        "".join("\t".join(f"{g:.18e}" for g in row) + "\n" for row in gates))
    (folder / "duo" / "config.json").write_text(json.dumps(
        {"sink_size": a.sinks, "recent_size": a.recent, "method": "log of the rise of the answers' digit loss",
         "context_length": a.length, "questions": a.questions, "seed": a.seed}, indent=2) + "\n")
    (folder / "headkv").mkdir(exist_ok=True)
    (folder / "headkv" / "retrieval_heads.json").write_text(json.dumps(
        {f"{i}-{j}": [r] for i, row in enumerate(query) for j, r in enumerate(row)}, indent=0) + "\n")

    for sparsity in (0.25, 0.5, 0.75):
        flags = [[f for f in row for _ in range(group)] for row in streaming_heads(gates, sparsity)]
        exact, loss = loss_with(model, samples, flags, a.sinks, a.recent)
        print(f"duo sparsity {sparsity}: {100 * exact:.1f} % exact, loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
