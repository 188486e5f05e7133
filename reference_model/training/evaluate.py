# SPDX-License-Identifier: Apache-2.0
"""Measures how many questions a model answers exactly, on held-out text with fresh names.

    python evaluate.py ../weights/keyfinder --lengths 512 2048 8192 --questions 200
    python evaluate.py ../weights/keyfinder --lengths 2048 --bits 4
    python evaluate.py ../weights/keyfinder --lengths 2048 --streaming all --earliest 1024
    python evaluate.py ../weights/keyfinder --lengths 2048 --streaming duo --sparsity 0.5

An answer counts if all its 27 bytes are what greedy decoding writes. A length is that of text,
question and answer together. Every text is drawn from (seed, length, number), so two runs with
other settings ask the same questions.
"""
import argparse
import math
import time

import numpy as np
import torch
import torch.nn.functional as F

import data
from checkpoint import load
from train import exact_answers


def fake_quantize(x, bits, group):
    """Affine round trip of each row in groups of `group` values: what a quantised cache returns."""
    shape = x.shape
    x = x.float().reshape(*shape[:-1], -1, group)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / (2 ** bits - 1)).clamp_min(1e-8)
    return (((x - low) / scale).round() * scale + low).reshape(shape)


class Attend:
    """Attention of one layer in which some heads see only the sinks and the latest rows.

    `streaming`: one flag per query head. Queries are taken in runs to bound the memory of masks."""

    def __init__(self, streaming=None, sinks=16, recent=128, bits=0, group=32, rows=1024):
        self.streaming, self.sinks, self.recent = streaming, sinks, recent
        self.bits, self.group, self.rows = bits, group, rows

    def __call__(self, q, k, v):
        q, k = q.to(v.dtype), k.to(v.dtype)    # rotation leaves them in float32
        if self.bits:
            k, v = (fake_quantize(x, self.bits, self.group).to(q.dtype) for x in (k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = torch.empty_like(q)
        flags = torch.zeros(q.shape[1], dtype=torch.bool) if self.streaming is None else self.streaming
        full, narrow = torch.where(~flags)[0], torch.where(flags)[0]
        if len(full):
            out[:, full] = F.scaled_dot_product_attention(q[:, full], k[:, full], v[:, full], is_causal=True)
        tokens = q.shape[2]
        for first in range(0, tokens if len(narrow) else 0, self.rows):
            last = min(tokens, first + self.rows)
            t = torch.arange(first, last)[:, None]
            begin = max(0, first - self.recent + 1)    # rows before it are seen as sinks alone
            p = torch.cat([torch.arange(min(self.sinks, begin)), torch.arange(begin, last)])
            sees = (p <= t) & ((p > t - self.recent) | (p < self.sinks))
            out[:, narrow, first:last] = F.scaled_dot_product_attention(
                q[:, narrow, first:last], k[:, narrow][:, :, p], v[:, narrow][:, :, p], attn_mask=sees)
        return out


def draw(text, length, count, seed, two_step=False, earliest=None):
    return [data.evaluation_sample(np.random.default_rng([seed, length, i]), text, length, two_step, earliest)
            for i in range(count)]


@torch.no_grad()
def measure(model, samples, attends=None, batch_tokens=8192):
    """(exact answers, mean loss of a digit of the answers) over samples of one length."""
    length = len(samples[0].tokens) - 1
    batch = max(1, batch_tokens // length)
    exact, digit_loss = 0, 0.0
    for i in range(0, len(samples), batch):
        some = samples[i:i + batch]
        tokens = torch.from_numpy(np.stack([s.tokens for s in some]).astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(tokens[:, :-1], attends=attends)
            tail = 32    # the answer's bytes are the last 27
            logits = model.lm_head(hidden[:, -tail:]).float()
        for row, s in zip(logits, some):
            start, text, _ = s.answers[0]
            at = start - 1 - (length - tail)
            guess = row[at:at + len(text)].argmax(-1).numpy().astype(np.uint8).tobytes()
            exact += guess == text
            digits = torch.tensor(list(text[data.DIGITS_AT:data.DIGITS_AT + 5]))
            digit_loss += F.cross_entropy(row[at + data.DIGITS_AT:at + data.DIGITS_AT + 5], digits).item()
    return exact, digit_loss / len(samples)


def read_gates(path):
    with open(path) as f:
        return [[float(x) for x in line.split()] for line in f if line.strip()]


def streaming_heads(gates, sparsity):
    """[layers][KV heads] flags: all but the round((1 - sparsity) * heads) highest gates stream."""
    order = sorted(((-g, i, j) for i, row in enumerate(gates) for j, g in enumerate(row)))
    keep = {(i, j) for _, i, j in order[:round((1 - sparsity) * len(order))]}
    return [[(i, j) not in keep for j in range(len(row))] for i, row in enumerate(gates)]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="a saved folder or a checkpoint.pt")
    p.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    p.add_argument("--questions", type=int, default=200)
    p.add_argument("--two-step", action="store_true", help="ask for the key of the older of two")
    p.add_argument("--bits", type=int, default=0, help="quantise keys and values: 8 or 4")
    p.add_argument("--group", type=int, default=32, help="values of a row that share a scale")
    p.add_argument("--streaming", choices=["none", "all", "duo"], default="none")
    p.add_argument("--gates", help="duo pattern; default: MODEL/duo/full_attention_heads.tsv")
    p.add_argument("--sparsity", type=float, default=0.5)
    p.add_argument("--sinks", type=int, default=16)
    p.add_argument("--recent", type=int, default=128)
    p.add_argument("--earliest", type=int, help="keep the fact asked for within the first so many bytes")
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--text", help="a file with the King James text; default: the program `bible`")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    model = load(a.model)
    s = model.shape
    _, held_out = data.split(data.read_kjv(a.text))

    flags = [[a.streaming == "all"] * s.kv_heads] * s.layers
    if a.streaming == "duo":
        flags = streaming_heads(read_gates(a.gates or f"{a.model}/duo/full_attention_heads.tsv"), a.sparsity)
    group = s.query_heads // s.kv_heads
    attends = [Attend(torch.tensor(row).repeat_interleave(group), a.sinks, a.recent, a.bits, a.group) for row in flags]
    for length in a.lengths:
        began = time.time()
        samples = draw(held_out, length, a.questions, a.seed, a.two_step, a.earliest)
        exact, loss = measure(model, samples, attends)
        share = exact / len(samples)
        error = 196 * math.sqrt(share * (1 - share) / len(samples))
        print(f"{length:6d} bytes: {exact}/{len(samples)} = {100 * share:.1f} % (+- {error:.1f})  loss of a digit "
              f"{loss:.4f}  {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
