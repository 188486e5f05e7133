# SPDX-License-Identifier: Apache-2.0
"""Measures how many questions a model answers exactly, on held-out text with fresh names.

    python evaluate.py ../weights/keyfinder --lengths 512 2048 8192 --questions 200
    python evaluate.py ../weights/keyfinder --lengths 2048 --bits 4
    python evaluate.py ../weights/keyfinder --lengths 2048 --streaming all --earliest 1024
    python evaluate.py ../weights/keyfinder --lengths 2048 --streaming duo --sparsity 0.5

An answer counts if all its 27 bytes are what greedy decoding writes: each byte is the likeliest
after the true bytes before it. A length is that of text, question and answer together. Up to 16
questions are asked of one text, each as if it were the only one. Texts are drawn from (seed, length,
number), so two runs with other settings ask the same questions.
"""
import argparse
import math
import time

import numpy as np
import torch
import torch.nn.functional as F

import data
from checkpoint import load


def fake_quantize(x, bits, group):
    """Affine round trip of each row in groups of `group` values: what a quantised cache returns."""
    shape = x.shape
    x = x.float().reshape(*shape[:-1], -1, group)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / (2 ** bits - 1)).clamp_min(1e-8)
    return (((x - low) / scale).round() * scale + low).reshape(shape)


class Attend:
    """Attention of one layer in which some heads only see the sinks and the latest rows.

    `streaming`: one flag per query head. `layout` says which rows are the text and which belong to
    one of the questions asked of it; a question does not see the others."""

    def __init__(self, streaming, sinks=16, recent=128, bits=0, group=32):
        self.streaming, self.sinks, self.recent, self.bits, self.group = streaming, sinks, recent, bits, group
        self.layout = None

    def __call__(self, q, k, v):
        q, k = q.to(v.dtype), k.to(v.dtype)    # rotation may leave them in float32
        if self.bits:
            k, v = (fake_quantize(x, self.bits, self.group).to(q.dtype) for x in (k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        positions, question, body = self.layout
        rows, tokens = torch.arange(q.shape[2]), q.shape[2]
        out = torch.empty_like(q)
        full, narrow = torch.where(~self.streaming)[0], torch.where(self.streaming)[0]

        def attend(heads, first, last, p, window):
            """Queries first .. last - 1 over the rows p."""
            t = rows[first:last, None]
            sees = (positions[p] <= positions[t]) & ((question[p] < 0) | (question[p] == question[t]))
            if window:
                sees &= (positions[p] > positions[t] - self.recent) | (positions[p] < self.sinks)
            out[:, heads, first:last] = F.scaled_dot_product_attention(
                q[:, heads, first:last], k[:, heads][:, :, p], v[:, heads][:, :, p], attn_mask=sees)

        if len(full):
            out[:, full, :body] = F.scaled_dot_product_attention(
                q[:, full, :body], k[:, full, :body], v[:, full, :body], is_causal=True)
            attend(full, body, tokens, rows, False)
        if len(narrow):
            for first in range(0, body, 512):
                begin = max(0, first - self.recent + 1)    # rows before it are seen as sinks alone
                last = min(body, first + 512)
                attend(narrow, first, last, torch.cat([rows[:min(self.sinks, begin)], rows[begin:last]]), True)
            begin = max(0, body - self.recent)
            attend(narrow, body, tokens, torch.cat([rows[:min(self.sinks, begin)], rows[begin:]]), True)
        return out


def draw(text, length, count, seed, two_step=False, earliest=None, per_text=16):
    """Texts with at least `count` questions in all, `per_text` of each at most."""
    samples = []
    while sum(len(s.answers) for s in samples) < count:
        rng = np.random.default_rng([seed, length, len(samples)])
        samples.append(data.evaluation_sample(rng, text, length, per_text, two_step, earliest))
    return samples


@torch.no_grad()
def measure(model, samples, attends=None):
    """(exact answers, answers with the right key, questions, mean loss of a digit of the answers)."""
    exact, right_keys, asked, digit_loss = 0, 0, 0, 0.0
    if attends is None:
        attends = [Attend(torch.zeros(model.shape.query_heads, dtype=torch.bool)) for _ in range(model.shape.layers)]
    for s in samples:
        tokens = torch.from_numpy(s.tokens.astype(np.int64))[None]
        # The positions of each question and its answer follow directly after the text.
        count = len(s.answers)
        each = (tokens.shape[1] - s.body) // count
        positions = torch.cat([torch.arange(s.body), s.body + torch.arange(each * count) % each])
        question = torch.cat([torch.full((s.body,), -1), torch.arange(each * count) // each])
        for attend in attends:
            attend.layout = positions, question, s.body
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(tokens, positions[None], attends)
            logits = model.lm_head(hidden[0, s.body:]).float()
        for start, text, _ in s.answers:
            at = start - 1 - s.body
            guess = logits[at:at + len(text)].argmax(-1).numpy().astype(np.uint8).tobytes()
            exact += guess == text
            right_keys += guess[data.DIGITS_AT:-1] == text[data.DIGITS_AT:-1]
            digits = torch.tensor(list(text[data.DIGITS_AT:data.DIGITS_AT + 5]))
            digit_loss += F.cross_entropy(logits[at + data.DIGITS_AT:at + data.DIGITS_AT + 5], digits).item()
        asked += count
    return exact, right_keys, asked, digit_loss / asked


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
        exact, right_keys, asked, loss = measure(model, samples, attends)
        share = exact / asked
        error = 196 * math.sqrt(share * (1 - share) / asked)
        print(f"{length:6d} bytes: {exact}/{asked} = {100 * share:.1f} % (+- {error:.1f}) exact, key right given the "
              f"name {100 * right_keys / asked:.1f} %, loss of a digit {loss:.4f}  {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
