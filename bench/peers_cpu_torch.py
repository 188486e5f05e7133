#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention on the shapes of attention_cpu_bench, timed the same way, in the same layout of
results: bench/compare.py joins both by the names of the cases.

  bench/peers_cpu_torch.py --out torch.json          (needs torch; ./scripts/bench --peers runs it)
  bench/compare.py torch.json ours.json --names torch ours

scaled_dot_product_attention in bfloat16, half and float32, head_dim 128; contiguous [heads, rows,
head_dim], its best layout; a prefill's mask is made beforehand. As in our bench the caches are cold:
calls go round over keys and values that together are four times the third-level cache. For fewer KV
heads than query heads it is called in every way a caller has, and the fastest counts: `gqa`
(enable_gqa), `folded` (decode: the query heads of a group as rows of one head), `repeat` (keys and
values expanded beforehand, which takes as many times the memory). Results are checked against
float64. Nothing is appended: ours takes up a row with each step.
"""
import sys

from peers_cpu import CHUNK, HEAD_DIM, KI, arguments, l3_bytes, least_samples, refused, run, samples_of, timed

# Limit of |out - reference| / |reference|, as in our bench.
MOST_ERROR = 6e-3


def cases(quick):
    """(name in our bench without threads, type, query heads, KV heads, queries, rows)"""
    for q_heads, kv_heads in [(32, 8)] if quick else [(32, 8), (32, 32)]:
        for rows in [16 * KI] if quick else [4 * KI, 16 * KI, 64 * KI]:
            for kind in ("bf16", "f16", "f32"):
                yield (f"decode/{kind}/{q_heads}x{kv_heads}/{rows // KI}Ki", kind, q_heads, kv_heads,
                       1, rows)
    for q_heads, kv_heads in [(32, 8)] if quick else [(32, 8), (32, 32)]:
        for rows in [4 * KI] if quick else [4 * KI, 16 * KI]:
            for kind in ("bf16", "f16", "f32"):
                yield (f"prefill/{kind}/{q_heads}x{kv_heads}/{rows // KI}Ki", kind, q_heads,
                       kv_heads, CHUNK, rows)


def ways(torch, q, k, v, mask):
    """{how: function that attends} for each way to attend with fewer KV heads; q [1, heads, tokens, d]."""
    attention = torch.nn.functional.scaled_dot_product_attention
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return {"plain": lambda: attention(q, k, v, attn_mask=mask)}
    found = {"gqa": lambda: attention(q, k, v, attn_mask=mask, enable_gqa=True)}
    if q.shape[2] == 1:
        folded = q.view(1, k.shape[1], group, HEAD_DIM)
        found["folded"] = lambda: attention(folded, k, v).view(q.shape)
    return found


def error_of(torch, out, q, k, v):
    """The largest error, for a few query heads of the last query, against float64."""
    group = q.shape[1] // k.shape[1]
    worst = 0.0
    for head in (0, q.shape[1] - 1):
        keys, values = (t[0, head // group].double() for t in (k, v))
        weights = torch.softmax(keys @ q[0, head, -1].double() / HEAD_DIM**0.5, 0)
        right = weights @ values
        off = (out[0, head, -1].double() - right).norm() / right.norm()
        worst = max(worst, off.item())
    return worst


def measure(torch, args, cold_bytes, case, threads):
    name, kind, q_heads, kv_heads, queries, rows = case
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[kind]
    bytes_read = 2.0 * kv_heads * rows * HEAD_DIM * dtype.itemsize
    layers = int(max(1, -(-cold_bytes // bytes_read))) if queries == 1 else 1
    mask = None
    if queries > 1:
        mask = torch.ones(queries, rows, dtype=torch.bool).tril(rows - queries)

    def numbers(heads, tokens):
        even = torch.rand(1, heads, tokens, HEAD_DIM)
        return even.sub_(0.5).mul_(12**0.5).to(dtype)

    results = []

    def time_ways(tensors, hows, renamed=None):
        made = [ways(torch, *layer, mask) for layer in tensors]
        for how in hows or made[0]:
            entry = {"name": name, "backend": "sdpa", "how": renamed or how, "layers": len(tensors),
                     "rows": rows}
            try:
                entry["error"] = error_of(torch, made[0][how](), *tensors[0])
                if not entry["error"] <= MOST_ERROR:
                    raise RuntimeError(f"wrong result, off by {entry['error']:.3g}")
            except (RuntimeError, TypeError) as why:  # an older version may not have enable_gqa
                results.append(refused(entry, why))
                continue
            for count in threads:
                torch.set_num_threads(count)
                times = samples_of([way[how] for way in made], args.seconds, least_samples(queries, args.quick))
                results.append(timed(entry, name, count, times, q_heads, queries, rows, bytes_read))

    tensors = [(numbers(q_heads, queries), numbers(kv_heads, rows), numbers(kv_heads, rows))
               for _ in range(layers)]
    time_ways(tensors, None)
    if kv_heads < q_heads:
        group = q_heads // kv_heads
        expanded = [(q, *(t.repeat_interleave(group, dim=1) for t in (k, v)))
                    for q, k, v in tensors[:max(1, -(-layers // group))]]
        time_ways(expanded, None, renamed="repeat")
    return results


def main():
    args = arguments(__doc__)
    try:
        import torch
    except ImportError:
        sys.exit("peers_cpu_torch.py: there is no PyTorch here (pip install torch, or name the Python that has it)")
    torch.manual_seed(1)
    cold = 4 * l3_bytes()
    with torch.inference_mode():
        run(args, cases(args.quick), lambda case, threads: measure(torch, args, cold, case, threads),
            {"torch": torch.__version__, "target": torch.backends.cpu.get_cpu_capability()})


if __name__ == "__main__":
    main()
