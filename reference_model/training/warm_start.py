# SPDX-License-Identifier: Apache-2.0
"""Initial weights that already contain the two steps of looking something up.

Gradient descent finds them by itself, but may take most of a CPU's budget to do so ("In-context
learning and induction heads", Olsson et al., arXiv:2209.11895). The text, the answers, which heads
are used and how sharply they look are left to training.

1. Layer 0, query head d: looks d + 1 bytes back. Rotary positions make this a matter of two
   constant vectors, the query's rotated back by the distance. The head copies that byte's code into a
   block of the residual stream of its own, so that every position knows the bytes before it.
2. Layers 1 and 2, some KV heads: a query made of the last bytes is compared with keys made of the bytes
   *before* each key's position. Where they agree, the key's position holds what comes next. Only pairs
   of dimensions that rotate slowly are used, so that the distance does not matter.
"""
import math

import torch

CODE = 16    # dimensions of one block


@torch.no_grad()
def warm_start(model, seed=0):
    s = model.shape
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random)
    back = s.query_heads                   # bytes looked back
    first = s.width - back * CODE          # where the blocks begin
    if first < 33:
        raise ValueError(f"width {s.width} is too small for {back} blocks of {CODE} and the bytes' codes")
    half = s.head_dim // 2
    frequency = s.rope_theta ** (-torch.arange(half) / half)

    # A byte's code is in dimensions 1 .. first - 1; dimension 0 is the same for all bytes.
    table = model.model.embed_tokens.weight
    codes = normal(s.vocabulary, first - 1)
    # All codes have equal length; otherwise RMSNorm would scale the constant by the byte, and heads would
    # attend to certain bytes.
    table[:, 1:first] = 0.5 * math.sqrt(first - 1) * codes / codes.norm(dim=1, keepdim=True)
    table[:, first:] = 0
    table[:, 0] = 0.5 * math.sqrt((first - 1) / 2)
    # RMSNorm divides by the root mean square over the whole width.
    norm0 = math.sqrt((0.25 * (first - 1) + 0.25 * (first - 1) / 2) / s.width)
    constant = (table[0, 0] / norm0).item()
    code = 0.5 / norm0

    a = model.model.layers[0].self_attn
    fast, strength = 8, 8.4                # pairs that take part; a neighbour byte gets e^-6
    key = torch.zeros(s.head_dim)
    key[:fast] = strength
    group = s.query_heads // s.kv_heads
    values = torch.zeros(s.head_dim, s.width)
    used = min(s.head_dim, first - 1)
    values[range(used), range(1, used + 1)] = 1 / code
    mix = normal(CODE, s.head_dim) * 0.5 / math.sqrt(used)
    a.k_proj.weight.mul_(0.1)
    a.q_proj.weight.mul_(0.1)
    for h in range(s.kv_heads):
        rows = slice(h * s.head_dim, (h + 1) * s.head_dim)
        a.k_proj.weight[rows, 0] = key / constant
        a.v_proj.weight[rows] = values
    for h in range(s.query_heads):
        angle = -(h + 1) * frequency[:fast]
        query = torch.zeros(s.head_dim)
        query[:fast], query[half:half + fast] = strength * angle.cos(), strength * angle.sin()
        a.q_proj.weight[h * s.head_dim:(h + 1) * s.head_dim, 0] = query / constant
        block = slice(first + h * CODE, first + (h + 1) * CODE)
        columns = slice(h * s.head_dim, (h + 1) * s.head_dim)
        a.o_proj.weight[:, columns].mul_(0.1)
        a.o_proj.weight[block, columns] = mix

    # The size of an entry after layer 1's norm; `own` turns a byte's own code into a block.
    norm1 = math.sqrt((0.375 * (first - 1) + 0.25 * back * CODE) / s.width)
    own = torch.zeros(CODE, first - 1)
    own[:, :used] = mix[:, :used] * 2      # values are 1 where a code is 0.5
    slow = torch.where(frequency * s.max_positions < 0.8)[0]
    slow = torch.cat([slow, slow + half])
    size = 0.5 / norm1                     # of one entry
    for layer, heads in ((1, max(1, s.kv_heads * 3 // 4)), (2, s.kv_heads // 2)):
        if layer >= s.layers:
            break
        a = model.model.layers[layer].self_attn
        for h in range(heads):
            # Sketches of all blocks; a full agreement gives a logit of 30, one byte's share is an eighth.
            sketch = normal(len(slow), back * CODE) / math.sqrt(len(slow))
            gain = math.sqrt(30 * math.sqrt(s.head_dim) / (back * CODE)) / size
            rows = h * s.head_dim + slow
            a.k_proj.weight[h * s.head_dim:(h + 1) * s.head_dim].mul_(0.1)
            a.k_proj.weight[rows, first:] = gain * sketch
            for q in range(h * group, (h + 1) * group):
                a.q_proj.weight[q * s.head_dim:(q + 1) * s.head_dim].mul_(0.1)
                rows_q = q * s.head_dim + slow
                a.q_proj.weight[rows_q, first:s.width - CODE] = gain * sketch[:, CODE:]
                w = a.q_proj.weight[rows_q]
                w[:, 1:first] = gain * sketch[:, :CODE] @ own
                a.q_proj.weight[rows_q] = w
                a.o_proj.weight[:, q * s.head_dim:(q + 1) * s.head_dim].mul_(math.sqrt(2 * s.layers))
